"""Handshakes and their rejections, invalid messages, restarts, and failed threads."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import msgspec
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
from disagg.backends.auto import AutoBackend, AutoPeer
from disagg.backends.base import Fence, RemotePeer
from disagg.backends.local import LocalBackend, LocalPeer
from disagg.core.leases import LeaseState
from disagg.machine.descriptors import NEEDED, shortage
from disagg.machine.processes import ProcessWatch
from disagg.machine.tcp import listening_sockets
from disagg.protocol.types import Event, Limits, PeerRank, RequestKey
from disagg.runtime.lifetime import Lifetime
from disagg.testing import reference
from disagg.testing.reference import KVModel, KVRank, PageList
from tests.manager.conftest import untouched
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS, Side, clear, cluster, introduce, receive, send, start_side

MODEL = KVModel(num_kv_heads=4, dims={"k": 8, "v": 6}, dtype="uint16")


def until(condition: Any) -> None:
    """Wait until a condition holds; fail after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def problem(manager: KVManager, peer: str = "prefill-0") -> str:
    """The manager's present reason why a peer is not ready, or ''."""
    found = manager.health().peers.get(peer)
    return found.problem if found is not None else ""


def refusal(prefill: dict[str, Any], decode: dict[str, Any], models: tuple[KVModel, KVModel] = (MODEL, MODEL)) -> str:
    """Connect two instances that must refuse each other, and return decode's reason."""
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
        (
            {"model": ModelId("a", "window=64 rope=yarn size=1")},
            {"model": ModelId("a", "window=none size=1 rope=yarn more")},
            "model revision: 'window=none more' at decode-0/0, 'window=64' at prefill-0/0",
        ),
        (
            {"model": ModelId("a", "x y")},
            {"model": ModelId("a", "y x")},
            "model revision: 'y x' at decode-0/0, 'x y' at prefill-0",
        ),
        ({"num_layers": 2}, {"num_layers": 3}, "component 'kv', tensor 'k': layers: [0, 2) here, [0, 3) at the peer"),
    ],
)
def test_the_reason_of_a_mismatch_names_the_field_both_values_and_both_peers(
    prefill: dict[str, Any], decode: dict[str, Any], message: str
) -> None:
    """Case 41, which includes equal layouts of different model revisions."""
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


def test_an_unconfigured_peer_is_refused_by_name() -> None:
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2)
    decode = start_side(MODEL, Side(), "decode-7", num_layers=2)
    try:
        decode[0].manager.add_peer("prefill-0", address=prefill[0].manager.address)
        until(lambda: "not configured" in problem(decode[0].manager))
        assert "peer 'decode-7' is not configured at prefill-0/0" in problem(decode[0].manager)
    finally:
        prefill[0].manager.close()
        decode[0].manager.close()


def test_an_address_that_another_instance_answers_is_refused() -> None:
    """Case 45: the instance that answers must be the configured one."""
    prefill = start_side(MODEL, Side(), "prefill-0", num_layers=2)
    decode = start_side(MODEL, Side(), "decode-0", num_layers=2)
    try:
        prefill[0].manager.add_peer("decode-0", address=decode[0].manager.address)
        until(lambda: "decode-0" in prefill[0].manager.health().peers)  # else it refuses decode-0, which asks again much later
        decode[0].manager.add_peer("prefill-1", address=prefill[0].manager.address)
        until(lambda: "expects" in problem(decode[0].manager, "prefill-1"))
        assert "where decode-0/0 expects prefill-1/0" in problem(decode[0].manager, "prefill-1")
    finally:
        prefill[0].manager.close()
        decode[0].manager.close()


def test_a_peer_says_by_which_of_its_engines_it_writes() -> None:
    def writers(manager: KVManager) -> list[str]:
        engines = [peer.remote.engine for _, peer in manager._runtime.handshake.peers() if peer.remote is not None]
        return [engine.writer for engine in engines if isinstance(engine, AutoPeer)]

    with cluster(Side(tp=2), Side(), settings={"backend": lambda options: AutoBackend([LocalBackend(options)])}) as instances:
        until(lambda: writers(instances.decode[0].manager) == ["local"] * 2)
        until(lambda: [writers(rank.manager) for rank in instances.prefill] == [["local"]] * 2)


