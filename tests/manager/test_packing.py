"""Streams, rings and the talk about slots; and what becomes of a request whose packed bytes are not what they should be."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
from disagg.runtime.credits import Packing

from disagg import ConfigError, RemoteProtocolError, new_request_id
from disagg.backends.base import Backend, Op, RemotePeer, StagingShape, TransferStatus
from disagg.backends.local import LocalBackend, LocalPeer, LocalTransfer
from disagg.core.copies import CopyBatch
from disagg.core.memory import RemoteRegion
from disagg.layout.plan import TransferPlan
from disagg.protocol.messages import Complete, Credit, Filled, Part, RingGrant
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.types import Limits, PeerRank, RequestKey, Ticket
from disagg.testing.faults import MessageFaults, mistreat
from disagg.testing.reference import PageList
from disagg.transfer import worker as transfers
from disagg.transfer.jobs import SlotFilled, Unpack, Unpacked
from disagg.transfer.staging import RemoteRing, Ring, RingPool, SlotPool
from tests.support.cluster import DEADLINE_S, Side, clear, cluster, receive, send

PEER = PeerRank("prefill-0", 0)
SHAPE = StagingShape(pack_below=4096, slot_nbytes=512, num_slots=2, num_rings=2)
PLAN = TransferPlan({})


@pytest.mark.parametrize("wrong", [{"pack_below": -1}, {"slot_nbytes": 0}, {"num_slots": 0}, {"num_rings": 0}])
def test_staging_of_impossible_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="staging"):
        StagingShape(**wrong)


def test_slots_and_rings_are_handed_out_once_and_do_not_overlap() -> None:
    slots, rings = SlotPool(SHAPE), RingPool(SHAPE)
    first, second = slots.take(), slots.take()
    assert first is not None
    assert second is not None
    assert abs(first - second) >= SHAPE.slot_nbytes
    assert slots.take() is None
    slots.give_back(first)
    assert slots.take() == first
    one, two = rings.take(), rings.take()
    assert one is not None
    assert two is not None
    assert rings.take() is None
    places = sorted(ring.slot(n) for ring in (one, two) for n in range(SHAPE.num_slots))
    assert all(after - before >= SHAPE.slot_nbytes for before, after in itertools.pairwise(places))
    assert places[0] >= rings.region.address
    assert places[-1] + SHAPE.slot_nbytes <= rings.region.address + rings.region.nbytes


def test_rings_after_the_whole_ones_are_smaller_and_the_largest_is_given_first() -> None:
    shape = StagingShape(slot_nbytes=512, num_slots=8, num_rings=8, whole_rings=2)
    assert shape.ring_slots() == (8, 8, 4, 4, 2, 2, 1, 1)
    rings = RingPool(shape)
    assert rings.region.nbytes >= 512 * 30
    taken = [rings.take() for _ in range(8)]
    assert [ring.num_slots for ring in taken if ring is not None] == [8, 8, 4, 4, 2, 2, 1, 1]
    places = sorted(ring.slot(n) for ring in taken if ring is not None for n in range(ring.num_slots))
    assert all(after - before >= 512 for before, after in itertools.pairwise(places))
    for ring in (taken[4], taken[2], taken[6]):
        assert ring is not None
        rings.give_back(ring)
    assert rings.take() == taken[2]


def test_spares_stand_in_for_slots_that_are_held_for_long() -> None:
    slots = SlotPool(SHAPE)
    held = [slots.take(), slots.take()]
    spares = []
    while slots.replace():
        spares.append(slots.take())
    assert len({*held, *spares}) == SHAPE.num_slots + SHAPE.spares
    assert all(slots.region.address <= place < slots.region.address + slots.region.nbytes for place in spares if place)
    for place in held:
        assert place is not None
        slots.give_back(place, replaced=True)
    assert slots.take() is None, "a slot that was replaced is a spare when it comes back"
    assert slots.replace()
    assert slots.take() == held[1]


class Stuck(LocalTransfer):
    """A write that never ends."""

    def poll(self) -> TransferStatus:
        return TransferStatus.PENDING


class HalfStuck(LocalBackend):
    """The `local` engine with two slots, whose writes to one of its peers never end."""

    stuck: ClassVar[set[Backend]] = set()

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 20, slot_nbytes=1000, num_slots=2, num_rings=8)

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Any:
        assert isinstance(peer, LocalPeer)
        return Stuck() if peer.target in self.stuck else super().submit(op, peer, copies)


def test_a_peer_that_takes_nothing_does_not_hold_up_the_others() -> None:
    with cluster(Side(tp=1), Side(tp=2), settings={"backend": HalfStuck}) as made:
        dead, live = made.decode
        HalfStuck.stuck.add(dead.manager.backend)
        request, pages = new_request_id(), [made.pages(rank, 96) for rank in (*made.prefill, dead, live)]
        given_up = receive(dead, request, pages[1], need=(0, 96), deadline_s=2.0)
        served = receive(live, request, pages[2], need=(0, 96))
        send(made.prefill[0], request, pages[0], 96)
        assert served.wait(timeout_s=DEADLINE_S).ok
        assert not given_up.wait(timeout_s=DEADLINE_S).ok
        HalfStuck.stuck.clear()


def test_a_remote_slot_is_free_again_only_by_the_credit_of_its_newest_use() -> None:
    ring = RemoteRing(Ring(4096, 512, 1), (RemoteRegion(4096, 512),))
    use = ring.take()
    assert use == (0, 1)
    assert ring.take() is None
    assert not ring.credit(0, 7)
    assert not ring.credit(5, 1)
    assert ring.credit(0, 1)
    assert not ring.credit(0, 1), "a credit that came twice frees nothing twice"
    assert ring.take() == (0, 2)
    assert not ring.credit(0, 1), "an old credit does not free a newer use"


def test_a_ring_outside_the_peers_regions_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="in no region that the peer has registered"):
        RemoteRing(Ring(4096, 512, 2), (RemoteRegion(4096, 1023),))


@pytest.fixture
def _numbered_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of a grant's slots; otherwise they begin somewhere else with each grant."""
    monkeypatch.setattr("disagg.runtime.credits.secrets.randbits", lambda _: 0)


