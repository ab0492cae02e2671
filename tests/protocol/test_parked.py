"""Reserves and aborts that arrive before their sender, duplicates, and bounds on unknown requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg.core.errors import ConfigError, RemoteProtocolError, RequestAborted
from disagg.core.rows import Pages
from disagg.protocol import parked
from disagg.protocol.messages import (
    MAX_COMPONENTS,
    Abort,
    Busy,
    Decline,
    Drained,
    Message,
    Outcome,
    Reserve,
    decode,
    encode,
    pack_rows,
)
from disagg.protocol.send_session import SendSession, SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.timers import MAX_KEPT_REASON
from disagg.protocol.types import Chunk, Limits, PeerRank, RequestKey, ReturnLoans, SendMessage, StartTransfer
from tests.protocol.send_side import chunk

D0, D1, E0 = PeerRank("D", 0), PeerRank("D", 1), PeerRank("E", 0)
PAGES = Pages(np.array([1, 2, 3]))

KEY = RequestKey(b"request-reserved", 0)


def ids(key: RequestKey, nonce: int = 7) -> dict[str, Any]:
    return {"request_id": key.request_id, "attempt": key.attempt, "nonce": nonce}


def numbered(number: int) -> RequestKey:
    return RequestKey(number.to_bytes(16, "big"), 0)


def reserve(key: RequestKey = KEY, nonce: int = 7) -> Reserve:
    rows = {"kv": pack_rows(PAGES)}
    return Reserve(**ids(key, nonce), source_group=0, destination_group=0, rows=rows, need={"kv": (0, 20)})


def abort(key: RequestKey = KEY, nonce: int = 7) -> Abort:
    return Abort(**ids(key, nonce), reason="client gone")


def send(sessions: Sessions, key: RequestKey = KEY, *, peer: str = "D", ranks: int = 1, now: float = 0.0) -> SendSession:
    return sessions.sends.open(
        key, peer=peer, expected=frozenset(range(ranks)), peer_group_size=ranks, now=now, deadline=now + 10.0
    )


def take_messages(sessions: Sessions) -> list[tuple[PeerRank, Message]]:
    """The messages since the last call; other effects are dropped."""
    messages: list[tuple[PeerRank, Message]] = [(e.peer, e.message) for e in sessions.effects if isinstance(e, SendMessage)]
    sessions.effects.clear()
    return messages


def test_a_reserve_waits_for_its_sender_and_is_then_served() -> None:
    sessions = Sessions()
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, reserve(), 0.5)  # repeated
    assert (take_messages(sessions), len(sessions.sends.parked)) == ([], 1)
    session = send(sessions)
    assert len(sessions.sends.parked) == 0
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 1.0)
    assert [type(e) for e in sessions.effects] == [StartTransfer]


def test_a_parked_reserve_of_another_instance_is_refused_when_the_sender_opens() -> None:
    sessions = Sessions()
    sessions.on_message(E0, reserve(), 0.0)
    sessions.on_message(D0, reserve(), 0.0)
    session = send(sessions)
    assert [(peer, type(message)) for peer, message in take_messages(sessions)] == [(E0, Abort), (E0, Drained)]
    assert list(session.destinations) == [D0]


def test_a_second_reservation_of_a_parked_attempt_is_refused() -> None:
    sessions = Sessions()
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, reserve(nonce=8), 0.0)
    assert [(type(message), getattr(message, "nonce", None)) for _, message in take_messages(sessions)] == [
        (Abort, 8),
        (Drained, 8),
    ]
    assert len(sessions.sends.parked) == 1


def test_a_reserve_beyond_the_bound_is_answered_busy_and_may_be_retried() -> None:
    sessions = Sessions(limits=Limits(max_parked_reserves=2, busy_retry_s=0.25))
    for number in range(3):
        sessions.on_message(D0, reserve(numbered(number)), 0.0)
    busy = Busy(**ids(numbered(2)), reason="2 reservations of 'D' wait for their senders", retry_after_s=0.25)
    assert take_messages(sessions) == [(D0, busy)]
    send(sessions, numbered(0))
    sessions.on_message(D0, reserve(numbered(2)), 0.3)
    assert take_messages(sessions) == []
    assert len(sessions.sends.parked) == 2


def test_a_reserve_of_an_open_sender_is_not_parked() -> None:
    sessions = Sessions(limits=Limits(max_parked_reserves=0))
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    assert session.destinations[D0].state is SendState.ACTIVE


def test_parked_reserves_expire_and_set_the_next_tick() -> None:
    sessions = Sessions(limits=Limits(parked_reserve_s=5.0))
    sessions.on_message(D0, reserve(), 1.0)
    sessions.on_message(D0, reserve(numbered(1)), 2.0)
    assert sessions.next_tick == 6.0
    sessions.tick(5.9)
    assert len(sessions.sends.parked) == 2
    assert take_messages(sessions) == []
    sessions.tick(6.0)
    assert len(sessions.sends.parked) == 1
    reason = "nobody has sent the request within 5 s"
    refused = Abort(**ids(KEY), reason=reason, from_writer=True), Drained(**ids(KEY), reason=reason)
    assert take_messages(sessions) == [(D0, answer) for answer in refused]  # the receiver need not wait any longer
    sessions.tick(7.0)
    assert len(sessions.sends.parked) == 0
    assert sessions.sends.parked._messages == {}


def test_loans_go_back_with_the_last_request_that_is_open_or_parked() -> None:
    sessions = Sessions(limits=Limits(parked_reserve_s=5.0))

    def returned() -> int:
        found = sum(isinstance(effect, ReturnLoans) for effect in sessions.effects)
        sessions.effects.clear()
        return found

    assert not sessions.sends.has_open(D0)
    sessions.on_message(D0, Decline(**ids(numbered(1)), source_group=0, destination_group=0), 0.0)
    assert not sessions.sends.has_open(D0)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, reserve(numbered(2)), 1.0)
    assert sessions.sends.has_open(D0)
    assert returned() == 0
    session = send(sessions)
    sessions.sends.abort(session, RequestAborted("the client is gone"), 2.0)
    sessions.on_message(D0, Outcome(**ids(KEY), ok=False, reason="aborted"), 2.0)
    assert sessions.sends.has_open(D0)
    assert returned() == 0
    sessions.tick(6.0)
    assert not sessions.sends.has_open(D0)
    assert returned() == 1
    sessions.on_message(D0, reserve(numbered(3)), 7.0)
    assert returned() == 0
    sessions.on_message(D0, abort(numbered(3)), 7.0)
    assert returned() == 1


def test_the_parked_reserves_of_a_lost_peer_are_dropped() -> None:
    sessions = Sessions()
    for peer in (D0, D1):
        sessions.on_message(peer, reserve(), 0.0)
    sessions.peer_lost(D0, "it died", 1.0)
    session = send(sessions, ranks=2)
    assert list(session.destinations) == [D1]


def test_what_is_parked_of_a_forgotten_instance_is_dropped() -> None:
    sessions = Sessions()
    for peer in (D0, E0):
        sessions.on_message(peer, reserve(), 0.0)
    sessions.forget("D", 1.0)
    assert len(sessions.sends.parked) == 1
    session = send(sessions, peer="E")
    assert list(session.destinations) == [E0]


@pytest.mark.parametrize("order", ["abort first", "reserve first"])
def test_an_abort_before_the_sender_opens_leaves_a_tombstone(order: str) -> None:
    sessions = Sessions()
    first, second = (abort(), reserve()) if order == "abort first" else (reserve(), abort())
    sessions.on_message(D0, first, 0.0)
    sessions.on_message(D0, second, 0.1)
    messages = [message for _, message in take_messages(sessions)]
    assert Drained(**ids(KEY)) in messages
    if order == "abort first":
        assert messages[1:] == [
            Abort(**ids(KEY), reason="client gone", from_writer=True),
            Drained(**ids(KEY), reason="client gone"),
        ]
    session = send(sessions)
    assert session.destinations[D0].state is SendState.CLOSED
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 1.0)
    assert not [e for e in sessions.effects if isinstance(e, StartTransfer)]


def test_an_abort_between_sender_and_reserve_ends_the_send() -> None:
    sessions = Sessions()
    send(sessions, ranks=2)
    for _ in range(2):
        sessions.on_message(D0, abort(), 0.0)
        assert take_messages(sessions) == [(D0, Drained(**ids(KEY)))]
    for peer, nonce in ((D0, 7), (D1, 8)):
        sessions.on_message(peer, reserve(nonce=nonce), 0.1)
        assert [type(message) for _, message in take_messages(sessions)] == [Abort, Drained]
    assert not sessions.sends.sessions


def test_a_reserve_stays_refused_after_its_tombstone_was_dropped() -> None:
    """The send is open, since bytes for another rank are under way."""
    sessions = Sessions(limits=Limits(max_tombstones=2))
    session = send(sessions, ranks=2)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.on_message(D0, abort(), 0.0)
    for number in range(5):
        sessions.on_message(D0, abort(numbered(number)), 0.0)
    take_messages(sessions)
    sessions.on_message(D0, reserve(), 1.0)  # delayed by the network
    assert session.destinations[D0].state is SendState.CLOSED
    assert [type(message) for _, message in take_messages(sessions)] == [Abort, Drained]


def test_an_abort_of_a_rank_outside_the_destinations_is_acknowledged_and_changes_nothing() -> None:
    sessions = Sessions()
    session = sessions.sends.open(KEY, peer="D", expected=frozenset({0}), peer_group_size=2, now=0.0, deadline=9.0)
    for peer in (E0, D1):
        sessions.on_message(peer, abort(), 0.0)
        assert take_messages(sessions) == [(peer, Drained(**ids(KEY)))]
    assert session.destinations == {}
    sessions.on_message(D0, reserve(), 0.1)
    assert session.destinations[D0].state is SendState.ACTIVE


def test_a_parked_abort_of_another_instance_does_not_end_the_request() -> None:
    sessions = Sessions()
    sessions.on_message(E0, abort(), 0.0)
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.1)
    assert session.destinations[D0].state is SendState.ACTIVE


def test_after_the_end_a_reserve_is_refused_and_an_abort_acknowledged_without_new_state() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    sessions.on_message(D0, Outcome(**ids(KEY), ok=True), 0.0)
    sessions.effects.clear()
    sessions.on_message(D0, reserve(), 1.0)
    sessions.on_message(D0, abort(), 1.0)
    refusal: dict[str, Any] = {**ids(KEY), "reason": "this attempt has ended"}
    assert take_messages(sessions) == [
        (D0, Abort(**refusal, from_writer=True)),
        (D0, Drained(**refusal)),
        (D0, Drained(**ids(KEY))),
    ]
    assert len(sessions.sends.parked) == 0


def test_thousands_of_unknown_ids_stay_within_bounds_and_affect_no_request() -> None:
    limits = Limits(max_parked_reserves=100, max_tombstones=200)
    sessions = Sessions(limits=limits)
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    for number in range(5000):
        sessions.on_message(D0, reserve(numbered(2 * number)), 0.0)
        sessions.on_message(D1, abort(numbered(2 * number + 1)), 0.0)
        sessions.on_message(D0, Outcome(**ids(numbered(number)), ok=True), 0.0)
        assert len(sessions.sends.parked) <= 100
        assert len(sessions.sends.table.ended) <= 200
    answers = [type(message) for _, message in take_messages(sessions)]
    assert set(answers) == {Busy, Drained}
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 0.0)
    assert [type(e) for e in sessions.effects] == [StartTransfer]
    sessions.tick(limits.parked_reserve_s)
    assert (len(sessions.sends.parked), sessions.sends.parked._messages) == (0, {})


def test_loans_go_back_to_a_rank_whose_parked_reserve_is_refused() -> None:
    sessions = Sessions()
    for peer in (D0, E0):
        sessions.on_message(peer, reserve(), 0.0)
    send(sessions)
    assert [effect.peer for effect in sessions.effects if isinstance(effect, ReturnLoans)] == [E0]


def test_nothing_is_kept_of_instances_whose_reserves_come_and_go() -> None:
    sessions = Sessions()
    for number in range(100):
        sessions.on_message(PeerRank(f"D{number}", 0), reserve(numbered(number)), 0.0)
        sessions.forget(f"D{number}", 0.0)
    assert not any(
        vars(sessions.sends.parked)[name] for name in ("_count", "_nbytes", "_num_reserved", "_messages", "_expiries")
    )


def test_thousands_of_duplicate_reserves_are_served_once() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 0.0)
    for _ in range(2000):
        sessions.on_message(D0, reserve(), 0.0)
    assert [type(e) for e in sessions.effects] == [StartTransfer]
    assert len(session.destinations) == 1


def test_two_senders_may_serve_the_same_request_to_two_instances() -> None:
    sessions = Sessions()
    first, second = send(sessions), send(sessions, peer="E")
    sessions.on_message(E0, reserve(nonce=8), 0.0)
    sessions.on_message(D0, reserve(), 0.0)
    assert (list(first.destinations), list(second.destinations)) == ([D0], [E0])
    for session, peer, nonce in ((first, D0, 7), (second, E0, 8)):
        sessions.sends.finish(session, b"", 0.0)
        sessions.on_message(peer, Outcome(**ids(KEY, nonce), ok=True), 0.0)
    assert (sessions.sends.sessions, sessions.sends.table.served) == ({}, {})


def test_bounds_hold_for_each_instance_separately() -> None:
    """The bound on parked reserves; and an instance with many ended attempts drops its own before those of others."""
    sessions = Sessions(limits=Limits(max_parked_reserves=3, max_tombstones=3))
    sessions.on_message(E0, reserve(numbered(99)), 0.0)
    sessions.on_message(E0, abort(numbered(98)), 0.0)
    for number in range(20):
        sessions.on_message(D0, reserve(numbered(number)), 0.0)
        sessions.on_message(D1, abort(numbered(100 + number)), 0.0)
    take_messages(sessions)
    sessions.on_message(E0, reserve(numbered(97)), 0.0)
    sessions.on_message(E0, reserve(numbered(98)), 0.0)
    assert [type(message) for _, message in take_messages(sessions)] == [Abort, Drained]
    assert sessions.sends.parked._count["D"] == 3
    assert sessions.sends.parked.get(E0, numbered(97)) is not None
    assert sessions.sends.table.ended.get(D1, numbered(100)) is None


def test_the_bytes_of_parked_reserves_are_bounded() -> None:
    many = Pages(np.arange(1000))
    large = Reserve(**ids(numbered(1)), source_group=0, destination_group=0, rows={"kv": pack_rows(many)}, need={"kv": (0, 20)})
    sessions = Sessions(limits=Limits(max_parked_nbytes=6000))
    sessions.on_message(D0, large, 0.0)
    assert take_messages(sessions) == []
    sessions.on_message(D0, reserve(numbered(2)), 0.0)
    assert [type(message) for _, message in take_messages(sessions)] == [Busy]
    sessions.on_message(E0, reserve(numbered(2)), 0.0)
    sessions.on_message(D0, abort(numbered(1)), 0.0)
    take_messages(sessions)
    sessions.on_message(D0, reserve(numbered(2)), 0.0)
    assert take_messages(sessions) == []


def test_instances_share_the_bytes_of_parked_reserves() -> None:
    """However many are admitted."""
    limit = 100 * parked._nbytes(reserve(numbered(0)))
    sessions = Sessions(limits=Limits(max_parked_nbytes=limit))
    for instance in range(50):
        for number in range(100):
            sessions.on_message(PeerRank(f"peer-{instance}", 0), reserve(numbered(number)), 0.0)
    found = sessions.sends.parked._count
    assert (found["peer-0"], found["peer-1"], found["peer-9"], found["peer-49"]) == (100, 50, 10, 2)
    assert sum(sessions.sends.parked._nbytes.values()) < 5 * limit


def test_names_and_reasons_count_as_bytes_of_parked_messages() -> None:
    names = {f"component {number}": (0, 1) for number in range(1000)}
    sessions = Sessions(limits=Limits(max_parked_nbytes=100_000))
    sessions.on_message(D0, msgspec.structs.replace(reserve(numbered(1)), need=names), 0.0)
    assert [type(message) for _, message in take_messages(sessions)] == [Busy]
    long = Abort(**ids(numbered(2)), reason="r" * 4096)
    for number in range(10):
        sessions.on_message(D0, msgspec.structs.replace(long, request_id=numbered(2 + number).request_id), 0.0)
    assert len(sessions.sends.parked) == 100_000 // (512 + 4 * 4096)
    kept = sessions.sends.table.ended.get(D0, numbered(2))
    assert kept is not None
    assert len(kept.reason) == MAX_KEPT_REASON


def test_a_reserve_of_thousands_of_components_is_refused() -> None:
    names = {str(number): (0, 1) for number in range(MAX_COMPONENTS + 1)}
    with pytest.raises(RemoteProtocolError, match="length <= 4096"):
        decode(encode(msgspec.structs.replace(reserve(), need=names)))


def test_unknown_components_of_a_reserve_cost_nothing_for_each_chunk() -> None:
    class Counted(dict[str, tuple[int, int]]):
        looked_at = 0

        def __iter__(self) -> Iterator[str]:
            Counted.looked_at += len(self)
            return super().__iter__()

        def items(self) -> Any:
            Counted.looked_at += len(self)
            return super().items()

    sessions = Sessions()
    session = send(sessions)
    needs = Counted({f"component {number}": (0, 1) for number in range(1000)} | {"kv": (0, 20)})
    sessions.on_message(D0, msgspec.structs.replace(reserve(), need=needs), 0.0)
    before = Counted.looked_at
    for number in range(20):
        sessions.sends.send(session, Chunk(number, {"kv": PAGES}, (number, number + 1), None), 0.0)
    assert Counted.looked_at == before
    assert sum(isinstance(effect, StartTransfer) for effect in sessions.effects) == 20


@pytest.mark.parametrize("given", [-1, "x", None, True, 1.5])
def test_limits_that_are_no_count_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="limits max_tombstones: expected an integer of at least 0, found"):
        Limits(max_tombstones=given)


def test_a_writers_abort_is_resent_until_the_receiver_answers() -> None:
    """Otherwise the receiver would learn of the failure at its deadline while a transfer stays unsettled."""
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=2.0))
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, (0, 20), None), 0.0)
    sessions.sends.abort(session, RequestAborted("client gone"), 0.5)
    sent = Abort(**ids(KEY), reason="client gone", from_writer=True)
    assert take_messages(sessions) == [(D0, sent)]
    for now, expected in ((1.0, []), (1.5, [(D0, sent)]), (2.0, []), (3.5, [(D0, sent)])):
        sessions.tick(now)
        assert take_messages(sessions) == expected, now
    sessions.on_message(D0, abort(), 4.0)
    sessions.tick(60.0)
    assert take_messages(sessions) == []
    sessions.on_message(D0, Outcome(**ids(KEY), ok=False), 61.0)
    assert session.destinations[D0].state is SendState.ABORTING


def test_a_rank_is_idle_once_no_request_is_open_and_none_is_waited_for() -> None:
    """Also while rows of requests that have failed are still held."""
    sessions, found = Sessions(), list[bool]()
    found.append(sessions.are_idle)
    sessions.on_message(D0, abort(numbered(1)), 0.0)  # nobody waits for what it is about
    found.append(sessions.are_idle)
    sessions.on_message(D0, reserve(), 0.0)
    found.append(sessions.are_idle)
    session = send(sessions)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    found.append(sessions.are_idle)
    sessions.sends.abort(session, RequestAborted("the client has left"), 1.0)
    found.append(sessions.are_idle)
    assert found == [True, True, False, False, True]
    assert sessions.sends.sessions, "bytes are under way"
