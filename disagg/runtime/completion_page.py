"""Completion pages: words of shared memory that a process sets when its work has finished, for others of its machine to poll.

A reader sees a word within a microsecond after it is set, without a message. A message names the word and its value beforehand.
Every use of a word has a unique value, so that an old one is never taken for a new one. A word that is set again before it was
read is lost, which the protocol allows for.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os

import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.errors import RemoteProtocolError

NUM_WORDS = 512
"""Uses of other words before a word is used again."""
_NBYTES = NUM_WORDS * 8
_F_SEAL_FUTURE_WRITE = 0x10
"""Existing mappings stay writable, new ones are not. Python's `fcntl` has no name for it yet."""


class CompletionPage:
    """The writing side. A process that gets `fileno` can map the memory for reading, and cannot shrink it."""

    def __init__(self, descriptor: int, memory: mmap.mmap) -> None:
        self._descriptor = descriptor
        self._words: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
        self._values = itertools.count(1)

    @classmethod
    def make(cls) -> CompletionPage | None:
        """A new page, or `None` if the system cannot keep others from writing to it (Linux before 5.1)."""
        try:
            descriptor = os.memfd_create("disagg-completions", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, _NBYTES)
            memory = mmap.mmap(descriptor, _NBYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            os.close(descriptor)
            return None
        return cls(descriptor, memory)

    def fileno(self) -> int:
        return self._descriptor

    def signal(self, completion: _native.Flag | _native.CudaEvent) -> tuple[_native.CompletionSignal, tuple[int, int]]:
        """A signal that sets a word of this page once `completion` is done, and `(index, value)` of the word."""
        value = next(self._values)
        index = value % NUM_WORDS
        return _native.CompletionSignal(completion, self._words, index, value), (index, value)

    def close(self) -> None:
        """Close the descriptor. The memory stays as long as a mapping exists."""
        os.close(self._descriptor)


class CompletionPageView:
    """The reading side."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    @classmethod
    def of(cls, descriptor: int) -> CompletionPageView | None:
        """The page of another process. `None` if it has another size, or could be shrunk, which would kill its readers."""
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != _NBYTES:
                return None
            memory = mmap.mmap(descriptor, _NBYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        return cls(np.frombuffer(memory, np.uint64))

    def word(self, index: int, value: int) -> _native.CompletionWord:
        """The word at `index`, to poll for `value`. Raises `RemoteProtocolError` if the page has no such word."""
        if index >= len(self._words):
            raise RemoteProtocolError(f"completion page: expected a word below {len(self._words)}, found {index}")
        return _native.CompletionWord(self._words, index, value)
