"""Backend `nvlink` between processes on two GPUs: every byte of both sides."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from disagg.backends.base import BackendOptions, Fence, TransferStatus
from disagg.backends.cuda.driver import second_gpu
from disagg.backends.cuda.work_list import encode_shapes, encode_work_list, work_list_nbytes
from disagg.backends.nvlink import engine as nvlink
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.backends.nvlink.engine import NUM_SMALL_BUFFERS
from disagg.core.errors import BackendError, PeerUnreachable
from disagg.core.memory import Device, MemoryRegion
from disagg.core.spans import SpanBatch
from harness.reference_kernels import SpanLaunch, span_pieces
from tests.gpu.pieces import SHAPES, batch_of, check, expected, new_target, opened, pieces_of, shapes_of
from tests.gpu.targets import GUARD, REGION_NBYTES, Memory, Piece, Target, batch, own_process, settle

pytestmark = pytest.mark.gpu

# -- bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_copies_exactly_the_pieces(name: str, backend: NvlinkBackend, local: Memory, target: Target) -> None:
    """Compares every byte of both sides: the pieces, the bytes between them, and the guards around regions."""
    check(backend, local, target, SHAPES[name])


@pytest.fixture(params=["read by the kernel", "uploaded"])
def _work_lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a work list reaches the GPU."""
    if request.param == "uploaded":
        monkeypatch.setattr(nvlink, "NEAR_NBYTES", 0)


