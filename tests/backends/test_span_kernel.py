"""The addresses that the kernel computes from span classes and token runs, against `bind`, by the reference implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.backends.cuda.work_list import encode_shapes, encode_work_list, work_list_nbytes
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import BackendError
from disagg.core.rows import Rows, Slot
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.layout.binding import bind, bind_rows, span_shapes
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass
from disagg.testing.scene import Scene
from disagg.testing.strategies import cases
from harness.reference_core import coalesced
from harness.reference_kernels import SpanLaunch, span_pieces

TILES = (16, 48, 256, 4096)


def identity(addresses: Addresses, nbytes: int, side: int) -> Addresses:
    return addresses


def launch_of(batch: SpanBatch, *, tile: int, limits: tuple[int, int] | None = None, **linear: int) -> SpanLaunch:
    """A launch over the work list of `batch`. The words after it hold garbage, as in a reused buffer."""
    table = encode_shapes(batch.shapes, identity)
    out = np.full(-(-work_list_nbytes(batch) // 8), 0xDEADBEEFDEADBEEF, np.uint64)
    assert encode_work_list(batch, table, tile=tile, out=out) <= work_list_nbytes(batch)
    low, high = limits or (0, batch.total_nbytes)
    return SpanLaunch(out, table.words, *batch.core.tiles(low, high), tile, low, high, **linear)


def copies_of(launch: SpanLaunch) -> CopyBatch:
    """The copies of a launch, in order, with adjacent ones joined."""
    found = [(p.source, p.destination, p.nbytes) for p in span_pieces(launch) if p.nbytes]
    return coalesced(CopyBatch(*np.array(found, dtype=np.uint64).reshape(-1, 3).T))


def check(plan: ComponentPlan, *, tile: int, **what: Any) -> tuple[SpanBatch, CopyBatch]:
    """Check that the kernel copies exactly the copies of `bind`."""
    batch = SpanBatch(span_shapes(plan), bind_rows(plan, **what).span_runs())
    wanted = bind(plan, **what)
    assert batch.total_nbytes == wanted.total_nbytes
    assert len(batch) >= len(wanted)
    if wanted.total_nbytes:
        found = copies_of(launch_of(batch, tile=tile))
        for column in ("source", "destination", "nbytes"):
            np.testing.assert_array_equal(getattr(found, column), getattr(wanted, column))
    return batch, wanted


@given(cases(), st.sampled_from(TILES), st.data())
def test_any_pair_of_ranks_any_tokens_any_layers(case: Any, tile: int, data: st.DataObject) -> None:
    scene = Scene(case)
    for source, destination in list(scene.election.by_pair)[:3]:
        plan = scene.plan(source, destination)
        ours, theirs = scene.rows(source, destination)
        start = data.draw(st.integers(case.need, case.num_tokens))
        what = {"source": ours, "destination": theirs, "num_tokens": case.num_tokens}
        layers = [layer for layer in plan.layers if data.draw(st.booleans())]
        check(plan, tile=tile, tokens=(start, case.num_tokens), **what)
        batch, wanted = check(plan, tile=tile, tokens=(case.need, case.num_tokens), layers=layers, **what)
        total = batch.total_nbytes
        if total:
            low = data.draw(st.integers(0, total - 1))
            check_packed(batch, wanted, tile=tile, limits=(low, data.draw(st.integers(low + 1, total))))


def check_packed(batch: SpanBatch, wanted: CopyBatch, *, tile: int, limits: tuple[int, int]) -> None:
    """Check that packing and unpacking a part of the stream moves the same bytes as on the host."""
    low, high = limits
    for side, column in (("linear_destination", wanted.source), ("linear_source", wanted.destination)):
        found = list(span_pieces(launch_of(batch, tile=tile, limits=limits, **{side: 1000})))
        pieces = [p for p in found if p.nbytes]
        packed = [p.destination if side == "linear_destination" else p.source for p in pieces]
        placed = [p.source if side == "linear_destination" else p.destination for p in pieces]
        sizes = [p.nbytes for p in pieces]
        assert packed == (1000 + np.cumsum([0, *sizes[:-1]])).tolist()
        assert sum(sizes) == high - low
        assert bytes_at(placed, sizes) == bytes_at(column.tolist(), wanted.nbytes.tolist())[low:high]


def bytes_at(addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [a + i for a, n in zip(addresses, sizes, strict=True) for i in range(n)]


@st.composite
def slot_plans(draw: st.DrawFn) -> tuple[ComponentPlan, Rows, Rows]:
    """Slots with any dims: state without a token axis."""
    spans, base = [], 4096
    for _ in range(draw(st.integers(1, 3))):
        layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40 if draw(st.booleans()) else 3, unique=True))
        nbytes = draw(st.sampled_from([1, 2, 6, 16, 48, 256]))
        dims: list[tuple[int, int, int]] = []
        strides = [nbytes, nbytes]
        for _ in range(draw(st.integers(0, 3))):
            count = draw(st.integers(2, 5))
            strides = [s + nbytes * draw(st.integers(0, 2)) for s in strides]
            dims.append((count, strides[0], strides[1]))
            strides = [s * count for s in strides]
        bases = [base + 5 * (strides[0] + strides[1]) * np.arange(len(layers), dtype=np.uint64) + side for side in (0, 1 << 40)]
        spans.append(
            SpanClass(
                np.array(layers),
                bases[0],
                bases[1],
                (strides[0], strides[1]),
                (0, 0),
                1,
                tuple(reversed(dims)),
                nbytes,
                False,
            )
        )
        base += 1 << 30
    space = RowSpace(1, 5, None)
    return ComponentPlan("state", space, space, tuple(spans)), Slot(draw(st.integers(0, 4))), Slot(draw(st.integers(0, 4)))


@given(slot_plans(), st.sampled_from(TILES))
def test_slots(made: tuple[ComponentPlan, Rows, Rows], tile: int) -> None:
    plan, source, destination = made
    check(plan, tile=tile, source=source, destination=destination)


def test_many_runs_and_many_parts() -> None:
    """More runs than a warp searches at once, more parts than a warp has lanes, and tiles that begin at any byte."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 5, 5000)
    runs = np.stack(
        [rng.permutation(5000), rng.integers(0, 12, 5000), rng.permutation(5000), rng.integers(0, 12, 5000), lengths], 1
    )
    shapes = tuple(
        SpanShape(
            np.array([1 << 30, 1 << 31], np.uint64) + np.uint64(i << 32),
            np.array([1 << 50, 1 << 51], np.uint64) + np.uint64(i << 32),
            (16 * 96, 16 * 64),
            (96, 64),
            ((2, 48, 32),) if i % 2 else (),
            32,
            False,
            (5000, 5000),
            (16, 16),
        )
        for i in range(40)
    )
    few = [np.ascontiguousarray(runs[:3]), np.ascontiguousarray(runs[1:9])]
    parts = (SpanRuns(0, None, runs.astype(np.int64)), *(SpanRuns(i, None, few[i % 2].astype(np.int64)) for i in range(1, 40)))
    batch = SpanBatch(shapes, parts)
    expected = []
    for part in parts:
        shape = shapes[part.span]
        for base in range(2):
            for row, offset, to, at, length in part.runs.tolist():
                for i in range(length):
                    for step in range(shape.steps):
                        source = int(shape.source_bases[base]) + row * 1536 + (offset + i) * 96 + step * 48
                        expected.append(
                            (source, int(shape.destination_bases[base]) + to * 1024 + (at + i) * 64 + step * 32, 32)
                        )
    wanted = coalesced(CopyBatch(*np.array(expected, np.uint64).T))
    found = copies_of(launch_of(batch, tile=4096))
    np.testing.assert_array_equal(found.source, wanted.source)
    np.testing.assert_array_equal(found.destination, wanted.destination)
    np.testing.assert_array_equal(found.nbytes, wanted.nbytes)


def test_too_many_pieces_to_count_are_refused() -> None:
    shape = SpanShape(
        np.ones(1, np.uint64), np.ones(1, np.uint64), (1, 1), (1, 1), ((2**16, 1, 1), (2**15, 1, 1)), 1, False, (1, 1), (1, 1)
    )
    batch = SpanBatch((shape,), (SpanRuns(0, None, np.array([[0, 0, 0, 0, 1]])),))
    with pytest.raises(BackendError, match="at most 2147483647 pieces of a layer and tiles, found 2147483648 pieces"):
        launch_of(batch, tile=4096)
