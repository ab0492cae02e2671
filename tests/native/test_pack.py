"""Gather, scatter and copies in the compiled core, against slices of arrays; nothing beside the pieces is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import _core
from disagg.testing.twins import gather_numpy, scatter_numpy

SIZES = st.one_of(st.integers(0, 300), st.sampled_from((64, 128, 256, 512, 1024, 4096, 4097, 5000)))


def pieces(sizes: list[int], *, seed: int, align: int) -> tuple[npt.NDArray[np.uint8], dict[str, npt.NDArray[np.uint64]]]:
    """Memory with disjoint pieces of `sizes` in it, in no order, and where they are."""
    rng = np.random.default_rng(seed)
    offsets = np.zeros(len(sizes), dtype=np.uint64)
    place = int(rng.integers(0, 65))
    for piece in rng.permutation(len(sizes)):
        place = -(-(place + int(rng.integers(0, 70))) // align) * align
        offsets[piece] = place
        place += sizes[piece]
    memory = rng.integers(0, 256, place + 64, dtype=np.uint8)
    return memory, {
        "offsets": offsets,
        "addresses": offsets + np.uint64(memory.ctypes.data),
        "nbytes": np.array(sizes, dtype=np.uint64),
    }


@given(st.lists(SIZES, max_size=60), st.integers(0, 2**32), st.sampled_from((1, 16, 64)), st.integers(1, 4))
def test_packing_is_that_of_the_twin(sizes: list[int], seed: int, align: int, num_threads: int) -> None:
    memory, where = pieces(sizes, seed=seed, align=align)
    total = sum(sizes)
    staging = np.full(total + 2, 0xA5, dtype=np.uint8)
    assert _core.gather(where["addresses"], where["nbytes"], staging.ctypes.data + 1, num_threads) == total
    expected = gather_numpy(memory, where["offsets"], where["nbytes"])
    assert (staging[1:-1] == expected).all()
    assert staging[0] == staging[-1] == 0xA5

    wanted = memory.copy()
    content = np.random.default_rng(seed + 1).integers(0, 256, total, dtype=np.uint8)
    scatter_numpy(wanted, where["offsets"], where["nbytes"], content)
    assert _core.scatter(where["addresses"], where["nbytes"], content.ctypes.data, num_threads) == total
    assert (memory == wanted).all()


@pytest.mark.parametrize("size", [64, 100, 256, 512, 1000, 1024, 2048, 4096, 10000, 3_000_000])
@pytest.mark.parametrize("align", [1, 64])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_batches_of_equal_pieces(size: int, align: int, num_threads: int) -> None:
    sizes = [size] * max(2, 4_000_000 // size)
    memory, where = pieces(sizes, seed=size, align=align)
    staging = np.zeros(sum(sizes), dtype=np.uint8)
    assert _core.gather(where["addresses"], where["nbytes"], staging.ctypes.data, num_threads) == len(staging)
    index = np.concatenate([np.arange(o, o + size) for o in where["offsets"].astype(np.int64)])
    assert (staging == memory[index]).all()
    wanted = memory.copy()
    staging ^= 0xFF
    wanted[index] = staging
    assert _core.scatter(where["addresses"], where["nbytes"], staging.ctypes.data, num_threads) == len(staging)
    assert (memory == wanted).all()
    memory[:] = 0
    places = np.cumsum(where["nbytes"]) - where["nbytes"] + np.uint64(staging.ctypes.data)
    assert _core.copy_batch(places, where["addresses"], where["nbytes"], num_threads) == len(staging)
    assert (memory[index] == staging).all()
    assert int(memory.sum()) == int(staging.sum())


NONE, SOME, MORE = (np.zeros(n, dtype=np.uint64) for n in (0, 1, 2))
WRAPS = np.array([2**64 - 1, 2], dtype=np.uint64)


@pytest.mark.parametrize("function", [_core.gather, _core.scatter])
def test_bad_arguments_are_refused(function: Callable[..., int]) -> None:
    assert function(NONE, NONE, 0) == 0
    assert function(SOME, SOME, 0, 4) == 0
    with pytest.raises(ValueError, match="addresses has 1 entries, nbytes has 2"):
        function(SOME, MORE, 0)
    with pytest.raises(ValueError, match="num_threads"):
        function(SOME, SOME, 0, 0)
    with pytest.raises(ValueError, match="sum"):
        function(MORE, WRAPS, 0)
    arguments: list[tuple[Any, ...]] = [
        (SOME.astype(np.int64), SOME, 0),
        (SOME, SOME.astype(np.float64), 0),
        (SOME, SOME, -1),
        (SOME, SOME, 2**64),
        (SOME.reshape(1, 1), SOME, 0),
        (np.zeros(4, np.uint64)[::2], MORE, 0),
        ([0], SOME, 0),
        (None, SOME, 0),
    ]
    for wrong in arguments:
        with pytest.raises(TypeError):
            function(*wrong)


def test_copies_whose_sum_wraps_are_refused() -> None:
    with pytest.raises(ValueError, match="sum"):
        _core.copy_batch(MORE, MORE, WRAPS)