@pytest.mark.parametrize(
    ("unit", "skew"), [(1, 0), (6, 0), (16, 0), (16, 4), (48, 0), (256, 0), (250, 1), (1024, 0), (1024, 8)]
)
@pytest.mark.usefixtures("_work_lists")
def test_addresses_computed_on_the_gpu(unit: int, skew: int, backend: NvlinkBackend, local: Memory, target: Target) -> None:
    """Span classes copy the same bytes as the addresses of the reference implementation, and no others."""
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    shapes, parts = shapes_of(local, target, unit=unit, skew=skew)
    prepared = backend.prepare_spans(peer, shapes)
    batch = SpanBatch(prepared.shapes, parts)
    local.scramble(1)
    target.ask("scramble", 2)
    images = local.read(), target.read()
    # Requests leave nothing behind in reused buffers. The last one copies between freshly scrambled memory.
    for transfer in [backend.submit_spans(prepared, batch) for _ in range(NUM_SMALL_BUFFERS + 2)]:
        assert settle(transfer) is TransferStatus.DONE, transfer.error
    local.scramble(1)
    target.ask("scramble", 2)
    last = backend.submit_spans(prepared, batch)
    assert settle(last) is TransferStatus.DONE, last.error
    table = encode_shapes(shapes, lambda addresses, nbytes, side: addresses)
    out = np.zeros(work_list_nbytes(batch) // 8 + 1, np.uint64)
    encode_work_list(batch, table, tile=4096, out=out)
    work_list, total = batch.core, batch.total_nbytes
    ends = local.address(0), target.address(0)
    source_base, destination_base = ends
    at = local.at(0)
    source, after = images[0], images[1].copy()
    for piece in span_pieces(SpanLaunch(out, table.words, *work_list.tiles(0, total), 4096, 0, total)):
        start, stop = at + piece.source - source_base, at + piece.destination - destination_base
        after[stop : stop + piece.nbytes] = source[start : start + piece.nbytes]
    np.testing.assert_array_equal(local.read(), images[0])
    np.testing.assert_array_equal(target.read(), after)
    assert (after != images[1]).any()
    backend.disconnect(peer)


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_any_number_of_blocks(blocks: int, local: Memory, target: Target, stack: ExitStack) -> None:
    backend = opened(local, stack, blocks=blocks)
    check(backend, local, target, SHAPES["mixed"])


def test_an_empty_batch_is_done_at_once(backend: NvlinkBackend, target: Target) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    assert backend.submit(peer, batch([], [], [])).poll() is TransferStatus.DONE


def test_regions_that_touch_or_overlap_are_one(local: Memory, target: Target, stack: ExitStack) -> None:
    backend = NvlinkBackend(BackendOptions())
    stack.callback(backend.close)
    start, nbytes, device = local.address(0), REGION_NBYTES[0], Device("cuda", 0)
    parts = [(0, 1000), (1000, 5000), (3000, 10_000), (4000, 10), (13_000, nbytes - 13_000)]
    backend.register([MemoryRegion(start + offset, size, device) for offset, size in parts])
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    assert settle(backend.submit(peer, batch([start], [target.address(0)], [nbytes]))) is TransferStatus.DONE


def test_several_threads_submit(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    stripes = [[(0, i * 300, 0, i * 300, 300) for i in range(1200) if i % 12 == s] for s in range(12)]
    after = expected(local.read(), target.read(), [p for stripe in stripes for p in stripe], local)
    statuses: list[TransferStatus] = []

    def work(mine: list[list[Piece]]) -> None:
        statuses.extend(settle(backend.submit(peer, batch_of(local, target, pieces))) for pieces in mine)

    threads = [threading.Thread(target=work, args=(stripes[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [TransferStatus.DONE] * 12
    np.testing.assert_array_equal(target.read(), after)


def test_two_engines_of_one_process_map_the_same_peer(local: Memory, target: Target, stack: ExitStack) -> None:
    """Ranks that share a GPU each have a mapping of their own."""
    first, second = opened(local, stack), opened(local, stack)
    peers = [engine.connect(target.endpoint, process=target.watch, epoch=1) for engine in (first, second)]
    first.disconnect(peers[0])
    first.close()
    check(second, local, target, SHAPES["mixed"])
    assert settle(second.submit(peers[1], batch_of(local, target, [(0, 0, 0, 0, 99)]))) is TransferStatus.DONE


@pytest.mark.two_gpus
def test_two_engines_of_one_process_reach_each_other(local: Memory, stack: ExitStack) -> None:
    there = Memory(1)
    stack.callback(there.close)
    there.scramble(5)
    backend, other = opened(local, stack), opened(there, stack)
    peer = backend.connect(other.endpoint(), process=own_process(stack), epoch=1)
    pieces = pieces_of(4, SHAPES["odd sizes"])
    after = expected(local.read(), there.read(), pieces, local)
    assert settle(backend.submit(peer, batch_of(local, there, pieces))) is TransferStatus.DONE
    np.testing.assert_array_equal(there.read(), after)


def test_processes_that_share_a_gpu(backend: NvlinkBackend, local: Memory, stack: ExitStack) -> None:
    check(backend, local, new_target(stack, 0), SHAPES["mixed"])
    assert backend.transport == "same GPU"


def test_engines_of_one_process_that_share_a_gpu(local: Memory, stack: ExitStack) -> None:
    there = Memory(0)
    stack.callback(there.close)
    there.scramble(5)
    backend, other = opened(local, stack), opened(there, stack)
    peer = backend.connect(other.endpoint(), process=own_process(stack), epoch=1)
    pieces = pieces_of(4, SHAPES["odd sizes"])
    after = expected(local.read(), there.read(), pieces, local)
    assert settle(backend.submit(peer, batch_of(local, there, pieces))) is TransferStatus.DONE
    np.testing.assert_array_equal(there.read(), after)


def test_the_other_direction(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    wanted = local.read()
    source, at = target.read(), local.at(0)
    wanted[at : at + 100_000] = source[at : at + 100_000]
    status, transport = target.ask("write", backend.endpoint(), local.address(0), 100_000)
    assert status is TransferStatus.DONE
    assert transport in (("same GPU",) if second_gpu() == 0 else ("nvlink (inferred)", "pcie (inferred)"))
    np.testing.assert_array_equal(local.read(), wanted)


@pytest.mark.two_gpus
def test_gpus_that_do_not_see_each_other(stack: ExitStack) -> None:
    """Each process sees only one GPU, as GPU 0."""
    one, two = new_target(stack, 0, visible="0"), new_target(stack, 0, visible="1")
    two.ask("scramble", 9)
    status, _ = one.ask("write", two.endpoint, two.address(0), 50_000)
    assert status is TransferStatus.DONE
    np.testing.assert_array_equal(two.read()[GUARD : GUARD + 50_000], one.read()[GUARD : GUARD + 50_000])


# -- peers ----------------------------------------------------------------------------------------------------------------


def test_connecting_again_at_another_epoch(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    old = backend.connect(target.endpoint, process=target.watch, epoch=1)
    new = backend.connect(target.endpoint, process=target.watch, epoch=2)
    backend.disconnect(old)
    one = batch_of(local, target, [(0, 0, 0, 0, 10)])
    with pytest.raises(PeerUnreachable):
        backend.submit(old, one)
    assert settle(backend.submit(new, one)) is TransferStatus.DONE
    assert backend.fence(new, epoch=2) is Fence.UNKNOWN  # the process lives


def test_a_transfer_outlives_its_peers_connection(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    pieces = pieces_of(6, SHAPES["thousands"])
    after = expected(local.read(), target.read(), pieces, local)
    transfer = backend.submit(peer, batch_of(local, target, pieces))
    backend.disconnect(peer)
    assert settle(transfer) is TransferStatus.DONE
    assert peer.opened == []
    np.testing.assert_array_equal(target.read(), after)


def test_close_waits_for_posted_copies(local: Memory, target: Target, stack: ExitStack) -> None:
    backend = opened(local, stack)
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    transfer = backend.submit(peer, batch_of(local, target, [(0, 0, 0, 0, 6_000_000)]))
    backend.close()
    assert transfer.poll() is TransferStatus.DONE


def test_close_waits_until_peers_have_unmapped(backend: NvlinkBackend, stack: ExitStack) -> None:
    for held in (False, True):
        owner = new_target(stack)
        peer = backend.connect(owner.endpoint, process=owner.watch, epoch=1)
        if not held:
            threading.Timer(0.3, backend.disconnect, (peer,)).start()
        assert owner.ask("close") == ((os.getpid(),) if held else ())
        backend.disconnect(peer)


# -- the death of a peer --------------------------------------------------------------------------------------------------


def test_a_killed_peer(backend: NvlinkBackend, local: Memory, target: Target, stack: ExitStack) -> None:
    """Posted copies settle, later ones are refused, and the context stays usable."""
    victim = new_target(stack)
    peer = backend.connect(victim.endpoint, process=victim.watch, epoch=1)
    pieces = pieces_of(8, SHAPES["thousands"])
    one = batch_of(local, victim, pieces[:1])
    transfer = backend.submit(peer, batch_of(local, victim, pieces))
    victim.kill()
    assert settle(transfer) is TransferStatus.DONE
    with pytest.raises(BackendError):
        backend.submit(peer, one)
    backend.disconnect(peer)
    with pytest.raises(PeerUnreachable):
        backend.connect(victim.endpoint, process=victim.watch, epoch=2)
    check(backend, local, target, SHAPES["odd sizes"])
