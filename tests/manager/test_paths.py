"""The paths of a transfer, against the naive reference: together they write exactly the needed bytes."""

from __future__ import annotations

import ctypes
import threading
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import new_request_id
from disagg.backends.base import BackendOptions, RemotePeer, StagingShape, TransferStatus
from disagg.backends.local import LocalBackend, LocalTransfer
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import PeerUnreachable, RemoteProtocolError
from disagg.layout.plan import TransferPlan
from disagg.protocol.messages import Part, Reserve, Written, pack_rows
from disagg.protocol.types import Chunk, PeerRank, RequestKey, StartTransfer, Ticket
from disagg.runtime.paths import MIN_PIECES, bind_incoming, bind_outgoing
from disagg.testing.reference import CANARY, KVModel, PageList
from disagg.testing.scene import Case, Scene
from disagg.testing.strategies import cases
from disagg.transfer.jobs import BoundTransfer
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

HND = "page kv_head token dim"


class TransferModel:
    """Performs a bound transfer as a transfer thread and a peer do: direct copies, and slots of `slot_nbytes`."""

    def __init__(self, scene: Scene, source: int, destination: int, slot_nbytes: int) -> None:
        self.scene, self.source, self.destination = scene, source, destination
        self.slot = np.zeros(slot_nbytes, np.uint8)

    def move(self, bound: BoundTransfer, plan: TransferPlan) -> None:
        """Move the pieces of every path, one path after the other."""
        assert isinstance(bound.direct, CopyBatch)
        assert self.scene.source.holds(self.source, bound.direct.source, bound.direct.nbytes)
        self.write(bound.direct)
        slot, room = self.slot.ctypes.data, len(self.slot)
        _, theirs = self.scene.rows(self.source, self.destination)
        name, case = self.scene.case.model.component, self.scene.case
        incoming = bind_incoming(plan, bound.parts, {name: theirs}, {name: (case.need, case.num_tokens)})
        assert incoming.total == (bound.stream.total if bound.stream is not None else 0)
        for offset in range(0, incoming.total, room):
            nbytes = min(room, incoming.total - offset)
            if bound.gathered is None:
                assert bound.stream is not None
                bound.stream.gather(offset, nbytes, slot)
            else:
                self.copy(*bound.gathered.copies(offset, nbytes, slot))
            incoming.scatter(offset, nbytes, slot)

    def write(self, copies: CopyBatch) -> None:
        """Perform copies; every written byte must lie in the destination's pools."""
        assert self.scene.destination.holds(self.destination, copies.destination, copies.nbytes)
        self.copy(copies.source, copies.destination, copies.nbytes)

    @staticmethod
    def copy(*columns: Addresses) -> None:
        """Perform copies as an engine does, with or without gathering."""
        for origin, target, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(target, origin, nbytes)


@given(
    cases(),
    st.sampled_from((0, 1, 2, 7, 32, 100, 1 << 20)),
    st.sampled_from((None, 1, 8, 100)),
    st.sampled_from((1, 13, 64, 1000)),
    st.booleans(),
    st.data(),
)
def test_all_paths_together_write_exactly_the_needed_bytes(
    case: Any, pack_below: int, gathers_from: int | None, slot_nbytes: int, has_ring: bool, data: st.DataObject
) -> None:
    """For any chunks, threshold and slot size, with and without a ring, with and without gathering by the engine."""
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
            start_transfer = StartTransfer(ticket, Chunk(0, {name: ours}, (start, stop), None), reserve, (written,))
            bound = bind_outgoing(plan, start_transfer, pack_below=pack_below, packs=has_ring, gathers_from=gathers_from)
            assert has_ring or not bound.parts
            assert gathers_from is not None or bound.gathered is None
            TransferModel(scene, source, destination, slot_nbytes).move(bound, plan)
    assert scene.difference() is None


@pytest.mark.parametrize("repeats", ["nothing", "a component", "a span class"])
def test_a_packed_stream_has_each_component_and_span_class_once(repeats: str) -> None:
    """Each repeats a stream of gigabytes in a few bytes of a message."""
    model = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")
    scene = Scene(Case(model=model, source=Side(), destination=Side(), num_tokens=40))
    name, case = scene.case.model.component, scene.case
    plan = TransferPlan({name: scene.plan(0, 0)})
    _, theirs = scene.rows(0, 0)
    part = Part(name, tuple(range(len(plan.components[name].spans))), None, case.need, case.num_tokens)
    parts = {
        "nothing": (part,),
        "a component": (part,) * 1000,
        "a span class": (msgspec.structs.replace(part, spans=part.spans * 1000),),
    }[repeats]
    if repeats == "nothing":
        assert bind_incoming(plan, parts, {name: theirs}, {name: (case.need, case.num_tokens)}).total > 0
        return
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match="expected each component, and each of its span classes, once"):
        bind_incoming(plan, parts, {name: theirs}, {name: (case.need, case.num_tokens)})
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


