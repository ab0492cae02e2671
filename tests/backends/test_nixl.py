"""Backend `nixl` with the real engine, against peers in processes of their own, and what is its own."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from disagg.backends.base import BackendOptions, Fence, TransferStatus, Transport
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.backends.nixl.backend import NixlBackend, NixlDescriptor
from disagg.backends.nixl.bindings import ERRORS, FLAVOURS, check_version, engine_errors, load_bindings
from disagg.backends.nixl.ucx import conflicts, has_rdma, ucx_settings
from disagg.core.errors import (
    BackendUnavailable,
    ConfigError,
    DisaggError,
    LocalProtocolError,
    PeerIncompatible,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.machine.rdma import rdma_refusal
from disagg.testing.contract import (
    REGION_NBYTES,
    BackendContract,
    BackendFactory,
    ProcessTarget,
    batch_of,
    settle,
)
from tests.backends.conftest import opened, require_engine, target_process

require_engine("nixl._bindings", "nixl")

TCP = BackendOptions(require=Transport.TCP)
SHM = BackendOptions(require=Transport.SHM)
WHOLE = [(0, 0, 0, 0, REGION_NBYTES[0])]
PATIENCE_S = 60.0


class _Contract(BackendContract):
    fences_dead_neighbours = True

    def factory(self) -> BackendFactory:
        return NixlBackend


class TestNixlContract(_Contract):
    """Loopback, UCX's own choice."""


class TestNixlTcpContract(_Contract):
    closes_when_renewed = True

    def options(self) -> BackendOptions:
        return TCP


class TestNixlShmContract(_Contract):
    def options(self) -> BackendOptions:
        return SHM


# -- what the status table of the module says -------------------------------------------------------------------------


