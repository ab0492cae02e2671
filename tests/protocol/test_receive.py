"""The receiving side, one behaviour at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import LocalProtocolError, RequestAborted, RequestTimeout
from disagg.core.leases import LeaseState
from disagg.core.rows import Pages, Rows, Slot
from disagg.protocol.messages import Abort, Busy, Complete, Drained, Message, Outcome, Reserve, Written, pack_rows
from disagg.protocol.receive_session import Coverage, ReceiveSession, ReceiveState
from disagg.protocol.sessions import Sessions
from disagg.protocol.timers import Timers
from disagg.protocol.types import Event, Limits, PeerRank, RequestKey, SendMessage

P0, P1, STRANGER = PeerRank("P", 0), PeerRank("P", 1), PeerRank("P", 2)
KEY = RequestKey(b"request-received", 3)
IDS: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt, "nonce": 7}
ROWS: dict[str, Rows] = {"kv": Pages(np.array([4, 5, 6]), 16), "ssm": Slot(2)}
NEED = {"kv": (16, 40), "ssm": (0, 40)}
BOTH = {0: {"kv": ((0, 1), NEED["kv"])}, 1: {"kv": ((2, 3), NEED["kv"]), "ssm": ((9,), NEED["ssm"])}}
ONE = {0: {"kv": ((0, 1), NEED["kv"])}}
ALL_OF_P0 = (Written(0, "kv", None, 16, 40),)
ALL_OF_P1 = (Written(0, "kv", (2, 3), 0, 64), Written(1, "ssm", None, 0, 40))
FAILED = RequestAborted("client gone")


def receive(
    sessions: Sessions, *, key: RequestKey = KEY, expected: Mapping[int, Any] = BOTH, ready: bool = True, now: float = 0.0
) -> ReceiveSession:
    return sessions.receives.open(
        key,
        peer="P",
        nonce=7,
        source_group=1,
        rows=ROWS,
        need=NEED,
        expected=expected,
        now=now,
        deadline=now + 10.0,
        ready=ready,
        tag="tag",
    )


def fail() -> None:
    raise ZeroDivisionError


def said(sessions: Sessions) -> list[tuple[PeerRank, Message]]:
    """The messages since the last call; events stay."""
    messages: list[tuple[PeerRank, Message]] = [(e.peer, e.message) for e in sessions.effects if isinstance(e, SendMessage)]
    events = [e for e in sessions.effects if not isinstance(e, SendMessage)]
    sessions.effects.clear()
    sessions.effects.extend(events)
    return messages


def events(sessions: Sessions) -> list[Event]:
    found = [e for e in sessions.effects if isinstance(e, Event)]
    sessions.effects.clear()
    return found


def complete(written: tuple[Written, ...], payload: bytes = b"", **other: Any) -> Complete:
    return Complete(**{**IDS, **other}, written=written, payload=payload)


# -------------------------------------------------------------------------------------------------------- how it begins


def test_each_elected_writer_is_asked_for_its_components_only() -> None:
    sessions = Sessions(group=5)
    receive(sessions)
    common: dict[str, Any] = {**IDS, "source_group": 1, "destination_group": 5}
    kv, ssm = pack_rows(ROWS["kv"]), pack_rows(ROWS["ssm"])
    assert said(sessions) == [
        (P0, Reserve(**common, rows={"kv": kv}, need={"kv": (16, 40)})),
        (P1, Reserve(**common, rows={"kv": kv, "ssm": ssm}, need={"kv": (16, 40), "ssm": (0, 40)})),
    ]


def test_nothing_is_reserved_before_the_rows_are_ready_and_then_once() -> None:
    sessions = Sessions()
    session = receive(sessions, ready=False)
    assert (said(sessions), session.state, session.reserved) == ([], ReceiveState.WAITING, False)
    sessions.receives.ready(session, 1.0)
    assert [peer for peer, _ in said(sessions)] == [P0, P1]
    sessions.receives.ready(session, 1.0)
    assert said(sessions) == []


def test_a_receive_that_needs_nothing_succeeds_at_once() -> None:
    sessions = Sessions()
    session = receive(sessions, expected={})
    assert [event.ok for event in events(sessions)] == [True]
    assert session.lease.released
    assert session.due == float("inf")


def test_an_attempt_is_received_once_another_attempt_may_follow() -> None:
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


# ------------------------------------------------------------------------------------------------------- how it succeeds


def test_success_is_everything_from_every_writer() -> None:
    sessions = Sessions()
    session = receive(sessions)
    said(sessions)
    sessions.on_message(P1, complete(ALL_OF_P1, b"first token"), 1.0)
    assert events(sessions) == []
    assert session.lease.state is LeaseState.HELD
    sessions.on_message(P1, complete(ALL_OF_P1, b"first token"), 1.0)  # again, since it has heard nothing
    assert (session.state, said(sessions)) == (ReceiveState.OPEN, [])
    sessions.on_message(P0, complete(ALL_OF_P0), 2.0)
    outcome = Outcome(**IDS, ok=True)
    assert said(sessions) == [(P0, outcome), (P1, outcome)]
    (event,) = events(sessions)
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
        ((Written(0, "kv", None, 40, 16), Written(1, "kv", None, 16, 16), ALL_OF_P1[1]), "'kv'"),
    ],
    ids=["nothing", "end", "hole", "layer twice", "layer", "component", "no range"],
)
def test_a_writer_that_finishes_without_something_fails_the_request(written: tuple[Written, ...], missing: str) -> None:
    sessions = Sessions()
    session = receive(sessions)
    said(sessions)
    sessions.on_message(P1, complete(written), 1.0)
    (event,) = [e for e in sessions.effects if isinstance(e, Event)]
    assert not event.ok
    with pytest.raises(RequestAborted, match=missing):
        raise event.error or AssertionError
    assert [(peer, type(message)) for peer, message in said(sessions)] == [(P0, Abort)]
    assert not session.lease.released
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)  # too late, but a proof that it is quiet
    assert session.state is ReceiveState.FAILED
    assert session.lease.released


def test_what_arrived_before_the_deadline_was_judged_counts() -> None:
    sessions = Sessions()
    receive(sessions, expected=ONE)
    sessions.on_message(P0, complete(ALL_OF_P0), 11.0)
    sessions.tick(11.0)
    assert [event.ok for event in events(sessions)] == [True]


@pytest.mark.parametrize("peer", [STRANGER, PeerRank("Q", 0)])
def test_a_rank_that_was_not_elected_has_no_say(peer: PeerRank) -> None:
    sessions = Sessions()
    session = receive(sessions)
    before = session.state, [writer.state for writer in session.writers.values()]
    for message in (complete(ALL_OF_P0), Drained(**IDS), Abort(**IDS, reason="x", from_writer=True)):
        sessions.on_message(peer, message, 1.0)
    assert (session.state, [writer.state for writer in session.writers.values()]) == before
    assert events(sessions) == []


def test_another_nonce_is_another_reservation() -> None:
    sessions = Sessions()
    session = receive(sessions)
    said(sessions)
    other = {**IDS, "nonce": 8}
    sessions.on_message(P0, complete(ALL_OF_P0, nonce=8), 1.0)
    sessions.on_message(P0, Drained(**other), 1.0)
    sessions.on_message(P0, Abort(**other, reason="x", from_writer=True), 1.0)
    sessions.on_message(P0, Busy(**other, reason="x", retry_after_s=0.001), 1.0)
    assert session.state is ReceiveState.OPEN
    unknown = Outcome(**other, ok=False, reason="the receiver does not know this attempt")
    assert said(sessions) == [(P0, unknown), (P0, unknown)]


# ----------------------------------------------------------------------------------------------------------- how it fails


def test_an_abort_is_told_at_once_and_the_rows_follow_when_every_writer_has_drained() -> None:
    sessions, freed = Sessions(), list[str]()
    session = receive(sessions)
    session.lease.on_release(lambda: freed.append("rows"))
    said(sessions)
    sessions.receives.abort(session, FAILED, 1.0)
    abort = Abort(**IDS, reason="client gone")
    assert said(sessions) == [(P0, abort), (P1, abort)]
    assert [(event.ok, event.error) for event in events(sessions)] == [(False, FAILED)]
    sessions.on_message(P0, Drained(**IDS), 1.1)
    assert (freed, session.state) == ([], ReceiveState.ABORTING)
    sessions.on_message(P1, Drained(**IDS), 1.2)
    assert freed == ["rows"]
    outcome = Outcome(**IDS, ok=False, reason="client gone")
    assert said(sessions) == [(P0, outcome), (P1, outcome)]
    assert events(sessions) == []


def test_the_first_writer_that_fails_ends_the_request_for_all_with_its_reason() -> None:
    sessions = Sessions()
    session = receive(sessions)
    said(sessions)
    sessions.on_message(P0, Abort(**IDS, reason="out of memory", from_writer=True), 1.0)
    assert [(peer, type(message)) for peer, message in said(sessions)] == [(P0, Abort), (P1, Abort)]
    sessions.on_message(P1, Abort(**IDS, reason="because of the other", from_writer=True), 1.1)
    (event,) = events(sessions)
    assert str(event.error) == "P/0: out of memory"
    sessions.on_message(P1, Drained(**IDS, reason="because of the other"), 1.2)
    sessions.on_message(P0, Drained(**IDS, reason="out of memory"), 1.3)
    assert session.lease.released
    assert {message for _, message in said(sessions)} == {Outcome(**IDS, ok=False, reason="P/0: out of memory")}


@pytest.mark.parametrize(("reason", "told"), [("rejected", "P/0: rejected"), ("", "P/0: the writer ended the attempt")])
def test_a_writer_that_drains_unasked_has_failed_the_request(reason: str, told: str) -> None:
    sessions = Sessions()
    receive(sessions, expected=ONE)
    sessions.on_message(P0, Drained(**IDS, reason=reason), 1.0)
    assert [str(event.error) for event in events(sessions)] == [told]


def test_a_writer_that_completed_and_then_fails_fails_the_request() -> None:
    sessions = Sessions()
    session = receive(sessions)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    sessions.on_message(P0, Drained(**IDS, reason="its server changed its mind"), 1.1)
    assert [event.ok for event in events(sessions)] == [False]
    sessions.on_message(P1, Drained(**IDS), 1.2)
    assert session.lease.released


def test_an_abort_before_the_rows_are_ready_ends_the_request_and_is_pushed_to_the_writers() -> None:
    sessions = Sessions()
    session = receive(sessions, ready=False)
    sessions.receives.abort(session, FAILED, 1.0)
    assert session.state is ReceiveState.FAILED
    assert session.lease.released
    assert {type(message) for _, message in said(sessions)} == {Abort}
    assert [event.ok for event in events(sessions)] == [False]
    sessions.receives.ready(session, 2.0)
    assert list(sessions.effects) == []


def test_the_deadline_names_the_writers_that_are_silent() -> None:
    sessions = Sessions()
    receive(sessions)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    sessions.tick(9.999)
    assert events(sessions) == []
    sessions.tick(10.0)
    (event,) = events(sessions)
    assert isinstance(event.error, RequestTimeout)
    assert str(event.error).endswith("the deadline passed while waiting for P/1")


def test_the_deadline_of_a_request_whose_rows_are_not_ready_says_so() -> None:
    sessions = Sessions()
    receive(sessions, expected={}, ready=False)
    sessions.tick(10.0)
    (event,) = events(sessions)
    assert str(event.error).endswith("while waiting for local kernels")


def test_the_error_of_one_request_ends_only_that_one() -> None:
    sessions = Sessions()
    other = RequestKey(b"another request!", 0)
    first, second = receive(sessions, expected=ONE), receive(sessions, key=other, expected=ONE)
    second.lease.on_release(fail)
    sessions.receives.abort(first, FAILED, 1.0)
    sessions.on_message(P0, Drained(**IDS), 1.0)
    assert (first.state, second.state) == (ReceiveState.FAILED, ReceiveState.OPEN)


def test_a_callback_on_the_rows_that_raises_costs_no_message_and_no_event() -> None:
    sessions = Sessions()
    session = receive(sessions, expected=ONE)
    said(sessions)
    session.lease.on_release(fail)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    assert said(sessions) == [(P0, Outcome(**IDS, ok=True))]
    assert [event.ok for event in events(sessions)] == [True]


# ------------------------------------------------------------------------------------------------- saying it once more


def test_a_reserve_is_repeated_less_and_less_often_until_the_writer_completes() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=4.0))
    session = receive(sessions, expected=ONE)
    ((_, reserve),) = said(sessions)
    session.deadline = 100.0
    when = []
    for now in range(1, 20):
        sessions.tick(float(now))
        if said(sessions) == [(P0, reserve)]:
            when.append(now)
    assert when == [1, 3, 7, 11, 15, 19]
    sessions.on_message(P0, complete(ALL_OF_P0), 20.0)
    sessions.effects.clear()
    sessions.tick(99.0)
    assert list(sessions.effects) == []


def test_an_abort_is_repeated_until_the_writer_has_drained_even_after_quarantine() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=1.0, drain_timeout_s=5.0))
    session = receive(sessions, expected=ONE)
    sessions.receives.abort(session, FAILED, 0.0)
    sessions.effects.clear()
    for now in range(1, 9):
        sessions.tick(float(now))
        assert [type(message) for _, message in said(sessions)] == [Abort]
        assert session.lease.state is (LeaseState.HELD if now < 5 else LeaseState.QUARANTINED)
    assert session.lease.reason == "no proof that P/0 stopped writing"
    sessions.on_message(P0, Drained(**IDS), 9.0)
    assert session.lease.released


@pytest.mark.parametrize(("asked_s", "waits_s"), [(0.2, 0.2), (0.0, 0.001), (-5.0, 0.001), (1e9, 3.0)])
def test_a_busy_writer_is_asked_again_when_it_said_within_bounds(asked_s: float, waits_s: float) -> None:
    sessions = Sessions(limits=Limits(retry_s=2.0, max_retry_s=3.0))
    receive(sessions, expected=ONE)
    ((_, reserve),) = said(sessions)
    sessions.on_message(P0, Busy(**IDS, reason="full", retry_after_s=asked_s), 1.0)
    sessions.tick(1.0 + waits_s - 1e-4)
    assert said(sessions) == []
    sessions.tick(1.0 + waits_s)
    assert said(sessions) == [(P0, reserve)]


def test_busy_about_nothing_that_waits_changes_nothing() -> None:
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


def test_timers_stay_few_however_often_a_writer_is_busy() -> None:
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
    assert sessions.next_tick() == float("inf")


def test_a_timer_that_was_armed_for_an_earlier_time_since_is_skipped() -> None:
    class Session:
        armed_at = float("inf")
        due = 5.0

    timers, session = Timers(), Session()
    timers.arm(session)
    session.due = 2.0
    timers.arm(session)
    timers.arm(session)
    assert timers.next == 2.0
    assert timers.pop(1.0) is None
    assert timers.pop(2.0) is session
    assert timers.pop(9.0) is None
    assert timers.next == float("inf")


# ------------------------------------------------------------------------------------------------ after the end; unknown


@pytest.mark.parametrize(
    "message",
    [complete(ALL_OF_P0), Drained(**IDS), Abort(**IDS, reason="x", from_writer=True)],
    ids=lambda m: type(m).__name__,
)
def test_a_writer_that_missed_the_outcome_is_told_again(message: Any) -> None:
    sessions = Sessions()
    receive(sessions, expected=ONE)
    sessions.on_message(P0, complete(ALL_OF_P0), 1.0)
    sessions.effects.clear()
    for _ in range(3):
        sessions.on_message(P0, message, 2.0)
        assert said(sessions) == [(P0, Outcome(**IDS, ok=True))]


def test_messages_about_unknown_requests_by_the_thousand_are_answered_and_leave_nothing() -> None:
    sessions = Sessions()
    for number in range(5000):
        named: dict[str, Any] = {"request_id": number.to_bytes(16, "big"), "attempt": 0, "nonce": 1}
        sessions.on_message(P0, Complete(**named, written=()), 0.0)
        sessions.on_message(P0, Drained(**named), 0.0)
        sessions.on_message(P0, Abort(**named, reason="x", from_writer=True), 0.0)
    replies = said(sessions)
    assert len(replies) == 10000
    assert all(isinstance(message, Outcome) and not message.ok for _, message in replies)
    assert (sessions.receives.sessions, len(sessions.receives._ended), sessions.next_tick()) == ({}, 0, float("inf"))


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    sessions = Sessions(limits=Limits(max_tombstones=3))
    for number in range(10):
        key = RequestKey(number.to_bytes(16, "big"), 0)
        session = receive(sessions, key=key, expected={0: {}})
        sessions.receives.abort(session, FAILED, 0.0)
        sessions.on_message(P0, Drained(request_id=key.request_id, attempt=0, nonce=7), 0.0)
    remembered = [n for n in range(10) if sessions.receives._ended.get("P", RequestKey(n.to_bytes(16, "big"), 0))]
    assert (remembered, len(sessions.receives._ended)) == ([7, 8, 9], 3)


# ------------------------------------------------------------------------------------------------------------ lost peers


def test_a_lost_writer_ends_the_request_and_its_rows_wait_for_a_proof() -> None:
    sessions = Sessions()
    session = receive(sessions)
    said(sessions)
    sessions.peer_lost(P0, "connection reset", 1.0)
    (event,) = [e for e in sessions.effects if isinstance(e, Event)]
    assert str(event.error) == "P/0 is gone: connection reset"
    assert [(peer, type(message)) for peer, message in said(sessions)] == [(P1, Abort)]
    assert session.lease.reason == "P/0 is gone and may still write: connection reset"
    sessions.on_message(P1, Drained(**IDS), 2.0)
    sessions.peer_lost(P0, "once more", 2.0)
    sessions.tick(100.0)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.peer_quiet(P1)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.peer_quiet(P0)
    assert session.lease.released


def test_losing_a_writer_that_is_quiet_or_was_never_told_proves_nothing_wrong() -> None:
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


# -------------------------------------------------------------------------------------------------------------- coverage

RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12))
LAYERS = st.none() | st.just((0, 1, 2)) | st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(need=RANGES, parts=st.lists(st.tuples(LAYERS, RANGES), max_size=12))
def test_coverage_agrees_with_a_set_of_tokens(
    need: tuple[int, int], parts: list[tuple[tuple[int, ...] | None, tuple[int, int]]]
) -> None:
    coverage = Coverage((0, 1, 2), need)
    missing = {(layer, token) for layer in (0, 1, 2) for token in range(*need)}
    for layers, (start, stop) in parts:
        coverage.add(layers, start, stop)
        missing -= {(layer, token) for layer in (layers if layers is not None else range(3)) for token in range(start, stop)}
        assert coverage.complete is (not missing)
    assert {(layer, token) for layer, left in coverage.missing.items() for part in left for token in range(*part)} == missing


def test_a_hostile_complete_costs_little() -> None:
    backwards = Coverage((0,), (0, 1 << 20))
    for _ in range(20):
        backwards.add(None, 1 << 20, 0)
    assert backwards.missing == {0: [(0, 1 << 20)]}
    comb = Coverage((0,), (0, 1 << 20))
    for token in range(20000):
        comb.add(None, 2 * token, 2 * token + 1)
    assert len(comb.missing[0]) == 20000


def test_a_lost_writer_that_is_reached_again_is_asked_for_its_proof() -> None:
    sessions = Sessions()
    session = receive(sessions, expected=ONE)
    other = receive(sessions, key=RequestKey(b"another-request!", 0), expected=ONE)
    sessions.peer_lost(P0, "silent", 1.0)
    assert session.lease.state is LeaseState.QUARANTINED
    said(sessions)
    sessions.receives.peer_back(P1, 2.0)
    assert said(sessions) == []
    sessions.receives.peer_back(P0, 2.0)
    assert [type(message) for _, message in said(sessions)] == [Abort, Abort]
    sessions.on_message(P0, Drained(**IDS), 3.0)
    assert session.lease.released
    assert not other.lease.released


def test_an_ended_request_is_not_kept_until_its_deadline() -> None:
    """A thousand requests a second with a minute each would be 60,000 sessions that nobody needs."""
    sessions = Sessions()
    for number in range(2000):
        key = RequestKey(number.to_bytes(16, "big"), 0)
        session = receive(sessions, key=key, expected=ONE)
        named: dict[str, Any] = {"request_id": key.request_id, "attempt": 0, "nonce": 7}
        sessions.on_message(P0, Complete(**named, written=ALL_OF_P0), 0.1)
        assert session.state is ReceiveState.SUCCEEDED
    assert len(sessions._timers) < 200
    waiting = receive(sessions, expected=ONE)
    assert sessions.next_tick() <= waiting.due
    sessions.tick(10.0)
    assert isinstance(waiting.error, RequestTimeout)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(("arm", "disarm", "pop")), st.integers(1, 20)), max_size=60))
def test_timers_give_each_session_when_it_is_due_whatever_was_disarmed(steps: list[tuple[int, str, int]]) -> None:
    """Against a dictionary of what is due."""

    class Session:
        armed_at = float("inf")
        due = float("inf")

    timers, made, wanted = Timers(), [Session() for _ in range(5)], dict[int, float]()
    now = 0.0
    for number, step, time_ in steps:
        session = made[number]
        if step == "arm":
            session.due = now + time_
            timers.arm(session)
            wanted[number] = min(wanted.get(number, float("inf")), session.due)
        elif step == "disarm":
            for _ in range(70):  # more than are left lying
                timers.disarm(session)
                session.due = now + 1.0
                timers.arm(session)
            timers.disarm(session)
            wanted.pop(number, None)
        else:
            now += time_
            found = set()
            while (popped := timers.pop(now)) is not None:
                found.add(made.index(popped))  # type: ignore[arg-type]
            assert found == {n for n, due in wanted.items() if due <= now}
            wanted = {n: due for n, due in wanted.items() if due > now}
    assert len(timers) <= 64 + 2 * 5 + 70
