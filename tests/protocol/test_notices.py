"""Declines, and aborts sent before any reservation, are repeated until they are answered."""

from __future__ import annotations

import pytest

from disagg.core.errors import RequestAborted
from disagg.protocol.messages import Abort, Decline, Drained
from disagg.protocol.notices import MAX_SENT
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Limits, PeerRank, RequestKey, SendMessage
from harness.simulator.faults import FixedFaults
from harness.simulator.scenario import Scenario, Script
from harness.simulator.simulation import Simulation
from tests.protocol.test_offers import D0, ID, decline

P1, KEY = PeerRank("P", 1), RequestKey(b"request-reserved", 0)


def sent_until(sessions: Sessions, until: float) -> list[float]:
    """When the notice was sent, in steps of half a second."""
    times = []
    for step in range(int(until * 2) + 1):
        sessions.tick(step / 2)
        sessions.flush(step / 2)
        times += [step / 2 for e in sessions.effects if isinstance(e, SendMessage) and isinstance(e.message, Abort | Decline)]
        sessions.effects.clear()
    return times


@pytest.mark.parametrize("how", ["decline", "abort"])
def test_a_notice_is_repeated_until_it_is_answered(how: str) -> None:
    def told() -> Sessions:
        sessions = Sessions()
        if how == "decline":
            sessions.decline(KEY, peer="P", nonce=7, source_group=0, ranks=[1])
        else:
            session = sessions.receives.open(
                KEY, peer="P", nonce=7, source_group=0, rows={}, need={}, expected={1: {}}, now=0.0, deadline=9.0, ready=False
            )
            sessions.receives.abort(session, RequestAborted("the client left"), 0.0)
        return sessions

    assert sent_until(told(), 60.0) == [0.0, 0.5, 1.5, 3.5, 7.5, 12.5]
    sessions = told()
    assert len(sent_until(sessions, 1.0)) == 2 < MAX_SENT
    sessions.on_message(P1, Drained(request_id=KEY.request_id, attempt=0, nonce=8), 1.0)
    sessions.on_message(P1, Drained(request_id=KEY.request_id, attempt=0, nonce=7), 3.0)
    assert sent_until(sessions, 60.0) == []
    sessions = told()
    sessions.forget("P", 0.0)
    assert len(sent_until(sessions, 60.0)) == 1


def test_a_second_notice_of_an_attempt_replaces_the_first() -> None:
    sessions = Sessions()
    for nonce in (7, 8):
        sessions.decline(KEY, peer="P", nonce=nonce, source_group=0, ranks=[1])
    assert sent_until(sessions, 60.0) == [0.0, 0.0, 0.5, 1.5, 3.5, 7.5, 12.5]
    assert sessions.next_tick > 60.0


def test_a_decline_for_which_there_is_no_room_is_not_answered() -> None:
    sessions = Sessions(limits=Limits(max_parked_reserves=1))
    for attempt in (0, 1):
        sessions.on_message(D0, decline(attempt), 0.0)
    answers = [effect.message for effect in sessions.effects if isinstance(effect, SendMessage)]
    assert answers == [Drained(request_id=ID, attempt=0, nonce=7)]


@pytest.mark.parametrize(
    ("script", "size"),
    [(Script(kept=True, replicated=True), 2), (Script(ready_after_s=5.0, receive_aborts={0: 0.05}), 1)],
    ids=["decline", "abort"],
)
def test_a_lost_notice_does_not_hold_rows(script: Script, size: int) -> None:
    scenario = Scenario(scripts=(script,), tp=size, num_senders=size)
    simulation = Simulation(scenario, FixedFaults({0: ()})).run()
    (last,) = simulation.hosts[PeerRank("P", size - 1)].events.values()
    assert "deadline" not in str(last.error)
