"""An engine that cannot deliver half of the pieces: nothing is settled, although the others have landed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from contextlib import ExitStack

import pytest

from disagg.backends.base import Fence, TransferStatus
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.core.errors import LocalProtocolError
from disagg.testing.contract import Arena, Piece, batch_of
from tests.backends.conftest import opened, target_process
from tests.support.rdma import DEVICES, rdma_options

PATIENCE_S = 60.0
APART = tuple(DEVICES.values())
"""Two devices in networks that do not reach each other: pieces from one to the other fail."""
NUM_PIECES, NBYTES = 300, 4000


def test_a_write_of_which_half_has_landed_is_not_settled(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(rdma_options("mooncake"), devices=APART)
    monkeypatch.setattr(MooncakeBackend, "_warm", lambda *_: None)  # it would find the devices apart, and refuse the peer
    target = target_process(MooncakeBackend, options, stack, context=multiprocessing.get_context("forkserver"))
    backend, arena = opened(MooncakeBackend, options, stack)
    target.arena.memory[:] = 0
    arena.memory[:] = 0xA5
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    pieces = [(0, i * NBYTES, 0, i * NBYTES, NBYTES) for i in range(NUM_PIECES)]
    transfer = backend.submit(peer, batch_of(arena, target.arena, pieces))
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