def test_tcp_to_a_stopped_peer_stays_pending_and_is_never_settled(stack: ExitStack) -> None:
    target = target_process(NixlBackend, TCP, stack)
    backend, arena = opened(NixlBackend, TCP, stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    target.stop()
    transfer = backend.submit(peer, batch_of(arena, target.arena, WHOLE))
    assert [transfer.poll() for _ in range(200)] == [TransferStatus.PENDING] * 200
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    with pytest.raises(LocalProtocolError, match="pending"):
        transfer.close()
    backend.disconnect(peer)
    assert transfer.poll() is TransferStatus.PENDING
    backend.close()
    assert transfer.poll() is TransferStatus.UNSETTLED
    assert "closed" in str(transfer.error)


def test_a_transfer_left_pending_by_disconnect_can_still_be_polled_to_its_end(stack: ExitStack) -> None:
    target = target_process(NixlBackend, TCP, stack)
    backend, arena = opened(NixlBackend, TCP, stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    target.stop()
    transfer = backend.submit(peer, batch_of(arena, target.arena, WHOLE))
    backend.disconnect(peer)
    target.go_on()
    deadline = time.monotonic() + PATIENCE_S
    while transfer.poll() is TransferStatus.PENDING and time.monotonic() < deadline:
        time.sleep(0.001)
    assert transfer.poll() is TransferStatus.DONE, transfer.error
    np.testing.assert_array_equal(target.arena.view(0), arena.view(0))
    transfer.close()


@pytest.mark.parametrize("options", [TCP, SHM], ids=["tcp", "shm"])
def test_the_end_of_a_writer_is_a_proof_over_shm_and_none_over_tcp(options: BackendOptions, stack: ExitStack) -> None:
    """The writer posts to a stopped target and is killed; what the target's memory does when the target goes on."""
    target, writer = target_process(NixlBackend, options, stack), ProcessTarget(NixlBackend, options, patience_s=PATIENCE_S)
    stack.callback(writer.close)
    target.arena.view(0)[:] = 1
    writer.arena.view(0)[:] = 0xA5
    writer.connect(target)
    target.stop()
    status = writer.write(target.endpoint, target.arena.address(0))
    time.sleep(0.2)  # what the writer's socket takes, it takes
    writer.kill()
    at_death = int((target.arena.view(0) == 0xA5).sum())
    target.go_on()
    if options is SHM:
        assert status is TransferStatus.DONE
        assert at_death == REGION_NBYTES[0]
        return
    assert status is TransferStatus.PENDING
    assert at_death == 0
    deadline = time.monotonic() + PATIENCE_S
    while not (target.arena.view(0) == 0xA5).any():
        assert time.monotonic() < deadline, "nothing landed late: the module's table may be too careful here"
        time.sleep(0.001)


def test_the_end_of_a_process_that_is_not_attested_proves_nothing(stack: ExitStack) -> None:
    """That of a clone of this machine, say: its boot id is the same, and the number of its process is free here."""
    target = target_process(NixlBackend, TCP, stack)
    backend, _ = opened(NixlBackend, TCP, stack)
    peer, attested = (
        backend.connect(target.endpoint, epoch=1),
        backend.connect(target.endpoint, process=target.process, epoch=2),
    )
    target.kill()
    deadline = time.monotonic() + PATIENCE_S
    while backend.fence(attested, epoch=2) is not Fence.QUIET:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN


def test_a_peer_that_was_disconnected_can_still_write(stack: ExitStack) -> None:
    """What `docs/security.md` warns of: a key that was given away stays valid until the engine ends."""
    writer = target_process(NixlBackend, TCP, stack)
    backend, arena = opened(NixlBackend, TCP, stack)
    backend.disconnect(backend.connect(writer.endpoint, process=writer.process, epoch=1))
    writer.arena.view(0)[:] = 0xA5
    endpoint = backend.endpoint()
    writer.connect(cast(ProcessTarget, SimpleNamespace(endpoint=endpoint, identity="nobody")))
    writer.write(endpoint, arena.address(0))
    deadline = time.monotonic() + PATIENCE_S
    while not (arena.view(0) == 0xA5).all():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_agent_is_unloaded_although_its_first_read_once_took_too_long(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an agent that is loaded anew gets a new connection of UCX, in place of one that broke."""
    target = target_process(NixlBackend, TCP, stack)
    backend, _ = opened(NixlBackend, TCP, stack)
    assert isinstance(backend, NixlBackend)
    target.stop()
    with monkeypatch.context() as patch:
        patch.setattr("disagg.backends.nixl.backend.WARM_UP_S", 0.3)
        with pytest.raises(PeerUnreachable, match=r"nothing in 0\.3 s"):
            backend.connect(target.endpoint, process=target.process, epoch=1)
    target.go_on()
    deadline = time.monotonic() + PATIENCE_S
    for epoch in itertools.count(2):
        backend.disconnect(backend.connect(target.endpoint, process=target.process, epoch=epoch))
        if not backend._remote:
            break
        assert time.monotonic() < deadline


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_damaged_metadata_is_refused_before_ucx_reads_it(
    place: float, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX has ended the process in four of 470 such cases."""
    target = target_process(NixlBackend, TCP, stack)
    backend, arena = opened(NixlBackend, TCP, stack)
    raw, regions = decode_endpoint("nixl", target.endpoint)
    descriptor = msgspec.msgpack.decode(raw, type=NixlDescriptor)
    damaged = bytearray(descriptor.metadata)
    damaged[-1 if place < 0 else int(place * len(damaged))] ^= 1
    changed = msgspec.msgpack.encode(msgspec.structs.replace(descriptor, metadata=bytes(damaged)))
    with monkeypatch.context() as patch:
        patch.setattr(NixlBackend, "_load", lambda *_: pytest.fail("UCX would read it"))
        with pytest.raises(RemoteProtocolError, match="the metadata is damaged: its digest differs"):
            backend.connect(encode_endpoint("nixl", changed, regions), epoch=1)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    transfer = backend.submit(peer, batch_of(arena, target.arena, WHOLE))
    assert settle(transfer) is TransferStatus.DONE


@pytest.mark.parametrize("version", ["1.2.0", "1.6.0", "2.5.1"])
def test_an_agent_of_another_release_is_refused_before_nixl_reads_it(
    version: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection between two of them has ended a process."""
    target = target_process(NixlBackend, TCP, stack)
    backend, _ = opened(NixlBackend, TCP, stack)
    assert isinstance(backend, NixlBackend)
    raw, regions = decode_endpoint("nixl", target.endpoint)
    descriptor = msgspec.msgpack.decode(raw, type=NixlDescriptor)
    own = backend._nixl.version
    assert own
    assert descriptor.agent.endswith(f"-{own}")
    changed = msgspec.structs.replace(descriptor, agent=descriptor.agent.removesuffix(own) + version)
    monkeypatch.setattr(NixlBackend, "_load", lambda *_: pytest.fail("NIXL would read it"))
    with pytest.raises(PeerIncompatible, match=f"expected the peer's NIXL to be {own}, as here, found '{version}'"):
        backend.connect(encode_endpoint("nixl", msgspec.msgpack.encode(changed), regions), epoch=1)


@pytest.mark.parametrize(("version", "is_refused"), [("1.2.0", True), ("0.10.1", True), ("1.5.0rc1", False), ("", False)])
def test_nixl_before_the_oldest_release_is_unavailable(version: str, is_refused: bool) -> None:
    expected = pytest.raises(BackendUnavailable, match=f"expected NIXL 1.5 or newer, found {version}")
    with expected if is_refused else nullcontext():
        check_version(version)


def test_every_exception_of_nixl_is_mapped() -> None:
    bindings = load_bindings()
    own = {error.__name__ for error in engine_errors(bindings) if error.__module__ != "builtins"}
    assert own == set(ERRORS)
    assert all(issubclass(kind, DisaggError) for kind in ERRORS.values())


@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_of_nixl_becomes_one_of_ours(name: str, stack: ExitStack) -> None:
    backend, _ = opened(NixlBackend, SHM, stack)
    assert isinstance(backend, NixlBackend)
    foreign = getattr(load_bindings(), name)("words")
    with pytest.raises(ERRORS[name], match=f"{name}: words") as caught, backend._nixl.mapped("testing"):
        raise foreign
    assert caught.value.__cause__ is foreign


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl._bindings", *FLAVOURS):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable, match="pip install nixl"):
        NixlBackend(BackendOptions())


def test_the_module_does_not_import_the_engine() -> None:
    code = "import sys, disagg.backends.nixl.backend; sys.exit('nixl' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_engine_does_not_connect_to_itself(stack: ExitStack) -> None:
    backend, _ = opened(NixlBackend, BackendOptions(), stack)
    with pytest.raises(RemoteProtocolError, match="itself"):
        backend.connect(backend.endpoint(), epoch=1)


# -- transports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rdma", "gpus", "expected"),
    [
        (BackendOptions(), False, False, {"UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo"}),
        (BackendOptions(), True, True, {"UCX_NET_DEVICES": "lo"}),
        (TCP, False, False, {"UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}),
        (SHM, True, True, {"UCX_NET_DEVICES": "lo", "UCX_TLS": "shm,tcp,cuda"}),
        (
            BackendOptions(host="192.0.2.9", transport=Transport.SHM),
            True,
            False,
            {"UCX_NET_DEVICES": "lo", "UCX_TLS": "shm,tcp"},
        ),
        (BackendOptions(host="192.0.2.9", require=Transport.RDMA), True, False, {"UCX_TLS": "ib,self"}),
        (BackendOptions(host="192.0.2.9", trusted_network=True), True, False, {"UCX_TLS": "^shm"}),
        (
            BackendOptions(host="192.0.2.9", transport=Transport.RDMA, devices=("mlx5_0:1", "mlx5_1:1")),
            True,
            True,
            {"UCX_TLS": "ib,self,cuda", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1", "UCX_MAX_RMA_RAILS": "2"},
        ),
    ],
)
def test_what_ucx_is_told(options: BackendOptions, rdma: bool, gpus: bool, expected: dict[str, str]) -> None:
    assert ucx_settings(options, rdma=rdma, gpus=gpus) == {"UCX_USE_MT_MUTEX": "y", **expected}


@pytest.mark.parametrize("transport", [Transport.AUTO, Transport.TCP])
@pytest.mark.parametrize("host", ["192.0.2.9", "0.0.0.0", "::", "no-such-host.invalid"])
def test_open_tcp_off_loopback_needs_a_trusted_network(transport: Transport, host: str) -> None:
    with pytest.raises(ConfigError, match="trusted_network"):
        NixlBackend(BackendOptions(host=host, transport=transport))


@pytest.mark.skipif(has_rdma(), reason="this machine has an RDMA device")
def test_rdma_without_a_device_is_unavailable() -> None:
    refusal = rdma_refusal()
    assert refusal is not None
    with pytest.raises(BackendUnavailable, match=re.escape(refusal)):  # in the doctor's words
        NixlBackend(BackendOptions(require=Transport.RDMA))


def test_a_device_that_does_not_exist_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="'tcp'"):
        NixlBackend(BackendOptions(transport=Transport.TCP, devices=("nosuchdevice0",)))


def _listening() -> set[str]:
    """Local addresses, in hexadecimal, of this process's listening TCP sockets, v4 and v6."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:  # the descriptor of this listing itself
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.parametrize(
    "options",
    [BackendOptions(), TCP, SHM, BackendOptions(host="192.0.2.9", transport=Transport.SHM)],
    ids=["auto", "tcp", "shm", "shm off loopback"],
)
def test_nothing_listens_outside_loopback(options: BackendOptions, stack: ExitStack) -> None:
    before = _listening()
    opened(NixlBackend, options, stack)
    sockets = _listening() - before
    assert sockets
    assert all(address.startswith("0100007F:") for address in sockets), sockets
    stack.close()
    assert not _listening() & sockets


@pytest.mark.parametrize(
    ("options", "transport"), [(BackendOptions(), "shm (inferred)"), (SHM, "shm (inferred)"), (TCP, "tcp")]
)
def test_the_transport_is_reported(options: BackendOptions, transport: str, stack: ExitStack) -> None:
    target = target_process(NixlBackend, options, stack)
    backend, _ = opened(NixlBackend, options, stack)
    backend.connect(target.endpoint, process=target.process, epoch=1)
    assert backend.transport == transport


_SHORT_OF_DESCRIPTORS = """
import os, resource, socket, sys
from disagg.backends.base import BackendOptions
from disagg.backends.nixl.backend import NixlBackend
from disagg.machine.tcp import listening_sockets

backend = NixlBackend(BackendOptions())
(descriptor,) = listening_sockets()
with socket.socket(fileno=os.dup(descriptor)) as listening:
    print(listening.getsockname()[1], repr(backend.renewal_due()), flush=True)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    print("none left", flush=True)
sys.stdin.readline()
for each in held:
    os.close(each)
print("broken:", backend.renewal_due())
backend.close()
print("closed:", backend.renewal_due())
"""


def test_an_engine_that_can_serve_no_new_peer_says_so(stack: ExitStack) -> None:
    """UCX closes its listening socket if no descriptor is free when a peer connects."""
    command = [sys.executable, "-c", _SHORT_OF_DESCRIPTORS]
    other = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert other.stdin is not None
    assert other.stdout is not None
    port, before = other.stdout.readline().split()
    assert before == "''"
    assert other.stdout.readline() == "none left\n"
    with suppress(ConnectionResetError), socket.create_connection(("127.0.0.1", int(port)), timeout=PATIENCE_S) as connection:
        assert connection.recv(1) == b""  # UCX does not accept it
    other.stdin.close()
    said = dict(line.rstrip("\n").split(": ", 1) for line in other.stdout if line.startswith(("broken: ", "closed: ")))
    assert said["broken"].startswith("backend 'nixl': UCX has closed the socket on which it accepts peers")
    assert said["closed"] == ""


# -- the environment --------------------------------------------------------------------------------------------------


def test_the_environment_is_left_as_it_was(stack: ExitStack) -> None:
    before = dict(os.environ)
    opened(NixlBackend, TCP, stack)
    opened(NixlBackend, SHM, stack)
    assert dict(os.environ) == before


def test_what_the_user_has_set_stays_and_is_reported(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(BackendUnavailable, match="UCX_TLS='tcp' is set"):
        NixlBackend(SHM)
    backend, _ = opened(NixlBackend, BackendOptions(transport=Transport.SHM), stack)
    assert "UCX_TLS='tcp' is set, 'shm,tcp' was asked for" in backend.transport
    assert os.environ["UCX_TLS"] == "tcp"


def test_the_same_setting_is_no_conflict() -> None:
    assert conflicts({"UCX_TLS": "tcp", "UCX_MODULES": "^ib"}, {"UCX_TLS": "tcp", "UCX_MODULES": "^ib,cuda"}) == []
    assert conflicts({"UCX_USE_MT_MUTEX": "y"}, {"UCX_USE_MT_MUTEX": "n"}) == []
    assert conflicts({}, {"UCX_TLS": "all"}) == []


def test_transports_that_the_user_excludes_are_not_inferred() -> None:
    assert conflicts({}, {"UCX_TLS": "^cma"}) == ["UCX_TLS='^cma' is set, 'all' was asked for"]
