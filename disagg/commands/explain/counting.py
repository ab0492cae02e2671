"""What a plan comes to, counted and not carried out: the bytes and pieces of a request, without memory and without addresses
of anyone.

`placed` lays a rank's pools out as `state.pools.allocate` does, over addresses that nothing lies at. `token_runs` finds where
a request's tokens lie together on both sides from the edges of pages and ownerships alone, and `count` how many pieces the
span classes make of them, from strides and counts: what `plan.bind` would give in length, without expanding it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core.errors import LayoutError
from disagg.core.memory import ITEMSIZE, RawTensor
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.layout.ownership import Intervals, Periodic, Share
from disagg.layout.placement import Component
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass, first_page
from disagg.models import ModelSpec
from disagg.models.pools import ALIGNMENT, PoolShape
from disagg.models.stages import Stage, stage_of
from disagg.state.declare import State, all_tokens, dtype_of

Ints = npt.NDArray[np.int64]

FIRST_ADDRESS = 1 << 40
"""Where pools that do not exist begin."""


# -- pools that are not there ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    """One role of one layer, from the layer's first byte on: shape and strides in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def placed(model: ModelSpec, topology: Topology, shape: PoolShape) -> tuple[Component, ...]:
    """The components of one rank, as `allocate` would lay them out, with nothing allocated."""
    address = FIRST_ADDRESS
    stages = [_stage(model, topology, shape, number) for number in range(topology.pp)]
    components = []
    for state in model.states:
        nbytes, roles = _cut(state, topology, shape)
        own = tuple(filter(stages[topology.pp_rank].owns_layer, state.layers))
        at = {layer: address + i * nbytes for i, layer in enumerate(own)}
        address += nbytes * len(own)
        components.append(_component(state, at, roles, topology, stages, shape))
    return tuple(components)


def _stage(model: ModelSpec, topology: Topology, shape: PoolShape, number: int) -> Stage:
    first_rank = topology.at(number * topology.cp * topology.tp)
    return stage_of(model, first_rank, layer_counts=shape.layer_counts)


def _component(
    state: State,
    at: Mapping[int, int],
    roles: Mapping[str, _Tensor],
    topology: Topology,
    stages: Sequence[Stage],
    shape: PoolShape,
) -> Component:
    return state.component(
        {
            name: {
                layer: RawTensor(address + role.offset, role.shape, role.strides, role.dtype) for layer, address in at.items()
            }
            for name, role in roles.items()
        },
        topology=topology,
        axes={role.name: shape.axes(role) for role in state.roles},
        layers_by_stage=[tuple(filter(s.owns_layer, state.layers)) for s in stages] if topology.pp > 1 else None,
        tokens=all_tokens if state.ring is not None else shape.tokens,
    )


def _cut(state: State, topology: Topology, shape: PoolShape) -> tuple[int, dict[str, _Tensor]]:
    """Bytes of one layer of a state, and its roles in it: behind each other in every row where packed, else one by one."""
    rows, page_size = shape.num_rows(state), state.page_tokens(shape.page_size)
    dims = {r.name: r.of({}, axes=shape.axes(r)).local_shape(topology, rows=rows, page_size=page_size) for r in state.roles}
    dtypes = {role.name: dtype_of(role, state.name) for role in state.roles}
    row_nbytes = {name: math.prod(local[1:]) * ITEMSIZE[dtypes[name]] for name, local in dims.items()}
    sizes = row_nbytes if state.packed else {name: _aligned(rows * nbytes) for name, nbytes in row_nbytes.items()}
    starts = dict(zip(sizes, itertools.accumulate((0, *sizes.values())), strict=False))
    packed_row = sum(row_nbytes.values())
    roles = {}
    for name, local in dims.items():
        row = (packed_row if state.packed else row_nbytes[name]) // ITEMSIZE[dtypes[name]]
        strides = (row, *(math.prod(local[axis + 1 :]) for axis in range(1, len(local))))
        roles[name] = _Tensor(starts[name], local, strides, dtypes[name])
    return (_aligned(rows * packed_row) if state.packed else sum(sizes.values())), roles


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# -- where tokens lie together -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Runs:
    """Maximal runs of positions (tokens, or granules of them) that lie in one row on each side, in order: int64 columns."""

    rows: tuple[Ints, Ints]
    offsets: tuple[Ints, Ints]
    length: Ints


