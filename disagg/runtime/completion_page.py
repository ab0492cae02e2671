"""Boards: words of memory that a process shows to others of its machine, and sets when work of its has ended.

Who looks at a word sees it set within a microsecond, without a message that its writer would have to send first. Which word
of a board is meant, and what it means, messages say beforehand. A word gets a value that no other word or use of it has,
so that an old one is never taken for a new one; one that was set anew before anybody looked is lost, which the protocol
allows for.
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
"""Pieces of work that end after a given one, before its word is used again."""
_NBYTES = NUM_WORDS * 8
_F_SEAL_FUTURE_WRITE = 0x10
"""Writing through mappings that there are already goes on. Python's `fcntl` has no name for it yet."""


class CompletionPage:
    """The writing side: memory of this process, which whoever is given `fileno` can map for reading, and not make smaller."""

    def __init__(self, descriptor: int, memory: mmap.mmap) -> None:
        self._descriptor = descriptor
        self._words: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64)
        self._values = itertools.count(1)

    @classmethod
    def make(cls) -> CompletionPage | None:
        """A new one; `None` where the system cannot keep others from writing there (Linux before 5.1)."""
        try:
            descriptor = os.memfd_create("disagg-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        """What sets a word of this board once `sign` shows, and what that will be: `(index, value)`."""
        value = next(self._values)
        index = value % NUM_WORDS
        return _native.CompletionSignal(completion, self._words, index, value), (index, value)

    def close(self) -> None:
        """Nobody else is given it any more; its memory is there for as long as it is in use."""
        os.close(self._descriptor)


class CompletionPageView:
    """The side that looks; it can only read."""

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    @classmethod
    def of(cls, descriptor: int) -> CompletionPageView | None:
        """The board of another process; `None` where it is none, or could be made smaller, which would kill who reads it."""
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != _NBYTES:
                return None
            memory = mmap.mmap(descriptor, _NBYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        return cls(np.frombuffer(memory, np.uint64))

    def word(self, index: int, value: int) -> _native.CompletionWord:
        """The word that is to have a value. Raises `RemoteProtocolError` where there is none of that number."""
        if index >= len(self._words):
            raise RemoteProtocolError(f"board: expected a word below {len(self._words)}, found {index}")
        return _native.CompletionWord(self._words, index, value)
