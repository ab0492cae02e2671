"""The sending side: failures, aborts, deadlines, unsettled transfers, and lost peers."""

from __future__ import annotations

import pytest

from disagg.core.errors import DisaggError, RequestTimeout
from disagg.core.leases import LeaseState, withdraw
from disagg.protocol.messages import (
    Abort,
    Complete,
    Drained,
    Outcome,
    decode,
    encode,
)
from disagg.protocol.send_session import SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Event, Limits
from tests.protocol.send_side import (
    D0,
    D1,
    E0,
    FAILED,
    IDS,
    KEY,
    chunk,
    reserve,
    send,
    sending,
    settle,
    take_effects,
    take_kinds,
    take_messages,
)


def test_an_abort_is_sent_to_decode_at_once() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.abort(session, FAILED, 0.1)
    reason = str(FAILED)
    found = take_effects(sessions)
    assert [e for e in found if isinstance(e, tuple)] == [
        (D0, Abort(**IDS, reason=reason, from_writer=True)),
        (D0, Drained(**IDS, reason=reason)),
    ]
    assert [(e.ok, e.error) for e in found if isinstance(e, Event)] == [(False, FAILED)]
    assert session.lease.released
    sessions.on_message(D1, reserve(nonce=8), 0.2)  # reserves after the abort
    assert take_messages(sessions) == [
        (D1, Abort(**{**IDS, "nonce": 8}, reason=reason, from_writer=True)),
        (D1, Drained(**{**IDS, "nonce": 8}, reason=reason)),
    ]


def test_a_send_aborted_before_any_reserve_refuses_later_reserves() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.sends.abort(session, FAILED, 0.0)
    assert take_kinds(sessions) == ["Event"]
    assert session.lease.released
    sessions.on_message(D0, reserve(), 1.0)
    assert [type(message) for _, message in take_messages(sessions)] == [Abort, Drained]
    assert sessions.sends.sessions == {}


def test_an_abort_during_writes_is_sent_at_once_and_rows_are_released_when_the_writes_have_settled() -> None:
    sessions = Sessions()
    session = sending(sessions, finished=False)
    sessions.sends.abort(session, FAILED, 0.5)
    assert set(take_kinds(sessions)) == {"Event", "Abort", "CancelTransfers"}
    assert session.lease.state is LeaseState.HELD
    sessions.sends.send(session, chunk(1, 0, 20), 0.6)
    assert "StartTransfer" not in take_kinds(sessions)
    settle(sessions)
    assert session.lease.released
    assert take_messages(sessions) == [(D0, Drained(**IDS, reason=str(FAILED)))]
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    assert take_effects(sessions) == []
    assert sessions.sends.sessions == {}


def test_what_lands_after_the_server_has_aborted_completes_nothing() -> None:
    """The rows may have changed before they were read. The abort itself comes a moment later."""
    sessions = Sessions()
    session = sending(sessions)
    withdraw(session.lease)
    settle(sessions)
    assert take_kinds(sessions) == []
    sessions.sends.abort(session, FAILED, 1.1)
    assert take_kinds(sessions) == ["Event", "Abort", "Drained"]
    assert session.lease.released


def test_an_abort_of_the_receiver_is_acknowledged_only_when_the_writes_have_settled() -> None:
    sessions = Sessions()
    session = sending(sessions)
    abort = Abort(**IDS, reason="client gone")
    for _ in range(3):
        sessions.on_message(D0, abort, 0.5)
        assert take_messages(sessions) == []
        assert session.lease.state is LeaseState.HELD
    settle(sessions)
    assert take_messages(sessions) == [(D0, Drained(**IDS, reason="client gone"))]
    assert session.lease.released
    sessions.on_message(D0, abort, 1.5)
    assert take_messages(sessions) == [(D0, Drained(**IDS, reason="client gone"))]


def test_the_aborts_of_two_ranks_are_both_acknowledged() -> None:
    sessions = Sessions()
    send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.on_message(D0, Abort(**IDS, reason="x"), 1.0)
    sessions.on_message(D1, Abort(**{**IDS, "nonce": 8}, reason="x"), 1.0)
    acknowledged = [e for e in take_effects(sessions) if isinstance(e, tuple)]
    assert acknowledged == [(D0, Drained(**IDS, reason="x")), (D1, Drained(**{**IDS, "nonce": 8}, reason="x"))]


def test_drained_is_resent_until_the_outcome_arrives() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=1.0))
    send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, Abort(**IDS, reason="x"), 0.0)
    take_effects(sessions)
    sessions.tick(1.0)
    assert take_messages(sessions) == [(D0, Drained(**IDS, reason="x"))]
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    take_effects(sessions)
    sessions.tick(5.0)
    assert take_messages(sessions) == []


