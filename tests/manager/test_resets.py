"""Connections that break. Control connections: libzmq connects again, and no request notices. The engine's: both ranks connect
anew, although each still has the other's messages.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from disagg import PeerUnreachable
from disagg.backends.base import BackendOptions, RemotePeer, StagingShape, TransferStatus
from disagg.backends.local import LocalBackend
from disagg.core.copies import CopyBatch
from disagg.protocol import peers
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.testing.reference import KVModel
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster, start_side
from tests.support.inside import num_losses
from tests.support.tcp_proxy import proxies

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")
SETTINGS = {"connection_limits": ConnectionLimits(heartbeat_s=30.0, heartbeat_timeout_s=60.0)}
"""No rank says hello by itself while a test runs."""


@pytest.mark.parametrize("cut", ["both", "to decode", "to prefill"])
def test_a_reset_costs_no_peer_and_no_request(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CLOSED_GRACE_S", DEADLINE_S)  # a busy machine may take longer than a peer has
    instances = Cluster(MODEL)
    try:
        instances.prefill = start_side(MODEL, Side(tp=2), "prefill-0", num_layers=2, settings=SETTINGS)
        instances.decode = start_side(MODEL, Side(page=8), "decode-0", num_layers=2, settings=SETTINGS)
        prefill, decode = instances.prefill[0].manager, instances.decode[0].manager
        with proxies(prefill.address, decode.address) as (to_prefill, to_decode):
            for rank in instances.prefill:
                rank.manager.add_peer("decode-0", address=to_decode.address)
            decode.add_peer("prefill-0", address=to_prefill.address)
            for rank in instances.prefill:
                rank.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
            decode.wait_ready("prefill-0", timeout_s=DEADLINE_S)
            broken = {"both": [to_prefill, to_decode], "to decode": [to_decode], "to prefill": [to_prefill]}[cut]
            for _ in range(5):
                assert all(event.ok for event in instances.transfer(37))
                before = [proxy.num_accepted for proxy in broken]
                assert all(proxy.reset() for proxy in broken)
                assert all(event.ok for event in instances.transfer(37))
                until(lambda before=before: all(p.num_accepted > b for p, b in zip(broken, before, strict=True)))
        for rank in instances.prefill + instances.decode:
            assert num_losses(rank.manager) == {}
    finally:
        for rank in instances.prefill + instances.decode:
            rank.manager.close()


class Breaking(LocalBackend):
    """An engine whose connections can break for good."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.broken = list[RemotePeer]()

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Any:
        if any(peer is each for each in self.broken):
            raise PeerUnreachable("the connection broke")
        return super().submit(peer, copies)


@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_connection_of_the_engine_is_made_anew(*, packed: bool) -> None:
    settings = {"backend": Breaking, "pack_below": 1 << 20 if packed else 0}
    with cluster(Side(tp=2), Side(page=8), settings=settings) as instances:
        assert all(event.ok for event in instances.transfer(37))
        sender, receiver = instances.prefill[0].manager, instances.decode[0].manager
        engine, peer = sender.engine("decode-0", 0)
        assert isinstance(engine, Breaking)
        engine.broken.append(peer)
        failed = instances.transfer(37)
        assert any("the connection broke" in str(event.error) for event in failed)
        until(lambda: all(event.lease.released for event in failed))
        for manager, name in ((sender, "decode-0"), (receiver, "prefill-0")):
            until(lambda manager=manager: manager.health().ok and sum(num_losses(manager).values()) == 1)
            manager.wait_ready(name, timeout_s=DEADLINE_S)
        assert sender.engine("decode-0", 0)[1] is not peer
        assert all(event.ok for event in instances.transfer(37))
        assert sum(num_losses(sender).values()) == 1


class Losing(Breaking):
    """An engine that can lose all that it has under way, once that fills a window. Nobody knows whether it still arrives."""

    loses = False
    num_posted = 0

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 20, slot_nbytes=1000, window=4, num_lent=10, address_space=4)

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Any:
        if not self.loses:
            return super().submit(peer, copies)
        self.num_posted += 1
        return SimpleNamespace(poll=self._poll, error="the connection broke")

    def _poll(self) -> TransferStatus:
        return TransferStatus.PENDING if self.num_posted < self.staging.window else TransferStatus.UNSETTLED


@pytest.mark.parametrize("takes_more", [False, True])
def test_slots_of_writes_that_never_settle_are_replaced(*, takes_more: bool) -> None:
    """They were all that this writer may have. Whether or not the engine takes more writes by that connection."""
    with cluster(Side(), Side(), settings={"backend": Losing}) as instances:
        assert all(event.ok for event in instances.transfer(96))
        sender, receiver = instances.prefill[0].manager, instances.decode[0].manager
        engine, peer = sender.engine("decode-0", 0)
        assert isinstance(engine, Losing)
        engine.loses = True
        failed = instances.transfer(96)
        engine.loses = False
        assert engine.num_posted == engine.staging.window
        assert any("the connection broke" in str(event.error) for event in failed)
        if not takes_more:
            engine.broken.append(peer)
        for manager, name in ((sender, "decode-0"), (receiver, "prefill-0")):
            until(lambda manager=manager: manager.health().ok and sum(num_losses(manager).values()) == 1)
            manager.wait_ready(name, timeout_s=DEADLINE_S)
        assert all(event.ok for event in instances.transfer(96))
