"""Whether positions of tensors share bytes, exactly, for any strides.

Two positions share a byte if and only if a bounded sum of multiples of strides has one certain value. For layouts whose axes
nest, few multiples are possible for each stride, and the search ends at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from disagg.core.memory import RawTensor

Steps = tuple[tuple[int, int], ...]
"""Pairs `(stride, last)`, ascending: any multiple of `stride`, in bytes, from 0 to `last`."""

MAX_TRIES = 20_000
"""Only large axes whose strides do not nest need more tries for one question."""


def overlaps_itself(tensor: RawTensor) -> bool:
    """Also true if the strides are too irregular to exclude it."""
    if 0 in tensor.shape:
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.strides, tensor.shape, strict=True)):
        return True
    reach, smaller = 0, list[tuple[int, int]]()
    for stride, last in _steps(tensor):
        # Two positions that differ by up to `last` of these steps, and by any number of smaller ones, in either direction.
        if stride <= reach and _is_sum([*smaller, (stride, last - 1)], stride * last + reach):
            return True
        reach += stride * last
        smaller.append((stride, 2 * last))
    return False


def first_overlap(tensors: Sequence[RawTensor]) -> tuple[int, int] | None:
    """Two tensors that share a byte, or whose strides are too irregular to exclude it."""
    steps = [_steps(tensor) for tensor in tensors]
    kinds: dict[Steps, int] = {}
    kind_of = [kinds.setdefault(each, len(kinds)) for each in steps]
    known: dict[tuple[int, int, int], bool] = {}
    for low, high in _near(tensors):
        distance = tensors[high].pointer - tensors[low].pointer
        key = kind_of[low], kind_of[high], distance
        if key not in known:  # regular pools have few distances
            # The second tensor counts backwards from its end, so that all multiples are added.
            end = sum(stride * last for stride, last in steps[high])
            known[key] = _is_sum([*steps[low], *steps[high]], distance + end)
        if known[key]:
            return min(low, high), max(low, high)
    return None


def _steps(tensor: RawTensor) -> Steps:
    sizes = zip(tensor.strides, tensor.shape, strict=True)
    steps = [(stride * tensor.itemsize, size - 1) for stride, size in sizes if size > 1 and stride]
    return tuple(sorted([(1, tensor.itemsize - 1), *steps]))


def _near(tensors: Sequence[RawTensor]) -> Iterator[tuple[int, int]]:
    order = sorted(
        (number for number, tensor in enumerate(tensors) if 0 not in tensor.shape),
        key=lambda number: (tensors[number].device, tensors[number].pointer),
    )
    active: list[int] = []
    for number in order:
        tensor = tensors[number]
        active = [
            each
            for each in active
            if tensors[each].device == tensor.device and tensors[each].pointer + tensors[each].nbytes_spanned > tensor.pointer
        ]
        yield from ((each, number) for each in active)
        active.append(number)


def _is_sum(steps: Iterable[tuple[int, int]], total: int) -> bool:
    """Whether `total` is a sum of one multiple of each step. Also true after `MAX_TRIES`. The steps have one of a single
    byte, and reach `total`.
    """
    merged = _merge(steps)
    reach = list(itertools.accumulate(stride * last for stride, last in merged))
    tries = itertools.count()

    def search(index: int, left: int) -> bool:
        if index == 0:
            return True
        stride, last = merged[index]
        fewest = max(0, -((reach[index - 1] - left) // stride))
        multiples = range(fewest, min(last, left // stride) + 1)
        return any(next(tries) >= MAX_TRIES or search(index - 1, left - multiple * stride) for multiple in multiples)

    return search(len(merged) - 1, total)


def _merge(steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for stride, last in sorted(steps):
        if merged:
            smaller, bound = merged[-1]
            if stride % smaller == 0 and stride <= smaller * (bound + 1):
                merged[-1] = smaller, bound + stride // smaller * last
                continue
        merged.append((stride, last))
    return merged