def token_runs(plan: ComponentPlan, granule: int, *, source: Rows, destination: Rows, need: tuple[int, int]) -> Runs:
    """The runs of the needed tokens that both sides own; costs what there are pages and edges, not tokens.

    Raises `LayoutError` where the rows given do not reach.
    """
    if plan.source.tokens is None or plan.destination.tokens is None:
        zero = np.zeros(1, dtype=np.int64)
        return Runs((_slot(source), _slot(destination)), (zero, zero), zero + 1)
    spaces, start, stop = (plan.source, plan.destination), need[0] // granule, need[1] // granule
    owned = [_owned(space, need[1]) for space in spaces]
    cuts = [np.array([start], dtype=np.int64)]
    for each, space in zip(owned, spaces, strict=True):
        cuts.extend(edges // granule for edges in _edges(each, space.page_size, need))
    begins = np.unique(np.concatenate(cuts))
    begins = begins[(begins >= start) & (begins < stop)]
    length = np.diff(begins, append=stop)
    local = [each.locate(begins * granule) for each in owned]
    both = (local[0] >= 0) & (local[1] >= 0)
    where = [
        _place(rows, found[both] // granule, space, granule, need[1])
        for rows, found, space in zip((source, destination), local, spaces, strict=True)
    ]
    return _maximal(Runs((where[0][0], where[1][0]), (where[0][1], where[1][1]), length[both]))


def _slot(rows: Rows) -> Ints:
    assert isinstance(rows, Slot)
    return np.array([rows.id], dtype=np.int64)


def _owned(space: RowSpace, num_tokens: int) -> Intervals | Periodic:
    assert space.tokens is not None
    return space.tokens.within(num_tokens) if isinstance(space.tokens, Share) else space.tokens


def _edges(owned: Intervals | Periodic, page_size: int, need: tuple[int, int]) -> Iterator[Ints]:
    """Tokens at which an ownership or one of its pages begins or ends, as far as they are needed."""
    first, last = (owned.count_below(token) for token in need)
    pages = np.arange(first // page_size * page_size, last, page_size, dtype=np.int64)
    if isinstance(owned, Periodic):
        if owned.run < owned.period:
            begin = max(need[0] - owned.offset, 0) // owned.period * owned.period + owned.offset
            turns = np.arange(begin, need[1], owned.period, dtype=np.int64)
            yield turns
            yield turns + owned.run
        turn, inside = np.divmod(pages, owned.run)
        yield owned.offset + turn * owned.period + inside
        return
    before = 0
    for part in owned.parts:
        yield np.array(part, dtype=np.int64)
        size = part.stop - part.start
        inside_part = pages[(pages >= before) & (pages < before + size)]
        yield part.start + inside_part - before
        before += size


def _place(rows: Rows, local: Ints, space: RowSpace, granule: int, num_tokens: int) -> tuple[Ints, Ints]:
    """Page id and offset of each local position."""
    assert isinstance(rows, Pages)
    index, offset = np.divmod(local, space.page_size // granule)
    index -= first_page(space, int(rows.first_token), num_tokens)
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(rows.ids):
        raise LayoutError(f"pages: expected {int(index.max()) + 1}, found {len(rows.ids)} from token {rows.first_token} on")
    return rows.ids[index].astype(np.int64), offset


def _maximal(runs: Runs) -> Runs:
    """The same runs, joined where the next one goes on in the same rows."""
    if not len(runs.length):
        return runs
    goes_on = np.ones(len(runs.length) - 1, dtype=bool)
    for row, offset in zip(runs.rows, runs.offsets, strict=True):
        goes_on &= (row[1:] == row[:-1]) & (offset[:-1] + runs.length[:-1] == offset[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    rows, offsets = (tuple(column[starts] for column in side) for side in (runs.rows, runs.offsets))
    return Runs((rows[0], rows[1]), (offsets[0], offsets[1]), np.add.reduceat(runs.length, starts))


# -- how many pieces ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """One piece: its address on each side, and its size."""

    addresses: tuple[int, int]
    nbytes: int

    def goes_on(self, following: _Copy) -> bool:
        """Whether another begins where this one ends, on both sides."""
        return all(a + self.nbytes == b for a, b in zip(self.addresses, following.addresses, strict=True))


@dataclass(frozen=True)
class SpanCount:
    """What a span class makes of a request: bytes, pieces with neighbours joined, and its ends."""

    nbytes: int
    pieces: int
    first: _Copy
    last: _Copy


def count_span(span: SpanClass, runs: Runs) -> SpanCount | None:
    """Counts for one span class; `None` where there is nothing to move. Pieces come in order of layers, runs, tokens, dims."""
    if not len(runs.length) or not len(span.layers):
        return None
    sizes = runs.length * span.nbytes if span.dense else np.full(len(runs.length), span.nbytes, dtype=np.int64)
    within = _within(span, runs, sizes)
    starts = [
        rows * span.row_strides[side] + offsets * span.token_strides[side]
        for side, (rows, offsets) in enumerate(zip(runs.rows, runs.offsets, strict=True))
    ]
    follows = np.ones(len(sizes) - 1, dtype=bool)
    for start, tail in zip(starts, within.tails, strict=True):
        follows &= start[:-1] + tail[:-1] + sizes[:-1] == start[1:]
    bases = [(int(ours), int(theirs)) for ours, theirs in zip(span.source_bases, span.destination_bases, strict=True)]
    begin = int(starts[0][0]), int(starts[1][0])
    end = tuple(int(start[-1] + tail[-1]) for start, tail in zip(starts, within.tails, strict=True))
    firsts = [_Copy((ours + begin[0], theirs + begin[1]), int(sizes[0])) for ours, theirs in bases]
    lasts = [_Copy((ours + end[0], theirs + end[1]), int(sizes[-1])) for ours, theirs in bases]
    per_layer = within.pieces - within.joins - int(follows.sum())
    joined = sum(last.goes_on(first) for last, first in zip(lasts, firsts[1:], strict=False))
    nbytes = len(bases) * span.nbytes * int(runs.length.sum()) * math.prod(dim[0] for dim in span.dims)
    return SpanCount(nbytes, len(bases) * per_layer - joined, firsts[0], lasts[-1])


@dataclass(frozen=True, eq=False)
class _Within:
    """The pieces of one layer's runs before any is joined, how many follow their neighbour inside a run, and per side and
    run how far its last piece begins behind its first.
    """

    pieces: int
    joins: int
    tails: tuple[Ints, Ints]


def _within(span: SpanClass, runs: Runs, sizes: Ints) -> _Within:
    """A step at one level goes to the next piece by its stride, less what the levels inside it have gone already."""
    levels = [] if span.dense else [(runs.length, span.token_strides)]
    levels += [(np.full_like(sizes, count), (ours, theirs)) for count, ours, theirs in span.dims]
    outside = list(itertools.accumulate((count for count, _ in levels), np.multiply, initial=np.ones_like(sizes)))
    tails, joins = [np.zeros_like(sizes), np.zeros_like(sizes)], 0
    for (count, strides), times in reversed(list(zip(levels, outside, strict=False))):
        follow = (strides[0] - tails[0] == sizes) & (strides[1] - tails[1] == sizes)
        joins += int(((count - 1) * times)[follow].sum())
        tails = [tail + (count - 1) * stride for tail, stride in zip(tails, strides, strict=True)]
    return _Within(int(outside[-1].sum()), joins, (tails[0], tails[1]))


def count(spans: Iterable[SpanCount | None]) -> tuple[int, int]:
    """Bytes and pieces of several span classes one behind the other, neighbours joined across them too."""
    nbytes = pieces = 0
    before: SpanCount | None = None
    for span in spans:
        if span is None:
            continue
        nbytes, pieces = nbytes + span.nbytes, pieces + span.pieces
        pieces -= before is not None and before.last.goes_on(span.first)
        before = span
    return nbytes, pieces


class PieceCounter:
    """Counts components of pairs of ranks. Ranks of a group have the same rows, so runs of tokens are found once for them."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, tuple[Rows, Rows, Runs]] = {}

    def component(
        self, plan: ComponentPlan, *, source: Rows, destination: Rows, need: tuple[int, int]
    ) -> list[SpanCount | None]:
        """The counts of every span class of a pair's component for one request."""
        return [
            count_span(span, self._token_runs(plan, span.granule, source=source, destination=destination, need=need))
            for span in plan.spans
        ]

    def _token_runs(self, plan: ComponentPlan, granule: int, *, source: Rows, destination: Rows, need: tuple[int, int]) -> Runs:
        spaces = tuple((space.tokens, space.page_size) for space in (plan.source, plan.destination))
        key = spaces, granule, need, id(source), id(destination)
        if key not in self._runs:  # the rows are kept with it, so that their ids stay theirs
            runs = token_runs(plan, granule, source=source, destination=destination, need=need)
            self._runs[key] = source, destination, runs
        return self._runs[key][2]


def why_so_long(span: SpanClass, plan: ComponentPlan) -> str:
    """What ends a run of this class, in words with both sides' strides."""
    if plan.source.tokens is None:
        steps = [f"{size(ours)} at the source and {size(theirs)} at the destination" for _, ours, theirs in span.dims[-1:]]
        return f"the next run begins {steps[0]} further on" if steps else "all of it lies together on both sides"
    if not span.dense:
        ours, theirs = span.token_strides
        what = "token" if span.granule == 1 else f"{span.granule} tokens"
        return (
            f"every {what} ends a run: the next begins {size(ours)} further on at the source and {size(theirs)} "
            "at the destination"
        )
    pages = {plan.source.page_size, plan.destination.page_size}
    page = f"pages of {plan.source.page_size} and {plan.destination.page_size} tokens" if len(pages) > 1 else "page"
    return f"runs end with the {page}" + (", and with each head or channel in it" if span.dims else "")


def size(nbytes: float) -> str:
    """Bytes as a person writes them: 512 B, 16 KiB, 33.6 MB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.4g} KiB" if nbytes < 1024**2 else f"{nbytes / 1e6:.1f} MB"
