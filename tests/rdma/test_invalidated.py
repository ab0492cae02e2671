"""Queue pairs that the peer has torn down, and memory keys that it has invalidated: what the writer sees, and what lands."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from contextlib import ExitStack

import numpy as np
import pytest

from disagg.backends.base import Backend, Fence, RemotePeer, Transfer, TransferStatus
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.backends.nixl.backend import NixlBackend
from disagg.core.errors import LocalProtocolError, PeerUnreachable
from disagg.testing.contract import Arena, Piece, ProcessTarget, batch_of
from harness.rdma.link import RdmaLink
from tests.backends.conftest import opened, target_process
from tests.support.rdma import link_options
from tests.support.rdma_pair import wait_until

ENGINES = (("mooncake", 1), ("nixl", 1))
WATCHED_S = 6.0
"""How long a transfer is polled, and memory watched, after the engine or the key is gone."""
CLOSED_S = 2.0
"""An engine is closed within this time, without an answer from its peers."""
TORN_DOWN = {"nixl": TransferStatus.PENDING, "mooncake": TransferStatus.UNSETTLED}
"""The status of a transfer whose peer has closed its engine. A soft device goes on sending the packets again."""
NUM_PIECES, NBYTES = 100, 700


class ForgetfulNixl(NixlBackend):
    """The first `close` only invalidates the key of region 1."""

    forgot = False

    def close(self) -> None:
        if not self.forgot:
            self.forgot = True
            region = self.index.regions[1]
            rows = np.array([[region.address, region.nbytes, 0]], dtype=np.uint64)
            module = self._nixl.module
            self._agent.deregisterMem(module.nixlRegDList(self._nixl.memory_kind("cpu"), rows), [self._ucx])
        else:
            super().close()


class ForgetfulMooncake(MooncakeBackend):
    """The first `close` only invalidates the key of region 1."""

    forgot = False

    def close(self) -> None:
        if not self.forgot and self._engine is not None:
            self.forgot = True
            assert self._engine.batch_unregister_memory([self.index.regions[1].address]) == 0  # type: ignore[attr-defined]
        else:
            super().close()


ENGINE: dict[str, type[NixlBackend] | type[MooncakeBackend]] = {"nixl": NixlBackend, "mooncake": MooncakeBackend}
FORGETFUL: dict[str, type[NixlBackend] | type[MooncakeBackend]] = {"nixl": ForgetfulNixl, "mooncake": ForgetfulMooncake}
FORKSERVER = multiprocessing.get_context("forkserver")


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_a_peer_that_tears_its_queue_pairs_down_in_mid_write(engine: str, link: RdmaLink, stack: ExitStack) -> None:
    """No packet arrives while its engine is closed. Afterwards they do, and find no queue pair: nothing lands, and nothing is
    settled.
    """
    target = target_process(ENGINE[engine], link_options(engine, link, 1), stack, context=FORKSERVER)
    backend, arena = opened(ENGINE[engine], link_options(engine, link, 0), stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    link.lose(100)
    transfer = backend.submit(peer, batch_of(arena, target.arena, pieces()))
    wait_until(lambda: link.lost_packets > 0)
    target.begin_close()
    time.sleep(CLOSED_S)
    link.mend()
    before = target.end_close()
    status = watched(transfer)
    assert status is TORN_DOWN[engine]
    assert hashlib.sha256(target.arena.memory.data).digest() == before
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    with pytest.raises(PeerUnreachable):
        settled_write(backend, peer, arena, target)


@pytest.mark.parametrize(("engine", "rails"), ENGINES)
def test_memory_that_the_peer_has_deregistered(engine: str, link: RdmaLink, stack: ExitStack) -> None:
    """Every other piece goes there. Over Mooncake the key is invalid: none of these lands, and the transfer is not settled,
    although the peer lives and others may have landed. Over NIXL the key goes on to work, since UCX keeps registrations: only
    closing the engine ends it.
    """
    target = target_process(FORGETFUL[engine], link_options(engine, link, 1), stack, context=FORKSERVER)
    backend, arena = opened(ENGINE[engine], link_options(engine, link, 0), stack)
    peer = backend.connect(target.endpoint, process=target.process, epoch=1)
    target.begin_close()
    target.end_close()
    target.arena.memory[:] = 0
    transfer = backend.submit(peer, batch_of(arena, target.arena, pieces()))
    status = watched(transfer)
    landed = [landed_pieces(arena, target.arena, region=region) for region in (0, 1)]
    if engine == "nixl":
        assert (status, landed) == (TransferStatus.DONE, [NUM_PIECES // 2, NUM_PIECES // 2])
        return
    assert status is TransferStatus.UNSETTLED
    assert landed[1] == 0
    assert landed[0] > 0
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    with pytest.raises(LocalProtocolError):
        transfer.close()


def pieces() -> list[Piece]:
    """Pieces of region 0, which go to both regions of the peer in turn."""
    return [(0, i * NBYTES, i % 2, i // 2 * NBYTES, NBYTES) for i in range(NUM_PIECES)]


def watched(transfer: Transfer) -> TransferStatus:
    """The status once it is settled, or after `WATCHED_S`."""
    deadline = time.monotonic() + WATCHED_S
    while not (status := transfer.poll()).settled and time.monotonic() < deadline:
        time.sleep(0.01)
    return status


def landed_pieces(source: Arena, destination: Arena, *, region: int) -> int:
    """Pieces that are in that region of the destination; every other byte of it must be 0."""
    found = destination.view(region).copy()
    landed = 0
    for _, here, there_region, there, nbytes in pieces():
        if there_region == region and (found[there : there + nbytes] == source.view(0)[here : here + nbytes]).all():
            found[there : there + nbytes] = 0
            landed += 1
    assert not found.any(), "a piece is there in part, or elsewhere"
    return landed


def settled_write(backend: Backend, peer: RemotePeer, arena: Arena, target: ProcessTarget) -> None:
    """Write one piece. Raises `PeerUnreachable` if the engine refuses, or gives it up."""
    transfer = backend.submit(peer, batch_of(arena, target.arena, pieces()[:1]))
    deadline = time.monotonic() + WATCHED_S
    while transfer.poll() is TransferStatus.PENDING and time.monotonic() < deadline:
        time.sleep(0.01)
    if transfer.poll() is not TransferStatus.DONE:
        raise PeerUnreachable(transfer.error or "still pending")
