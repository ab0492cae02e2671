"""Binding in the compiled core gives the copies, their order and the errors of the NumPy reference."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core import _native
from disagg.core.copies import Columns, CopyBatch
from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Rows, Slot
from disagg.layout.binding import bind
from disagg.layout.ownership import EVERYTHING, Owned
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass
from disagg.testing.strategies import ownerships
from harness.reference_core import bind_numpy

MAX_INT64 = 2**63 - 1
REUSED = Columns()


def triples(copies: CopyBatch) -> list[tuple[int, int, int]]:
    return list(zip(copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True))


def outcome(function: Callable[..., CopyBatch], plan: ComponentPlan, **arguments: Any) -> object:
    """The copies, or the message of the error."""
    try:
        return triples(function(plan, **arguments))
    except LayoutError as error:
        return str(error)


@st.composite
def spans(draw: st.DrawFn, *, granules: tuple[int, ...] = (1, 2, 4)) -> SpanClass:
    """Any shape of copies, with strides that usually make neighbours adjacent."""
    nbytes = draw(st.integers(1, 4))
    stride = st.one_of(st.just(nbytes), st.integers(0, 20), st.just(2**63))
    pair = st.tuples(stride, stride)
    layers = draw(st.lists(st.integers(0, 5), max_size=4))
    base = st.one_of(st.integers(0, 30), st.just(2**64 - 3))
    return SpanClass(
        layers=np.array(layers, dtype=np.int64),
        source_bases=np.array([draw(base) for _ in layers], dtype=np.uint64),
        destination_bases=np.array([draw(base) for _ in layers], dtype=np.uint64),
        row_strides=draw(st.tuples(st.integers(0, 40), st.integers(0, 40))),
        token_strides=draw(st.tuples(st.integers(0, 8), st.integers(0, 8))),
        granule=draw(st.sampled_from(granules)),
        dims=tuple(draw(st.lists(st.tuples(st.integers(0, 3), pair).map(lambda d: (d[0], *d[1])), max_size=3))),
        nbytes=nbytes,
        dense=draw(st.booleans()),
    )


def small_strides(span: SpanClass) -> bool:
    """Whether the offsets fit into int64, which the NumPy reference uses."""
    return all(stride < 2**40 for dim in span.dims for stride in dim[1:])


@st.composite
def pages(draw: st.DrawFn, *, num_rows: int) -> Pages:
    """Mostly valid ids, with some sentinels and ids outside the pool."""
    good = st.integers(0, num_rows - 1)
    numbers = draw(st.lists(good | good | good | good | st.integers(-2, num_rows + 1), max_size=24))
    if draw(st.booleans()):
        numbers = [*itertools.islice(itertools.count(), len(numbers))]
    return Pages(np.array(numbers, dtype=np.int32), draw(st.sampled_from([0, 0, 0, 3, 4, 9, 2**63])))


@st.composite
def bindings(draw: st.DrawFn) -> tuple[ComponentPlan, dict[str, Any]]:
    """A plan of any shape and ownership, and a valid or invalid request."""
    owned: st.SearchStrategy[Owned] = st.just(EVERYTHING) | ownerships(size=40)
    spaces = [RowSpace(draw(st.sampled_from((4, 8, 12))), draw(st.integers(1, 30)), draw(owned)) for _ in range(2)]
    start = draw(st.integers(0, 30))
    tokens = (start, start + draw(st.integers(0, 30)))
    plan = ComponentPlan("c", spaces[0], spaces[1], tuple(draw(st.lists(spans().filter(small_strides), max_size=3))))
    return plan, {
        "source": draw(pages(num_rows=spaces[0].num_rows)),
        "destination": draw(pages(num_rows=spaces[1].num_rows)),
        "tokens": tokens,
        "num_tokens": draw(st.none() | st.integers(tokens[1], 80)),
        "layers": draw(st.none() | st.lists(st.integers(0, 6), max_size=3)),
    }


@given(bindings(), st.integers(1, 3))
def test_binding_matches_the_reference(binding: tuple[ComponentPlan, dict[str, Any]], num_threads: int) -> None:
    plan, request = binding
    expected = outcome(bind_numpy, plan, **request)
    assert outcome(bind, plan, **request) == expected
    assert outcome(bind, plan, out=REUSED, num_threads=num_threads, **request) == expected


@given(spans(granules=(1,)).filter(small_strides), st.integers(0, 5), st.integers(0, 5))
def test_binding_of_slots_matches_the_reference(span: SpanClass, source: int, destination: int) -> None:
    plan = ComponentPlan("c", RowSpace(1, 5, None), RowSpace(1, 4, None), (span, span))
    request: dict[str, Rows] = {"source": Slot(source), "destination": Slot(destination)}
    assert outcome(bind, plan, **request) == outcome(bind_numpy, plan, **request)


@given(spans(), st.lists(st.tuples(*[st.integers(-(2**63), MAX_INT64)] * 4, st.integers(-1, 6)), max_size=4))
def test_expansion_accepts_any_numbers(span: SpanClass, runs: list[tuple[int, ...]]) -> None:
    table = np.array(runs, dtype=np.int64).reshape(-1, 5)
    try:
        columns = _native.expand([core_span(span)], [table], None, 1, REUSED)
    except ValueError:
        assert (table[:, 4] < 1).any()
        return
    assert len({len(column) for column in columns}) == 1


def core_span(span: SpanClass, **changed: Any) -> _native.Span:
    fields = {name: getattr(span, name) for name in ("row_strides", "token_strides", "dims", "nbytes", "dense")}
    return _native.Span(span.layers, span.source_bases, span.destination_bases, **(fields | changed))


def plain(**changed: Any) -> SpanClass:
    fields: dict[str, Any] = {
        "layers": np.arange(3),
        "source_bases": np.array([0, 1000, 2000], np.uint64),
        "destination_bases": np.array([0, 500, 9000], np.uint64),
        "row_strides": (64, 32),
        "token_strides": (8, 4),
        "granule": 1,
        "dims": (),
        "nbytes": 4,
        "dense": False,
    }
    return SpanClass(**(fields | changed))


@pytest.mark.parametrize("function", [bind, bind_numpy])
def test_a_repeated_source_page_is_refused_whatever_the_spans_copy(function: Callable[..., CopyBatch]) -> None:
    space, pages = RowSpace(4, 1, EVERYTHING), Pages(np.zeros(2, np.int32))
    nowhere = plain(layers=np.zeros(0, np.int64), source_bases=np.zeros(0, np.uint64), destination_bases=np.zeros(0, np.uint64))
    plan = ComponentPlan("c", space, space, (nowhere,))
    with pytest.raises(LayoutError, match="source: page 0 is listed twice"):
        function(plan, source=pages, destination=pages, tokens=(0, 5))


ONE = np.array([[0, 0, 0, 0, 1]], dtype=np.int64)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: _native.expand([core_span(plain())], [], None, 1, Columns()), "1 spans and 0 runs"),
        (lambda: _native.expand([core_span(plain())], [ONE], None, 0, Columns()), "num_threads"),
        (lambda: _native.expand([core_span(plain())], [ONE * 0], None, 1, Columns()), "lengths of at least 1"),
        (lambda: _native.expand([core_span(plain(dims=((2**40, 1, 1), (2**40, 1, 1))))], [ONE], None, 1, Columns()), "at most"),
        (lambda: _native.expand([core_span(plain())], [ONE * MAX_INT64], None, 1, Columns()), "at most"),
        (lambda: core_span(plain(source_bases=np.zeros(2, np.uint64))), "for each layer"),
        (lambda: _native.token_runs(0, 2**62, 1, listed(), listed()), "tokens"),
        (lambda: _native.token_runs(3, 2, 1, listed(), listed()), "tokens"),
        (lambda: _native.token_runs(0, 2, 0, listed(), listed()), "granule"),
        (lambda: _native.token_runs(0, 2, 3, listed(), listed()), "page_size"),
        (lambda: _native.token_runs(0, 2, 1, listed(page_size=0), listed()), "page_size"),
        (lambda: _native.token_runs(0, 2, 1, listed(first_page=-1), listed()), "first_page"),
        (lambda: _native.token_runs(0, 2, 1, listed(edges=np.array([0])), listed()), "pairs"),
        (lambda: _native.token_runs(0, 2, 1, listed(edges=np.array([5, 2])), listed()), "ownership"),
        (lambda: _native.token_runs(0, 2, 1, listed(edges=np.array([-(2**63), MAX_INT64])), listed()), "ownership"),
        (lambda: _native.token_runs(0, 2, 1, listed(edges=np.array([0, 9]), period=8), listed()), "run"),
        (lambda: _native.token_runs(0, 2, 1, listed(period=-1), listed()), "period"),
    ],
)
def test_invalid_arguments_raise(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function()


def listed(**changed: Any) -> _native.PageList:
    fields: dict[str, Any] = {"first_page": 0, "page_size": 4, "num_rows": 9, "edges": np.array([0, 100]), "period": 0}
    return _native.PageList(np.arange(9, dtype=np.int32), **(fields | changed))


def test_arrays_of_another_type_raise() -> None:
    span = plain()
    with pytest.raises(TypeError):
        core_span(plain(layers=np.arange(3, dtype=np.int32)))
    with pytest.raises(TypeError):
        core_span(plain(source_bases=np.zeros(6, np.uint64)[::2]))
    with pytest.raises(TypeError):
        core_span(span, dims=((1, 2),))
    with pytest.raises(TypeError):
        core_span(span, dims=((-1, 2, 3),))
    with pytest.raises(TypeError):
        _native.expand([core_span(span)], [np.zeros((1, 4), np.int64)], None, 1, Columns())
    with pytest.raises(TypeError):
        _native.expand([None], [ONE], None, 1, Columns())  # type: ignore[list-item]
    with pytest.raises(TypeError):
        listed(edges=np.array([0.0, 1.0]))


def test_periods_without_a_whole_granule_end() -> None:
    narrow = listed(edges=np.array([1, 2]), period=4)
    runs, fault = _native.token_runs(0, 2**20, 4, narrow, narrow)
    assert fault is None
    assert runs.shape == (0, 5)


def test_bound_copies_outlive_growth_of_their_buffer() -> None:
    out = Columns()
    plan = ComponentPlan("c", RowSpace(4, 9, EVERYTHING), RowSpace(4, 9, EVERYTHING), (plain(),))
    few = bind(plan, source=Pages(np.arange(1)), destination=Pages(np.arange(1)), tokens=(0, 2), out=out)
    assert not few.source.flags.writeable
    before, room = triples(few), out.capacity
    many = bind(plan, source=Pages(np.arange(9)), destination=Pages(np.arange(9)), tokens=(0, 36), out=out)
    assert out.capacity >= len(many) > room
    del out
    assert triples(few) == before  # the buffer grew into new memory and left the old one unchanged
    assert len(many) == 3 * 36


def test_buffers_are_reused() -> None:
    out = Columns()
    plan = ComponentPlan("c", RowSpace(4, 9, EVERYTHING), RowSpace(4, 9, EVERYTHING), (plain(),))
    rows = {"source": Pages(np.arange(9)), "destination": Pages(np.arange(9)), "out": out}
    first = bind(plan, tokens=(0, 36), **rows)  # type: ignore[arg-type]
    where, capacity = first.source.ctypes.data, out.capacity
    again = bind(plan, tokens=(4, 30), **rows)  # type: ignore[arg-type]
    assert again.source.ctypes.data == where
    assert out.capacity == capacity


def test_threads_bind_concurrently() -> None:
    plan = ComponentPlan("c", RowSpace(4, 90, EVERYTHING), RowSpace(4, 90, EVERYTHING), (plain(),))
    rows = {"source": Pages(np.arange(90)), "destination": Pages(np.arange(90)[::-1])}
    expected = triples(bind(plan, tokens=(0, 360), **rows))  # type: ignore[arg-type]
    wrong: list[int] = []

    def work(number: int) -> None:
        out = Columns()
        found = [triples(bind(plan, tokens=(0, 360), out=out, **rows)) for _ in range(50)]  # type: ignore[arg-type]
        wrong.extend(number for each in found if each != expected)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
