"""The receiving side: reserves, success, failures, and deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.core.errors import LocalProtocolError, RequestAborted, RequestTimeout
from disagg.core.leases import LeaseState
from disagg.protocol.messages import Abort, Borrow, Busy, Drained, Outcome, Reserve, Written, pack_rows
from disagg.protocol.receive_session import ReceiveState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Event, Limits, PeerRank, RequestKey
from tests.protocol.receive_side import (
    ALL_OF_P0,
    ALL_OF_P1,
    FAILED,
    IDS,
    KEY,
    ONE,
    P0,
    P1,
    ROWS,
    STRANGER,
    complete,
    fail,
    receive,
    take_events,
    take_messages,
)
from tests.protocol.test_loans import Pool

OTHER = RequestKey(b"another request!", 0)


def test_each_elected_writer_gets_a_reserve_of_its_components_only() -> None:
    sessions = Sessions(group=5)
    receive(sessions)
    common: dict[str, Any] = {**IDS, "source_group": 1, "destination_group": 5}
    kv, ssm = pack_rows(ROWS["kv"]), pack_rows(ROWS["ssm"])
    assert take_messages(sessions) == [
        (P0, Reserve(**common, rows={"kv": kv}, need={"kv": (16, 40)})),
        (P1, Reserve(**common, rows={"kv": kv, "ssm": ssm}, need={"kv": (16, 40), "ssm": (0, 40)})),
    ]


def test_rows_are_reserved_once_when_they_are_ready() -> None:
    sessions = Sessions()
    session = receive(sessions, ready=False)
    assert (take_messages(sessions), session.state) == ([], ReceiveState.WAITING)
    sessions.receives.ready(session, 1.0)
    assert [peer for peer, _ in take_messages(sessions)] == [P0, P1]
    sessions.receives.ready(session, 1.0)
    assert take_messages(sessions) == []


def test_a_receive_without_needs_succeeds_at_once() -> None:
    sessions = Sessions()
    session = receive(sessions, expected={})
    assert [event.ok for event in take_events(sessions)] == [True]
    assert session.lease.released
    assert session.due == float("inf")


def test_an_attempt_is_received_once_and_another_attempt_may_follow() -> None:
    sessions = Sessions()
    session = receive(sessions)
    with pytest.raises(LocalProtocolError, match="use a new attempt number"):
        receive(sessions)
    sessions.receives.abort(session, FAILED, 0.0)
    sessions.on_message(P0, Drained(**IDS), 0.0)
    sessions.on_message(P1, Drained(**IDS), 0.0)
    with pytest.raises(LocalProtocolError, match="already received from 'P'"):
        receive(sessions)
    receive(sessions, key=RequestKey(KEY.request_id, 4))


def test_success_needs_all_data_from_every_writer() -> None:
    sessions = Sessions()
    session = receive(sessions)
    take_messages(sessions)
    sessions.on_message(P1, complete(ALL_OF_P1, b"first token"), 1.0)
    assert take_events(sessions) == []
    assert session.lease.state is LeaseState.HELD
    sessions.on_message(P1, complete(ALL_OF_P1, b"first token"), 1.0)  # a resend, because it got no outcome
    assert (session.state, take_messages(sessions)) == (ReceiveState.OPEN, [])
    sessions.on_message(P0, complete(ALL_OF_P0), 2.0)
    outcome = Outcome(**IDS, ok=True)
    assert take_messages(sessions) == [(P0, outcome), (P1, outcome)]
    (event,) = take_events(sessions)
    assert (event.ok, event.error, event.payload, event.tag, event.direction) == (True, None, b"first token", "tag", "receive")
    assert session.lease.released
    assert sessions.receives.sessions == {}


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ((), r"tokens \[16, 40\) of layer 2 \(2 layers incomplete\)"),
        ((Written(0, "kv", None, 16, 39), ALL_OF_P1[1]), r"'kv': tokens \[39, 40\)"),
        ((Written(0, "kv", None, 16, 20), Written(1, "kv", None, 21, 40), ALL_OF_P1[1]), r"'kv': tokens \[20, 21\)"),
        ((Written(0, "kv", (2,), 16, 40), Written(1, "kv", (2,), 16, 40), ALL_OF_P1[1]), "layer 3"),
        ((Written(0, "kv", (0, 1, 3), 0, 40), ALL_OF_P1[1]), "layer 2"),
        ((Written(0, "kv", None, 16, 40), Written(1, "conv", None, 0, 40)), "without component 'ssm'"),
        (
            tuple(Written(0, "kv", None, token, token + 1) for token in range(16, 40, 2)) + ALL_OF_P1[1:],
            r"\[31, 32\) and 4 more ranges of layer 2",
        ),
        (tuple(Written(0, "kv", (2,), 16, 17) for _ in range(40_000)), "expected at most 65536 ranges, counted for each layer"),
        ((Written(0, "kv", None, 40, 16), Written(1, "kv", None, 16, 16), ALL_OF_P1[1]), "'kv'"),
    ],
    ids=["no data", "last token", "gap", "layer twice", "layer", "component", "many gaps", "many ranges", "empty range"],
)
def test_a_writer_that_completes_without_needed_data_fails_the_request(written: tuple[Written, ...], missing: str) -> None:
    sessions = Sessions()
    session = receive(sessions)
    take_messages(sessions)
    sessions.on_message(P1, complete(written), 1.0)
    (event,) = [e for e in sessions.effects if isinstance(e, Event)]
    assert not event.ok
    with pytest.raises(RequestAborted, match=missing):
        raise event.error or AssertionError
    assert [(peer, type(message)) for peer, message in take_messages(sessions)] == [(P0, Abort)]
    assert not session.lease.released
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)  # too late for success, but it proves that the writer is quiescent
    assert session.state is ReceiveState.FAILED
    assert session.lease.released


def test_messages_before_the_deadline_check_count() -> None:
    sessions = Sessions()
    receive(sessions, expected=ONE)
    sessions.on_message(P0, complete(ALL_OF_P0), 11.0)
    sessions.tick(11.0)
    assert [event.ok for event in take_events(sessions)] == [True]


@pytest.mark.parametrize("peer", [STRANGER, PeerRank("Q", 0)])
def test_messages_of_a_rank_that_was_not_elected_are_ignored(peer: PeerRank) -> None:
    sessions = Sessions()
    session = receive(sessions)
    before = session.state, [writer.state for writer in session.writers.values()]
    for message in (complete(ALL_OF_P0), Drained(**IDS), Abort(**IDS, reason="x", from_writer=True)):
        sessions.on_message(peer, message, 1.0)
    assert (session.state, [writer.state for writer in session.writers.values()]) == before
    assert take_events(sessions) == []


def test_messages_with_another_nonce_do_not_affect_the_receive() -> None:
    sessions = Sessions()
    session = receive(sessions)
    take_messages(sessions)
    other = {**IDS, "nonce": 8}
    sessions.on_message(P0, complete(ALL_OF_P0, nonce=8), 1.0)
    sessions.on_message(P0, Drained(**other), 1.0)
    sessions.on_message(P0, Abort(**other, reason="x", from_writer=True), 1.0)
    sessions.on_message(P0, Busy(**other, reason="x", retry_after_s=0.001), 1.0)
    assert session.state is ReceiveState.OPEN
    unknown = Outcome(**other, ok=False, reason="the receiver does not know this attempt")
    assert take_messages(sessions) == [(P0, unknown), (P0, unknown)]


def test_an_abort_is_sent_at_once_and_rows_are_released_when_every_writer_has_drained() -> None:
    sessions, freed = Sessions(), list[str]()
    session = receive(sessions)
    session.lease.on_release(lambda: freed.append("rows"))
    take_messages(sessions)
    sessions.receives.abort(session, FAILED, 1.0)
    abort = Abort(**IDS, reason="client gone")
    assert take_messages(sessions) == [(P0, abort), (P1, abort)]
    assert [(event.ok, event.error) for event in take_events(sessions)] == [(False, FAILED)]
    sessions.on_message(P0, Drained(**IDS), 1.1)
    assert (freed, session.state) == ([], ReceiveState.ABORTING)
    sessions.on_message(P1, Drained(**IDS), 1.2)
    assert freed == ["rows"]
    outcome = Outcome(**IDS, ok=False, reason="client gone")
    assert take_messages(sessions) == [(P0, outcome), (P1, outcome)]
    assert take_events(sessions) == []


def test_the_first_failed_writer_ends_the_request_for_all_writers_with_its_reason() -> None:
    sessions = Sessions()
    session = receive(sessions)
    take_messages(sessions)
    sessions.on_message(P0, Abort(**IDS, reason="out of memory", from_writer=True), 1.0)
    assert [(peer, type(message)) for peer, message in take_messages(sessions)] == [(P0, Abort), (P1, Abort)]
    sessions.on_message(P1, Abort(**IDS, reason="because of the other", from_writer=True), 1.1)
    (event,) = take_events(sessions)
    assert str(event.error) == "P/0: out of memory"
    sessions.on_message(P1, Drained(**IDS, reason="because of the other"), 1.2)
    sessions.on_message(P0, Drained(**IDS, reason="out of memory"), 1.3)
    assert session.lease.released
    assert {message for _, message in take_messages(sessions)} == {Outcome(**IDS, ok=False, reason="P/0: out of memory")}


@pytest.mark.parametrize(("reason", "error"), [("rejected", "P/0: rejected"), ("", "P/0: the writer ended the attempt")])
def test_an_unrequested_drained_fails_the_request(reason: str, error: str) -> None:
    sessions = Sessions()
    receive(sessions, expected=ONE)
    sessions.on_message(P0, Drained(**IDS, reason=reason), 1.0)
    assert [str(event.error) for event in take_events(sessions)] == [error]


def test_a_writer_that_fails_after_complete_fails_the_request() -> None:
    sessions = Sessions()
    session = receive(sessions)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    sessions.on_message(P0, Drained(**IDS, reason="its server aborted"), 1.1)
    assert [event.ok for event in take_events(sessions)] == [False]
    sessions.on_message(P1, Drained(**IDS), 1.2)
    assert session.lease.released


def test_an_abort_before_the_rows_are_ready_ends_the_request_and_is_sent_to_the_writers() -> None:
    sessions = Sessions()
    session = receive(sessions, ready=False)
    sessions.receives.abort(session, FAILED, 1.0)
    assert session.state is ReceiveState.FAILED
    assert session.lease.released
    assert {type(message) for _, message in take_messages(sessions)} == {Abort}
    assert [event.ok for event in take_events(sessions)] == [False]
    sessions.receives.ready(session, 2.0)
    assert list(sessions.effects) == []


def test_the_deadline_error_names_the_silent_writers() -> None:
    sessions = Sessions()
    receive(sessions)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    sessions.tick(9.999)
    assert take_events(sessions) == []
    sessions.tick(10.0)
    (event,) = take_events(sessions)
    assert isinstance(event.error, RequestTimeout)
    assert str(event.error).endswith("the deadline passed while waiting for P/1")


def test_the_deadline_error_of_a_request_with_pending_kernels_names_them() -> None:
    sessions = Sessions()
    receive(sessions, expected={}, ready=False)
    sessions.tick(10.0)
    (event,) = take_events(sessions)
    assert str(event.error).endswith("while waiting for local kernels")


def test_a_request_fails_at_once_whose_writer_asks_for_slots_that_lost_writers_hold() -> None:
    """Nothing proves that they do not write any more, nor have they come back. Requests go on to which this writer owes
    nothing, or which do not wait for it yet.
    """
    sessions, other, later = Sessions(slots=Pool(total=1)), PeerRank("gone", 0), 3.0 + Limits().drain_timeout_s
    for peer in (P0, P1, other):
        sessions.lender.open(peer, 7, 0)
    needs, has_all = (receive(sessions, key=key) for key in (KEY, OTHER))
    not_ready = receive(sessions, key=RequestKey(b"not ready request", 0), ready=False)
    sessions.on_message(P1, complete(ALL_OF_P1, request_id=OTHER.request_id, attempt=OTHER.attempt), 0.5)
    sessions.on_message(other, Borrow(wanted=1, seen=0), 1.0)
    sessions.on_message(P1, Borrow(wanted=1, seen=0), 1.0)
    assert take_events(sessions) == []
    sessions.peer_lost(other, "no byte from its host", 2.0, epoch=7)
    sessions.on_message(P1, Borrow(wanted=0, seen=0), 2.0)
    assert take_events(sessions) == []
    sessions.on_message(P1, Borrow(wanted=1, seen=0), 3.0)
    assert take_events(sessions) == []
    sessions.on_message(P1, Borrow(wanted=1, seen=0), later)
    (event,) = take_events(sessions)
    assert str(event.error) == "1 of 1 staging slots may still be written by peers that are gone"
    assert (needs.state, has_all.state) == (ReceiveState.ABORTING, ReceiveState.OPEN)
    assert not_ready.error is None


def test_an_error_of_one_request_ends_only_that_request() -> None:
    sessions = Sessions()
    first, second = receive(sessions, expected=ONE), receive(sessions, key=OTHER, expected=ONE)
    second.lease.on_release(fail)
    sessions.receives.abort(first, FAILED, 1.0)
    sessions.on_message(P0, Drained(**IDS), 1.0)
    assert (first.state, second.state) == (ReceiveState.FAILED, ReceiveState.OPEN)


def test_a_raising_release_callback_loses_no_message_and_no_event() -> None:
    sessions = Sessions()
    session = receive(sessions, expected=ONE)
    take_messages(sessions)
    session.lease.on_release(fail)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    assert take_messages(sessions) == [(P0, Outcome(**IDS, ok=True))]
    assert [event.ok for event in take_events(sessions)] == [True]
