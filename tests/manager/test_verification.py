"""`verify=`: managers sum what they send and receive, and a wrong byte fails the request on both sides, by its name."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import pytest

from disagg import ConfigError, KVManager, ModelId, Pages, VerificationFailed, new_request_id
from disagg.backends.base import Op, RemotePeer
from disagg.backends.local import LocalBackend, LocalTransfer
from disagg.core.copies import CopyBatch
from disagg.core.topology import Topology
from disagg.protocol.types import Event
from disagg.state import paged
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

HND = "page kv_head token dim"


class Damaging(LocalBackend):
    """Changes a bit of every batch's last byte, at its destination."""

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> LocalTransfer:
        transfer = super().submit(op, peer, copies)
        if len(copies):
            last = ctypes.c_uint8.from_address(int(copies.destination[-1] + copies.nbytes[-1]) - 1)
            last.value ^= 4
        return transfer


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("pack_below", [0, 1 << 20])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Side(tp=4), Side(tp=2, page=8, axes=HND)),
        (Side(tp=2, stages=((0, 2), (1,))), Side(tp=3)),
        (Side(tp=8), Side(tp=1, cp=2)),
    ],
)
def test_right_bytes_pass(prefill: Side, decode: Side, pack_below: int, verify: str) -> None:
    settings = {"verify": verify, "pack_below": pack_below}
    with cluster(prefill, decode, settings=settings) as made:
        for tokens, more in ((23, {}), (40, {"chunks": (4, 20)}), (30, {"first_token": 9})):
            events = made.transfer(tokens, **more)
            assert all(event.ok for event in events), [event.error for event in events]
        for rank in made.decode:
            assert (rank.manager.stats.verified, rank.manager.stats.mismatches) == (3, 0)


@pytest.mark.parametrize("pack_below", [0, 1 << 20])
def test_a_damaged_byte_fails_the_request_on_both_sides_and_is_counted(pack_below: int) -> None:
    settings = {"verify": "full", "backend": Damaging, "pack_below": pack_below}
    with cluster(Side(tp=2), Side(tp=1), settings=settings) as made:
        events = made.transfer(24)
        assert [event.ok for event in events] == [False] * 3
        assert {event.direction for event in events} == {"receive", "send"}
        received = next(event for event in events if event.direction == "receive")
        assert isinstance(received.error, VerificationFailed)
        for event in events:
            assert "component 'kv', layer 2" in str(event.error)
            assert "page 5 of the request, tokens 20 to 24" in str(event.error)
            assert event.lease.released
        stats = made.decode[0].manager.stats
        assert (stats.verified, stats.mismatches) == (1, 1)


def test_without_it_the_same_damage_goes_unseen() -> None:
    with cluster(Side(tp=2), Side(tp=1), settings={"backend": Damaging}) as made:
        pages = [made.pages(rank, 24) for rank in made.prefill + made.decode]
        request = new_request_id()
        handles: list[Any] = [send(rank, request, p, 24) for rank, p in zip(made.prefill, pages, strict=False)]
        handles.append(receive(made.decode[0], request, pages[-1], need=(0, 24)))
        events: list[Event] = [handle.wait(timeout_s=DEADLINE_S) for handle in handles]
        assert all(event.ok for event in events)


def test_the_receiver_says_whether_its_writers_sum() -> None:
    with cluster(Side(tp=1), Side(tp=1)) as made:
        rank = made.decode[0]
        rank.manager._verify = "full"
        assert all(event.ok for event in made.transfer(9))
        assert (rank.manager.stats.verified, made.prefill[0].manager.stats.verified) == (1, 0)


def test_what_is_no_such_setting_is_refused() -> None:
    pool = np.zeros((4, 4, 2, 8), dtype=np.uint16)
    topology = Topology()
    kv = paged.gqa({0: (pool, pool.copy())}, axes="page token kv_head dim", num_kv_heads=2, topology=topology)
    wrong: Any = "some"
    with pytest.raises(ConfigError, match="verify: expected one of off, sample, full, found 'some'"):
        KVManager(name="d", topology=topology, components=[kv], model=ModelId("m"), backend="local", verify=wrong)


def test_rows_of_both_sides_may_be_reused_after_success() -> None:
    with cluster(Side(tp=2), Side(tp=1), settings={"verify": "full"}) as made:
        request = new_request_id()
        pages = [made.pages(rank, 8) for rank in (*made.prefill, *made.decode)]
        receiver = receive(made.decode[0], request, pages[-1], need=(0, 8))
        senders = [send(rank, request, listed, 8) for rank, listed in zip(made.prefill, pages, strict=False)]
        for handle in (receiver, *senders):
            event = handle.wait(timeout_s=DEADLINE_S)
            assert event.ok
            assert event.lease.released


class Never:
    """An event that does not pass."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for it")


def test_a_chunk_whose_event_does_not_pass_holds_up_no_others_sums() -> None:
    with cluster(Side(tp=1), Side(tp=1), settings={"verify": "full"}) as made:
        stuck = new_request_id()
        pages = made.pages(made.prefill[0], 8)
        waiting = receive(made.decode[0], stuck, made.pages(made.decode[0], 8), need=(0, 8))
        sender = made.prefill[0].manager.sender(stuck, peer="decode-0", deadline_s=DEADLINE_S)
        sender.send({"kv": Pages(np.array(pages.ids, dtype=np.int32))}, tokens=(0, 8), ready=Never())
        assert all(event.ok for event in made.transfer(24))
        sender.abort("client gone")
        assert not waiting.wait(timeout_s=DEADLINE_S).ok


def test_a_manager_keeps_the_arrays_that_it_was_given() -> None:
    pool = np.zeros((4, 4, 2, 8), dtype=np.uint16)
    gone = weakref.ref(pool)
    topology = Topology()
    kv = paged.gqa({0: (pool, pool.copy())}, axes="page token kv_head dim", num_kv_heads=2, topology=topology)
    manager = KVManager(name="d", topology=topology, components=[kv], model=ModelId("m"), backend="local")
    del pool, kv
    assert gone() is not None
    manager.close()
