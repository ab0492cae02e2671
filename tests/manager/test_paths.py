"""The ways that bytes go, against the naive reference: together they write what is needed and not a byte more."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import new_request_id
from disagg.backends.base import BackendOptions, Op, RemotePeer, StagingShape, TransferStatus
from disagg.backends.local import LocalBackend, LocalTransfer
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import PeerUnreachable
from disagg.layout.plan import TransferPlan
from disagg.protocol.messages import Reserve, Written, pack_rows
from disagg.protocol.types import Chunk, PeerRank, RequestKey, StartTransfer, Ticket
from disagg.runtime.paths import MIN_PIECES, bind_incoming, bind_outgoing
from disagg.testing.reference import CANARY, PageList
from disagg.testing.scene import Scene
from disagg.testing.strategies import cases
from disagg.transfer.jobs import BoundTransfer
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

HND = "page kv_head token dim"


class Carrier:
    """Does what a transfer thread and a peer do with a binding: copies, slots of `slot_nbytes`, and no more than that."""

    def __init__(self, scene: Scene, source: int, destination: int, slot_nbytes: int) -> None:
        self.scene, self.source, self.destination = scene, source, destination
        self.slot = np.zeros(slot_nbytes, np.uint8)

    def carry(self, bound: BoundTransfer, plan: TransferPlan) -> None:
        """Every way, one after the other."""
        assert isinstance(bound.direct, CopyBatch)
        assert self.scene.source.holds(self.source, bound.direct.source, bound.direct.nbytes)
        self.write(bound.direct)
        at, room = self.slot.ctypes.data, len(self.slot)
        _, theirs = self.scene.rows(self.source, self.destination)
        name, case = self.scene.case.model.component, self.scene.case
        incoming = bind_incoming(plan, bound.parts, {name: theirs}, {name: (case.need, case.num_tokens)})
        assert incoming.total == bound.ring_nbytes
        for offset in range(0, incoming.total, room):
            nbytes = min(room, incoming.total - offset)
            if bound.gathered is None:
                assert bound.stream is not None
                bound.stream.gather(offset, nbytes, at)
            else:
                self.copy(*bound.gathered.copies(offset, nbytes, at))
            incoming.scatter(offset, nbytes, at)

    def write(self, copies: CopyBatch) -> None:
        """Make copies whose every byte must lie in the destination's pools."""
        assert self.scene.destination.holds(self.destination, copies.destination, copies.nbytes)
        self.copy(copies.source, copies.destination, copies.nbytes)

    @staticmethod
    def copy(*columns: Addresses) -> None:
        """As an engine does, be it that it collects pieces."""
        for where, target, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(target, where, nbytes)


@given(
    cases(),
    st.sampled_from((0, 1, 2, 7, 32, 100, 1 << 20)),
    st.sampled_from((None, 1, 8, 100)),
    st.sampled_from((1, 13, 64, 1000)),
    st.booleans(),
    st.data(),
)
def test_all_ways_together_write_every_needed_byte_and_no_other(
    case: Any, pack_below: int, gathers_from: int | None, slot_nbytes: int, has_ring: bool, data: st.DataObject
) -> None:
    """In chunks too; whatever the threshold, the slots, whether there is a ring, and whether the engine collects pieces."""
    scene = Scene(case)
    cut = data.draw(st.integers(case.need, case.num_tokens), label="cut")
    name = case.model.component
    for source, destination in scene.election.by_pair:
        plan = TransferPlan({name: scene.plan(source, destination)})
        ours, theirs = scene.rows(source, destination)
        reserve = Reserve(
            request_id=bytes(16),
            attempt=0,
            nonce=1,
            source_group=0,
            destination_group=0,
            rows={name: pack_rows(theirs)},
            need={name: (case.need, case.num_tokens)},
        )
        ticket = Ticket(PeerRank("decode-0", destination), RequestKey(bytes(16), 0), 0)
        for start, stop in ((case.need, cut), (cut, case.num_tokens)):
            written = Written(0, name, None, start, stop)
            begun = StartTransfer(ticket, Chunk(0, {name: ours}, (start, stop), None), reserve, (written,))
            bound = bind_outgoing(plan, begun, pack_below=pack_below, has_ring=has_ring, gathers_from=gathers_from)
            assert has_ring or not bound.parts
            assert gathers_from is not None or bound.gathered is None
            Carrier(scene, source, destination, slot_nbytes).carry(bound, plan)
    assert scene.difference() is None


