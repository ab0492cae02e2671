"""Reference implementation of the GPU kernels' addresses (`disagg/backends/cuda/kernels.cu`), step by step, without a GPU.

A warp is a loop over 32 lanes. Names are those of the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.backends.cuda.work_list import FORMATS, SPAN_WORDS
from disagg.core.copies import CopyBatch
from disagg.core.formats import ROUNDINGS
from disagg.core.memory import ITEMSIZE

WARP = 32
WORD = 16


@dataclass(frozen=True)
class Conversion:
    """How the numbers of a piece are converted. `head`: bytes of the first number that are before the piece."""

    source: str
    destination: str
    rounding: str
    scale: float
    head: int = 0


@dataclass(frozen=True)
class Piece:
    """What one lane holds: a piece, or the part of it that lies in the warp's tile."""

    source: int = 0
    destination: int = 0
    nbytes: int = 0
    conversion: Conversion | None = None

    @property
    def width(self) -> int:
        """The largest word, up to 16 bytes, to which both source and destination can be aligned."""
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
        """Unit `number`: the bytes that one lane copies in one step."""
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
    """Bytes of the piece at `[begin, end)` of the stream that lie before position `x`, cut at an aligned word."""
    if x <= begin:
        return 0
    if x >= end:
        return end - begin
    inside = x - begin
    past = (destination + inside) % WORD
    return inside - past if inside > past else 0


def owner_of(before: Sequence[int], unit: int) -> int:
    """The lane whose piece contains a unit; `before` counts the units of all earlier lanes."""
    low = 0
    for step in (16, 8, 4, 2, 1):
        if before[low + step] <= unit:
            low += step
    return low


def tile_units(copies: CopyBatch, *, low: int, high: int) -> Iterator[Piece]:
    """Every unit that one warp copies for the tile `[low, high)` of the stream, in order."""
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
    """Every unit that the kernel copies for a batch, tile by tile."""
    for low in range(0, copies.total_nbytes, tile):
        yield from tile_units(copies, low=low, high=min(low + tile, copies.total_nbytes))


def translate(addresses: Sequence[int], *, starts: Sequence[int], deltas: Sequence[int]) -> list[int]:
    """A peer's addresses as mapped locally: each plus its region's delta, modulo 2**64."""
    return [(address + deltas[last_at_most(starts, address)]) % 2**64 for address in addresses]


# -- pieces by shape --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """A span class, from the words of the table."""

    nbytes: int
    row: tuple[int, int]
    token: tuple[int, int]
    dense: bool
    dims: tuple[tuple[int, int, int], ...]
    bases_at: int
    formats: int
    scales_at: int

    @classmethod
    def read(cls, table: Sequence[int], at: int) -> _Span:
        nbytes, *strides, dense, num_dims, bases_at, formats, scales_at = table[at : at + SPAN_WORDS]
        begin = at + SPAN_WORDS
        dims = tuple((table[i], table[i + 1], table[i + 2]) for i in range(begin, begin + 3 * num_dims, 3))
        row, token = (strides[0], strides[1]), (strides[2], strides[3])
        return cls(nbytes, row, token, bool(dense), dims, bases_at, formats, scales_at)

    def conversion(self, scale: int) -> Conversion:
        """The conversion, with the bits of its scale."""
        source, destination = (FORMATS[self.formats >> shift & 255] for shift in (8, 16))
        return Conversion(source, destination, ROUNDINGS[self.formats >> 1 & 3], float(np.uint32(scale).view(np.float32)))


@dataclass(frozen=True)
class SpanLaunch:
    """The parameters of a launch of `move_spans`: the work list and the table as words, the rest by the kernel's names."""

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
    parts = [_Part.read(words, index) for index in range(words[4])]
    for number in range(launch.first_tile, launch.end_tile):
        part = parts[sum(part.first_tile <= number for part in parts) - 1]
        yield from _Tile(launch, words, part, number).pieces()


@dataclass(frozen=True)
class _Part:
    """One part of a work list, from its words: the tiles of one span class."""

    stream_begin: int
    base_nbytes: int
    span_at: int
    num_runs: int
    first_tile: int
    base_tiles: int
    base_pieces: int
    steps: int
    runs_at: int
    prefix_at: int
    bases_at: int

    @classmethod
    def read(cls, words: Sequence[int], index: int) -> _Part:
        part = words[8 + 14 * index : 8 + 14 * (index + 1)]
        return cls(part[0] + (part[1] << 32), part[2] + (part[3] << 32), *part[4:13])


