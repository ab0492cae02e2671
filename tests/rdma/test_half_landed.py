"""An engine that cannot deliver half of the pieces: nothing is settled, although the others have landed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from disagg.backends.base import BackendOptions, Fence, Op, TransferStatus
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.core.errors import LocalProtocolError
from disagg.testing.contract import Arena, Piece, batch_of
from tests.backends.conftest import opened, target_process
from tests.support.rdma import rdma_options

PATIENCE_S = 60.0
NUM_PIECES, NBYTES = 300, 4000


@pytest.fixture
def options() -> Iterator[BackendOptions]:
    """Two devices in networks that do not reach each other: pieces from one to the other fail."""
    names = ("apart0", "apart1")
    for number, name in enumerate(names):
        for command in (
            f"ip link add {name} type dummy",
            f"ip link set {name} mtu 9000 up",
            f"ip addr add 10.98.{number}.1/24 dev {name}",
            f"rdma link add rxe-{name} type rxe netdev {name}",
        ):
            subprocess.run(command.split(), check=True)
    yield dataclasses.replace(rdma_options("mooncake"), devices=tuple(f"rxe-{name}" for name in names))
    for name in names:
        for command in (f"rdma link delete rxe-{name}", f"ip link delete {name}"):
            subprocess.run(command.split(), check=True)


def test_a_write_of_which_half_has_landed_is_not_settled(
    options: BackendOptions, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MooncakeBackend, "_warm", lambda *_: None)  # it would find the devices apart, and refuse the peer
    target = target_process(MooncakeBackend, options, stack, context=multiprocessing.get_context("forkserver"))
    backend, arena = opened(MooncakeBackend, options, stack)
    target.arena.memory[:] = 0
    arena.memory[:] = 0xA5
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    pieces = [(0, i * NBYTES, 0, i * NBYTES, NBYTES) for i in range(NUM_PIECES)]
    transfer = backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, arena, target.arena, pieces))
    until = time.monotonic() + PATIENCE_S
    while not (landed := num_landed(target.arena, pieces)) and time.monotonic() < until:
        assert not transfer.poll().settled, transfer.error
    for _ in range(100):
        assert not transfer.poll().settled, transfer.error
        time.sleep(0.05)
    landed = num_landed(target.arena, pieces)
    assert NUM_PIECES / 4 < landed < NUM_PIECES * 3 / 4
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    with pytest.raises(LocalProtocolError):
        transfer.close()
    backend.close()
    assert transfer.poll() is TransferStatus.UNSETTLED


def num_landed(arena: Arena, pieces: list[Piece]) -> int:
    """Pieces that are wholly at the target."""
    return sum(bool((arena.view(0)[start : start + size] == 0xA5).all()) for _, _, _, start, size in pieces)
