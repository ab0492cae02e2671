"""Checksums of both sides over real pools: equal after a correct transfer, different after a wrong one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Slot
from disagg.layout.checksums import (
    ChecksumPlan,
    Checksums,
    check_listed,
    checksum_rows,
    difference,
    page_range,
    reader_plan,
    writer_plans,
)
from disagg.layout.ownership import Intervals
from disagg.layout.placement import Component, Placement
from disagg.layout.tables import Axis
from disagg.testing.reference import KVModel
from disagg.testing.scene import Case, Instance, Scene, Side
from disagg.testing.strategies import HND, cases

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 8})


def rows(instance: Instance, rank: int) -> Pages:
    pages = instance.pages[rank]
    return Pages(np.array(pages.ids, dtype=np.int32), pages.first_token)


def placements(component: Component) -> Mapping[str, Placement]:
    assert component.placement is not None
    return {component.name: component.placement}


class Compared:
    """The checksums of all writers for one destination rank, and of that rank."""

    def __init__(self, scene: Scene, destination: int, *, cut: int | None = None) -> None:
        self.scene = scene
        self.need = (scene.case.need, scene.case.num_tokens)
        theirs, name = scene.destination, scene.case.model.component
        component = theirs.components[destination]
        layout = component.layouts[destination]
        assert layout is not None
        self.plan = reader_plan(layout, placements(component)[name])
        self.rows = rows(theirs, destination)
        self.pages = page_range(self.plan, self.need)
        self.found = checksum_rows(self.plan, self.rows, need=self.need, tokens=self.need, layers=None, num_threads=2)
        self.expected = Checksums.zero(self.plan, self.pages)
        for writer in scene.election.writers(destination):
            plan = writer_plans(
                scene.election,
                source=(writer, scene.source.table, placements(scene.source.components[writer])),
                destination=(destination, theirs.table, placements(component)),
            )[name]
            assert plan.layers == self.plan.layers
            for part, layers in itertools.product(self._cut(cut), self._halves(plan, cut)):
                part_checksums = checksum_rows(plan, rows(scene.source, writer), need=self.need, tokens=part, layers=layers)
                np.add(self.expected.by_layer, part_checksums.by_layer, out=self.expected.by_layer)
                np.add(self.expected.by_page, part_checksums.by_page, out=self.expected.by_page)

    def _cut(self, cut: int | None) -> list[tuple[int, int]]:
        start, stop = self.need
        return [self.need] if cut is None else [(start, min(start + cut, stop)), (min(start + cut, stop), stop)]

    @staticmethod
    def _halves(plan: ChecksumPlan, cut: int | None) -> list[tuple[int, ...] | None]:
        return [None] if cut is None else [plan.layers[::2], plan.layers[1::2]]

    @property
    def difference(self) -> str:
        return difference(self.plan, self.rows, self.pages, expected=self.expected, found=self.found)


@given(cases(), st.one_of(st.none(), st.integers(0, 9)))
def test_checksums_agree_after_a_transfer_in_any_chunks(case: Case, cut: int | None) -> None:
    scene = Scene(case)
    scene.run()
    for destination in range(len(scene.destination.ranks)):
        assert Compared(scene, destination, cut=cut).difference == ""


def moved(**changes: Any) -> Scene:
    case = Case(
        model=MODEL,
        source=Side(tp=2, page=4, stages=((0, 3, 5),)),
        destination=Side(tp=1, page=8, stages=((0, 3, 5),), axes=HND),
        **({"num_tokens": 40, "need": 3} | changes),
    )
    scene = Scene(case)
    scene.run()
    return scene


def tensor(scene: Scene, layer: int, which: int) -> np.ndarray[Any, Any]:
    return scene.destination.pools[0][layer][which].view(np.uint8)


def test_a_changed_byte_is_located_by_layer_and_page() -> None:
    scene = moved()
    ids = scene.destination.pages[0].ids
    for layer, which, page in itertools.product((0, 3, 5), (0, 1), range(1, 5)):
        memory = tensor(scene, layer, which)[ids[page]].reshape(-1)
        place = 11 * page
        memory[place] ^= 0x80
        found = Compared(scene, 0).difference
        memory[place] ^= 0x80
        assert f"layer {layer} (1 of 3 layers differ)" in found, found
        assert f"page {page} of the request, tokens {page * 8} to {page * 8 + 8} (1 of 5 pages differ)" in found
    assert Compared(scene, 0).difference == ""


@pytest.mark.parametrize("swap", ["pages", "heads", "layers", "k and v", "tokens"])
def test_right_bytes_in_wrong_places_are_detected(swap: str) -> None:
    scene = moved()
    first, second = scene.destination.pages[0].ids[1:3]
    keys = tensor(scene, 0, 0)
    match swap:
        case "pages":
            keys[[first, second]] = keys[[second, first]]
        case "heads":
            keys[first, [0, 1]] = keys[first, [1, 0]]
        case "tokens":
            keys[first, :, [0, 1]] = keys[first, :, [1, 0]]
        case "layers":
            other = tensor(scene, 3, 0)
            keys[first], other[first] = other[first].copy(), keys[first].copy()
        case _:
            values = tensor(scene, 0, 1)
            keys[first], values[first] = values[first].copy(), keys[first].copy()
    assert "what arrived is not what was sent" in Compared(scene, 0).difference


def _without_layers(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(msgspec.structs.replace(axis, owned=Intervals(())) if axis.name == "layer" else axis for axis in axes)


def test_a_tensor_without_layers_on_this_rank_adds_nothing() -> None:
    scene = moved()
    component = scene.destination.components[0]
    (layout,) = component.layouts
    assert layout is not None
    absent = msgspec.structs.replace(layout.tensors[0], role="scale", axes=_without_layers(layout.tensors[0].axes))
    more = msgspec.structs.replace(layout, tensors=(*layout.tensors, absent))
    placement = placements(component)[component.name]
    assert len(reader_plan(more, placement).boxes) == len(reader_plan(layout, placement).boxes)


def test_a_peer_that_lists_too_few_pages_for_its_need_is_refused() -> None:
    """Each page that is needed has a checksum. One page less is right where a group of tokens is not complete."""
    plan = Compared(moved(), 0).plan
    for count in (5, 4):
        check_listed(plan, Pages(np.arange(count)), (3, 40))
    check_listed(plan, Pages(np.arange(0)), (8, 8))
    with pytest.raises(LayoutError, match=r"tokens \[0, 1099511627776\) need 137438953472 pages, 3 are listed"):
        check_listed(plan, Pages(np.arange(3)), (0, 2**40))
    with pytest.raises(LayoutError, match="expected Pages, found Slot"):
        check_listed(plan, Slot(3), (0, 2**40))
    check_listed(dataclasses.replace(plan, destination=dataclasses.replace(plan.destination, tokens=None)), Slot(3), (0, 40))