class Small(LocalBackend):
    """The `local` engine with two slots of 1,000 bytes; pieces below 128 bytes are packed."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.allowed = 1 << 30
        self.outcome: TransferStatus | None = None
        self.posted = threading.Event()

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=128, slot_nbytes=1000, num_slots=2, num_rings=8)

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Any:
        if self.allowed == 0:
            self.posted.set()
            if self.outcome is None:
                raise PeerUnreachable("so that there is a failure")
            return Ending(self)
        self.allowed -= 1
        return super().submit(op, peer, copies)


class Ending(LocalTransfer):
    """A write that is what its engine says that it is."""

    def __init__(self, engine: Small) -> None:
        super().__init__()
        self._engine = engine

    def poll(self) -> TransferStatus:
        assert self._engine.outcome is not None
        return self._engine.outcome


LONG_RUNS = [
    (Side(tp=1), Side(tp=2, page=8)),
    (Side(tp=2, page=2, num_pages=64), Side(tp=4, page=16)),
    (Side(tp=1, page=16, axes=HND), Side(tp=3, page=4, axes=HND)),
]


@pytest.mark.parametrize(("prefill", "decode"), LONG_RUNS)
def test_small_pieces_are_packed_even_if_they_are_contiguous_at_the_destination(prefill: Side, decode: Side) -> None:
    with cluster(prefill, decode, num_kv_heads=12, settings={"backend": Small}) as made:
        for first, chunks in ((0, ()), (16, (32,)), (13, (21, 40))):
            assert all(event.ok for event in made.transfer(61, first_token=first, chunks=chunks))
        paths = [rank.manager.stats.nbytes_by_way for rank in made.prefill]
        assert all(path["packed"] > 0 for path in paths)
        assert all(sum(path.values()) == rank.manager.stats.nbytes for path, rank in zip(paths, made.prefill, strict=True))


def test_small_pages_that_follow_each_other_on_both_sides_are_long_pieces() -> None:
    ids = tuple(page for first in (0, 8, 4, 16, 12, 24, 20) for page in range(first, first + 4))
    with cluster(Side(), Side(), num_kv_heads=1, settings={"backend": Small}) as made:
        request, pages = new_request_id(), PageList(ids, 0)
        receiver = receive(made.decode[0], request, pages, need=(0, 112))
        sender = send(made.prefill[0], request, pages, 112)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert sender.wait(timeout_s=DEADLINE_S).ok
        stats = made.prefill[0].manager.stats
        assert stats.nbytes_by_way["direct"] == stats.nbytes > 0
        assert stats.pieces == 7 * 2 * 3 > MIN_PIECES


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.parametrize("outcome", [None, TransferStatus.FAILED])
def test_a_write_that_fails_ends_its_request_and_its_slot_serves_the_next(allowed: int, outcome: TransferStatus | None) -> None:
    with cluster(*LONG_RUNS[0], num_kv_heads=12, settings={"backend": Small}) as made:
        (rank,) = made.prefill
        engine = rank.manager.backend
        assert isinstance(engine, Small)
        engine.allowed, engine.outcome = allowed, outcome
        assert not any(event.ok for event in made.transfer(61))
        engine.allowed = 1 << 30
        for _ in range(3):
            assert all(event.ok for event in made.transfer(61))


def test_rows_are_held_until_the_last_write_has_settled_and_nothing_is_written_after_an_abort() -> None:
    with cluster(Side(tp=1), Side(tp=1, page=16), num_kv_heads=1, settings={"backend": Small}) as made:
        (rank,), (sink,) = made.prefill, made.decode
        engine = rank.manager.backend
        assert isinstance(engine, Small)
        engine.allowed, engine.outcome = 0, TransferStatus.PENDING
        request, pages = new_request_id(), [made.pages(each, 120) for each in (rank, sink)]
        receiver = receive(sink, request, pages[1], need=(0, 120))
        sender = send(rank, request, pages[0], 120)
        assert engine.posted.wait(DEADLINE_S)
        receiver.abort("client gone")
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        released = threading.Event()
        event.lease.on_release(released.set)
        assert not released.wait(0.05), "a write of it is under way"
        engine.outcome = TransferStatus.DONE
        assert released.wait(DEADLINE_S)
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        engine.allowed = 1 << 30
        assert all((tensor.view(np.uint8) == CANARY).all() for tensors in sink.pools.values() for tensor in tensors)
        assert all(event.ok for event in made.transfer(61))
