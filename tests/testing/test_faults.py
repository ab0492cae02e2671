"""The shipped faults: each does what it documents, and requests survive those of real engines and networks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from disagg import ConfigError, new_request_id
from disagg.backends.base import Backend, BackendOptions, Fence, Transfer, TransferStatus
from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError, PeerUnreachable
from disagg.core.memory import MemoryRegion
from disagg.testing import backend_faults
from disagg.testing.contract import BackendContract, BackendFactory
from disagg.testing.delayed_actions import DelayedActions
from disagg.testing.faults import BackendFaults, FaultyBackend, FaultyTransfer, MessageFaults, TransferFault, inject, mistreat
from disagg.testing.reference import PageList
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

SURVIVED = BackendFaults(seed=3, fail=0.1, delay=0.3, unsettle=0.1, delay_s=(0.0, 0.01))


class TestFaultyBackendsContract(BackendContract):
    """Without faults it behaves as its inner backend."""

    separate_processes = False

    def factory(self) -> BackendFactory:
        return inject("local", BackendFaults())


class Pair:
    """Two engines of this process, one of them faulty, with 64 bytes each."""

    def __init__(self, faults: BackendFaults) -> None:
        self.here, self.there = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
        self.faulty, other = inject("local", faults)(BackendOptions()), inject("local", BackendFaults())(BackendOptions())
        for backend, memory in ((self.faulty, self.here), (other, self.there)):
            backend.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        self.other: Backend = other
        self.peer = self.faulty.connect(other.endpoint(), epoch=1)

    def write(self) -> Transfer:
        """Write all 64 bytes in four copies."""
        offsets = np.arange(0, 64, 16, dtype=np.uint64)
        base, there = np.uint64(self.here.ctypes.data), np.uint64(self.there.ctypes.data)
        return self.faulty.submit(self.peer, CopyBatch(base + offsets, there + offsets, np.full(4, 16, np.uint64)))

    def landed(self, count: int = 64) -> bool:
        return (self.there[:count] == self.here[:count]).all() and not self.there[count:].any()

    def close(self) -> None:
        self.faulty.close()
        self.other.close()


@pytest.fixture
def may_land(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Delayed posts also wait for this event, so that a test can look at the memory before they land."""
    may_land = threading.Event()

    class Held(DelayedActions):
        def run_after(self, seconds: float, action: Callable[[], None]) -> None:
            def held() -> None:
                may_land.wait()
                action()

            super().run_after(seconds, held)

    monkeypatch.setattr(backend_faults, "DelayedActions", Held)
    yield may_land
    may_land.set()


@pytest.fixture
def pair(request: pytest.FixtureRequest, may_land: threading.Event) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    may_land.set()
    pair.close()


def with_faults(**probabilities: Any) -> pytest.MarkDecorator:
    """Run the test with a pair of engines that has these faults."""
    return pytest.mark.parametrize("pair", [BackendFaults(delay_s=(0.02, 0.03), **probabilities)], indirect=True)


@with_faults(fail=1.0)
def test_fail_posts_half_of_the_copies(pair: Pair) -> None:
    transfer = pair.write()
    until(lambda: transfer.poll() is TransferStatus.FAILED)
    assert transfer.error == "injected fault"
    assert pair.landed(32)
    transfer.close()


@with_faults(delay=1.0)
def test_delay_is_pending_until_it_lands(pair: Pair, may_land: threading.Event) -> None:
    transfer = pair.write()
    assert transfer.poll() is TransferStatus.PENDING
    assert not pair.there.any()
    with pytest.raises(LocalProtocolError, match="expected a settled one to close, found pending"):
        transfer.close()
    may_land.set()
    until(lambda: transfer.poll() is TransferStatus.DONE)
    assert pair.landed()


@with_faults(unsettle=1.0)
def test_unsettled_settles_only_after_it_has_landed(pair: Pair, may_land: threading.Event) -> None:
    transfer = pair.write()
    assert transfer.poll() is TransferStatus.UNSETTLED
    assert not pair.there.any()
    may_land.set()
    until(lambda: transfer.poll() is TransferStatus.FAILED)
    assert pair.landed()


def test_a_delayed_transfer_is_unsettled_while_the_real_one_is() -> None:
    real = FaultyTransfer(status=TransferStatus.UNSETTLED, error="lost")
    delayed = FaultyTransfer(status=TransferStatus.PENDING, error=None)
    delayed.inner = real
    assert (delayed.poll(), delayed.error) == (TransferStatus.UNSETTLED, "lost")
    real.fail(PeerUnreachable("proved quiet"))
    assert delayed.poll() is TransferStatus.FAILED


