"""Which bytes go from which rank to which, computed once per pair of instances, and bound to rows per request.

`elect` names one writer for every destination byte, over the whole layout tables of both instances, so that both sides
compute the same and compare `Election.digest`. `make_plan` projects it on one pair of ranks. `bind` gives addresses.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from disagg import _core
from disagg.component import Placement, TensorPlacement
from disagg.copies import Columns, CopyBatch
from disagg.errors import LayoutError
from disagg.layout import (
    Axis,
    ComponentLayout,
    Interval,
    Intervals,
    LayoutTable,
    Owned,
    Periodic,
    Share,
    TensorLayout,
    agreed_components,
    overlap,
    plain_integer,
)
from disagg.memory import ITEMSIZE
from disagg.rows import Pages, Rows, Slot
from disagg.spans import SpanRuns, SpanShape

Ints = npt.NDArray[np.int64]
Box = tuple[Interval, ...]
"""One interval on each inner axis of a tensor, in the destination layout's order of axes."""


class Flow(msgspec.Struct, frozen=True):
    """One writer's share of one tensor of one destination rank: a box of the inner axes, in some layers, all tokens it owns."""

    source: int
    destination: int
    component: str
    role: str
    box: Box
    layers: tuple[int, ...]


class Election(msgspec.Struct, frozen=True, dict=True):
    """One writer for every destination byte, as flows between group ranks."""

    components: tuple[str, ...]
    flows: tuple[Flow, ...]

    @cached_property
    def digest(self) -> bytes:
        """Equal exactly where two elections are equal."""
        return hashlib.sha256(msgspec.msgpack.encode(self, enc_hook=plain_integer)).digest()

    @cached_property
    def by_pair(self) -> dict[tuple[int, int], tuple[Flow, ...]]:
        """Flows by (source group rank, destination group rank)."""
        pairs: dict[tuple[int, int], list[Flow]] = defaultdict(list)
        for flow in self.flows:
            pairs[flow.source, flow.destination].append(flow)
        return {pair: tuple(flows) for pair, flows in pairs.items()}

    def writers(self, destination: int) -> tuple[int, ...]:
        """Group ranks that write to `destination`."""
        return tuple(sorted({source for source, found in self.by_pair if found == destination}))

    def readers(self, source: int) -> tuple[int, ...]:
        """Group ranks that `source` writes to."""
        return tuple(sorted({destination for found, destination in self.by_pair if found == source}))


def elect(source: LayoutTable, destination: LayoutTable) -> Election:
    """The writers of every destination byte. Where R source ranks hold the same bytes, each writes 1/R of the
    (component, layer) runs, give or take one.

    Raises `LayoutError` where the tables cannot be matched, or a destination byte has no source: names the axis, what
    the sources own and what the destination needs.
    """
    names = agreed_components(source, destination)
    turns: dict[tuple[int, ...], Iterator[int]] = {}
    flows: dict[tuple[int, int, str, str, Box], list[int]] = defaultdict(list)
    holders = {name: _holders(source.components[name]) for name in names}
    for reader, rank in enumerate(destination.ranks):
        for name in names:
            component = rank.by_name.get(name)
            if component is not None:
                _elect_component(reader, component, holders[name], turns, flows)
    return Election(names, tuple(Flow(*key, tuple(layers)) for key, layers in flows.items()))


