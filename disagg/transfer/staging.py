"""Staging memory: buffers that a sender packs pieces into, and rings of slots that a receiver unpacks from.

Engines pay for each piece, so small pieces travel packed. A receiver keeps one ring per peer rank. The writer fills free slots
with large writes and tells the receiver what they hold; the receiver scatters them into pages and gives the slots back. A late
write of a peer that was given up lands in its retired ring, never in pages.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from disagg.backends.base import StagingShape
from disagg.core.errors import RemoteProtocolError
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.core.rings import Ring, next_use

Bytes = npt.NDArray[np.uint8]


HUGE_PAGE_NBYTES = 2 << 20


AllocateOnDevice = Callable[[int], MemoryRegion | None]
"""Allocates a number of bytes on the device of the pools; `None` means host memory."""


def on_host(_nbytes: int) -> None:
    """Allocate nothing on a device: slots and rings are in host memory."""


class HostArena:
    """Private host memory, in huge pages if the system has them. An engine that copies through the kernel looks up every page,
    which costs more than the copy itself if pages are small.
    """

    _kept: ClassVar[list[mmap.mmap]] = []

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        # After a fork the system would otherwise copy memory that an engine has pinned.
        self._memory.madvise(mmap.MADV_DONTFORK)
        whole = np.frombuffer(self._memory, dtype=np.uint8)
        start = -int(whole.__array_interface__["data"][0]) % HUGE_PAGE_NBYTES
        self._bytes: Bytes = whole[start : start + nbytes]
        self.region = MemoryRegion(int(self._bytes.__array_interface__["data"][0]), nbytes)

    def fault_in(self, nbytes: int) -> None:
        """Have the system give the pages of the first `nbytes` now, and not at the first transfer."""
        self._bytes[: nbytes : mmap.PAGESIZE] = 0

    def keep_mapped(self) -> None:
        """Keep the addresses from everything else in this process, for as long as it lives. The pages go back to the system."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._kept.append(self._memory)


class StagingMemory:
    """Memory for slots, on the device of the pools or on the host."""

    def __init__(self, nbytes: int, allocate_on_device: AllocateOnDevice) -> None:
        self._arena: HostArena | None = None
        region = allocate_on_device(nbytes)
        if region is None:
            self._arena = HostArena(nbytes)
            region = self._arena.region
        self.region = region

    def fault_in(self, nbytes: int) -> None:
        """As `HostArena.fault_in`, on the host."""
        if self._arena is not None:
            self._arena.fault_in(nbytes)

    def keep_mapped(self) -> None:
        """The engine is closed, but a peer may still write here: nothing else may get these addresses. A GPU's memory stays
        with the peers that have mapped it, also once it is freed here.
        """
        if self._arena is not None:
            self._arena.keep_mapped()


class SlotPool:
    """Staging buffers to pack into, and spares for those that a slow or dead peer holds. Used by one thread.

    Host memory of a spare is only touched when the spare is used.
    """

    def __init__(self, shape: StagingShape, allocate_on_device: AllocateOnDevice = on_host) -> None:
        self.slot_nbytes = shape.slot_nbytes
        self.at_once = shape.at_once
        active = shape.slot_nbytes * shape.num_slots
        self.memory = StagingMemory(active + shape.slot_nbytes * shape.spares, allocate_on_device)
        self.memory.fault_in(active)
        base = self.memory.region.address
        slots = [base + i * shape.slot_nbytes for i in range(shape.num_slots + shape.spares)]
        self._free, self._spares = slots[: shape.num_slots], slots[shape.num_slots :]

    def take(self) -> int | None:
        """The address of a free buffer, or `None`. The one given back last is the most likely to be in a cache."""
        return self._free.pop() if self._free else None

    def replace(self) -> bool:
        """Let a spare take the place of a buffer that is held for long. Returns whether there was one."""
        if not self._spares:
            return False
        self._free.append(self._spares.pop())
        return True

    def give_back(self, address: int, *, replaced: bool = False) -> None:
        """The engine has finished with the buffer. If it was replaced, it becomes a spare."""
        (self._spares if replaced else self._free).append(address)


class RingPool:
    """The rings of a receiver: one for each peer rank, as long as any are left. Used by one thread."""

    def __init__(self, shape: StagingShape, allocate_on_device: AllocateOnDevice = on_host) -> None:
        slots = shape.ring_slots()
        self.memory = StagingMemory(shape.slot_nbytes * sum(slots), allocate_on_device)
        starts = (self.memory.region.address + shape.slot_nbytes * before for before in itertools.accumulate(slots, initial=0))
        self._free = [Ring(start, shape.slot_nbytes, count) for start, count in zip(starts, slots, strict=False)]
        self._count = len(self._free)

    @property
    def are_scarce(self) -> bool:
        """Whether at most half of the rings are free."""
        return 2 * len(self._free) <= self._count

    def take(self) -> Ring | None:
        """The largest free ring, or `None` if all are taken: that peer's pieces then travel one by one."""
        if not self._free:
            return None
        ring = max(self._free, key=lambda free: free.num_slots)
        self._free.remove(ring)
        return ring

    def give_back(self, ring: Ring) -> None:
        """The ring is proved quiet: no peer writes into it any more."""
        self._free.append(ring)


class RemoteRing:
    """A peer's ring as its writer sees it: which slots are free. Thread-safe.

    Raises `RemoteProtocolError` for a ring outside the regions that the peer has registered.
    """

    def __init__(self, ring: Ring, regions: tuple[RemoteRegion, ...], *, first: int = 0) -> None:
        stop = ring.address + ring.slot_nbytes * ring.num_slots
        if not any(region.address <= ring.address and stop <= region.address + region.nbytes for region in regions):
            raise RemoteProtocolError(f"ring: [{ring.address:#x}, {stop:#x}) is in no region that the peer has registered")
        self.ring = ring
        self._lock = threading.Lock()
        self._free = deque(range(ring.num_slots))
        self._outstanding: dict[int, int] = {}
        self._sequence = first

    @property
    def num_free(self) -> int:
        """Slots that no credit is awaited for."""
        return len(self._free)

    def take(self) -> tuple[int, int] | None:
        """A free slot and the sequence number of this use, or `None`."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.popleft()
            self._sequence = next_use(self._sequence)
            self._outstanding[slot] = self._sequence
            return slot, self._sequence

    def credit(self, slot: int, sequence: int) -> bool:
        """The peer has unpacked this use of a slot. Returns whether a credit for it was awaited."""
        with self._lock:
            if self._outstanding.get(slot) != sequence:
                return False
            del self._outstanding[slot]
            self._free.append(slot)
            return True
