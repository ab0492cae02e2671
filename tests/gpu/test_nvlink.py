"""Backend `nvlink` between processes on two GPUs: every byte of both sides, and refused input."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from disagg.backends.base import BackendOptions, Fence, Op, TransferStatus
from disagg.backends.cuda.work_list import encode_shapes, encode_work_list, work_list_nbytes
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.backends.nvlink import engine as nvlink
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.backends.nvlink.engine import NUM_SMALL_BUFFERS
from disagg.core.copies import CopyBatch
from disagg.core.errors import (
    BackendError,
    ConfigError,
    DisaggError,
    LocalProtocolError,
    NotRegistered,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import Device, MemoryRegion
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from harness.reference_kernels import SpanLaunch, span_pieces
from tests.gpu.targets import GUARD, REGION_NBYTES, Bytes, Memory, Piece, Target, batch, settle

pytestmark = pytest.mark.gpu

_rng = random.Random(7)
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "one byte": ((1,), 9, 1),
    "single bytes": ((1,) * 300, 3, 1),
    "odd sizes": (tuple(_rng.choice((1, 2, 3, 7, 15, 16, 17, 31, 63, 511, 4097)) for _ in range(3000)), 11, 1),
    "even sizes": (tuple(_rng.choice((2, 4, 6, 30, 1000, 4098)) for _ in range(1000)), 10, 2),
    "words of 4": (tuple(_rng.choice((4, 8, 12, 100, 1000)) for _ in range(3000)), 12, 4),
    "words of 8": (tuple(_rng.choice((8, 24, 1000, 8192)) for _ in range(500)), 16, 8),
    "adjacent": ((512,) * 300, 0, 1),
    "aligned": ((8192,) * 600, 0, 16),
    "aligned, of many sizes": (tuple(_rng.choice((16, 32, 256, 4096, 40_000)) for _ in range(500)), 64, 16),
    "thousands": ((257,) * 9000, 60, 1),
    "more than one launch": ((29,) * (nvlink.PART + 5000), 3, 1),
    "large": ((5_000_003,), 1000, 1),
    "mixed": ((600_001, 1, 300_000, 5, 65_536, 64, 17, 0, 0, 3_000_000), 501, 1),
}
"""Sizes, the largest gap between destinations, and the alignment of addresses."""


def pieces_of(op: Op, seed: int, shape: tuple[tuple[int, ...], int, int]) -> list[Piece]:
    """One piece per size, in random order, from any source; nothing overlaps at the destination."""
    sizes, gap, align = shape
    rng, pieces = random.Random(seed), []
    # Regions begin at odd addresses; `origin` is the first aligned offset in each.
    origin = [-(GUARD * (i + 1) + sum(REGION_NBYTES[:i]) if i < 2 else GUARD) % 16 if align > 1 else 0 for i in range(3)]
    ends = list(origin)
    for size in sizes:
        skip = rng.randint(0, gap // align) * align
        to = rng.choice([r for r, total in enumerate(REGION_NBYTES) if ends[r] + skip + size <= total])
        at = ends[to] + skip
        of = rng.choice([r for r, total in enumerate(REGION_NBYTES) if origin[r] + size <= total])
        start = origin[of] + rng.randint(0, (REGION_NBYTES[of] - size - origin[of]) // align) * align
        pieces.append((of, start, to, at, size) if op is Op.WRITE else (to, at, of, start, size))
        ends[to] = at + size
    rng.shuffle(pieces)
    return pieces


def batch_of(op: Op, local: Memory, remote: Target | Memory, pieces: list[Piece]) -> CopyBatch:
    here = [local.address(r, o) for r, o, _, _, _ in pieces]
    there = [remote.address(r, o) for _, _, r, o, _ in pieces]
    sizes = [piece[4] for piece in pieces]
    return batch(here, there, sizes) if op is Op.WRITE else batch(there, here, sizes)


def expected(op: Op, local: Bytes, remote: Bytes, pieces: list[Piece], layout: Memory) -> Bytes:
    """The bytes of the destination after the copy."""
    source, after = (local, remote.copy()) if op is Op.WRITE else (remote, local.copy())
    for here, here_at, there, there_at, nbytes in pieces:
        mine, theirs = layout.at(here) + here_at, layout.at(there) + there_at
        start, stop = (mine, theirs) if op is Op.WRITE else (theirs, mine)
        after[stop : stop + nbytes] = source[start : start + nbytes]
    return after


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def local(stack: ExitStack) -> Memory:
    memory = Memory(0)
    stack.callback(memory.close)
    memory.scramble(1)
    return memory


@pytest.fixture
def backend(local: Memory, stack: ExitStack) -> NvlinkBackend:
    return opened(local, stack)


def opened(memory: Memory, stack: ExitStack, **more: int) -> NvlinkBackend:
    backend = NvlinkBackend(BackendOptions(), **more)
    stack.callback(backend.close)
    backend.register(memory.regions)
    return backend


@pytest.fixture(scope="module")
def shared_target() -> Iterator[Target]:
    target = Target(1)
    yield target
    target.close()


@pytest.fixture
def target(shared_target: Target) -> Target:
    shared_target.ask("scramble", 2)
    return shared_target


def new_target(stack: ExitStack, ordinal: int = 1, *, visible: str | None = None) -> Target:
    target = Target(ordinal, visible=visible)
    stack.callback(target.close)
    return target


def check(op: Op, backend: NvlinkBackend, local: Memory, target: Target, shape: tuple[tuple[int, ...], int, int]) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    pieces = pieces_of(op, 3, shape)
    images = local.read(), target.read()
    transfer = backend.submit(op, peer, batch_of(op, local, target, pieces))
    assert settle(transfer) is TransferStatus.DONE, transfer.error
    transfer.close()
    after = expected(op, *images, pieces, local)
    wanted = (images[0], after) if op is Op.WRITE else (after, images[1])
    np.testing.assert_array_equal(local.read(), wanted[0])
    np.testing.assert_array_equal(target.read(), wanted[1])
    backend.disconnect(peer)


# -- bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", SHAPES)
def test_copies_exactly_the_pieces(op: Op, name: str, backend: NvlinkBackend, local: Memory, target: Target) -> None:
    """Compares every byte of both sides: the pieces, the bytes between them, and the guards around regions."""
    check(op, backend, local, target, SHAPES[name])


def shapes_of(
    op: Op, local: Memory, target: Target, *, unit: int, skew: int
) -> tuple[tuple[SpanShape, ...], tuple[SpanRuns, ...]]:
    """Four span classes in the largest region, dense and not, with dims and without, and random runs over them.

    Nothing overlaps at the destination. `unit`: bytes of a piece. `skew`: offset of the destinations' alignment.
    """
    rng = np.random.default_rng(unit * 17 + skew)
    ends = local.address(0), target.address(0)
    bases = [-(base % 16) % 16 + base for base in (ends if op is Op.WRITE else ends[::-1])]
    shapes: list[SpanShape] = []
    parts: list[SpanRuns] = []
    at = [0, skew]
    for dense, dims in ((False, 0), (True, 0), (False, 2), (True, 1)):
        rows, positions, steps = 9, 8, 3 if dims else 1
        inner = unit * positions if dense else unit
        counts = ((steps, 2 * inner, inner),) if dims == 1 else ((3, 2 * unit, unit), (2, 6 * unit, 3 * unit))[:dims]
        all_steps = int(np.prod([count for count, _, _ in counts], initial=1))
        token = (unit, unit) if dense else (all_steps * 2 * unit, all_steps * unit)
        row = tuple(2 * all_steps * positions * unit for _ in range(2))
        count = 3
        found = [np.array([bases[s] + at[s] + i * rows * row[s] for i in range(count)], np.uint64) for s in range(2)]
        shapes.append(
            SpanShape(
                found[0], found[1], (row[0], row[1]), token, tuple(counts), unit, dense, (rows, rows), (positions, positions)
            )
        )
        runs = []
        for source, to in zip(rng.permutation(rows)[:6].tolist(), rng.permutation(rows)[:6].tolist(), strict=True):
            length = int(rng.integers(1, positions + 1))
            begins = rng.integers(0, positions + 1 - length, 2).tolist()
            runs.append((source, begins[0], to, begins[1], length))
        chosen = None if len(parts) % 2 else np.array([0, 2])
        parts.append(SpanRuns(len(parts), chosen, np.array(runs, np.int64)))
        at = [place + count * rows * row[s] for s, place in enumerate(at)]
    assert max(at) + 16 < REGION_NBYTES[0]
    return tuple(shapes), tuple(parts)


@pytest.fixture(params=["read by the kernel", "uploaded"])
def _work_lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a work list reaches the GPU."""
    if request.param == "uploaded":
        monkeypatch.setattr(nvlink, "NEAR_NBYTES", 0)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(
    ("unit", "skew"), [(1, 0), (6, 0), (16, 0), (16, 4), (48, 0), (256, 0), (250, 1), (1024, 0), (1024, 8)]
)
@pytest.mark.usefixtures("_work_lists")
def test_addresses_computed_on_the_gpu(
    op: Op, unit: int, skew: int, backend: NvlinkBackend, local: Memory, target: Target
) -> None:
    """Span classes copy the same bytes as the addresses of the reference implementation, and no others."""
    peer = backend.connect(target.endpoint, epoch=1)
    shapes, parts = shapes_of(op, local, target, unit=unit, skew=skew)
    prepared = backend.prepare_spans(op, peer, shapes)
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
    source_base, destination_base = ends if op is Op.WRITE else ends[::-1]
    at = local.at(0)
    source, after = (images[0], images[1].copy()) if op is Op.WRITE else (images[1], images[0].copy())
    for piece in span_pieces(SpanLaunch(out, table.words, *work_list.tiles(0, total), 4096, 0, total)):
        start, stop = at + piece.source - source_base, at + piece.destination - destination_base
        after[stop : stop + piece.nbytes] = source[start : start + piece.nbytes]
    wanted = (images[0], after) if op is Op.WRITE else (after, images[1])
    np.testing.assert_array_equal(local.read(), wanted[0])
    np.testing.assert_array_equal(target.read(), wanted[1])
    assert (after != (images[1] if op is Op.WRITE else images[0])).any()
    backend.disconnect(peer)


