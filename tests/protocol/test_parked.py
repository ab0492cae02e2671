"""Reserves and aborts that come before their `sender`, duplicates, unknown ids by the thousand: bounded, and remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from disagg.core.errors import RequestAborted
from disagg.core.rows import Pages
from disagg.protocol.messages import Abort, Busy, Drained, Message, Outcome, Reserve, pack_rows
from disagg.protocol.send_session import SendSession, SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Limits, PeerRank, RequestKey, SendMessage, StartTransfer

D0, D1, E0 = PeerRank("D", 0), PeerRank("D", 1), PeerRank("E", 0)
PAGES = Pages(np.array([1, 2, 3]))
KEY = RequestKey(b"request-reserved", 0)


def named(key: RequestKey, nonce: int = 7) -> dict[str, Any]:
    return {"request_id": key.request_id, "attempt": key.attempt, "nonce": nonce}


def numbered(number: int) -> RequestKey:
    return RequestKey(number.to_bytes(16, "big"), 0)


def reserve(key: RequestKey = KEY, nonce: int = 7) -> Reserve:
    rows = {"kv": pack_rows(PAGES)}
    return Reserve(**named(key, nonce), source_group=0, destination_group=0, rows=rows, need={"kv": (0, 20)})


def abort(key: RequestKey = KEY, nonce: int = 7) -> Abort:
    return Abort(**named(key, nonce), reason="client gone")


def send(sessions: Sessions, key: RequestKey = KEY, *, peer: str = "D", ranks: int = 1, now: float = 0.0) -> SendSession:
    return sessions.sends.open(
        key, peer=peer, expected=frozenset(range(ranks)), peer_group_size=ranks, now=now, deadline=now + 10.0
    )


def said(sessions: Sessions) -> list[tuple[PeerRank, Message]]:
    messages: list[tuple[PeerRank, Message]] = [(e.peer, e.message) for e in sessions.effects if isinstance(e, SendMessage)]
    sessions.effects.clear()
    return messages


def test_a_reserve_waits_for_its_sender_and_is_then_served() -> None:
    sessions = Sessions()
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, reserve(), 0.5)  # repeated
    assert (said(sessions), len(sessions.sends.parked)) == ([], 1)
    session = send(sessions)
    assert len(sessions.sends.parked) == 0
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 1.0)
    assert [type(e) for e in sessions.effects] == [StartTransfer]


def test_what_was_parked_by_another_instance_is_refused_when_the_sender_comes() -> None:
    sessions = Sessions()
    sessions.on_message(E0, reserve(), 0.0)
    sessions.on_message(D0, reserve(), 0.0)
    session = send(sessions)
    assert [(peer, type(message)) for peer, message in said(sessions)] == [(E0, Abort), (E0, Drained)]
    assert list(session.destinations) == [D0]


def test_a_second_reservation_of_a_parked_attempt_is_refused() -> None:
    sessions = Sessions()
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, reserve(nonce=8), 0.0)
    assert [(type(message), getattr(message, "nonce", None)) for _, message in said(sessions)] == [(Abort, 8), (Drained, 8)]
    assert len(sessions.sends.parked) == 1


def test_beyond_the_bound_a_reserve_is_told_busy_and_may_come_again() -> None:
    sessions = Sessions(limits=Limits(max_parked_reserves=2, busy_retry_s=0.25))
    for number in range(3):
        sessions.on_message(D0, reserve(numbered(number)), 0.0)
    busy = Busy(**named(numbered(2)), reason="2 reservations of 'D' wait for their senders", retry_after_s=0.25)
    assert said(sessions) == [(D0, busy)]
    send(sessions, numbered(0))
    sessions.on_message(D0, reserve(numbered(2)), 0.3)
    assert said(sessions) == []
    assert len(sessions.sends.parked) == 2


def test_a_request_that_is_served_needs_no_room_among_the_parked() -> None:
    sessions = Sessions(limits=Limits(max_parked_reserves=0))
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    assert session.destinations[D0].state is SendState.ACTIVE


def test_parked_reserves_are_forgotten_in_time_and_the_timer_knows_when() -> None:
    sessions = Sessions(limits=Limits(parked_reserve_s=5.0))
    sessions.on_message(D0, reserve(), 1.0)
    sessions.on_message(D0, reserve(numbered(1)), 2.0)
    assert sessions.next_tick() == 6.0
    sessions.tick(5.9)
    assert len(sessions.sends.parked) == 2
    sessions.tick(6.0)
    assert len(sessions.sends.parked) == 1
    sessions.tick(7.0)
    assert len(sessions.sends.parked) == 0
    assert sessions.sends.parked._messages == {}


def test_the_parked_reserves_of_a_lost_peer_go_with_it() -> None:
    sessions = Sessions()
    for peer in (D0, D1):
        sessions.on_message(peer, reserve(), 0.0)
    sessions.peer_lost(D0, "it died", 1.0)
    session = send(sessions, ranks=2)
    assert list(session.destinations) == [D1]


@pytest.mark.parametrize("order", ["abort first", "reserve first"])
def test_an_abort_before_the_sender_leaves_a_tombstone(order: str) -> None:
    sessions = Sessions()
    first, second = (abort(), reserve()) if order == "abort first" else (reserve(), abort())
    sessions.on_message(D0, first, 0.0)
    sessions.on_message(D0, second, 0.1)
    messages = [message for _, message in said(sessions)]
    assert Drained(**named(KEY)) in messages
    if order == "abort first":
        assert messages[1:] == [
            Abort(**named(KEY), reason="client gone", from_writer=True),
            Drained(**named(KEY), reason="client gone"),
        ]
    session = send(sessions)
    assert session.destinations[D0].state is SendState.CLOSED
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 1.0)
    assert not [e for e in sessions.effects if isinstance(e, StartTransfer)]


def test_an_abort_between_sender_and_reserve_ends_that_destination() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    for _ in range(2):
        sessions.on_message(D0, abort(), 0.0)
        assert said(sessions) == [(D0, Drained(**named(KEY)))]
    sessions.on_message(D0, reserve(), 0.1)
    assert [type(message) for _, message in said(sessions)] == [Abort, Drained]
    assert session.destinations[D0].state is SendState.CLOSED
    sessions.on_message(D1, reserve(nonce=8), 0.1)
    assert session.destinations[D1].state is SendState.ACTIVE
    sessions.on_message(D0, Outcome(**named(KEY), ok=False), 0.2)
    assert session.destinations[D0].state is SendState.CLOSED


def test_a_reserve_stays_refused_when_its_tombstone_has_been_forgotten() -> None:
    sessions = Sessions(limits=Limits(max_tombstones=2))
    session = send(sessions, ranks=2)
    sessions.on_message(D0, abort(), 0.0)
    for number in range(5):
        sessions.on_message(D0, abort(numbered(number)), 0.0)
    said(sessions)
    sessions.on_message(D0, reserve(), 1.0)  # long on its way
    assert session.destinations[D0].state is SendState.CLOSED
    assert [type(message) for _, message in said(sessions)] == [Abort, Drained]


def test_an_abort_by_a_rank_that_is_no_destination_is_acknowledged_and_changes_nothing() -> None:
    sessions = Sessions()
    session = sessions.sends.open(KEY, peer="D", expected=frozenset({0}), peer_group_size=2, now=0.0, deadline=9.0)
    for peer in (E0, D1):
        sessions.on_message(peer, abort(), 0.0)
        assert said(sessions) == [(peer, Drained(**named(KEY)))]
    assert session.destinations == {}
    sessions.on_message(D0, reserve(), 0.1)
    assert session.destinations[D0].state is SendState.ACTIVE


def test_an_abort_parked_by_another_instance_does_not_end_the_request() -> None:
    sessions = Sessions()
    sessions.on_message(E0, abort(), 0.0)
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.1)
    assert session.destinations[D0].state is SendState.ACTIVE


def test_after_the_end_a_reserve_is_refused_and_an_abort_acknowledged_without_a_trace() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    sessions.on_message(D0, Outcome(**named(KEY), ok=True), 0.0)
    sessions.effects.clear()
    sessions.on_message(D0, reserve(), 1.0)
    sessions.on_message(D0, abort(), 1.0)
    refusal: dict[str, Any] = {**named(KEY), "reason": "this attempt has ended"}
    assert said(sessions) == [
        (D0, Abort(**refusal, from_writer=True)),
        (D0, Drained(**refusal)),
        (D0, Drained(**named(KEY))),
    ]
    assert len(sessions.sends.parked) == 0


def test_unknown_ids_by_the_thousand_stay_within_bounds_and_harm_no_request() -> None:
    limits = Limits(max_parked_reserves=100, max_tombstones=200)
    sessions = Sessions(limits=limits)
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    for number in range(5000):
        sessions.on_message(D0, reserve(numbered(2 * number)), 0.0)
        sessions.on_message(D1, abort(numbered(2 * number + 1)), 0.0)
        sessions.on_message(D0, Outcome(**named(numbered(number)), ok=True), 0.0)
        assert len(sessions.sends.parked) <= 100
        assert len(sessions.sends._ended) <= 200
    answers = [type(message) for _, message in said(sessions)]
    assert set(answers) == {Busy, Drained}
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 0.0)
    assert [type(e) for e in sessions.effects] == [StartTransfer]
    sessions.tick(limits.parked_reserve_s)
    assert (len(sessions.sends.parked), sessions.sends.parked._messages) == (0, {})


def test_duplicate_requests_by_the_thousand_are_served_once() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 0.0)
    for _ in range(2000):
        sessions.on_message(D0, reserve(), 0.0)
    assert [type(e) for e in sessions.effects] == [StartTransfer]
    assert len(session.destinations) == 1


def test_two_instances_may_be_served_the_same_request_by_two_senders() -> None:
    sessions = Sessions()
    first, second = send(sessions), send(sessions, peer="E")
    sessions.on_message(E0, reserve(nonce=8), 0.0)
    sessions.on_message(D0, reserve(), 0.0)
    assert (list(first.destinations), list(second.destinations)) == ([D0], [E0])
    for session, peer, nonce in ((first, D0, 7), (second, E0, 8)):
        sessions.sends.finish(session, b"", 0.0)
        sessions.on_message(peer, Outcome(**named(KEY, nonce), ok=True), 0.0)
    assert (sessions.sends.sessions, sessions.sends._served) == ({}, {})


def test_no_instance_takes_anothers_room() -> None:
    """Neither among the parked, nor among what is remembered of ended attempts."""
    sessions = Sessions(limits=Limits(max_parked_reserves=3, max_tombstones=3))
    sessions.on_message(E0, reserve(numbered(99)), 0.0)
    sessions.on_message(E0, abort(numbered(98)), 0.0)
    for number in range(20):
        sessions.on_message(D0, reserve(numbered(number)), 0.0)
        sessions.on_message(D1, abort(numbered(100 + number)), 0.0)
    said(sessions)
    sessions.on_message(E0, reserve(numbered(97)), 0.0)
    sessions.on_message(E0, reserve(numbered(98)), 0.0)
    assert [type(message) for _, message in said(sessions)] == [Abort, Drained]
    assert sessions.sends.parked._count["D"] == 3
    assert sessions.sends.parked.get(E0, numbered(97)) is not None
    assert sessions.sends._ended.get(D1, numbered(100)) is None


def test_parked_reserves_are_bounded_by_their_bytes_as_well() -> None:
    many = Pages(np.arange(1000))
    large = Reserve(
        **named(numbered(1)), source_group=0, destination_group=0, rows={"kv": pack_rows(many)}, need={"kv": (0, 20)}
    )
    sessions = Sessions(limits=Limits(max_parked_nbytes=5000))
    sessions.on_message(D0, large, 0.0)
    assert said(sessions) == []
    sessions.on_message(D0, reserve(numbered(2)), 0.0)
    assert [type(message) for _, message in said(sessions)] == [Busy]
    sessions.on_message(E0, reserve(numbered(2)), 0.0)
    sessions.on_message(D0, abort(numbered(1)), 0.0)
    said(sessions)
    sessions.on_message(D0, reserve(numbered(2)), 0.0)
    assert said(sessions) == []


def test_a_writers_abort_is_said_again_until_the_receiver_knows() -> None:
    """While a transfer does not settle, the receiver would otherwise learn of the failure at its deadline only."""
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=2.0))
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 0.0)
    sessions.sends.abort(session, RequestAborted("client gone"), 0.5)
    told = Abort(**named(KEY), reason="client gone", from_writer=True)
    assert said(sessions) == [(D0, told)]
    for now, expected in ((1.0, []), (1.5, [(D0, told)]), (2.0, []), (3.5, [(D0, told)])):
        sessions.tick(now)
        assert said(sessions) == expected, now
    sessions.on_message(D0, abort(), 4.0)
    sessions.tick(60.0)
    assert said(sessions) == []
    sessions.on_message(D0, Outcome(**named(KEY), ok=False), 61.0)
    assert session.destinations[D0].state is SendState.ABORTING
