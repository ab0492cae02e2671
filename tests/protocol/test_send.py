"""The sending side, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from disagg.core.errors import DisaggError, LocalProtocolError, RequestAborted, RequestTimeout
from disagg.core.leases import LeaseState
from disagg.core.rows import Pages, Slot
from disagg.protocol.messages import (
    Abort,
    Complete,
    Drained,
    Message,
    Outcome,
    Reserve,
    TokenRange,
    Written,
    decode,
    encode,
    pack_rows,
)
from disagg.protocol.send_session import SendSession, SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, Limits, PeerRank, RequestKey, SendMessage, StartTransfer, Ticket

D0, D1, D2, E0 = PeerRank("D", 0), PeerRank("D", 1), PeerRank("D", 2), PeerRank("E", 0)
KEY = RequestKey(b"request-that-is!", 3)
NAMED: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}
IDS: dict[str, Any] = {**NAMED, "nonce": 7}
PAGES, SLOT = Pages(np.array([1, 2, 3])), Slot(4)
FAILED = RequestAborted("prefill is out of memory")


def reserve(*, nonce: int = 7, need: TokenRange = (0, 20), state: bool = False, group: int = 0, source: int = 0) -> Reserve:
    rows, needs = {"kv": pack_rows(PAGES)}, {"kv": need}
    if state:
        rows["ssm"], needs["ssm"] = pack_rows(SLOT), (0, 20)
    return Reserve(**NAMED, nonce=nonce, source_group=source, destination_group=group, rows=rows, need=needs)


def send(sessions: Sessions, *, ranks: int = 1, group_size: int | None = None) -> SendSession:
    return sessions.sends.open(
        KEY,
        peer="D",
        expected=frozenset(range(ranks)),
        peer_group_size=group_size or ranks,
        now=0.0,
        deadline=10.0,
        tag="tag",
    )


def chunk(number: int, start: int, stop: int, layers: tuple[int, ...] | None = None) -> Chunk:
    return Chunk(number, {"kv": PAGES}, (start, stop), layers)


def effects(sessions: Sessions) -> list[Any]:
    """All effects since the last call, messages as pairs."""
    found = [(e.peer, e.message) if isinstance(e, SendMessage) else e for e in sessions.effects]
    sessions.effects.clear()
    return found


def said(sessions: Sessions) -> list[tuple[PeerRank, Message]]:
    return [e for e in effects(sessions) if isinstance(e, tuple)]


def kinds(sessions: Sessions) -> list[str]:
    return [type(e[1] if isinstance(e, tuple) else e).__name__ for e in effects(sessions)]


def done(sessions: Sessions, number: int = 0, peer: PeerRank = D0, **how: Any) -> None:
    sessions.sends.settled(Ticket(peer, KEY, number), now=1.0, **how)


def sending(sessions: Sessions, *, finished: bool = True) -> SendSession:
    """One destination, one transfer in flight."""
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    if finished:
        sessions.sends.finish(session, b"first", 0.0)
    assert kinds(sessions) == ["StartTransfer"]
    return session


# ------------------------------------------------------------------------------------------------------------ what is sent


@pytest.mark.parametrize("order", ["reserve first", "chunks first"])
def test_every_chunk_starts_once_for_what_is_needed_of_it(order: str) -> None:
    sessions = Sessions()
    session = send(sessions)
    asked = reserve(need=(5, 18))
    if order == "reserve first":
        sessions.on_message(D0, asked, 0.0)
    chunks = [chunk(0, 0, 5), chunk(1, 3, 9), chunk(2, 9, 30, (1, 2))]
    for piece in chunks:
        sessions.sends.send(session, piece, 0.0)
    if order == "chunks first":
        assert effects(sessions) == []
        sessions.on_message(D0, asked, 0.0)
    assert effects(sessions) == [
        StartTransfer(Ticket(D0, KEY, 1), chunks[1], asked, (Written(1, "kv", None, 5, 9),)),
        StartTransfer(Ticket(D0, KEY, 2), chunks[2], asked, (Written(2, "kv", (1, 2), 9, 18),)),
    ]
    sessions.on_message(D0, asked, 0.0)  # repeated
    assert effects(sessions) == []


@pytest.mark.parametrize(
    ("piece", "written"),
    [
        (Chunk(0, {"kv": PAGES, "ssm": SLOT}, None, None), (Written(0, "kv", None, 2, 20), Written(0, "ssm", None, 0, 20))),
        (Chunk(0, {"ssm": SLOT}, (3, 4), None), (Written(0, "ssm", None, 0, 20),)),
        (Chunk(0, {"kv": Pages(np.array([1]), 16)}, None, (1,)), (Written(0, "kv", (1,), 16, 20),)),
        (Chunk(0, {"other": SLOT}, None, None), ()),
    ],
    ids=["all", "state needs no tokens", "from the first page on", "not asked for"],
)
def test_what_a_chunk_contributes(piece: Chunk, written: tuple[Written, ...]) -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(need=(2, 20), state=True), 0.0)
    sessions.sends.send(session, piece, 0.0)
    assert [e.written for e in effects(sessions)] == ([written] if written else [])


def test_what_is_needed_is_known_when_all_have_reserved() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    assert session.needed("kv") is None
    sessions.on_message(D0, reserve(need=(8, 16)), 0.0)
    assert session.needed("kv") is None
    sessions.on_message(D1, reserve(nonce=8, need=(4, 12)), 0.0)
    assert session.needed("kv") == (4, 16)
    assert session.needed("ssm") is None


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


# ----------------------------------------------------------------------------------------------------- what is known before


def test_what_a_receiver_sees_by_itself_is_not_said_until_it_does_not_answer() -> None:
    sessions = Sessions()
    sending(sessions)
    foretold = sessions.sends.complete_early(Ticket(D0, KEY, 0))
    assert foretold == Complete(**IDS, written=(Written(0, "kv", None, 0, 20),), payload=b"first")
    done(sessions, known=True)
    assert said(sessions) == []
    sessions.tick(2.0)
    assert said(sessions) == [(D0, foretold)]


@pytest.mark.parametrize("known", [True, False])
def test_a_receiver_that_answers_before_this_side_knows_is_not_asked_again(known: bool) -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.sends.complete_early(Ticket(D0, KEY, 0))
    sessions.on_message(D0, Outcome(**IDS, ok=True), 0.5)
    assert session.destinations[D0].state is SendState.ACTIVE
    assert effects(sessions) == []
    done(sessions, known=known)
    (event,) = effects(sessions)
    assert event.ok
    assert session.lease.state is LeaseState.RELEASED
    sessions.peer_lost(D0, "connection reset", 2.0)
    sessions.tick(20.0)
    assert effects(sessions) == []


def test_a_receiver_that_was_foretold_and_answers_is_told_that_it_failed() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.sends.complete_early(Ticket(D0, KEY, 0))
    sessions.on_message(D0, Outcome(**IDS, ok=True), 0.5)
    done(sessions, error="broken wire")
    assert session.destinations[D0].state is SendState.DRAINED
    assert [type(message).__name__ for _, message in said(sessions)] == ["Abort", "Drained"]


@pytest.mark.parametrize("case", ["too late", "it failed", "never foretold"])
def test_what_was_foretold_is_said_where_the_receiver_may_not_have_seen_it(case: str) -> None:
    sessions = Sessions()
    sending(sessions)
    foretold = sessions.sends.complete_early(Ticket(D0, KEY, 0)) if case != "never foretold" else None
    done(sessions, known=case not in ("too late", "it failed"), error="broken wire" if case == "it failed" else "")
    messages = [message for _, message in said(sessions)]
    if case == "it failed":
        assert messages == [
            Abort(**IDS, reason="broken wire", from_writer=True),
            Drained(**IDS, reason="broken wire"),
        ]
    else:
        assert messages == [foretold or Complete(**IDS, written=(Written(0, "kv", None, 0, 20),), payload=b"first")]


@pytest.mark.parametrize("case", ["unfinished", "not the last", "to be summed", "unsettled", "ended", "unknown"])
def test_what_cannot_be_foretold(case: str) -> None:
    sessions = Sessions()
    session = send(sessions)
    asked = reserve()
    if case == "to be summed":
        asked = Reserve(**{field: getattr(asked, field) for field in asked.__struct_fields__} | {"verify": "sample"})
    sessions.on_message(D0, asked, 0.0)
    for number in range(2 if case == "not the last" else 1):
        sessions.sends.send(session, chunk(number, 0, 20), 0.0)
    if case != "unfinished":
        sessions.sends.finish(session, b"first", 0.0)
    if case == "unsettled":
        done(sessions, error="the engine cannot tell", unsettled=True)
    if case == "ended":
        sessions.sends.abort(session, FAILED, 0.0)
    assert sessions.sends.complete_early(Ticket(D1 if case == "unknown" else D0, KEY, 0)) is None


# --------------------------------------------------------------------------------------------------------- how it succeeds


def test_complete_is_said_when_all_has_settled_and_the_end_comes_with_the_outcome() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 8), 0.0)
    sessions.sends.send(session, chunk(1, 8, 20), 0.0)
    done(sessions, 1)
    sessions.sends.finish(session, b"first", 0.0)
    assert kinds(sessions) == ["StartTransfer", "StartTransfer"]
    assert session.lease.state is LeaseState.HELD
    done(sessions, 0)
    assert effects(sessions) == [(D0, Complete(**IDS, written=(Written(1, "kv", None, 0, 20),), payload=b"first"))]
    assert session.lease.released  # nothing reads the rows any more
    sessions.on_message(D0, Outcome(**IDS, ok=True), 2.0)
    (event,) = effects(sessions)
    assert (event.ok, event.error, event.payload, event.tag, event.direction) == (True, None, b"first", "tag", "send")
    assert (sessions.sends.sessions, sessions.sends._served) == ({}, {})


def test_what_was_sent_in_very_many_chunks_is_said_in_a_few_words() -> None:
    """Layer by layer and token by token: as many pieces as a message holds are soon exceeded."""
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(need=(0, 12)), 0.0)
    chunks = [(start, layers) for start in (0, 3, 6, 10) for layers in ((0,), (1,), None)]
    for number, (start, layers) in enumerate(chunks):
        sessions.sends.send(session, chunk(number, start, start + 3, layers), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    effects(sessions)
    for number in range(len(chunks)):
        done(sessions, number)
    ((_, complete),) = said(sessions)
    assert isinstance(complete, Complete)
    found = {(w.layers, w.start, w.stop) for w in complete.written}
    assert found == {(layers, *tokens) for layers in ((0,), (1,), None) for tokens in ((0, 9), (10, 12))}


def test_a_send_that_nobody_needs_anything_of_succeeds_at_finish() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=0, group_size=1)
    sessions.sends.finish(session, b"", 0.0)
    assert [e.ok for e in effects(sessions)] == [True]
    assert session.lease.released


def test_rows_stay_until_the_last_destination_has_been_served() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    done(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 1.0)
    assert session.lease.state is LeaseState.HELD
    assert "Event" not in kinds(sessions)
    sessions.on_message(D1, reserve(nonce=8), 1.0)
    assert session.lease.state is LeaseState.HELD
    done(sessions, peer=D1)
    assert session.lease.released
    sessions.on_message(D1, Outcome(**{**IDS, "nonce": 8}, ok=True), 1.0)
    assert [e.ok for e in effects(sessions) if isinstance(e, Event)] == [True]


def test_the_outcome_of_a_send_is_the_worst_of_its_destinations() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 1.0)
    sessions.on_message(D1, Outcome(**{**IDS, "nonce": 8}, ok=False, reason="lacks 'ssm'"), 1.0)
    (event,) = [e for e in effects(sessions) if isinstance(e, Event)]
    assert (event.ok, str(event.error)) == (False, "lacks 'ssm'")


def test_a_failure_without_a_reason_is_a_failure() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    assert [(e.ok, str(e.error)) for e in effects(sessions) if isinstance(e, Event)] == [(False, "a destination failed")]


def test_complete_is_repeated_until_the_outcome_comes() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=2.0))
    sending(sessions)
    done(sessions)
    ((_, complete),) = said(sessions)
    times = []
    for now in range(2, 9):
        sessions.tick(float(now))
        if said(sessions) == [(D0, complete)]:
            times.append(now)
    assert times == [2, 4, 6, 8]
    sessions.on_message(D0, Outcome(**IDS, ok=True), 9.0)
    effects(sessions)
    sessions.tick(9.9)
    assert effects(sessions) == []


# -------------------------------------------------------------------------------------------------------------- how it fails


def test_a_rejected_request_is_pushed_to_decode_at_once() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.abort(session, FAILED, 0.1)
    reason = str(FAILED)
    found = effects(sessions)
    assert [e for e in found if isinstance(e, tuple)] == [
        (D0, Abort(**IDS, reason=reason, from_writer=True)),
        (D0, Drained(**IDS, reason=reason)),
    ]
    assert [(e.ok, e.error) for e in found if isinstance(e, Event)] == [(False, FAILED)]
    assert session.lease.released
    sessions.on_message(D1, reserve(nonce=8), 0.2)  # one that reserves only now
    assert said(sessions) == [
        (D1, Abort(**{**IDS, "nonce": 8}, reason=reason, from_writer=True)),
        (D1, Drained(**{**IDS, "nonce": 8}, reason=reason)),
    ]


def test_a_request_that_was_rejected_before_anyone_reserved_refuses_those_who_do() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.sends.abort(session, FAILED, 0.0)
    assert kinds(sessions) == ["Event"]
    assert session.lease.released
    sessions.on_message(D0, reserve(), 1.0)
    assert [type(message) for _, message in said(sessions)] == [Abort, Drained]
    assert sessions.sends.sessions == {}


def test_an_abort_during_writes_is_told_at_once_and_the_rows_follow_when_the_engine_has_settled() -> None:
    sessions = Sessions()
    session = sending(sessions, finished=False)
    sessions.sends.abort(session, FAILED, 0.5)
    assert set(kinds(sessions)) == {"Event", "Abort"}
    assert session.lease.state is LeaseState.HELD
    sessions.sends.send(session, chunk(1, 0, 20), 0.6)
    assert "StartTransfer" not in kinds(sessions)
    done(sessions)
    assert session.lease.released
    assert said(sessions) == [(D0, Drained(**IDS, reason=str(FAILED)))]
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    assert effects(sessions) == []
    assert sessions.sends.sessions == {}


def test_an_abort_by_the_receiver_during_writes_is_acknowledged_only_when_they_have_settled() -> None:
    sessions = Sessions()
    session = sending(sessions)
    abort = Abort(**IDS, reason="client gone")
    for _ in range(3):
        sessions.on_message(D0, abort, 0.5)
        assert said(sessions) == []
        assert session.lease.state is LeaseState.HELD
    done(sessions)
    assert said(sessions) == [(D0, Drained(**IDS, reason="client gone"))]
    assert session.lease.released
    sessions.on_message(D0, abort, 1.5)
    assert said(sessions) == [(D0, Drained(**IDS, reason="client gone"))]


def test_two_aborts_from_two_ranks_are_each_acknowledged() -> None:
    sessions = Sessions()
    send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.on_message(D0, Abort(**IDS, reason="x"), 1.0)
    sessions.on_message(D1, Abort(**{**IDS, "nonce": 8}, reason="x"), 1.0)
    acknowledged = [e for e in effects(sessions) if isinstance(e, tuple)]
    assert acknowledged == [(D0, Drained(**IDS, reason="x")), (D1, Drained(**{**IDS, "nonce": 8}, reason="x"))]


def test_drained_is_repeated_until_the_outcome_comes() -> None:
    sessions = Sessions(limits=Limits(retry_s=1.0, max_retry_s=1.0))
    send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, Abort(**IDS, reason="x"), 0.0)
    effects(sessions)
    sessions.tick(1.0)
    assert said(sessions) == [(D0, Drained(**IDS, reason="x"))]
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    effects(sessions)
    sessions.tick(5.0)
    assert said(sessions) == []


def test_a_failed_transfer_fails_its_destination_with_the_first_cause() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 8), 0.0)
    sessions.sends.send(session, chunk(1, 8, 20), 0.0)
    effects(sessions)
    done(sessions, 0, error="broken wire")
    assert said(sessions) == [(D0, Abort(**IDS, reason="broken wire", from_writer=True))]
    done(sessions, 1, error="cancelled")
    assert said(sessions) == [(D0, Drained(**IDS, reason="broken wire"))]
    sessions.on_message(D0, Outcome(**IDS, ok=False, reason="D says: broken wire"), 1.0)
    (event,) = effects(sessions)
    assert str(event.error) == "broken wire"
    assert sessions.sends.sessions == {}


def test_the_server_hears_that_all_destinations_have_failed_before_it_finishes() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D0, Abort(**IDS, reason="client gone"), 1.0)
    sessions.on_message(D0, Outcome(**IDS, ok=False, reason="client gone"), 1.1)
    assert [(e.ok, str(e.error)) for e in effects(sessions) if isinstance(e, Event)] == [(False, "client gone")]
    assert session.lease.released
    sessions.sends.send(session, chunk(0, 0, 20), 2.0)
    sessions.sends.finish(session, b"", 2.0)
    sessions.sends.abort(session, FAILED, 2.0)
    assert effects(sessions) == []
    assert sessions.sends.sessions == {}


def test_a_destination_that_has_ended_well_does_not_end_a_send_that_is_not_finished() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, Abort(**IDS, reason="gave up"), 0.0)
    effects(sessions)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    assert kinds(sessions) == ["StartTransfer"]


@pytest.mark.parametrize("stuck_in", ["flight", "waiting for the outcome", "waiting for a reserve"])
def test_the_deadline_is_told_whatever_the_engine_and_the_peer_do(stuck_in: str) -> None:
    sessions = Sessions()
    session = send(sessions) if stuck_in == "waiting for a reserve" else sending(sessions)
    if stuck_in == "waiting for the outcome":
        done(sessions)
    effects(sessions)
    sessions.tick(9.99)
    assert "Event" not in kinds(sessions)
    sessions.tick(10.0)
    (event,) = [e for e in effects(sessions) if isinstance(e, Event)]
    assert isinstance(event.error, RequestTimeout)
    assert ("0 of 1 ranks of 'D' reserved" if stuck_in == "waiting for a reserve" else "waiting for D/0") in str(event.error)
    assert session.lease.released is (stuck_in != "flight")
    sessions.tick(1000.0)
    assert "Event" not in kinds(sessions)


def test_an_outcome_that_arrived_before_the_deadline_was_judged_counts() -> None:
    sessions = Sessions()
    sending(sessions)
    done(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 11.0)
    sessions.tick(11.0)
    assert [e.ok for e in effects(sessions) if isinstance(e, Event)] == [True]


def test_nothing_changes_a_send_that_has_ended() -> None:
    sessions = Sessions()
    session = sending(sessions)
    done(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 2.0)
    effects(sessions)
    tombstone = sessions.sends._ended.get("D", KEY)
    assert tombstone is not None
    sessions.tick(1000.0)
    sessions.sends.abort(session, FAILED, 1000.0)
    assert session.error is None
    assert sessions.sends._ended.get("D", KEY) == tombstone
    assert effects(sessions) == []


def test_one_failing_destination_leaves_the_others_alone() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(D1, reserve(nonce=8), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    done(sessions, peer=D0, error="broken wire")
    effects(sessions)
    done(sessions, peer=D1)
    assert [(peer, type(message)) for peer, message in said(sessions)] == [(D1, Complete)]


def test_a_reason_from_an_engine_fits_the_wire_however_long_and_whatever_it_holds() -> None:
    sessions = Sessions()
    sending(sessions)
    done(sessions, error="\udc80" + "x" * 10_000)
    messages = said(sessions)
    assert len(messages) == 2
    for _, message in messages:
        assert decode(encode(message)) == message


# ------------------------------------------------------------------------------------------------------ unsettled transfers


@pytest.mark.parametrize("late", ["", "cancelled"])
def test_an_unsettled_transfer_quarantines_the_rows_until_it_has_settled(late: str) -> None:
    sessions = Sessions()
    session = sending(sessions)
    done(sessions, error="the engine cannot tell", unsettled=True)
    assert kinds(sessions) == ["Abort"]
    assert (session.lease.state, session.lease.reason) == (LeaseState.QUARANTINED, "the engine cannot tell")
    sessions.on_message(D0, Abort(**IDS, reason="x"), 2.0)
    assert said(sessions) == []
    done(sessions, error=late)
    assert said(sessions) == [(D0, Drained(**IDS, reason="the engine cannot tell"))]
    assert session.lease.released


def test_an_unsettled_transfer_without_an_error_may_still_succeed() -> None:
    sessions = Sessions()
    session = sending(sessions)
    done(sessions, unsettled=True)
    assert effects(sessions) == []
    assert session.lease.state is LeaseState.QUARANTINED
    done(sessions)
    assert kinds(sessions) == ["Complete"]
    assert session.lease.released


def test_a_report_about_nothing_in_flight_changes_nothing() -> None:
    sessions = Sessions()
    done(sessions, error="no such request")
    session = sending(sessions)
    done(sessions, 5, error="no such chunk")
    done(sessions, 0, D1, error="no such destination")
    assert effects(sessions) == []
    assert session.destinations[D0].state is SendState.ACTIVE


# ------------------------------------------------------------------------------------------------------ who may reserve what


def refusals(sessions: Sessions) -> list[tuple[PeerRank, str]]:
    """Refused reservations: each is told that it failed, and that nothing will be written."""
    found = said(sessions)
    aborts = [(peer, message) for peer, message in found if isinstance(message, Abort)]
    drained = [(peer, message) for peer, message in found if isinstance(message, Drained)]
    assert len(found) == len(aborts) + len(drained)
    assert [(p, m.nonce, m.reason) for p, m in aborts] == [(p, m.nonce, m.reason) for p, m in drained]
    assert all(message.from_writer for _, message in aborts)
    return [(peer, message.reason) for peer, message in aborts]


def test_another_instance_is_refused_a_request_that_is_served_to_this_one() -> None:
    sessions = Sessions()
    send(sessions)
    sessions.on_message(E0, reserve(), 0.0)
    assert refusals(sessions) == [(E0, "the request is not served to E")]


def test_the_same_attempt_with_another_nonce_or_other_content_is_refused_and_the_first_goes_on() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.on_message(D0, reserve(nonce=8), 0.5)
    sessions.on_message(D0, reserve(need=(0, 19)), 0.5)
    assert [reason for _, reason in refusals(sessions)] == [
        "this attempt is already reserved, with another nonce or other content"
    ] * 2
    done(sessions)
    assert kinds(sessions) == ["Complete"]
    assert session.lease.released


@pytest.mark.parametrize(
    ("peer", "asked", "reason"),
    [
        (D0, reserve(source=1), "expected a reserve of source group 0, found 1"),
        (D0, reserve(group=1), "D/0 of group 1 is not a destination"),
        (D1, reserve(), "D/1 of group 0 is not a destination"),
        (PeerRank("D", 2), reserve(), "D/2 of group 0 is not a destination"),
    ],
    ids=["source group", "destination group", "not elected", "rank of another group"],
)
def test_a_reserve_that_does_not_fit_is_refused(peer: PeerRank, asked: Reserve, reason: str) -> None:
    sessions = Sessions()
    session = send(sessions, ranks=1, group_size=2)
    sessions.on_message(peer, asked, 0.0)
    ((refused, why),) = refusals(sessions)
    assert refused == peer
    assert reason in why
    assert session.destinations == {}


def test_the_first_group_that_reserves_is_served_and_the_other_refused() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.on_message(D1, reserve(group=1), 0.0)
    sessions.on_message(D0, reserve(nonce=8), 0.0)
    assert [peer for peer, _ in refusals(sessions)] == [D0]
    assert list(session.destinations) == [D1]


def test_rows_are_not_released_while_a_destination_may_still_reserve() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D2, Abort(**{**IDS, "nonce": 1}, reason="wrong group"), 0.0)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    done(sessions)
    effects(sessions)
    sessions.on_message(D1, reserve(nonce=8), 1.0)
    started = [e for e in effects(sessions) if isinstance(e, StartTransfer)]
    assert not (session.lease.released and started)


def test_an_abort_with_another_nonce_is_acknowledged_and_changes_nothing() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.on_message(D0, Abort(**{**IDS, "nonce": 8}, reason="its Drained was lost"), 0.5)
    assert said(sessions) == [(D0, Drained(**{**IDS, "nonce": 8}))]
    assert session.destinations[D0].state is SendState.ACTIVE


def test_an_outcome_of_another_reservation_changes_nothing() -> None:
    sessions = Sessions()
    sessions.on_message(D0, Outcome(**IDS, ok=True), 0.0)
    session = sending(sessions)
    done(sessions)
    effects(sessions)
    sessions.on_message(D0, Outcome(**{**IDS, "nonce": 8}, ok=True), 1.0)
    sessions.on_message(D1, Outcome(**IDS, ok=True), 1.0)
    assert session.destinations[D0].state is SendState.COMPLETED
    assert effects(sessions) == []


def test_a_failed_outcome_during_writes_ends_them_and_success_does_not() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 0.5)
    assert session.destinations[D0].state is SendState.ACTIVE
    sessions.on_message(D0, Outcome(**IDS, ok=False, reason="the receiver does not know this attempt"), 0.5)
    assert session.destinations[D0].state is SendState.ABORTING
    done(sessions)
    assert kinds(sessions) == ["Drained"]
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    assert [str(e.error) for e in effects(sessions)] == ["the receiver does not know this attempt"]


# --------------------------------------------------------------------------------------------------------------- lost peers


def test_losing_a_destination_ends_its_share_and_the_rows_wait_for_what_is_in_flight() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.peer_lost(D0, "it died", 1.0)
    (event,) = effects(sessions)
    assert (event.ok, str(event.error)) == (False, "D/0 is gone: it died")
    assert session.lease.state is LeaseState.HELD
    done(sessions)
    assert session.lease.released
    assert effects(sessions) == []
    assert sessions.sends.sessions == {}


def test_a_proof_that_a_lost_destination_is_quiet_releases_the_rows() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.peer_quiet(D0)  # it is not lost
    assert session.destinations[D0].in_flight == {0}
    done(sessions, error="the engine cannot tell", unsettled=True)
    sessions.peer_lost(D0, "it died", 1.0)
    sessions.peer_lost(D1, "it died", 1.0)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.peer_quiet(D1)
    assert session.lease.state is LeaseState.QUARANTINED
    sessions.peer_quiet(D0)
    assert session.lease.released
    done(sessions)
    assert sessions.sends.sessions == {}


def test_losing_a_peer_before_it_reserved_or_after_the_end_changes_nothing() -> None:
    sessions = Sessions()
    session = send(sessions)
    sessions.peer_lost(D0, "it died", 1.0)
    sessions.peer_lost(E0, "it died", 1.0)
    assert (session.destinations, effects(sessions)) == ({}, [])


def test_a_lost_destination_that_asks_after_all_is_answered_once_nothing_is_in_flight() -> None:
    sessions = Sessions()
    session = send(sessions, ranks=2)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    sessions.peer_lost(D0, "connection reset", 0.5)
    effects(sessions)
    sessions.on_message(D0, Abort(**IDS, reason="connection reset"), 0.6)
    assert said(sessions) == []
    done(sessions)
    assert said(sessions) == []
    sessions.on_message(D0, Abort(**IDS, reason="connection reset"), 1.6)
    assert [type(message) for _, message in said(sessions)] == [Drained]


def test_errors_of_requests_keep_their_type() -> None:
    sessions = Sessions()
    session = sending(sessions)
    error: DisaggError = RequestTimeout("given up by the scheduler")
    sessions.sends.abort(session, error, 0.5)
    done(sessions)
    assert [e.error for e in effects(sessions) if isinstance(e, Event)] == [error]
