"""Batches of copies between two GPUs, the bytes that they must produce, and engines to run them."""

from __future__ import annotations

import random
from contextlib import ExitStack

import numpy as np

from disagg.backends.base import BackendOptions, TransferStatus
from disagg.backends.cuda.driver import second_gpu
from disagg.backends.nvlink import engine as nvlink
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.core.copies import CopyBatch
from disagg.core.spans import SpanRuns, SpanShape
from tests.gpu.targets import GUARD, REGION_NBYTES, Bytes, Memory, Piece, Target, batch, settle

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


def pieces_of(seed: int, shape: tuple[tuple[int, ...], int, int]) -> list[Piece]:
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
        pieces.append((of, start, to, at, size))
        ends[to] = at + size
    rng.shuffle(pieces)
    return pieces


def batch_of(local: Memory, remote: Target | Memory, pieces: list[Piece]) -> CopyBatch:
    here = [local.address(r, o) for r, o, _, _, _ in pieces]
    there = [remote.address(r, o) for _, _, r, o, _ in pieces]
    sizes = [piece[4] for piece in pieces]
    return batch(here, there, sizes)


def expected(local: Bytes, remote: Bytes, pieces: list[Piece], layout: Memory) -> Bytes:
    """The bytes of the destination after the copy."""
    after = remote.copy()
    for here, here_at, there, there_at, nbytes in pieces:
        start, stop = layout.at(here) + here_at, layout.at(there) + there_at
        after[stop : stop + nbytes] = local[start : start + nbytes]
    return after


def opened(memory: Memory, stack: ExitStack, **more: int) -> NvlinkBackend:
    backend = NvlinkBackend(BackendOptions(), **more)
    stack.callback(backend.close)
    backend.register(memory.regions)
    return backend


def new_target(stack: ExitStack, ordinal: int | None = None, *, visible: str | None = None) -> Target:
    target = Target(second_gpu() if ordinal is None else ordinal, visible=visible)
    stack.callback(target.close)
    return target


def check(backend: NvlinkBackend, local: Memory, target: Target, shape: tuple[tuple[int, ...], int, int]) -> None:
    peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
    pieces = pieces_of(3, shape)
    images = local.read(), target.read()
    transfer = backend.submit(peer, batch_of(local, target, pieces))
    assert settle(transfer) is TransferStatus.DONE, transfer.error
    transfer.close()
    after = expected(*images, pieces, local)
    np.testing.assert_array_equal(local.read(), images[0])
    np.testing.assert_array_equal(target.read(), after)
    backend.disconnect(peer)


def shapes_of(local: Memory, target: Target, *, unit: int, skew: int) -> tuple[tuple[SpanShape, ...], tuple[SpanRuns, ...]]:
    """Four span classes in the largest region, dense and not, with dims and without, and random runs over them.

    Nothing overlaps at the destination. `unit`: bytes of a piece. `skew`: offset of the destinations' alignment.
    """
    rng = np.random.default_rng(unit * 17 + skew)
    ends = local.address(0), target.address(0)
    bases = [-(base % 16) % 16 + base for base in ends]
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
