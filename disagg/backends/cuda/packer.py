"""Packing, unpacking and checksums on one GPU (`kernels.cu`). `gather` and `scatter` return work to poll; `digest`
waits without the GIL.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.backends.cuda.buffers import Buffer, BufferPool
from disagg.backends.cuda.driver import KERNEL_SOURCE, CudaError, Gpu
from disagg.backends.cuda.queue import Queue
from disagg.backends.cuda.work_list import ShapeTable, encode_shapes, encode_work_list, work_list_nbytes
from disagg.core import _native
from disagg.core.copies import Addresses
from disagg.core.errors import BackendError
from disagg.core.spans import SpanBatch, SpanShape

Ints = npt.NDArray[np.int64]

BLOCKS, THREADS = 64, 1024
"""Three times the speed of the wire, on half of the multiprocessors."""
TILE = 16 << 10
"""Bytes that a warp takes at a time."""
DIGEST_BLOCKS, DIGEST_THREADS, DIGEST_CHUNK = 264, 256, 4096
NUM_SMALL_BUFFERS = 8
"""Allocated at the start; the pool adds others."""

_MASK = 2**64 - 1
_LAYER_AXIS, _TOKEN_AXIS, _HALF_AXIS, _FIRST_INNER_AXIS = range(4)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, axis: int) -> int:
    return _mix((seed + (axis + 1) * 0xD1B54A32D192ED03) & _MASK)


@dataclass(frozen=True, eq=False)
class GpuShapes:
    table: ShapeTable
    address: int

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.table.shapes


@dataclass(frozen=True, eq=False)
class GpuWorkList:
    shapes: GpuShapes
    native: _native.WorkList
    buffer: Buffer


class GpuWork:
    def __init__(self, mover: GpuMover, event: int, completion: _native.CudaEvent) -> None:
        self._mover = mover
        self._event: int | None = event
        self.completion = completion

    def query(self) -> bool:
        if self._event is not None and self._mover.is_past(self._event):
            self._event = None
        return self._event is None


class GpuMover:
    """Raises `BackendUnavailable` without a driver or the bindings, `CudaError` if the GPU does not exist."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        self.ordinal = ordinal
        self._lock = threading.RLock()  # reentrant: garbage collection may call `release` and `_free_table` in its holder
        self._allocations: list[int] = []
        self._pool = BufferPool(self.gpu)
        self._closed = False
        self._queue, self._checksums = Queue(self.gpu), Queue(self.gpu)
        with self.gpu.current():
            self._module, self._kernels = self.gpu.compile(KERNEL_SOURCE.read_text(), ["move_spans", "digest_box"])
            self._pool.preallocate(NUM_SMALL_BUFFERS)

    def allocate(self, nbytes: int) -> int:
        """Memory on this GPU, freed by `close`."""
        with self._lock, self._current():
            self._allocations.append(int(self.gpu.call("cuMemAlloc", nbytes)))
            return self._allocations[-1]

    def prepare(self, shapes: Sequence[SpanShape]) -> GpuShapes:
        """Upload the table. The kernels touch only the side that is on this GPU."""
        table = encode_shapes(shapes, lambda addresses, _nbytes, _side: addresses)
        with self._lock, self._current():
            address = self.gpu.table(table.words)
        shapes_ = GpuShapes(table, address)
        weakref.finalize(shapes_, self._free_table, address).atexit = False
        return shapes_

    def _free_table(self, address: int) -> None:
        """Called once neither the span classes nor a work list over them is in use."""
        with self._lock:
            if not self._closed:
                with self.gpu.current(), suppress(CudaError):
                    self.gpu.free(address)

    def upload(self, shapes: GpuShapes, batch: SpanBatch) -> GpuWorkList:
        """Upload a request's work list. Pass it to `release` afterwards."""
        buffer = self._take(work_list_nbytes(batch))
        try:
            nbytes = encode_work_list(batch, shapes.table, tile=TILE, out=buffer.words)
        except BaseException:
            self._give_back(buffer)
            raise
        try:
            self._queue.upload(buffer, nbytes)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: packing: {error}") from error
        return GpuWorkList(shapes, batch.core, buffer)

    def release(self, work_list: GpuWorkList) -> None:
        """All work over it must be done."""
        self._give_back(work_list.buffer)

    def gather(self, work_list: GpuWorkList, offset: int, nbytes: int, address: int) -> GpuWork:
        """Start to pack bytes `[offset, offset + nbytes)` of the request's stream into memory at `address`. Raises
        `IndexError` for a range outside the stream, `BackendError` if the GPU fails.
        """
        return self._move(work_list, offset, nbytes, (0, address))

    def scatter(self, work_list: GpuWorkList, offset: int, nbytes: int, address: int) -> GpuWork:
        """The reverse of `gather`; raises as it does."""
        return self._move(work_list, offset, nbytes, (address, 0))

    def _move(self, work_list: GpuWorkList, offset: int, nbytes: int, linear: tuple[int, int]) -> GpuWork:
        total, high = work_list.native.total_nbytes, offset + nbytes
        if not 0 <= offset < high <= total:
            raise IndexError(f"stream: expected a range within {total} bytes, found [{offset}, +{nbytes})")
        tiles, address = work_list.native.tiles(offset, high), work_list.buffer.device_address
        arguments = (address, address, 0, work_list.shapes.address, *tiles, TILE, offset, high, *linear)
        blocks = min(BLOCKS, tiles[1] - tiles[0])
        try:
            with self._lock:
                event = self._pool.take_event()
            self._queue.launch(self._kernels["move_spans"], arguments, blocks=blocks, threads=THREADS, done=event)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: packing: {error}") from error
        return GpuWork(self, event, self._queue.completion(event))

    def is_past(self, event: int) -> bool:
        """If the work before an event is done, the event goes back to the pool. Raises `BackendError`."""
        try:
            past = self._queue.is_past(event)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: packing: {error}") from error
        if past:
            with self._lock:
                self._pool.give_back_event(event)
        return past

    def digest(
        self,
        layers: Ints,
        bases: Addresses,
        runs: Ints,
        axes: Sequence[tuple[int, int, int]],
        *,
        row_stride: int,
        token_stride: int,
        itemsize: int,
        seed: int,
        num_threads: int = 1,  # noqa: ARG002  (only the host uses threads)
        by_layer: Addresses | None = None,
        by_row: Addresses | None = None,
    ) -> int:
        """What `_native.digest` would return for the same bytes in host memory; raises as it does."""
        places = len(by_row) if by_row is not None else int(runs[:, 2].max(initial=0)) + 1
        if itemsize not in (1, 2, 4, 8):
            raise ValueError(f"itemsize: expected 1, 2, 4 or 8, found {itemsize}")
        if len(layers) != len(bases) or (by_layer is not None and len(by_layer) != len(layers)):
            raise ValueError(f"digest: expected a base and a place for each of {len(layers)} layers, found {len(bases)} bases")
        if (runs[:, 4] < 1).any() or (runs[:, 2] < 0).any() or (runs[:, 2] >= places).any():
            raise ValueError(f"runs: expected lengths of at least 1 and places in [0, {places})")
        inner = sorted(((c, s, g, _key(seed, _FIRST_INNER_AXIS + i)) for i, (c, s, g) in enumerate(axes)), key=lambda a: -a[1])
        if itemsize == 8:
            inner.append((2, 4, 0, _key(seed, _HALF_AXIS)))
        units = math.prod(axis[0] for axis in inner)
        if not len(layers) or not len(runs) or not units:
            return 0
        if units >= 2**32:
            raise ValueError(f"digest: expected fewer than 2**32 elements in a position, found {units}")
        sums = np.zeros(len(layers) + places, np.uint64)
        words = np.concatenate(
            [
                sums,
                layers.astype(np.uint64),
                bases,
                np.array(inner, dtype=np.uint64).ravel(),
                np.concatenate([[0], np.cumsum(runs[:, 4])]).astype(np.uint64),
                runs[:, :4].astype(np.uint64).ravel(),
            ]
        )
        with self.gpu.current():
            buffer = self._take(words.nbytes)
            buffer.words[: len(words)] = words
            address, host = buffer.device_address, buffer.host_address
            arguments = (
                address + sums.nbytes, len(layers), len(runs), len(inner), units, DIGEST_CHUNK, row_stride, token_stride,
                min(itemsize, 4), _key(seed, _LAYER_AXIS), _key(seed, _TOKEN_AXIS), address, address + 8 * len(layers),
            )  # fmt: skip
            try:
                self._checksums.upload(buffer, words.nbytes)
                self._checksums.launch(self._kernels["digest_box"], arguments, blocks=DIGEST_BLOCKS, threads=DIGEST_THREADS)
                self.gpu.call("cuMemcpyDtoHAsync", host, address, sums.nbytes, self._checksums.stream)
                self.gpu.call("cuStreamSynchronize", self._checksums.stream)
                sums[:] = buffer.words[: len(sums)]
            except CudaError as error:
                raise BackendError(f"GPU {self.ordinal}: digest: {error}") from error
            finally:
                self._give_back(buffer)
        if by_layer is not None:
            by_layer += sums[: len(layers)]
        if by_row is not None:
            by_row += sums[len(layers) :]
        return int(sums[: len(layers)].sum(dtype=np.uint64))

    def _take(self, nbytes: int) -> Buffer:
        try:
            with self._lock:
                return self._pool.take(nbytes)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: no memory for a request of {nbytes} bytes: {error}") from error

    def _give_back(self, buffer: Buffer) -> None:
        with self._lock:
            self._pool.give_back(buffer)

    @contextmanager
    def _current(self) -> Iterator[None]:
        try:
            with self.gpu.current():
                yield
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: {error}") from error

    def close(self) -> None:
        """Wait for all started work, then free everything, including what `allocate` returned."""
        with self._lock, suppress(CudaError), self.gpu.current():
            self._closed = True
            for queue in (self._queue, self._checksums):
                queue.drain()
            self._pool.close()
            for address in self._allocations:
                self.gpu.free(address)
            self._allocations = []
            for queue in (self._queue, self._checksums):
                queue.close()
            self.gpu.call("cuModuleUnload", self._module)
        self.gpu.release()