numbered_from_zero = pytest.mark.usefixtures("_numbered_from_zero")


def packing() -> Packing:
    return Packing(RingPool(SHAPE), limits=Limits(retry_s=1.0, max_retry_s=2.0))


def test_a_connection_keeps_its_ring_and_a_new_one_gets_another() -> None:
    made = packing()
    first = made.grant(PEER, 7, 0)
    assert first is not None
    assert made.grant(PEER, 7, 0) == first
    second = made.grant(PEER, 7, 1)
    assert second is not None
    assert second.address != first.address
    assert made.grant(PEER, 8, 0) is None, "late writes may still hit the older rings, so they are not given again"
    assert made.grant(PeerRank("prefill-1", 0), 1, 0) is None
    assert Packing(None, limits=Limits()).grant(PEER, 7, 0) is None


@numbered_from_zero
def test_a_ring_is_given_again_once_its_writer_is_proved_quiet() -> None:
    made = packing()
    first = made.grant(PEER, 7, 0)
    made.quiet(PEER, 6)
    assert made.grant(PEER, 7, 0) == first
    made.quiet(PEER, 7)
    made.quiet(PEER, 7)
    assert made.grant(PeerRank("prefill-1", 0), 1, 0) is not None
    assert made.grant(PEER, 8, 0) == first


def test_rings_of_every_connection_of_a_dead_process_are_given_again() -> None:
    made = packing()
    rings = [made.grant(PEER, 7, generation) for generation in (0, 1)]
    assert made.grant(PEER, 8, 0) is None
    made.quiet(PEER, 7)
    again = [made.grant(PEER, 8, 0), made.grant(PeerRank("prefill-1", 0), 1, 0)]
    assert {ring.address for ring in again if ring} == {ring.address for ring in rings if ring}


def filled(slot: int = 0, sequence: int = 1, nbytes: int = 100) -> Filled:
    """In a ring that `taken` names."""
    return Filled(slot, sequence, 0, (Part("kv", (0,), None, 0, 4),), 0, nbytes, 1)


def session() -> ReceiveSession:
    return ReceiveSession(RequestKey(bytes(16), 0), "prefill-0", 5, 0, 0, {}, {}, {}, 1.0, None)


def taken(
    made: Packing, found: Filled, begin: Callable[[], ReceiveSession | None], ring: RingGrant | None = None
) -> Unpack | None:
    """What becomes of a slot of `ring`; by default of the newest one."""
    newest = made._granted.get(PEER)
    address = ring.address if ring else newest.ring.address if newest else 1
    return made.take(PEER, msgspec.structs.replace(found, ring=address), begin, PLAN)


def given_back(made: Packing) -> list[Any]:
    said = made.take_messages()
    assert all(isinstance(message, Credit) for _, message in said)
    return [message.slots for _, message in said if isinstance(message, Credit)]


@numbered_from_zero
def test_a_slot_is_unpacked_once_however_often_it_is_told_of_and_credited_again() -> None:
    made, asked = packing(), []
    made.grant(PEER, 7, 0)

    def begin() -> ReceiveSession:
        asked.append(1)
        return session()

    unpack = taken(made, filled(), begin)
    assert unpack is not None
    assert taken(made, filled(), begin) is None
    assert given_back(made) == [], "not before it is unpacked"
    made.unpacked(Unpacked(unpack.token, 100, "", 0.0))
    assert given_back(made) == [((0, 1),)]
    assert taken(made, filled(), begin) is None
    assert given_back(made) == [((0, 1),)], "its credit was lost"
    assert taken(made, filled(sequence=2), begin) is not None
    assert taken(made, filled(sequence=1), begin) is None
    assert given_back(made) == []
    assert len(asked) == 2


