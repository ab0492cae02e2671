"""Binding: a plan and the rows of one request give addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.copies import Columns, CopyBatch
from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.spans import SpanRuns, SpanShape
from disagg.layout.ownership import Intervals, Ints, Periodic, Share
from disagg.layout.placement import Placement
from disagg.layout.plan import ComponentPlan, RowSpace, count_tokens, edges, first_page, owned_tokens, row_space
from disagg.layout.tables import ComponentLayout

Stream = _native.Stream
"""One side's bytes of a request, in the order of `bind`."""
MAX_TOKENS = 2**24
"""Limit on the tokens of one range: peers send ranges."""


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
    """The copies of tokens `[start, stop)` of one request, in `layers`. Slots have no `tokens`.

    Copies are in order of spans, layers, tokens and dims; neighbours are joined. `num_tokens`: the length of the whole
    request if `tokens` is only a part; shares depend on it. With `out` the batch lies in its memory and is valid until `out`
    is used again. Raises `LayoutError`, with the first needed position that has no page or slot inside its pool, or a source
    page that is listed twice.
    """
    bound = bind_rows(plan, source=source, destination=destination, tokens=tokens, num_tokens=num_tokens, layers=layers)
    return bound.copies(out=out, num_threads=num_threads)


class BoundRows(msgspec.Struct, frozen=True, eq=False):
    """Span classes, by number, and the request's runs of tokens for each (int64 `[runs, 5]`, as of `token_runs`). `layers`:
    int64, `None`: all.
    """

    plan: ComponentPlan
    numbers: Sequence[int]
    runs: list[Ints]
    layers: Ints | None

    @property
    def spans(self) -> list[_native.Span]:
        return [self.plan.cores[number] for number in self.numbers]

    def span_runs(self, first: int = 0) -> tuple[SpanRuns, ...]:
        """Over `span_shapes(plan)`, whose first shape has number `first`."""
        chosen = None if self.layers is None or tuple(self.layers) == self.plan.layers else self.layers
        found = []
        for number, runs in zip(self.numbers, self.runs, strict=True):
            bases = None if chosen is None else np.flatnonzero(np.isin(self.plan.spans[number].layers, chosen))
            found.append(SpanRuns(first + number, bases, runs))
        return tuple(found)

    def copies(self, *, out: Columns | None = None, num_threads: int = 1) -> CopyBatch:
        columns = Columns() if out is None else out
        return CopyBatch.of_columns(*_native.expand(self.spans, self.runs, self.layers, num_threads, columns))

    def num_copies(self) -> int:
        """Before neighbours in different layers or spans are joined."""
        return _native.num_copies(self.spans, self.runs, self.layers)

    def has_copies(self, count: int) -> bool:
        """Whether `num_copies` is at least `count`; counting the first runs is usually enough."""
        first = _native.num_copies(self.spans, [runs[:count] for runs in self.runs], self.layers)
        return first >= count or self.num_copies() >= count

    def at_destination(self) -> tuple[int, int]:
        """The bytes and runs at the destination, whatever the source's order or format."""
        stream = Stream(source=False)
        self.append_to(stream)
        return stream.total, stream.num_pieces

    def append_to(self, stream: _native.Stream) -> None:
        stream.append(self.spans, self.runs, self.layers)


def bind_rows(
    plan: ComponentPlan,
    *,
    source: Rows,
    destination: Rows,
    tokens: tuple[int, int] | None = None,
    num_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    spans: Sequence[int] | None = None,
) -> BoundRows:
    """Arguments are those of `bind`. `spans` selects span classes by number."""
    by_granule: dict[int, Ints] = {}
    runs: list[Ints] = []
    numbers = range(len(plan.spans)) if spans is None else spans
    for number in numbers:
        granule = plan.spans[number].granule
        if granule not in by_granule:
            by_granule[granule] = token_runs(plan, granule, source, destination, tokens, num_tokens)
        runs.append(by_granule[granule])
    return BoundRows(plan, numbers, runs, None if layers is None else np.ascontiguousarray(layers, dtype=np.int64))


def span_shapes(plan: ComponentPlan) -> tuple[SpanShape, ...]:
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
            formats=span.formats,
            scales=span.scales,
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
    """Runs of positions that lie in one page on each side, as a table of `_native.token_runs`."""
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
    runs, fault = _native.token_runs(tokens[0], tokens[1], granule, held, wanted)
    if fault is not None:
        rows, space, side = ((source, ours, "source"), (destination, theirs, "destination"))[fault[0]]
        raise _no_place(rows, space, fault, name, side)
    _check_twice(runs, ours, name, "source")
    return runs


def _check_range(tokens: tuple[int, int], name: str) -> None:
    """Raises `LayoutError`: the range may come from a peer."""
    start, stop = tokens
    if not 0 <= start <= stop <= start + MAX_TOKENS or stop >= 2**62:
        raise LayoutError(f"component {name!r}: expected a token range of at most {MAX_TOKENS} tokens, found [{start}, {stop})")


