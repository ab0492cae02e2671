"""Span classes and token runs: a naive expansion compared with `bind`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from disagg.core.copies import CopyBatch
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.layout.binding import Stream, bind, bind_rows, span_shapes
from disagg.testing.reference import KVModel
from disagg.testing.scene import Case, Scene, Side
from disagg.testing.strategies import HND
from harness.reference_core import coalesced

MODEL = KVModel(num_kv_heads=4, dims={"k": 2, "v": 2})
CASES = [
    Case(
        model=MODEL,
        source=Side(tp=2, stages=((0, 1, 2),)),
        destination=Side(page=8, stages=((0, 1, 2),)),
        num_tokens=29,
        need=3,
    ),
    Case(model=MODEL, source=Side(axes=HND), destination=Side(tp=4), num_tokens=16),
]
SHAPE = SpanShape(np.ones(1, np.uint64), np.ones(1, np.uint64), (64, 64), (8, 8), (), 8, False, (4, 4), (8, 8))


def pieces(batch: SpanBatch) -> Iterator[tuple[int, int, int]]:
    """Every run of bytes by the definition, in order. Checks that all lie in the extents of their span class."""
    for part in batch.parts:
        shape = batch.shapes[part.span]
        chosen = range(len(shape.source_bases)) if part.bases is None else part.bases.tolist()
        steps = list(itertools.product(*(range(count) for count, _, _ in shape.dims)))
        for base, run in itertools.product(chosen, part.runs.tolist()):
            positions, nbytes = (1, run[4] * shape.nbytes) if shape.dense else (run[4], shape.nbytes)
            for position, step in itertools.product(range(positions), steps):
                found = []
                for side in (0, 1):
                    row, offset = run[2 * side : 2 * side + 2]
                    inner = sum(index * dim[1 + side] for index, dim in zip(step, shape.dims, strict=True))
                    at = row * shape.row_strides[side] + (offset + position) * shape.token_strides[side] + inner
                    bases, reach = shape.extents(side)
                    assert 0 <= at <= at + nbytes <= reach
                    found.append(int(bases[base]) + at)
                yield found[0], found[1], nbytes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layers", [None, (0, 1, 2), (2,), (1, 7)])
def test_spans_of_a_request_match_bind(case: Case, layers: Sequence[int] | None) -> None:
    scene = Scene(case)
    for ranks in scene.election.by_pair:
        plan, (source, destination) = scene.plan(*ranks), scene.rows(*ranks)
        tokens = (case.need, case.num_tokens)
        what: dict[str, Any] = {"tokens": tokens, "num_tokens": case.num_tokens, "layers": layers}
        placed = bind_rows(plan, source=source, destination=destination, **what)
        wanted = bind(plan, source=source, destination=destination, **what)
        batch = SpanBatch(span_shapes(plan), placed.span_runs())
        each = list(pieces(batch))
        found = coalesced(CopyBatch(*np.array(each, np.uint64).reshape(-1, 3).T))
        for column in ("source", "destination", "nbytes"):
            np.testing.assert_array_equal(getattr(found, column), getattr(wanted, column))
        assert (batch.total_nbytes, len(batch)) == (wanted.total_nbytes, len(each))
        assert placed.num_copies() >= len(wanted)
        assert [placed.has_copies(count) for count in (0, placed.num_copies(), placed.num_copies() + 1)] == [True, True, False]
        stream = Stream(source=True)
        placed.append_to(stream)
        assert stream.total == wanted.total_nbytes


def test_span_classes_are_numbered_from_a_first_number() -> None:
    scene = Scene(CASES[0])
    source, destination = scene.rows(0, 0)
    placed = bind_rows(scene.plan(0, 0), source=source, destination=destination, tokens=(3, 29), num_tokens=29)
    own, behind = placed.span_runs(), placed.span_runs(5)
    assert [part.span + 5 for part in own] == [part.span for part in behind]


@pytest.mark.parametrize(("span", "length"), [(1, 1), (0, 0), (0, -1)])
def test_unknown_spans_and_empty_runs_are_rejected(span: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"span|position"):
        SpanBatch((SHAPE,), (SpanRuns(span, None, np.array([[0, 0, 0, 0, length]])),))
