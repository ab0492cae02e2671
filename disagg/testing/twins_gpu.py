"""The address computation of backend `nvlink`'s kernel (`disagg/backends/_nvlink.cu`), step for step, without a GPU.

A warp is a loop over 32 lanes here. Names are those of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.copies import CopyBatch

WARP = 32
WORD = 16


@dataclass(frozen=True)
class Piece:
    """What one lane holds: a piece, or the part of it that is in the warp's tile."""

    source: int = 0
    destination: int = 0
    nbytes: int = 0

    @property
    def width(self) -> int:
        """The largest word, of 16 bytes at most, that source and destination can both be aligned to."""
        differ = (self.source ^ self.destination) | WORD
        return differ & -differ

    @property
    def head(self) -> int:
        """Bytes before the first aligned word."""
        return min(-self.destination % self.width, self.nbytes)

    @property
    def num_units(self) -> int:
        words, tail = divmod(self.nbytes - self.head, self.width)
        return (self.head > 0) + words + (tail > 0)

    def unit(self, number: int) -> Piece:
        """Unit `number`: what one lane copies in one step."""
        if self.head:
            if number == 0:
                return Piece(self.source, self.destination, self.head)
            number -= 1
        offset = self.head + number * self.width
        return Piece(self.source + offset, self.destination + offset, min(self.width, self.nbytes - offset))


def first_after(ends: Sequence[int], x: int) -> int:
    """The first `i` with `ends[i] > x`, in steps of 33 parts."""
    low, size = 0, len(ends)
    while size > 0:
        step = (size + WARP) // (WARP + 1)
        probes = [low + step * (lane + 1) - 1 for lane in range(WARP)]
        passed = sum(probe < low + size and ends[probe] <= x for probe in probes)
        skip = passed * step
        low += skip
        size = size - skip if passed == WARP else min(step - 1, size - min(skip, size))
    return low


def last_at_most(starts: Sequence[int], x: int) -> int:
    """The last `i` with `starts[i] <= x`, where `starts[0] <= x`."""
    low, high = 0, len(starts)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts[middle] <= x else (low, middle)
    return low


def cut(begin: int, end: int, destination: int, x: int) -> int:
    """Where position `x` of the stream cuts the piece at `[begin, end)` of it: bytes of the piece before the cut."""
    if x <= begin:
        return 0
    if x >= end:
        return end - begin
    inside = x - begin
    past = (destination + inside) % WORD
    return inside - past if inside > past else 0


def owner_of(before: Sequence[int], unit: int) -> int:
    """The lane whose piece has a unit, by the number of units of the lanes before each."""
    low = 0
    for step in (16, 8, 4, 2, 1):
        if before[low + step] <= unit:
            low += step
    return low


def tile_units(copies: CopyBatch, *, low: int, high: int) -> Iterator[Piece]:
    """Every unit that the warp copies that takes the tile `[low, high)` of the stream, in order."""
    source, destination = copies.source.tolist(), copies.destination.tolist()
    ends = np.cumsum(copies.nbytes).tolist()
    for first in range(first_after(ends, low), len(ends), WARP):
        pieces, last_begin = [], None
        for index in range(first, first + WARP):
            last_begin = (ends[index - 1] if index else 0) if index < len(ends) else None
            if last_begin is None or last_begin >= high:
                pieces.append(Piece())
                continue
            start, stop = (cut(last_begin, ends[index], destination[index], x) for x in (low, high))
            pieces.append(Piece(source[index] + start, destination[index] + start, stop - start))
        before = np.cumsum([0, *(piece.num_units for piece in pieces)]).tolist()
        for number in range(before[WARP]):
            lane = owner_of(before, number)
            yield pieces[lane].unit(number - before[lane])
        if last_begin is None or last_begin >= high:
            return


def units(copies: CopyBatch, *, tile: int) -> Iterator[Piece]:
    """Every unit that the kernel copies of a batch, tile by tile."""
    for low in range(0, copies.total_nbytes, tile):
        yield from tile_units(copies, low=low, high=min(low + tile, copies.total_nbytes))


def translate(addresses: Sequence[int], *, starts: Sequence[int], deltas: Sequence[int]) -> list[int]:
    """A peer's addresses as they are here: each plus its region's delta, modulo 2**64."""
    return [(address + deltas[last_at_most(starts, address)]) % 2**64 for address in addresses]


def inside(starts: Sequence[int], ends: Sequence[int], *, address: int, nbytes: int) -> bool:
    """Whether a piece lies in one of the regions `[starts[i], ends[i])`, which are ascending."""
    if not starts or address < starts[0]:
        return False
    end = ends[last_at_most(starts, address)]
    return address <= end and nbytes <= end - address
