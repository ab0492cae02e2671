"""Packed writes of several jobs that share a peer's loans."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.backends.base import StagingShape
from disagg.core.memory import RemoteRegion
from disagg.transfer.jobs import Report, Settled, SlotsWanted
from disagg.transfer.packed_write import PackedWrite
from disagg.transfer.staging import Loans, SlotPool

SLOT = 1000


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_job_that_takes_what_another_has_asked_for_asks_for_it(num_taken: int) -> None:
    """Otherwise nobody does, and the other job waits until a message is taken for lost."""
    loans, reports = Loans(SLOT, 0, [RemoteRegion(4096, 1 << 20)], set()), deque[Report]()
    slots = SlotPool(StagingShape(slot_nbytes=SLOT, window=8, at_once=2))

    def job(name: str, nbytes: int) -> PackedWrite:
        given: Any = SimpleNamespace(ticket=name, peer="peer", cancelled=lambda: False)
        bound: Any = SimpleNamespace(stream=SimpleNamespace(total=nbytes, gather=lambda *_: None), gathered=None, parts=())
        backend: Any = SimpleNamespace(submit=lambda *_: SimpleNamespace())
        return PackedWrite(
            given, bound, backend=backend, loans=loans, slots=slots, report=Settled(ticket=name), reports=reports
        )

    large, small = job("large", 4 * SLOT), job("small", num_taken * SLOT)
    large.pack()
    assert [each.ticket for each in reports if isinstance(each, SlotsWanted)] == ["large"]
    reports.clear()
    loans.listed([(number, 4096 * number) for number in range(1, 5)], 4)  # the peer lends all that was asked for
    for each in (large, small, large, large):
        each.pack()
    assert loans.wanted == num_taken
    assert [each.ticket for each in reports if isinstance(each, SlotsWanted)] == ["small"] * num_taken
