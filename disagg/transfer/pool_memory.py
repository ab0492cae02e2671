"""A manager's pools, and the work done in them: packing, unpacking, checksums. Kernels do it on a GPU, the compiled core on
the host. Nothing starts on a GPU before it is needed.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from disagg.backends.base import StagingShape
from disagg.backends.cuda.packer import GpuMover, GpuShapes, GpuWork, GpuWorkList
from disagg.core import _native
from disagg.core.copies import Addresses
from disagg.core.errors import ConfigError
from disagg.core.memory import Device, MemoryRegion
from disagg.core.spans import SpanBatch, SpanShape

GPU_STAGING = StagingShape(pack_below=4 << 20, slot_nbytes=32 << 20, window=4, num_lent=4, spares=0, at_once=1)
"""Measured, see `docs/benchmarks/gpu.md`."""
SPIN_S = 5e-3
"""Most work on a GPU ends within that, and the shortest sleep costs as much as a slot."""


class PoolMemory:
    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self.regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self.regions]
        self._movers: dict[int, GpuMover] = {}
        self._lock = threading.Lock()

    @property
    def has_gpu(self) -> bool:
        return any(region.device.kind == "cuda" for region in self.regions)

    @property
    def spin_s(self) -> float:
        """How long to poll work without a sleep."""
        return SPIN_S if self.has_gpu else 0.0

    @property
    def device(self) -> Device | None:
        """`None` if there are several."""
        devices = {region.device for region in self.regions}
        return next(iter(devices)) if len(devices) == 1 else None

    def staging(self, shape: StagingShape, *, pack_below: int | None = None, nbytes: int | None = None) -> StagingShape:
        """How an engine that stages as `shape` does so here. `pack_below` replaces the threshold, and `nbytes` the memory.
        Raises `ConfigError` for less memory than two slots, and if pools on several devices, which are never packed, should be.
        """
        if self.has_gpu and shape.pack_below:
            shape = GPU_STAGING if self.device is not None else StagingShape(pack_below=0)
        if pack_below and self.has_gpu and self.device is None:
            raise ConfigError(f"pack_below: expected 0 for pools on several devices, found {pack_below}")
        if pack_below is not None:
            shape = dataclasses.replace(shape, pack_below=pack_below)
        return shape.within(nbytes) if nbytes is not None and shape.pack_below else shape

    def allocate_on_device(self, nbytes: int) -> MemoryRegion | None:
        """Memory on the GPU of the pools, freed by `close`; `None` on the host. Raises `BackendUnavailable` if the GPU cannot
        be used, `BackendError` if it has no room.
        """
        if not self.has_gpu or self.device is None:
            return None
        return MemoryRegion(self.mover(self.device.index).allocate(nbytes), nbytes, self.device)

    def mover(self, ordinal: int) -> GpuMover:
        """Raises `BackendUnavailable` if the kernels cannot run."""
        with self._lock:
            if ordinal not in self._movers:
                self._movers[ordinal] = GpuMover(ordinal)
            return self._movers[ordinal]

    def packer(self, shapes: Sequence[SpanShape]) -> GpuPacker | None:
        """`None` if the compiled core packs these span classes."""
        if not self.has_gpu or self.device is None:
            return None
        return GpuPacker(self.mover(self.device.index), shapes)

    def digest(self, layers: Any, bases: Addresses, runs: Any, axes: Any, **what: Any) -> int:
        """As `_native.digest`. All bases are on one device."""
        if len(bases):
            index = bisect.bisect_right(self._starts, int(bases[0])) - 1
            device = self.regions[max(index, 0)].device
            if device.kind == "cuda":
                return self.mover(device.index).digest(layers, bases, runs, axes, **what)
        return _native.digest(layers, bases, runs, axes, **what)

    def close(self) -> None:
        with self._lock:
            for mover in self._movers.values():
                mover.close()
            self._movers.clear()


class GpuPacker:
    """Span classes between a peer's memory and this GPU's."""

    def __init__(self, mover: GpuMover, shapes: Sequence[SpanShape]) -> None:
        self._mover = mover
        self._shapes = mover.prepare(shapes)

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self._shapes.shapes

    def stream(self, batch: SpanBatch) -> GpuStream:
        return GpuStream(self._mover, self._shapes, batch)


class GpuStream:
    """Uploaded with its first part. Used by one thread at a time."""

    def __init__(self, mover: GpuMover, shapes: GpuShapes, batch: SpanBatch) -> None:
        self._mover, self._shapes, self._batch = mover, shapes, batch
        self.total = batch.total_nbytes
        self._order: GpuWorkList | None = None

    @property
    def num_pieces(self) -> int:
        return len(self._batch)

    def gather(self, offset: int, nbytes: int, address: int) -> GpuWork:
        return self._mover.gather(self._uploaded(), offset, nbytes, address)

    def scatter(self, offset: int, nbytes: int, address: int) -> GpuWork:
        return self._mover.scatter(self._uploaded(), offset, nbytes, address)

    def _uploaded(self) -> GpuWorkList:
        if self._order is None:
            self._order = self._mover.upload(self._shapes, self._batch)
        return self._order

    def __del__(self) -> None:
        if self._order is not None:
            self._mover.release(self._order)
