"""The memory that a manager's pools are in, and the work that is done in it: packing, unpacking, digests.

On a GPU that is the kernels' work (`backends/_device.py`), elsewhere the compiled core's. Nothing starts on a GPU before it
is needed there.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from disagg.backends.base import StagingShape
from disagg.backends.cuda.packer import GpuMover, GpuOrder, GpuShapes, GpuWork
from disagg.core import _native
from disagg.core.copies import Addresses
from disagg.core.errors import BackendError, ConfigError
from disagg.core.memory import Device, MemoryRegion
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape

GPU_STAGING = StagingShape(
    pack_below=4 << 20, slot_nbytes=64 << 20, num_slots=8, num_rings=8, whole_rings=2, spares=4, at_once=1
)
"""For engines that pay for each piece of a GPU's memory (2 to 5 us): as measured, `docs/gpu.md`, which says what it takes."""
GATHERED_NBYTES = 16 << 10
"""Pieces of a gather that is measured: how large they are makes no difference to the kernel."""
TIMEOUT_S = 0.5
SPIN_S = 5e-3
"""How long work on a GPU is looked at without a pause: most of it is done within that, and a sleep that is as short as it gets
costs as much as a slot.
"""


class PoolMemory:
    """Where `regions` are."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self.regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self.regions]
        self._movers: dict[int, GpuMover] = {}
        self._lock = threading.Lock()

    @property
    def has_gpu(self) -> bool:
        """Whether any of it is on a GPU."""
        return any(region.device.kind == "cuda" for region in self.regions)

    @property
    def spin_s(self) -> float:
        """For how long work here is worth looking at without a pause, in seconds."""
        return SPIN_S if self.has_gpu else 0.0

    @property
    def device(self) -> Device | None:
        """The one device that all of it is on, if it is."""
        devices = {region.device for region in self.regions}
        return next(iter(devices)) if len(devices) == 1 else None

    def staging(self, shape: StagingShape, *, pack_below: int | None = None) -> StagingShape:
        """How an engine that packs as `shape` says packs here; `pack_below` is what the server says instead, and then nothing
        is measured.

        Pools on several devices are never packed: raises `ConfigError` where they are told to be.
        """
        if self.has_gpu and shape.pack_below:
            one = dataclasses.replace(GPU_STAGING, measure=shape.measure)
            shape = one if self.device is not None else StagingShape(pack_below=0)
        if pack_below is None:
            return shape
        if pack_below and self.has_gpu and self.device is None:
            raise ConfigError(f"pack_below: expected 0 for pools on several devices, found {pack_below}")
        return dataclasses.replace(shape, pack_below=pack_below, measure=False)

    def beside(self, nbytes: int) -> MemoryRegion | None:
        """Memory on the GPU that the pools are on, which is given back by `close`; `None` where they are on the host.

        Raises `BackendUnavailable` where the GPU cannot be used, `BackendError` where it has no room.
        """
        if not self.has_gpu or self.device is None:
            return None
        return MemoryRegion(self.mover(self.device.index).allocate(nbytes), nbytes, self.device)

    def mover(self, ordinal: int) -> GpuMover:
        """The kernels on a GPU. Raises `BackendUnavailable` where they cannot run."""
        with self._lock:
            if ordinal not in self._movers:
                self._movers[ordinal] = GpuMover(ordinal)
            return self._movers[ordinal]

    def packer(self, shapes: Sequence[SpanShape]) -> GpuPacker | None:
        """What packs or unpacks these span classes; `None` where the compiled core does."""
        if not self.has_gpu or self.device is None:
            return None
        return GpuPacker(self.mover(self.device.index), shapes)

    def gather(self, region: MemoryRegion) -> GpuGather | None:
        """What tells how long packing takes from a region of the GPU that the pools are on; `None` on the host."""
        if not self.has_gpu or self.device is None:
            return None
        return GpuGather(self.mover(self.device.index), region)

    def digest(self, layers: Any, bases: Addresses, runs: Any, axes: Any, **what: Any) -> int:
        """As `_native.digest`, of memory here; all bases are in one region's device."""
        if len(bases):
            index = bisect.bisect_right(self._starts, int(bases[0])) - 1
            device = self.regions[max(index, 0)].device
            if device.kind == "cuda":
                return self.mover(device.index).digest(layers, bases, runs, axes, **what)
        return _native.digest(layers, bases, runs, axes, **what)

    def close(self) -> None:
        """Give back what was started on GPUs."""
        with self._lock:
            for mover in self._movers.values():
                mover.close()
            self._movers.clear()