def _slot(rows: Rows, space: RowSpace, name: str, side: str) -> int:
    if not isinstance(rows, Slot):
        raise LayoutError(f"component {name!r}, {side}: expected a Slot, found {type(rows).__name__}")
    if rows.id >= space.num_rows:
        raise LayoutError(f"component {name!r}, {side}: slot {rows.id} is outside the pool of {space.num_rows}")
    return rows.id


def _pages(rows: Rows, space: RowSpace, granule: int, num_tokens: int, name: str, side: str) -> _native.PageList:
    if not isinstance(rows, Pages):
        raise LayoutError(f"component {name!r}, {side}: expected Pages, found {type(rows).__name__}")
    if space.page_size % granule:
        what = f"component {name!r}, {side}"
        raise LayoutError(f"{what}: a granule of {granule} tokens does not divide the page of {space.page_size}")
    cuts, period = space.fixed_edges or edges(owned_tokens(space, num_tokens))
    first = rows.first_token
    return _native.PageList(
        rows.ids,
        first_page=min(first_page(space, first, num_tokens), 2**62) if first else 0,
        page_size=space.page_size,
        num_rows=space.num_rows,
        edges=cuts,
        period=period,
    )


def check_share(plan: ComponentPlan, source: Rows, num_tokens: int) -> None:
    """Raise `LayoutError` if a rank whose share of the tokens depends on their number lists more pages than that share has:
    it has computed another number, so its pages hold other tokens.
    """
    space = plan.source
    if not isinstance(space.tokens, Share) or not isinstance(source, Pages):
        return
    count = -(-count_tokens(space, num_tokens, num_tokens) // space.page_size)
    listed = first_page(space, source.first_token, num_tokens) + len(source.ids)
    if listed > count:
        raise LayoutError(
            f"component {plan.name!r}, source: expected at most {count} pages, this rank's share of {num_tokens} tokens, found "
            f"{listed}; the receiver's need must end in the last page of the prompt"
        )


def _no_place(rows: Rows, space: RowSpace, fault: _native.Fault, name: str, side: str) -> LayoutError:
    assert isinstance(rows, Pages)
    _, listed, token, row = fault
    where = f"component {name!r}, {side}"
    if listed:
        return LayoutError(f"{where}: token {token} lies in page {row}, outside the pool of {space.num_rows} pages")
    return LayoutError(
        f"{where}: needed token {token} has no page; {len(rows.ids)} pages of {space.page_size} tokens are listed, "
        f"from token {rows.first_token} on"
    )


def check_rows(
    layout: ComponentLayout, placement: Placement, rows: Rows, need: tuple[int, int]
) -> npt.NDArray[np.integer[Any]]:
    """The ids of the rows with a needed token that this rank owns, some perhaps more than once. Raises `LayoutError`, with
    the first token without a page inside the pool, or a page that would be written twice.
    """
    space, name = row_space(layout, placement), layout.name
    if space.tokens is None:
        return np.array([_slot(rows, space, name, "destination")])
    ids = [np.zeros(0, np.int64)]
    for granule in {tensor.token.granule for tensor in layout.tensors if tensor.token}:
        _check_range(need, name)
        pages = _pages(rows, space, granule, need[1], name, "destination")
        runs, fault = _native.token_runs(*need, granule, pages, pages)
        if fault is not None:
            raise _no_place(rows, space, fault, name, "destination")
        _check_twice(runs, space, name, "destination")
        ids.append(runs[:, 0])
    return np.concatenate(ids)


def _check_twice(runs: Ints, space: RowSpace, name: str, side: str) -> None:
    """Raise `LayoutError` for a page that holds two of the needed tokens in one place."""
    if _are_unique(runs[:, 0]):
        return
    starts = runs[:, 0] * space.page_size + runs[:, 1]
    order = np.argsort(starts, kind="stable")
    stops = np.maximum.accumulate((starts + runs[:, 4])[order])
    twice = starts[order[1:]] < stops[:-1]
    if twice.any():
        page = int(runs[order[1:][twice][0], 0])
        raise LayoutError(f"component {name!r}, {side}: page {page} is listed twice for needed tokens")


def _are_unique(ids: npt.NDArray[np.int64]) -> bool:
    """Sorting very many takes ten times as long."""
    if len(ids) == 0:
        return True
    first = ids.min()
    seen = np.zeros(ids.max() - first + 1, np.bool_)
    seen[ids - first] = True
    return bool(np.count_nonzero(seen) == len(ids))


def listed_rows(
    layout: ComponentLayout, placement: Placement, rows: Rows, tokens: tuple[int, int] | None
) -> npt.NDArray[np.integer[Any]]:
    """The listed rows inside the pool that hold `tokens` (`None`: all); all listed rows if this rank's tokens depend on the
    request's length.
    """
    space = row_space(layout, placement)
    ids = np.array([rows.id]) if isinstance(rows, Slot) else rows.ids
    if isinstance(rows, Pages) and tokens is not None and isinstance(space.tokens, Intervals | Periodic):
        first, start, stop = (space.tokens.count_below(token) for token in (rows.first_token, *tokens))
        size = space.page_size
        ids = ids[max(start // size - first // size, 0) : max(-(-stop // size) - first // size, 0)] if start < stop else ids[:0]
    return ids[(ids >= 0) & (ids < space.num_rows)]