def test_span_classes_outside_the_regions_are_refused(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    shapes, parts = shapes_of(Op.WRITE, local, target, unit=256, skew=0)
    outside = dataclasses.replace(shapes[0], num_rows=(9, 10**6))
    with pytest.raises(NotRegistered, match="remote copy 0 of 3"):
        backend.prepare_spans(Op.WRITE, peer, (outside,))
    with pytest.raises(NotRegistered, match="copy 0 of 3"):
        backend.prepare_spans(Op.READ, peer, shapes)
    prepared = backend.prepare_spans(Op.WRITE, peer, shapes)
    with pytest.raises(LocalProtocolError, match="that were prepared"):
        backend.submit_spans(prepared, SpanBatch(shapes[:1], parts[:1]))
    backend.disconnect(peer)
    with pytest.raises(PeerUnreachable, match="was disconnected"):
        backend.submit_spans(prepared, SpanBatch(prepared.shapes, parts))


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_any_number_of_blocks(blocks: int, local: Memory, target: Target, stack: ExitStack) -> None:
    backend = opened(local, stack, blocks=blocks)
    for op in Op:
        check(op, backend, local, target, SHAPES["mixed"])


@pytest.mark.parametrize("op", Op)
def test_an_empty_batch_is_done_at_once(op: Op, backend: NvlinkBackend, target: Target) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    assert backend.submit(op, peer, batch([], [], [])).poll() is TransferStatus.DONE


def test_regions_that_touch_or_overlap_are_one(local: Memory, target: Target, stack: ExitStack) -> None:
    backend = NvlinkBackend(BackendOptions())
    stack.callback(backend.close)
    start, nbytes, device = local.address(0), REGION_NBYTES[0], Device("cuda", 0)
    parts = [(0, 1000), (1000, 5000), (3000, 10_000), (4000, 10), (13_000, nbytes - 13_000)]
    backend.register([MemoryRegion(start + offset, size, device) for offset, size in parts])
    peer = backend.connect(target.endpoint, epoch=1)
    assert settle(backend.submit(Op.WRITE, peer, batch([start], [target.address(0)], [nbytes]))) is TransferStatus.DONE


def test_several_threads_submit(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    stripes = [[(0, i * 300, 0, i * 300, 300) for i in range(1200) if i % 12 == s] for s in range(12)]
    after = expected(Op.WRITE, local.read(), target.read(), [p for stripe in stripes for p in stripe], local)
    statuses: list[TransferStatus] = []

    def work(mine: list[list[Piece]]) -> None:
        statuses.extend(settle(backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target, pieces))) for pieces in mine)

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
    peers = [engine.connect(target.endpoint, epoch=1) for engine in (first, second)]
    first.disconnect(peers[0])
    first.close()
    check(Op.WRITE, second, local, target, SHAPES["mixed"])
    assert settle(second.submit(Op.READ, peers[1], batch_of(Op.READ, local, target, [(0, 0, 0, 0, 99)]))) is TransferStatus.DONE