@numbered_from_zero
def test_a_slot_that_nobody_waits_for_is_given_back_unread() -> None:
    made = packing()
    made.grant(PEER, 7, 0)
    assert taken(made, filled(), lambda: None) is None
    assert given_back(made) == [((0, 1),)]
    assert taken(made, filled(), session) is None
    assert given_back(made) == [((0, 1),)]


@pytest.mark.parametrize("wrong", [filled(slot=2), filled(nbytes=0), filled(nbytes=513)])
def test_slots_that_do_not_exist_are_ignored(wrong: Filled) -> None:
    made = packing()
    assert taken(made, filled(), session) is None, "no ring was granted"
    made.grant(PEER, 7, 0)
    assert taken(made, wrong, session) is None
    assert given_back(made) == []


@numbered_from_zero
def test_a_slot_is_read_from_the_ring_that_its_writer_names() -> None:
    """Whichever of two connections of one process the writer takes for the newest; each ring counts its own uses."""
    made = packing()
    rings = [made.grant(PEER, 7, generation) for generation in (0, 1)]
    for turn, ring in enumerate((rings[0], rings[1])):
        assert ring is not None
        unpack = taken(made, filled(), session, ring)
        assert unpack is not None, "the same slot and number, of another ring"
        assert unpack.address == ring.address
        assert taken(made, filled(), session, ring) is None
        made.unpacked(Unpacked(unpack.token, 100, "", 0.0))
        ((to, credit),) = made.take_messages()
        assert (to, credit) == (PEER, Credit(ring=ring.address, slots=((0, 1),))), turn
    assert made.grant(PEER, 7, 2) is None
    assert taken(made, filled(sequence=2), session, rings[0]) is not None, "no newer ring is left, so this one serves"
    made.grant(PEER, 8, 0)
    assert taken(made, filled(sequence=3), session, rings[0]) is None, "its process is gone"
    assert made.take_messages() == []


@numbered_from_zero
def test_no_credit_goes_to_a_connection_that_has_ended() -> None:
    made = packing()
    made.grant(PEER, 7, 0)
    unpack = taken(made, filled(), session)
    assert unpack is not None
    made.grant(PEER, 8, 0)
    made.unpacked(Unpacked(unpack.token, 100, "", 0.0))
    assert given_back(made) == []


def test_a_filled_slot_is_told_of_until_its_credit_comes() -> None:
    made = packing()
    ticket = Ticket(PEER, RequestKey(bytes(16), 0), 3)
    made.on_slot_filled(PEER, ticket, 9, SlotFilled(ticket, 4096, 1, 4, (), 0, 64), 0.0)
    ((to, first),) = made.take_messages()
    assert to == PEER
    assert isinstance(first, Complete)
    assert (first.nonce, first.final, first.filled) == (9, False, (Filled(1, 4, 3, (), 0, 64, 4096),))
    assert made.next_tick() == 1.0
    for now, expected in ((0.5, 0), (1.0, 1), (2.0, 0), (3.0, 1)):
        made.tick(now)
        assert len(made.take_messages()) == expected
    made.on_credit(PEER, 4096, 1, 3)
    made.on_credit(PEER, 4096, 0, 4)
    made.on_credit(PEER, 8192, 1, 4)
    assert made.next_tick() < float("inf")
    made.on_credit(PEER, 4096, 1, 4)
    assert made.next_tick() == float("inf")
    made.on_slot_filled(PEER, ticket, 9, SlotFilled(ticket, 4096, 1, 5, (), 0, 64), 9.0)
    made.lose(PEER)
    assert made.next_tick() == float("inf")


def test_a_ring_that_was_granted_anew_stays_when_the_one_before_it_is_proved_quiet() -> None:
    """The peer has begun its connection anew; that nothing is under way on the old one says nothing of the new one."""
    made = packing()
    first, second = made.grant(PEER, 7, 0), made.grant(PEER, 7, 1)
    made.lose(PEER)
    made.quiet(PEER, 7, renewed=True)
    assert made.grant(PEER, 7, 1) == second
    other = made.grant(PeerRank("prefill-1", 0), 1, 0)
    assert other is not None
    assert first is not None
    assert other.address == first.address
    made.quiet(PEER, 7)
    third = made.grant(PeerRank("prefill-2", 0), 1, 0)
    assert third is not None
    assert second is not None
    assert third.address == second.address


