"""Handshakes with reasons, hostile messages, restarts, and threads that die."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest
import zmq

from disagg import (
    ConfigError,
    KVManager,
    LocalProtocolError,
    ModelId,
    PeerUnreachable,
    RequestAborted,
    Topology,
    new_request_id,
)
from disagg.backends.base import Fence, RemotePeer
from disagg.backends.local import LocalBackend, LocalPeer
from disagg.core.leases import LeaseState
from disagg.protocol.types import Limits, RequestKey
from disagg.testing import reference
from disagg.testing.reference import KVModel, KVRank, PageList
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS, Side, cluster, introduce, receive, send, start_side

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")


def until(condition: Any) -> None:
    """Wait for something that is bound to happen."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def problem(manager: KVManager, peer: str = "prefill-0") -> str:
    """Why a peer is not ready, as far as the manager has got."""
    found = manager.health().peers.get(peer)
    return found.problem if found is not None else ""


def refusal(prefill: dict[str, Any], decode: dict[str, Any], models: tuple[KVModel, KVModel] = (MODEL, MODEL)) -> str:
    """Why two instances refuse each other."""
    ranks = []
    try:
        for name, settings, model in (("prefill-0", prefill, models[0]), ("decode-0", decode, models[1])):
            ranks.append(start_side(model, Side(), name, num_layers=settings.pop("num_layers", 2), settings=settings))
        introduce(*ranks)
        until(lambda: "at the peer" in problem(ranks[1][0].manager) or "at decode-0/0" in problem(ranks[1][0].manager))
        with pytest.raises(PeerUnreachable) as caught:
            ranks[1][0].manager.wait_ready("prefill-0", timeout_s=0.01)
        return str(caught.value)
    finally:
        for rank in ranks:
            rank[0].manager.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ({"model": ModelId("a")}, {"model": ModelId("b")}, "model: 'b' at decode-0/0, 'a' at prefill-0/0"),
        (
            {"model": ModelId("a", "1")},
            {"model": ModelId("a", "2")},
            "model revision: '2' at decode-0/0, '1' at prefill-0/0",
        ),
        ({"num_layers": 2}, {"num_layers": 3}, "component 'kv', tensor 'k': layers: [0, 2) here, [0, 3) at the peer"),
    ],
)
def test_a_mismatch_is_refused_with_the_field_both_values_and_both_peers(
    prefill: dict[str, Any], decode: dict[str, Any], message: str
) -> None:
    """Case 41: same geometry, other revision, among them."""
    assert message in refusal(dict(prefill), dict(decode))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="float32"),
            "tensor 'k': dtype: uint16 here, float32 at the peer",
        ),
        (KVModel(num_kv_heads=8, dims={"k": 8, "v": 6}, dtype="uint16"), "axis 'kv_head': global size: 4 here, 8 at the peer"),
        (KVModel(num_kv_heads=4, dims={"k": 8, "v": 8}, dtype="uint16"), "axis 'dim': global size: 6 here, 8 at the peer"),
    ],
)
def test_layouts_that_cannot_match_are_refused(other: KVModel, message: str) -> None:
    assert message in refusal({}, {}, (MODEL, other))


def test_an_unknown_peer_is_refused_by_name() -> None:
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2)
    decode = start_side(MODEL, Side(), "decode-7", num_layers=2)
    try:
        decode[0].manager.add_peer("prefill-0", address=prefill[0].manager.address)
        until(lambda: "not configured" in problem(decode[0].manager))
        assert "peer 'decode-7' is not configured at prefill-0/0" in problem(decode[0].manager)
    finally:
        prefill[0].manager.close()
        decode[0].manager.close()


def test_an_address_of_another_instance_is_refused() -> None:
    """Case 45: whoever answers must be who was asked for."""
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2)
    decode = start_side(MODEL, Side(), "decode-0", num_layers=2)
    try:
        prefill[0].manager.add_peer("decode-0", address=decode[0].manager.address)
        decode[0].manager.add_peer("prefill-1", address=prefill[0].manager.address)
        until(lambda: "answers as" in problem(decode[0].manager, "prefill-1"))
        assert "answers as prefill-0/0, expected prefill-1" in problem(decode[0].manager, "prefill-1")
    finally:
        prefill[0].manager.close()
        decode[0].manager.close()


HOSTILE = [
    b"",
    b"\xc1",
    b"\x91" * 100_000,
    b"\xdd\xff\xff\xff\xff",
    msgpack.packb({"type": "reserve"}),
    msgpack.packb({"type": "nonsense", "x": 1}),
    msgpack.packb({"type": "complete", "request_id": b"x" * 16, "attempt": 0, "nonce": 1, "written": []}),
    msgpack.packb({"type": "hello", "version": 99, "instance": "decode-0", "rank": 0}),
    np.random.default_rng(0).bytes(4096),
]


