"""Rings and credits: grants, filled slots that are unpacked and credited once, and late messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from disagg.core.rings import NUM_USES, Ring
from disagg.protocol.credits import MAX_RINGS, Credits
from disagg.protocol.messages import Credit, Filled, Part, RingGrant, SlotsFilled
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.types import CreditSlots, Effect, Limits, PeerRank, RequestKey, SendMessage, UnpackSlot

PEER, SIBLING = PeerRank("prefill-0", 0), PeerRank("prefill-0", 1)
KEY = RequestKey(bytes(16), 0)
NEVER = float("inf")


class TwoFreeRings:
    """A pool of two rings with two slots each."""

    def __init__(self) -> None:
        self.free = [Ring(address, 512, 2) for address in (4096, 8192)]

    def take(self) -> Ring | None:
        return self.free.pop(0) if self.free else None

    def give_back(self, ring: Ring) -> None:
        self.free.append(ring)

    @property
    def are_scarce(self) -> bool:
        return len(self.free) <= 1


def make(*, first: int = 0) -> Credits:
    """The credits of one rank; `first` numbers the first use of a slot in every grant."""
    limits = Limits(retry_s=1.0, max_retry_s=2.0)
    return Credits(limits=limits, effects=deque[Effect](), rings=TwoFreeRings(), draw=lambda _: first)


def take_effects(ledger: Credits) -> list[Effect]:
    """The effects since the last call, with the flushed messages."""
    ledger.flush()
    found = list(ledger._effects)
    ledger._effects.clear()
    return found


def sent(ledger: Credits) -> list[tuple[PeerRank, object]]:
    """The messages since the last call, which must be the only effects."""
    effects = take_effects(ledger)
    assert all(isinstance(effect, SendMessage) for effect in effects)
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, SendMessage)]


def credited(ledger: Credits) -> list[object]:
    """The slots of each credit sent since the last call."""
    return [message.slots for _, message in sent(ledger) if isinstance(message, Credit)]


def session() -> ReceiveSession:
    return ReceiveSession(KEY, "prefill-0", 5, 0, 0, {}, {}, {}, 1.0, None)


def filled(grant: RingGrant | None, slot: int = 0, use: int = 1, nbytes: int = 100) -> Filled:
    """Use number `use` of a slot of a grant."""
    address, first = (grant.address, grant.first) if grant is not None else (4096, 0)
    return Filled(slot, first + use, 0, (Part("kv", (0,), None, 0, 4),), 0, nbytes, address)


def unpack_of(ledger: Credits, found: Filled, begin: Callable[[], ReceiveSession | None] = session) -> UnpackSlot | None:
    """The unpacking that a filled slot starts, or None."""
    ledger.on_filled(PEER, found, begin)
    effects = [ledger._effects.pop() for _ in range(len(ledger._effects))]
    assert len(effects) <= 1
    if not effects:
        return None
    (effect,) = effects
    assert isinstance(effect, UnpackSlot)
    return effect


def test_a_connection_keeps_its_ring_and_a_new_connection_gets_another() -> None:
    ledger = make()
    first = ledger.grant(PEER, 7, 0)
    assert first is not None
    assert ledger.grant(PEER, 7, 0) == first
    second = ledger.grant(PEER, 7, 1)
    assert second is not None
    assert second.address != first.address
    assert ledger.grant(PEER, 8, 0) is None, "late writes may still hit the older rings"
    assert ledger.grant(SIBLING, 1, 0) is None
    assert Credits(limits=Limits(), effects=deque()).grant(PEER, 7, 0) is None


def test_a_ring_is_granted_again_once_its_writer_is_quiescent() -> None:
    ledger = make()
    first = ledger.grant(PEER, 7, 0)
    ledger.peer_quiet(PEER, 6)
    assert ledger.grant(PEER, 7, 0) == first
    ledger.peer_quiet(PEER, 7)
    ledger.peer_quiet(PEER, 7)
    assert ledger.grant(SIBLING, 1, 0) is not None
    assert ledger.grant(PEER, 8, 0) == first


def test_all_rings_of_a_dead_process_are_granted_again() -> None:
    ledger = make()
    rings = [ledger.grant(PEER, 7, generation) for generation in (0, 1)]
    assert ledger.grant(PEER, 8, 0) is None
    ledger.peer_quiet(PEER, 7)
    assert ledger.grant(PEER, 8, 0) is None, "the peer has been told that this connection has no ring"
    again = [ledger.grant(PEER, 8, 1), ledger.grant(SIBLING, 1, 0)]
    assert {ring.address for ring in again if ring} == {ring.address for ring in rings if ring}


@pytest.mark.parametrize("again", ["generation", "process"])
def test_a_rank_that_connects_again_and_again_leaves_rings_for_others(again: str) -> None:
    rings = TwoFreeRings()
    rings.free = [Ring(4096 * number, 512, 2) for number in range(1, MAX_RINGS + 3)]  # two more than it may have
    ledger = Credits(limits=Limits(), effects=deque(), rings=rings)
    granted = [ledger.grant(PEER, *((7, number) if again == "generation" else (number, 0))) for number in range(20)]
    assert sum(grant is not None for grant in granted) == MAX_RINGS + 1, "as many as it likes until one is left"
    assert ledger.grant(SIBLING, 1, 0) is not None
    for epoch in range(20):
        ledger.peer_quiet(PEER, epoch)
    assert len(rings.free) == MAX_RINGS + 1
    assert ledger.grant(PEER, 21, 0) is not None


def test_what_is_noted_of_a_forgotten_instance_is_forgotten() -> None:
    """Its rings stay granted until it is proved quiet."""
    ledger = make()
    for peer in (PEER, SIBLING, PeerRank("prefill-1", 0)):
        ledger.grant(peer, 7, 0)
    ledger.forget("prefill-0")
    assert list(ledger._epochs) == [PeerRank("prefill-1", 0)]
    assert list(ledger._without) == [PeerRank("prefill-1", 0)]
    ledger.peer_quiet(PEER, 7)
    assert ledger.grant(PeerRank("prefill-1", 0), 8, 0) is not None


def test_the_ring_of_a_renewed_connection_stays_granted() -> None:
    ledger = make()
    first, second = ledger.grant(PEER, 7, 0), ledger.grant(PEER, 7, 1)
    assert first is not None
    assert second is not None
    ledger.peer_lost(PEER)
    ledger.peer_quiet(PEER, 7, renewed=True)
    assert ledger.grant(PEER, 7, 1) == second
    other = ledger.grant(SIBLING, 1, 0)
    assert other is not None
    assert other.address == first.address
    ledger.peer_quiet(PEER, 7)
    third = ledger.grant(PeerRank("prefill-2", 0), 1, 0)
    assert third is not None
    assert third.address == second.address


@pytest.mark.parametrize("first", [0, 3])
def test_a_slot_is_unpacked_once_and_credited_at_every_report(first: int) -> None:
    ledger, calls = make(first=first), []
    grant = ledger.grant(PEER, 7, 0)
    assert grant is not None
    assert grant.first == first << 32

    def begin() -> ReceiveSession:
        calls.append(1)
        return session()

    unpack = unpack_of(ledger, filled(grant), begin)
    assert unpack is not None
    assert unpack.address == grant.address
    assert unpack_of(ledger, filled(grant), begin) is None
    assert credited(ledger) == [], "no credit before the slot is unpacked"
    ledger.unpacked(unpack)
    assert credited(ledger) == [((0, grant.first + 1),)]
    assert unpack_of(ledger, filled(grant), begin) is None
    assert credited(ledger) == [((0, grant.first + 1),)], "the first credit may have been lost"
    assert unpack_of(ledger, filled(grant, use=2), begin) is not None
    assert unpack_of(ledger, filled(grant, use=1), begin) is None
    assert credited(ledger) == []
    assert len(calls) == 2


def test_a_slot_of_an_ended_request_is_credited_without_unpacking() -> None:
    ledger = make()
    grant = ledger.grant(PEER, 7, 0)
    assert unpack_of(ledger, filled(grant), lambda: None) is None
    assert credited(ledger) == [((0, 1),)]
    assert unpack_of(ledger, filled(grant)) is None
    assert credited(ledger) == [((0, 1),)]


@pytest.mark.parametrize("wrong", [{"slot": 2}, {"nbytes": 0}, {"nbytes": 513}])
def test_slots_that_do_not_exist_are_ignored(wrong: dict[str, int]) -> None:
    ledger = make()
    assert unpack_of(ledger, filled(None)) is None, "no ring is granted"
    grant = ledger.grant(PEER, 7, 0)
    assert unpack_of(ledger, filled(grant, **wrong)) is None
    assert sent(ledger) == []


def test_a_slot_is_read_from_the_ring_named_in_the_message() -> None:
    """One side may learn of a newer connection to the same process before the other side."""
    ledger = make()
    rings = [ledger.grant(PEER, 7, generation) for generation in (0, 1)]
    for ring in rings:
        assert ring is not None
        unpack = unpack_of(ledger, filled(ring))
        assert unpack is not None, "the same slot and sequence number in another ring"
        assert unpack.address == ring.address
        assert unpack_of(ledger, filled(ring)) is None
        ledger.unpacked(unpack)
        assert sent(ledger) == [(PEER, Credit(ring=ring.address, slots=((0, 1),)))]
    assert ledger.grant(PEER, 7, 2) is None
    assert unpack_of(ledger, filled(rings[0], use=2)) is not None, "no newer ring is free, so this one stays in use"
    ledger.grant(PEER, 8, 0)
    assert unpack_of(ledger, filled(rings[0], use=3)) is None, "its writer's process has ended"
    assert sent(ledger) == []


def test_no_credit_is_sent_to_an_ended_connection() -> None:
    ledger = make()
    grant = ledger.grant(PEER, 7, 0)
    unpack = unpack_of(ledger, filled(grant))
    assert unpack is not None
    ledger.grant(PEER, 8, 0)
    ledger.unpacked(unpack)
    assert sent(ledger) == []


def test_reports_about_an_earlier_grant_of_a_ring_are_ignored() -> None:
    """A late report about an earlier grant must not count for the present grant of the same ring."""
    draws = iter((5, 9, 11))
    ledger = Credits(limits=Limits(), effects=deque[Effect](), rings=TwoFreeRings(), draw=lambda _: next(draws))
    first = ledger.grant(PEER, 7, 0)
    ledger.peer_quiet(PEER, 7)
    ledger.grant(SIBLING, 1, 0)
    assert first is not None
    assert unpack_of(ledger, filled(first)) is None
    again = ledger.grant(PEER, 8, 0)
    assert again is not None
    assert again.address == first.address
    assert unpack_of(ledger, filled(first)) is None
    assert sent(ledger) == []
    assert unpack_of(ledger, filled(again)) is not None


def test_a_ring_goes_on_after_all_numbers_were_used() -> None:
    ledger = make(first=5)
    grant = ledger.grant(PEER, 7, 0)
    assert grant is not None
    last = grant.first + NUM_USES - 1
    ledger._granted[PEER].uses[0] = last - 1, True
    for use, earlier in ((last, last - 1), (grant.first, last), (grant.first + 1, grant.first)):
        unpack = unpack_of(ledger, filled(grant, use=use - grant.first))
        assert unpack is not None
        ledger.unpacked(unpack)
        assert credited(ledger) == [((0, use),)]
        assert unpack_of(ledger, filled(grant, use=earlier - grant.first)) is None, "a late report of the use before"
        assert credited(ledger) == []
    assert unpack_of(ledger, filled(grant, use=NUM_USES)) is None, "of another grant"


def test_a_filled_slot_is_reported_until_its_credit_arrives() -> None:
    ledger = make()
    slot = Filled(1, 4, 3, (), 0, 64, 4096)
    ledger.report(PEER, KEY, 9, slot, 0.0)
    assert sent(ledger) == [(PEER, SlotsFilled(request_id=KEY.request_id, attempt=0, nonce=9, slots=(slot,)))]
    assert ledger.next_tick == 1.0
    for now, expected in ((0.5, 0), (1.0, 1), (2.0, 0), (3.0, 1)):
        ledger.tick(now)
        assert len(sent(ledger)) == expected
    for ring, number, sequence in ((4096, 1, 3), (4096, 0, 4), (8192, 1, 4)):
        ledger.on_credit(PEER, Credit(ring=ring, slots=((number, sequence),)))
        assert take_effects(ledger) == [CreditSlots(PEER, ring, ((number, sequence),))]
    assert ledger.next_tick < NEVER
    ledger.on_credit(PEER, Credit(ring=4096, slots=((1, 4),)))
    assert ledger.next_tick == NEVER
    ledger.report(PEER, KEY, 9, Filled(1, 5, 3, (), 0, 64, 4096), 9.0)
    ledger.peer_lost(PEER)
    assert ledger.next_tick == NEVER


def test_slots_of_one_request_and_credits_for_one_ring_share_a_message() -> None:
    ledger = make()
    grant = ledger.grant(PEER, 7, 0)
    ledger.grant(SIBLING, 7, 0)
    keys = [RequestKey(bytes([i]) * 16, 0) for i in range(2)]
    for number, key in enumerate((keys[0], keys[1], keys[0])):
        ledger.report(PEER, key, 9, Filled(number, number + 1, 0, (), 0, 64, 4096), 0.0)
    for number in (0, 1):
        assert unpack_of(ledger, filled(grant, number, use=3), lambda: None) is None
    messages = [message for _, message in sent(ledger)]
    assert [[slot.slot for slot in m.slots] for m in messages if isinstance(m, SlotsFilled)] == [[0, 2], [1]]
    assert [m.slots for m in messages if isinstance(m, Credit)] == [((0, 3), (1, 3))]
    assert sent(ledger) == []
