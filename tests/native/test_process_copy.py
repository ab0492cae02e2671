"""Copies through the kernel, compared with slices of arrays. The other process is this one, which the system allows."""

from __future__ import annotations

import errno
import os

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core import _native

Column = npt.NDArray[np.uint64]


def addresses(memory: npt.NDArray[np.uint8], offsets: npt.ArrayLike) -> Column:
    return (np.asarray(offsets, dtype=np.int64) + memory.ctypes.data).astype(np.uint64)


def column(values: list[int]) -> Column:
    return np.array(values, dtype=np.uint64)


def apart(sizes: list[int], rng: np.random.Generator, *, gap: int) -> npt.NDArray[np.int64]:
    """Offsets of disjoint pieces, ascending or in random order, up to `gap` bytes apart; some are adjacent."""
    offsets, place = np.zeros(len(sizes), dtype=np.int64), 0
    for piece in rng.permutation(len(sizes)) if rng.integers(0, 2) else range(len(sizes)):
        place += int(rng.integers(0, gap + 1))
        offsets[piece] = place
        place += sizes[piece]
    return offsets


@given(
    st.one_of(st.lists(st.integers(0, 5000), max_size=40), st.integers(1000, 3000).map(lambda n: [7] * n)),
    st.booleans(),
    st.sampled_from((0, 3)),
    st.integers(0, 2**32),
)
def test_every_piece_and_nothing_else_is_copied(sizes: list[int], write: bool, gap: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = apart(sizes, rng, gap=gap), apart(sizes, rng, gap=gap)
    room = sum(sizes) + len(sizes) * gap + 1
    ours, theirs = (rng.integers(0, 256, room, dtype=np.uint8) for _ in range(2))
    source, destination, starts, stops = (ours, theirs, here, there) if write else (theirs, ours, there, here)
    expected, unchanged = destination.copy(), source.copy()
    for start, stop, size in zip(starts.tolist(), stops.tolist(), sizes, strict=True):
        expected[stop : stop + size] = source[start : start + size]
    local, remote = addresses(ours, here), addresses(theirs, there)
    assert _native.copy_between_processes(os.getpid(), local, remote, column(sizes), write=write) == 0
    assert (destination == expected).all()
    assert (source == unchanged).all()


@pytest.mark.parametrize("size", [4096, 3_000_000])
def test_threads_share_large_copies(size: int) -> None:
    count = 20_000_000 // size
    source, destination = np.arange(count * size // 8, dtype=np.uint64), np.zeros(count * size // 8, dtype=np.uint64)
    order = np.random.default_rng(0).permutation(count) * size
    local, remote = addresses(source.view(np.uint8), order), addresses(destination.view(np.uint8), order)
    sizes = column([size] * count)
    assert _native.copy_between_processes(os.getpid(), local, remote, sizes, write=True, num_threads=3) == 0
    assert (source == destination).all()


def test_the_error_of_the_system_is_returned() -> None:
    memory = np.zeros(8192, dtype=np.uint8)
    local, sizes = addresses(memory, [0, 100]), column([100, 100])
    nowhere = column([int(local[0]), 4096])
    assert _native.copy_between_processes(os.getpid(), local, nowhere, sizes, write=True) == errno.EFAULT
    assert _native.copy_between_processes(2**22 + 1, local, local, sizes, write=True) == errno.ESRCH
    assert _native.copy_between_processes(os.getpid(), local[:0], local[:0], sizes[:0], write=True) == 0


def test_columns_of_different_lengths_raise() -> None:
    memory = np.zeros(64, dtype=np.uint8)
    one, two = addresses(memory, [0]), addresses(memory, [0, 8])
    for local, remote, sizes, num_threads, message in (
        (one, two, [8], 1, "one length"),
        (two, one, [8], 1, "one length"),
        (two, two, [8], 1, "one length"),
        (two, two, [2**63, 2**63], 1, "2\\*\\*64"),
        (one, one, [8], 0, "num_threads"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.copy_between_processes(os.getpid(), local, remote, column(sizes), write=True, num_threads=num_threads)
    assert not memory.any()