INVALID = [
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


def test_garbage_on_the_control_port_changes_nothing_and_stops_no_thread() -> None:
    """Case 39, on the port of a running manager."""
    with cluster(Side(tp=2), Side()) as instances:
        context = zmq.Context()
        for rank in instances.prefill + instances.decode:
            port = rank.manager.address.rpartition(":")[2]
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(rank.manager.address)
                for data in INVALID:
                    dealer.send(data)
                dealer.send_multipart([b"a", b"b", b"c"])
                answer = msgpack.unpackb(dealer.recv())
                assert answer["type"] == "reject"
                dealer.linger = 0
            with socket.create_connection(("127.0.0.1", int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        context.term()
        assert all(event.ok for event in instances.transfer(20))


def test_a_restarted_peer_reconnects_at_another_address_while_others_keep_running() -> None:
    """Case 40, in one process."""
    with cluster(Side(tp=2), Side()) as instances:
        assert all(event.ok for event in instances.transfer(20))
        old, side = instances.decode[0], Side()
        old.manager.close()
        until(lambda: not any(rank.manager.health().peers["decode-0"].ready for rank in instances.prefill))
        assert instances.prefill[0].manager.peer("decode-0").state == "connecting"
        instances.decode = start_side(instances.model, side, "decode-0", num_layers=3)
        introduce(instances.prefill, instances.decode)
        for rank in instances.prefill:
            rank.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        instances.decode[0].manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        assert all(event.ok for event in instances.transfer(20))


@pytest.mark.parametrize("opens", ["before the restart", "after the restart"])
@pytest.mark.parametrize("backend", ["local", "cma"])
def test_a_reservation_of_an_ended_process_is_not_served_to_the_next_one(backend: str, opens: str) -> None:
    """Its reserve may be read after its loss, and wait for the sender or for the engine: its page ids are of other memory."""
    with cluster(Side(), Side(page=8), settings={"backend": backend, "pack_below": 0}) as instances:
        (old,), (prefill,), request = instances.decode, instances.prefill, new_request_id()
        wanted = receive(old, new_request_id(), PageList((0, 1, 2)), need=(0, 20))
        until(lambda: wanted.session is not None and all(each.reserve for each in wanted.session.writers.values()))
        (writer,) = wanted.session.writers.values()  # type: ignore[union-attr]
        assert writer.reserve is not None
        late = msgspec.structs.replace(writer.reserve, request_id=request)
        old.manager.close()
        until(lambda: not prefill.manager.health().peers["decode-0"].ready)
        runtime = prefill.manager._runtime
        runtime.command(lambda now: runtime.sessions.on_message(PeerRank("decode-0", 0), late, now))
        senders = []
        if opens == "before the restart":
            senders.append(send(prefill, request, instances.pages(prefill, 20), 20))
            until(lambda: runtime.transfers.num_unconnected == 1)
        instances.decode = start_side(instances.model, Side(page=8), "decode-0", num_layers=3, settings={"backend": backend})
        (new,) = instances.decode
        clear(new.pools)
        introduce(instances.prefill, instances.decode)
        for rank, name in ((prefill, "decode-0"), (new, "prefill-0")):
            rank.manager.wait_ready(name, timeout_s=DEADLINE_S)
        if opens == "after the restart":
            senders.append(send(prefill, request, instances.pages(prefill, 20), 20))
        (sender,) = senders
        event = sender.wait(timeout_s=DEADLINE_S)
        assert "decode-0/0 has restarted since it reserved these rows" in str(event.error)
        assert event.lease.released
        assert untouched(instances)
        assert all(event.ok for event in instances.transfer(20))


def test_requests_of_a_closed_peer_fail_with_the_cause() -> None:
    with cluster(Side(), Side()) as instances:
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20))
        until(lambda: receiver.session is not None)  # else it would wait for the peer's return
        instances.prefill[0].manager.close()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert "prefill-0/0 is gone: closed: the manager was closed" in str(event.error)
        assert event.lease.released, "the local engine proves that a closed peer is quiescent"
        instances.prefill.clear()


def test_a_failed_thread_makes_health_false_and_fails_its_requests() -> None:
    """Case 46."""
    for victim in ("control", "transfers"):
        with pytest.MonkeyPatch.context() as patch, cluster(Side(), Side()) as instances:
            manager = instances.decode[0].manager
            receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2, 3, 4)), need=(0, 20))
            until(lambda: receiver.session is not None)  # noqa: B023 (called before the next case)
            runtime = manager._runtime
            if victim == "control":
                patch.setattr(runtime.loop, "_take_arrived", lambda: 1 / 0)
                runtime.command(lambda _: None)
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
            instances.decode.clear()


