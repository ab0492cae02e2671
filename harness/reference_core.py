"""NumPy reference implementation of the compiled core: what its functions must return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core.copies import CopyBatch
from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Rows, Slot
from disagg.layout.binding import MAX_TOKENS
from disagg.layout.ownership import Intervals, Periodic, Share
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass, first_page

Ids = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


def group_concurrent_contiguous_numpy(source: npt.ArrayLike, destination: npt.ArrayLike) -> tuple[Ids, Ids, Ids]:
    """`(source_starts, destination_starts, lengths)`, as from `disagg.state.align.group_concurrent_contiguous`.

    Takes anything that NumPy converts to a 1-D int64 array. Raises `ValueError` if the lengths differ and neither is 0.
    """
    src, dst = np.asarray(source, dtype=np.int64), np.asarray(destination, dtype=np.int64)
    if src.size == 0 or dst.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    if src.shape != dst.shape:
        raise ValueError(f"source has {src.size} indices, destination has {dst.size}")
    present = (src >= 0) & (dst >= 0)
    joins = present[:-1] & present[1:] & (np.diff(src) == 1) & (np.diff(dst) == 1)
    begins = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.diff(begins, append=src.size)
    begins, lengths = begins[present[begins]], lengths[present[begins]]
    return src[begins], dst[begins], lengths.astype(np.int64, copy=False)


# ------------------------------------------------------------------------------------------------------------ regions


def locate_numpy(starts: Addresses, stops: Addresses, addresses: Addresses, nbytes: Addresses) -> tuple[Ints, int]:
    """The region `[starts[k], stops[k])` that contains each whole range of memory, or -1; and the first range in no region.

    The latter is the number of ranges if every range is in a region. Ranges have at least one byte; regions ascend and do
    not overlap.
    """
    if not len(starts):
        return np.full(len(addresses), -1, dtype=np.int64), 0
    last = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    held = (last >= 0) & (addresses < stops[last]) & (nbytes <= stops[last] - np.minimum(addresses, stops[last]))
    outside = np.flatnonzero(~held)
    return np.where(held, last, -1), int(outside[0]) if len(outside) else len(addresses)


# ------------------------------------------------------------------------------------------------------------ binding


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """Runs of token positions within one page on each side: rows, and offsets in positions, as int64 columns."""

    source_row: Ints
    source_offset: Ints
    destination_row: Ints
    destination_offset: Ints
    length: Ints

    def singles(self) -> TokenRuns:
        """The same positions as runs of one."""
        index = np.repeat(np.arange(len(self.length)), self.length)
        step = np.arange(len(index)) - np.repeat(np.cumsum(self.length) - self.length, self.length)
        return TokenRuns(
            self.source_row[index],
            self.source_offset[index] + step,
            self.destination_row[index],
            self.destination_offset[index] + step,
            np.ones(len(index), dtype=np.int64),
        )


def coalesced(copies: CopyBatch) -> CopyBatch:
    """The same copies, with neighbours that are contiguous on both sides joined."""
    if not len(copies):
        return copies
    joins = (copies.source[:-1] + copies.nbytes[:-1] == copies.source[1:]) & (
        copies.destination[:-1] + copies.nbytes[:-1] == copies.destination[1:]
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    return CopyBatch(copies.source[starts], copies.destination[starts], np.add.reduceat(copies.nbytes, starts))


def bind_numpy(
    plan: ComponentPlan,
    *,
    source: Rows,
    destination: Rows,
    tokens: tuple[int, int] | None = None,
    num_tokens: int | None = None,
    layers: Sequence[int] | None = None,
) -> CopyBatch:
    """The same copies in the same order, and the same errors, as `disagg.layout.binding.bind`, by expanding every position."""
    batches = []
    runs: dict[int, TokenRuns] = {}
    for span in plan.spans:
        if span.granule not in runs:
            runs[span.granule] = token_runs_numpy(plan, span.granule, source, destination, tokens, num_tokens)
        batches.append(expand_numpy(span, runs[span.granule], layers))
    return coalesced(CopyBatch.concatenate(batches))


def token_runs_numpy(
    plan: ComponentPlan,
    granule: int,
    source: Rows,
    destination: Rows,
    tokens: tuple[int, int] | None,
    num_tokens: int | None,
) -> TokenRuns:
    what = f"component {plan.name!r}"
    if plan.source.tokens is None or plan.destination.tokens is None:
        rows = [_slot(rows, space, what, side) for rows, space, side in _sides(plan, source, destination)]
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        return TokenRuns(np.array([rows[0]]), zero, np.array([rows[1]]), zero, one)
    if tokens is None:
        raise LayoutError(f"{what}: pages hold tokens, so a token range is needed")
    length = tokens[1] if num_tokens is None else num_tokens
    positions = _positions(tokens, granule, what)
    located = [_locate(space, positions, granule, length) for space in (plan.source, plan.destination)]
    both = (located[0] >= 0) & (located[1] >= 0)
    positions = positions[both]
    (source_row, source_offset), (destination_row, destination_offset) = (
        _address(rows, local[both], positions, space=space, side=side, granule=granule, num_tokens=length, what=what)
        for (rows, space, side), local in zip(_sides(plan, source, destination), located, strict=True)
    )
    places, count = np.unique(source_row * plan.source.page_size + source_offset, return_counts=True)
    if (count > 1).any():
        page = places[count > 1][0] // plan.source.page_size
        raise LayoutError(f"{what}, source: page {page} is listed twice for needed tokens")
    return _runs(source_row, source_offset, destination_row, destination_offset)


def _runs(source_row: Ints, source_offset: Ints, destination_row: Ints, destination_offset: Ints) -> TokenRuns:
    """Positions as maximal runs: same rows, and offsets that step by one, on both sides."""
    if not len(source_row):
        return TokenRuns(source_row, source_offset, destination_row, destination_offset, source_row)
    goes_on = np.ones(len(source_row) - 1, dtype=bool)
    for rows, offsets in ((source_row, source_offset), (destination_row, destination_offset)):
        goes_on &= (rows[1:] == rows[:-1]) & (offsets[1:] == offsets[:-1] + 1)
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    length = np.diff(starts, append=len(source_row))
    return TokenRuns(source_row[starts], source_offset[starts], destination_row[starts], destination_offset[starts], length)


def _positions(tokens: tuple[int, int], granule: int, what: str) -> Ints:
    """The positions of a range of tokens. Checks its length before expanding it, since it may come from a peer."""
    start, stop = tokens
    if not 0 <= start <= stop <= start + MAX_TOKENS or stop >= 2**62:
        raise LayoutError(f"{what}: expected a token range of at most {MAX_TOKENS} tokens, found [{start}, {stop})")
    return np.arange(start // granule, stop // granule, dtype=np.int64)


def _locate(space: RowSpace, positions: Ints, granule: int, num_tokens: int) -> Ints:
    """The local index of each position, in positions; -1 where its first token is not owned."""
    local = _owned(space, num_tokens).locate(positions * granule)
    return np.where(local >= 0, local // granule, -1)


def _sides(plan: ComponentPlan, source: Rows, destination: Rows) -> tuple[tuple[Rows, RowSpace, str], ...]:
    return (source, plan.source, "source"), (destination, plan.destination, "destination")


def _owned(space: RowSpace, num_tokens: int) -> Intervals | Periodic:
    assert space.tokens is not None
    return space.tokens.within(num_tokens) if isinstance(space.tokens, Share) else space.tokens


def _slot(rows: Rows, space: RowSpace, what: str, side: str) -> int:
    if not isinstance(rows, Slot):
        raise LayoutError(f"{what}, {side}: expected a Slot, found {type(rows).__name__}")
    if rows.id >= space.num_rows:
        raise LayoutError(f"{what}, {side}: slot {rows.id} is outside the pool of {space.num_rows}")
    return rows.id


def _address(
    rows: Rows, local: Ints, positions: Ints, *, space: RowSpace, side: str, granule: int, num_tokens: int, what: str
) -> tuple[Ints, Ints]:
    """Page id and offset in the page of each local position. Raises `LayoutError` for the first without a page."""
    if not isinstance(rows, Pages):
        raise LayoutError(f"{what}, {side}: expected Pages, found {type(rows).__name__}")
    if space.page_size % granule:
        raise LayoutError(f"{what}, {side}: a granule of {granule} tokens does not divide the page of {space.page_size}")
    per_page = space.page_size // granule
    first = first_page(space, rows.first_token, num_tokens)
    index, offset = np.divmod(local, per_page)
    index -= first
    listed = (index >= 0) & (index < len(rows.ids))
    if not listed.all():
        token = int(positions[np.flatnonzero(~listed)[0]]) * granule
        raise LayoutError(
            f"{what}, {side}: needed token {token} has no page; {len(rows.ids)} pages of {space.page_size} tokens are listed, "
            f"from token {rows.first_token} on"
        )
    row = rows.ids[index].astype(np.int64)
    inside = (row >= 0) & (row < space.num_rows)
    if not inside.all():
        bad = int(np.flatnonzero(~inside)[0])
        raise LayoutError(
            f"{what}, {side}: token {int(positions[bad]) * granule} lies in page {int(row[bad])}, "
            f"outside the pool of {space.num_rows} pages"
        )
    return row, offset


def expand_numpy(span: SpanClass, runs: TokenRuns, layers: Sequence[int] | None) -> CopyBatch:
    """The copies of a span class: bases x token runs x dims."""
    chosen = slice(None) if layers is None else np.isin(span.layers, np.asarray(layers, dtype=np.int64))
    if not span.dense:
        runs = runs.singles()
    columns = []
    for side, (bases, row, offset) in enumerate(
        (
            (span.source_bases, runs.source_row, runs.source_offset),
            (span.destination_bases, runs.destination_row, runs.destination_offset),
        )
    ):
        within = row * span.row_strides[side] + offset * span.token_strides[side]
        for dim in span.dims:
            within = np.add.outer(within, np.arange(dim[0], dtype=np.int64) * dim[1 + side])
        columns.append(np.add.outer(bases[chosen], within.ravel().astype(np.uint64)))
    per_run = runs.length * span.nbytes if span.dense else np.full(len(runs.length), span.nbytes)
    lengths = np.repeat(per_run, math.prod(dim[0] for dim in span.dims))
    return CopyBatch(columns[0].ravel(), columns[1].ravel(), np.tile(lengths, len(columns[0])))


# ---------------------------------------------------------------------------------------------------- packing, checksums


def gather_numpy(memory: Bytes, offsets: Addresses, nbytes: Addresses) -> Bytes:
    """The pieces of `memory`, concatenated."""
    pieces = [memory[start : start + size] for start, size in zip(offsets.tolist(), nbytes.tolist(), strict=True)]
    return np.concatenate([np.empty(0, dtype=np.uint8), *pieces])


def scatter_numpy(memory: Bytes, offsets: Addresses, nbytes: Addresses, staging: Bytes) -> None:
    """Write the pieces in `staging` to `memory`."""
    before = 0
    for start, size in zip(offsets.tolist(), nbytes.tolist(), strict=True):
        memory[start : start + size] = staging[before : before + size]
        before += size


def digest_numpy(elements: npt.NDArray[np.generic], coordinates: Sequence[npt.NDArray[np.int64]], *, seed: int) -> int:
    """The checksum of `elements` `[layer, token, *inner axes]`; `coordinates` are the global ones of each axis.

    The sum, modulo 2**64, of every element times the weights of its coordinates. An element is a little-endian integer; an
    8-byte one counts as two. Axis 0 is the layer, 1 the token, 2 the half of an element; the inner axes follow.
    """
    units = np.ascontiguousarray(elements)
    width = min(units.dtype.itemsize, 4)
    halves = units.dtype.itemsize // width
    values = units.view(f"<u{width}").reshape(*units.shape, halves).astype(np.uint64)
    axes = [0, 1, *range(3, 1 + len(coordinates)), 2]
    for number, positions in zip(axes, [*coordinates, np.arange(halves)], strict=True):
        weights = _weights(seed, number, positions) if (number, halves) != (2, 1) else np.ones(1, dtype=np.uint64)
        values = (values * weights.reshape(-1, *(1 for _ in range(values.ndim - 1)))).sum(axis=0, dtype=np.uint64)
    return int(values)


def _weights(seed: int, axis: int, positions: npt.NDArray[np.int64]) -> Addresses:
    """An odd weight for each position of an axis."""
    key = _mix(np.array([(seed + (axis + 1) * 0xD1B54A32D192ED03) % 2**64], dtype=np.uint64))
    steps = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(key + steps) | np.uint64(1)


def _mix(x: Addresses) -> Addresses:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
