"""Checksums of state: each side computes them over its own layout, and they are equal if the right bytes arrived.

`_native.digest` weighs every element by the layer, the place among the tokens that the *destination* rank owns, and the
global position on every inner axis, and adds up. Where an element lies in memory does not matter, so the writers' checksums
add up to the destination's. They are kept by layer and by page of the destination, to locate a difference.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.errors import LayoutError
from disagg.core.memory import ITEMSIZE
from disagg.core.rows import Pages, Rows, Slot
from disagg.layout.binding import token_runs
from disagg.layout.election import Election
from disagg.layout.ownership import Interval, Ints
from disagg.layout.placement import Placement, TensorPlacement
from disagg.layout.plan import ComponentPlan, RowSpace, count_tokens, row_space
from disagg.layout.tables import ComponentLayout, LayoutTable, TensorLayout

Words = npt.NDArray[np.uint64]
ChecksumFunction = Callable[..., int]
"""It has the parameters of `_native.digest`, and reads memory of this process or of a GPU."""


@dataclass(frozen=True, eq=False)
class ChecksumBox:
    """A box of one tensor in one side's memory. `axes` are `(count, stride, global start)`, sorted by name. Strides
    are in bytes.
    """

    seed: int
    layers: Ints
    bases: Words
    row_stride: int
    token_stride: int
    granule: int
    axes: tuple[tuple[int, int, int], ...]
    itemsize: int


@dataclass(frozen=True, eq=False)
class ChecksumPlan:
    """What one side checks of a component for one destination rank. `layers`: all of the destination, by any writer,
    ascending.
    """

    name: str
    own: RowSpace
    destination: RowSpace
    boxes: tuple[ChecksumBox, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Checksums:
    """Modulo 2**64, by each of a plan's `layers` and by each page. Those of several writers add up."""

    by_layer: Words
    by_page: Words

    @classmethod
    def zero(cls, plan: ChecksumPlan, pages: range) -> Checksums:
        return cls(np.zeros(len(plan.layers), np.uint64), np.zeros(len(pages), np.uint64))


def writer_plans(
    election: Election,
    *,
    source: tuple[int, LayoutTable, Mapping[str, Placement]],
    destination: tuple[int, LayoutTable, Mapping[str, Placement]],
) -> dict[str, ChecksumPlan]:
    """What a writer checks for one destination rank, by component. The sides are as in `make_plan`."""
    boxes: dict[str, list[ChecksumBox]] = {}
    ours, theirs = source[1].ranks[source[0]].by_name, destination[1].ranks[destination[0]].by_name
    for flow in election.by_pair.get((source[0], destination[0]), ()):
        axes = [axis.name for axis in theirs[flow.component].tensor(flow.role).inner_axes]
        tensor, place = ours[flow.component].tensor(flow.role), source[2][flow.component].tensor(flow.role)
        box = _box(flow.component, tensor, place, dict(zip(axes, flow.box, strict=True)), flow.layers)
        boxes.setdefault(flow.component, []).append(box)
    return {
        name: ChecksumPlan(
            name,
            row_space(ours[name], source[2][name]),
            row_space(theirs[name], destination[2][name]),
            tuple(found),
            _layers(theirs[name]),
        )
        for name, found in boxes.items()
    }


def reader_plan(layout: ComponentLayout, placement: Placement) -> ChecksumPlan:
    boxes = []
    for tensor in layout.tensors:
        if not tensor.layers:
            continue
        parts = [axis.owned.within(axis.size or 0).parts for axis in tensor.inner_axes]
        for cell in itertools.product(*parts):
            named = dict(zip((axis.name for axis in tensor.inner_axes), cell, strict=True))
            boxes.append(_box(layout.name, tensor, placement.tensor(tensor.role), named, tensor.layers))
    space = row_space(layout, placement)
    return ChecksumPlan(layout.name, space, space, tuple(boxes), _layers(layout))


def _layers(layout: ComponentLayout) -> tuple[int, ...]:
    return tuple(sorted({layer for tensor in layout.tensors for layer in tensor.layers}))


