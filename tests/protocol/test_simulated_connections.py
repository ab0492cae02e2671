"""Simulated connections of two instances that are killed, cut off, reset and started anew."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from harness.simulator import connections
from harness.simulator.connections import _hello, check_connections

NUM_SCHEDULES = 120
FOUND = (1007404,)
"""Seeds of faults: the connection that the peer had opened ended while this rank said hello to it."""


@pytest.mark.sweep
def test_both_sides_become_ready_again_and_stay_so() -> None:
    found = [problem for seed in (*FOUND, *range(NUM_SCHEDULES)) for problem in check_connections(seed)]
    assert found == []


@pytest.mark.sweep
def test_messages_to_an_earlier_process_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that let a rank write into rows that had been reserved at the process before it, and were released."""
    monkeypatch.setattr(connections, "_hello", lambda *given, **named: replace(_hello(*given, **named), peer_epoch=0))
    found = [problem for seed in range(NUM_SCHEDULES) for problem in check_connections(seed)]
    assert any("took a message for" in problem for problem in found)


@pytest.mark.sweep
def test_generations_that_count_for_another_process_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that kept a rank from staying connected once it had been given up and started anew."""
    monkeypatch.setattr(msgspec.structs, "replace", lambda hello, **_: hello)
    found = [problem for seed in range(NUM_SCHEDULES) for problem in check_connections(seed)]
    assert any("more losses than" in problem and "the peer has given the connection up" in problem for problem in found)
