"""What proves that a peer's kernels have ended. `benchmarks.gpu.fence` checks the proofs against the memory itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from disagg.backends.abilities import ProvesByProcess, QuietWhenClosed
from disagg.backends.base import Fence, RemotePeer
from disagg.backends.nvlink.backend import NvlinkBackend
from tests.gpu.pieces import batch_of, new_target, opened
from tests.gpu.targets import PATIENCE_S, Memory, Target, settle

pytestmark = pytest.mark.gpu
AGAIN = 50
"""Fences, 10 ms apart, that must not be `QUIET`."""


def until_quiet(backend: NvlinkBackend, peer: RemotePeer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while backend.fence(peer, epoch=1) is not Fence.QUIET:
        assert time.monotonic() < deadline, f"not quiet after {PATIENCE_S} s"
        time.sleep(0.005)


def stays_unknown(backend: NvlinkBackend, peer: RemotePeer) -> None:
    for _ in range(AGAIN):
        assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
        time.sleep(0.01)


@contextmanager
def descendant(target: Target) -> Iterator[int]:
    """A child of the target with all of its descriptors."""
    pid = target.ask("fork")
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ordinal", [0, pytest.param(1, marks=pytest.mark.two_gpus)])
def test_the_end_of_a_process_is_a_proof(ordinal: int, backend: NvlinkBackend, stack: ExitStack) -> None:
    """On this GPU and on another one; before and after the peer was disconnected."""
    victim = new_target(stack, ordinal)
    peer = backend.connect(victim.endpoint, process=victim.watch, epoch=1)
    process = victim.watch
    assert process is not None
    assert isinstance(backend, ProvesByProcess)
    assert isinstance(backend, QuietWhenClosed)
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    assert not backend.is_quiet_after(process)
    assert not backend.is_quiet_when_closed()
    victim.kill()
    until_quiet(backend, peer)
    backend.disconnect(peer)
    assert backend.fence(peer, epoch=1) is Fence.QUIET
    assert backend.fence(peer, epoch=2) is Fence.UNKNOWN
    assert backend.is_quiet_after(process)
    backend.close()
    assert backend.is_quiet_when_closed()


def test_a_stopped_process_is_not_quiet(backend: NvlinkBackend, stack: ExitStack) -> None:
    victim = new_target(stack)
    peer = backend.connect(victim.endpoint, process=victim.watch, epoch=1)
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGSTOP)
    backend.disconnect(peer)
    stays_unknown(backend, peer)
    victim.kill()
    until_quiet(backend, peer)


def test_a_descendant_with_the_descriptors_is_no_proof(backend: NvlinkBackend, stack: ExitStack) -> None:
    """It keeps the context of the killed process alive."""
    victim = new_target(stack)
    peer = backend.connect(victim.endpoint, process=victim.watch, epoch=1)
    with descendant(victim):
        victim.kill()
        stays_unknown(backend, peer)
        assert victim.watch is not None
        assert not backend.is_quiet_after(victim.watch)
    until_quiet(backend, peer)


def test_a_process_that_the_kernel_does_not_attest_is_never_quiet(backend: NvlinkBackend, stack: ExitStack) -> None:
    """It is in another network namespace, for instance. Its memory can be mapped all the same."""
    victim = new_target(stack)
    peer = backend.connect(victim.endpoint, epoch=1)
    backend.disconnect(peer)
    victim.kill()
    stays_unknown(backend, peer)
    assert not backend.is_quiet_when_closed()


def test_a_transfer_under_way_is_not_quiet(local: Memory, stack: ExitStack) -> None:
    backend, victim = opened(local, stack, blocks=1), new_target(stack)
    peer = backend.connect(victim.endpoint, process=victim.watch, epoch=1)
    transfers = [backend.submit(peer, batch_of(local, victim, [(0, 0, 0, 0, 6_000_000)])) for _ in range(2000)]
    victim.kill()
    until_quiet(backend, peer)
    assert all(transfer.status.settled for transfer in transfers)
    assert all(settle(transfer).settled for transfer in transfers)
