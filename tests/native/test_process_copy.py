"""Copies through the kernel, against slices of arrays: the other process is this one, which the system does not mind."""

from __future__ import annotations

import errno
import os

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import _core

Rows = npt.NDArray[np.uint64]


def rows_of(memory: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], sizes: list[int]) -> Rows:
    rows = np.zeros((len(sizes), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = offsets + memory.ctypes.data, sizes
    return rows


def apart(sizes: list[int], rng: np.random.Generator, *, gap: int) -> npt.NDArray[np.int64]:
    """Offsets of disjoint pieces in no order, up to `gap` bytes apart; some touch."""
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
def test_every_piece_is_copied_and_nothing_else(sizes: list[int], write: bool, gap: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = apart(sizes, rng, gap=gap), apart(sizes, rng, gap=gap)
    room = sum(sizes) + len(sizes) * gap + 1
    ours, theirs = (rng.integers(0, 256, room, dtype=np.uint8) for _ in range(2))
    source, destination, starts, stops = (ours, theirs, here, there) if write else (theirs, ours, there, here)
    expected, unchanged = destination.copy(), source.copy()
    for start, stop, size in zip(starts.tolist(), stops.tolist(), sizes, strict=True):
        expected[stop : stop + size] = source[start : start + size]
    local, remote = rows_of(ours, here, sizes), rows_of(theirs, there, sizes)
    assert _core.copy_between_processes(os.getpid(), local, remote, write=write) == 0
    assert (destination == expected).all()
    assert (source == unchanged).all()


@pytest.mark.parametrize("size", [4096, 3_000_000])
def test_threads_share_what_is_large(size: int) -> None:
    count = 20_000_000 // size
    source, destination = np.arange(count * size // 8, dtype=np.uint64), np.zeros(count * size // 8, dtype=np.uint64)
    order = np.random.default_rng(0).permutation(count) * size
    local, remote = (
        rows_of(source.view(np.uint8), order, [size] * count),
        rows_of(destination.view(np.uint8), order, [size] * count),
    )
    assert _core.copy_between_processes(os.getpid(), local, remote, write=True, num_threads=3) == 0
    assert (source == destination).all()


def test_the_systems_error_comes_back() -> None:
    memory = np.zeros(8192, dtype=np.uint8)
    local = rows_of(memory, np.array([0, 100]), [100, 100])
    nowhere = local.copy()
    nowhere[1, 0] = 4096
    assert _core.copy_between_processes(os.getpid(), local, nowhere, write=True) == errno.EFAULT
    assert _core.copy_between_processes(2**22 + 1, local, local, write=True) == errno.ESRCH
    assert _core.copy_between_processes(os.getpid(), local[:0], local[:0], write=True) == 0


def test_sides_that_do_not_match_are_refused() -> None:
    memory = np.zeros(64, dtype=np.uint8)
    one, two = rows_of(memory, np.array([0]), [8]), rows_of(memory, np.array([0, 8]), [8, 8])
    longer = rows_of(memory, np.array([0]), [9])
    endless = rows_of(memory, np.array([0, 0]), [2**63, 2**63])
    for local, remote, num_threads, message in (
        (one, two, 1, "as many"),
        (one, longer, 1, "same lengths"),
        (endless, endless, 1, "2\\*\\*64"),
        (one, one, 0, "num_threads"),
    ):
        with pytest.raises(ValueError, match=message):
            _core.copy_between_processes(os.getpid(), local, remote, write=True, num_threads=num_threads)
    assert not memory.any()
