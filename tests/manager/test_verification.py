"""The setting `verify`: managers compare checksums, and a wrong byte fails the request on both sides."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import pytest

from disagg import ConfigError, KVManager, ModelId, Pages, VerificationFailed, new_request_id
from disagg.backends.base import RemotePeer
from disagg.backends.local import LocalBackend, LocalTransfer
from disagg.core.copies import CopyBatch
from disagg.core.topology import Topology
from disagg.protocol.types import Event
from disagg.state import paged
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

HND = "page kv_head token dim"


class Damaging(LocalBackend):
    """The `local` engine, which flips a bit in the last destination byte of every batch."""

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> LocalTransfer:
        transfer = super().submit(peer, copies)
        if len(copies):
            last = ctypes.c_uint8.from_address(int(copies.destination[-1] + copies.nbytes[-1]) - 1)
            last.value ^= 4
        return transfer


@pytest.mark.parametrize("pack_below", [0, 1 << 20])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Side(tp=4), Side(tp=2, page=8, axes=HND)),
        (Side(tp=2, stages=((0, 2), (1,))), Side(tp=3)),
        (Side(tp=8), Side(tp=1, cp=2)),
    ],
)
def test_correct_transfers_pass_verification(prefill: Side, decode: Side, pack_below: int) -> None:
    settings = {"verify": "full", "pack_below": pack_below}
    with cluster(prefill, decode, settings=settings) as instances:
        for tokens, options in ((23, {}), (40, {"chunks": (4, 20)}), (30, {"first_token": 9})):
            events = instances.transfer(tokens, **options)
            assert all(event.ok for event in events), [event.error for event in events]
        for rank in instances.decode:
            assert (rank.manager.stats.verified, rank.manager.stats.mismatches) == (3, 0)


@pytest.mark.parametrize("pack_below", [0, 1 << 20])
def test_a_damaged_byte_fails_the_request_on_both_sides_and_is_counted(pack_below: int) -> None:
    settings = {"verify": "full", "backend": Damaging, "pack_below": pack_below}
    with cluster(Side(tp=2), Side(tp=1), settings=settings) as instances:
        events = instances.transfer(24)
        assert [event.ok for event in events] == [False] * 3
        assert {event.direction for event in events} == {"receive", "send"}
        received = next(event for event in events if event.direction == "receive")
        assert isinstance(received.error, VerificationFailed)
        for event in events:
            assert "component 'kv', layer 2" in str(event.error)
            assert "page 5 of the request, tokens 20 to 24" in str(event.error)
            assert event.lease.released
        stats = instances.decode[0].manager.stats
        assert (stats.verified, stats.mismatches) == (1, 1)


def test_without_verification_a_damaged_byte_goes_undetected() -> None:
    with cluster(Side(tp=2), Side(tp=1), settings={"backend": Damaging}) as instances:
        pages = [instances.pages(rank, 24) for rank in instances.prefill + instances.decode]
        request = new_request_id()
        handles: list[Any] = [send(rank, request, p, 24) for rank, p in zip(instances.prefill, pages, strict=False)]
        handles.append(receive(instances.decode[0], request, pages[-1], need=(0, 24)))
        events: list[Event] = [handle.wait(timeout_s=DEADLINE_S) for handle in handles]
        assert all(event.ok for event in events)


def test_the_receivers_setting_makes_its_writers_send_checksums() -> None:
    with cluster(Side(tp=1), Side(tp=1)) as instances:
        rank = instances.decode[0]
        rank.manager._verify = "full"
        assert all(event.ok for event in instances.transfer(9))
        assert (rank.manager.stats.verified, instances.prefill[0].manager.stats.verified) == (1, 0)


def test_an_unknown_verify_setting_is_refused() -> None:
    pool = np.zeros((4, 4, 2, 8), dtype=np.uint16)
    topology = Topology()
    kv = paged.gqa({0: (pool, pool.copy())}, axes="page token kv_head dim", num_kv_heads=2, topology=topology)
    wrong: Any = "some"
    with pytest.raises(ConfigError, match="verify: expected one of off, full, found 'some'"):
        KVManager(name="d", topology=topology, components=[kv], model=ModelId("m"), backend="local", verify=wrong)


def test_rows_of_both_sides_may_be_reused_after_success() -> None:
    with cluster(Side(tp=2), Side(tp=1), settings={"verify": "full"}) as instances:
        request = new_request_id()
        pages = [instances.pages(rank, 8) for rank in (*instances.prefill, *instances.decode)]
        receiver = receive(instances.decode[0], request, pages[-1], need=(0, 8))
        senders = [send(rank, request, listed, 8) for rank, listed in zip(instances.prefill, pages, strict=False)]
        for handle in (receiver, *senders):
            event = handle.wait(timeout_s=DEADLINE_S)
            assert event.ok
            assert event.lease.released


class NeverReady:
    """A ready event that never completes."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the manager must not block on a ready event")


def test_a_chunk_that_never_becomes_ready_does_not_delay_other_checksums() -> None:
    with cluster(Side(tp=1), Side(tp=1), settings={"verify": "full"}) as instances:
        stuck = new_request_id()
        pages = instances.pages(instances.prefill[0], 8)
        waiting = receive(instances.decode[0], stuck, instances.pages(instances.decode[0], 8), need=(0, 8))
        sender = instances.prefill[0].manager.sender(stuck, peer="decode-0", deadline_s=DEADLINE_S)
        sender.send({"kv": Pages(np.array(pages.ids, dtype=np.int32))}, tokens=(0, 8), ready=NeverReady())
        assert all(event.ok for event in instances.transfer(24))
        sender.abort("client gone")
        assert not waiting.wait(timeout_s=DEADLINE_S).ok


def test_a_manager_keeps_references_to_its_arrays() -> None:
    pool = np.zeros((4, 4, 2, 8), dtype=np.uint16)
    gone = weakref.ref(pool)
    topology = Topology()
    kv = paged.gqa({0: (pool, pool.copy())}, axes="page token kv_head dim", num_kv_heads=2, topology=topology)
    manager = KVManager(name="d", topology=topology, components=[kv], model=ModelId("m"), backend="local")
    del pool, kv
    assert gone() is not None
    manager.close()