def test_a_failed_transfer_fails_its_destination_with_the_first_cause() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 8), 0.0)
    sessions.sends.send(session, chunk(1, 8, 20), 0.0)
    take_effects(sessions)
    settle(sessions, 0, error="broken wire")
    assert take_messages(sessions) == [(D0, Abort(**IDS, reason="broken wire", from_writer=True))]
    settle(sessions, 1, error="cancelled")
    assert take_messages(sessions) == [(D0, Drained(**IDS, reason="broken wire"))]
    sessions.on_message(D0, Outcome(**IDS, ok=False, reason="D: broken wire"), 1.0)
    (event,) = take_effects(sessions)
    assert str(event.error) == "broken wire"
    assert sessions.sends.sessions == {}


def test_the_failure_of_all_destinations_is_reported_before_finish() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, Abort(**IDS, reason="client gone"), 1.0)
    sessions.on_message(D0, Outcome(**IDS, ok=False, reason="client gone"), 1.1)
    assert [(e.ok, str(e.error)) for e in take_effects(sessions) if isinstance(e, Event)] == [(False, "client gone")]
    assert session.lease.released
    sessions.sends.send(session, chunk(0, 0, 20), 2.0)
    sessions.sends.finish(session, b"", 2.0)
    sessions.sends.abort(session, FAILED, 2.0)
    assert take_effects(sessions) == []
    assert sessions.sends.sessions == {}


@pytest.mark.parametrize("how", ["it gives up", "it fails", "it is gone", "it never reserves"])
def test_a_rank_that_ends_ends_the_send_for_those_that_have_not_reserved(how: str) -> None:
    """They might never do so, and the server would wait for its deadline, if it has one."""
    sessions = Sessions()
    session = send(sessions, ranks=2)
    if how != "it never reserves":
        sessions.on_message(D0, reserve(), 0.0)
    take_effects(sessions)
    match how:
        case "it gives up" | "it never reserves":
            sessions.on_message(D0, Abort(**IDS, reason="client gone"), 1.0)
        case "it fails":
            sessions.on_message(D0, Outcome(**IDS, ok=False, reason="no room"), 1.0)
        case _:
            sessions.peer_lost(D0, "it was killed", 1.0)
    (event,) = [effect for effect in take_effects(sessions) if isinstance(effect, Event)]
    assert (event.ok, session.lease.released) == (False, True)
    reasons = {"it fails": "no room", "it is gone": "D/0 is gone: it was killed"}
    assert reasons.get(how, "client gone") in str(event.error)
    sessions.on_message(D1, reserve(nonce=8), 2.0)
    assert take_kinds(sessions) == ["Abort", "Drained"]


@pytest.mark.parametrize("blocked_by", ["a pending transfer", "a missing outcome", "a missing reserve"])
def test_the_deadline_is_reported_in_every_state(blocked_by: str) -> None:
    sessions = Sessions()
    session = send(sessions) if blocked_by == "a missing reserve" else sending(sessions)
    if blocked_by == "a missing outcome":
        settle(sessions)
    take_effects(sessions)
    sessions.tick(9.99)
    assert "Event" not in take_kinds(sessions)
    sessions.tick(10.0)
    (event,) = [e for e in take_effects(sessions) if isinstance(e, Event)]
    assert isinstance(event.error, RequestTimeout)
    assert ("0 of 1 ranks of 'D' reserved" if blocked_by == "a missing reserve" else "waiting for D/0") in str(event.error)
    assert session.lease.released is (blocked_by != "a pending transfer")
    sessions.tick(1000.0)
    assert "Event" not in take_kinds(sessions)


def test_the_deadline_error_names_a_finish_that_was_not_called() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    settle(sessions)
    take_effects(sessions)
    sessions.tick(10.0)
    effects = take_effects(sessions)
    (event,) = [e for e in effects if isinstance(e, Event)]
    assert str(event.error).endswith("the deadline passed before the sender's finish was called")


def test_an_outcome_before_the_deadline_check_counts() -> None:
    sessions = Sessions()
    sending(sessions)
    settle(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 11.0)
    sessions.tick(11.0)
    assert [e.ok for e in take_effects(sessions) if isinstance(e, Event)] == [True]


def test_an_ended_send_does_not_change() -> None:
    sessions = Sessions()
    session = sending(sessions)
    settle(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 2.0)
    take_effects(sessions)
    tombstone = sessions.sends.table.ended.get("D", KEY)
    assert tombstone is not None
    sessions.tick(1000.0)
    sessions.sends.abort(session, FAILED, 1000.0)
    assert session.error is None
    assert sessions.sends.table.ended.get("D", KEY) == tombstone
    assert take_effects(sessions) == []


