"""Memory of one side of a test, and batches of pieces between two sides."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core.copies import CopyBatch
from disagg.core.memory import MemoryRegion

Bytes = npt.NDArray[np.uint8]
Piece = tuple[int, int, int, int, int]
"""`(local region, offset, remote region, offset, nbytes)`."""

GUARD = 4099
"""Unregistered bytes before and after each region."""
REGION_NBYTES = (1_500_001, 70_000)


class Arena:
    """Regions of one side in one shared file, surrounded by guard bytes."""

    def __init__(self, fd: int, sizes: Sequence[int], *, base: int | None = None) -> None:
        total = sum(sizes) + GUARD * (len(sizes) + 1)
        self.fd = fd
        self._map = mmap.mmap(fd, total)
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.sizes = tuple(sizes)
        self.offsets = tuple(GUARD * (i + 1) + sum(sizes[:i]) for i in range(len(sizes)))
        self.base = self.memory.ctypes.data if base is None else base

    @classmethod
    def create(cls, sizes: Sequence[int]) -> Arena:
        fd = os.memfd_create("disagg-backend-contract")
        os.ftruncate(fd, sum(sizes) + GUARD * (len(sizes) + 1))
        return cls(fd, sizes)

    def address(self, region: int, offset: int = 0) -> int:
        """An address in the *owner's* process."""
        return self.base + self.offsets[region] + offset

    @property
    def regions(self) -> list[MemoryRegion]:
        return [MemoryRegion(self.address(i), size) for i, size in enumerate(self.sizes)]

    def view(self, region: int) -> Bytes:
        return self.memory[self.offsets[region] : self.offsets[region] + self.sizes[region]]

    def scramble(self, seed: int) -> None:
        """Fill everything, guards too."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)


def batch(source: Sequence[int], destination: Sequence[int], nbytes: Sequence[int]) -> CopyBatch:
    return CopyBatch(*(np.array(column, dtype=np.uint64) for column in (source, destination, nbytes)))


def batch_of(local: Arena, remote: Arena, pieces: Sequence[Piece]) -> CopyBatch:
    here = [local.address(region, offset) for region, offset, _, _, _ in pieces]
    there = [remote.address(region, offset) for _, _, region, offset, _ in pieces]
    nbytes = [piece[4] for piece in pieces]
    return batch(here, there, nbytes)


def expected_after(local: Arena, remote: Arena, pieces: Sequence[Piece]) -> Bytes:
    """What the destination's memory, guards included, must hold after the copies. Call it before them."""
    after = remote.memory.copy()
    for from_region, start, to_region, stop, nbytes in pieces:
        at = remote.offsets[to_region] + stop
        after[at : at + nbytes] = local.view(from_region)[start : start + nbytes]
    return after


def random_pieces(rng: random.Random, *, nbytes: Sequence[int], gap: int) -> list[Piece]:
    """One piece per entry of `nbytes`, in random order, from random sources to destinations up to `gap` bytes apart."""
    pieces: list[Piece] = []
    ends = [rng.randint(0, gap) for _ in REGION_NBYTES]
    for size in nbytes:
        to_region = rng.choice([r for r, total in enumerate(REGION_NBYTES) if ends[r] + size <= total])
        from_region = rng.choice([r for r, total in enumerate(REGION_NBYTES) if size <= total])
        start = rng.randint(0, REGION_NBYTES[from_region] - size)
        pieces.append((from_region, start, to_region, ends[to_region], size))
        ends[to_region] = min(ends[to_region] + size + rng.randint(0, gap), REGION_NBYTES[to_region])
    rng.shuffle(pieces)
    return pieces


@dataclass(frozen=True)
class Shape:
    nbytes: tuple[int, ...]
    gap: int


_rng = random.Random(7)
SHAPES = {
    "one byte": Shape((1,), 9),
    "single bytes": Shape((1,) * 300, 3),
    "odd sizes": Shape(tuple(_rng.choice((1, 2, 3, 7, 63, 511, 4097)) for _ in range(300)), 11),
    "adjacent": Shape((512,) * 300, 0),
    "thousands": Shape((257,) * 4000, 60),
    "large": Shape((1_000_003,), 1000),
    "mixed": Shape((600_001, 1, 300_000, 5, 65_536, 64, 17), 501),
}


def outside(arena: Arena) -> list[tuple[int, int]]:
    """`(address, nbytes)` of ranges that are not wholly within one region."""
    start, size = arena.address(0), arena.sizes[0]
    stop = start + size
    return [
        (start - 1, 1),
        (start - 1, 64),
        (stop, 64),
        (stop - 63, 64),
        (stop - 1, size),
        (arena.address(1) - 10, 20),
        (start, arena.address(1) + arena.sizes[1] - start),
        (0, 64),
        (1, 64),
        (2**64 - 1, 1),
        (2**64 - 64, 64),
        (2**64 - 1, 2**64 - 1),
        (start, 2**64 - 1),
        (start + 10, 2**64 - start - 10),
        (stop - 1, 2**63),
    ]
