"""Where packing begins to pay towards a rank: measured once its engine is connected and before anything is sent to it.

A piece costs the engine something, however small it is; packed, every byte is copied once more before it is sent, and once
more where it arrives, which is done while others are on their way. Pieces are better packed below the size at which they cost
as much as the first copy. Both are measured here: the same bytes in pieces and in one go, written into one slot of the peer's
ring, and a gather. Only writers choose, so the two sides of a pair need not find the same.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
import statistics
import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from disagg.backends.base import Backend, Op, RemotePeer, StagingShape, TransferStatus
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendError, DisaggError
from disagg.core.memory import MemoryRegion
from disagg.transfer.staging import RemoteRing

logger = logging.getLogger(__name__)

BELIEVED = 4
"""How many times more or less than the engine declares is believed: machines differ by less than one measurement beside other
load may err. Pieces of the declared size, and of sizes so much smaller and larger, are measured.
"""
BATCH_NBYTES = 1 << 20
"""Bytes of each measurement in host memory, whatever the pieces; a ring with smaller slots is not measured."""
GATHERED_NBYTES = 4 << 10
"""Pieces of a gather that is measured: larger ones are fetched ahead by the processor, as in a cache they would be."""
ROUNDS, MIN_ROUNDS = 20, 5
BUDGET_S, MOST_S = 0.02, 0.2
"""No further round is begun after the first, and none at all where the fewest would take longer than the second. The median
of each measurement counts: beside other load the fastest of a few is at times the only one that nothing disturbed, and then
differs from the others by more than pieces cost.
"""
TIMEOUT_S = 0.5
"""How long one transfer, or packing on a GPU, may take before the peer is not measured."""


class Origin(enum.Enum):
    """Whence a threshold comes."""

    SET = "set"
    DECLARED = "declared"
    MEASURED = "measured"


@dataclass(frozen=True)
class Threshold:
    """Pieces below `nbytes` bytes travel packed; 0: none."""

    nbytes: int
    origin: Origin

    def __str__(self) -> str:
        return f"{self.nbytes} bytes ({self.origin.value})"


class Gather(Protocol):
    """What packing takes, of memory somewhere: `nbytes` bytes at a time tell that, and what an engine takes for as many."""

    @property
    def nbytes(self) -> int: ...

    def seconds(self, address: int) -> float:
        """Of packing as many bytes, from `address` on, in no order."""


class HostGather:
    """By the compiled core."""

    nbytes = BATCH_NBYTES

    def __init__(self) -> None:
        self._scratch = np.zeros(self.nbytes, np.uint8)
        self._rng = np.random.default_rng(0)

    def seconds(self, address: int) -> float:
        """Of packing as many bytes, from `address` on, in no order."""
        scratch = int(self._scratch.__array_interface__["data"][0])
        places, within, nbytes = _scattered(address, scratch, GATHERED_NBYTES, self.nbytes, self._rng)
        started = time.perf_counter()
        _native.copy_batch(places, np.sort(within), nbytes)
        return time.perf_counter() - started


class BreakEven:
    """The thresholds of one manager, towards every rank it is connected to; thread-safe.

    `source` is memory that the engine may read from: at least the `shape.num_slots` slots of this side; `gather` is what packs
    from there (`None`: `HostGather`). What was measured over one link holds for every rank that is reached over it.
    """

    def __init__(
        self,
        backend: Backend,
        shape: StagingShape,
        source: MemoryRegion | None,
        *,
        given: bool,
        gather: Gather | None = None,
    ) -> None:
        self.unmeasured = Threshold(shape.pack_below if source is not None else 0, Origin.SET if given else Origin.DECLARED)
        self._backend = backend
        self._shape = shape
        self._source = source
        self._gather = gather or HostGather()
        self._known: dict[Hashable, Threshold] = {}
        self._lock = threading.Lock()

    def towards(self, peer: RemotePeer, ring: RemoteRing | None, *, who: str, link: Hashable) -> Threshold:
        """The threshold for a rank that was connected just now, and to whose `ring` nothing was written. Never raises for what
        the engine does: without a measurement it is `unmeasured`.
        """
        if ring is None or self._source is None or not self._shape.measure:
            return self.unmeasured
        if min(self._shape.slot_nbytes, ring.ring.slot_nbytes) < self._gather.nbytes:
            return self.unmeasured
        with self._lock:
            if link in self._known:
                return self._known[link]
        began = time.perf_counter()
        try:
            self._gather.seconds(self._source.address)  # what fails here has written nothing to the peer
            if (slot := ring.lend()) is None:
                return self.unmeasured
            nbytes = self._measure(peer, ring.ring.slot(slot), self._source)
        except DisaggError as error:
            # A slot that was lent stays so for good: something may still be written to it.
            logger.warning("%s: pieces below %s travel packed, as it could not be measured: %s", who, self.unmeasured, error)
            return self.unmeasured
        ring.restore(slot)
        found = self.unmeasured if nbytes is None else Threshold(nbytes, Origin.MEASURED)
        logger.info("%s: pieces below %s travel packed; found in %.1f ms", who, found, 1e3 * (time.perf_counter() - began))
        with self._lock:
            return self._known.setdefault(link, found)

    def _measure(self, peer: RemotePeer, slot: int, source: MemoryRegion) -> int | None:
        """Bytes; `None` where the link is so slow that it would take long. Raises `DisaggError` where a transfer fails or does
        not end.
        """
        batch = self._gather.nbytes
        sizes = measured_sizes(self._shape.pack_below, batch)
        seconds: dict[int, list[float]] = {size: [] for size in (batch, *sizes)}
        slots = range(source.address, source.address + self._shape.num_slots * self._shape.slot_nbytes, self._shape.slot_nbytes)
        own = itertools.cycle(slots)  # each in turn, so that none is found in a near cache
        gathered, rng = list[float](), np.random.default_rng(0)
        whole = [CopyBatch(*_scattered(next(own), slot, batch, batch, rng)) for _ in range(2)]
        whole_s = min([self._timed(peer, each) for each in whole])  # with the first the engine may only begin to connect
        if whole_s * len(seconds) * MIN_ROUNDS > MOST_S:
            return None
        began = time.perf_counter()
        for turn in range(ROUNDS):
            if turn >= MIN_ROUNDS and time.perf_counter() - began > BUDGET_S:
                break
            for size, found in seconds.items():
                found.append(self._timed(peer, CopyBatch(*_scattered(next(own), slot, size, batch, rng))))
            gathered.append(self._gather.seconds(next(own)))
        typical = {size: statistics.median(found) for size, found in seconds.items()}
        logger.debug("seconds by size of pieces: %s, to gather: %s", seconds, gathered)
        excess = {size: typical[size] - min(typical.values()) for size in sizes}
        even, declared = break_even(excess, statistics.median(gathered)), self._shape.pack_below
        return round(min(max(even, declared / BELIEVED), declared * BELIEVED))

    def _timed(self, peer: RemotePeer, copies: CopyBatch) -> float:
        """Seconds from a post to its end."""
        started = time.perf_counter()
        transfer = self._backend.submit(Op.WRITE, peer, copies)
        while not (status := transfer.poll()).settled:
            if status is TransferStatus.UNSETTLED or time.perf_counter() - started > TIMEOUT_S:
                raise BackendError(transfer.error or f"a write of {copies.total_nbytes} bytes did not end in {TIMEOUT_S} s")
            time.sleep(0)
        seconds = time.perf_counter() - started
        problem = transfer.error
        transfer.close()
        if status is TransferStatus.FAILED:
            raise BackendError(problem or "a write failed")
        return seconds


def measured_sizes(declared: int, batch: int) -> tuple[int, ...]:
    """Sizes of pieces, in bytes, around a declared threshold: powers of two, so that they divide `batch`, which is one; never
    all of it.
    """
    around = (declared // BELIEVED, declared, declared * BELIEVED)
    powers = (1 << max(size - 1, 1).bit_length() for size in around)
    return tuple(dict.fromkeys(min(power, batch // 2) for power in powers))


_Column = npt.NDArray[np.uint64]


def _scattered(
    source: int, destination: int, size: int, batch: int, rng: np.random.Generator
) -> tuple[_Column, _Column, _Column]:
    """`batch` bytes in pieces of `size` that touch each other on neither side but by chance."""
    orders = [rng.permutation(batch // size).astype(np.uint64) * np.uint64(size) for _ in range(2)]
    nbytes = np.full(batch // size, size, np.uint64)
    return orders[0] + np.uint64(source), orders[1] + np.uint64(destination), nbytes


def break_even(excess_s: Mapping[int, float], copy_s: float) -> float:
    """The size of pieces, in bytes, at which they cost as much as a copy.

    `excess_s`: by size, what the same bytes took longer in pieces than in few; `copy_s`: what copying them takes.
    Between two sizes the cost is taken to fall by a power of the size, outside of them by its inverse.
    """
    sizes = sorted(excess_s)
    cost = [max(excess_s[size], 1e-9) for size in sizes]
    cost = list(itertools.accumulate(cost, min))  # larger pieces do not cost more: where they do, it is noise
    above = [size for size, each in zip(sizes, cost, strict=True) if each > copy_s]
    if not above or len(above) == len(sizes):
        at = 0 if not above else len(sizes) - 1
        return sizes[at] * cost[at] / copy_s
    last = len(above) - 1
    steepness = math.log(sizes[last + 1] / sizes[last]) / math.log(cost[last] / cost[last + 1])
    return float(sizes[last] * (cost[last] / copy_s) ** steepness)