def test_a_failed_destination_does_not_affect_the_others() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    settle(sessions, peer=D0, error="broken wire")
    take_effects(sessions)
    settle(sessions, peer=D1)
    assert [(peer, type(message)) for peer, message in take_messages(sessions)] == [(D1, Complete)]


def test_any_reason_of_an_engine_can_be_encoded() -> None:
    sessions = Sessions()
    sending(sessions)
    settle(sessions, error="\udc80" + "x" * 10_000)
    messages = take_messages(sessions)
    assert len(messages) == 2
    for _, message in messages:
        assert decode(encode(message)) == message


@pytest.mark.parametrize("late", ["", "cancelled"])
def test_an_unsettled_transfer_quarantines_the_rows_until_it_has_settled(late: str) -> None:
    sessions = Sessions()
    session = sending(sessions)
    settle(sessions, error="the engine lost track of the transfer", unsettled=True)
    assert take_kinds(sessions) == ["Abort"]
    assert (session.lease.state, session.lease.reason) == (LeaseState.QUARANTINED, "the engine lost track of the transfer")
    sessions.on_message(D0, Abort(**IDS, reason="x"), 2.0)
    assert take_messages(sessions) == []
    settle(sessions, error=late)
    assert take_messages(sessions) == [(D0, Drained(**IDS, reason="the engine lost track of the transfer"))]
    assert session.lease.released


def test_an_unsettled_transfer_without_an_error_may_still_succeed() -> None:
    sessions = Sessions()
    session = sending(sessions)
    settle(sessions, unsettled=True)
    assert take_effects(sessions) == []
    assert session.lease.state is LeaseState.QUARANTINED
    settle(sessions)
    assert take_kinds(sessions) == ["Complete"]
    assert session.lease.released


def test_a_report_about_an_unknown_transfer_changes_nothing() -> None:
    sessions = Sessions()
    settle(sessions, error="no such request")
    session = sending(sessions)
    settle(sessions, 5, error="no such chunk")
    settle(sessions, 0, D1, error="no such destination")
    assert take_effects(sessions) == []
    assert session.destinations[D0].state is SendState.ACTIVE


def test_losing_a_destination_ends_the_send_and_rows_are_held_until_its_writes_settle() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.peer_lost(D0, "it died", 1.0)
    (event,) = take_effects(sessions)
    assert (event.ok, str(event.error)) == (False, "D/0 is gone: it died")
    assert session.lease.state is LeaseState.HELD
    settle(sessions)
    assert session.lease.released
    assert take_effects(sessions) == []
    assert sessions.sends.sessions == {}


def test_a_proof_that_a_lost_destination_is_quiescent_releases_the_rows() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.peer_quiet(D0)  # it is not lost
    assert session.destinations[D0].in_flight == {0}
    settle(sessions, error="the engine lost track of the transfer", unsettled=True)
    sessions.peer_lost(D0, "it died", 1.0)
    sessions.peer_lost(D1, "it died", 1.0)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.peer_quiet(D1)
    assert session.lease.state is LeaseState.QUARANTINED
    assert sessions.unproved() == {(D0, 0)}
    sessions.peer_quiet(D0)
    assert session.lease.released
    assert sessions.unproved() == set()
    settle(sessions)
    assert sessions.sends.sessions == {}


def test_losing_a_peer_without_a_reservation_changes_nothing() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.peer_lost(D0, "it died", 1.0)
    sessions.peer_lost(E0, "it died", 1.0)
    assert (session.destinations, take_effects(sessions)) == ({}, [])


def test_an_abort_of_a_lost_destination_is_acknowledged_once_its_writes_have_settled() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.peer_lost(D0, "connection reset", 0.5)
    take_effects(sessions)
    sessions.on_message(D0, Abort(**IDS, reason="connection reset"), 0.6)
    assert take_messages(sessions) == []
    settle(sessions)
    assert take_messages(sessions) == []
    sessions.on_message(D0, Abort(**IDS, reason="connection reset"), 1.6)
    assert [type(message) for _, message in take_messages(sessions)] == [Drained]


def test_the_error_of_an_abort_keeps_its_type() -> None:
    sessions = Sessions()
    session = sending(sessions)
    error: DisaggError = RequestTimeout("the scheduler dropped the request")
    sessions.sends.abort(session, error, 0.5)
    settle(sessions)
    assert [e.error for e in take_effects(sessions) if isinstance(e, Event)] == [error]
