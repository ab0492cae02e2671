"""Staging memory: buffers that a sender packs pieces into, and slots that a receiver lends and unpacks. A late write of a
lost peer lands in a slot that nobody else has, never in pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from disagg.backends.base import StagingShape
from disagg.backends.endpoint import RegionIndex
from disagg.core.errors import RemoteProtocolError
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.core.thread_log import ThreadLog

logger = ThreadLog(__name__)

Bytes = npt.NDArray[np.uint8]


HUGE_PAGE_NBYTES = 2 << 20
MAX_SWEPT = 64
"""Replaced slots whose pages are given back again whenever another one is replaced."""
MAP_NORESERVE = 0x4000
"""Reserved addresses are not counted as memory. Python names it from 3.13 on."""


AllocateOnDevice = Callable[[int], MemoryRegion | None]
"""`None` means host memory."""


def on_host(_nbytes: int) -> None:
    """An `AllocateOnDevice` that leaves everything in host memory."""


class HostArena:
    """In huge pages if the system has them: an engine that copies through the kernel looks up every page, which costs more
    than the copy if pages are small.
    """

    _kept: ClassVar[list[mmap.mmap]] = []
    _live: ClassVar[weakref.WeakSet[HostArena]] = weakref.WeakSet()

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        # After a fork the system would otherwise copy memory that an engine has pinned.
        self._memory.madvise(mmap.MADV_DONTFORK)
        _watch_forks()
        self._live.add(self)
        whole = np.frombuffer(self._memory, dtype=np.uint8)
        self._mapped_at = int(whole.__array_interface__["data"][0])
        start = -self._mapped_at % HUGE_PAGE_NBYTES
        self._bytes: Bytes = whole[start : start + nbytes]
        self.region = MemoryRegion(int(self._bytes.__array_interface__["data"][0]), nbytes)

    def fault_in(self, nbytes: int) -> None:
        """Have the system give the pages now, and not at the first transfer."""
        self._bytes[: nbytes : mmap.PAGESIZE] = 0

    def give_pages_back(self, address: int, nbytes: int) -> None:
        """The memory stays mapped, and reads as zeros."""
        start, page = address - self._mapped_at, mmap.PAGESIZE
        first, stop = -(-start // page) * page, (start + nbytes) // page * page
        if first < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def keep_mapped(self) -> None:
        """Keep the addresses, but not the pages, for as long as the process lives."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._kept.append(self._memory)

    @classmethod
    def leave_to_parent(cls) -> None:
        """In a forked child, which may have memory of its own at these addresses: never unmap them."""
        for memory in (*cls._kept, *(arena._memory for arena in cls._live)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=HostArena.leave_to_parent)


class StagingMemory:
    def __init__(self, nbytes: int, allocate_on_device: AllocateOnDevice) -> None:
        self._arena: HostArena | None = None
        region = allocate_on_device(nbytes)
        if region is None:
            self._arena = HostArena(nbytes)
            region = self._arena.region
        self.region = region

    def fault_in(self, nbytes: int) -> None:
        if self._arena is not None:
            self._arena.fault_in(nbytes)

    def give_pages_back(self, address: int, nbytes: int) -> None:
        if self._arena is not None:
            self._arena.give_pages_back(address, nbytes)

    def keep_mapped(self) -> None:
        """A peer may still write here after the engine is closed: nothing else may get these addresses. A GPU's memory
        stays with the peers that have mapped it.
        """
        if self._arena is not None:
            self._arena.keep_mapped()


class SlotPool:
    """Buffers to pack into, and spares for those that a slow or dead peer holds. Used by one thread. Spares take pages of
    memory once used.
    """

    def __init__(self, shape: StagingShape, allocate_on_device: AllocateOnDevice = on_host) -> None:
        self.slot_nbytes = shape.slot_nbytes
        self.batch = shape.batch
        active = shape.slot_nbytes * shape.window
        self.memory = StagingMemory(active + shape.slot_nbytes * shape.spares, allocate_on_device)
        self.memory.fault_in(active)
        base = self.memory.region.address
        slots = [base + i * shape.slot_nbytes for i in range(shape.window + shape.spares)]
        self._free, self._spares = slots[: shape.window], slots[shape.window :]

    def take(self) -> int | None:
        """The last one given back is the most likely to be in a cache."""
        return self._free.pop() if self._free else None

    def replace(self) -> bool:
        """Let a spare replace a buffer that is held for long. Returns whether there was one."""
        if not self._spares:
            return False
        self._free.append(self._spares.pop())
        return True

    def give_back(self, address: int, *, replaced: bool = False) -> None:
        """A buffer that was replaced becomes a spare."""
        (self._spares if replaced else self._free).append(address)


