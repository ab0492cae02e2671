"""Backend `mooncake` against the contract and against the engine: real engines in processes of their own."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from disagg.backends.base import Backend, BackendOptions, Fence, Transfer, TransferStatus, Transport
from disagg.backends.cuda.driver import CudaError
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.backends.mooncake import backend as mooncake
from disagg.backends.mooncake import launch
from disagg.backends.mooncake.backend import SPLIT_NBYTES, MooncakeBackend, MooncakePeer
from disagg.backends.mooncake.launch import MAX_OUTSTANDING
from disagg.backends.mooncake.queue import MooncakeDescriptor, PeerQueue
from disagg.backends.mooncake.transfer import MooncakeTransfer, Opcodes, Pieces, cut
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, PeerUnreachable
from disagg.core.memory import Device, MemoryRegion
from disagg.machine.tcp import EngineConnections, sockets_of, tcp_sockets
from disagg.testing.contract import (
    Arena,
    BackendContract,
    BackendFactory,
    Target,
    batch_of,
    expected_after,
    random_pieces,
    settle,
)
from tests.backends.conftest import require_engine
from tests.support.tcp_proxy import TcpProxy, proxies

require_engine("mooncake.engine", "mooncake-transfer-engine-non-cuda")


def until(transfer: Transfer, status: TransferStatus, *, patience_s: float = 60.0) -> None:
    """Poll until `status`; fails the test when that takes longer."""
    deadline = time.monotonic() + patience_s
    while transfer.poll() is not status:
        assert time.monotonic() < deadline, f"{transfer.poll()} after {patience_s} s: {transfer.error}"
        time.sleep(0.001)


def behind(door: TcpProxy, endpoint: bytes) -> bytes:
    """An engine's endpoint at the address of `door`, which leads there now."""
    raw, regions = decode_endpoint("mooncake", endpoint)
    found = msgspec.msgpack.decode(raw)
    door.aim(f"tcp://127.0.0.1:{found['port']}")
    port = int(door.address.rpartition(":")[2])
    ports = [port, *(each for each in found["ports"] if each != found["port"])]
    return encode_endpoint("mooncake", msgspec.msgpack.encode({**found, "port": port, "ports": ports}), regions)


def num_descriptors() -> int:
    """Of TCP connections, and of alarms."""
    own, count = sockets_of("self"), 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "eventfd" in str(path.readlink())
    return count + sum(row.inode in own for row in tcp_sockets())


def threads_of_peers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("disagg-mooncake")}


