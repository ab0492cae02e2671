"""The kernel's address arithmetic, by its reference implementation: every byte once, in the largest aligned words."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.backends.nvlink import engine as nvlink
from disagg.core.copies import CopyBatch
from harness import reference_kernels as reference

SIZES = st.one_of(st.integers(0, 70), st.sampled_from([256, 512, 1000, 4096, 4097, 9001]))


@st.composite
def batches(draw: st.DrawFn) -> CopyBatch:
    """Pieces of many sizes from any source, at destinations that do not overlap, in random order."""
    rows, at = [], draw(st.integers(0, 40))
    for nbytes in draw(st.lists(SIZES, min_size=1, max_size=80)):
        at += draw(st.sampled_from([0, 0, 1, 2, 4, 8, 16, 23]))
        rows.append((draw(st.integers(0, 300)) * draw(st.sampled_from([1, 2, 8, 16])), at, nbytes))
        at += nbytes
    order = draw(st.permutations(rows))
    return CopyBatch(*(np.array(column, dtype=np.uint64) for column in zip(*order, strict=True)))


def naive(copies: CopyBatch) -> Iterator[tuple[int, int]]:
    for source, destination, nbytes in zip(
        *(c.tolist() for c in (copies.source, copies.destination, copies.nbytes)), strict=True
    ):
        yield from ((source + i, destination + i) for i in range(nbytes))


@given(batches(), st.sampled_from([16, 64, 100, 4096, 1 << 20]))
def test_every_byte_is_copied_once_from_its_source(copies: CopyBatch, tile: int) -> None:
    made = [(u.source + i, u.destination + i) for u in reference.units(copies, tile=tile) for i in range(u.nbytes)]
    assert sorted(made) == sorted(naive(copies))


@given(batches(), st.sampled_from([64, 4096]))
def test_words_are_aligned_and_as_large_as_both_addresses_allow(copies: CopyBatch, tile: int) -> None:
    for unit in reference.units(copies, tile=tile):
        assert 0 < unit.nbytes <= unit.width
        if unit.nbytes == unit.width:
            assert unit.source % unit.width == unit.destination % unit.width == 0
        else:
            assert unit.nbytes < reference.WORD, "bytes before the first word or after the last"


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 5000))
def test_a_piece_has_at_most_two_units_more_than_whole_words(source: int, destination: int, nbytes: int) -> None:
    piece = reference.Piece(source, destination, nbytes)
    assert piece.num_units <= nbytes // piece.width + 2
    assert sum(piece.unit(i).nbytes for i in range(piece.num_units)) == nbytes


def test_aligned_pages_are_copied_in_words_of_16_bytes_only() -> None:
    rng = np.random.default_rng(1)
    source, destination = (rng.permutation(64).astype(np.uint64) * np.uint64(4096) for _ in range(2))
    copies = CopyBatch(source, destination, np.full(64, 4096, np.uint64))
    found = list(reference.units(copies, tile=nvlink.MIN_TILE))
    assert {unit.nbytes for unit in found} == {16}
    assert len(found) == 64 * 256


@given(st.lists(st.integers(0, 50), max_size=3000), st.integers(0, 60))
def test_the_warp_search_finds_the_first_piece_of_a_tile(steps: list[int], x: int) -> None:
    ends = np.cumsum(steps).tolist()
    for wanted in (x, x * 97, *ends[:: max(1, len(ends) // 7)]):
        assert reference.first_after(ends, wanted) == bisect.bisect_right(ends, wanted)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(0, 2**40))
def test_a_peers_address_gets_the_delta_of_its_region(sizes: list[int], start: int) -> None:
    starts = [start + 100 * i for i in range(len(sizes))]
    deltas = [2**64 - 7 * i for i in range(len(sizes))]
    addresses = [first + size - 1 for first, size in zip(starts, sizes, strict=True)]
    wanted = [a - 7 * i for i, a in enumerate(addresses)]
    assert reference.translate(addresses, starts=starts, deltas=deltas) == [w % 2**64 for w in wanted]


@given(st.integers(1, 2**36), st.integers(1, 200))
def test_a_launch_shape_stays_within_its_limits(total: int, max_blocks: int) -> None:
    blocks, tile = nvlink.launch_shape(total, max_blocks=max_blocks)
    assert 1 <= blocks <= max_blocks
    assert nvlink.MIN_TILE <= tile <= nvlink.MAX_TILE
    assert tile & (tile - 1) == 0


@pytest.mark.parametrize("total", [1 << 20, 67_108_864, 1 << 30])
def test_every_warp_gets_a_tile(total: int) -> None:
    blocks, tile = nvlink.launch_shape(total, max_blocks=32)
    assert total // tile >= min(blocks * nvlink.THREADS // 32, total // nvlink.MIN_TILE)