class _Tile:
    """One tile of a launch: the bytes `[low, high)` of one base's stream."""

    def __init__(self, launch: SpanLaunch, words: Sequence[int], part: _Part, number: int) -> None:
        ordinal, within = divmod(number - part.first_tile, part.base_tiles)
        self._launch, self._words, self._part = launch, words, part
        self._table = launch.table.tolist()
        self._span = _Span.read(self._table, part.span_at)
        self._prefix = words[part.prefix_at : part.prefix_at + part.num_runs + 1]
        chosen = ordinal if part.bases_at == 2**32 - 1 else words[part.bases_at + ordinal]
        self._base = self._span.bases_at + 2 * chosen
        # What is unpacked has been converted.
        converts = self._span.formats and not launch.linear_source
        self._conversion = self._span.conversion(self._table[self._span.scales_at + chosen]) if converts else None
        self._stream = part.stream_begin + ordinal * part.base_nbytes
        low = within * launch.tile
        high = min(low + launch.tile, part.base_nbytes)
        self._least = max(launch.limit_low - self._stream, 0)
        self._last = self._stream + high >= launch.limit_high
        self._low = max(low, self._least)
        self._high = launch.limit_high - self._stream if self._last else high

    def pieces(self) -> Iterator[Piece]:
        """What each lane holds, warp step by warp step."""
        part, prefix, dense = self._part, self._prefix, self._span.dense
        run, first = self._start()
        while True:
            begin, begins_at = None, first // part.steps
            window: list[int] = []
            if not dense:
                while run + 1 < part.num_runs and prefix[run + 1] <= begins_at:
                    run += 1
                window = [prefix[min(run + lane, part.num_runs)] for lane in range(WARP)]
            first_run = run
            for lane in range(WARP):
                begin, (found, step) = None, divmod(first + lane, part.steps)
                position = found
                if not dense:
                    position = min(found, prefix[part.num_runs] - 1)
                    run = found = first_run + owner_of(window, position)
                if first + lane >= part.base_pieces:
                    continue
                begin, nbytes = self._extent(found, first + lane, step)
                if begin < self._high:
                    yield self._piece(found, position, step, begin=begin, nbytes=nbytes)
            if begin is None or begin >= self._high:
                return
            first += WARP

    def _start(self) -> tuple[int, int]:
        """The run and the number of the first piece in the tile."""
        if not self._low:
            return 0, 0
        unit, steps, prefix = self._span.nbytes, self._part.steps, self._prefix
        run = first_after(prefix[1:], self._low // (unit * steps))
        if not self._span.dense:
            return run, self._low // unit
        inside = self._low - prefix[run] * unit * steps
        return run, run * steps + inside // ((prefix[run + 1] - prefix[run]) * unit)

    def _extent(self, run: int, number: int, step: int) -> tuple[int, int]:
        """Where a piece begins in the base's stream, and its bytes."""
        unit, before = self._span.nbytes, self._prefix[run]
        if not self._span.dense:
            return number * unit, unit
        nbytes = (self._prefix[run + 1] - before) * unit
        return before * unit * self._part.steps + step * nbytes, nbytes

    def _piece(self, run: int, position: int, step: int, *, begin: int, nbytes: int) -> Piece:
        """The part of a piece that lies in the tile."""
        span, launch = self._span, self._launch
        at = self._words[4 * (self._part.runs_at + run) : 4 * (self._part.runs_at + run) + 4]
        ahead = 0 if span.dense else position - self._prefix[run]
        source = self._table[self._base] + at[0] * span.row[0] + (at[1] + ahead) * span.token[0]
        destination = self._table[self._base + 1] + at[2] * span.row[1] + (at[3] + ahead) * span.token[1]
        for count, ours, theirs in reversed(span.dims):
            step, here = divmod(step, count)
            source, destination = source + here * ours, destination + here * theirs
        packed = self._stream + begin - launch.limit_low
        source = launch.linear_source + packed if launch.linear_source else source
        destination = launch.linear_destination + packed if launch.linear_destination else destination
        end, floor = begin + nbytes, max(self._least - begin, 0)
        start = max(cut(begin, end, destination, self._low), floor)
        stop = max(min(self._high, end) - begin if self._last else cut(begin, end, destination, self._high), start)
        rule = self._conversion
        if rule is None:
            return Piece(source + start, destination + start, stop - start)
        numbers, head = divmod(start, ITEMSIZE[rule.destination])
        source += numbers * ITEMSIZE[rule.source]
        return Piece(source, destination + start, stop - start, dataclasses.replace(rule, head=head))
