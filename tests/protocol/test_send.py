"""The sending side: started chunks, early completion, success, and resends."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.core.errors import LocalProtocolError
from disagg.core.leases import LeaseState
from disagg.core.rows import Pages, TokenRange
from disagg.protocol.messages import (
    Complete,
    Outcome,
    Reserve,
    Written,
    decode,
    encode,
)
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, Limits, RequestKey, ReturnLoans, StartTransfer, Ticket
from tests.protocol.send_side import (
    ATTEMPT,
    D0,
    D1,
    FAILED,
    IDS,
    KEY,
    PAGES,
    SLOT,
    chunk,
    reserve,
    send,
    sending,
    settle,
    take_effects,
    take_kinds,
    take_messages,
)


@pytest.mark.parametrize("order", ["reserve first", "chunks first"])
def test_the_needed_part_of_every_chunk_is_started_once(order: str) -> None:
    sessions = Sessions()
    session = send(sessions)
    reservation = reserve(need=(5, 18))
    if order == "reserve first":
        sessions.on_message(D0, reservation, 0.0)
    chunks = [chunk(0, 0, 5), chunk(1, 3, 9), chunk(2, 9, 30, (1, 2))]
    for sent_chunk in chunks:
        sessions.sends.send(session, sent_chunk, 0.0)
    if order == "chunks first":
        assert take_effects(sessions) == []
        sessions.on_message(D0, reservation, 0.0)
    assert take_effects(sessions) == [
        StartTransfer(Ticket(D0, KEY, 1), chunks[1], reservation, (Written(1, "kv", None, 5, 9),)),
        StartTransfer(Ticket(D0, KEY, 2), chunks[2], reservation, (Written(2, "kv", (1, 2), 9, 18),)),
    ]
    sessions.on_message(D0, reservation, 0.0)  # repeated
    assert take_effects(sessions) == []


@pytest.mark.parametrize(
    ("sent_chunk", "written"),
    [
        (Chunk(0, {"kv": PAGES, "ssm": SLOT}, None, None), (Written(0, "kv", None, 2, 20), Written(0, "ssm", None, 0, 20))),
        (Chunk(0, {"ssm": SLOT}, (3, 4), None), (Written(0, "ssm", None, 0, 20),)),
        (Chunk(0, {"kv": Pages(np.array([1]), 16)}, None, (1,)), (Written(0, "kv", (1,), 16, 20),)),
        (Chunk(0, {"other": SLOT}, None, None), ()),
    ],
    ids=["all", "state needs no tokens", "from the first page on", "not reserved"],
)
def test_the_written_parts_of_a_chunk(sent_chunk: Chunk, written: tuple[Written, ...]) -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(need=(2, 20), state=True), 0.0)
    sessions.sends.send(session, sent_chunk, 0.0)
    assert [e.written for e in take_effects(sessions)] == ([written] if written else [])


def test_the_need_is_known_when_all_destinations_have_reserved() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    assert session.needed("kv") is None
    sessions.on_message(D0, reserve(need=(8, 16)), 0.0)
    assert session.needed("kv") is None
    sessions.on_message(D1, reserve(nonce=8, need=(4, 12)), 0.0)
    assert session.needed("kv") == (4, 16)
    assert session.needed("ssm") is None


@pytest.mark.parametrize(
    ("needs", "expected"), [(((0, 0), (16, 20)), (16, 20)), (((8, 8), (16, 16)), (8, 8)), (((0, 4), (16, 20)), (0, 20))]
)
def test_ranks_that_need_nothing_do_not_widen_the_need(needs: tuple[TokenRange, TokenRange], expected: TokenRange) -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    for peer, need, nonce in zip((D0, D1), needs, (7, 8), strict=True):
        sessions.on_message(peer, reserve(nonce=nonce, need=need), 0.0)
    assert session.needed("kv") == expected


def test_nothing_can_be_sent_after_finish() -> None:
    sessions = Sessions()
    session = sending(sessions)
    with pytest.raises(LocalProtocolError, match="nothing can be sent after finish"):
        sessions.sends.send(session, chunk(1, 0, 1), 0.0)
    with pytest.raises(LocalProtocolError, match="already called"):
        sessions.sends.finish(session, b"", 0.0)
    assert len(session.chunks) == 1


def test_an_attempt_is_sent_once_to_each_peer() -> None:
    sessions = Sessions()
    session = send(sessions)
    with pytest.raises(LocalProtocolError, match="use a new attempt number"):
        send(sessions)
    sessions.sends.abort(session, FAILED, 0.0)
    with pytest.raises(LocalProtocolError, match="already sent to 'D'"):
        send(sessions)
    sessions.sends.open(KEY, peer="E", expected=frozenset({0}), peer_group_size=1, now=0.0, deadline=9.0)


def test_complete_is_sent_when_all_transfers_have_settled_and_the_outcome_ends_the_send() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 8), 0.0)
    sessions.sends.send(session, chunk(1, 8, 20), 0.0)
    settle(sessions, 1)
    sessions.sends.finish(session, b"first", 0.0)
    assert take_kinds(sessions) == ["StartTransfer", "StartTransfer"]
    assert session.lease.state is LeaseState.HELD
    settle(sessions, 0)
    assert take_effects(sessions) == [(D0, Complete(**IDS, written=(Written(1, "kv", None, 0, 20),), payload=b"first"))]
    assert session.lease.released  # no transfer reads the rows now
    sessions.on_message(D0, Outcome(**IDS, ok=True), 2.0)
    (event,) = take_effects(sessions)
    assert (event.ok, event.error, event.payload, event.tag, event.direction) == (True, None, b"first", "tag", "send")
    assert (sessions.sends.sessions, sessions.sends.table.served) == ({}, {})


def test_complete_says_how_long_the_last_transfer_took_as_far_as_the_message_may() -> None:
    sessions = Sessions()
    sending(sessions)
    settle(sessions, took=(0.5, 0.0, 7200.0, 1.0))
    ((_, complete),) = take_messages(sessions)
    assert complete == decode(encode(complete))
    assert isinstance(complete, Complete)
    assert complete.took == (0.5, 0.0, 3600.0, 1.0)


def test_complete_merges_the_written_parts_of_many_chunks() -> None:
    """Sends by layers and tokens would otherwise exceed the parts that fit into one message."""
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(need=(0, 12)), 0.0)
    chunks = [(start, layers) for start in (0, 3, 6, 10) for layers in ((0,), (1,), None)]
    for number, (start, layers) in enumerate(chunks):
        sessions.sends.send(session, chunk(number, start, start + 3, layers), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    take_effects(sessions)
    for number in range(len(chunks)):
        settle(sessions, number)
    ((_, complete),) = take_messages(sessions)
    assert isinstance(complete, Complete)
    found = {(w.layers, w.start, w.stop) for w in complete.written}
    assert found == {(layers, *tokens) for layers in ((0,), (1,), None) for tokens in ((0, 9), (10, 12))}


def test_a_send_without_destinations_succeeds_at_finish() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=0, group_size=1)
    sessions.sends.finish(session, b"", 0.0)
    assert [e.ok for e in take_effects(sessions)] == [True]
    assert session.lease.released


def test_rows_are_held_until_the_last_destination_is_served() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    settle(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 1.0)
    assert session.lease.state is LeaseState.HELD
    assert "Event" not in take_kinds(sessions)
    sessions.on_message(D1, reserve(nonce=8), 1.0)
    assert session.lease.state is LeaseState.HELD
    settle(sessions, peer=D1)
    assert session.lease.released
    sessions.on_message(D1, Outcome(**{**IDS, "nonce": 8}, ok=True), 1.0)
    assert [e.ok for e in take_effects(sessions) if isinstance(e, Event)] == [True]


def test_a_send_fails_if_one_of_its_destinations_fails() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 1.0)
    sessions.on_message(D1, Outcome(**{**IDS, "nonce": 8}, ok=False, reason="lacks 'ssm'"), 1.0)
    (event,) = [e for e in take_effects(sessions) if isinstance(e, Event)]
    assert (event.ok, str(event.error)) == (False, "lacks 'ssm'")


def test_a_failed_outcome_without_a_reason_fails_the_send() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    assert [(e.ok, str(e.error)) for e in take_effects(sessions) if isinstance(e, Event)] == [(False, "a destination failed")]


def test_complete_is_resent_until_the_outcome_arrives() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=2.0))
    sending(sessions)
    settle(sessions)
    ((_, complete),) = take_messages(sessions)
    times = []
    for now in range(2, 9):
        sessions.tick(float(now))
        if take_messages(sessions) == [(D0, complete)]:
            times.append(now)
    assert times == [2, 4, 6, 8]
    sessions.on_message(D0, Outcome(**IDS, ok=True), 9.0)
    take_effects(sessions)
    sessions.tick(9.9)
    assert take_effects(sessions) == []


def test_loans_go_back_when_the_last_reserved_request_of_a_destination_ends() -> None:
    sessions = Sessions()
    first, second = sending(sessions), RequestKey(b"another-request!", 0)
    other = sessions.sends.open(second, peer="D", expected=frozenset({0}), peer_group_size=1, now=0.0, deadline=9.0)
    reserved = {**ATTEMPT, "request_id": second.request_id, "attempt": 0}
    sessions.on_message(D0, Reserve(**reserved, nonce=8, source_group=0, destination_group=0, rows={}, need={}), 0.0)
    sessions.sends.finish(other, b"", 0.0)
    sessions.on_message(D0, Outcome(**reserved, nonce=8, ok=True), 1.0)
    assert ReturnLoans(D0) not in sessions.effects
    settle(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 1.0)
    assert first.reported
    assert sessions.effects[-1] == ReturnLoans(D0)
