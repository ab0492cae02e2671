"""A set of integers as ascending ranges, such as the tokens of a request that are still missing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

Range = tuple[int, int]


class Ranges:
    """Disjoint ranges in ascending order; those that touch are joined. Each call takes O(log n) comparisons, besides moving
    the ranges stored behind.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, start: int = 0, stop: int = 0) -> None:
        self._starts, self._stops = ([start], [stop]) if start < stop else ([], [])

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Range]:
        return iter(zip(self._starts, self._stops, strict=True))

    def copy(self) -> Ranges:
        made = Ranges()
        made._starts, made._stops = self._starts.copy(), self._stops.copy()
        return made

    def add(self, start: int, stop: int) -> None:
        if start < stop:
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)  # those that it meets or touches
            if first < last:
                start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if start < stop and first < last:
            rest = [part for part in ((self._starts[first], start), (stop, self._stops[last - 1])) if part[0] < part[1]]
            self._starts[first:last], self._stops[first:last] = [part[0] for part in rest], [part[1] for part in rest]

    def first_in(self, start: int, stop: int) -> int | None:
        """The lowest integer of `[start, stop)` in the set."""
        index = bisect_right(self._stops, start)
        if start < stop and index < len(self._starts) and self._starts[index] < stop:
            return max(start, self._starts[index])
        return None
