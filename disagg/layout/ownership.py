"""Which positions of an axis a rank holds, in which order, and how two ownerships overlap. The *local index* of a position
is its place in memory order among those that the rank owns. Invalid ownerships raise `LayoutError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core.errors import LayoutError

Ints = npt.NDArray[np.int64]
MAX_PARTS = 2**12
"""Limit on the intervals of a periodic ownership: peers send ownerships."""


class Interval(NamedTuple):
    """Positions `[start, stop)`."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


class Intervals(msgspec.Struct, frozen=True, tag="intervals", tag_field="form", forbid_unknown_fields=True):
    """Disjoint intervals, stored in the given order."""

    parts: tuple[Interval, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if not 0 <= part.start < part.stop < 2**62:
                raise LayoutError(f"interval: expected 0 <= start < stop, found {part}")
        ordered = sorted(self.parts)
        for before, after in itertools.pairwise(ordered):
            if after.start < before.stop:
                raise LayoutError(f"intervals: expected disjoint intervals, found {before} and {after}")

    def __str__(self) -> str:
        return " ‖ ".join(map(str, self.parts)) or "nothing"

    def within(self, size: int) -> Intervals:
        """The owned positions below `size`."""
        return self if all(p.stop <= size for p in self.parts) else _clip(self.parts, size)

    def locate(self, positions: Ints) -> Ints:
        """The local index of each position; -1 if it is not owned."""
        local = np.full(len(positions), -1, dtype=np.int64)
        before = 0
        for start, stop in self.parts:
            inside = (positions >= start) & (positions < stop)
            local[inside] = positions[inside] - start + before
            before += stop - start
        return local

    def count_below(self, position: int) -> int:
        return sum(max(0, min(stop, position) - start) for start, stop in self.parts)


class Periodic(msgspec.Struct, frozen=True, tag="periodic", tag_field="form", forbid_unknown_fields=True):
    """The positions `p >= offset` with `(p - offset) mod period < run`, ascending."""

    offset: int
    run: int
    period: int

    def __post_init__(self) -> None:
        if not (0 <= self.offset < 2**62 and 0 < self.run <= self.period < 2**62):
            raise LayoutError(f"periodic: expected offset >= 0 and 0 < run <= period, found {self}")

    def __str__(self) -> str:
        return f"{self.run} of every {self.period} from {self.offset}"

    def within(self, size: int) -> Intervals:
        """Raises `LayoutError` above `MAX_PARTS` intervals."""
        if self.run == self.period:
            return interval(self.offset, size)
        return Intervals(tuple(Interval(start, min(start + self.run, size)) for start in self.starts(size)))

    def starts(self, size: int) -> range:
        """Where the intervals below `size` start. Raises `LayoutError` for more than `MAX_PARTS`."""
        found = range(self.offset, size, self.period)
        if len(found) > MAX_PARTS:
            raise LayoutError(f"{self}: expected at most {MAX_PARTS} intervals on an axis of {size}, found {len(found)}")
        return found

    def locate(self, positions: Ints) -> Ints:
        repeat, inside = np.divmod(positions - self.offset, self.period)
        return np.where((repeat >= 0) & (inside < self.run), repeat * self.run + inside, -1)

    def count_below(self, position: int) -> int:
        if position <= self.offset:
            return 0
        repeats, inside = divmod(position - self.offset, self.period)
        return repeats * self.run + min(inside, self.run)


class Share(msgspec.Struct, frozen=True, tag="share", tag_field="form", forbid_unknown_fields=True):
    """The `index`-th of `parts` contiguous shares of an axis whose length depends on the request. Of `n` granules each share
    has `n // parts`, and the first `n % parts` shares have one more (context parallel prefill by pages, SGLang).
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
        num_granules = -(-size // self.granule)
        base, rest = divmod(num_granules, self.parts)
        start = self.index * base + min(self.index, rest)
        stop = start + base + (self.index < rest)
        return _clip((Interval(start * self.granule, stop * self.granule),), size)


Owned = Intervals | Periodic | Share
EVERYTHING = Periodic(0, 1, 1)
"""The whole axis, at any length."""


def _clip(parts: Iterable[Interval], size: int) -> Intervals:
    return Intervals(tuple(Interval(p.start, min(p.stop, size)) for p in parts if p.start < min(p.stop, size)))


def interval(start: int, stop: int) -> Intervals:
    """No positions if `start >= stop`."""
    return Intervals((Interval(start, stop),) if start < stop else ())


def cuts(owned: Owned) -> tuple[int, ...]:
    """Distances at which the owner changes. A granule that divides all of them is never split; the whole axis has none."""
    if isinstance(owned, Intervals):
        return tuple(edge for part in owned.parts for edge in part)
    if isinstance(owned, Share):
        return (owned.granule,)
    return (owned.offset, *((owned.run, owned.period) if owned.run < owned.period else ()))


def num_intervals(owned: Owned, size: int) -> int:
    """How many intervals `within(size)` has at most."""
    if isinstance(owned, Intervals):
        return len(owned.parts)
    return len(owned.starts(size)) if isinstance(owned, Periodic) and owned.run < owned.period else 1


def count(owned: Owned, size: int) -> int:
    """How many positions below `size` are owned."""
    return (owned.within(size) if isinstance(owned, Share) else owned).count_below(size)


def merged(parts: Iterable[Interval]) -> Intervals:
    """The positions in any of the intervals, ascending."""
    found: list[Interval] = []
    for start, stop in sorted(parts):
        if found and start <= found[-1].stop:
            found[-1] = Interval(found[-1].start, max(stop, found[-1].stop))
        else:
            found.append(Interval(start, stop))
    return Intervals(tuple(found))


def positions_to_intervals(positions: Iterable[int]) -> Intervals:
    parts: list[Interval] = []
    for position in positions:
        if parts and parts[-1].stop == position:
            parts[-1] = Interval(parts[-1].start, position + 1)
        else:
            parts.append(Interval(position, position + 1))
    return Intervals(tuple(parts))


def split(size: int, parts: int, index: int) -> Interval:
    """The heads or channels, of `size`, that rank `index` of `parts` owns by default: `start = floor(index * size / parts)`,
    `stop = max(start + 1, floor((index + 1) * size / parts))`. A partition if `parts <= size`; with more ranks than
    positions some ranks own the same position.
    """
    start = index * size // parts
    return Interval(start, max(start + 1, (index + 1) * size // parts))


class Piece(NamedTuple):
    """`length` common positions, and their first local indices on both sides."""

    source_offset: int
    destination_offset: int
    length: int


def overlap(source: Owned, destination: Owned, *, size: int) -> tuple[Piece, ...]:
    """The positions that both sides own, in ascending global order, each in one piece."""
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
    offsets, before = [], 0
    for part in owned.parts:
        offsets.append((part, before))
        before += part.stop - part.start
    return sorted(offsets)
