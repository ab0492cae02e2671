"""Backend `local` against the contract, and what is its own."""

from __future__ import annotations

import gc
import os
import threading

import msgspec
import numpy as np
import pytest

from disagg.backends import local as module
from disagg.backends.base import BackendOptions, Fence, TransferStatus, Transport
from disagg.backends.endpoint import encode_endpoint
from disagg.backends.local import LocalBackend
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, LocalProtocolError, PeerUnreachable
from disagg.core.memory import Device, MemoryRegion
from disagg.testing.contract import BackendContract, BackendFactory


class TestLocalContract(BackendContract):
    separate_processes = False

    def factory(self) -> BackendFactory:
        return LocalBackend


def _opened(memory: np.ndarray) -> LocalBackend:
    backend = LocalBackend(BackendOptions())
    backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
    return backend


def _whole(source: np.ndarray, destination: np.ndarray) -> CopyBatch:
    return CopyBatch(*(np.array([v], np.uint64) for v in (source.ctypes.data, destination.ctypes.data, source.nbytes)))


@pytest.fixture
def memories() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)


def test_an_endpoint_of_another_process_is_refused(memories: tuple[np.ndarray, np.ndarray]) -> None:
    backend = _opened(memories[0])
    token = msgspec.msgpack.encode({"pid": os.getpid() + 1, "token": "x"})
    with pytest.raises(PeerUnreachable, match=f"this is process {os.getpid()}"):
        backend.connect(encode_endpoint("local", token, []), epoch=1)


def test_a_closed_target_makes_submit_and_connect_fail(memories: tuple[np.ndarray, np.ndarray]) -> None:
    here, there = memories
    backend, target = _opened(here), _opened(there)
    endpoint = target.endpoint()
    peer = backend.connect(endpoint, epoch=1)
    target.close()
    with pytest.raises(PeerUnreachable, match="closed"):
        backend.submit(peer, _whole(here, there))
    with pytest.raises(PeerUnreachable, match="closed"):
        backend.connect(endpoint, epoch=2)
    assert not there.any()


def test_a_forgotten_engine_is_not_kept_alive(memories: tuple[np.ndarray, np.ndarray]) -> None:
    backend, target = _opened(memories[0]), _opened(memories[1])
    endpoint = target.endpoint()
    del target
    gc.collect()
    with pytest.raises(PeerUnreachable):
        backend.connect(endpoint, epoch=1)


def test_closing_the_target_waits_for_a_copy_and_the_fence_sees_it(
    memories: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = memories
    backend, target = _opened(here), _opened(there)
    peer, back = backend.connect(target.endpoint(), epoch=1), target.connect(backend.endpoint(), epoch=1)
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    copy = module._copy

    def slow(copies: CopyBatch) -> None:
        inside.set()
        assert go_on.wait(30)
        assert not closed.is_set()
        copy(copies)

    def close() -> None:
        target.close()
        closed.set()

    monkeypatch.setattr(module, "_copy", slow)
    transfers: list[TransferStatus] = []
    writer = threading.Thread(target=lambda: transfers.append(backend.submit(peer, _whole(here, there)).poll()))
    writer.start()
    assert inside.wait(30)
    assert backend.fence(peer, epoch=1) is target.fence(back, epoch=1) is Fence.UNKNOWN
    closer = threading.Thread(target=close)
    closer.start()
    go_on.set()
    writer.join(30)
    closer.join(30)
    assert transfers == [TransferStatus.DONE]
    assert closed.is_set()
    assert backend.fence(peer, epoch=1) is target.fence(back, epoch=1) is Fence.QUIET
    np.testing.assert_array_equal(here, there)


def test_what_it_cannot_be_told() -> None:
    with pytest.raises(ConfigError, match="require"):
        LocalBackend(BackendOptions(require=Transport.TCP))
    with pytest.raises(ConfigError, match="cuda:1"):
        LocalBackend(BackendOptions()).register([MemoryRegion(4096, 16, Device("cuda", 1))])
    with pytest.raises(LocalProtocolError, match="register"):
        LocalBackend(BackendOptions()).endpoint()
