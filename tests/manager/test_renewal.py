"""An engine whose staging slots are lost to peers of other hosts is started again, and the manager goes on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import ClassVar

import pytest

from disagg import new_request_id
from disagg.backends.abilities import Renewable
from disagg.backends.base import RemotePeer, StagingShape, TransferStatus
from disagg.backends.nixl.backend import NixlBackend
from disagg.backends.nixl.requests import NixlTransfer
from disagg.core.copies import CopyBatch
from disagg.protocol.types import PeerRank
from disagg.runtime.connections import RENEW_AGAIN_S
from disagg.runtime.peer_processes import PeerProcesses
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster, introduce, receive, send, start_side

pytest.importorskip("nixl._bindings")

PREFILL = PeerRank("prefill-0", 0)


class Pinned(NixlBackend):
    """As over verbs: no other address can replace the one slot that there is to lend."""

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 20, slot_nbytes=4096, window=1, num_lent=1, spares=1, at_once=1)


@pytest.fixture(autouse=True)
def everybody_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = itertools.count(1)
    monkeypatch.setattr(PeerProcesses, "attest", lambda *_: None)
    monkeypatch.setattr("disagg.backends.nixl.backend.machine_identity", lambda: f"machine {next(machines)}")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def replace_prefill(instances: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill ends while it holds the slot, and another one starts."""
    runtime = instances.decode[0].manager._runtime
    lender = runtime.sessions.lender
    monkeypatch.setattr(instances.prefill[0].manager._runtime.sessions.borrower, "give_back", lambda *_, **__: None)
    runtime.command(lambda _: lender.ahead(PREFILL))
    until(lambda: lender.num_lent == 1)
    before = runtime.connections.num_renewals
    instances.prefill[0].manager.close()
    until(lambda: runtime.connections.num_renewals > before)
    until(lambda: lender.num_lost == 0)
    instances.prefill = start_side(instances.model, Side(), "prefill-0", num_layers=3, settings={"backend": Pinned})
    introduce(instances.prefill, instances.decode)


def test_a_rank_whose_slots_are_lost_serves_the_next_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(Side(), Side(page=8), settings={"backend": Pinned}) as instances:
        decode = instances.decode[0].manager
        for number in range(1, 4):
            assert all(event.ok for event in instances.transfer(61))
            assert decode._runtime.connections.num_renewals == number - 1
            replace_prefill(instances, monkeypatch)
            until(lambda: decode._runtime.connections._renew_again_s == RENEW_AGAIN_S)  # it has seen that this helped
        assert all(event.ok for event in instances.transfer(61))
        assert decode._runtime.sessions.lender.num_lost == 0


class Silent(NixlBackend):
    """Nothing that it writes ends before the engine does, once its peer is stopped."""

    peer_is_stopped: ClassVar[bool] = False

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> NixlTransfer:
        transfer = super().submit(peer, copies)
        if self.peer_is_stopped:
            transfer.status = TransferStatus.PENDING
        return transfer

    def advance(self, transfer: NixlTransfer) -> None:
        if not self.peer_is_stopped or transfer.peer.requests.are_closed:
            super().advance(transfer)


def test_rows_that_the_former_engine_read_are_free_though_the_peer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(Side(), Side(page=8), settings={"backend": Silent, "pack_below": 0}) as instances:
        (prefill,), (decode,) = instances.prefill, instances.decode
        runtime, request = prefill.manager._runtime, new_request_id()
        engine = runtime.backend
        assert isinstance(engine, Renewable)
        monkeypatch.setattr(Silent, "peer_is_stopped", True)
        receive(decode, request, instances.pages(decode, 20), need=(0, 20))
        sender = send(prefill, request, instances.pages(prefill, 20), 20)
        until(lambda: runtime.worker.depth == 1)
        runtime.command(lambda now: runtime.connections.renew(engine, now))
        event = sender.wait(timeout_s=DEADLINE_S)
        assert "started its engine again" in str(event.error)
        until(lambda: event.lease.released)
        until(lambda: runtime.worker.depth == 0)
        monkeypatch.setattr(Silent, "peer_is_stopped", False)


def test_a_peer_that_lives_connects_to_the_renewed_engine() -> None:
    with cluster(Side(), Side(page=8), settings={"backend": Pinned}) as instances:
        sides = ((instances.decode[0], "prefill-0"), (instances.prefill[0], "decode-0"))
        assert all(event.ok for event in instances.transfer(61))
        for rank in (instances.decode[0], instances.prefill[0], instances.decode[0]):
            runtime = rank.manager._runtime
            now = time.monotonic()
            before = runtime.connections.num_renewals
            runtime.command(lambda _, runtime=runtime, now=now: runtime.connections.renew(runtime.backend, now))  # type: ignore[misc]
            until(lambda runtime=runtime, before=before: runtime.connections.num_renewals > before)  # type: ignore[misc]
            instances.transfer(61)  # the connection may end during it
            until(lambda: all(one.manager.peer(name).state == "ready" for one, name in sides))
            assert all(event.ok for event in instances.transfer(61))