def test_what_is_said_of_an_older_ring_means_nothing_in_the_newer_one() -> None:
    """Either way: a slot that was filled in the older one, and a credit for it."""
    made = packing()
    first = made.grant(PEER, 7, 0)
    second = made.grant(PEER, 7, 1)
    assert first is not None
    assert second is not None
    old, new = (RemoteRing(Ring(4096, 512, 1), (RemoteRegion(4096, 512),), first=grant.first) for grant in (first, second))
    use, other = old.take(), new.take()
    assert use is not None
    assert other is not None
    assert use != other
    assert taken(made, filled(*use), session) is None
    assert given_back(made) == []
    assert not new.credit(*use)
    assert taken(made, filled(*other), session) is not None
    assert new.credit(*other)


@numbered_from_zero
def test_what_is_said_at_once_goes_in_one_message_per_request_and_rank() -> None:
    made = packing()
    made.grant(PEER, 7, 0)
    made.grant(PeerRank("prefill-0", 1), 7, 0)
    tickets = [Ticket(PEER, RequestKey(bytes([i]) * 16, 0), 0) for i in range(2)]
    for slot, ticket in enumerate((tickets[0], tickets[1], tickets[0])):
        made.on_slot_filled(PEER, ticket, 9, SlotFilled(ticket, 4096, slot, slot + 1, (), 0, 64), 0.0)
    for slot in (0, 1):
        assert taken(made, filled(slot, 3), lambda: None) is None
    said = made.take_messages()
    assert [[f.slot for f in m.filled] for _, m in said if isinstance(m, Complete)] == [[0, 2], [1]]
    assert [m.slots for _, m in said if isinstance(m, Credit)] == [((0, 3), (1, 3))]
    assert made.take_messages() == []


SMALL_RINGS: dict[str, Any] = {"pack_below": 1 << 20}


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda f: Filled(f.slot, f.sequence, f.chunk, f.parts, f.offset + 10**6, f.nbytes, f.ring), "packed stream of"),
        (lambda f: Filled(f.slot, f.sequence, f.chunk, (Part("ssm", (0,), None, 0, 1),), 0, 1, f.ring), "component 'ssm'"),
        (lambda f: Filled(f.slot, f.sequence, f.chunk, (Part("kv", (77,), None, 0, 20),), 0, 1, f.ring), "span classes (77,)"),
    ],
)
def test_a_writer_that_lies_about_a_slot_fails_its_request_and_no_thread(
    monkeypatch: pytest.MonkeyPatch, lie: Callable[[Filled], Filled], message: str
) -> None:
    with cluster(Side(tp=2), Side(page=8), settings=SMALL_RINGS) as made:
        honest = Packing.take

        def take(self: Packing, peer: PeerRank, found: Filled, *rest: Any) -> Unpack | None:
            return honest(self, peer, lie(found), *rest)

        monkeypatch.setattr(Packing, "take", take)
        request = new_request_id()
        receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in made.prefill]
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert message in str(event.error)
        assert all(not sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
        monkeypatch.undo()
        clear(made.decode[0].pools)
        assert all(event.ok for event in made.transfer(20))


@pytest.mark.parametrize("lost", ["complete", "credit"])
def test_messages_about_slots_may_be_lost(lost: str) -> None:
    """The first three of a kind do not arrive; nothing is lost and nothing is unpacked twice."""
    with cluster(Side(tp=2), Side(page=8), settings=SMALL_RINGS) as made:
        faults = MessageFaults(lose=1.0, kinds=frozenset((lost,)), at_most=3)
        channels = [mistreat(rank.manager, faults) for rank in made.prefill + made.decode]
        for _ in range(3):
            assert all(event.ok for event in made.transfer(37))
        assert sum(channel.counts["lose"] for channel in channels) >= 3


def test_rows_are_not_given_back_while_they_are_being_unpacked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(Side(tp=2), Side(page=8), settings=SMALL_RINGS) as made:
        entered, go_on = threading.Event(), threading.Event()
        scatter = transfers._scatter
        scatter_thread = made.decode[0].manager._hub._worker._thread

        def slow(unpack: Unpack) -> None:
            if threading.current_thread() is scatter_thread:
                entered.set()
                assert go_on.wait(DEADLINE_S)
            scatter(unpack)

        monkeypatch.setattr(transfers, "_scatter", slow)
        monkeypatch.setattr(transfers, "QUICK_NBYTES", 0)  # it is the transfer thread that is held up
        request = new_request_id()
        receiver = receive(made.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in made.prefill]
        assert entered.wait(DEADLINE_S)
        receiver.abort("client gone")
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.lease.released
        released = threading.Event()
        event.lease.on_release(released.set)
        assert not released.wait(0.05)
        go_on.set()
        assert released.wait(DEADLINE_S)
        assert all("client gone" in str(sender.wait(timeout_s=DEADLINE_S).error) for sender in senders)
