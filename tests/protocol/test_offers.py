"""Requests that are offered before anyone is known to want them, and receivers that need nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from disagg.core.errors import LocalProtocolError, RequestAborted, RequestTimeout
from disagg.core.leases import Lease
from disagg.core.rows import Pages
from disagg.protocol.messages import Abort, Decline, Drained, Outcome, Reserve, Wanted, pack_rows
from disagg.protocol.send_session import SendSession
from disagg.protocol.sending import REOFFER_LATE_S, REOFFER_S
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, Limits, PeerRank, RequestKey, SendMessage, StartTransfer
from tests.protocol.send_side import take_effects, take_kinds

D0, D1, E0 = PeerRank("D", 0), PeerRank("D", 1), PeerRank("E", 0)
ID = b"request-reserved"
PAGES = Pages(np.array([1, 2, 3]))
DRAINED = Drained(request_id=ID, attempt=0, nonce=7)
"""It answers a decline, which is sent again otherwise."""


def sessions_of(readers: dict[str, int] | None = None) -> Sessions:
    """A sending rank. It writes to the first `readers` ranks of each instance, whose groups are as large."""
    known = readers or {"D": 1, "E": 1}
    return Sessions(readers_of=lambda instance: (frozenset(range(known[instance])), max(known[instance], 1)))


def offer(sessions: Sessions, *, peer: str = "", attempt: int | None = None, lease: Lease | None = None) -> SendSession:
    return sessions.sends.open(
        RequestKey(ID, attempt or 0), peer=peer, any_attempt=attempt is None, now=0.0, deadline=10.0, lease=lease
    )


def reserve(attempt: int = 0, *, group: int = 0) -> Reserve:
    return Reserve(
        request_id=ID,
        attempt=attempt,
        nonce=7,
        source_group=0,
        destination_group=group,
        rows={"kv": pack_rows(PAGES)},
        need={"kv": (0, 20)},
    )


def decline(attempt: int = 0, *, source: int = 0) -> Decline:
    return Decline(request_id=ID, attempt=attempt, nonce=7, source_group=source, destination_group=0)


def wanted(attempt: int = 0, *, source: int = 0) -> Wanted:
    return Wanted(request_id=ID, attempt=attempt, nonce=7, source_group=source)


def abort(attempt: int = 0) -> Abort:
    return Abort(request_id=ID, attempt=attempt, nonce=7, reason="client gone")


def put(sessions: Sessions, session: SendSession) -> None:
    """Send all that is needed, and finish."""
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, None, None), 0.0)
    sessions.sends.finish(session, b"first", 0.0)


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_offer_of_a_rank_that_writes_nothing_ends_with_a_receive_that_has_not_reserved(is_finished: bool) -> None:
    """Other ranks write all that it would."""
    sessions = sessions_of({"D": 0})
    session = offer(sessions)
    if is_finished:
        put(sessions, session)
    take_effects(sessions)
    sessions.on_message(D0, abort(), 1.0)
    if not is_finished:
        put(sessions, session)
    (event,) = [effect for effect in take_effects(sessions) if isinstance(effect, Event)]
    assert (event.ok, event.lease.released) == (True, True)
    assert not sessions.sends.sessions


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("peer", "attempt"), [("", None), ("D", None), ("", 3), ("D", 3)])
def test_the_first_reserve_binds_an_offer(peer: str, attempt: int | None, early: bool) -> None:
    sessions = sessions_of()
    if early:
        sessions.on_message(D0, reserve(3), 0.0)
    lease = Lease()
    session = offer(sessions, peer=peer, attempt=attempt, lease=lease)
    assert session.is_bound is early
    put(sessions, session)
    if not early:
        assert take_effects(sessions) == []
        sessions.on_message(D0, reserve(3), 1.0)
    assert (session.peer, session.key, session.lease) == ("D", RequestKey(ID, 3), lease)
    assert [type(effect) for effect in take_effects(sessions)] == [StartTransfer]
    assert sessions.sends.table.offers == {}


def test_the_newest_parked_attempt_is_taken() -> None:
    sessions = sessions_of()
    for attempt in (1, 3, 2):
        sessions.on_message(D0, reserve(attempt), 0.0)
    assert offer(sessions).key.attempt == 3
    assert offer(sessions).key.attempt == 2


def test_an_offer_to_another_peer_or_attempt_is_not_bound() -> None:
    sessions = sessions_of()
    session = offer(sessions, peer="D", attempt=3)
    sessions.on_message(E0, reserve(3), 0.0)
    sessions.on_message(D0, reserve(4), 0.0)
    assert (session.is_bound, len(sessions.sends.parked)) == (False, 2)


def test_a_second_reader_of_a_bound_request_is_refused() -> None:
    sessions = sessions_of()
    offer(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.on_message(E0, reserve(), 0.0)
    assert take_kinds(sessions) == ["Abort", "Drained"]


@pytest.mark.parametrize("attempt", [None, 3])
@pytest.mark.parametrize("end", ["served", "aborted"])
def test_others_are_refused_an_attempt_that_has_ended(end: str, attempt: int | None) -> None:
    """They do not wait in vain. Another attempt, and another sender for them, may still come."""
    sessions = sessions_of()
    session = offer(sessions, attempt=attempt)
    if end == "served":
        sessions.on_message(D0, decline(3), 0.0)
        sessions.sends.finish(session, b"", 0.0)
    else:
        sessions.sends.abort(session, RequestAborted("the client is gone"), 0.0)
    take_effects(sessions)
    sessions.on_message(E0, reserve(3), 0.0)
    if attempt is None:  # the next one may be offered under the same number
        assert not take_effects(sessions)
        assert offer(sessions).is_bound
    else:
        reason = "it was served to D" if end == "served" else "the client is gone"
        assert reason in str(take_effects(sessions)[0])
    sessions.on_message(E0, reserve(4), 0.0)
    assert not take_effects(sessions)
    other = offer(sessions, peer="E", attempt=4)
    assert other.is_bound


def test_a_reserve_of_an_attempt_that_was_offered_to_its_instance_and_has_ended_is_refused_at_once() -> None:
    """Nothing was known of the instance when the attempt was offered."""
    sessions = sessions_of()
    sessions.sends.abort(offer(sessions, peer="D", attempt=3), RequestAborted("the prompt is too long"), 0.0)
    take_effects(sessions)
    sessions.on_message(D0, reserve(3), 1.0)
    assert "the prompt is too long" in str(take_effects(sessions)[0])
    assert len(sessions.sends.parked) == 0
    with pytest.raises(LocalProtocolError):
        offer(sessions, peer="D", attempt=3)


@pytest.mark.parametrize(
    ("at", "expiry"), [(0.5, REOFFER_S), (REOFFER_S, REOFFER_S + REOFFER_LATE_S), (100.0, 100.0 + REOFFER_LATE_S)]
)
def test_a_reserve_of_an_offer_that_was_given_up_is_refused_soon(at: float, expiry: float) -> None:
    """The receiver would hold its rows until its deadline. At first another offer may come, and later one at the same time."""
    sessions = sessions_of()
    sessions.sends.abort(offer(sessions), RequestAborted("the prompt is too long"), 0.0)
    take_effects(sessions)
    sessions.on_message(D0, reserve(3), at)
    sessions.on_message(D0, msgspec.structs.replace(reserve(), request_id=b"another-request-"), at)
    assert sessions.sends.parked.next_expiry == expiry
    sessions.tick(expiry)
    refused, drained, *_ = take_effects(sessions)
    assert "the prompt is too long" in str(refused)
    assert "the prompt is too long" in str(drained)
    assert len(sessions.sends.parked) == 1, "the other request was never offered"


@pytest.mark.parametrize("message", [decline(3), abort(3)], ids=["decline", "abort"])
def test_what_comes_for_an_offer_that_was_given_up_does_not_end_a_later_one(message: Decline | Abort) -> None:
    """Both servers may refuse a prompt, and a client uses the same id again."""
    sessions = sessions_of()
    sessions.sends.abort(offer(sessions), RequestAborted("the prompt is too long"), 0.0)
    sessions.on_message(D0, message, 1.0)
    sessions.tick(1.0 + REOFFER_S)
    assert len(sessions.sends.parked) == 0
    assert not offer(sessions).is_bound


@pytest.mark.parametrize(("peer", "attempt"), [("D", None), ("D", 4), ("", 4)])
def test_any_later_offer_replaces_one_that_was_given_up(peer: str, attempt: int | None) -> None:
    sessions = sessions_of()
    sessions.sends.abort(offer(sessions), RequestAborted("the client is gone"), 0.0)
    offer(sessions, peer=peer, attempt=attempt)
    sessions.on_message(E0, reserve(3), 1.0)
    assert sessions.sends.parked.next_expiry == 1.0 + Limits().parked_reserve_s


def test_a_reserve_binds_a_later_offer_than_the_one_that_was_given_up() -> None:
    sessions = sessions_of()
    for _ in range(2):
        sessions.sends.abort(offer(sessions), RequestAborted("the client is gone"), 0.0)
    sessions.on_message(D0, reserve(3), 1.0)
    session = offer(sessions)
    assert (session.is_bound, session.key.attempt) == (True, 3)


@pytest.mark.parametrize("reserved", [False, True])
def test_the_requests_of_a_forgotten_peer_end(reserved: bool) -> None:
    """Also those that some of its ranks have not reserved."""
    sessions = sessions_of({"D": 2})
    session = offer(sessions, peer="D", attempt=3)
    put(sessions, session)
    if reserved:
        sessions.on_message(D0, reserve(3), 0.0)
        (start,) = [effect for effect in take_effects(sessions) if isinstance(effect, StartTransfer)]
        sessions.sends.settled(start.ticket, now=0.5, error="D/0 is gone")
    sessions.forget("D", 1.0)
    assert [effect.ok for effect in take_effects(sessions) if isinstance(effect, Event)] == [False]
    assert session.lease.released
    assert not sessions.sends.sessions
    assert not sessions.sends.table.offers
    assert not sessions.sends.table.ended


@pytest.mark.parametrize("attempt", [None, 3])
def test_the_same_offer_twice_is_refused(attempt: int | None) -> None:
    sessions = sessions_of()
    offer(sessions, attempt=attempt)
    with pytest.raises(LocalProtocolError, match="offered to any peer already"):
        offer(sessions, attempt=attempt)


def test_an_attempt_that_has_ended_is_not_offered_again() -> None:
    sessions = sessions_of()
    session = offer(sessions, peer="D", attempt=3)
    sessions.on_message(D0, decline(3), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    with pytest.raises(LocalProtocolError, match="already sent"):
        offer(sessions, peer="D", attempt=3)
    sessions.on_message(D0, reserve(3), 0.0)
    assert "this attempt has ended" in str(take_effects(sessions)[-1])


def test_an_offer_that_nobody_takes_ends_at_its_deadline() -> None:
    sessions = sessions_of()
    session = offer(sessions)
    put(sessions, session)
    sessions.tick(10.0)
    (event,) = take_effects(sessions)
    assert isinstance(event, Event)
    assert isinstance(event.error, RequestTimeout)
    assert "no rank of any peer has reserved" in str(event.error)
    assert session.lease.released
    assert sessions.sends.table.offers == {}


def test_an_aborted_offer_releases_its_rows() -> None:
    sessions = sessions_of()
    session = offer(sessions)
    sessions.sends.send(session, Chunk(0, {"kv": PAGES}, None, None), 0.0)
    assert session.needed("kv") is None
    sessions.sends.abort(session, RequestAborted("the client is gone"), 1.0)
    assert (take_kinds(sessions), session.lease.released) == (["Event"], True)
    assert offer(sessions) is not session


@pytest.mark.parametrize("early", [False, True])
def test_a_receiver_that_gives_up_ends_the_offer(early: bool) -> None:
    sessions = sessions_of()
    if early:
        sessions.on_message(D0, abort(), 0.0)
    session = offer(sessions)
    if not early:
        sessions.on_message(D0, abort(), 0.0)
    assert session.error is not None
    assert "client gone" in str(session.error)
    assert "Event" in take_kinds(sessions)


@pytest.mark.parametrize("early", [False, True])
def test_a_receiver_that_needs_nothing_ends_the_request_well(early: bool) -> None:
    sessions = sessions_of({"D": 2})
    if early:
        sessions.on_message(D0, decline(), 0.0)
    session = offer(sessions)
    put(sessions, session)
    if not early:
        sessions.on_message(D0, decline(), 0.0)
    assert take_effects(sessions) == [(D0, DRAINED)] * (1 + early)  # also once it is taken
    sessions.on_message(D1, decline(), 0.0)
    answer, event = take_effects(sessions)
    assert answer == (D1, DRAINED)
    assert isinstance(event, Event)
    assert (event.ok, event.peer, event.lease.released) == (True, "D", True)


def test_one_rank_may_need_nothing_while_another_reads() -> None:
    sessions = sessions_of({"D": 2})
    session = offer(sessions)
    put(sessions, session)
    sessions.on_message(D1, decline(), 0.0)
    sessions.on_message(D1, decline(), 0.0)
    assert take_effects(sessions) == [(D1, DRAINED), (D1, DRAINED)]
    sessions.on_message(D0, reserve(), 0.0)
    (start,) = take_effects(sessions)
    sessions.sends.settled(start.ticket, now=1.0)
    sessions.on_message(D0, Outcome(request_id=ID, attempt=0, nonce=7, ok=True), 1.0)
    complete, event = take_effects(sessions)
    assert complete[0] == D0
    assert event.ok


def test_a_rank_that_writes_to_nobody_learns_that_it_is_done() -> None:
    """Of replicas of a head one writes; the others have rows that wait all the same."""
    sessions = sessions_of({"D": 0})
    session = offer(sessions)
    put(sessions, session)
    assert take_effects(sessions) == []
    sessions.on_message(D0, decline(), 0.0)
    assert (take_kinds(sessions), session.lease.released) == (["Drained", "Event"], True)


def test_a_decline_of_another_group_or_of_an_ended_attempt_changes_nothing() -> None:
    sessions = sessions_of()
    session = offer(sessions)
    sessions.on_message(D0, decline(source=1), 0.0)
    assert (take_effects(sessions), session.is_bound) == ([], False)
    sessions.on_message(D0, decline(), 0.0)
    sessions.sends.finish(session, b"", 0.0)
    take_effects(sessions)
    sessions.on_message(D0, decline(), 0.0)
    assert (take_effects(sessions), len(sessions.sends.parked)) == ([(D0, DRAINED)], 0)


def test_a_sender_sees_that_its_request_is_still_wanted() -> None:
    """That binds nothing, answers nothing, and is not kept for requests that are not there."""
    sessions = sessions_of()
    sessions.on_message(D0, wanted(), 1.0)
    session = offer(sessions, attempt=0)
    sessions.on_message(D0, wanted(source=1), 2.0)
    sessions.on_message(D0, wanted(attempt=1), 2.0)
    seen = [(session.wanted_at, session.is_bound)]
    sessions.on_message(D1, wanted(), 3.0)
    seen.append((session.wanted_at, session.is_bound))
    sessions.on_message(D0, reserve(), 4.0)
    sessions.on_message(D0, wanted(), 5.0)
    seen.append((session.wanted_at, session.is_bound))
    assert seen == [(None, False), (3.0, False), (5.0, True)]
    assert (take_effects(sessions), len(sessions.sends.parked)) == ([], 0)


def test_a_reserve_after_a_decline_is_refused() -> None:
    sessions = sessions_of({"D": 2})
    offer(sessions)
    sessions.on_message(D0, decline(), 0.0)
    sessions.on_message(D0, reserve(), 0.0)
    _, refused, drained = take_effects(sessions)
    assert isinstance(drained[1], Drained)
    assert "declined" in refused[1].reason


def test_parked_declines_are_bounded() -> None:
    sessions = Sessions(limits=Limits(max_parked_reserves=2))
    for attempt in range(4):
        sessions.on_message(D0, decline(attempt), 0.0)
    assert len(sessions.sends.parked) == 2
    sessions.tick(601.0)
    assert len(sessions.sends.parked) == 0


def test_a_receiver_tells_the_ranks_that_write_to_nobody() -> None:
    sessions = Sessions()
    sessions.receives.open(
        RequestKey(ID, 0),
        peer="P",
        nonce=7,
        source_group=0,
        rows={"kv": PAGES},
        need={"kv": (0, 20)},
        expected={0: {"kv": ((0,), (0, 20))}},
        now=0.0,
        deadline=9.0,
        lease=Lease(),
    )
    sessions.decline(RequestKey(ID, 0), peer="P", nonce=7, source_group=0, ranks=(1, 2))
    sent = [(effect.peer.rank, type(effect.message)) for effect in sessions.effects if isinstance(effect, SendMessage)]
    assert sent == [(0, Reserve), (1, Decline), (2, Decline)]


def test_a_request_that_is_still_wanted_is_named_to_each_writer() -> None:
    sessions = Sessions()
    sessions.want(RequestKey(ID, 2), peer="P", nonce=7, source_group=1, ranks=(1, 2))
    message = Wanted(request_id=ID, attempt=2, nonce=7, source_group=1)
    assert list(sessions.effects) == [SendMessage(PeerRank("P", rank), message) for rank in (1, 2)]


@pytest.mark.parametrize("has_all_ranks", [False, True])
def test_a_taker_that_is_lost_uses_an_offer_up(has_all_ranks: bool) -> None:
    """The offered rows are free once nothing reads them, and no other taker gets the request."""
    sessions = sessions_of({"D": 1 if has_all_ranks else 2, "E": 1})
    lease = Lease()
    session = offer(sessions, attempt=0, lease=lease)
    put(sessions, session)
    sessions.on_message(D0, reserve(), 1.0)
    (start,) = [effect for effect in take_effects(sessions) if isinstance(effect, StartTransfer)]
    sessions.sends.peer_lost(D0, "it was killed", 1.2)
    assert not lease.released
    sessions.on_message(E0, reserve(), 1.5)
    effects = take_effects(sessions)
    refused = [type(effect[1]) for effect in effects if isinstance(effect, tuple) and effect[0] == E0]
    assert refused == [Abort, Drained]
    sessions.sends.settled(start.ticket, now=2.0, error="D/0 is gone")
    (event,) = [effect for effect in (*effects, *take_effects(sessions)) if isinstance(effect, Event)]
    assert (event.ok, lease.released) == (False, True)
    assert not sessions.sends.sessions