def _holders(layouts: tuple[ComponentLayout | None, ...]) -> dict[str, list[tuple[int, TensorLayout]]]:
    """By role, the source ranks that hold any of it."""
    found: dict[str, list[tuple[int, TensorLayout]]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for tensor in layout.tensors if layout else ():
            if tensor.layers:
                found[tensor.role].append((rank, tensor))
    return found


def _elect_component(
    reader: int,
    component: ComponentLayout,
    holders: Mapping[str, list[tuple[int, TensorLayout]]],
    turns: dict[tuple[int, ...], Iterator[int]],
    flows: dict[tuple[int, int, str, str, Box], list[int]],
) -> None:
    """Add the flows of one component of one destination rank."""
    by_layer: dict[int, list[tuple[TensorLayout, Box, list[tuple[int, ...]]]]] = defaultdict(list)
    for tensor in component.tensors:
        where = f"component {component.name!r}, tensor {tensor.role!r}, destination rank {reader}"
        sources = holders.get(tensor.role, [])
        for box, holding in _cells(tensor, sources):
            for layer in tensor.layers:
                ranks = [(rank, held) for rank, held in holding if layer in held.layer_set]
                if not ranks:
                    raise LayoutError(_uncovered(where, tensor, box, layer, sources))
                by_layer[layer].append((tensor, box, _token_classes(ranks, f"{where}, layer {layer}")))
    for layer in sorted(by_layer):
        chosen: dict[tuple[int, ...], int] = {}
        for tensor, box, classes in by_layer[layer]:
            for candidates in classes:
                if candidates not in chosen:
                    turn = turns.setdefault(candidates, itertools.cycle(candidates))
                    chosen[candidates] = next(turn)
                flows[chosen[candidates], reader, component.name, tensor.role, box].append(layer)


def _cells(
    tensor: TensorLayout, sources: Sequence[tuple[int, TensorLayout]]
) -> Iterator[tuple[Box, list[tuple[int, TensorLayout]]]]:
    """The destination's inner positions, cut wherever any source's ownership begins or ends, each with its holders."""
    per_axis = []
    for axis in tensor.inner_axes:
        size = axis.size or 0
        owned = [held.axis(axis.name).owned.within(size) for _, held in sources]
        cuts = sorted({edge for parts in owned for part in parts.parts for edge in part})
        per_axis.append([piece for part in axis.owned.within(size).parts for piece in _cut(part, cuts)])
    for box in itertools.product(*per_axis):
        yield (
            box,
            [
                (rank, held)
                for rank, held in sources
                if all(_holds(held.axis(a.name), part) for a, part in zip(tensor.inner_axes, box, strict=True))
            ],
        )


def _cut(part: Interval, cuts: Sequence[int]) -> Iterator[Interval]:
    edges = [part.start, *(cut for cut in cuts if part.start < cut < part.stop), part.stop]
    return itertools.starmap(Interval, itertools.pairwise(edges))


def _holds(axis: Axis, part: Interval) -> bool:
    return any(own.start <= part.start and part.stop <= own.stop for own in axis.owned.within(axis.size or 0).parts)


def _token_classes(ranks: list[tuple[int, TensorLayout]], where: str) -> list[tuple[int, ...]]:
    """Holders grouped by the tokens they own: ranks of one group are replicas; the groups share out the tokens."""
    classes: dict[Owned | None, list[int]] = defaultdict(list)
    for rank, held in ranks:
        classes[held.token.owned if held.token else None].append(rank)
    if None not in classes:
        _check_tokens([owned for owned in classes if owned is not None], where)
    return [tuple(members) for members in classes.values()]


def _check_tokens(owned: Sequence[Owned], where: str) -> None:
    """That the sources' token ownerships are a partition of every request's tokens; raises `LayoutError` otherwise."""
    if not _is_partition(tuple(owned)):
        raise LayoutError(f"{where}, axis 'token': sources own {', '.join(map(str, owned))}, which is not each token once")


@functools.lru_cache(maxsize=1024)
def _is_partition(owned: tuple[Owned, ...]) -> bool:
    """Whether every token of a request of any length is owned exactly once."""
    periodic = [each for each in owned if isinstance(each, Periodic)]
    shares = [each for each in owned if isinstance(each, Share)]
    if len(periodic) == len(owned):
        turn = math.lcm(*(each.period for each in periodic))
        if turn > MAX_TOKEN_PERIOD:
            raise LayoutError(f"axis 'token': ownership repeats only after {turn} tokens, expected {MAX_TOKEN_PERIOD} at most")
        settled = max(each.offset for each in periodic)
        if settled > MAX_TOKEN_PERIOD:
            return False
        tokens = np.arange(settled + turn, dtype=np.int64)
        times = sum((each.locate(tokens) >= 0).astype(np.int64) for each in periodic)
        return bool((np.asarray(times) == 1).all())
    cuts = {(each.parts, each.granule) for each in shares}
    return len(shares) == len(owned) and len(cuts) == 1 and sorted(s.index for s in shares) == list(range(shares[0].parts))


MAX_TOKEN_PERIOD = 2**20


def _uncovered(where: str, tensor: TensorLayout, box: Box, layer: int, sources: Sequence[tuple[int, TensorLayout]]) -> str:
    """The message for a box that no source holds in `layer`."""
    needs = ", ".join(f"{axis.name!r} {part}" for axis, part in zip(tensor.inner_axes, box, strict=True))
    owned = "; ".join(
        ", ".join(f"{axis.name!r} {axis.owned}" for axis in held.inner_axes) + f" (source rank {rank})"
        for rank, held in sources
    )
    return f"{where}, layer {layer}: destination needs {needs} and no source holds it; sources own {owned}"


@dataclass(frozen=True, eq=False)
class SpanClass:
    """Copies of one shape: for each base pair, each run of tokens, and each step of `dims`, one run of bytes.

    `source_bases` and `destination_bases`, uint64 `[layers]`, include the offsets of the box. `dims` are
    `(count, source_stride, destination_stride)` in bytes, outermost first. A token run of `n` positions is one run of
    `n * nbytes` where `dense`, else `n` runs of `nbytes`, `token_strides` apart.
    """

    role: str
    layers: Ints
    source_bases: npt.NDArray[np.uint64]
    destination_bases: npt.NDArray[np.uint64]
    row_strides: tuple[int, int]
    token_strides: tuple[int, int]
    granule: int
    dims: tuple[tuple[int, int, int], ...]
    nbytes: int
    dense: bool

    @cached_property
    def core(self) -> _core.Span:
        """The same for the compiled core."""
        return _core.Span(
            self.layers,
            self.source_bases,
            self.destination_bases,
            row_strides=self.row_strides,
            token_strides=self.token_strides,
            dims=self.dims,
            nbytes=self.nbytes,
            dense=self.dense,
        )


@dataclass(frozen=True, eq=False)
class RowSpace:
    """How one side of a component addresses its rows: page size and count, and the tokens it owns (`None` for slots)."""

    page_size: int
    num_rows: int
    tokens: Owned | None

    @cached_property
    def fixed_edges(self) -> tuple[Ints, int] | None:
        """The tokens that it owns of every request, for the compiled core; `None` where that depends on its length."""
        return _edges(self.tokens) if isinstance(self.tokens, Intervals | Periodic) else None


@dataclass(frozen=True, eq=False)
class ComponentPlan:
    """What one source rank writes of one component to one destination rank."""

    name: str
    source: RowSpace
    destination: RowSpace
    spans: tuple[SpanClass, ...]

    @cached_property
    def cores(self) -> list[_core.Span]:
        """The span classes, for the compiled core."""
        return [span.core for span in self.spans]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer ids that this pair moves anything of."""
        return tuple(sorted({int(layer) for span in self.spans for layer in span.layers}))


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """What one source rank writes to one destination rank, for every component of which it writes anything."""

    components: dict[str, ComponentPlan]


def make_plan(
    election: Election,
    *,
    source: tuple[int, LayoutTable, Mapping[str, Placement]],
    destination: tuple[int, LayoutTable, Mapping[str, Placement]],
) -> TransferPlan:
    """The plan of one pair of ranks; each side is its group rank, its instance's table, and its placements by component."""
    components: dict[str, ComponentPlan] = {}
    flows = election.by_pair.get((source[0], destination[0]), ())
    for name, group in itertools.groupby(sorted(flows, key=lambda f: f.component), key=lambda f: f.component):
        ours, theirs = source[1].ranks[source[0]].by_name[name], destination[1].ranks[destination[0]].by_name[name]
        placed, target = source[2][name], destination[2][name]
        spans = tuple(_span(flow, ours.tensor(flow.role), theirs.tensor(flow.role), placed, target) for flow in group)
        components[name] = ComponentPlan(name, row_space(ours, placed), row_space(theirs, target), spans)
    return TransferPlan(components)


def row_space(layout: ComponentLayout, placement: Placement) -> RowSpace:
    """How a rank addresses its rows of a component."""
    return RowSpace(placement.page_size, placement.num_rows, layout.tokens)


def first_page(space: RowSpace, token: int, num_tokens: int) -> int:
    """The number, among a rank's pages of a request, of the page with its first token at or after `token`."""
    return count_tokens(space, token, num_tokens) // space.page_size


def count_tokens(space: RowSpace, token: int, num_tokens: int) -> int:
    """How many tokens below `token` a rank holds, of a request of `num_tokens`."""
    return _owned(space, num_tokens).count_below(token)


def _span(
    flow: Flow, source: TensorLayout, destination: TensorLayout, source_place: Placement, destination_place: Placement
) -> SpanClass:
    """The shape of one flow in both memories."""
    ours, theirs = source_place.tensor(flow.role), destination_place.tensor(flow.role)
    offsets = [0, 0]
    axes: list[tuple[int, int, int]] = []
    for axis, part in zip(destination.inner_axes, flow.box, strict=True):
        size = axis.size or 0
        for side, (layout, place) in enumerate(((source, ours), (destination, theirs))):
            (piece,) = overlap(layout.axis(axis.name).owned, Intervals((part,)), size=size)
            offsets[side] += piece.source_offset * place.strides[axis.name]
        axes.append((part.stop - part.start, ours.strides[axis.name], theirs.strides[axis.name]))
    dims, nbytes = _fold(axes, ITEMSIZE[destination.dtype])
    token = destination.token
    strides = (ours.strides[token.name], theirs.strides[token.name]) if token else (0, 0)
    layers = np.array(flow.layers, dtype=np.int64)
    return SpanClass(
        role=flow.role,
        layers=layers,
        source_bases=_bases(ours, layers, offsets[0]),
        destination_bases=_bases(theirs, layers, offsets[1]),
        row_strides=(ours.row_stride, theirs.row_stride),
        token_strides=strides,
        granule=token.granule if token else 1,
        dims=dims,
        nbytes=nbytes,
        dense=strides == (nbytes, nbytes),
    )


def _bases(place: TensorPlacement, layers: Ints, offset: int) -> npt.NDArray[np.uint64]:
    by_layer = dict(zip(place.layers, place.bases, strict=True))
    return np.array([by_layer[int(layer)] + offset for layer in layers], dtype=np.uint64)


def _fold(axes: Iterable[tuple[int, int, int]], itemsize: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """`(count, source stride, destination stride)` per axis as the longest runs of bytes: remaining dims and run length.

    Innermost first, an axis whose strides on both sides are the run so far joins the run; neighbouring dims join where
    the outer one continues the inner one on both sides.
    """
    nbytes = itemsize
    dims: list[tuple[int, int, int]] = []
    for count, ours, theirs in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: (axis[2], axis[1])):
        if not dims and ours == theirs == nbytes:
            nbytes *= count
        elif dims and (ours, theirs) == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            dims[-1] = (dims[-1][0] * count, dims[-1][1], dims[-1][2])
        else:
            dims.append((count, ours, theirs))
    return tuple(reversed(dims)), nbytes


"""Memory for the columns of a batch that `bind` grows and uses again."""
Stream = _core.Stream
"""One side's bytes of a request in the order of `bind`, to be gathered from or scattered to."""


def bind(
    plan: ComponentPlan,
    *,
    source: Rows,
    destination: Rows,
    tokens: tuple[int, int] | None = None,
    num_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    out: Columns | None = None,
    num_threads: int = 1,
) -> CopyBatch:
    """The copies of one request: `tokens` `[start, stop)` of the request that both sides own (slots: `None`), in `layers`.

    In order of spans, layers, tokens and dims, neighbours joined. `num_tokens` is the length of the whole request, where
    `tokens` is only a part of it: shares follow from it. With `out` the batch lies in its memory, and is good until `out`
    is used again. Every needed position must have a page or slot inside its pool on both sides; raises `LayoutError`
    naming the first that has none, before anything is posted.
    """
    placed = place(plan, source=source, destination=destination, tokens=tokens, num_tokens=num_tokens, layers=layers)
    return placed.copies(out=out, num_threads=num_threads)


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A plan's span classes over a request's runs of tokens: what its copies and its streams are made of."""

    plan: ComponentPlan
    numbers: Sequence[int]
    runs: list[Ints]
    layers: Ints | None

    @property
    def spans(self) -> list[_core.Span]:
        """The span classes, for the compiled core."""
        return [self.plan.cores[number] for number in self.numbers]

    def span_runs(self, first: int = 0) -> tuple[SpanRuns, ...]:
        """The same over `span_shapes(plan)`, the first of which is number `first`."""
        chosen = None if self.layers is None or tuple(self.layers) == self.plan.layers else self.layers
        found = []
        for number, runs in zip(self.numbers, self.runs, strict=True):
            bases = None if chosen is None else np.flatnonzero(np.isin(self.plan.spans[number].layers, chosen))
            found.append(SpanRuns(first + number, bases, runs))
        return tuple(found)

    def copies(self, *, out: Columns | None = None, num_threads: int = 1) -> CopyBatch:
        """What `bind` gives."""
        columns = Columns() if out is None else out
        return CopyBatch.of_columns(*_core.expand(self.spans, self.runs, self.layers, num_threads, columns))

    def num_copies(self) -> int:
        """How many copies `bind` would give, but for neighbours in different layers or spans, which it joins."""
        return _core.num_copies(self.spans, self.runs, self.layers)

    def has_copies(self, count: int) -> bool:
        """Whether `num_copies` is at least `count`; the first runs alone tell that of most requests."""
        first = _core.num_copies(self.spans, [runs[:count] for runs in self.runs], self.layers)
        return first >= count or self.num_copies() >= count

    def append_to(self, stream: _core.Stream) -> None:
        """Add the copies' bytes, in their order, to a stream of either side."""
        stream.append(self.spans, self.runs, self.layers)


def place(
    plan: ComponentPlan,
    *,
    source: Rows,
    destination: Rows,
    tokens: tuple[int, int] | None = None,
    num_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    spans: Sequence[int] | None = None,
) -> Placed:
    """Where a request's rows put a plan's copies, all as in `bind`; only span classes `spans` where given."""
    by_granule: dict[int, Ints] = {}
    runs: list[Ints] = []
    numbers = range(len(plan.spans)) if spans is None else spans
    for number in numbers:
        granule = plan.spans[number].granule
        if granule not in by_granule:
            by_granule[granule] = token_runs(plan, granule, source, destination, tokens, num_tokens)
        runs.append(by_granule[granule])
    return Placed(plan, numbers, runs, None if layers is None else np.ascontiguousarray(layers, dtype=np.int64))


def span_shapes(plan: ComponentPlan) -> tuple[SpanShape, ...]:
    """The span classes of a plan as engines take them that compute addresses themselves."""
    spaces = plan.source, plan.destination
    return tuple(
        SpanShape(
            source_bases=span.source_bases,
            destination_bases=span.destination_bases,
            row_strides=span.row_strides,
            token_strides=span.token_strides,
            dims=span.dims,
            nbytes=span.nbytes,
            dense=span.dense,
            num_rows=(plan.source.num_rows, plan.destination.num_rows),
            positions=tuple(1 if space.tokens is None else space.page_size // span.granule for space in spaces),  # type: ignore[arg-type]
        )
        for span in plan.spans
    )


def token_runs(
    plan: ComponentPlan,
    granule: int,
    source: Rows,
    destination: Rows,
    tokens: tuple[int, int] | None,
    num_tokens: int | None,
) -> Ints:
    """Runs of positions that lie in one page on each side: rows, offsets and lengths, as `_core.token_runs` has them."""
    name, ours, theirs = plan.name, plan.source, plan.destination
    if ours.tokens is None or theirs.tokens is None:
        slots = _slot(source, ours, name, "source"), _slot(destination, theirs, name, "destination")
        return np.array([[slots[0], 0, slots[1], 0, 1]], dtype=np.int64)
    if tokens is None:
        raise LayoutError(f"component {name!r}: pages hold tokens, so a token range is needed")
    length = tokens[1] if num_tokens is None else num_tokens
    _check_range(tokens, name)
    held = _pages(source, ours, granule, length, name, "source")
    wanted = _pages(destination, theirs, granule, length, name, "destination")
    runs, fault = _core.token_runs(tokens[0], tokens[1], granule, held, wanted)
    if fault is not None:
        rows, space, side = ((source, ours, "source"), (destination, theirs, "destination"))[fault[0]]
        raise _no_place(rows, space, fault, name, side)
    return runs


MAX_TOKENS = 2**24


def _check_range(tokens: tuple[int, int], name: str) -> None:
    """That a range of tokens, which may come from a peer, is one, and not too long."""
    start, stop = tokens
    if not 0 <= start <= stop <= start + MAX_TOKENS or stop >= 2**62:
        raise LayoutError(f"component {name!r}: expected a token range of at most {MAX_TOKENS} tokens, found [{start}, {stop})")


def _owned(space: RowSpace, num_tokens: int) -> Intervals | Periodic:
    """The tokens that a side owns of a request of `num_tokens`."""
    assert space.tokens is not None
    return space.tokens.within(num_tokens) if isinstance(space.tokens, Share) else space.tokens


def _slot(rows: Rows, space: RowSpace, name: str, side: str) -> int:
    if not isinstance(rows, Slot):
        raise LayoutError(f"component {name!r}, {side}: expected a Slot, found {type(rows).__name__}")
    if rows.id >= space.num_rows:
        raise LayoutError(f"component {name!r}, {side}: slot {rows.id} is outside the pool of {space.num_rows}")
    return rows.id


def _pages(rows: Rows, space: RowSpace, granule: int, num_tokens: int, name: str, side: str) -> _core.PageList:
    """One side's pages as the compiled core takes them."""
    if not isinstance(rows, Pages):
        raise LayoutError(f"component {name!r}, {side}: expected Pages, found {type(rows).__name__}")
    if space.page_size % granule:
        what = f"component {name!r}, {side}"
        raise LayoutError(f"{what}: a granule of {granule} tokens does not divide the page of {space.page_size}")
    edges, period = space.fixed_edges or _edges(_owned(space, num_tokens))
    first = rows.first_token
    return _core.PageList(
        rows.ids,  # type: ignore[arg-type]  # int32, as `Pages` makes them
        first_page=min(first_page(space, first, num_tokens), 2**62) if first else 0,
        page_size=space.page_size,
        num_rows=space.num_rows,
        edges=edges,
        period=period,
    )


def _edges(owned: Intervals | Periodic) -> tuple[Ints, int]:
    """What a side owns, for the compiled core: where intervals start and stop, and their period."""
    if isinstance(owned, Periodic):
        return np.array([owned.offset, owned.offset + owned.run]), owned.period
    return np.array(owned.parts, dtype=np.int64).reshape(-1), 0


def _no_place(rows: Rows, space: RowSpace, fault: _core.Fault, name: str, side: str) -> LayoutError:
    """What is wrong with the first needed token that has no page inside its pool."""
    assert isinstance(rows, Pages)
    _, listed, token, row = fault
    where = f"component {name!r}, {side}"
    if listed:
        return LayoutError(f"{where}: token {token} lies in page {row}, outside the pool of {space.num_rows} pages")
    return LayoutError(
        f"{where}: needed token {token} has no page; {len(rows.ids)} pages of {space.page_size} tokens are listed, "
        f"from token {rows.first_token} on"
    )


def expected_tokens(owned: Owned | None, need: tuple[int, int]) -> tuple[int, int]:
    """The part of `need` that a writer must account for: the hull of the tokens it owns inside it (`None`: a slot)."""
    start, stop = need
    if owned is None or isinstance(owned, Periodic):
        return need
    parts = [(max(p.start, start), min(p.stop, stop)) for p in owned.within(stop).parts]
    parts = [part for part in parts if part[0] < part[1]]
    return (min(p[0] for p in parts), max(p[1] for p in parts)) if parts else (start, start)


def check_rows(layout: ComponentLayout, placement: Placement, rows: Rows, need: tuple[int, int]) -> None:
    """That `rows` can take every needed token that this rank owns, each in a place of its own.

    Raises `LayoutError` naming the first token without a page inside the pool, or a page that would be written twice.
    """
    space, name = row_space(layout, placement), layout.name
    if space.tokens is None:
        _slot(rows, space, name, "destination")
        return
    for granule in {tensor.token.granule for tensor in layout.tensors if tensor.token}:
        _check_range(need, name)
        pages = _pages(rows, space, granule, need[1], name, "destination")
        runs, fault = _core.token_runs(*need, granule, pages, pages)
        if fault is not None:
            raise _no_place(rows, space, fault, name, "destination")
        starts = runs[:, 0] * space.page_size + runs[:, 1]
        order = np.argsort(starts, kind="stable")
        stops = np.maximum.accumulate((starts + runs[:, 4])[order])
        twice = starts[order[1:]] < stops[:-1]
        if twice.any():
            page = int(runs[order[1:][twice][0], 0])
            raise LayoutError(
                f"component {name!r}, destination: page {page} is listed twice for needed tokens, so it would be written twice"
            )
