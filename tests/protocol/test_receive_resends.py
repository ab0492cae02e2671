"""The receiving side: resends, ended requests, bounds, and lost writers."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.core.errors import RequestTimeout
from disagg.core.leases import LeaseState
from disagg.protocol.messages import Abort, Busy, Complete, Drained, Outcome
from disagg.protocol.receive_session import ReceiveState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Event, Limits, RequestKey
from tests.protocol.receive_side import (
    ALL_OF_P0,
    ALL_OF_P1,
    BOTH,
    FAILED,
    IDS,
    ONE,
    P0,
    P1,
    STRANGER,
    complete,
    receive,
    take_messages,
)


def test_a_reserve_is_resent_at_growing_intervals_until_the_writer_completes() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=4.0))
    session = receive(sessions, expected=ONE)
    ((_, reserve),) = take_messages(sessions)
    session.deadline = 100.0
    times = []
    for now in range(1, 20):
        sessions.tick(float(now))
        if take_messages(sessions) == [(P0, reserve)]:
            times.append(now)
    assert times == [1, 3, 7, 11, 15, 19]
    sessions.on_message(P0, complete(ALL_OF_P0), 20.0)
    sessions.effects.clear()
    sessions.tick(99.0)
    assert list(sessions.effects) == []


def test_an_abort_is_resent_until_the_writer_has_drained_even_after_quarantine() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=1.0, drain_timeout_s=5.0))
    session = receive(sessions, expected=ONE)
    sessions.receives.abort(session, FAILED, 0.0)
    sessions.effects.clear()
    for now in range(1, 9):
        sessions.tick(float(now))
        assert [type(message) for _, message in take_messages(sessions)] == [Abort]
        assert session.lease.state is (LeaseState.HELD if now < 5 else LeaseState.QUARANTINED)
    assert session.lease.reason == "no proof that P/0 stopped writing"
    sessions.on_message(P0, Drained(**IDS), 9.0)
    assert session.lease.released


@pytest.mark.parametrize(("retry_after_s", "wait_s"), [(0.2, 0.2), (0.0, 0.001), (-5.0, 0.001), (1e9, 3.0)])
def test_a_busy_writer_gets_a_resend_after_its_retry_time_within_bounds(retry_after_s: float, wait_s: float) -> None:
    sessions = Sessions(limits=Limits(retry_s=2.0, max_retry_s=3.0))
    receive(sessions, expected=ONE)
    ((_, reserve),) = take_messages(sessions)
    sessions.on_message(P0, Busy(**IDS, reason="full", retry_after_s=retry_after_s), 1.0)
    sessions.tick(1.0 + wait_s - 1e-4)
    assert take_messages(sessions) == []
    sessions.tick(1.0 + wait_s)
    assert take_messages(sessions) == [(P0, reserve)]


def test_busy_without_a_pending_reserve_changes_nothing() -> None:
    sessions = Sessions()
    sessions.on_message(P0, Busy(reason="no such request", retry_after_s=1.0), 0.0)
    session = receive(sessions)
    sessions.on_message(STRANGER, Busy(**IDS, reason="not elected", retry_after_s=1.0), 0.0)
    sessions.on_message(P0, complete(ALL_OF_P0), 0.0)
    sessions.on_message(P0, Busy(**IDS, reason="too late", retry_after_s=0.001), 0.0)
    sessions.effects.clear()
    sessions.tick(0.1)
    assert list(sessions.effects) == []
    assert session.state is ReceiveState.OPEN


def test_repeated_busy_answers_keep_few_timers() -> None:
    sessions = Sessions()
    session = receive(sessions, expected=ONE)
    session.deadline = 1e6
    now = 0.0
    for _ in range(2000):
        sessions.on_message(P0, Busy(**IDS, reason="full", retry_after_s=0.05), now)
        now += 0.051
        sessions.tick(now)
    assert len(sessions._timers._heap) < 150
    sessions.on_message(P0, complete(ALL_OF_P0), now)
    sessions.tick(now + 1e7)
    assert sessions.next_tick == float("inf")


@pytest.mark.parametrize(
    "message",
    [complete(ALL_OF_P0), Drained(**IDS), Abort(**IDS, reason="x", from_writer=True)],
    ids=lambda m: type(m).__name__,
)
def test_a_writer_that_missed_the_outcome_gets_it_again(message: Any) -> None:
    sessions = Sessions()
    receive(sessions, expected=ONE)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    sessions.effects.clear()
    for _ in range(3):
        sessions.on_message(P0, message, 2.0)
        assert take_messages(sessions) == [(P0, Outcome(**IDS, ok=True))]


def test_thousands_of_messages_about_unknown_requests_are_answered_and_leave_no_state() -> None:
    sessions = Sessions()
    for number in range(5000):
        ids: dict[str, Any] = {"request_id": number.to_bytes(16, "big"), "attempt": 0, "nonce": 1}
        sessions.on_message(P0, Complete(**ids, written=()), 0.0)
        sessions.on_message(P0, Drained(**ids), 0.0)
        sessions.on_message(P0, Abort(**ids, reason="x", from_writer=True), 0.0)
    replies = take_messages(sessions)
    assert len(replies) == 10000
    assert all(isinstance(message, Outcome) and not message.ok for _, message in replies)
    assert (sessions.receives.sessions, len(sessions.receives._ended), sessions.next_tick) == ({}, 0, float("inf"))


def test_tombstones_are_bounded_and_the_oldest_is_dropped_first() -> None:
    sessions = Sessions(limits=Limits(max_tombstones=3))
    for number in range(10):
        key = RequestKey(number.to_bytes(16, "big"), 0)
        session = receive(sessions, key=key, expected={0: {}})
        sessions.receives.abort(session, FAILED, 0.0)
        sessions.on_message(P0, Drained(request_id=key.request_id, attempt=0, nonce=7), 0.0)
    remembered = [n for n in range(10) if sessions.receives._ended.get("P", RequestKey(n.to_bytes(16, "big"), 0))]
    assert (remembered, len(sessions.receives._ended)) == ([7, 8, 9], 3)


def test_a_lost_writer_ends_the_request_and_quarantines_its_rows_until_a_proof() -> None:
    sessions = Sessions()
    session = receive(sessions)
    take_messages(sessions)
    sessions.peer_lost(P0, "connection reset", 1.0)
    (event,) = [e for e in sessions.effects if isinstance(e, Event)]
    assert str(event.error) == "P/0 is gone: connection reset"
    assert [(peer, type(message)) for peer, message in take_messages(sessions)] == [(P1, Abort)]
    assert session.lease.reason == "P/0 is gone and may still write: connection reset"
    sessions.on_message(P1, Drained(**IDS), 2.0)
    sessions.peer_lost(P0, "a second loss", 2.0)
    sessions.tick(100.0)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.peer_quiet(P1)
    assert session.lease.state is LeaseState.QUARANTINED
    assert sessions.unproved() == {(P0, 0)}
    sessions.peer_quiet(P0)
    assert session.lease.released
    assert sessions.unproved() == set()


def test_losing_a_quiescent_or_unreserved_writer_quarantines_nothing() -> None:
    sessions = Sessions()
    finished = receive(sessions)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    waiting = receive(sessions, key=RequestKey(b"another request!", 0), ready=False)
    unrelated = receive(sessions, key=RequestKey(b"a third request!", 0), expected={1: BOTH[1]})
    sessions.peer_lost(P0, "it died", 2.0)
    assert (finished.state, unrelated.state) == (ReceiveState.OPEN, ReceiveState.OPEN)
    assert waiting.state is ReceiveState.FAILED
    assert waiting.lease.released
    sessions.on_message(P1, complete(ALL_OF_P1), 3.0)
    assert finished.state is ReceiveState.SUCCEEDED


def test_a_lost_writer_that_reconnects_gets_an_abort_for_its_proof() -> None:
    sessions = Sessions()
    session = receive(sessions, expected=ONE)
    other = receive(sessions, key=RequestKey(b"another-request!", 0), expected=ONE)
    sessions.peer_lost(P0, "silent", 1.0)
    assert session.lease.state is LeaseState.QUARANTINED
    take_messages(sessions)
    sessions.receives.peer_back(P1, 2.0)
    assert take_messages(sessions) == []
    sessions.receives.peer_back(P0, 2.0)
    assert [type(message) for _, message in take_messages(sessions)] == [Abort, Abort]
    sessions.on_message(P0, Drained(**IDS), 3.0)
    assert session.lease.released
    assert not other.lease.released


def test_a_later_process_of_a_peer_proves_nothing_for_an_earlier_one() -> None:
    """The first process is cut off and may still write; the second one of that name connects, and dies."""
    sessions = Sessions()
    session = receive(sessions, expected=ONE)
    sessions.peer_lost(P0, "cut off", 1.0, epoch=1)
    take_messages(sessions)
    sessions.receives.peer_back(P0, 2.0, epoch=2)
    assert take_messages(sessions) == []
    sessions.on_message(P0, Drained(**IDS), 2.5)
    sessions.on_message(P0, complete(ALL_OF_P0), 2.5)
    sessions.peer_lost(P0, "killed", 3.0, epoch=2)
    sessions.receives.peer_quiet(P0, epoch=2)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.receives.peer_quiet(P0, epoch=1)
    assert session.lease.released


def test_an_ended_request_is_dropped_before_its_deadline() -> None:
    """Otherwise 1,000 requests a second with deadlines of a minute would keep 60,000 ended sessions."""
    sessions = Sessions()
    for number in range(2000):
        key = RequestKey(number.to_bytes(16, "big"), 0)
        session = receive(sessions, key=key, expected=ONE)
        ids: dict[str, Any] = {"request_id": key.request_id, "attempt": 0, "nonce": 7}
        sessions.on_message(P0, Complete(**ids, written=ALL_OF_P0), 0.1)
        assert session.state is ReceiveState.SUCCEEDED
    assert len(sessions._timers) < 200
    waiting = receive(sessions, expected=ONE)
    assert sessions.next_tick <= waiting.due
    sessions.tick(10.0)
    assert isinstance(waiting.error, RequestTimeout)
