"""The address computation of the GPU kernels (`disagg/backends/kernels.cu`), step for step, without a GPU.

A warp is a loop over 32 lanes here. Names are those of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core.copies import CopyBatch

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


# -- pieces by shape --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """A span class, from the table's words."""

    nbytes: int
    row: tuple[int, int]
    token: tuple[int, int]
    dense: bool
    dims: tuple[tuple[int, int, int], ...]
    bases_at: int

    @classmethod
    def read(cls, table: Sequence[int], at: int) -> _Span:
        nbytes, *strides, dense, num_dims, bases_at = table[at : at + 8]
        dims = [(table[i], table[i + 1], table[i + 2]) for i in range(at + 8, at + 8 + 3 * num_dims, 3)]
        return cls(nbytes, (strides[0], strides[1]), (strides[2], strides[3]), bool(dense), tuple(dims), bases_at)


@dataclass(frozen=True)
class SpanLaunch:
    """The parameters of a launch of `move_spans`: the order and the table as words, and the rest by the kernel's names."""

    order: npt.NDArray[np.uint64]
    table: npt.NDArray[np.uint64]
    first_tile: int
    end_tile: int
    tile: int
    limit_low: int
    limit_high: int
    linear_source: int = 0
    linear_destination: int = 0


def span_pieces(launch: SpanLaunch) -> Iterator[Piece]:
    """Every piece, or part of one, that a lane of `move_spans` holds, tile by tile."""
    words = launch.order.view(np.uint32).tolist()
    num_parts = words[4]
    parts = [words[8 + 14 * i : 8 + 14 * (i + 1)] for i in range(num_parts)]
    for number in range(launch.first_tile, launch.end_tile):
        part = parts[sum(p[6] <= number for p in parts) - 1]
        yield from _tile_pieces(launch, words, part, number)


def _tile_pieces(launch: SpanLaunch, words: list[int], part: list[int], number: int) -> Iterator[Piece]:
    stream_begin, base_nbytes = part[0] + (part[1] << 32), part[2] + (part[3] << 32)
    span_at, num_runs, first_tile, base_tiles, base_pieces, steps, runs_at, prefix_at, bases_at = part[4:13]
    table = launch.table.tolist()
    span = _Span.read(table, span_at)
    ordinal, unit = (number - first_tile) // base_tiles, span.nbytes
    stream = stream_begin + ordinal * base_nbytes
    low = (number - first_tile - ordinal * base_tiles) * launch.tile
    high = min(low + launch.tile, base_nbytes)
    least = max(launch.limit_low - stream, 0)
    low = max(low, least)
    last = stream + high >= launch.limit_high
    high = launch.limit_high - stream if last else high
    base = span.bases_at + 2 * (ordinal if bases_at == 2**32 - 1 else words[bases_at + ordinal])
    prefix = words[prefix_at : prefix_at + num_runs + 1]
    run = first = 0
    if low:
        run = first_after(prefix[1:], low // (unit * steps))
        inside = low - prefix[run] * unit * steps
        first = run * steps + inside // ((prefix[run + 1] - prefix[run]) * unit) if span.dense else low // unit
    while True:
        begin, begins_at = None, first // steps
        window: list[int] = []
        if not span.dense:
            while run + 1 < num_runs and prefix[run + 1] <= begins_at:
                run += 1
            window = [prefix[min(run + lane, num_runs)] for lane in range(WARP)]
        first_run = run
        for lane in range(WARP):
            begin, (found, step) = None, divmod(first + lane, steps)
            position = found
            if not span.dense:
                position = min(found, prefix[num_runs] - 1)
                run = found = first_run + owner_of(window, position)
            if first + lane >= base_pieces:
                continue
            before = prefix[found]
            nbytes = (prefix[found + 1] - before) * unit if span.dense else unit
            begin = before * unit * steps + step * nbytes if span.dense else (first + lane) * unit
            if begin >= high:
                continue
            at = words[4 * (runs_at + found) : 4 * (runs_at + found) + 4]
            ahead = 0 if span.dense else position - before
            source = table[base] + at[0] * span.row[0] + (at[1] + ahead) * span.token[0]
            destination = table[base + 1] + at[2] * span.row[1] + (at[3] + ahead) * span.token[1]
            for count, ours, theirs in reversed(span.dims):
                step, here = divmod(step, count)
                source, destination = source + here * ours, destination + here * theirs
            packed = stream + begin - launch.limit_low
            source = launch.linear_source + packed if launch.linear_source else source
            destination = launch.linear_destination + packed if launch.linear_destination else destination
            end, floor = begin + nbytes, max(least - begin, 0)
            start = max(cut(begin, end, destination, low), floor)
            stop = max(min(high, end) - begin if last else cut(begin, end, destination, high), start)
            yield Piece(source + start, destination + start, stop - start)
        if begin is None or begin >= high:
            return
        first += WARP
