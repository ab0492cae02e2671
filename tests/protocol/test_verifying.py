"""Verification: a receive compares checksums before it succeeds, and its writers send theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from disagg.core.errors import RequestAborted, RequestTimeout, VerificationFailed
from disagg.core.rows import Pages
from disagg.protocol.messages import Abort, Complete, Outcome, PartialChecksums, Reserve, Written, pack_rows
from disagg.protocol.receive_session import ReceiveSession, ReceiveState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, PeerRank, RequestKey, SendMessage, StartTransfer, StartVerify

WRITER, READER = PeerRank("P", 0), PeerRank("D", 0)
KEY = RequestKey(b"request-verified", 2)
IDS: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt, "nonce": 5}
ROWS = {"kv": Pages(np.array([1, 2]))}
NEED = {"kv": (0, 8)}
SUMS = (PartialChecksums("kv", b"\1" * 8, b"\2" * 16),)
COMPLETE = Complete(**IDS, written=(Written(0, "kv", None, 0, 8),), payload=b"hi", sums=SUMS)
WRONG = VerificationFailed("component 'kv', layer 3: the checksums differ")


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def landed(sessions: Sessions) -> ReceiveSession:
    """A receive whose data is complete and is being verified."""
    session = sessions.receives.open(
        KEY,
        peer="P",
        nonce=5,
        source_group=0,
        rows=ROWS,
        need=NEED,
        expected={0: {"kv": ((3,), (0, 8))}},
        now=0.0,
        deadline=9.0,
        verify="full",
    )
    (reserve,) = take_effects(sessions)
    assert isinstance(reserve, SendMessage)
    assert isinstance(reserve.message, Reserve)
    assert reserve.message.verify == "full"
    sessions.on_message(WRITER, COMPLETE, 1.0)
    return session


def take_effects(sessions: Sessions) -> list[Any]:
    effects = list(sessions.effects)
    sessions.effects.clear()
    return effects


def test_a_receive_succeeds_after_its_verification(sessions: Sessions, landed: ReceiveSession) -> None:
    assert take_effects(sessions) == [StartVerify(KEY, "P", ROWS, NEED, {WRITER: SUMS})]
    assert landed.state is ReceiveState.VERIFYING
    sessions.on_message(WRITER, COMPLETE, 1.5)
    assert take_effects(sessions) == []
    sessions.receives.verified("P", KEY, 2.0, error=None)
    outcome, event = take_effects(sessions)
    assert outcome == SendMessage(WRITER, Outcome(**IDS, ok=True))
    assert isinstance(event, Event)
    assert (event.ok, event.payload, landed.lease.released) == (True, b"hi", True)


def test_a_checksum_mismatch_fails_both_sides(sessions: Sessions, landed: ReceiveSession) -> None:
    take_effects(sessions)
    sessions.receives.verified("P", KEY, 2.0, error=WRONG)
    event, outcome = take_effects(sessions)
    assert isinstance(event, Event)
    assert (event.ok, event.error, landed.lease.released) == (False, WRONG, True)
    assert outcome == SendMessage(WRITER, Outcome(**IDS, ok=False, reason=str(WRONG)))


@pytest.mark.parametrize("verdict", [None, WRONG])
def test_rows_are_held_until_the_verification_has_ended(
    sessions: Sessions, landed: ReceiveSession, verdict: VerificationFailed | None
) -> None:
    take_effects(sessions)
    sessions.receives.abort(landed, RequestAborted("client gone"), 2.0)
    (event,) = take_effects(sessions)
    assert (event.ok, str(event.error), landed.lease.released) == (False, "client gone", False)
    sessions.receives.verified("P", KEY, 3.0, error=verdict)
    (outcome,) = take_effects(sessions)
    assert (outcome.message.ok, outcome.message.reason, landed.lease.released) == (False, "client gone", True)


def test_the_deadline_holds_during_verification(sessions: Sessions, landed: ReceiveSession) -> None:
    take_effects(sessions)
    sessions.tick(9.0)
    (event,) = take_effects(sessions)
    assert isinstance(event.error, RequestTimeout)
    sessions.peer_lost(WRITER, "killed", 9.5)
    sessions.receives.verified("P", KEY, 10.0, error=None)
    assert landed.lease.released


def test_a_writers_abort_ends_a_receive_during_verification(sessions: Sessions, landed: ReceiveSession) -> None:
    take_effects(sessions)
    sessions.on_message(WRITER, Abort(**IDS, reason="no", from_writer=True), 2.0)
    assert [effect.ok for effect in take_effects(sessions) if isinstance(effect, Event)] == [False]
    assert not landed.lease.released


def test_a_writer_sends_the_checksums_of_all_chunks(sessions: Sessions) -> None:
    session = sessions.sends.open(KEY, peer="D", expected=frozenset({0}), peer_group_size=1, now=0.0, deadline=9.0)
    common: dict[str, Any] = {"source_group": 0, "destination_group": 0, "need": NEED, "verify": "full"}
    sessions.on_message(READER, Reserve(**IDS, **common, rows={"kv": pack_rows(ROWS["kv"])}), 0.0)
    for number, tokens in enumerate(((0, 4), (4, 8))):
        sessions.sends.send(session, Chunk(number, ROWS, tokens, None), 1.0)
    sessions.sends.finish(session, b"", 1.0)
    starts = [effect for effect in take_effects(sessions) if isinstance(effect, StartTransfer)]
    for start in reversed(starts):
        sums = (PartialChecksums("kv", (b"\xff", b"\2")[start.ticket.chunk] * 8, b""),)
        sessions.sends.settled(start.ticket, now=2.0, sums=sums)
    (complete,) = take_effects(sessions)
    assert complete.message.sums == (PartialChecksums("kv", b"\1" + b"\2" * 7, b""),), "modulo 2**64"