def test_close_aborts_active_requests_and_can_be_called_twice() -> None:
    with cluster(Side(), Side()) as instances:
        receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2, 3, 4)), need=(0, 20))
        instances.decode[0].manager.close()
        instances.decode[0].manager.close()
        assert isinstance(receiver.wait(timeout_s=DEADLINE_S).error, RequestAborted)
        assert instances.decode[0].manager.events()
        instances.decode.clear()


def test_an_interrupted_close_goes_on_and_can_be_waited_for() -> None:
    """Threads that wait for a request are told that it has ended, and none of the manager's threads is left."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, go_on, heard = set(threading.enumerate()), threading.Event(), list[Event]()
    with cluster(Side(), Side()) as instances:
        rank = instances.decode[0]
        waits, slow = (receive(rank, new_request_id(), PageList((page,)), need=(0, 4)) for page in (1, 2))
        waiter = threading.Thread(target=lambda: heard.append(waits.wait()))
        waiter.start()
        slow.on_end(lambda _: go_on.wait(60))
        slow.abort("to hold up the control thread")
        handler = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                rank.manager.close()
        finally:
            signal.signal(signal.SIGALRM, handler)
        go_on.set()
        rank.manager.close()
        waiter.join(60)
        assert [event.ok for event in heard] == [False]
        instances.decode.clear()
    until(lambda: set(threading.enumerate()) <= before)


def test_what_closing_raises_is_logged_and_raised_by_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("the engine is stuck")

    lifetime = Lifetime(fails, threads=tuple)
    with pytest.raises(OSError, match="the engine is stuck"):
        lifetime.end()
    lifetime.end()
    lifetime.forget()
    assert "a manager could not be closed" in caplog.text
    assert lifetime.problem == "the manager was closed"


def test_a_callback_of_a_request_that_ends_with_the_manager_cannot_wait() -> None:
    found: list[Exception] = []
    with cluster(Side(), Side()) as instances:
        rank = instances.decode.pop()
        one, other = (receive(rank, new_request_id(), PageList((page,)), need=(0, 4)) for page in (1, 2))

        def wait(_: Event) -> None:
            try:
                other.wait(timeout_s=60)
            except LocalProtocolError as error:
                found.append(error)

        one.on_end(wait)
        rank.manager.close()
    assert "a callback in the manager's own, which cannot wait" in str(found)


def test_a_closed_manager_has_no_ready_peer_and_gives_no_engine() -> None:
    with cluster(Side(), Side()) as instances:
        closed = instances.prefill[0].manager
        assert closed.peer("decode-0").state == "ready"
        assert closed.engine("decode-0", 0)[0] is closed.backend
        closed.close()
        assert closed.peer("decode-0") == ("refused", "the manager has ended: the manager was closed")
        for use in (lambda: closed.engine("decode-0", 0), closed.__enter__):
            with pytest.raises(LocalProtocolError, match="the manager has ended: the manager was closed"):
                use()
        instances.prefill.clear()


def test_drain_refuses_new_requests_and_waits_for_active_ones() -> None:
    with cluster(Side(), Side()) as instances:
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20))
        manager = instances.decode[0].manager
        assert not manager.drain(timeout_s=0.01)
        with pytest.raises(LocalProtocolError, match="draining"):
            receive(instances.decode[0], new_request_id(), PageList((0, 1, 2, 3, 4)), need=(0, 20))
        send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        assert manager.drain(timeout_s=DEADLINE_S)
        assert receiver.wait(timeout_s=0).ok


def manager(**settings: Any) -> KVManager:
    topology = settings.pop("topology", Topology())
    spec = KVRank(layers=(0,), page_size=4, num_pages=4, tp=topology.tp, tp_rank=topology.tp_rank)
    pools = reference.allocate(MODEL, spec)
    defaults: dict[str, Any] = {"name": "x", "model": ModelId("m"), "backend": "local", "connection_limits": FAST_LINKS}
    kv = Side().component(MODEL, topology, pools)
    return KVManager(topology=settings.pop("declared", None), components=[kv], **{**defaults, **settings})


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
        ({"leader": "tcp://127.0.0.1:7"}, "leader: expected None on rank 0, found 'tcp://127.0.0.1:7'"),
        ({"leader": "", "topology": Topology(tp=2, tp_rank=1)}, "leader: expected tcp://host:port, found ''"),
        (
            {"leader": "tcp://10.0.0.1:0", "topology": Topology(tp=2, tp_rank=1)},
            "leader: expected the host and port of one rank",
        ),
        ({"admit": "everyone"}, "admit: expected 'known', 'keys', 'any' or a function, found 'everyone'"),
        ({"admit": "keys"}, "admit: 'keys' needs keys="),
        ({"pack_below": "4k"}, "pack_below: expected a number of bytes, or None, found '4k'"),
        ({"metrics_port": "9400"}, "metrics_port: expected a port, or None, found '9400'"),
        ({"metrics_port": True}, "metrics_port: expected a port, or None, found True"),
        ({"require": "tcp"}, "backend 'local' has no transport, so it cannot require 'tcp'"),
        ({"peers": ["decode-0"]}, "peers: expected a mapping from names, found list"),
        ({"peer_keys": "key"}, "peer_keys: expected a mapping from names, found str"),
        ({"model": None}, "model: expected a ModelId, found None"),
        ({"metrics_port": 0, "metrics_host": "a" * 70}, "metrics: cannot listen at 'aaa"),
        ({"metrics_port": 0, "metrics_host": 7}, "metrics_host: expected a str, found 7"),
        ({"declared": Topology(tp=2)}, "component 'kv': expected Topology(dp=1, pp=1, cp=1, tp=2"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manager(**settings)
    assert message in str(caught.value)


def test_by_default_nothing_listens_off_loopback() -> None:
    before = listening_sockets()
    with manager(metrics_port=0) as only:
        opened = {fd for fd, inode in listening_sockets().items() if before.get(fd) != inode}
        hosts = set()
        for descriptor in opened:
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                hosts.add(copy.getsockname()[0])
        assert only.address.startswith("tcp://127.0.0.1:")
        assert len(opened) == 2, "the control channel and the metrics"
        assert hosts == {"127.0.0.1"}


def test_a_port_in_use_is_named() -> None:
    with manager() as first, pytest.raises(ConfigError, match=r"cannot bind 'tcp://127\.0\.0\.1:\d+': Address already in use"):
        manager(listen=first.address)


def test_adding_this_instance_as_a_peer_is_refused() -> None:
    with manager() as only, pytest.raises(ConfigError, match="this instance's own name"):
        only.add_peer("x", address=only.address)


def test_a_handle_has_its_request_id_and_attempt() -> None:
    with cluster(Side(), Side()) as instances:
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20), attempt=3)
        assert (receiver.request_id, receiver.key) == (request, RequestKey(request, 3))
        with pytest.raises(TimeoutError, match=r"not ended within 0.01 s"):
            receiver.wait(timeout_s=0.01)
        receiver.abort("the test is finished")


class Unfenced(LocalBackend):
    """The `local` engine without proofs that a peer is quiescent."""

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        return Fence.UNKNOWN


class NoProof(Unfenced):
    """An `Unfenced` engine that may still write after it is closed."""

    def is_quiet_when_closed(self) -> bool:
        return False


class Unanswering(Unfenced):
    """A third party's `Unfenced` engine whose `is_quiet_when_closed` raises."""

    def is_quiet_when_closed(self) -> bool:
        raise ValueError("the table cannot be read")