class GpuPacker:
    """Span classes between a peer's memory and this GPU's, ready to be packed or unpacked."""

    def __init__(self, mover: GpuMover, shapes: Sequence[SpanShape]) -> None:
        self._mover = mover
        self._shapes = mover.prepare(shapes)

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self._shapes.shapes

    def stream(self, batch: SpanBatch) -> GpuStream:
        """A request over `shapes`, packed by `gather`, or unpacked by `scatter`, in parts."""
        return GpuStream(self._mover, self._shapes, batch)


class GpuGather:
    """A `breakeven.Gather` on a GPU: a slot at a time, as less takes hardly less long. As much is kept to pack into from the
    first time on.
    """

    nbytes = GPU_STAGING.slot_nbytes

    def __init__(self, mover: GpuMover, region: MemoryRegion) -> None:
        self._mover, self._region = mover, region
        self._rng = np.random.default_rng(0)

    @cached_property
    def _shapes(self) -> GpuShapes:
        base, rows = np.array([self._region.address], np.uint64), self._region.nbytes // GATHERED_NBYTES
        stride = (GATHERED_NBYTES,) * 2
        shape = SpanShape(base, base, stride, stride, (), GATHERED_NBYTES, False, (rows, rows), (1, 1))
        return self._mover.prepare((shape,))

    @cached_property
    def _scratch(self) -> int:
        return self._mover.allocate(self.nbytes)

    def seconds(self, address: int) -> float:
        """Of packing as many bytes, from `address` on, in no order, from the launch until it is seen to be over. Raises
        `BackendError` where the GPU has no room for it, or has not ended it in `TIMEOUT_S`.
        """
        runs = np.zeros((self.nbytes // GATHERED_NBYTES, 5), np.int64)
        runs[:, 0] = (address - self._region.address) // GATHERED_NBYTES + self._rng.permutation(len(runs))
        runs[:, 4] = 1
        order = self._mover.upload(self._shapes, SpanBatch(self._shapes.shapes, (SpanRuns(0, None, runs),)))
        self._gather(order, GATHERED_NBYTES)  # the upload is over after it
        started = time.perf_counter()
        self._gather(order, self.nbytes)
        elapsed = time.perf_counter() - started
        self._mover.release(order)  # not where a kernel may still read it
        return elapsed

    def _gather(self, order: GpuOrder, nbytes: int) -> None:
        work, until = self._mover.gather(order, 0, nbytes, self._scratch), time.monotonic() + TIMEOUT_S
        while not work.query():
            if time.monotonic() > until:
                raise BackendError(f"packing {nbytes} bytes on a GPU took longer than {TIMEOUT_S} s")
            time.sleep(0)


class GpuStream:
    """A request's bytes in an order that both sides know; uploaded with its first part. Used by one thread at a time."""

    def __init__(self, mover: GpuMover, shapes: GpuShapes, batch: SpanBatch) -> None:
        self._mover, self._shapes, self._batch = mover, shapes, batch
        self.total = batch.total_nbytes
        self._order: GpuOrder | None = None

    @property
    def num_pieces(self) -> int:
        return len(self._batch)

    def gather(self, offset: int, nbytes: int, address: int) -> GpuWork:
        """Pack bytes `[offset, offset + nbytes)` into memory from `address` on."""
        return self._mover.gather(self._uploaded(), offset, nbytes, address)

    def scatter(self, offset: int, nbytes: int, address: int) -> GpuWork:
        """Unpack what lies from `address` on."""
        return self._mover.scatter(self._uploaded(), offset, nbytes, address)

    def _uploaded(self) -> GpuOrder:
        if self._order is None:
            self._order = self._mover.upload(self._shapes, self._batch)
        return self._order

    def __del__(self) -> None:
        if self._order is not None:
            self._mover.release(self._order)
