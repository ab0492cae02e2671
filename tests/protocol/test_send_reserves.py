"""The sending side: accepted and refused reserves, and messages of other reservations."""

from __future__ import annotations

import pytest

from disagg.protocol.messages import (
    Abort,
    Drained,
    Outcome,
    Reserve,
)
from disagg.protocol.send_session import SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import PeerRank, StartTransfer
from tests.protocol.send_side import (
    D0,
    D1,
    D2,
    E0,
    IDS,
    chunk,
    reserve,
    send,
    sending,
    settle,
    take_effects,
    take_kinds,
    take_messages,
)


def refusals(sessions: Sessions) -> list[tuple[PeerRank, str]]:
    """The refused reservations since the last call; each got an Abort and a Drained."""
    found = take_messages(sessions)
    aborts = [(peer, message) for peer, message in found if isinstance(message, Abort)]
    drained = [(peer, message) for peer, message in found if isinstance(message, Drained)]
    assert len(found) == len(aborts) + len(drained)
    assert [(p, m.nonce, m.reason) for p, m in aborts] == [(p, m.nonce, m.reason) for p, m in drained]
    assert all(message.from_writer for _, message in aborts)
    return [(peer, message.reason) for peer, message in aborts]


def test_a_reserve_of_another_instance_than_the_senders_peer_is_refused() -> None:
    sessions = Sessions()
    send(sessions)
    sessions.on_message(E0, reserve(), 0.0)
    assert refusals(sessions) == [(E0, "the request is not served to E")]


def test_a_second_reserve_with_another_nonce_or_content_is_refused_and_the_first_continues() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.on_message(D0, reserve(nonce=8), 0.5)
    sessions.on_message(D0, reserve(need=(0, 19)), 0.5)
    assert [reason for _, reason in refusals(sessions)] == [
        "this attempt is already reserved, with another nonce or other content"
    ] * 2
    settle(sessions)
    assert take_kinds(sessions) == ["Complete"]
    assert session.lease.released


@pytest.mark.parametrize(
    ("peer", "reservation", "reason"),
    [
        (D0, reserve(source=1), "expected a reserve of source group 0, found 1"),
        (D0, reserve(group=1), "D/0 of group 1 is not a destination"),
        (D1, reserve(), "D/1 of group 0 is not a destination"),
        (PeerRank("D", 2), reserve(), "D/2 of group 0 is not a destination"),
    ],
    ids=["source group", "destination group", "not elected", "rank of another group"],
)
def test_a_reserve_that_does_not_fit_is_refused(peer: PeerRank, reservation: Reserve, reason: str) -> None:
    sessions = Sessions()
    session = send(sessions, ranks=1, group_size=2)
    sessions.on_message(peer, reservation, 0.0)
    ((refused, found),) = refusals(sessions)
    assert refused == peer
    assert reason in found
    assert session.destinations == {}


def test_the_first_group_that_reserves_is_served_and_others_are_refused() -> None:
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
    settle(sessions)
    take_effects(sessions)
    sessions.on_message(D1, reserve(nonce=8), 1.0)
    started = [e for e in take_effects(sessions) if isinstance(e, StartTransfer)]
    assert not (session.lease.released and started)


def test_an_abort_with_another_nonce_is_acknowledged_and_changes_nothing() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.on_message(D0, Abort(**{**IDS, "nonce": 8}, reason="its Drained was lost"), 0.5)
    assert take_messages(sessions) == [(D0, Drained(**{**IDS, "nonce": 8}))]
    assert session.destinations[D0].state is SendState.ACTIVE


def test_an_outcome_of_another_reservation_changes_nothing() -> None:
    sessions = Sessions()
    sessions.on_message(D0, Outcome(**IDS, ok=True), 0.0)
    session = sending(sessions)
    settle(sessions)
    take_effects(sessions)
    sessions.on_message(D0, Outcome(**{**IDS, "nonce": 8}, ok=True), 1.0)
    sessions.on_message(D1, Outcome(**IDS, ok=True), 1.0)
    assert session.destinations[D0].state is SendState.COMPLETED
    assert take_effects(sessions) == []


def test_a_failed_outcome_during_writes_aborts_them_and_a_successful_one_does_not() -> None:
    sessions = Sessions()
    session = sending(sessions)
    sessions.on_message(D0, Outcome(**IDS, ok=True), 0.5)
    assert session.destinations[D0].state is SendState.ACTIVE
    sessions.on_message(D0, Outcome(**IDS, ok=False, reason="the receiver does not know this attempt"), 0.5)
    assert session.destinations[D0].state is SendState.ABORTING
    settle(sessions)
    assert take_kinds(sessions) == ["CancelTransfers", "Drained"]
    sessions.on_message(D0, Outcome(**IDS, ok=False), 1.0)
    assert [str(e.error) for e in take_effects(sessions)] == ["the receiver does not know this attempt"]
