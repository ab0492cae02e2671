"""Packed requests under faults: silent peers, wrong or lost messages, and aborts while rows are unpacked."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from disagg import new_request_id
from disagg.backends.base import Backend, RemotePeer, StagingShape, TransferStatus
from disagg.backends.local import LocalBackend, LocalPeer, LocalTransfer
from disagg.core.copies import CopyBatch
from disagg.protocol.loans import Lender
from disagg.protocol.messages import Filled, Part
from disagg.protocol.types import PeerRank
from disagg.testing.faults import MessageFaults, mistreat
from disagg.testing.reference import PageList
from disagg.transfer import unpacking
from disagg.transfer.jobs import Unpack
from disagg.transfer.staging import LentSlots
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, clear, cluster, receive, send
from tests.support.inside import skip_loans


class Stuck(LocalTransfer):
    """A write that does not settle."""

    status = TransferStatus.PENDING

    def poll(self) -> TransferStatus:
        return self.status


class HalfStuck(LocalBackend):
    """The `local` engine with two staging buffers; its writes to some peers do not settle."""

    stuck: ClassVar[set[Backend]] = set()
    spares = 8

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 20, slot_nbytes=1000, window=2, num_lent=8, spares=self.spares)

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Any:
        assert isinstance(peer, LocalPeer)
        return Stuck() if peer.target in self.stuck else super().submit(peer, copies)


def test_pending_writes_to_one_peer_do_not_block_other_peers() -> None:
    with cluster(Side(tp=1), Side(tp=2), settings={"backend": HalfStuck}) as instances:
        blocked, live = instances.decode
        HalfStuck.stuck.add(blocked.manager.backend)
        request, pages = new_request_id(), [instances.pages(rank, 96) for rank in (*instances.prefill, blocked, live)]
        unserved = receive(blocked, request, pages[1], need=(0, 96), deadline_s=2.0)
        served = receive(live, request, pages[2], need=(0, 96))
        send(instances.prefill[0], request, pages[0], 96)
        assert served.wait(timeout_s=DEADLINE_S).ok
        assert not unserved.wait(timeout_s=DEADLINE_S).ok
        HalfStuck.stuck.clear()


@pytest.mark.parametrize("status", [TransferStatus.PENDING, TransferStatus.UNSETTLED])
def test_peers_whose_writes_never_settle_keep_no_staging_buffer_and_no_rows(
    monkeypatch: pytest.MonkeyPatch, status: TransferStatus
) -> None:
    """As of ranks on other hosts that are killed or stopped: there is no proof of their end, and more than one ends so."""
    monkeypatch.setattr(Stuck, "status", status)
    monkeypatch.setattr(HalfStuck, "spares", 0)
    with cluster(Side(tp=1), Side(tp=2), settings={"backend": HalfStuck}) as instances:
        (prefill,), (dead, live) = instances.prefill, instances.decode
        monkeypatch.setattr(HalfStuck, "stuck", {dead.manager.backend})
        for _ in range(2):
            request, pages = new_request_id(), [instances.pages(rank, 96) for rank in (prefill, dead, live)]
            given_up = receive(dead, request, pages[1], need=(0, 96), deadline_s=1.0)
            served = receive(live, request, pages[2], need=(0, 96))
            sent = send(prefill, request, pages[0], 96)
            assert not given_up.wait(timeout_s=DEADLINE_S).ok
            assert served.wait(timeout_s=DEADLINE_S).ok
            lease = sent.wait(timeout_s=DEADLINE_S).lease
            until(lambda lease=lease: lease.released)


ALL_PACKED: dict[str, Any] = {"pack_below": 1 << 20}


@pytest.mark.parametrize(
    ("falsify", "message"),
    [
        (lambda f: Filled(f.loan, f.chunk, f.parts, f.offset + 10**6, f.nbytes), "packed stream of"),
        (lambda f: Filled(f.loan, f.chunk, (Part("ssm", (0,), None, 0, 1),), 0, 1), "component 'ssm'"),
        (lambda f: Filled(f.loan, f.chunk, (Part("kv", (77,), None, 0, 20),), 0, 1), "span classes (77,)"),
    ],
)
def test_an_invalid_filled_slot_fails_its_request_and_stops_no_thread(
    monkeypatch: pytest.MonkeyPatch, falsify: Callable[[Filled], Filled], message: str
) -> None:
    with cluster(Side(tp=2), Side(page=8), settings=ALL_PACKED) as instances:
        on_filled = Lender.on_filled

        def on_falsified(self: Lender, peer: PeerRank, found: Filled, begin: Callable[[], Any]) -> None:
            on_filled(self, peer, falsify(found), begin)

        monkeypatch.setattr(Lender, "on_filled", on_falsified)
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in instances.prefill]
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert message in str(event.error)
        assert all(not sender.wait(timeout_s=DEADLINE_S).ok for sender in senders)
        monkeypatch.undo()
        clear(instances.decode[0].pools)
        assert all(event.ok for event in instances.transfer(20))


@pytest.mark.parametrize("backend", ["cma", "local", "nixl"])
def test_every_byte_moves_before_and_after_the_end_of_32_bits(backend: str) -> None:
    """Loans of slots are numbered; each number is used once."""
    with cluster(Side(tp=2), Side(page=8), settings={**ALL_PACKED, "backend": backend}) as instances:
        (decode,) = instances.decode
        for _ in range(2):
            skip_loans(decode.manager, (1 << 32) - 5)
            for _ in range(10):
                assert all(event.ok for event in instances.transfer(37))


@pytest.mark.parametrize("lost", ["slots_filled", "complete", "lend", "borrow"])
def test_requests_complete_although_slot_messages_are_lost(lost: str) -> None:
    """The first three messages of a kind are dropped; no data is lost or unpacked twice."""
    with cluster(Side(tp=2), Side(page=8), settings=ALL_PACKED) as instances:
        faults = MessageFaults(lose=1.0, kinds=frozenset((lost,)), at_most=3)
        channels = [mistreat(rank.manager, faults) for rank in instances.prefill + instances.decode]
        for _ in range(3):
            assert all(event.ok for event in instances.transfer(37))
        assert sum(channel.counts["lose"] for channel in channels) >= 3


def test_a_loan_of_a_slot_that_is_not_the_peers_ends_the_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides end what they have with each other, and connect anew."""
    with cluster(Side(), Side(page=8), settings=ALL_PACKED) as instances:
        with monkeypatch.context() as patch:
            addresses = itertools.count(8, 8)
            patch.setattr(LentSlots, "take", lambda _: next(addresses))
            events = instances.transfer(20)
        assert any("is in no region that the peer has registered" in str(event.error) for event in events)
        assert not any(event.ok for event in events)
        for rank, peer in ((instances.prefill[0], "decode-0"), (instances.decode[0], "prefill-0")):
            rank.manager.wait_ready(peer, timeout_s=DEADLINE_S)
            assert rank.manager.health().ok


def test_rows_are_not_released_while_the_receiver_unpacks_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(Side(tp=2), Side(page=8), settings=ALL_PACKED) as instances:
        entered, go_on = threading.Event(), threading.Event()
        scatter = unpacking.scatter
        scatter_thread = instances.decode[0].manager._runtime.worker.thread

        def slow(unpack: Unpack) -> None:
            if threading.current_thread() is scatter_thread:
                entered.set()
                assert go_on.wait(DEADLINE_S)
            scatter(unpack)

        monkeypatch.setattr(unpacking, "scatter", slow)
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
        senders = [send(rank, request, PageList((0, 1, 2, 3, 4)), 20) for rank in instances.prefill]
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
