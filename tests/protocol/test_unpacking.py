"""Packed transfers: a writer is complete, and rows are released, only after all bytes are unpacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from disagg.core.errors import RemoteProtocolError, RequestAborted
from disagg.core.leases import LeaseState
from disagg.core.rows import Pages
from disagg.protocol.messages import (
    Abort,
    Complete,
    Drained,
    Filled,
    Goodbye,
    Outcome,
    Part,
    Reserve,
    SlotsFilled,
    Written,
    pack_rows,
)
from disagg.protocol.receive_session import ReceiveSession, ReceiveState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import NEVER, Chunk, Event, PeerRank, RequestKey, SendMessage, StartTransfer, Ticket
from tests.protocol.send_side import ATTEMPT, D0, sending, take_messages
from tests.protocol.send_side import KEY as SENT

WRITER, READER, STRANGER = PeerRank("P", 0), PeerRank("D", 0), PeerRank("P", 5)
KEY = RequestKey(b"packed-and-ready", 0)
IDS: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt, "nonce": 7}
PART = Part("kv", (0,), None, 0, 8)


def complete(*, packed: tuple[tuple[int, int], ...]) -> Complete:
    return Complete(**IDS, written=(Written(0, "kv", None, 0, 8),), packed=packed, payload=b"first")


def slots_filled(number: int = 0, nonce: int = 7) -> SlotsFilled:
    return SlotsFilled(**{**IDS, "nonce": nonce}, slots=(Filled(number + 1, 0, (PART,), 0, 64),))


def receiving() -> tuple[Sessions, ReceiveSession]:
    sessions = Sessions()
    session = sessions.receives.open(
        KEY,
        peer="P",
        nonce=7,
        source_group=0,
        rows={"kv": Pages(np.array([1, 2]))},
        need={"kv": (0, 8)},
        expected={0: {"kv": ((0,), (0, 8))}},
        now=0.0,
        deadline=10.0,
    )
    sessions.effects.clear()
    return sessions, session


def unpack(sessions: Sessions, session: ReceiveSession, nbytes: int, *, chunk: int = 0, error: str = "") -> None:
    sessions.receives.end_unpack(session, WRITER, chunk=chunk, nbytes=nbytes, now=1.0, error=error)


def ends(sessions: Sessions) -> list[bool]:
    found = [effect.ok for effect in sessions.effects if isinstance(effect, Event)]
    sessions.effects.clear()
    return found


def test_success_waits_for_the_last_packed_byte() -> None:
    sessions, session = receiving()
    for _ in range(2):
        assert sessions.receives.begin_unpack(WRITER, slots_filled()) is session
    sessions.on_message(WRITER, complete(packed=((0, 128),)), 0.5)
    assert ends(sessions) == []
    unpack(sessions, session, 64)
    assert ends(sessions) == []
    unpack(sessions, session, 64)
    assert ends(sessions) == [True]
    assert session.payload == b"first"
    assert session.lease.released


def test_bytes_unpacked_before_complete_count() -> None:
    sessions, session = receiving()
    assert sessions.receives.begin_unpack(WRITER, slots_filled()) is session
    sessions.on_message(WRITER, slots_filled(), 0.2)
    unpack(sessions, session, 64)
    assert ends(sessions) == []
    sessions.on_message(WRITER, complete(packed=((0, 64),)), 0.5)
    assert ends(sessions) == [True]


def test_rows_are_kept_while_a_slot_that_nobody_owes_is_unpacked() -> None:
    sessions, session = receiving()
    for _ in range(2):
        assert sessions.receives.begin_unpack(WRITER, slots_filled()) is session
    sessions.on_message(WRITER, complete(packed=((0, 64),)), 0.5)
    unpack(sessions, session, 64)
    assert ends(sessions) == []
    assert not session.lease.released
    unpack(sessions, session, 64, chunk=7)
    assert ends(sessions) == [True]
    assert session.lease.released


def test_bytes_of_another_chunk_do_not_count() -> None:
    sessions, session = receiving()
    sessions.receives.begin_unpack(WRITER, slots_filled())
    sessions.on_message(WRITER, complete(packed=((0, 64), (1, 64))), 0.5)
    unpack(sessions, session, 128, chunk=1)
    assert ends(sessions) == []


def test_an_aborted_request_holds_its_rows_until_the_unpacking_has_ended() -> None:
    sessions, session = receiving()
    sessions.receives.begin_unpack(WRITER, slots_filled())
    sessions.receives.abort(session, RequestAborted("client gone"), 0.5)
    sessions.on_message(WRITER, Drained(**IDS), 0.6)
    assert ends(sessions) == [False]
    assert (session.state, session.lease.state) == (ReceiveState.ABORTING, LeaseState.HELD)
    unpack(sessions, session, 64)
    assert session.lease.state is LeaseState.RELEASED
    assert [e.message.ok for e in sessions.effects if isinstance(e, SendMessage) and isinstance(e.message, Outcome)] == [False]


def test_a_failed_unpacking_fails_the_request() -> None:
    sessions, session = receiving()
    sessions.receives.begin_unpack(WRITER, slots_filled())
    unpack(sessions, session, 64, error="packed stream of 10 bytes")
    assert "packed stream of 10 bytes" in str(session.error)
    aborts = [e.message.reason for e in sessions.effects if isinstance(e, SendMessage) and isinstance(e.message, Abort)]
    assert aborts == ["packed stream of 10 bytes"]


def test_slots_of_other_peers_other_nonces_or_ended_requests_are_not_unpacked() -> None:
    sessions, session = receiving()
    assert sessions.receives.begin_unpack(STRANGER, slots_filled()) is None
    assert sessions.receives.begin_unpack(WRITER, slots_filled(nonce=8)) is None
    sessions.receives.abort(session, RequestAborted("client gone"), 0.5)
    assert sessions.receives.begin_unpack(WRITER, slots_filled()) is None
    assert session.local_work == 0


def test_complete_has_the_number_of_packed_bytes_of_each_chunk() -> None:
    sessions = Sessions()
    session = sessions.sends.open(KEY, peer="D", expected=frozenset({0}), peer_group_size=1, now=0.0, deadline=9.0)
    rows = Pages(np.array([1, 2]))
    sessions.on_message(
        READER,
        Reserve(**IDS, source_group=0, destination_group=0, rows={"kv": pack_rows(rows)}, need={"kv": (0, 8)}),
        0.0,
    )
    for number, tokens in enumerate(((0, 4), (4, 8))):
        sessions.sends.send(session, Chunk(number, {"kv": rows}, tokens, None), 0.1)
    sessions.sends.finish(session, b"", 0.1)
    first, second = [effect.ticket for effect in sessions.effects if isinstance(effect, StartTransfer)]
    sessions.sends.settled(first, now=0.2, packed=4096)
    sessions.sends.settled(second, now=0.2)
    complete_message = [e.message for e in sessions.effects if isinstance(e, SendMessage)][-1]
    assert isinstance(complete_message, Complete)
    assert complete_message.packed == ((0, 4096),)


def test_slots_of_unknown_attempts_get_a_failed_outcome() -> None:
    sessions, session = receiving()
    message = slots_filled()
    sessions.on_message(WRITER, message, 0.2)
    assert list(sessions.effects) == [], "messages about an open attempt get no answer"
    sessions.receives.abort(session, RequestAborted("client gone"), 0.5)
    sessions.on_message(WRITER, Drained(**IDS), 0.6)
    sessions.effects.clear()
    sessions.on_message(WRITER, message, 0.7)
    sessions.on_message(STRANGER, SlotsFilled(**{**IDS, "request_id": bytes(16)}, slots=message.slots), 0.7)
    answers = [(e.peer, e.message) for e in sessions.effects if isinstance(e, SendMessage)]
    assert [(peer, type(answer), answer.ok) for peer, answer in answers if isinstance(answer, Outcome)] == [
        (WRITER, Outcome, False),
        (STRANGER, Outcome, False),
    ]


# -- the writer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_a_filled_slot_is_reported_unless_its_destination_was_lost(lost: bool) -> None:
    sessions = Sessions()
    sending(sessions)
    if lost:
        sessions.peer_lost(D0, "it died", 1.0)
        sessions.effects.clear()
    (filled,) = slots_filled().slots
    sessions.slot_filled(Ticket(D0, SENT, 0), filled, 1.0)
    sessions.flush(1.0)
    assert take_messages(sessions) == ([] if lost else [(D0, SlotsFilled(**ATTEMPT, nonce=7, slots=(filled,)))])
    assert (sessions.borrower.next_tick == NEVER) is lost


def test_a_message_about_a_connection_is_refused() -> None:
    sessions = Sessions()
    with pytest.raises(RemoteProtocolError, match="peer P/0: expected a message about a request, found Goodbye"):
        sessions.on_message(WRITER, Goodbye(reason=""), 0.0)
    assert not sessions.effects
