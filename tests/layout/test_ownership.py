"""Ownership of axes against its definition, position by position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import LayoutError
from disagg.layout.ownership import (
    EVERYTHING,
    Interval,
    Intervals,
    Owned,
    Periodic,
    Piece,
    Share,
    interval,
    overlap,
    positions_to_intervals,
    split,
)
from disagg.layout.tables import MAX_AXIS_SIZE
from disagg.testing.reference import heads_of
from disagg.testing.scene import owned_positions
from disagg.testing.strategies import ownerships

SIZE = 24


@given(ownerships(size=SIZE), st.integers(0, SIZE))
def test_within_keeps_positions_and_order(owned: Owned, size: int) -> None:
    parts = owned.within(size)
    assert isinstance(parts, Intervals)
    assert owned_positions(parts, size=size) == owned_positions(owned, size=size)
    assert all(part.stop <= size for part in parts.parts)


@given(ownerships(size=SIZE), st.integers(1, SIZE))
def test_local_indices_and_counts_follow_memory_order(owned: Owned, size: int) -> None:
    finite = owned.within(size) if isinstance(owned, Share) else owned
    listed = owned_positions(finite, size=SIZE)
    positions = np.arange(SIZE)
    before = positions.copy()
    assert finite.locate(positions).tolist() == [listed.index(p) if p in listed else -1 for p in range(SIZE)]
    assert (positions == before).all()
    for position in range(SIZE + 1):
        assert finite.count_below(position) == sum(p < position for p in listed)


@given(ownerships(size=SIZE), ownerships(size=SIZE), st.integers(1, SIZE))
def test_overlap_has_each_common_position_once_at_both_local_indices(ours: Owned, theirs: Owned, size: int) -> None:
    left, right = owned_positions(ours, size=size), owned_positions(theirs, size=size)
    pieces = overlap(ours, theirs, size=size)
    pairs = [(p.source_offset + i, p.destination_offset + i) for p in pieces for i in range(p.length)]
    common = sorted(set(left) & set(right))
    assert [(left[a], right[b]) for a, b in pairs] == [(p, p) for p in common]
    for one, other in itertools.pairwise(pieces):
        joined = (one.source_offset + one.length, one.destination_offset + one.length)
        assert joined != (other.source_offset, other.destination_offset)


def test_the_whole_axis_is_one_interval_at_any_length() -> None:
    assert EVERYTHING.within(7168) == Intervals((Interval(0, 7168),))
    assert EVERYTHING.within(MAX_AXIS_SIZE) == Intervals((Interval(0, MAX_AXIS_SIZE),))
    assert Periodic(3, 4, 4).within(20) == Intervals((Interval(3, 20),))
    assert EVERYTHING.within(0) == Intervals(())


def test_split_matches_the_closed_formula_on_small_axes() -> None:
    for size, parts in itertools.product(range(1, 33), range(1, 33)):
        shares = [split(size, parts, index) for index in range(parts)]
        for index, share in enumerate(shares):
            assert range(*share) == heads_of(size, tp=parts, tp_rank=index)
        owners = [sum(position in range(*share) for share in shares) for position in range(size)]
        if parts <= size:
            assert owners == [1] * size
            assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1
        else:
            assert all(share.stop - share.start == 1 for share in shares)
            assert max(owners) - min(owners) <= 1


def test_shares_follow_the_formula_of_context_parallel_prefill() -> None:
    for parts, granule, size in itertools.product(range(1, 6), (1, 2, 4), range(40)):
        pages = -(-size // granule)
        base, rest = divmod(pages, parts)
        for index in range(parts):
            start = index * base + min(index, rest)
            stop = start + base + (index < rest)
            assert Share(index, parts, granule).within(size) == interval(min(start * granule, size), min(stop * granule, size))


@given(st.lists(st.integers(0, 30), unique=True))
def test_positions_become_intervals_in_order(positions: list[int]) -> None:
    found = positions_to_intervals(positions)
    assert owned_positions(found, size=31) == positions
    assert all(a.stop != b.start for a, b in itertools.pairwise(found.parts))


def test_ownerships_as_text() -> None:
    assert str(Intervals((Interval(4, 6), Interval(0, 2)))) == "[4, 6) ‖ [0, 2)"
    assert str(interval(3, 3)) == "nothing"
    assert str(Periodic(1, 2, 4)) == "2 of every 4 from 1"
    assert str(Share(1, 4, 16)) == "share 1 of 4 by 16"


@pytest.mark.parametrize("parts", [((3, 3),), ((5, 2),), ((-1, 4),), ((0, 2**62),), ((0, 4), (3, 5)), ((4, 8), (0, 5))])
def test_empty_or_overlapping_intervals_are_rejected(parts: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(LayoutError, match="interval"):
        Intervals(tuple(Interval(*part) for part in parts))


@pytest.mark.parametrize("values", [(-1, 1, 1), (0, 0, 1), (0, 2, 1), (0, 1, 2**62), (2**62, 1, 1), (0, -1, 2)])
def test_impossible_periods_are_rejected(values: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="periodic"):
        Periodic(*values)


@pytest.mark.parametrize("values", [(-1, 2, 1), (2, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_shares_are_rejected(values: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="share"):
        Share(*values)


def test_pieces_of_an_overlap() -> None:
    assert overlap(interval(2, 6), Intervals((Interval(4, 8), Interval(0, 4))), size=8) == (Piece(0, 6, 2), Piece(2, 0, 2))
    touching = Intervals((Interval(0, 2), Interval(2, 4)))
    assert overlap(touching, interval(0, 4), size=4) == (Piece(0, 0, 4),)
