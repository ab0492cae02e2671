"""Backend `cma` with real processes, and as the engine that `auto` chooses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from disagg.backends import cma, registry
from disagg.backends.abilities import Gathering, ProvesByProcess, QuietWhenClosed
from disagg.backends.base import Backend, BackendOptions, Fence, TransferStatus, Transport
from disagg.backends.cma import CmaBackend, CmaDescriptor, CmaPeer
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.core import _native
from disagg.core.errors import BackendUnavailable, ConfigError, LocalProtocolError, PeerUnreachable
from disagg.core.memory import Device, MemoryRegion
from disagg.machine.processes import IdentitySocket, ProcessWatch
from disagg.testing.contract import (
    REGION_NBYTES,
    BackendContract,
    BackendFactory,
    batch_of,
    expected_after,
)
from tests.backends.conftest import opened, target_process

PATIENCE_S = 60.0
WHOLE = [(0, 0, 0, 0, REGION_NBYTES[0])]


class TestCmaContract(BackendContract):
    fences_dead_neighbours = True

    def factory(self) -> BackendFactory:
        return CmaBackend


def auto(options: BackendOptions) -> Backend:
    return registry.load("auto", options)


auto.name = "auto"  # type: ignore[attr-defined]


class TestAutoContract(BackendContract):
    """`auto` for host memory, with every engine that this host has."""

    fences_dead_neighbours = True

    def factory(self) -> BackendFactory:
        return auto


def test_a_transfer_is_done_when_submit_returns_even_with_a_stopped_peer(stack: ExitStack) -> None:
    target = target_process(CmaBackend, BackendOptions(), stack)
    backend, arena = opened(CmaBackend, BackendOptions(), stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    target.stop()
    after = expected_after(arena, target.arena, WHOLE)
    transfer = backend.submit(peer, batch_of(arena, target.arena, WHOLE))
    assert transfer.poll() is TransferStatus.DONE
    np.testing.assert_array_equal(target.arena.memory, after)


def test_no_process_but_the_peers_own_is_written_to(stack: ExitStack) -> None:
    target = target_process(CmaBackend, BackendOptions(), stack)
    backend, arena = opened(CmaBackend, BackendOptions(), stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    assert isinstance(peer, CmaPeer)
    target.kill()
    with pytest.raises(PeerUnreachable, match="has ended"):
        backend.submit(peer, batch_of(arena, target.arena, WHOLE))


EXECUTES = """
import os, sys
from disagg.machine.processes import IdentitySocket
identity = IdentitySocket()
print(identity.name, flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", "print('executed', flush=True); input()"])
"""


def test_no_program_but_the_peers_own_is_written_to(stack: ExitStack) -> None:
    """One that the peer's process executes keeps the process and its number, and has other memory."""
    backend, arena = opened(CmaBackend, BackendOptions(), stack)
    command = [sys.executable, "-c", EXECUTES]
    running = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(running.kill)
    assert running.stdin is not None
    assert running.stdout is not None
    process = ProcessWatch.attest(running.stdout.readline().strip())
    endpoint = encode_endpoint("cma", msgspec.msgpack.encode(CmaDescriptor(running.pid)), [])
    peer = backend.connect(endpoint, process=process, epoch=1)
    print("go on", file=running.stdin, flush=True)
    assert running.stdout.readline() == "executed\n"
    with pytest.raises(PeerUnreachable, match="executes another program"):
        backend.submit(peer, batch_of(arena, arena, WHOLE))
    with pytest.raises(PeerUnreachable, match="executes another program"):
        backend.connect(endpoint, process=process, epoch=2)


def test_an_endpoint_of_this_process_that_a_peer_passes_on_is_refused(stack: ExitStack) -> None:
    """Otherwise a peer could name any memory, and have this process write to its own."""
    backend, arena = opened(CmaBackend, BackendOptions(), stack)
    target = target_process(CmaBackend, BackendOptions(), stack)
    own = encode_endpoint("cma", msgspec.msgpack.encode(CmaDescriptor(os.getpid())), [MemoryRegion(arena.address(0), 64)])
    with pytest.raises(PeerUnreachable, match="passes on an endpoint that is not its own"):
        backend.connect(own, process=target.process, epoch=1)
    with pytest.raises(PeerUnreachable, match="the kernel does not attest the peer's process"):
        backend.connect(own, epoch=1)


def test_a_copy_that_the_kernel_refuses_is_a_failed_transfer(stack: ExitStack) -> None:
    """The peer announces memory that is not mapped."""
    target = target_process(CmaBackend, BackendOptions(), stack)
    backend, arena = opened(CmaBackend, BackendOptions(), stack)
    descriptor, _ = decode_endpoint("cma", target.endpoint)
    endpoint = encode_endpoint("cma", descriptor, [target.arena.regions[0], MemoryRegion(1 << 62, 64)])
    peer = backend.connect(endpoint, process=target.process, epoch=1)
    copies = batch_of(arena, target.arena, [(0, 0, 0, 0, 64)])
    object.__setattr__(copies, "destination", np.array([1 << 62], np.uint64))
    transfer = backend.submit(peer, copies)
    assert transfer.poll() is TransferStatus.FAILED
    assert "Bad address" in str(transfer.error)
    transfer.close()


def test_a_peer_that_no_copy_can_reach_is_refused_at_connect(stack: ExitStack) -> None:
    backend, _ = opened(CmaBackend, BackendOptions(), stack)
    own = msgspec.msgpack.encode(CmaDescriptor(os.getpid()))
    identity = IdentitySocket()
    stack.callback(identity.close)
    process = ProcessWatch.attest(identity.name)
    with pytest.raises(PeerUnreachable, match="Bad address"):
        backend.connect(encode_endpoint("cma", own, [MemoryRegion(1 << 62, 64)]), process=process, epoch=1)
    gpu = [MemoryRegion(4096, 64, Device("cuda", 0))]
    with pytest.raises(PeerUnreachable, match="GPU"):
        backend.connect(encode_endpoint("cma", own, gpu), process=process, epoch=1)


def test_options_and_memory_that_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in (Transport.TCP, Transport.RDMA):
        with pytest.raises(BackendUnavailable, match=f"found '{transport.value}'"):
            CmaBackend(BackendOptions(transport=transport))
    with pytest.raises(ConfigError, match="cuda:1"):
        CmaBackend(BackendOptions()).register([MemoryRegion(4096, 16, Device("cuda", 1))])
    with pytest.raises(LocalProtocolError, match="register"):
        CmaBackend(BackendOptions()).endpoint()
    monkeypatch.setattr(cma, "copy_refusal", lambda *_: "process_vm_readv: Operation not permitted")
    with pytest.raises(BackendUnavailable, match="Operation not permitted"):
        CmaBackend(BackendOptions(require=Transport.SHM))


def test_close_waits_for_a_copy_and_a_fence_sees_it(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    target = target_process(CmaBackend, BackendOptions(), stack)
    backend, arena = opened(CmaBackend, BackendOptions(), stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> int:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        assert not closed.is_set()
        return 0

    def close() -> None:
        backend.close()
        closed.set()

    monkeypatch.setattr(_native, "copy_between_processes", slow)
    batch = batch_of(arena, target.arena, WHOLE)
    writer = threading.Thread(target=backend.submit, args=(peer, batch))
    writer.start()
    assert inside.wait(PATIENCE_S)
    target.kill()
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    closer = threading.Thread(target=close)
    closer.start()
    go_on.set()
    for thread in (writer, closer):
        thread.join(PATIENCE_S)
    assert closed.is_set()
    assert backend.fence(peer, epoch=1) is Fence.QUIET


def test_closing_proves_nothing_while_a_process_that_it_met_lives(stack: ExitStack) -> None:
    target = target_process(CmaBackend, BackendOptions(), stack)
    backend, _ = opened(CmaBackend, BackendOptions(), stack)
    assert isinstance(backend, QuietWhenClosed)
    assert isinstance(backend, ProvesByProcess)
    assert backend.is_quiet_when_closed()
    backend.connect(target.endpoint, process=target.process, epoch=1)
    backend.close()
    assert not backend.is_quiet_when_closed()
    target.kill()
    assert backend.is_quiet_when_closed()


# -- chosen by `auto` --------------------------------------------------------------------------------------------------


def test_auto_reaches_peers_of_this_host_by_cma_and_names_it(stack: ExitStack) -> None:
    target = target_process(auto, BackendOptions(), stack)
    backend, arena = opened(auto, BackendOptions(), stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    assert backend.transport == "cma: shm"
    assert isinstance(backend, Gathering)
    assert backend.gathers_from(peer) == cma.GATHER_FROM
    after = expected_after(arena, target.arena, WHOLE)
    assert backend.submit(peer, batch_of(arena, target.arena, WHOLE)).poll() is TransferStatus.DONE
    np.testing.assert_array_equal(target.arena.memory, after)


def test_auto_takes_the_network_engine_where_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    target = target_process(auto, BackendOptions(), stack)
    backend, _ = opened(auto, BackendOptions(), stack)
    if len(backend.engines) == 1:  # type: ignore[attr-defined]
        pytest.skip("this host has neither NIXL nor Mooncake")
    monkeypatch.setattr(cma, "copy_refusal", lambda *_: "process_vm_readv: Operation not permitted")
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    assert not backend.transport.startswith("cma")
    assert isinstance(backend, Gathering)
    assert backend.gathers_from(peer) is None
