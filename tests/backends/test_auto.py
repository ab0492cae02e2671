"""Several engines as one: the first that reaches a peer is used, and why others are not is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from disagg.backends import registry as backends
from disagg.backends.auto import AutoBackend
from disagg.backends.base import BackendOptions, Op, RemotePeer, TransferStatus, Transport
from disagg.backends.local import LocalBackend
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import MemoryRegion
from disagg.core.spans import SpanBatch, SpanShape
from disagg.testing.contract.backend_contract import BackendContract, BackendFactory


class Choosy(LocalBackend):
    """Serves no memory at all where told so, and reaches nobody where told so."""

    name = "choosy"

    def __init__(self, *, serves: bool = True, reaches: bool = True) -> None:
        super().__init__(BackendOptions())
        self._serves, self._reaches, self.closed = serves, reaches, False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if not self._serves:
            raise ConfigError("this memory has no handle")
        super().register(regions)

    def endpoint(self) -> bytes:
        return b"anything"

    def connect(self, endpoint: bytes, *, epoch: int) -> RemotePeer:  # type: ignore[override]
        if not self._reaches:
            raise PeerUnreachable("the peer is on another host")
        raise AssertionError(endpoint, epoch)

    def close(self) -> None:
        self.closed = True
        super().close()


class Spans(LocalBackend):
    """Takes span classes, and notes them."""

    def prepare_spans(self, op: Op, peer: RemotePeer, shapes: Sequence[SpanShape]) -> SimpleNamespace:
        return SimpleNamespace(shapes=tuple(shapes), peer=peer, op=op)

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
    transfer = backend.submit(Op.WRITE, peer, copies)
    while transfer.poll() is TransferStatus.PENDING:
        target.connect(backend.endpoint(), epoch=1)
    np.testing.assert_array_equal(there, memory)
    assert backend.prepare_spans(Op.WRITE, peer, ()) is None
    backend.close()
    target.close()


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
    with pytest.raises(RemoteProtocolError):
        backend.connect(b"nonsense", epoch=1)


def test_span_classes_go_to_the_engine_that_takes_them(memory: np.ndarray) -> None:
    target, backend = opened(memory, LocalBackend(BackendOptions())), opened(memory, Spans(BackendOptions()))
    peer = backend.connect(target.endpoint(), epoch=1)
    prepared = backend.prepare_spans(Op.WRITE, peer, ())
    assert prepared is not None
    batch = SpanBatch(prepared.shapes, ())
    posted = backend.submit_spans(prepared, batch)
    assert posted.batch is batch  # type: ignore[attr-defined]
    assert posted.prepared.peer is peer.peer  # type: ignore[attr-defined]
    with pytest.raises(LocalProtocolError, match="expected AutoSpans"):
        backend.submit_spans(SimpleNamespace(shapes=()), batch)


@pytest.mark.parametrize(
    ("missing", "gpu", "transport", "expected"),
    [
        ((), True, Transport.AUTO, ["nvlink", "nixl"]),
        (("nvlink",), True, Transport.AUTO, ["nixl"]),
        (("nixl", "mooncake"), True, Transport.AUTO, ["nvlink"]),
        ((), True, Transport.TCP, ["nixl"]),
        ((), False, Transport.AUTO, "nixl"),
        (("nixl",), False, Transport.AUTO, "mooncake"),
    ],
)
def test_what_auto_is(
    missing: Sequence[str], gpu: bool, transport: Transport, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory(name: str) -> Callable[[BackendOptions], LocalBackend]:
        def start(options: BackendOptions) -> LocalBackend:
            if name in missing:
                raise BackendUnavailable(f"{name} is missing")
            backend = LocalBackend(options)
            backend.name = name
            return backend

        return start

    monkeypatch.setattr(backends, "_factory", factory)
    backend = backends.load("auto", BackendOptions(transport=transport), gpu=gpu)
    assert expected == ([engine.name for engine in backend._engines] if isinstance(backend, AutoBackend) else backend.name)
