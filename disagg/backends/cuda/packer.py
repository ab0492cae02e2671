"""Work inside one GPU: pieces packed into a slot and unpacked from it, and digests, by the kernels of `kernels.cu`.

Packing and unpacking are started, and go on by themselves on a stream of their own; whoever started them asks when they are
done. A digest is done on return: what it waits for is in native code, without the GIL and without holding up the others.
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

from disagg.backends.cuda.driver import KERNEL_SOURCE, Buffer, CudaError, Gpu, Queue, take_buffer
from disagg.backends.cuda.work_list import ShapeTable, encode_order, encode_shapes, order_nbytes
from disagg.core import _native
from disagg.core.copies import Addresses
from disagg.core.errors import BackendError
from disagg.core.spans import SpanBatch, SpanShape

Ints = npt.NDArray[np.int64]

BLOCKS, THREADS = 64, 1024
"""Of a gather or scatter: three times as fast as the wire, for half of the multiprocessors, a slot at a time."""
TILE = 16 << 10
DIGEST_BLOCKS, DIGEST_THREADS, DIGEST_CHUNK = 264, 256, 4096
SMALL_BUFFER, NUM_SMALL_BUFFERS = 1 << 18, 8
"""Bytes of the buffers that there are from the start; others are made as they are needed, and kept."""

_MASK = 2**64 - 1
_LAYER_AXIS, _TOKEN_AXIS, _HALF_AXIS, _FIRST_INNER_AXIS = range(4)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, axis: int) -> int:
    """What the weights of an axis are made from (`csrc/digest.hpp`)."""
    return _mix((seed + (axis + 1) * 0xD1B54A32D192ED03) & _MASK)


@dataclass(frozen=True, eq=False)
class GpuShapes:
    """Span classes whose table is on the GPU."""

    table: ShapeTable
    address: int

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.table.shapes


@dataclass(frozen=True, eq=False)
class GpuOrder:
    """A request over span classes, uploaded."""

    shapes: GpuShapes
    order: _native.WorkList
    buffer: Buffer


class GpuWork:
    """Kernels that were started, and the event behind the last of them."""

    def __init__(self, mover: GpuMover, event: int, sign: _native.CudaEvent) -> None:
        self._mover = mover
        self._event: int | None = event
        self.sign = sign

    def query(self) -> bool:
        """Whether they are done; raises `BackendError` where the GPU has failed."""
        if self._event is not None and self._mover.is_past(self._event):
            self._event = None
        return self._event is None


class GpuMover:
    """The kernels on one GPU. Raises `BackendUnavailable` without a driver, the bindings, or that GPU."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        self.ordinal = ordinal
        self._lock = threading.RLock()
        self._allocations: list[int] = []
        self._buffers: list[Buffer] = []
        self._free: list[Buffer] = []
        self._events: list[int] = []
        self._closed = False
        self._queue, self._sums = Queue(self.gpu), Queue(self.gpu)
        with self.gpu.current():
            self._module, self._kernels = self.gpu.compile(KERNEL_SOURCE.read_text(), ["move_spans", "digest_box"])
            self._free += [self._buffer(SMALL_BUFFER) for _ in range(NUM_SMALL_BUFFERS)]

    def allocate(self, nbytes: int) -> int:
        """The address of memory on this GPU, which is given back by `close`."""
        with self._lock, self._current():
            self._allocations.append(int(self.gpu.call("cuMemAlloc", nbytes)))
            return self._allocations[-1]

    def prepare(self, shapes: Sequence[SpanShape]) -> GpuShapes:
        """Span classes one side of which is on this GPU. The other is never touched."""
        table = encode_shapes(shapes, lambda addresses, _nbytes, _side: addresses)
        with self._lock, self._current():
            address = self.gpu.table(table.words)
        shapes_ = GpuShapes(table, address)
        weakref.finalize(shapes_, self._free_table, address).atexit = False
        return shapes_

    def _free_table(self, address: int) -> None:
        """Nobody has the span classes any more, nor a request over them."""
        with self._lock:
            if not self._closed:
                with self.gpu.current(), suppress(CudaError):
                    self.gpu.free(address)

    def upload(self, shapes: GpuShapes, batch: SpanBatch) -> GpuOrder:
        """A request, to be packed or unpacked in parts; `release` it afterwards."""
        with self._lock:
            buffer = self._take(order_nbytes(batch))
        try:
            nbytes = encode_order(batch, shapes.table, tile=TILE, out=buffer.words)
        except BaseException:
            with self._lock:
                self._free.append(buffer)
            raise
        try:
            self._queue.upload(buffer, nbytes)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: packing: {error}") from error
        return GpuOrder(shapes, batch.core, buffer)

    def release(self, order: GpuOrder) -> None:
        """Nothing more is asked of a request, and what was is done."""
        with self._lock:
            self._free.append(order.buffer)

    def gather(self, order: GpuOrder, offset: int, nbytes: int, address: int) -> GpuWork:
        """Start to copy the request's bytes `[offset, offset + nbytes)`, in the order of the source, to `address` on.

        Raises `IndexError` where the request does not have them, `BackendError` where the GPU fails.
        """
        return self._move(order, offset, nbytes, (0, address))

    def scatter(self, order: GpuOrder, offset: int, nbytes: int, address: int) -> GpuWork:
        """Start to copy what lies from `address` on to where the request's bytes `[offset, offset + nbytes)` belong; raises as
        `gather` does.
        """
        return self._move(order, offset, nbytes, (address, 0))

    def _move(self, order: GpuOrder, offset: int, nbytes: int, linear: tuple[int, int]) -> GpuWork:
        if not 0 <= offset < offset + nbytes <= order.order.total_nbytes:
            total = order.order.total_nbytes
            raise IndexError(f"stream of {total} bytes: expected a range of it, found [{offset}, +{nbytes})")
        tiles, high = order.order.tiles(offset, offset + nbytes), offset + nbytes
        address = order.buffer.device_address
        arguments = (address, address, 0, order.shapes.address, *tiles, TILE, offset, high, *linear)
        blocks = min(BLOCKS, tiles[1] - tiles[0])
        try:
            event = self._take_event()
            self._queue.launch(self._kernels["move_spans"], arguments, blocks=blocks, threads=THREADS, done=event)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: packing: {error}") from error
        return GpuWork(self, event, self._queue.sign(event))

    def _take_event(self) -> int:
        with self._lock:
            if self._events:
                return self._events.pop()
        with self.gpu.current():
            return self.gpu.event()

    def is_past(self, event: int) -> bool:
        """Whether the work before an event is done, which is kept for others then; raises `BackendError` if the GPU fails."""
        try:
            past = self._queue.is_past(event)
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: packing: {error}") from error
        if past:
            with self._lock:
                self._events.append(event)
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
        num_threads: int = 1,  # noqa: ARG002  (the host's)
        by_layer: Addresses | None = None,
        by_row: Addresses | None = None,
    ) -> int:
        """What `_native.digest` gives of the same memory, were it on the host; raises as it does."""
        places = len(by_row) if by_row is not None else int(runs[:, 2].max(initial=0)) + 1
        if itemsize not in (1, 2, 4, 8):
            raise ValueError(f"itemsize: expected 1, 2, 4 or 8, found {itemsize}")
        if len(layers) != len(bases) or (by_layer is not None and len(by_layer) != len(layers)):
            raise ValueError(f"digest: expected a base and a place for each layer, found {len(bases)} bases")
        if (runs[:, 4] < 1).any() or (runs[:, 2] < 0).any() or (runs[:, 2] >= places).any():
            raise ValueError("runs: expected lengths of at least 1, and a place for each row")
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
            with self._lock:
                buffer = self._take(words.nbytes)
            buffer.words[: len(words)] = words
            address, host = buffer.device_address, buffer.host_address
            arguments = (
                address + sums.nbytes, len(layers), len(runs), len(inner), units, DIGEST_CHUNK, row_stride, token_stride,
                min(itemsize, 4), _key(seed, _LAYER_AXIS), _key(seed, _TOKEN_AXIS), address, address + 8 * len(layers),
            )  # fmt: skip
            try:
                self._sums.upload(buffer, words.nbytes)
                self._sums.launch(self._kernels["digest_box"], arguments, blocks=DIGEST_BLOCKS, threads=DIGEST_THREADS)
                self.gpu.call("cuMemcpyDtoHAsync", host, address, sums.nbytes, self._sums.stream)
                self.gpu.call("cuStreamSynchronize", self._sums.stream)
                sums[:] = buffer.words[: len(sums)]
            except CudaError as error:
                raise BackendError(f"GPU {self.ordinal}: digest: {error}") from error
            finally:
                with self._lock:
                    self._free.append(buffer)
        if by_layer is not None:
            by_layer += sums[: len(layers)]
        if by_row is not None:
            by_row += sums[len(layers) :]
        return int(sums[: len(layers)].sum(dtype=np.uint64))

    def _take(self, nbytes: int) -> Buffer:
        found = take_buffer(self._free, nbytes)
        if found is not None:
            return found
        try:
            with self.gpu.current():
                return self._buffer(max(SMALL_BUFFER, 1 << (nbytes - 1).bit_length()))
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: no memory for a request of {nbytes} bytes: {error}") from error

    def _buffer(self, nbytes: int) -> Buffer:
        buffer = Buffer(self.gpu, nbytes)
        self._buffers.append(buffer)
        return buffer

    @contextmanager
    def _current(self) -> Iterator[None]:
        """This GPU is the calling thread's within; raises `BackendError` for what the driver refuses."""
        try:
            with self.gpu.current():
                yield
        except CudaError as error:
            raise BackendError(f"GPU {self.ordinal}: {error}") from error

    def close(self) -> None:
        """Give everything back, once what was started has ended; nothing may use the memory any more."""
        with self._lock, suppress(CudaError), self.gpu.current():
            self._closed = True
            for queue in (self._queue, self._sums):
                queue.drain()
            for buffer in self._buffers:
                buffer.free(self.gpu)
            for event in self._events:
                self.gpu.call("cuEventDestroy", event)
            for address in self._allocations:
                self.gpu.free(address)
            self._allocations, self._buffers, self._free, self._events = [], [], [], []
            for queue in (self._queue, self._sums):
                queue.close()
            self.gpu.call("cuModuleUnload", self._module)
        self.gpu.release()
