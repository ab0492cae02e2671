"""Pinned buffers and events of one GPU, kept in a pool for reuse."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from disagg.backends.cuda.driver import Gpu

Words = npt.NDArray[np.uint64]

SMALL_BUFFER = 1 << 18
"""Minimum size of a pooled buffer in bytes."""
HEADER_WORDS = 4
"""Words before the columns of a batch: see `kernels.cu`."""


class Buffer:
    """`nbytes` of pinned host memory, the same number of bytes on the GPU, and an event that marks their upload.

    `words` is the host memory as an array of uint64.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = nbytes
        self.host_address = int(gpu.call("cuMemHostAlloc", nbytes, 0))
        self.device_address = int(gpu.call("cuMemAlloc", nbytes))
        self.uploaded = gpu.event()
        words = (ctypes.c_ubyte * nbytes).from_address(self.host_address)
        self.words: Words = np.frombuffer(memoryview(words), dtype=np.uint64)

    def fill(self, source: Words, destination: Words, nbytes: Words) -> tuple[int, int]:
        """Write part of a batch into the host memory.

        Returns the number of bytes that the part copies, and the number of bytes of the buffer that it fills.
        """
        count, words, start = len(nbytes), self.words, HEADER_WORDS
        words[:start] = 0
        words[start : start + count] = source
        words[start + count : start + 2 * count] = destination
        ends = words[start + 2 * count : start + 3 * count]
        np.cumsum(nbytes, out=ends)
        return int(ends[-1]), batch_nbytes(count)

    def free(self, gpu: Gpu) -> None:
        """Free the memory and the event. Enter `gpu.current()` first."""
        gpu.call("cuEventDestroy", self.uploaded)
        gpu.call("cuMemFreeHost", self.host_address)
        gpu.free(self.device_address)


def batch_nbytes(num_pieces: int) -> int:
    """Bytes of a batch's header and three columns."""
    return 8 * (HEADER_WORDS + 3 * num_pieces)


class BufferPool:
    """Buffers and events of one GPU. Not thread-safe: its owner holds a lock around every call."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._all: list[Buffer] = []
        self._free: list[Buffer] = []
        self._events: list[int] = []

    def preallocate(self, count: int) -> None:
        """Add `count` buffers of `SMALL_BUFFER` bytes."""
        for _ in range(count):
            self._free.append(self._make(SMALL_BUFFER))

    def take(self, nbytes: int) -> Buffer:
        """Return the smallest free buffer of at least `nbytes` bytes, or a new one.

        The size of a new buffer is a power of two. Raises `CudaError` if there is no memory for it.
        """
        best: Buffer | None = None
        for buffer in self._free:
            if buffer.nbytes >= nbytes and (best is None or buffer.nbytes < best.nbytes):
                best = buffer
        if best is None:
            return self._make(max(SMALL_BUFFER, 1 << (nbytes - 1).bit_length()))
        self._free.remove(best)
        return best

    def give_back(self, buffer: Buffer) -> None:
        """Make a buffer free again; no kernel may read it any more."""
        self._free.append(buffer)

    def take_event(self) -> int:
        """Return a free event, or a new one."""
        if self._events:
            return self._events.pop()
        with self._gpu.current():
            return self._gpu.event()

    def give_back_event(self, event: int) -> None:
        """Make an event free again."""
        self._events.append(event)

    def close(self) -> None:
        """Free all buffers and all free events. Enter `gpu.current()` first; raises `CudaError`."""
        for buffer in self._all:
            buffer.free(self._gpu)
        for event in self._events:
            self._gpu.call("cuEventDestroy", event)
        self._all, self._free, self._events = [], [], []

    def _make(self, nbytes: int) -> Buffer:
        with self._gpu.current():
            buffer = Buffer(self._gpu, nbytes)
        self._all.append(buffer)
        return buffer