def test_two_engines_of_one_process_reach_each_other(local: Memory, stack: ExitStack) -> None:
    there = Memory(1)
    stack.callback(there.close)
    there.scramble(5)
    backend, other = opened(local, stack), opened(there, stack)
    peer = backend.connect(other.endpoint(), epoch=1)
    for op in Op:
        pieces = pieces_of(op, 4, SHAPES["odd sizes"])
        after = expected(op, local.read(), there.read(), pieces, local)
        assert settle(backend.submit(op, peer, batch_of(op, local, there, pieces))) is TransferStatus.DONE
        np.testing.assert_array_equal((there if op is Op.WRITE else local).read(), after)


def test_the_other_direction(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    wanted = local.read()
    source, at = target.read(), local.at(0)
    wanted[at : at + 100_000] = source[at : at + 100_000]
    status, transport = target.ask("write", backend.endpoint(), local.address(0), 100_000)
    assert status is TransferStatus.DONE
    assert transport in ("nvlink (inferred)", "pcie (inferred)")
    np.testing.assert_array_equal(local.read(), wanted)


def test_gpus_that_do_not_see_each_other(stack: ExitStack) -> None:
    """Each process sees only one GPU, as GPU 0."""
    one, two = new_target(stack, 0, visible="0"), new_target(stack, 0, visible="1")
    two.ask("scramble", 9)
    status, _ = one.ask("write", two.endpoint, two.address(0), 50_000)
    assert status is TransferStatus.DONE
    np.testing.assert_array_equal(two.read()[GUARD : GUARD + 50_000], one.read()[GUARD : GUARD + 50_000])


# -- refused input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", Op)
def test_addresses_outside_the_regions_are_refused(op: Op, backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    images = local.read(), target.read()
    for side in (0, 1):
        start = (local, target)[side].address(0)
        stop = start + REGION_NBYTES[0]
        for bad in ((start - 1, 1), (stop, 64), (stop - 63, 64), (0, 64), (2**64 - 1, 2**64 - 1), (start + 10, 2**64 - 10)):
            rows = [[local.address(0), target.address(0), 64] for _ in range(3)]
            rows[1][side], rows[1][2] = bad
            here, there, sizes = zip(*rows, strict=True)
            with pytest.raises(NotRegistered):
                backend.submit(op, peer, batch(here, there, sizes) if op is Op.WRITE else batch(there, here, sizes))
    np.testing.assert_array_equal(local.read(), images[0])
    np.testing.assert_array_equal(target.read(), images[1])


def test_malformed_endpoints_are_refused(backend: NvlinkBackend, target: Target) -> None:
    raw, regions = decode_endpoint("nvlink", target.endpoint)
    here = [MemoryRegion(r.address, r.nbytes, r.device) for r in regions]
    rng = random.Random(3)
    outside = [*here, MemoryRegion(4096, 16, Device("cuda", 1))]
    wrong = [
        b"",
        rng.randbytes(500),
        target.endpoint + b"\x00",
        encode_endpoint("another", raw, here),
        encode_endpoint("nvlink", b"", here),
        encode_endpoint("nvlink", rng.randbytes(len(raw)), here),
        encode_endpoint("nvlink", raw[: len(raw) // 2], here),
        encode_endpoint("nvlink", raw, outside),
    ]
    for endpoint in wrong:
        with pytest.raises(RemoteProtocolError):
            backend.connect(endpoint, epoch=1)
    backend.disconnect(backend.connect(target.endpoint, epoch=1))


def altered(endpoint: bytes, **fields: object) -> bytes:
    """The endpoint with `fields` replaced in its descriptor or in the descriptor's process."""
    raw, regions = decode_endpoint("nvlink", endpoint)
    descriptor = msgspec.msgpack.decode(raw)
    for name, value in fields.items():
        (descriptor if name in descriptor else descriptor["process"])[name] = value
    return encode_endpoint(
        "nvlink", msgspec.msgpack.encode(descriptor), [MemoryRegion(r.address, r.nbytes, r.device) for r in regions]
    )


def test_a_peer_that_cannot_be_mapped_is_refused_with_the_reason(
    backend: NvlinkBackend, local: Memory, target: Target, stack: ExitStack
) -> None:
    with pytest.raises(PeerUnreachable, match="another host"):
        backend.connect(altered(target.endpoint, host="x/pid:[1]"), epoch=1)
    with pytest.raises(PeerUnreachable, match="same GPU"):
        backend.connect(new_target(stack, 0).endpoint, epoch=1)
    with pytest.raises(PeerUnreachable, match="same GPU"):
        backend.connect(opened(local, stack).endpoint(), epoch=1)
    with pytest.raises(PeerUnreachable, match="has ended"):
        backend.connect(altered(target.endpoint, started=1), epoch=1)
    raw, _ = decode_endpoint("nvlink", target.endpoint)
    forged = [[base, nbytes, bytes(64)] for base, nbytes, _ in msgspec.msgpack.decode(raw)["allocations"]]
    with pytest.raises(PeerUnreachable, match="cannot be mapped"):
        backend.connect(altered(target.endpoint, allocations=forged), epoch=1)
    check(Op.WRITE, backend, local, target, SHAPES["mixed"])


def test_memory_that_cannot_be_served_is_refused(local: Memory) -> None:
    host = np.zeros(64, np.uint8)
    gpu = Device("cuda", 0)
    for regions, words in (
        ([MemoryRegion(host.ctypes.data, 64)], "one GPU, found cpu"),
        ([], "no memory"),
        ([MemoryRegion(local.address(0), 64, gpu), MemoryRegion(4096, 64, Device("cuda", 1))], "cuda:0, cuda:1"),
        ([MemoryRegion(local.address(0), 64, Device("cuda", 1))], "it is on 0"),
        ([MemoryRegion(4096, 64, gpu)], "cannot serve"),
        ([MemoryRegion(local.address(0), 1 << 40, gpu)], "leaves its allocation"),
    ):
        backend = NvlinkBackend(BackendOptions())
        with pytest.raises(ConfigError, match=words):
            backend.register(regions)
        backend.close()


@pytest.mark.filterwarnings("ignore:torch.cuda._set_allocator_settings is deprecated:FutureWarning")
def test_memory_of_expandable_segments_is_refused() -> None:
    torch = pytest.importorskip("torch")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        tensor = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda:0")
        backend = NvlinkBackend(BackendOptions())
        with pytest.raises(ConfigError, match="expandable_segments"):
            backend.register([MemoryRegion(tensor.data_ptr(), tensor.numel(), Device("cuda", 0))])
        backend.close()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("op", Op)
def test_one_bad_piece_in_many_parts_stops_all_of_them(op: Op, backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    images = local.read(), target.read()
    pieces = pieces_of(op, 5, SHAPES["more than one launch"])
    for bad in (0, nvlink.PART + 7):
        spoilt = list(pieces)
        spoilt[bad] = (0, REGION_NBYTES[0] - 5, 0, 0, 30) if op is Op.WRITE else (0, 0, 0, REGION_NBYTES[0] - 5, 30)
        with pytest.raises(NotRegistered, match=f"copy {bad} of"):
            backend.submit(op, peer, batch_of(op, local, target, spoilt))
    np.testing.assert_array_equal(local.read(), images[0])
    np.testing.assert_array_equal(target.read(), images[1])
    check(op, backend, local, target, SHAPES["mixed"])


def test_calls_out_of_order_are_refused(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    fresh = NvlinkBackend(BackendOptions())
    with pytest.raises(LocalProtocolError, match="register"):
        fresh.endpoint()
    assert fresh.transport
    fresh.close()
    with pytest.raises(LocalProtocolError):
        backend.register(local.regions)
    peer = backend.connect(target.endpoint, epoch=1)
    one = batch_of(Op.WRITE, local, target, [(0, 0, 0, 0, 10)])
    backend.disconnect(peer)
    backend.disconnect(peer)
    with pytest.raises(PeerUnreachable):
        backend.submit(Op.WRITE, peer, one)
    backend.close()
    backend.close()
    for call in (lambda: backend.submit(Op.WRITE, peer, one), lambda: backend.connect(target.endpoint, epoch=2)):
        with pytest.raises(DisaggError):
            call()


def test_connecting_again_at_another_epoch(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    old = backend.connect(target.endpoint, epoch=1)
    new = backend.connect(target.endpoint, epoch=2)
    backend.disconnect(old)
    one = batch_of(Op.WRITE, local, target, [(0, 0, 0, 0, 10)])
    with pytest.raises(PeerUnreachable):
        backend.submit(Op.WRITE, old, one)
    assert settle(backend.submit(Op.WRITE, new, one)) is TransferStatus.DONE
    assert backend.fence(new, epoch=2) is Fence.UNKNOWN


def test_a_transfer_outlives_its_peers_connection(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    peer = backend.connect(target.endpoint, epoch=1)
    pieces = pieces_of(Op.WRITE, 6, SHAPES["thousands"])
    after = expected(Op.WRITE, local.read(), target.read(), pieces, local)
    transfer = backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target, pieces))
    backend.disconnect(peer)
    assert settle(transfer) is TransferStatus.DONE
    assert peer.opened == []
    np.testing.assert_array_equal(target.read(), after)


def test_close_waits_for_posted_copies(local: Memory, target: Target, stack: ExitStack) -> None:
    backend = opened(local, stack)
    peer = backend.connect(target.endpoint, epoch=1)
    transfer = backend.submit(Op.WRITE, peer, batch_of(Op.WRITE, local, target, [(0, 0, 0, 0, 6_000_000)]))
    backend.close()
    assert transfer.poll() is TransferStatus.DONE


def test_close_waits_until_peers_have_unmapped(backend: NvlinkBackend, stack: ExitStack) -> None:
    for held in (False, True):
        owner = new_target(stack)
        peer = backend.connect(owner.endpoint, epoch=1)
        if not held:
            threading.Timer(0.3, backend.disconnect, (peer,)).start()
        assert owner.ask("close") == ((os.getpid(),) if held else ())
        backend.disconnect(peer)


# -- the death of a peer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", Op)
def test_a_killed_peer(op: Op, backend: NvlinkBackend, local: Memory, target: Target, stack: ExitStack) -> None:
    """Posted copies settle, later ones are refused, and the context stays usable."""
    victim = new_target(stack)
    peer = backend.connect(victim.endpoint, epoch=1)
    theirs = victim.read()
    pieces = pieces_of(op, 8, SHAPES["thousands"])
    after = expected(op, local.read(), theirs, pieces, local)
    one = batch_of(op, local, victim, pieces[:1])
    transfer = backend.submit(op, peer, batch_of(op, local, victim, pieces))
    victim.kill()
    assert settle(transfer) is TransferStatus.DONE
    if op is Op.READ:
        np.testing.assert_array_equal(local.read(), after)
    with pytest.raises(BackendError):
        backend.submit(op, peer, one)
    assert backend.fence(peer, epoch=1) is Fence.UNKNOWN
    backend.disconnect(peer)
    with pytest.raises(PeerUnreachable):
        backend.connect(victim.endpoint, epoch=2)
    check(op, backend, local, target, SHAPES["odd sizes"])
