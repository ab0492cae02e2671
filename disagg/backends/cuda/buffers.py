"""Pinned buffers and events of one GPU, pooled for reuse."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from disagg.backends.cuda.driver import Gpu

Words = npt.NDArray[np.uint64]

SMALL_BUFFER = 1 << 18
"""Minimum bytes of a pooled buffer."""
HEADER_WORDS = 4
"""Words before the columns of a batch (`kernels.cu`)."""


class Buffer:
    """`nbytes` of pinned host memory (`words`), as many bytes on the GPU, and an event that marks their upload."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = nbytes
        with ExitStack() as undo:
            self.device_address = int(gpu.call("cuMemAlloc", nbytes))
            undo.callback(gpu.free, self.device_address)
            self.host_address = int(gpu.call("cuMemHostAlloc", nbytes, 0))
            undo.callback(gpu.call, "cuMemFreeHost", self.host_address)
            self.uploaded = gpu.event()
            undo.pop_all()
        words = (ctypes.c_ubyte * nbytes).from_address(self.host_address)
        self.words: Words = np.frombuffer(memoryview(words), dtype=np.uint64)

    def fill(self, source: Words, destination: Words, nbytes: Words) -> tuple[int, int]:
        count, words, start = len(nbytes), self.words, HEADER_WORDS
        words[:start] = 0
        words[start : start + count] = source
        words[start + count : start + 2 * count] = destination
        ends = words[start + 2 * count : start + 3 * count]
        np.cumsum(nbytes, out=ends)
        return int(ends[-1]), batch_nbytes(count)

    def free(self, gpu: Gpu) -> None:
        """Enter `gpu.current()` first."""
        gpu.call("cuEventDestroy", self.uploaded)
        gpu.call("cuMemFreeHost", self.host_address)
        gpu.free(self.device_address)


def batch_nbytes(num_pieces: int) -> int:
    return 8 * (HEADER_WORDS + 3 * num_pieces)


class BufferPool:
    """Not thread-safe: its owner holds a lock around every call."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._all: list[Buffer] = []
        self._free: list[Buffer] = []
        self._events: list[int] = []

    def preallocate(self, count: int) -> None:
        for _ in range(count):
            self._free.append(self._make(SMALL_BUFFER))

    def take(self, nbytes: int) -> Buffer:
        """The smallest free buffer of at least `nbytes`, or a new one of a power of two. Raises `CudaError`."""
        best: Buffer | None = None
        for buffer in self._free:
            if buffer.nbytes >= nbytes and (best is None or buffer.nbytes < best.nbytes):
                best = buffer
        if best is None:
            return self._make(max(SMALL_BUFFER, 1 << (nbytes - 1).bit_length()))
        self._free.remove(best)
        return best

    def give_back(self, buffer: Buffer) -> None:
        """No kernel may still read it."""
        self._free.append(buffer)

    def take_event(self) -> int:
        if self._events:
            return self._events.pop()
        with self._gpu.current():
            return self._gpu.event()

    def give_back_event(self, event: int) -> None:
        self._events.append(event)

    def close(self) -> None:
        """Enter `gpu.current()` first; raises `CudaError`."""
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
