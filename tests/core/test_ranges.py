"""Sets of numbers as ranges, against Python's sets, and what each call costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.ranges import Ranges

NUMBERS = st.integers(0, 16)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), NUMBERS, NUMBERS), max_size=30)


def numbers(ranges: Ranges) -> set[int]:
    return {number for start, stop in ranges for number in range(start, stop)}


@given(whole=st.tuples(NUMBERS, NUMBERS), steps=STEPS, asked=st.tuples(NUMBERS, NUMBERS))
def test_ranges_equal_a_set(whole: tuple[int, int], steps: list[tuple[str, int, int]], asked: tuple[int, int]) -> None:
    ranges, expected = Ranges(*whole), set(range(*whole))
    for step, start, stop in steps:
        before, copy = list(ranges), ranges.copy()
        getattr(ranges, step)(start, stop)
        assert list(copy) == before
        expected = expected | set(range(start, stop)) if step == "add" else expected - set(range(start, stop))
        assert numbers(ranges) == expected
        found = list(ranges)
        assert all(start < stop for start, stop in found)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(found)), "neighbours are joined"
        assert len(ranges) == len(found)
    common = expected & set(range(*asked))
    assert ranges.first_in(*asked) == (min(common) if common else None)


class Counted(int):
    """A number that counts comparisons."""

    num_comparisons = 0

    def __lt__(self, other: int) -> bool:
        Counted.num_comparisons += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Counted.num_comparisons += 1
        return int(self) > int(other)


def shuffled(count: int) -> list[int]:
    return random.Random(7).sample(range(count), count)


ORDERS: dict[str, Callable[[int], list[int]]] = {
    "ascending": lambda count: list(range(count)),
    "descending": lambda count: list(range(count))[::-1],
    "shuffled": shuffled,
    "every other one": lambda count: list(range(0, 2 * count, 2))[::-1],
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_cost_of_a_call_grows_with_the_logarithm(order: str) -> None:
    """4,096 chunks take at most 4 comparisons per level of a binary search, in any order. A scan takes 8 million."""
    count, ranges = 4096, Ranges()
    Counted.num_comparisons = 0
    for number in ORDERS[order](count):
        chunk = Counted(4 * number), Counted(4 * number + 4)
        assert ranges.first_in(*chunk) is None
        ranges.add(*chunk)
    assert Counted.num_comparisons <= count * 4 * math.ceil(math.log2(count) + 1)
    assert len(ranges) == (count if order == "every other one" else 1)


def test_the_first_number_of_a_range() -> None:
    found = Ranges(2, 5)
    found.add(8, 9)
    wanted = {(0, 3): 2, (4, 9): 4, (5, 9): 8, (5, 8): None, (9, 12): None, (3, 3): None}
    assert {(start, stop): found.first_in(start, stop) for start, stop in wanted} == wanted