@with_faults(late=1.0)
def test_late_lands_after_it_has_failed(pair: Pair, may_land: threading.Event) -> None:
    transfer = pair.write()
    assert transfer.poll() is TransferStatus.FAILED
    assert not pair.there.any()
    transfer.close()
    may_land.set()
    until(pair.landed)


@with_faults(lose=1.0)
def test_lose_is_done_and_nothing_lands(pair: Pair) -> None:
    assert pair.write().poll() is TransferStatus.DONE
    assert not pair.there.any()


@with_faults(double=1.0)
def test_double_lands_again(pair: Pair, may_land: threading.Event) -> None:
    assert pair.write().poll() is TransferStatus.DONE
    assert pair.landed()
    pair.there[:] = 0
    may_land.set()
    until(pair.landed)


@with_faults(unsettle=1.0, fencing=False)
def test_without_fencing_unsettled_transfers_fail_and_peers_are_quiescent(pair: Pair, may_land: threading.Event) -> None:
    assert pair.write().poll() is TransferStatus.FAILED
    assert pair.faulty.fence(pair.peer, epoch=2) is Fence.QUIET
    assert not pair.there.any()
    may_land.set()
    until(pair.landed)


def test_kill_ends_the_process() -> None:
    code = (
        "from tests.testing.test_faults import Pair; from disagg.testing.faults import BackendFaults\n"
        "pair = Pair(BackendFaults(kill_at=2)); pair.write(); print('one', flush=True); pair.write(); print('two')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-9, "one\n"), done.stderr


def test_the_same_seed_gives_the_same_faults() -> None:
    drawn = []
    for _ in range(2):
        pair = Pair(BackendFaults(seed=11, fail=0.2, lose=0.2, late=0.2))
        for _ in range(50):
            pair.write()
        assert isinstance(pair.faulty, FaultyBackend)
        drawn.append(dict(pair.faulty.counts))
        pair.close()
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {TransferFault.FAIL, TransferFault.LOSE, TransferFault.LATE}


def test_impossible_probabilities_are_refused() -> None:
    with pytest.raises(ConfigError, match="sum of at most 1"):
        BackendFaults(fail=0.6, delay=0.6)
    with pytest.raises(ConfigError, match="message faults: expected probabilities"):
        MessageFaults(lose=-0.1)


def test_an_engine_with_faults_loses_no_byte_and_no_row() -> None:
    """Faulty transfers fail their requests with the engine's error on both sides; every row is released later."""
    settings = {"backend": inject("local", SURVIVED)}
    with cluster(Side(tp=2), Side(tp=1, page=8), settings=settings) as instances:
        events = [event for _ in range(25) for event in instances.transfer(37, chunks=(16,))]
        failed = [event for event in events if not event.ok]
        assert 0 < len(failed) < len(events)
        assert all("injected fault" in str(event.error) for event in failed)
        until(lambda: all(event.lease.released for event in events))
        assert not any(rank.manager.health().quarantined for rank in instances.prefill + instances.decode)


def test_lost_doubled_delayed_and_reordered_messages_fail_no_request() -> None:
    """Case 38, on live managers."""
    with cluster(Side(tp=2), Side(tp=1, page=8)) as instances:
        channels = [
            mistreat(rank.manager, MessageFaults(seed=seed, lose=0.1, double=0.2, delay=0.3, delay_s=(0.0, 0.1)))
            for seed, rank in enumerate(instances.prefill + instances.decode)
        ]
        for _ in range(8):
            assert all(event.ok for event in instances.transfer(37, chunks=(16,)))
        counts = sum((channel.counts for channel in channels[1:]), channels[0].counts)
        assert all(counts[fault] for fault in ("lose", "double", "delay"))


def test_the_bytes_show_false_reports_of_an_engine(may_land: threading.Event) -> None:
    """The negative control of the two tests above: wrong bytes fail the test."""
    losing = {"backend": inject("local", BackendFaults(lose=1.0))}
    with cluster(Side(), Side(), settings=losing) as instances, pytest.raises(AssertionError):
        instances.transfer(20)
    settings = {"backend": inject("local", BackendFaults(unsettle=1.0, fencing=False))}
    with cluster(Side(), Side(), settings=settings) as instances:
        request = new_request_id()
        receiver = receive(instances.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20))
        sender = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        event = receiver.wait(timeout_s=DEADLINE_S)
        until(lambda: event.lease.released)
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        released = instances.decode[0].pools[0][0].view(np.uint8)
        released[...] = 0x11
        may_land.set()
        until(lambda: not (released == 0x11).all())
