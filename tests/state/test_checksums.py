"""Checksums of every kind of state: equal on both sides after a transfer, and different after any changed byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from disagg.core.rows import Rows
from disagg.layout.checksums import ChecksumPlan, Checksums, checksum_rows, difference, page_range, reader_plan, writer_plans
from disagg.layout.placement import Placement
from tests.state.test_hybrid import KINDS
from tests.support.instances import InstanceSpec, Rank, library_rows
from tests.support.kinds import Kind
from tests.support.states import Request, Scene

SIDES = {
    "tp 4 to 2": (InstanceSpec(tp=4), InstanceSpec(tp=2)),
    "tp 1 to 4 of three stages": (InstanceSpec(tp=1), InstanceSpec(tp=4, edges=(0, 1, 5, 9))),
}


def placements(rank: Rank) -> dict[str, Placement]:
    return {name: component.placement for name, component in rank.components.items() if component.placement is not None}


class Compared:
    """One transferred request of one kind of state, and both sides' checksums for one destination rank."""

    def __init__(self, scene: Scene, request: Request, kind: Kind, destination: int) -> None:
        self.name, self.need = kind.name, request.needs[kind.name]
        theirs = scene.destination.group(0)[destination]
        layout = scene.destination.table.ranks[destination].by_name[kind.name]
        self.plan = reader_plan(layout, placements(theirs)[kind.name])
        self.rows = library_rows(
            request.destination_rows[destination][kind.name], state=theirs.states[kind.name], tokens=self.need
        )
        self.pages = page_range(self.plan, self.need)
        self.expected = Checksums.zero(self.plan, self.pages)
        for writer in scene.election.writers(destination):
            ours = scene.source.group(0)[writer]
            plans = writer_plans(
                scene.election,
                source=(writer, scene.source.table, placements(ours)),
                destination=(destination, scene.destination.table, placements(theirs)),
            )
            rows = library_rows(request.source_rows[writer][kind.name], state=ours.states[kind.name], tokens=self.need)
            checksums = self._checksums(plans[kind.name], rows)
            np.add(self.expected.by_layer, checksums.by_layer, out=self.expected.by_layer)
            np.add(self.expected.by_page, checksums.by_page, out=self.expected.by_page)

    def _checksums(self, plan: ChecksumPlan, rows: Rows) -> Checksums:
        return checksum_rows(plan, rows, need=self.need, tokens=self.need, layers=None)

    @property
    def difference(self) -> str:
        return difference(self.plan, self.rows, self.pages, expected=self.expected, found=self._checksums(self.plan, self.rows))


def compared(kind: Kind, sides: tuple[InstanceSpec, InstanceSpec]) -> Iterator[tuple[Scene, Rank, Compared]]:
    scene = Scene([kind], *sides)
    request = scene.open(13)
    scene.run(request, scene.moves(request))
    for number, rank in enumerate(scene.destination.group(0)):
        if kind.name in scene.destination.table.ranks[number].by_name and rank.components[kind.name].placement is not None:
            yield scene, rank, Compared(scene, request, kind, number)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_checksums_of_both_sides_agree_for_every_kind(kind: str, sides: str) -> None:
    checked = 0
    for _, _, found in compared(KINDS[kind](), SIDES[sides]):
        assert found.difference == ""
        checked += bool(found.expected.by_layer.any())
    assert checked


@pytest.mark.parametrize("kind", ["gdn", "adapter", "window"])
def test_a_changed_byte_is_located_by_layer_and_row(kind: str) -> None:
    rng = np.random.default_rng(3)
    for _, rank, found in compared(KINDS[kind](), SIDES["tp 4 to 2"]):
        memory = rank.memory[kind if kind in rank.memory else found.name]
        image = {name: buffer.copy() for name, buffer in memory.buffers.items()}
        hits = 0
        for name, buffer in memory.buffers.items():
            flat: Any = buffer.view(np.uint8).reshape(-1)
            for place in rng.integers(len(flat), size=40).tolist():
                flat[place] ^= 0x40
                text = found.difference
                flat[place] ^= 0x40
                assert not text or (f"component {found.name!r}, layer " in text and ("slot " in text or "page " in text))
                hits += bool(text)
            assert (buffer.view(np.uint8) == image[name].view(np.uint8)).all()
        assert hits
