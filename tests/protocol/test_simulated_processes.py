"""Simulated processes that are stopped and go on, and messages of processes that have ended meanwhile."""

from __future__ import annotations

import pytest

from disagg.protocol.receive_session import WriterState
from disagg.protocol.types import Limits, PeerRank, StartTransfer
from harness.simulator.command import run_schedules
from harness.simulator.faults import FixedFaults
from harness.simulator.model import Violation
from harness.simulator.scenario import Loss, Piece, Scenario, Script, Stop
from harness.simulator.schedules import random_simulation
from harness.simulator.simulation import Simulation

P0, D0 = PeerRank("P", 0), PeerRank("D", 0)
CHUNKS = (Piece(0.0, (0, 3)), Piece(0.3, (3, 5)), Piece(0.5, state=True))
NUM_SCHEDULES = 600


def run(
    script: Script, faults: FixedFaults | None = None, *, stops: tuple[Stop, ...] = (), losses: tuple[Loss, ...] = ()
) -> dict[str, bool]:
    """Whether the request succeeded, by rank."""
    scenario = Scenario(scripts=(script,), stops=stops, losses=losses, limits=Limits(parked_reserve_s=15.0))
    simulation = Simulation(scenario, faults or FixedFaults()).run()
    return {str(name): event.ok for name, host in simulation.hosts.items() for event in host.events.values()}


@pytest.mark.parametrize("rank", [P0, D0], ids=str)
@pytest.mark.parametrize("at", [0.0, 0.05, 0.105, 0.3, 0.55, 0.605])
@pytest.mark.parametrize("seconds", [0.02, 1.0, 6.0])
def test_a_request_succeeds_although_a_rank_was_stopped(rank: PeerRank, at: float, seconds: float) -> None:
    found = run(Script(pieces=CHUNKS, finish_after_s=0.6), stops=(Stop(at, rank, seconds),))
    assert found == {"P/0": True, "D/0": True}


@pytest.mark.parametrize("rank", [P0, D0], ids=str)
def test_a_stop_beyond_the_deadline_fails_the_request_on_both_sides(rank: PeerRank) -> None:
    script = Script(pieces=CHUNKS, finish_after_s=0.6, deadline_s=4.0, send_deadline_s=4.0)
    assert run(script, stops=(Stop(0.3, rank, 9.0),)) == {"P/0": False, "D/0": False}


@pytest.mark.parametrize("rank", [P0, D0], ids=str)
@pytest.mark.parametrize("at", [0.05, 0.105, 0.3, 0.55])
@pytest.mark.parametrize("proved", [True, False])
def test_a_stopped_rank_that_was_given_up_writes_into_no_row_that_was_released(rank: PeerRank, at: float, proved: bool) -> None:
    """What it was copying lands when it goes on; its peer has ended the requests by then, and holds their rows."""
    peer = {P0: D0, D0: P0}[rank]
    loss = Loss(at + 1.0, peer, rank, proved=proved, notice_s=(0.0, 0.1))
    run(Script(pieces=CHUNKS, finish_after_s=0.6), stops=(Stop(at, rank, 5.0),), losses=(loss,))


def test_a_lost_peer_that_counts_as_quiet_is_found_out_by_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = (WriterState.COMPLETE, WriterState.QUIET, WriterState.LOST)
    monkeypatch.setattr(WriterState, "quiet", property(lambda state: state in quiet))
    loss = Loss(1.0, D0, P0, notice_s=(0.0, 0.1))
    with pytest.raises(Violation, match=r"wrote row|released during"):
        run(Script(pieces=CHUNKS, finish_after_s=0.6), stops=(Stop(0.105, P0, 5.0),), losses=(loss,))


LATE_RESERVE = FixedFaults(messages={0: (1.0,)})
"""The first message, which is the reserve, takes a second."""


def read_late() -> dict[str, bool]:
    """D reserves and dies. P notices, knows its successor, and reads the reserve."""
    return run(Script(send_at=1.5), LATE_RESERVE, losses=(Loss(0.2, D0, late_s=2.0, notice_s=(0.0, 0.0)),))


def test_a_reserve_that_is_read_after_its_process_has_ended_is_not_served_to_the_next() -> None:
    assert read_late() == {"P/0": False}


@pytest.mark.sweep
def test_a_reserve_that_counts_for_any_process_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was before reserves named their process: the row numbers are those of the dead process's memory."""
    monkeypatch.setattr(StartTransfer, "is_for", lambda *_: True)
    with pytest.raises(Violation, match=r"wrote row .* of D/0, which is not its own"):
        read_late()
    with pytest.raises(Violation, match=r"which is not its own|released during"):
        run_schedules(range(5_000, 5_000 + NUM_SCHEDULES))


@pytest.mark.sweep
def test_random_schedules_stop_ranks_and_read_messages_late() -> None:
    num_stops = num_late = 0
    for seed in range(5_000_000, 5_000_000 + NUM_SCHEDULES):
        simulation = random_simulation(seed)
        scenario = simulation.run().scenario
        num_stops += len(scenario.stops)
        num_late += sum(loss.late_s > 0 and loss.other is None for loss in scenario.losses)
    assert num_stops > NUM_SCHEDULES / 4
    assert num_late > NUM_SCHEDULES / 20