def test_peers_wait_while_too_few_descriptors_are_free() -> None:
    """An engine that cannot accept a peer may never accept another one."""
    ranks = [start_side(MODEL, Side(), name, num_layers=2, settings={}) for name in ("prefill-0", "decode-0")]
    managers = [rank.manager for (rank,) in ranks]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, hard))
    held = []
    try:
        while not shortage(NEEDED - 4):
            held.append(os.dup(2))
        introduce(*ranks)
        until(lambda: "descriptors that connecting may take are free" in problem(managers[1]))
        assert not managers[1].health().peers["prefill-0"].ready
        assert not managers[1]._runtime.channel._peers
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for manager, peer in zip(managers, ("decode-0", "prefill-0"), strict=True):
            manager.wait_ready(peer, timeout_s=DEADLINE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
        for manager in managers:
            manager.close()


@pytest.mark.parametrize(("backend", "proved"), [(Unfenced, True), (NoProof, False), (Unanswering, False)])
def test_closing_the_manager_releases_quarantined_rows_if_the_closed_engine_is_quiescent(backend: Any, proved: bool) -> None:
    """Rows of a lost writer stay quarantined, `health` reports too many of them, and `close` releases them."""
    settings = {"backend": backend, "limits": Limits(max_quarantined=0)}
    with cluster(Side(), Side(), settings=settings) as instances:
        decode, prefill = instances.decode[0].manager, instances.prefill[0].manager
        freed: list[int] = []
        receiver = receive(instances.decode[0], new_request_id(), instances.pages(instances.decode[0], 8), need=(0, 8))
        assert decode.health().renewal_due == ""
        until(lambda: receiver.session is not None)  # else it would wait for the peer's return
        prefill.close()
        event = receiver.wait(timeout_s=DEADLINE_S)
        event.lease.on_release(lambda: freed.append(1))
        assert event.lease.state is LeaseState.QUARANTINED
        assert decode.health().renewal_due == "receives with quarantined rows: 1, of 0 at most"
        instances.prefill.clear()
        instances.decode.clear()
        decode.close()
        assert (bool(freed), event.lease.released) == (proved, proved)


class Stalling(LocalBackend):
    """The `local` engine, which connects to some peers only after `go_on` is set."""

    stalled: ClassVar[set[Any]] = set()
    entered, go_on = threading.Event(), threading.Event()

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> LocalPeer:
        peer = super().connect(endpoint, epoch=epoch, process=process)
        if peer.target in self.stalled:
            self.entered.set()
            assert self.go_on.wait(DEADLINE_S)
        return peer


def test_a_peer_that_does_not_answer_the_engine_delays_no_other_peer() -> None:
    settings = {"backend": Stalling, "limits": FAST, "connection_limits": FAST_LINKS}
    with cluster(Side(), Side(page=8), settings=settings) as instances:
        (slow,) = start_side(instances.model, Side(), "slow-0", num_layers=3, settings=settings)
        Stalling.stalled.add(slow.manager.backend)
        manager = instances.prefill[0].manager
        with slow.manager:
            slow.manager.add_peer("prefill-0", address=manager.address)
            manager.add_peer("slow-0", address=slow.manager.address)
            assert Stalling.entered.wait(DEADLINE_S)
            assert all(event.ok for event in instances.transfer(20))
            assert not manager.health().peers["slow-0"].ready
            Stalling.go_on.set()
            manager.wait_ready("slow-0", timeout_s=DEADLINE_S)
            assert all(event.ok for event in instances.transfer(20))


class Failing(LocalBackend):
    """An engine that connects, and then fails. `connected`: the peers that it was not disconnected from."""

    connected: ClassVar[list[RemotePeer]] = []

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> LocalPeer:
        self.connected.append(peer := super().connect(endpoint, epoch=epoch, process=process))
        return peer

    def gathers_from(self, peer: RemotePeer) -> int | None:
        raise OSError("gathering cannot be measured")

    def disconnect(self, peer: RemotePeer) -> None:
        self.connected.remove(peer)
        super().disconnect(peer)


def test_an_engine_that_fails_once_it_is_connected_is_disconnected() -> None:
    ranks = [start_side(MODEL, Side(), name, num_layers=2, settings={"backend": Failing}) for name in ("prefill-0", "decode-0")]
    try:
        introduce(*ranks)
        until(lambda: "gathering cannot be measured" in problem(ranks[1][0].manager))
    finally:
        for (rank,) in ranks:
            rank.manager.close()
    assert Failing.connected == []
