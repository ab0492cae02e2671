"""Managers with engines and packers that compute addresses. The reference implementation replaces the kernels: no GPU."""

from __future__ import annotations

import dataclasses
import gc
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from disagg import new_request_id
from disagg.backends.base import StagingShape
from disagg.backends.local import LocalBackend
from disagg.core import _native
from disagg.core.errors import ConfigError
from disagg.core.leases import Lease
from disagg.core.memory import Device, MemoryRegion
from disagg.ending import Ending
from disagg.protocol.types import Event, RequestKey
from disagg.requests import RequestHandle
from disagg.transfer.pool_memory import GPU_STAGING, SPIN_S, GpuPacker, PoolMemory
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send, wait_by_polling
from tests.support.host_kernels import SIDES, FailedCopies, HostMover, Spans


class Packing(LocalBackend):
    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 20, slot_nbytes=1000, window=3, num_lent=8)


@pytest.mark.parametrize("spin_s", [0.0, 5e-3])
@pytest.mark.parametrize(("prefill", "decode"), SIDES)
def test_an_engine_that_computes_addresses(prefill: Side, decode: Side, spin_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolMemory, "spin_s", spin_s)
    before = Spans.posted
    with cluster(prefill, decode, settings={"backend": Spans}) as made:
        for first_token, num_tokens in ((0, 37), (5, 61)):
            events = made.transfer(num_tokens, first_token=first_token, chunks=(num_tokens // 2,))
            assert all(event.ok for event in events), [event.error for event in events]
    assert Spans.posted > before


@pytest.mark.parametrize("by_events", [False, True])
def test_a_server_that_polls_does_not_delay_other_threads(by_events: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads that busy-poll; `tests/manager/test_requests.py` tests threads that sleep."""
    monkeypatch.setattr(PoolMemory, "spin_s", 5e-3)
    with cluster(Side(), Side(), settings={"backend": Spans}) as made:
        assert all(event.ok for event in wait_by_polling(made, by_events=by_events))


@pytest.mark.parametrize(("prefill", "decode"), SIDES)
def test_packing_by_kernels(prefill: Side, decode: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of 1,000 bytes cut pieces at any byte; threads busy-poll, as for pools on a GPU."""
    monkeypatch.setattr(PoolMemory, "spin_s", 5e-3)
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    before = HostMover.moved
    with cluster(prefill, decode, settings={"backend": Packing}, num_layers=3) as made:
        events = made.transfer(61, first_token=5, chunks=(30,))
        assert all(event.ok for event in events), [event.error for event in events]
    assert HostMover.moved > before


def test_packing_gives_back_its_gpu_buffers_when_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Immediately, without garbage collection, and even if the server keeps its handles."""
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    with cluster(Side(tp=2), Side(), settings={"backend": Packing}) as made:
        gc.collect()
        monkeypatch.setattr(HostMover, "held", 0)
        gc.disable()
        try:
            request = new_request_id()
            receiver = receive(made.decode[0], request, made.pages(made.decode[0], 61), need=(0, 61))
            senders = [send(rank, request, made.pages(rank, 61), 61) for rank in made.prefill]
            assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
            until(lambda: HostMover.held == 0)
        finally:
            gc.enable()


@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_a_kernel_that_fails_ends_its_request(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written and nothing hangs; the next request succeeds through the same slots."""
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    with cluster(Side(), Side(), settings={"backend": Packing}) as made, monkeypatch.context() as patch:
        patch.setattr(HostMover, kernel, lambda *_: FailedCopies())
        request, pages = new_request_id(), [made.pages(rank, 61) for rank in (*made.prefill, *made.decode)]
        receiver = receive(made.decode[0], request, pages[1], need=(0, 61))
        sender = send(made.prefill[0], request, pages[0], 61)
        ends = receiver.wait(timeout_s=DEADLINE_S), sender.wait(timeout_s=DEADLINE_S)
        assert not any(event.ok for event in ends)
        assert any("fallen off the bus" in str(event.error) for event in ends)
        patch.undo()
        assert all(event.ok for event in made.transfer(61))


def test_threads_that_wait_wake_when_the_request_ends() -> None:
    ending, control = Ending(1e-3), cast("Any", SimpleNamespace(inherited="", threads=tuple))
    handle = RequestHandle(control, ending, key=RequestKey(b"0" * 16, 0), peer="prefill", tag=None)
    ended: list[Event] = []
    threads = [threading.Thread(target=lambda: ended.append(handle.wait(timeout_s=DEADLINE_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError, match="not ended within"):
        handle.wait(timeout_s=0.02)
    assert not ended
    event = Event(handle.key, "prefill", "receive", ok=True, payload=b"", error=None, lease=Lease(), tag=None)
    ending.end(event)
    ending.wake()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ended == [event] * 3
    assert handle.wait(timeout_s=0) is event


def test_staging_depends_on_the_device_of_the_pools() -> None:
    gpu = [MemoryRegion(4096, 64, Device("cuda", 1)), MemoryRegion(8192, 64, Device("cuda", 1))]
    host = [MemoryRegion(1 << 20, 64)]
    shape = StagingShape(pack_below=100)
    assert PoolMemory(host).staging(shape) is shape
    assert (PoolMemory(host).spin_s, PoolMemory(gpu).spin_s) == (0.0, SPIN_S)
    assert PoolMemory(host).allocate_on_device(64) is None
    assert PoolMemory(host).packer(()) is None
    assert PoolMemory(gpu).staging(shape) == GPU_STAGING
    assert PoolMemory(gpu).staging(StagingShape()).pack_below == 0
    assert PoolMemory(gpu + host).staging(shape).pack_below == 0
    assert PoolMemory(gpu + host).packer(()) is None
    assert PoolMemory(gpu).staging(shape, pack_below=7) == dataclasses.replace(GPU_STAGING, pack_below=7)
    with pytest.raises(ConfigError, match="pools on several devices"):
        PoolMemory(gpu + host).staging(shape, pack_below=7)


def test_checksums_run_on_the_device_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.arange(64, dtype=np.uint8)
    base = content.ctypes.data
    memory = PoolMemory([MemoryRegion(base, 64), MemoryRegion(4096, 64, Device("cuda", 3))])
    asked: list[int] = []
    monkeypatch.setattr(memory, "mover", lambda ordinal: SimpleNamespace(digest=lambda *_, **__: asked.insert(0, ordinal)))
    runs = np.array([[0, 0, 0, 0, 2]])
    what: dict[str, Any] = {"row_stride": 8, "token_stride": 4, "itemsize": 1, "seed": 1}
    found = memory.digest(np.array([0]), np.array([base], np.uint64), runs, ((4, 1, 0),), **what)
    assert found == _native.digest(np.array([0]), np.array([base], np.uint64), runs, ((4, 1, 0),), **what)
    assert not asked
    assert memory.digest(np.array([0]), np.array([4100], np.uint64), runs, (), **what) is None
    assert asked == [3]