def test_garbage_on_the_control_port_changes_nothing_and_kills_no_thread() -> None:
    """Case 39, on the live port."""
    with cluster(Side(tp=2), Side()) as made:
        context = zmq.Context()
        for rank in made.prefill + made.decode:
            port = rank.manager.address.rpartition(":")[2]
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(rank.manager.address)
                for data in HOSTILE:
                    dealer.send(data)
                dealer.send_multipart([b"a", b"b", b"c"])
                answer = msgpack.unpackb(dealer.recv())
                assert answer["type"] == "reject"
                dealer.linger = 0
            with socket.create_connection(("127.0.0.1", int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        context.term()
        assert all(event.ok for event in made.transfer(20))


def test_a_restarted_peer_is_taken_back_at_another_address_without_others_restarting() -> None:
    """Case 40, in one process."""
    with cluster(Side(tp=2), Side()) as made:
        assert all(event.ok for event in made.transfer(20))
        old, side = made.decode[0], Side()
        old.manager.close()
        until(lambda: not any(rank.manager.health().peers["decode-0"].ready for rank in made.prefill))
        with pytest.raises(PeerUnreachable, match="peer 'decode-0' is not ready"):
            made.prefill[0].manager.sender(new_request_id(), peer="decode-0")
        made.decode = start_side(made.model, side, "decode-0", num_layers=3)
        introduce(made.prefill, made.decode)
        for rank in made.prefill:
            rank.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        made.decode[0].manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        assert all(event.ok for event in made.transfer(20))


def test_requests_of_a_peer_that_goes_away_end_with_the_cause() -> None:
    with cluster(Side(), Side()) as made:
        request = new_request_id()
        receiver = receive(made.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20))
        made.prefill[0].manager.close()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert "prefill-0/0 is gone: closed: the manager was closed" in str(event.error)
        assert event.lease.released, "the local engine proves a closed peer quiet"
        made.prefill.clear()


def test_a_thread_that_dies_flips_health_and_fails_what_it_owned() -> None:
    """Case 46."""
    for victim in ("control", "transfers"):
        with pytest.MonkeyPatch.context() as patch, cluster(Side(), Side()) as made:
            manager = made.decode[0].manager
            receiver = receive(made.decode[0], new_request_id(), PageList((0, 1, 2, 3, 4)), need=(0, 20))
            runtime = manager._runtime
            if victim == "control":
                runtime.command(lambda _: 1 / 0)  # type: ignore[arg-type]
            else:
                patch.setattr(runtime.worker, "_begin_new", lambda: 1 / 0)
                runtime.worker._alarm.set()
            event = receiver.wait(timeout_s=DEADLINE_S)
            assert "died: ZeroDivisionError" in str(event.error)
            assert not manager.health().ok
            assert not event.lease.released
            with pytest.raises(LocalProtocolError, match="the manager has ended"):
                manager.receiver(new_request_id(), peer="prefill-0", rows={})
            manager.close()
            made.decode.clear()


def test_close_ends_what_is_under_way_and_can_be_called_twice() -> None:
    with cluster(Side(), Side()) as made:
        receiver = receive(made.decode[0], new_request_id(), PageList((0, 1, 2, 3, 4)), need=(0, 20))
        made.decode[0].manager.close()
        made.decode[0].manager.close()
        assert isinstance(receiver.wait(timeout_s=DEADLINE_S).error, RequestAborted)
        assert made.decode[0].manager.events()
        made.decode.clear()


def test_drain_takes_nothing_new_and_waits_for_the_rest() -> None:
    with cluster(Side(), Side()) as made:
        request = new_request_id()
        receiver = receive(made.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20))
        manager = made.decode[0].manager
        assert not manager.drain(timeout_s=0.01)
        with pytest.raises(LocalProtocolError, match="draining"):
            receive(made.decode[0], new_request_id(), PageList((0, 1, 2, 3, 4)), need=(0, 20))
        send(made.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        assert manager.drain(timeout_s=DEADLINE_S)
        assert receiver.wait(timeout_s=0).ok


def manager(**settings: Any) -> KVManager:
    topology = settings.pop("topology", Topology())
    spec = KVRank(layers=(0,), page_size=4, num_pages=4, tp=topology.tp, tp_rank=topology.tp_rank)
    pools = reference.allocate(MODEL, spec)
    defaults: dict[str, Any] = {"name": "x", "model": ModelId("m"), "backend": "local", "connection_limits": FAST_LINKS}
    kv = Side().component(MODEL, topology, pools)
    return KVManager(topology=topology, components=[kv], **{**defaults, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "tcp://10.1.2.3:0"}, "can be reached from other hosts, so it needs keys"),
        ({"listen": "tcp://0.0.0.0:0", "insecure": True}, "is every interface; set advertise="),
        ({"listen": "ipc:///tmp/x"}, "expected tcp://host:port"),
        ({"listen": "127.0.0.1:7000"}, "expected tcp://host:port"),
        ({"backend": "carrier-pigeon"}, "backend: expected 'auto' or one of cma, local, mooncake, nixl"),
        ({"transport": "smoke"}, "transport: expected one of auto, rdma, tcp, shm, found 'smoke'"),
        ({"require": "auto"}, "require: expected 'rdma', 'tcp' or 'shm'"),
        ({"transport": "tcp", "require": "rdma"}, "require='rdma' contradicts transport='tcp'"),
        ({"topology": Topology(tp=2, tp_rank=1)}, "leader: rank 1 of 2 needs the address of rank 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manager(**settings)
    assert message in str(caught.value)


def test_a_port_that_is_taken_is_named() -> None:
    with manager() as first, pytest.raises(ConfigError, match=r"cannot bind 'tcp://127\.0\.0\.1:\d+': Address already in use"):
        manager(listen=first.address)


def test_adding_oneself_as_a_peer_is_refused() -> None:
    with manager() as made, pytest.raises(ConfigError, match="this instance's own name"):
        made.add_peer("x", address=made.address)


def test_a_handle_knows_its_request() -> None:
    with cluster(Side(), Side()) as made:
        request = new_request_id()
        receiver = receive(made.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20), attempt=3)
        assert (receiver.request_id, receiver.key) == (request, RequestKey(request, 3))
        with pytest.raises(TimeoutError, match=r"not ended within 0.01 s"):
            receiver.wait(timeout_s=0.01)
        receiver.abort("enough")


class Unfenced(LocalBackend):
    """The `local` engine, which never proves a peer quiet."""

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        return Fence.UNKNOWN


class NoProof(Unfenced):
    def is_quiet_when_closed(self) -> bool:
        return False


@pytest.mark.parametrize(("backend", "proved"), [(Unfenced, True), (NoProof, False)])
def test_the_last_resort_is_to_close_the_manager_whose_engines_end_is_a_proof(backend: Any, proved: bool) -> None:
    """Rows of a lost writer stay quarantined, `health` says when that is too many, and `close` gives them back."""
    settings = {"backend": backend, "limits": Limits(max_quarantined=0)}
    with cluster(Side(), Side(), settings=settings) as made:
        decode, prefill = made.decode[0].manager, made.prefill[0].manager
        freed: list[int] = []
        receiver = receive(made.decode[0], new_request_id(), made.pages(made.decode[0], 8), need=(0, 8))
        assert decode.health().renewal_due == ""
        prefill.close()
        event = receiver.wait(timeout_s=DEADLINE_S)
        event.lease.on_release(lambda: freed.append(1))
        assert event.lease.state is LeaseState.QUARANTINED
        assert decode.health().renewal_due == "requests with quarantined rows: 1, of 0 at most"
        made.prefill.clear()
        made.decode.clear()
        decode.close()
        assert (bool(freed), event.lease.released) == (proved, proved)


class Stalling(LocalBackend):
    """The `local` engine, which does not come to an end of connecting to some of its peers before it is told to."""

    stalled: ClassVar[set[Any]] = set()
    begun, go_on = threading.Event(), threading.Event()

    def connect(self, endpoint: bytes, *, epoch: int) -> LocalPeer:
        peer = super().connect(endpoint, epoch=epoch)
        if peer.target in self.stalled:
            self.begun.set()
            assert self.go_on.wait(DEADLINE_S)
        return peer


def test_a_peer_that_does_not_answer_the_engine_holds_up_nobody_else() -> None:
    settings = {"backend": Stalling, "limits": FAST, "connection_limits": FAST_LINKS}
    with cluster(Side(), Side(page=8), settings=settings) as made:
        (slow,) = start_side(made.model, Side(), "slow-0", num_layers=3, settings=settings)
        Stalling.stalled.add(slow.manager.backend)
        manager = made.prefill[0].manager
        with slow.manager:
            slow.manager.add_peer("prefill-0", address=manager.address)
            manager.add_peer("slow-0", address=slow.manager.address)
            assert Stalling.begun.wait(DEADLINE_S)
            assert all(event.ok for event in made.transfer(20))
            assert not manager.health().peers["slow-0"].ready
            Stalling.go_on.set()
            manager.wait_ready("slow-0", timeout_s=DEADLINE_S)
            assert all(event.ok for event in made.transfer(20))
