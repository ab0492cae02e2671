"""The shipped faults: each is what it says, and everything survives those that an engine or a network may have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from disagg import ConfigError, new_request_id
from disagg.backends.base import Backend, BackendOptions, Fence, Op, Transfer, TransferStatus
from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError
from disagg.core.memory import MemoryRegion
from disagg.testing.contract import BackendContract, BackendFactory
from disagg.testing.faults import BackendFaults, FaultyBackend, MessageFaults, Trouble, inject, mistreat
from disagg.testing.reference import PageList
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

SURVIVED = BackendFaults(seed=3, fail=0.1, delay=0.3, unsettle=0.1, delay_s=(0.0, 0.01))


class TestFaultyBackendsContract(BackendContract):
    """Without faults it is the backend that it is around."""

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
        """Four copies of 16 bytes, which are everything."""
        offsets = np.arange(0, 64, 16, dtype=np.uint64)
        base, there = np.uint64(self.here.ctypes.data), np.uint64(self.there.ctypes.data)
        return self.faulty.submit(Op.WRITE, self.peer, CopyBatch(base + offsets, there + offsets, np.full(4, 16, np.uint64)))

    def landed(self, count: int = 64) -> bool:
        return (self.there[:count] == self.here[:count]).all() and not self.there[count:].any()

    def close(self) -> None:
        self.faulty.close()
        self.other.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def ordered(**odds: Any) -> pytest.MarkDecorator:
    """The test's engine has these faults."""
    return pytest.mark.parametrize("pair", [BackendFaults(delay_s=(0.02, 0.03), **odds)], indirect=True)


@ordered(fail=1.0)
def test_fail_makes_half_of_the_copies(pair: Pair) -> None:
    transfer = pair.write()
    until(lambda: transfer.poll() is TransferStatus.FAILED)
    assert transfer.error == "a fault was ordered"
    assert pair.landed(32)
    transfer.close()


@ordered(delay=1.0)
def test_delay_is_pending_until_it_lands(pair: Pair) -> None:
    transfer = pair.write()
    assert transfer.poll() is TransferStatus.PENDING
    assert not pair.there.any()
    with pytest.raises(LocalProtocolError, match="only a settled one can be closed"):
        transfer.close()
    until(lambda: transfer.poll() is TransferStatus.DONE)
    assert pair.landed()


@ordered(unsettle=1.0)
def test_unsettled_is_settled_only_once_it_has_landed(pair: Pair) -> None:
    transfer = pair.write()
    assert transfer.poll() is TransferStatus.UNSETTLED
    until(lambda: transfer.poll() is TransferStatus.FAILED)
    assert pair.landed()


@ordered(late=1.0)
def test_late_lands_after_it_has_failed(pair: Pair) -> None:
    transfer = pair.write()
    assert transfer.poll() is TransferStatus.FAILED
    assert not pair.there.any()
    transfer.close()
    until(pair.landed)


@ordered(lose=1.0)
def test_lose_is_done_and_nothing_lands(pair: Pair) -> None:
    assert pair.write().poll() is TransferStatus.DONE
    assert not pair.there.any()


@ordered(double=1.0)
def test_double_lands_again(pair: Pair) -> None:
    assert pair.write().poll() is TransferStatus.DONE
    assert pair.landed()
    pair.there[:] = 0
    until(pair.landed)


@ordered(unsettle=1.0, fencing=False)
def test_without_fencing_what_is_unsettled_has_failed_and_everything_is_quiet(pair: Pair) -> None:
    assert pair.write().poll() is TransferStatus.FAILED
    assert pair.faulty.fence(pair.peer, epoch=2) is Fence.QUIET
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
    assert set(drawn[0]) == {Trouble.FAIL, Trouble.LOSE, Trouble.LATE}


def test_impossible_odds_are_refused() -> None:
    with pytest.raises(ConfigError, match="sum is 1 at most"):
        BackendFaults(fail=0.6, delay=0.6)
    with pytest.raises(ConfigError, match="message faults: expected probabilities"):
        MessageFaults(lose=-0.1)


def test_an_engine_with_faults_loses_no_byte_and_no_row() -> None:
    """What is not right fails, with the engine's words on both sides; every row comes back once it is quiet."""
    settings = {"backend": inject("local", SURVIVED)}
    with cluster(Side(tp=2), Side(tp=1, page=8), settings=settings) as made:
        events = [event for _ in range(25) for event in made.transfer(37, chunks=(16,))]
        failed = [event for event in events if not event.ok]
        assert 0 < len(failed) < len(events)
        assert all("a fault was ordered" in str(event.error) for event in failed)
        until(lambda: all(event.lease.released for event in events))
        assert not any(rank.manager.health().quarantined for rank in made.prefill + made.decode)


def test_messages_that_are_lost_doubled_delayed_and_reordered_cost_time_only() -> None:
    """Case 38, on live managers."""
    with cluster(Side(tp=2), Side(tp=1, page=8)) as made:
        channels = [
            mistreat(rank.manager, MessageFaults(seed=seed, lose=0.1, double=0.2, delay=0.3, delay_s=(0.0, 0.1)))
            for seed, rank in enumerate(made.prefill + made.decode)
        ]
        for _ in range(8):
            assert all(event.ok for event in made.transfer(37, chunks=(16,)))
        counts = sum((channel.counts for channel in channels[1:]), channels[0].counts)
        assert all(counts[fate] for fate in ("lose", "double", "delay"))


def test_an_engine_that_lies_is_found_out_by_the_bytes_alone() -> None:
    """The negative control of the two tests above: without it they might see nothing."""
    losing = {"backend": inject("local", BackendFaults(lose=1.0))}
    with cluster(Side(), Side(), settings=losing) as made, pytest.raises(AssertionError):
        made.transfer(20)
    settings = {"backend": inject("local", BackendFaults(unsettle=1.0, delay_s=(0.2, 0.3), fencing=False))}
    with cluster(Side(), Side(), settings=settings) as made:
        request = new_request_id()
        receiver = receive(made.decode[0], request, PageList((0, 1, 2, 3, 4)), need=(0, 20))
        sender = send(made.prefill[0], request, PageList((0, 1, 2, 3, 4)), 20)
        event = receiver.wait(timeout_s=DEADLINE_S)
        until(lambda: event.lease.released)
        assert not sender.wait(timeout_s=DEADLINE_S).ok
        given_back = made.decode[0].pools[0][0].view(np.uint8)
        given_back[...] = 0x11
        until(lambda: not (given_back == 0x11).all())
