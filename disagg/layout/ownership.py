"""Ownership of axes: which positions of an axis a rank holds, and how two ownerships overlap."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core.errors import LayoutError

Positions = npt.NDArray[np.int64]
MAX_AXIS_SIZE = 2**24
"""Positions of a constant axis; tables from peers are expanded to intervals, so they are bounded."""
MAX_PARTS = 2**12
"""Separate intervals that a periodic ownership may have on a constant axis."""


class Interval(NamedTuple):
    """Positions `start` to `stop`, `stop` excluded."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class Intervals(msgspec.Struct, frozen=True, tag="intervals", tag_field="form", forbid_unknown_fields=True):
    """Disjoint intervals, held one behind the other in the order given."""

    parts: tuple[Interval, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if not 0 <= part.start < part.stop < 2**62:
                raise LayoutError(f"interval: expected 0 <= start < stop, found {part}")
        ordered = sorted(self.parts)
        for before, after in itertools.pairwise(ordered):
            if after.start < before.stop:
                raise LayoutError(f"intervals of one rank must not overlap, found {before} and {after}")

    def __str__(self) -> str:
        return " ‖ ".join(map(str, self.parts)) or "nothing"

    def within(self, size: int) -> Intervals:
        """The same set on an axis of `size` positions."""
        return self if all(p.stop <= size for p in self.parts) else _clip(self.parts, size)

    def locate(self, positions: Positions) -> Positions:
        """The local index of each position, -1 where it is not owned."""
        local = np.full(len(positions), -1, dtype=np.int64)
        before = 0
        for start, stop in self.parts:
            inside = (positions >= start) & (positions < stop)
            local[inside] = positions[inside] - start + before
            before += stop - start
        return local

    def count_below(self, position: int) -> int:
        """How many owned positions are smaller than `position`."""
        return sum(max(0, min(stop, position) - start) for start, stop in self.parts)


class Periodic(msgspec.Struct, frozen=True, tag="periodic", tag_field="form", forbid_unknown_fields=True):
    """Position `p` is owned where `(p - offset) mod period < run`, from `offset` on; held in ascending order."""

    offset: int
    run: int
    period: int

    def __post_init__(self) -> None:
        if not (0 <= self.offset < 2**62 and 0 < self.run <= self.period < 2**62):
            raise LayoutError(f"periodic: expected offset >= 0 and 0 < run <= period, found {self}")

    def __str__(self) -> str:
        return f"{self.run} of every {self.period} from {self.offset}"

    def within(self, size: int) -> Intervals:
        """The same set on an axis of `size` positions, as intervals."""
        if self.run == self.period:
            return interval(self.offset, size)
        starts = range(self.offset, size, self.period)
        if len(starts) > MAX_PARTS:
            raise LayoutError(f"{self}: {len(starts)} intervals on an axis of {size}, expected {MAX_PARTS} at most")
        return Intervals(tuple(Interval(start, min(start + self.run, size)) for start in starts))

    def locate(self, positions: Positions) -> Positions:
        """The local index of each position, -1 where it is not owned."""
        turn, inside = np.divmod(positions - self.offset, self.period)
        return np.where((turn >= 0) & (inside < self.run), turn * self.run + inside, -1)

    def count_below(self, position: int) -> int:
        """How many owned positions are smaller than `position`."""
        if position <= self.offset:
            return 0
        turn, inside = divmod(position - self.offset, self.period)
        return turn * self.run + min(inside, self.run)


class Share(msgspec.Struct, frozen=True, tag="share", tag_field="form", forbid_unknown_fields=True):
    """The `index`-th of `parts` contiguous shares of an axis whose length only the request knows.

    The axis is cut in granules of `granule` positions; of `n` granules each share gets `n // parts`, and the first
    `n % parts` shares one more (context parallel prefill by pages, SGLang).
    """

    index: int
    parts: int
    granule: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.parts and self.granule > 0):
            raise LayoutError(f"share: expected 0 <= index < parts and granule > 0, found {self}")

    def __str__(self) -> str:
        return f"share {self.index} of {self.parts} by {self.granule}"

    def within(self, size: int) -> Intervals:
        """The interval of this share on an axis of `size` positions."""
        num_granules = -(-size // self.granule)
        base, rest = divmod(num_granules, self.parts)
        start = self.index * base + min(self.index, rest)
        stop = start + base + (self.index < rest)
        return _clip((Interval(start * self.granule, stop * self.granule),), size)


Owned = Intervals | Periodic | Share
"""The three ways to say what a rank owns of an axis."""
EVERYTHING = Periodic(0, 1, 1)
"""The whole axis, however long it is."""


def _clip(parts: Iterable[Interval], size: int) -> Intervals:
    return Intervals(tuple(Interval(p.start, min(p.stop, size)) for p in parts if p.start < min(p.stop, size)))


def interval(start: int, stop: int) -> Intervals:
    """One interval; nothing where it is empty."""
    return Intervals((Interval(start, stop),) if start < stop else ())


def cuts(owned: Owned) -> tuple[int, ...]:
    """Distances at which an ownership changes, all multiples of whatever must not be cut; the whole axis is never cut."""
    if isinstance(owned, Intervals):
        return tuple(edge for part in owned.parts for edge in part)
    if isinstance(owned, Share):
        return (owned.granule,)
    return (owned.offset, *((owned.run, owned.period) if owned.run < owned.period else ()))


def positions_to_intervals(positions: Iterable[int]) -> Intervals:
    """Positions in memory order (layer ids, say) as intervals in that order."""
    parts: list[Interval] = []
    for position in positions:
        if parts and parts[-1].stop == position:
            parts[-1] = Interval(parts[-1].start, position + 1)
        else:
            parts.append(Interval(position, position + 1))
    return Intervals(tuple(parts))


def split(size: int, parts: int, index: int) -> Interval:
    """The default share of `size` heads or channels that rank `index` of `parts` owns.

    `start = floor(index * size / parts)`, `stop = max(start + 1, floor((index + 1) * size / parts))`: a partition where
    `parts <= size`, also where it does not divide; replicas of single positions beyond.
    """
    start = index * size // parts
    return Interval(start, max(start + 1, (index + 1) * size // parts))


class Piece(NamedTuple):
    """`length` positions that lie at `source_offset` on one side and at `destination_offset` on the other (local indices)."""

    source_offset: int
    destination_offset: int
    length: int


def overlap(source: Owned, destination: Owned, *, size: int) -> tuple[Piece, ...]:
    """What both sides own of an axis of `size` positions, as pieces in ascending global order.

    Every position that both own is in exactly one piece, at both its local indices; no other position is in any.
    """
    pieces: list[Piece] = []
    ours, theirs = _with_offsets(source.within(size)), _with_offsets(destination.within(size))
    i = j = 0
    while i < len(ours) and j < len(theirs):
        (a, a_offset), (b, b_offset) = ours[i], theirs[j]
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start < stop:
            piece = Piece(a_offset + start - a.start, b_offset + start - b.start, stop - start)
            last = pieces[-1] if pieces else None
            if (
                last
                and last.source_offset + last.length == piece.source_offset
                and (last.destination_offset + last.length == piece.destination_offset)
            ):
                pieces[-1] = last._replace(length=last.length + piece.length)
            else:
                pieces.append(piece)
        if a.stop <= b.stop:
            i += 1
        else:
            j += 1
    return tuple(pieces)


def _with_offsets(owned: Intervals) -> list[tuple[Interval, int]]:
    """Each interval with the local index of its first position, in ascending global order."""
    offsets, before = [], 0
    for part in owned.parts:
        offsets.append((part, before))
        before += part.stop - part.start
    return sorted(offsets)


def plain_integer(value: object) -> int:
    """An integer of another kind, such as NumPy's, as it is to be encoded. Raises `LayoutError` for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"layouts: expected integers, found {value!r}, a {type(value).__name__}") from None
