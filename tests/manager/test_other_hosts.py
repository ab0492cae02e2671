"""Peers whose process the kernel does not attest, as of other hosts: they write slots only, and rows wait for no proof."""

from __future__ import annotations

import time
from typing import Any

import pytest

from disagg import new_request_id
from disagg.backends.base import Fence, RemotePeer, StagingShape
from disagg.backends.local import LocalBackend
from disagg.core.leases import LeaseState
from disagg.runtime.peer_processes import PeerProcesses
from tests.support.cluster import DEADLINE_S, Side, cluster, receive


class Unprovable(LocalBackend):
    """The `local` engine, which packs no piece that may go directly, and proves nothing."""

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1, slot_nbytes=1000, window=4, num_lent=8, address_space=4)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        return Fence.UNKNOWN


def until(condition: Any) -> None:
    """Wait until a condition holds; fail after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def nobody_is_attested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerProcesses, "attest", lambda *_: None)


@pytest.mark.parametrize("direct", [False, True])
def test_every_piece_travels_in_slots_unless_rows_may_be_written(direct: bool) -> None:
    settings: dict[str, Any] = {"backend": Unprovable, "direct_between_hosts": direct}
    with cluster(Side(tp=2), Side(page=8), settings=settings) as instances:
        for _ in range(3):
            assert all(event.ok for event in instances.transfer(37))
        ways = [rank.manager._runtime.stats.nbytes_by_way for rank in instances.prefill]
    assert all(bool(way["direct"]) is direct and bool(way["packed"]) is not direct for way in ways)


@pytest.mark.parametrize("direct", [False, True])
def test_rows_of_a_lost_writer_are_free_at_once_unless_it_may_write_them(direct: bool) -> None:
    settings: dict[str, Any] = {"backend": Unprovable, "direct_between_hosts": direct}
    with cluster(Side(), Side(), settings=settings) as instances:
        decode = instances.decode[0]
        receiver = receive(decode, new_request_id(), instances.pages(decode, 8), need=(0, 8))
        until(lambda: receiver.session is not None)
        instances.prefill[0].manager.close()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert not event.ok
        if direct:
            assert event.lease.state is LeaseState.QUARANTINED
        else:
            until(lambda: event.lease.released)
            assert decode.manager.health().quarantined == {}
        instances.prefill.clear()


def test_slots_of_lost_writers_are_replaced() -> None:
    """Each of more writers than there are slots ends while it holds some."""
    with cluster(Side(), Side(), settings={"backend": Unprovable}) as instances:
        decode = instances.decode[0]
        lender = decode.manager._runtime.sessions.lender
        receiver = receive(decode, new_request_id(), instances.pages(decode, 8), need=(0, 8))
        until(lambda: lender.num_lent > 0)
        instances.prefill[0].manager.close()
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        until(lambda: lender.num_lent == 0)
        assert lender.num_lost == 0
        instances.prefill.clear()