class LentSlots:
    """The slots that a receiver lends to its writers. Used by one thread.

    Memory that no device writes to is reserved `address_space` times over, where the system lets it: a slot that may still
    be written is replaced by another address, and its pages go back to the system.
    """

    def __init__(self, shape: StagingShape, allocate_on_device: AllocateOnDevice = on_host) -> None:
        self.slot_nbytes, self.window, self.total = shape.slot_nbytes, shape.window, shape.num_lent
        self.batch = shape.batch
        active = shape.slot_nbytes * shape.num_lent
        try:
            self.memory = StagingMemory(active * shape.address_space, allocate_on_device)
        except OSError as error:  # the system counts reserved addresses as memory (vm.overcommit_memory=2, ulimit -v)
            logger.warning(
                "slots of lost peers cannot be replaced: %d bytes of addresses: %s", active * shape.address_space, error
            )
            self.memory = StagingMemory(active, allocate_on_device)
        base = self.memory.region.address
        self._free = [base + i * shape.slot_nbytes for i in reversed(range(shape.num_lent))]
        self._unused = deque(range(base + active, base + self.memory.region.nbytes, shape.slot_nbytes))
        self._replaced = deque[int](maxlen=min(shape.num_lent, MAX_SWEPT))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def can_replace(self) -> bool:
        return bool(self._unused)

    def take(self) -> int:
        """There must be a free slot. As `SlotPool.take`."""
        return self._free.pop()

    def give_back(self, address: int) -> None:
        self._free.append(address)

    def replace(self, address: int) -> bool:
        """Replace a slot that may still be written. Returns whether there is another address."""
        if not self._unused:
            return False
        self._replaced.append(address)
        for each in self._replaced:  # late bytes may have taken pages in earlier ones
            self.memory.give_pages_back(each, self.slot_nbytes)
        self._free.insert(0, self._unused.popleft())
        return True

    def renew(self, address: int) -> None:
        """Nobody writes to a replaced slot any more: it may replace another."""
        if address in self._replaced:
            self._replaced.remove(address)
        self._unused.append(address)


class Loans:
    """A peer's loans as its writer sees them. Thread-safe. Loans up to number `first` are of earlier connections. A slot
    outside the peer's registered `regions` is not used. `writing` are the loans of all connections to the peer's process
    whose slots are being written, or may be.
    """

    def __init__(self, slot_nbytes: int, first: int, regions: Sequence[RemoteRegion], writing: set[int]) -> None:
        self.slot_nbytes = slot_nbytes
        self._first = self.seen = first
        self._regions = RegionIndex(regions)
        self._lock = threading.Lock()
        self._free: dict[int, int] = {}
        self._used: set[int] = set()
        self._writing = writing
        self._demand = 0
        self._is_open = True

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def wanted(self) -> int:
        """Slots that could be filled now, beside the free ones."""
        return max(0, self._demand - len(self._free))

    def want(self, count: int) -> None:
        """A transfer will take `count` more slots; negative: fewer."""
        with self._lock:
            self._demand += count

    def take(self) -> tuple[int, int] | None:
        with self._lock:
            if not (self._free and self._is_open):
                return None
            number = next(iter(self._free))
            self._used.add(number)
            self._writing.add(number)
            self._demand -= 1
            return number, self._free.pop(number)

    def put_back(self, number: int, address: int) -> None:
        """The slot was not written, and will not be."""
        with self._lock:
            self._writing.discard(number)
            self._used.discard(number)
            self._free[number] = address

    def written(self, number: int) -> None:
        """The slot is not written any more."""
        self._writing.discard(number)

    def close(self) -> None:
        """The connection has ended: no loan is used any more."""
        with self._lock:
            self._is_open = False

    def listed(self, loans: Sequence[tuple[int, int]], newest: int) -> tuple[int, ...]:
        """The peer lists its loans. Returns those that were given back before, and those of earlier connections whose slots
        are not written any more. Raises `RemoteProtocolError` for an invalid list, with nothing changed.
        """
        number_at: dict[int, int] = {}
        for number, address in loans:
            if number > newest:
                raise RemoteProtocolError(f"loan: expected numbers up to {newest}, the newest, found {number}")
            other = number_at.setdefault(address, number)
            if other != number:
                raise RemoteProtocolError(f"loans: expected a slot each, found {other} and {number} both at {address:#x}")
        with self._lock:
            known = self._free.keys() | self._used
            new = {number: address for number, address in loans if number > self.seen}
            addresses = np.fromiter(new.values(), np.uint64, len(new))
            inside = self._regions.num_inside(addresses, np.full(len(new), self.slot_nbytes, np.uint64))
            if inside < len(new):
                start = int(addresses[inside])
                raise RemoteProtocolError(
                    f"loan: slot [{start:#x}, {start + self.slot_nbytes:#x}) is in no region that the peer has registered"
                )
            known |= self._writing
            forgotten = tuple(number for number, _ in loans if number <= self.seen and number not in known)
            numbers = {number for number, _ in loans}
            self._used = {number for number in self._used if number in numbers or number > newest}
            self._free = {number: found for number, found in self._free.items() if number in numbers or number > newest}
            self.seen = max(self.seen, newest)
            self._free.update(new)
        return forgotten

    def give_back(self) -> tuple[int, ...]:
        with self._lock:
            numbers = tuple(self._free)
            self._free.clear()
        return numbers
