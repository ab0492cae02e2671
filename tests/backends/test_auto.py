"""Several engines as one: the first that reaches a peer is used, and the log has the reasons against the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from disagg.backends import auto
from disagg.backends import registry as backends
from disagg.backends.auto import AutoBackend
from disagg.backends.base import (
    Backend,
    BackendOptions,
    Fence,
    RemotePeer,
    StagingShape,
    TransferStatus,
    Transport,
)
from disagg.backends.local import LocalBackend
from disagg.core.copies import CopyBatch
from disagg.core.errors import (
    BackendUnavailable,
    ConfigError,
    LocalProtocolError,
    PeerIncompatible,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import MemoryRegion
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import IdentitySocket, ProcessWatch
from disagg.testing.contract import BackendContract, BackendFactory


class Choosy(LocalBackend):
    """Serves no memory, or reaches no peer, as its arguments say."""

    name = "choosy"

    def __init__(self, *, serves: bool = True, reaches: bool = True, refusal: type[PeerUnreachable] = PeerUnreachable) -> None:
        super().__init__(BackendOptions())
        self._serves, self._reaches, self._refusal, self.closed = serves, reaches, refusal, False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if not self._serves:
            raise ConfigError("this memory has no handle")
        super().register(regions)

    def endpoint(self) -> bytes:
        return b"anything"

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> RemotePeer:  # type: ignore[override]
        if not self._reaches:
            raise self._refusal("the peer is on another host")
        raise AssertionError(endpoint, epoch)

    def close(self) -> None:
        self.closed = True
        super().close()


class Spans(LocalBackend):
    """Takes span classes, and records them."""

    def prepare_spans(self, peer: RemotePeer, shapes: Sequence[SpanShape]) -> SimpleNamespace:
        return SimpleNamespace(shapes=tuple(shapes), peer=peer)

    def submit_spans(self, prepared: SimpleNamespace, batch: SpanBatch) -> SimpleNamespace:
        return SimpleNamespace(prepared=prepared, batch=batch)


class TestAutoContract(BackendContract):
    separate_processes = False

    def factory(self) -> BackendFactory:
        def build(options: BackendOptions) -> AutoBackend:
            return AutoBackend([Choosy(reaches=False), LocalBackend(options)])

        build.name = "auto"  # type: ignore[attr-defined]
        return build


def opened(memory: np.ndarray, *engines: LocalBackend, missing: Sequence[str] = ()) -> AutoBackend:
    backend = AutoBackend(engines, missing=missing)
    backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    return backend


@pytest.fixture
def memory() -> np.ndarray:
    return np.arange(64, dtype=np.uint8)


def test_the_next_engine_is_used_and_the_reason_said(memory: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    there = np.zeros(64, np.uint8)
    target = opened(there, Choosy(), LocalBackend(BackendOptions()))
    backend = opened(memory, Choosy(reaches=False), LocalBackend(BackendOptions()), missing=["fast: no driver"])
    peer = backend.connect(target.endpoint(), epoch=1)
    assert peer.engine.name == "local"
    assert "reached by local" in caplog.text
    assert "choosy: the peer is on another host" in caplog.text
    assert "fast: no driver" in caplog.text
    copies = CopyBatch(*(np.array([v], np.uint64) for v in (memory.ctypes.data, there.ctypes.data, 64)))
    transfer = backend.submit(peer, copies)
    while transfer.poll() is TransferStatus.PENDING:
        target.connect(backend.endpoint(), epoch=1)
    np.testing.assert_array_equal(there, memory)
    assert backend.prepare_spans(peer, ()) is None
    backend.close()
    target.close()


def test_each_way_to_reach_peers_is_logged_once(
    memory: np.ndarray, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(auto, "MAX_LOGGED", 1)
    target = opened(np.zeros(64, np.uint8), LocalBackend(BackendOptions()))
    other = opened(np.zeros(64, np.uint8), Choosy(), LocalBackend(BackendOptions()))
    backend = opened(memory, Choosy(reaches=False), LocalBackend(BackendOptions()))

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "reached by" in record.getMessage()]

    peers = [backend.connect(each.endpoint(), epoch=1) for each in (target, target, other, other)]
    assert len(lines()) == 2
    assert "the peer does not have it" in lines()[0]
    assert "the peer is on another host" in lines()[1]
    peers.append(backend.connect(target.endpoint(), epoch=1))  # by then it is not remembered any more
    assert len(lines()) == 3
    for peer in peers:
        backend.disconnect(peer)
    for each in (backend, other, target):
        each.close()


def test_an_engine_that_serves_nothing_is_left_out(memory: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    useless = Choosy(serves=False)
    backend = opened(memory, useless, LocalBackend(BackendOptions()))
    assert useless.closed
    assert "choosy: this memory has no handle" in caplog.text
    assert backend.transport.startswith("local: ")
    with pytest.raises(ConfigError, match="no engine can serve this memory: choosy: this memory has no handle"):
        opened(memory, Choosy(serves=False))
    backend.close()


def test_no_engine_in_common(memory: np.ndarray) -> None:
    target, backend = opened(memory, LocalBackend(BackendOptions())), opened(memory, Choosy())
    with pytest.raises(PeerUnreachable, match="no engine reaches the peer: choosy: the peer does not have it"):
        backend.connect(target.endpoint(), epoch=1)
    lasting = opened(memory, Choosy(reaches=False, refusal=PeerIncompatible), Choosy(reaches=False))
    with pytest.raises(PeerIncompatible):
        lasting.connect(backend.endpoint(), epoch=1)
    with pytest.raises(RemoteProtocolError):
        backend.connect(b"nonsense", epoch=1)


def test_span_classes_go_to_the_engine_that_takes_them(memory: np.ndarray) -> None:
    target, backend = opened(memory, LocalBackend(BackendOptions())), opened(memory, Spans(BackendOptions()))
    peer = backend.connect(target.endpoint(), epoch=1)
    prepared = backend.prepare_spans(peer, ())
    assert prepared is not None
    batch = SpanBatch(prepared.shapes, ())
    posted = backend.submit_spans(prepared, batch)
    assert posted.batch is batch  # type: ignore[attr-defined]
    assert posted.prepared.peer is peer.peer  # type: ignore[attr-defined]
    with pytest.raises(LocalProtocolError, match="expected AutoSpans"):
        backend.submit_spans(SimpleNamespace(shapes=()), batch)


class Named(LocalBackend):
    """Has the name of a real engine, and a staging shape that shows it."""

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=len(self.name))


def load_named(monkeypatch: pytest.MonkeyPatch, options: BackendOptions, *, missing: Sequence[str], gpu: bool) -> Backend:
    """`auto`, from engines that have only the names of real ones, without those that are `missing`."""

    def factory(name: str) -> Callable[[BackendOptions], LocalBackend]:
        def start(options: BackendOptions) -> LocalBackend:
            if name in missing:
                raise BackendUnavailable(f"{name} is missing")
            backend = Named(options)
            backend.name = name
            return backend

        return start

    monkeypatch.setattr(backends, "_factory", factory)
    return backends.load("auto", options, gpu=gpu)


@pytest.mark.parametrize(
    ("missing", "gpu", "transport", "expected"),
    [
        ((), True, Transport.AUTO, ("nvlink", "nixl")),
        (("nvlink",), True, Transport.AUTO, ("nixl",)),
        (("nixl", "mooncake"), True, Transport.AUTO, ("nvlink",)),
        ((), True, Transport.TCP, ("nixl",)),
        ((), False, Transport.AUTO, ("cma", "nixl")),
        ((), False, Transport.SHM, ("cma", "nixl")),
        ((), False, Transport.TCP, ("nixl",)),
        (("nixl",), False, Transport.AUTO, ("cma", "mooncake")),
        (("cma",), False, Transport.AUTO, ("nixl",)),
        (("nixl", "mooncake"), False, Transport.AUTO, ("cma",)),
    ],
)
def test_auto_takes_one_engine_of_this_host_and_one_of_the_network(
    missing: Sequence[str], gpu: bool, transport: Transport, expected: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load_named(monkeypatch, BackendOptions(transport=transport), missing=missing, gpu=gpu)
    assert isinstance(backend, AutoBackend)
    assert backend.name == "auto"
    assert backend.engines == expected


@pytest.mark.parametrize(
    ("options", "gpu", "engine"),
    [
        (BackendOptions(), False, "cma"),
        (BackendOptions(host="192.0.2.1", transport=Transport.SHM), False, "cma"),
        (BackendOptions(host="192.0.2.1"), False, "mooncake"),
        (BackendOptions(), True, "mooncake"),
    ],
)
def test_auto_stages_for_the_engine_that_packs(
    options: BackendOptions, gpu: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_named(monkeypatch, options, missing=["nixl"], gpu=gpu).staging.pack_below == len(engine)


class Proof(LocalBackend):
    """An engine whose fence, and whose proof by the end of a process, are set by a test."""

    fenced, ended = Fence.QUIET, True

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        return self.fenced

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        assert process.pid == os.getpid()
        return self.ended

    def is_quiet_when_closed(self) -> bool:
        return self.ended


class Other(Proof):
    name = "other"


def test_a_fence_needs_only_the_proof_of_the_engine_that_the_peer_has_named(memory: np.ndarray) -> None:
    first, second = Proof(BackendOptions()), Other(BackendOptions())
    backend, target = opened(memory, first, second), opened(memory, Proof(BackendOptions()), Other(BackendOptions()))
    identity = IdentitySocket()
    peer = backend.connect(target.endpoint(), process=ProcessWatch.attest(identity.name), epoch=1)
    identity.close()
    second.ended = False
    for unknown in ("", "nobody"):
        backend.written_by(peer, unknown)
        assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    backend.written_by(peer, first.name)
    assert backend.fence(peer, epoch=1) is Fence.QUIET
    backend.written_by(peer, second.name)
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    assert backend.engine_to(peer) == first.name


def test_a_fence_needs_the_proof_of_an_engine_that_an_earlier_connection_used(memory: np.ndarray) -> None:
    """Its bytes may still be under way, and rows of that connection are given back with those of the last one."""
    first, second = Proof(BackendOptions()), Other(BackendOptions())
    backend, target = opened(memory, first, second), opened(memory, Proof(BackendOptions()), Other(BackendOptions()))
    identity = IdentitySocket()
    process = ProcessWatch.attest(identity.name)
    identity.close()
    earlier, peer = (backend.connect(target.endpoint(), process=process, epoch=1) for _ in range(2))
    for connection, writer in ((earlier, second.name), (peer, first.name)):
        backend.written_by(connection, writer)
        backend.disconnect(connection)
    second.ended = False
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    second.ended = True
    assert backend.fence(peer, epoch=1) is Fence.QUIET


def test_a_fence_needs_the_proof_of_every_engine_that_both_sides_have(memory: np.ndarray) -> None:
    """The peer may write by another engine than the one that reaches it from here."""
    first, second = Proof(BackendOptions()), Other(BackendOptions())
    backend, target = opened(memory, first, second), opened(memory, Proof(BackendOptions()), Other(BackendOptions()))
    unattested = backend.connect(target.endpoint(), epoch=1)
    assert backend.fence(unattested, epoch=1) is Fence.UNKNOWN
    identity = IdentitySocket()
    peer = backend.connect(target.endpoint(), process=ProcessWatch.attest(identity.name), epoch=1)
    identity.close()
    assert peer.engine is first
    assert backend.fence(peer, epoch=1) is Fence.QUIET
    assert backend.is_quiet_when_closed()
    second.ended = False
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    assert not backend.is_quiet_when_closed()
    second.ended, first.fenced = True, Fence.UNKNOWN
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    alone = opened(memory, Proof(BackendOptions()))
    second.ended = False
    assert backend.fence(backend.connect(alone.endpoint(), epoch=1), epoch=1) is Fence.UNKNOWN  # `first.fenced`
    first.fenced = Fence.QUIET
    assert backend.fence(backend.connect(alone.endpoint(), epoch=1), epoch=1) is Fence.QUIET
