"""What a plan comes to for one request, with its rows bound over pools that were never allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from disagg.commands.shell.text import size
from disagg.core.copies import Columns
from disagg.layout.binding import BoundRows
from disagg.layout.plan import ComponentPlan, SpanClass

FIRST_ADDRESS = 1 << 40
"""Start of the memory that is not allocated."""
MAX_COPIES = 1 << 22
"""Bound at a time, 24 bytes each; one layer may exceed it."""


class Count(NamedTuple):
    """Runs are pieces with neighbours joined on both sides, or at the destination if numbers are converted."""

    nbytes: int = 0
    runs: int = 0


class CopyCounter:
    def __init__(self) -> None:
        self._columns = Columns()

    def count(self, bound: BoundRows) -> Count:
        if bound.plan.converts:
            return Count(*bound.at_destination())
        nbytes = runs = 0
        end: tuple[int, int] | None = None
        for part in _parts(bound):
            copies = part.copies(out=self._columns)
            if not len(copies):
                continue
            joined = end == (int(copies.source[0]), int(copies.destination[0]))
            nbytes, runs = nbytes + copies.total_nbytes, runs + len(copies) - joined
            last = int(copies.nbytes[-1])
            end = int(copies.source[-1]) + last, int(copies.destination[-1]) + last
        return Count(nbytes, runs)


def _parts(bound: BoundRows) -> Iterator[BoundRows]:
    """The same copies in order, up to `MAX_COPIES` of them at a time, or one layer."""
    for number, runs in zip(bound.numbers, bound.runs, strict=True):
        layers = np.array(list(dict.fromkeys(bound.plan.spans[number].layers)), dtype=np.int64)
        whole = BoundRows(bound.plan, (number,), [runs], layers)
        step = max(1, len(layers) * MAX_COPIES // max(whole.num_copies(), 1))
        for first in range(0, len(layers), step):
            yield BoundRows(bound.plan, (number,), [runs], layers[first : first + step])


def mean_run_at_destination(bound: BoundRows) -> float:
    nbytes, runs = bound.at_destination()
    return nbytes / runs


def run_end_reason(span: SpanClass, plan: ComponentPlan) -> str:
    if plan.source.tokens is None:
        if not span.dims:
            return "the state of a layer is contiguous on both sides"
        _, ours, theirs = span.dims[-1]
        return f"each step of a stride is a run{_strides(ours, theirs)}"
    if not span.dense:
        what = "token" if span.granule == 1 else f"group of {span.granule} tokens"
        return f"each {what} is a run{_strides(*span.token_strides)}"
    pages = {plan.source.page_size, plan.destination.page_size}
    page = f"pages of {plan.source.page_size} and {plan.destination.page_size} tokens" if len(pages) > 1 else "page"
    return f"runs end with the {page}" + (", and with each head or channel in it" if span.dims else "")


def _strides(source: int, destination: int) -> str:
    return f" (strides: {size(source)} at the source, {size(destination)} at the destination)"
