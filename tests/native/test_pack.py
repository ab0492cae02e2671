"""Gather, scatter and copies in the compiled core move the right bytes, compared with slices of arrays, and no others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core import _native
from disagg.core.rows import Pages
from disagg.layout.binding import Stream, bind_rows
from disagg.layout.ownership import EVERYTHING
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass
from harness.reference_core import bind_numpy, gather_numpy, scatter_numpy

SIZES = st.one_of(st.integers(0, 300), st.sampled_from((64, 128, 256, 512, 1024, 4096, 4097, 5000)))


def pieces(sizes: list[int], *, seed: int, align: int) -> tuple[npt.NDArray[np.uint8], dict[str, npt.NDArray[np.uint64]]]:
    """Memory that contains disjoint pieces of `sizes` in random order, and their places."""
    rng = np.random.default_rng(seed)
    offsets = np.zeros(len(sizes), dtype=np.uint64)
    place = int(rng.integers(0, 65))
    for piece in rng.permutation(len(sizes)):
        place = -(-(place + int(rng.integers(0, 70))) // align) * align
        offsets[piece] = place
        place += sizes[piece]
    memory = rng.integers(0, 256, place + 64, dtype=np.uint8)
    return memory, {
        "offsets": offsets,
        "addresses": offsets + np.uint64(memory.ctypes.data),
        "nbytes": np.array(sizes, dtype=np.uint64),
    }


def stream_of(addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64], *, source: bool) -> Stream:
    """A stream of these pieces, with bytes as tokens and addresses as rows."""
    one = np.zeros(1, dtype=np.uint64)
    span = _native.Span(
        np.zeros(1, np.int64), one, one, row_strides=(1, 1), token_strides=(1, 1), dims=(), nbytes=1, dense=True
    )
    at, sizes = addresses[nbytes > 0].astype(np.int64), nbytes[nbytes > 0].astype(np.int64)
    stream = Stream(source=source)
    stream.append([span], [np.stack((at, 0 * at, at, 0 * at, sizes), axis=1)], None)
    return stream


@given(st.lists(SIZES, max_size=60), st.integers(0, 2**32), st.sampled_from((1, 16, 64)), st.integers(1, 4))
def test_packing_matches_the_reference(sizes: list[int], seed: int, align: int, num_threads: int) -> None:
    memory, where = pieces(sizes, seed=seed, align=align)
    total = sum(sizes)
    staging = np.full(total + 2, 0xA5, dtype=np.uint8)
    stream = stream_of(where["addresses"], where["nbytes"], source=True)
    assert stream.total == total
    stream.gather(0, total, staging.ctypes.data + 1, num_threads)
    expected = gather_numpy(memory, where["offsets"], where["nbytes"])
    assert (staging[1:-1] == expected).all()
    assert staging[0] == staging[-1] == 0xA5

    wanted = memory.copy()
    content = np.random.default_rng(seed + 1).integers(0, 256, total, dtype=np.uint8)
    scatter_numpy(wanted, where["offsets"], where["nbytes"], content)
    stream = stream_of(where["addresses"], where["nbytes"], source=False)
    stream.scatter(0, total, content.ctypes.data, num_threads)
    assert (memory == wanted).all()


@pytest.mark.parametrize("size", [64, 100, 256, 512, 1000, 1024, 2048, 4096, 10000, 3_000_000])
@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_batches_of_equal_pieces(size: int, align: int, num_threads: int) -> None:
    sizes = [size] * max(2, 4_000_000 // size)
    memory, where = pieces(sizes, seed=size, align=align)
    staging = np.zeros(sum(sizes), dtype=np.uint8)
    total = len(staging)
    stream_of(where["addresses"], where["nbytes"], source=True).gather(0, total, staging.ctypes.data, num_threads)
    index = np.concatenate([np.arange(o, o + size) for o in where["offsets"].astype(np.int64)])
    assert (staging == memory[index]).all()
    wanted = memory.copy()
    staging ^= 0xFF
    wanted[index] = staging
    stream_of(where["addresses"], where["nbytes"], source=False).scatter(0, total, staging.ctypes.data, num_threads)
    assert (memory == wanted).all()
    memory[:] = 0
    places = np.cumsum(where["nbytes"]) - where["nbytes"] + np.uint64(staging.ctypes.data)
    assert _native.copy_batch(places, where["addresses"], where["nbytes"], num_threads) == len(staging)
    assert (memory[index] == staging).all()
    assert int(memory.sum()) == int(staging.sum())


@st.composite
def shapes(draw: st.DrawFn) -> SpanClass:
    """Copies of any shape with offsets below 2,000 on both sides; neighbours are usually adjacent."""
    nbytes = draw(st.integers(1, 4))
    stride = st.one_of(st.just(nbytes), st.integers(0, 12))
    layers = draw(st.lists(st.integers(0, 5), max_size=4))
    bases = st.lists(st.integers(0, 30), min_size=len(layers), max_size=len(layers)).map(lambda b: np.array(b, np.uint64))
    return SpanClass(
        layers=np.array(layers, dtype=np.int64),
        source_bases=draw(bases),
        destination_bases=draw(bases),
        row_strides=draw(st.tuples(st.integers(0, 100), st.integers(0, 100))),
        token_strides=draw(st.tuples(stride, stride)),
        granule=1,
        dims=tuple(draw(st.lists(st.tuples(st.integers(0, 3), stride, stride), max_size=3))),
        nbytes=nbytes,
        dense=draw(st.booleans()),
    )


IDS = st.permutations(range(8)).map(lambda ids: Pages(np.array(ids, np.int32)))


@given(st.lists(shapes(), max_size=3), IDS, IDS, st.sampled_from((None, (), (1, 3))), st.data())
def test_streams_of_both_sides_hold_the_bytes_of_the_copies_in_order(
    spans: list[SpanClass], ours: Pages, theirs: Pages, layers: tuple[int, ...] | None, data: st.DataObject
) -> None:
    """Whole, cut anywhere, and of chosen spans; compared with the reference of `bind`, which expands every piece."""
    plan = ComponentPlan("kv", RowSpace(4, 8, EVERYTHING), RowSpace(2, 8, EVERYTHING), tuple(spans))
    rows: dict[str, Any] = {"source": ours, "destination": theirs, "tokens": (1, 15), "layers": layers}
    copies = bind_numpy(plan, **rows)
    memory = np.random.default_rng(7).integers(0, 256, (2, 2048), dtype=np.uint8)
    content = gather_numpy(memory[0], copies.source, copies.nbytes)
    wanted = memory[1].copy()
    scatter_numpy(wanted, copies.destination, copies.nbytes, content)

    at = [np.uint64(side.ctypes.data) for side in memory]
    moved = [replace(s, source_bases=s.source_bases + at[0], destination_bases=s.destination_bases + at[1]) for s in spans]
    placed = bind_rows(replace(plan, spans=tuple(moved)), **rows)
    source, destination = Stream(source=True), Stream(source=False)
    for stream in (source, destination):
        placed.append_to(stream)
        assert stream.total == len(content)
        assert stream.num_pieces <= sum(len(span.layers) for span in spans) * 14 * 27
    assert placed.num_copies() >= len(copies)
    assert [placed.has_copies(n) for n in (1, 2, 5, 17)] == [placed.num_copies() >= n for n in (1, 2, 5, 17)]
    staging = np.zeros(len(content), dtype=np.uint8)
    cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=4))
    places, sizes = copies.destination[:0], copies.nbytes[:0]
    for start, stop in itertools.pairwise(sorted({0, *cuts, len(content)})):
        source.gather(start, stop - start, staging.ctypes.data + start)
        destination.scatter(start, stop - start, staging.ctypes.data + start)
        collected = source.copies(start, stop - start, staging.ctypes.data + start)
        assert collected[1].tolist() == [
            staging.ctypes.data + start + before for before in np.cumsum(collected[2]) - collected[2]
        ]
        staging[start:stop] = 0
        assert _native.copy_batch(*collected, 1) == stop - start
        staged, belong, nbytes = destination.copies(start, stop - start, staging.ctypes.data + start)
        assert int(nbytes.sum()) == stop - start
        assert len(nbytes) <= destination.num_pieces
        assert staged.tolist() == [staging.ctypes.data + start + before for before in np.cumsum(nbytes) - nbytes]
        places, sizes = np.append(places, belong - np.uint64(memory[1].ctypes.data)), np.append(sizes, nbytes)
    assert (staging == content).all()
    assert (memory[1] == wanted).all()
    again = np.zeros_like(wanted)
    scatter_numpy(again, places, sizes, content)
    only = np.zeros_like(wanted)
    scatter_numpy(only, copies.destination, copies.nbytes, content)
    assert (again == only).all()

    one = Stream(source=True)
    chosen = bind_rows(plan, **rows, spans=range(len(spans))[1:2])
    chosen.append_to(one)
    assert one.total == bind_numpy(replace(plan, spans=tuple(spans[1:2])), **rows).total_nbytes
    assert chosen.copies().total_nbytes == one.total


MORE = np.zeros(2, dtype=np.uint64)
WRAPS = np.array([2**64 - 1, 2], dtype=np.uint64)


def test_invalid_arguments_raise() -> None:
    stream = stream_of(MORE, MORE + np.uint64(5), source=True)
    empty = Stream(source=False)
    for listing in (stream.copies, empty.copies):
        assert all(len(column) == 0 for column in listing(0, 0, 0))
        with pytest.raises(IndexError, match="expected a range inside it"):
            listing(9, 2, 0)
    for function in (stream.gather, stream.scatter, empty.gather, empty.scatter):
        function(0, 0, 0)
        for offset, nbytes in ((11, 0), (0, 11), (9, 2), (2**64 - 1, 2)):
            with pytest.raises(IndexError, match="expected a range inside it"):
                function(offset, nbytes, 0)
        with pytest.raises(ValueError, match="num_threads"):
            function(0, 0, 0, 0)
        wrong: list[tuple[Any, ...]] = [(-1, 1, 0), (0, -1, 0), (0, 1, -1), (0, 2**64, 0), (0.5, 1, 0), (None, 1, 0)]
        for arguments in wrong:
            with pytest.raises(TypeError):
                function(*arguments)
    span = _native.Span(
        np.zeros(1, np.int64), MORE[:1], MORE[:1], row_strides=(1, 1), token_strides=(1, 1), dims=(), nbytes=1, dense=True
    )
    table = np.array([[0, 0, 0, 0, 1]])
    for count in (empty.append, _native.num_copies):
        for spans, runs, error in (
            ([span], [], ValueError),
            ([span], [np.array([[0, 0, 0, 0, 0]])], ValueError),
            ([None], [table], TypeError),
            ([span], [None], TypeError),
            ([span], [table.astype(np.uint64)], TypeError),
        ):
            with pytest.raises(error):
                count(spans, runs, None)  # type: ignore[arg-type]
    assert empty.total == 0


def test_copies_whose_sum_wraps_raise() -> None:
    with pytest.raises(ValueError, match="sum"):
        _native.copy_batch(MORE, MORE, WRAPS)