class SmallStaging(LocalBackend):
    """The `local` engine with two slots of 1,000 bytes; it packs pieces below 128 bytes.

    After `num_allowed` writes it raises, or returns transfers with the status `outcome`.
    """

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.num_allowed = 1 << 30
        self.outcome: TransferStatus | None = None
        self.limit_reached = threading.Event()

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=128, slot_nbytes=1000, window=2, num_lent=8)

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Any:
        if self.num_allowed == 0:
            self.limit_reached.set()
            if self.outcome is None:
                raise PeerUnreachable("the test lets this write fail")
            return FixedStatus(self)
        self.num_allowed -= 1
        return super().submit(peer, copies)


class FixedStatus(LocalTransfer):
    """A write whose status is the engine's `outcome`."""

    def __init__(self, engine: SmallStaging) -> None:
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
def test_small_pieces_are_packed_even_if_contiguous_at_the_destination(prefill: Side, decode: Side) -> None:
    with cluster(prefill, decode, num_kv_heads=12, settings={"backend": SmallStaging}) as instances:
        for first, chunks in ((0, ()), (16, (32,)), (13, (21, 40))):
            assert all(event.ok for event in instances.transfer(61, first_token=first, chunks=chunks))
        paths = [rank.manager.stats.nbytes_by_way for rank in instances.prefill]
        assert all(path["packed"] > 0 for path in paths)
        assert all(sum(path.values()) == rank.manager.stats.nbytes for path, rank in zip(paths, instances.prefill, strict=True))


def test_adjacent_small_pages_form_long_pieces() -> None:
    ids = tuple(page for first in (0, 8, 4, 16, 12, 24, 20) for page in range(first, first + 4))
    with cluster(Side(), Side(), num_kv_heads=1, settings={"backend": SmallStaging}) as instances:
        request, pages = new_request_id(), PageList(ids, 0)
        receiver = receive(instances.decode[0], request, pages, need=(0, 112))
        sender = send(instances.prefill[0], request, pages, 112)
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert sender.wait(timeout_s=DEADLINE_S).ok
        stats = instances.prefill[0].manager.stats
        assert stats.nbytes_by_way["direct"] == stats.nbytes > 0
        assert stats.pieces == 7 * 2 * 3 > MIN_PIECES


@pytest.mark.parametrize("num_allowed", [0, 1])
@pytest.mark.parametrize("outcome", [None, TransferStatus.FAILED])
def test_a_failed_write_ends_its_request_and_frees_its_slot(num_allowed: int, outcome: TransferStatus | None) -> None:
    with cluster(*LONG_RUNS[0], num_kv_heads=12, settings={"backend": SmallStaging}) as instances:
        (rank,) = instances.prefill
        engine = rank.manager.backend
        assert isinstance(engine, SmallStaging)
        engine.num_allowed, engine.outcome = num_allowed, outcome
        failed = instances.transfer(61)
        assert not any(event.ok for event in failed)
        until(lambda: all(event.lease.released for event in failed))
        engine.num_allowed = 1 << 30
        for _ in range(3):
            assert all(event.ok for event in instances.transfer(61))


@pytest.mark.parametrize("pack_below", [0, 1 << 20], ids=["into rows", "into slots"])
def test_after_an_abort_rows_are_held_until_the_last_write_into_them_has_settled(pack_below: int) -> None:
    """A write into a slot, which nobody unpacks then, may settle later."""
    settings = {"backend": SmallStaging, "pack_below": pack_below}
    with cluster(Side(tp=1), Side(tp=1, page=16), num_kv_heads=1, settings=settings) as instances:
        (rank,), (sink,) = instances.prefill, instances.decode
        engine = rank.manager.backend
        assert isinstance(engine, SmallStaging)
        engine.num_allowed, engine.outcome = 0, TransferStatus.PENDING
        request, pages = new_request_id(), [instances.pages(each, 120) for each in (rank, sink)]
        receiver = receive(sink, request, pages[1], need=(0, 120))
        sender = send(rank, request, pages[0], 120)
        assert engine.limit_reached.wait(DEADLINE_S)
        receiver.abort("client gone")
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        released = threading.Event()
        event.lease.on_release(released.set)
        if pack_below:
            assert released.wait(DEADLINE_S)
        else:
            assert not released.wait(0.05), "one of its writes is pending"
        engine.outcome = TransferStatus.DONE
        assert released.wait(DEADLINE_S)
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        engine.num_allowed = 1 << 30
        assert all((tensor.view(np.uint8) == CANARY).all() for tensors in sink.pools.values() for tensor in tensors)
        assert all(event.ok for event in instances.transfer(61))