def _box(
    component: str, tensor: TensorLayout, place: TensorPlacement, box: Mapping[str, Interval], layers: Sequence[int]
) -> ChecksumBox:
    token = tensor.token
    return ChecksumBox(
        seed=_hash(component.encode() + b"\0" + tensor.role.encode()),
        layers=np.array(layers, dtype=np.int64),
        bases=place.addresses(layers, place.box_offset(tensor, box)),
        row_stride=place.row_stride,
        token_stride=place.strides[token.name] if token else 0,
        granule=token.granule if token else 1,
        axes=tuple((box[name].stop - box[name].start, place.strides[name], box[name].start) for name in sorted(box)),
        itemsize=ITEMSIZE[tensor.dtype],
    )


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def page_range(plan: ChecksumPlan, need: tuple[int, int]) -> range:
    """The destination's pages that hold tokens of `need`, by index in the request. A slot counts as one page."""
    space = plan.destination
    if space.tokens is None:
        return range(1)
    start, stop = (count_tokens(space, token, need[1]) for token in need)
    return range(start // space.page_size, -(-stop // space.page_size) if stop > start else start // space.page_size)


def check_listed(plan: ChecksumPlan, rows: Rows, need: tuple[int, int]) -> None:
    """Raises `LayoutError` if the destination, a peer, lists fewer pages than `need` spans: each gets a checksum. It may
    list one less, since an incomplete granule of tokens has no place.
    """
    if plan.destination.tokens is None:
        return
    if not isinstance(rows, Pages):
        raise LayoutError(f"component {plan.name!r}, destination: expected Pages, found {type(rows).__name__}")
    num_pages = len(page_range(plan, need))
    if num_pages > len(rows.ids) + 1:
        what = f"component {plan.name!r}, destination: tokens [{need[0]}, {need[1]}) need {num_pages} pages"
        raise LayoutError(f"{what}, {len(rows.ids)} are listed")


def checksum_rows(
    plan: ChecksumPlan,
    rows: Rows,
    *,
    need: tuple[int, int],
    tokens: tuple[int, int],
    layers: Iterable[int] | None,
    num_threads: int = 1,
    digest: ChecksumFunction = _native.digest,
) -> Checksums:
    """The checksums of tokens `[start, stop)` of `need`, in `layers` (`None`: all). Raises `LayoutError` if a needed token
    has no page inside the pool.
    """
    pages = page_range(plan, need)
    checksums = Checksums.zero(plan, pages)
    checked = set(plan.layers if layers is None else layers)
    tables: dict[int, Ints] = {}
    for box in plan.boxes:
        if box.granule not in tables:
            tables[box.granule] = _runs(plan, rows, pages, box.granule, need=need, tokens=tokens)
        kept = np.array([int(layer) in checked for layer in box.layers], dtype=np.bool_)
        by_layer = np.zeros(int(kept.sum()), dtype=np.uint64)
        digest(
            box.layers[kept],
            box.bases[kept],
            tables[box.granule],
            box.axes,
            row_stride=box.row_stride,
            token_stride=box.token_stride,
            itemsize=box.itemsize,
            seed=box.seed,
            num_threads=num_threads,
            by_layer=by_layer,
            by_row=checksums.by_page,
        )
        places = np.searchsorted(plan.layers, box.layers[kept])
        np.add.at(checksums.by_layer, places, by_layer)
    return checksums


def _runs(
    plan: ChecksumPlan, rows: Rows, pages: range, granule: int, *, need: tuple[int, int], tokens: tuple[int, int]
) -> Ints:
    """Runs of positions for `_native.digest`: where they lie here, their page's index in `by_page`, their global number."""
    numbered = RowSpace(plan.destination.page_size, pages.stop + 1, plan.destination.tokens)
    both = ComponentPlan(plan.name, plan.own, numbered, ())
    if plan.destination.tokens is None:
        return token_runs(both, granule, rows, Slot(0), None, None)
    listed = Pages(np.arange(pages.start, pages.stop, dtype=np.int32), need[0])
    runs = token_runs(both, granule, rows, listed, tokens, need[1])
    runs[:, 3] += runs[:, 2] * (plan.destination.page_size // granule)
    runs[:, 2] -= pages.start
    return runs


def difference(plan: ChecksumPlan, rows: Rows, pages: range, *, expected: Checksums, found: Checksums) -> str:
    """The first layer and page that differ, in words; empty if checksums are equal."""
    layers = np.flatnonzero(expected.by_layer != found.by_layer)
    numbers = np.flatnonzero(expected.by_page != found.by_page)
    if not len(layers) and not len(numbers):
        return ""
    where = ", ".join(
        [f"layer {plan.layers[i]} ({len(layers)} of {len(plan.layers)} layers differ)" for i in layers[:1]]
        + [_name_row(plan, rows, pages[int(i)], len(numbers), len(expected.by_page)) for i in numbers[:1]]
    )
    return f"component {plan.name!r}, {where}: what arrived is not what was sent"


def _name_row(plan: ChecksumPlan, rows: Rows, page: int, differing: int, checked: int) -> str:
    if isinstance(rows, Slot):
        return f"slot {rows.id}"
    size = plan.destination.page_size
    return f"page {page} of the request, tokens {page * size} to {(page + 1) * size} ({differing} of {checked} pages differ)"