class TestMooncakeContract(BackendContract):
    fences_dead_neighbours = True
    closes_when_renewed = True

    def factory(self) -> BackendFactory:
        return MooncakeBackend

    # -- many pieces --------------------------------------------------------------------------------------------------

    def test_more_pieces_than_the_engine_queues(self, backend: Backend, local: Arena, target: Target) -> None:
        """5,000 pieces in one batch and in five at once arrive, and the peer goes on to be served."""
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        pieces = random_pieces(random.Random(5), nbytes=(129,) * 5000, gap=9)
        after = expected_after(local, target.arena, pieces)
        self.run(backend.submit(peer, batch_of(local, target.arena, pieces)))
        np.testing.assert_array_equal(target.arena.memory, after)
        target.arena.scramble(9)
        after = expected_after(local, target.arena, pieces)
        parts = [batch_of(local, target.arena, pieces[i::5]) for i in range(5)]
        for transfer in [backend.submit(peer, part) for part in parts]:
            self.run(transfer)
        np.testing.assert_array_equal(target.arena.memory, after)
        self.round_trip(backend, local, target)

    def test_two_epochs_of_a_peer_share_its_queue(self, backend: Backend, target: Target) -> None:
        before = threads_of_peers()  # one that an earlier test has disconnected may not have ended yet
        peers = [backend.connect(target.endpoint, process=target.process, epoch=epoch) for epoch in (1, 2)]
        first, second = peers
        assert isinstance(first, MooncakePeer)
        assert isinstance(second, MooncakePeer)
        assert first.queue is second.queue
        assert threads_of_peers() - before == {first.queue._thread}
        for peer in peers:
            backend.disconnect(peer)
        first.queue._thread.join(self.patience_s)
        assert threads_of_peers() <= before

    def test_an_engine_at_the_address_of_one_that_has_ended(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """The engine remembers for ever what it has learnt of an address, such as the port that takes the bytes."""
        (door,) = stack.enter_context(proxies("tcp://127.0.0.1:9"))
        for _ in range(3):
            victim = self.new_process(stack)
            victim.endpoint = behind(door, victim.endpoint)
            for _ in range(2):
                self.round_trip(backend, local, victim)
            victim.kill()

    def test_a_peer_that_has_ended_leaves_no_descriptors(self, backend: Backend, stack: ExitStack) -> None:
        """The engine itself keeps idle connections for ever."""
        victim = self.new_process(stack)
        before = num_descriptors()
        peer = backend.connect(victim.endpoint, process=victim.process, epoch=1)
        assert num_descriptors() > before
        victim.kill()
        backend.disconnect(peer)
        deadline = time.monotonic() + self.patience_s
        while num_descriptors() > before:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def test_an_address_of_too_many_engines(self, backend: Backend, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mooncake, "MAX_ENGINES", 2)
        raw, regions = decode_endpoint("mooncake", target.endpoint)
        found = msgspec.msgpack.decode(raw)
        for port in (1, 2, 1, 2):
            other = msgspec.msgpack.encode({**found, "ports": [found["port"], port]})
            backend.disconnect(backend.connect(encode_endpoint("mooncake", other, regions), epoch=1))
        with pytest.raises(PeerUnreachable, match="2 other engines have been at this address"):
            backend.connect(target.endpoint, process=target.process, epoch=1)

    # -- a stopped peer, a killed one, a closed one -------------------------------------------------------------------

    def test_what_the_engine_gave_up_lands_later(
        self, backend: Backend, local: Arena, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A peer is stopped: the engine reports failure, its bytes arrive all the same once the peer goes on.

        The engine gives a silent peer up after 2 s instead of 30 here; it reads that at every piece.
        """
        victim = self.new_process(stack)
        peer = backend.connect(victim.endpoint, process=victim.process, epoch=1)
        pieces = [(0, 0, 0, 0, 5000), (0, 6000, 0, 6000, 50)]
        after = expected_after(local, victim.arena, pieces)
        before = victim.arena.memory.copy()
        victim.stop()
        with monkeypatch.context() as impatient:
            impatient.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")
            transfer = backend.submit(peer, batch_of(local, victim.arena, pieces))
            assert settle(transfer, patience_s=self.patience_s) is TransferStatus.UNSETTLED
        assert transfer.error
        assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
        np.testing.assert_array_equal(victim.arena.memory, before)
        victim.signal(signal.SIGCONT)
        deadline = time.monotonic() + self.patience_s
        while not np.array_equal(victim.arena.memory, after):
            assert time.monotonic() < deadline, "what the engine gave up did not arrive"
            time.sleep(0.01)
        assert transfer.poll() is TransferStatus.UNSETTLED
        self.run(backend.submit(peer, batch_of(local, victim.arena, pieces)))
        victim.kill()
        until(transfer, TransferStatus.FAILED, patience_s=self.patience_s)
        transfer.close()

    def test_the_end_of_a_process_that_is_not_attested_proves_nothing(self, backend: Backend, stack: ExitStack) -> None:
        """That of a clone of this machine, say: its boot id is the same, and the number of its process is free here."""
        victim = self.new_process(stack)
        peer, attested = (
            backend.connect(victim.endpoint, process=process, epoch=epoch)
            for epoch, process in ((1, None), (2, victim.process))
        )
        victim.kill()
        deadline = time.monotonic() + self.patience_s
        while backend.fence(attested, epoch=2) is not Fence.QUIET:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert backend.fence(peer, epoch=1) is Fence.UNKNOWN

    def test_a_stopped_peer_finishes_nothing(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """Not even one byte, that fits into any buffer, is done before the peer has put it in place."""
        victim = self.new_process(stack)
        peer = backend.connect(victim.endpoint, process=victim.process, epoch=1)
        pieces = [(0, 0, 0, 0, 1)]
        victim.stop()
        transfer = backend.submit(peer, batch_of(local, victim.arena, pieces))
        time.sleep(1)
        assert transfer.poll() is TransferStatus.PENDING
        victim.signal(signal.SIGCONT)
        self.run(transfer)

    def test_a_killed_peer_is_a_failure_that_settles(
        self, backend: Backend, local: Arena, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed while bytes move, and before the last are posted. Its port refuses, so that nothing can land any more."""
        victim = self.new_process(stack)
        peer = backend.connect(victim.endpoint, process=victim.process, epoch=1)
        pieces = [(0, i * 300, 0, i * 300, 299) for i in range(4000)]
        assert isinstance(peer, MooncakePeer)
        post, is_dead = peer.queue._post_chunk, threading.Event()

        def post_the_rest_to_the_dead(transfer: MooncakeTransfer) -> None:
            assert transfer.num_posted == 0 or is_dead.wait(self.patience_s)
            post(transfer)

        monkeypatch.setattr(peer.queue, "_post_chunk", post_the_rest_to_the_dead)
        transfer = backend.submit(peer, batch_of(local, victim.arena, pieces))
        victim.kill()
        is_dead.set()
        until(transfer, TransferStatus.FAILED, patience_s=self.patience_s)
        assert transfer.error
        image = local.memory.copy()
        transfer.close()
        self.round_trip(backend, local, self.new_target(stack))
        np.testing.assert_array_equal(local.memory, image)

    def test_a_peer_that_closed_its_engine(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """The process lives on, its engine does not."""
        memory = Arena.create((1000,))
        stack.callback(os.close, memory.fd)
        other = self.open(memory, stack)
        peer = backend.connect(other.endpoint(), epoch=1)
        other.close()
        transfer = backend.submit(peer, batch_of(local, memory, [(0, 0, 0, 0, 10)]))
        until(transfer, TransferStatus.FAILED, patience_s=self.patience_s)

    def test_closing_with_a_transfer_under_way(self, backend: Backend, local: Arena, stack: ExitStack) -> None:
        """It ends at once, as unsettled; no thread is left."""
        victim, before = self.new_process(stack), threads_of_peers()
        peer = backend.connect(victim.endpoint, process=victim.process, epoch=1)
        victim.stop()
        pieces = [(0, i * 100, 0, i * 100, 99) for i in range(3000)]
        batch = batch_of(local, victim.arena, pieces)
        under_way, not_begun = (backend.submit(peer, batch) for _ in range(2))
        assert isinstance(under_way, MooncakeTransfer)
        deadline = time.monotonic() + self.patience_s
        while under_way.num_posted == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        backend.close()
        assert under_way.poll() is TransferStatus.UNSETTLED
        assert not_begun.poll() is TransferStatus.FAILED
        assert threads_of_peers() <= before
        image = local.memory.copy()
        victim.signal(signal.SIGCONT)
        time.sleep(0.2)
        np.testing.assert_array_equal(local.memory, image)

    @pytest.mark.parametrize("num_pieces", [1, 9], ids=["asked-by-the-caller", "asked-by-the-thread"])
    def test_what_goes_wrong_with_a_queue_ends_its_transfers(
        self, backend: Backend, local: Arena, target: Target, monkeypatch: pytest.MonkeyPatch, num_pieces: int
    ) -> None:
        peer = backend.connect(target.endpoint, process=target.process, epoch=1)
        assert isinstance(peer, MooncakePeer)

        def broken(_: object) -> None:
            raise RuntimeError("as a test")

        monkeypatch.setattr(peer.queue, "_has_ended", broken)
        batch = batch_of(local, target.arena, [(0, 10 * i, 0, 10 * i, 10) for i in range(num_pieces)])
        transfer = backend.submit(peer, batch)
        until(transfer, TransferStatus.UNSETTLED)
        assert "as a test" in str(transfer.error)
        with pytest.raises(PeerUnreachable):
            backend.submit(peer, batch)
        self.round_trip(backend, local, target)

    # -- endpoints ----------------------------------------------------------------------------------------------------

    def test_a_peer_with_another_transport(self, backend: Backend, target: Target) -> None:
        descriptor, _ = decode_endpoint("mooncake", target.endpoint)
        other = msgspec.msgpack.encode({**msgspec.msgpack.decode(descriptor), "protocol": "rdma"})
        with pytest.raises(PeerUnreachable, match="rdma"):
            backend.connect(encode_endpoint("mooncake", other, []), epoch=1)

    def test_a_peer_that_accepts_and_never_answers_is_given_up(
        self, backend: Backend, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine itself waits for a minute, and goes on until then: closing it proves nothing yet."""
        monkeypatch.setattr("disagg.backends.mooncake.backend._WARM_S", 0.5)
        assert isinstance(backend, MooncakeBackend)
        assert backend.is_quiet_when_closed()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            descriptor, _ = decode_endpoint("mooncake", target.endpoint)
            port = silent.getsockname()[1]
            other = msgspec.msgpack.encode({**msgspec.msgpack.decode(descriptor), "port": port})
            with pytest.raises(PeerUnreachable, match="no engine answers"):
                backend.connect(encode_endpoint("mooncake", other, []), epoch=1)
            backend.close()
            assert not backend.is_quiet_when_closed()
        while not backend.is_quiet_when_closed():
            time.sleep(0.01)

    def test_a_peer_of_the_other_ip_version(self, backend: Backend, target: Target) -> None:
        descriptor, _ = decode_endpoint("mooncake", target.endpoint)
        other = msgspec.msgpack.encode({**msgspec.msgpack.decode(descriptor), "host": "::1"})
        with pytest.raises(PeerUnreachable, match="host '::1': the engine reaches addresses of one IP version only"):
            backend.connect(encode_endpoint("mooncake", other, []), epoch=1)


# -- options ----------------------------------------------------------------------------------------------------------


class NotedGpu:
    """A GPU that there is not, and what was asked of it, in which threads."""

    asked: ClassVar[list[tuple[str, int, str]]] = []
    refuses = False

    def __init__(self, ordinal: int) -> None:
        if self.refuses:
            raise CudaError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
        self.ordinal = ordinal

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._note("current")
        yield
        self._note("not current")

    def release(self) -> None:
        self._note("released")

    def _note(self, what: str) -> None:
        self.asked.append((what, self.ordinal, threading.current_thread().name.partition("-127")[0]))


@pytest.mark.parametrize("refuses", [False, True])
def test_the_engine_opens_memory_for_the_gpu_that_its_own_is_on(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "Gpu", NotedGpu)
    monkeypatch.setattr(NotedGpu, "asked", [])
    monkeypatch.setattr(NotedGpu, "refuses", refuses)
    pools = [np.full(64, value, np.uint8) for value in (7, 0)]
    engines = [MooncakeBackend(BackendOptions()) for _ in pools]
    for engine, pool in zip(engines, pools, strict=True):
        engine.register([MemoryRegion(pool.ctypes.data, pool.nbytes, Device("cuda", 3))])
    peer = engines[0].connect(engines[1].endpoint(), epoch=1)
    source, destination = (np.array([pool.ctypes.data], np.uint64) for pool in pools)
    copies = CopyBatch(source, destination, np.array([64], np.uint64))
    until(engines[0].submit(peer, copies), TransferStatus.DONE)
    assert bytes(pools[1]) == bytes(pools[0])
    for engine in engines * 2:
        engine.close()
    registering, closing = ["current", "not current"], ["current", "not current", "released"]
    here = [what for what, _, thread in NotedGpu.asked if thread == threading.current_thread().name]
    assert here == ([] if refuses else registering * 2 + closing * 2)
    assert [what for what, _, thread in NotedGpu.asked if thread == "disagg-mooncake"] == ([] if refuses else registering)
    assert {ordinal for _, ordinal, _ in NotedGpu.asked} == (set() if refuses else {3})


def test_off_loopback_wants_a_trusted_network() -> None:
    for transport in (Transport.AUTO, Transport.TCP):
        with pytest.raises(ConfigError, match="trusted_network=True"):
            MooncakeBackend(BackendOptions(host="192.0.2.1", transport=transport))
    with pytest.raises(ConfigError, match="trusted_network=True"):
        MooncakeBackend(BackendOptions(host="0.0.0.0"))
    backend = MooncakeBackend(BackendOptions(host="192.0.2.1", trusted_network=True))
    assert backend.transport == "tcp"
    backend.close()


def test_transports_that_are_not_to_be_had() -> None:
    with pytest.raises(BackendUnavailable, match="'auto', 'rdma' or 'tcp'"):
        MooncakeBackend(BackendOptions(transport=Transport.SHM))
    with pytest.raises(BackendUnavailable, match=r"no_such_nic.*; to fix it: "):
        MooncakeBackend(BackendOptions(require=Transport.RDMA, devices=("no_such_nic",)))


def test_a_peer_whose_host_has_vanished_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine's end is never proved. Nobody waits for that once the write is dropped and the peer disconnected."""

    def unreachable(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "no route")

    class Engine:
        def batch_transfer_async(self, *_: object) -> int:
            return 1

        def transfer_check_status(self, _: int) -> int:
            return -1

    monkeypatch.setattr(socket, "create_connection", unreachable)
    descriptor, one = MooncakeDescriptor("192.0.2.1", 15000, "tcp"), np.ones(1, np.uint64)
    engine: Any = Engine()
    queue = PeerQueue(
        engine, Opcodes(1, 2), descriptor, descriptor.session, 64, connections=EngineConnections(), gpu=None, readable=None
    )
    transfer = MooncakeTransfer(queue, Pieces(one, one, one))
    queue.submit(transfer)
    until(transfer, TransferStatus.UNSETTLED)
    queue.release()
    time.sleep(1.0)
    assert queue.is_running
    del transfer
    deadline = time.monotonic() + 60.0
    while queue.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_an_engine_whose_writes_are_not_acknowledged_is_unavailable(
    protocol: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mooncake before 0.3.12.post1. Its module has the same names."""
    library = tmp_path / "engine.so"
    library.write_bytes(b"the library of an engine without that name")
    module = SimpleNamespace(__file__=str(library), TransferOpcode=SimpleNamespace(Write=0, Read=1))
    monkeypatch.setattr(mooncake, "import_engine", lambda: module)
    monkeypatch.setattr(mooncake, "choose_protocol", lambda _: protocol)
    monkeypatch.setattr(launch, "TRANSFER_ENGINE", "no such library")

    def starts(*_: object) -> None:
        raise KeyError("it starts")

    monkeypatch.setattr(mooncake, "start_engine", starts)
    with pytest.raises(BackendUnavailable if protocol == "tcp" else KeyError, match=r"0\.3\.12\.post1 or newer|it starts"):
        MooncakeBackend(BackendOptions())
    library.write_bytes(b"its library, with tcp_proto_version in it")
    with pytest.raises(KeyError, match="it starts"):
        MooncakeBackend(BackendOptions())


@pytest.mark.parametrize(("name", "value"), [("MC_TCP_PROTO", "1"), ("MC_TCP_ENABLE_CONNECTION_POOL", "False")])
def test_settings_that_would_break_promises(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BackendUnavailable, match=name):
        MooncakeBackend(BackendOptions())


@pytest.mark.parametrize(("host", "switch"), [("::1", None), ("127.0.0.1", "0"), ("four.test", "0")])
def test_a_host_of_the_other_ip_version(host: str, switch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if switch is not None:
        monkeypatch.setenv("MC_USE_IPV6", switch)
    if host == "four.test":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, None, 0, "", ("192.0.2.1", 0))])
    with pytest.raises(BackendUnavailable, match=f"host '{host}': the engine reaches addresses of one IP version only"):
        MooncakeBackend(BackendOptions(host=host))


def test_over_ipv6() -> None:
    """In a process of its own: the engine looks at its switch once, for some of what it does."""
    program = """
        import random
        from contextlib import ExitStack
        from disagg.backends.base import BackendOptions, TransferStatus
        from disagg.backends.mooncake.backend import MooncakeBackend
        from disagg.testing.contract import batch_of, expected_after, random_pieces, settle
        from tests.backends.conftest import opened, target_process

        with ExitStack() as stack:
            options = BackendOptions(host="::1")
            target = target_process(MooncakeBackend, options, stack)
            backend, local = opened(MooncakeBackend, options, stack)
            peer = backend.connect(target.endpoint, process=target.process, epoch=1)
            pieces = random_pieces(random.Random(7), nbytes=(5000,) * 20, gap=9)
            after = expected_after(local, target.arena, pieces)
            transfer = backend.submit(peer, batch_of(local, target.arena, pieces))
            assert settle(transfer) is TransferStatus.DONE, transfer.error
            assert (target.arena.memory == after).all()
            print(peer.queue._descriptor.session)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, env={**os.environ, "MC_USE_IPV6": "1"}, capture_output=True, text=True, check=False)
    assert found.stdout.startswith("[::1]:"), found.stderr


def test_managers_over_ipv6() -> None:
    program = """
        from tests.support.cluster import Side, cluster

        settings = {"backend": "mooncake", "listen": "tcp://[::1]:0"}
        with cluster(Side(tp=2), Side(page=8), settings=settings) as instances:
            assert all(event.ok for event in instances.transfer(37, chunks=(16,)))
            print(instances.decode[0].manager.address)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, env={**os.environ, "MC_USE_IPV6": "1"}, capture_output=True, text=True, check=False)
    assert found.stdout.startswith("tcp://[::1]:"), found.stderr


def test_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    MooncakeBackend(BackendOptions()).close()
    assert dict(os.environ) == before


def test_a_missing_module_and_a_missing_library() -> None:
    """Each in a process where importing the engine fails as it does on a machine that lacks it."""
    program = """
        import sys
        from disagg.backends.base import BackendOptions
        from disagg.backends.mooncake.backend import MooncakeBackend
        from disagg.core.errors import BackendUnavailable
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "mooncake":
                    raise {error}
        sys.meta_path.insert(0, Finder())
        try:
            MooncakeBackend(BackendOptions())
        except BackendUnavailable as error:
            print(error.name, "|", error)
    """

    def said(error: str) -> str:
        code = textwrap.dedent(program.format(error=error))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    library = said("ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')")
    for word in ("libibverbs.so.1 |", "libibverbs1 ibverbs-providers libnuma1 libcurl4", "mooncake-transfer-engine-non-cuda"):
        assert word in library
    module = said("ModuleNotFoundError('no', name='mooncake')")
    for word in ("mooncake |", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine (CUDA 12)", "-cuda13"):
        assert word in module


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_pieces_are_the_same_bytes() -> None:
    """Compared with a plain loop."""
    sizes = [0, 1, SPLIT_NBYTES - 1, SPLIT_NBYTES, SPLIT_NBYTES + 1, 0, 3 * SPLIT_NBYTES + 7, 0]
    starts = [i << 30 for i in range(1, len(sizes) + 1)]
    copies = CopyBatch(*(np.array(column, np.uint64) for column in (starts, [s + (1 << 40) for s in starts], sizes)))
    rows = zip(*(c.tolist() for c in (copies.source, copies.destination, copies.nbytes)), strict=True)
    expected = [
        (here + offset, there + offset, min(SPLIT_NBYTES, nbytes - offset))
        for here, there, nbytes in rows
        for offset in range(0, nbytes, SPLIT_NBYTES)
    ]
    pieces = cut(copies, split=SPLIT_NBYTES)
    assert list(zip(*pieces.between(0, len(pieces)), strict=True)) == expected


def test_the_user_may_lower_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, limit in (("64", 64), ("65535", MAX_OUTSTANDING), ("rubbish", MAX_OUTSTANDING), ("1", 2)):
        monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", value)
        backend = MooncakeBackend(BackendOptions())
        assert backend._limit == limit
        backend.close()
