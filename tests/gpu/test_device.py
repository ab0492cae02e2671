"""Packing, unpacking and checksums on one GPU give the same bytes and sums as on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from disagg.backends.cuda.packer import GpuMover
from disagg.core import _native
from disagg.core.formats import ROUNDINGS
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.testing.reference_numbers import FORMATS, convert, same

pytestmark = pytest.mark.gpu

ROWS, POSITIONS = 40, 16


@pytest.fixture(scope="module")
def mover() -> Iterator[GpuMover]:
    mover = GpuMover(0)
    yield mover
    mover.close()


def up(mover: GpuMover, content: np.ndarray) -> int:
    address = mover.allocate(content.nbytes)
    with mover.gpu.current():
        mover.gpu.call("cuMemcpyHtoD", address, content.ctypes.data, content.nbytes)
    return address


def down(mover: GpuMover, address: int, nbytes: int) -> np.ndarray:
    found = np.empty(nbytes, np.uint8)
    with mover.gpu.current():
        mover.gpu.call("cuMemcpyDtoH", found.ctypes.data, address, nbytes)
    return found


@pytest.mark.parametrize(("unit", "skew"), [(2, 0), (16, 0), (250, 1), (512, 0), (4096, 0)])
def test_a_request_is_packed_and_unpacked_in_parts(mover: GpuMover, unit: int, skew: int) -> None:
    """Slots cut pieces at any byte. After packing and unpacking, every byte is in its place and no other byte changes."""
    rng = np.random.default_rng(unit)
    wide, layers = (3, 2), 2
    sizes = [skew + layers * ROWS * POSITIONS * unit * w for w in wide]
    images = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    at = [up(mover, image) for image in images]
    bases = [
        np.array([a + skew + i * ROWS * POSITIONS * unit * w for i in range(layers)], np.uint64)
        for a, w in zip(at, wide, strict=True)
    ]
    tokens = (unit * wide[0], unit * wide[1])
    rows = (POSITIONS * tokens[0], POSITIONS * tokens[1])
    shape = SpanShape(bases[0], bases[1], rows, tokens, (), unit, False, (ROWS, ROWS), (POSITIONS, POSITIONS))
    lengths = rng.integers(1, POSITIONS + 1, 30)
    first = [rng.integers(0, POSITIONS + 1 - lengths) for _ in range(2)]
    runs = np.stack([rng.permutation(ROWS)[:30], first[0], rng.permutation(ROWS)[:30], first[1], lengths], 1).astype(np.int64)
    shapes = mover.prepare((shape,))
    batch = SpanBatch(shapes.shapes, (SpanRuns(0, None, runs),))
    work_list, total = mover.upload(shapes, batch), batch.total_nbytes
    slot = mover.allocate(total + 64)
    cuts = sorted({0, total, *rng.integers(1, total, 5).tolist()})
    for low, high in itertools.pairwise(cuts):
        packed = mover.gather(work_list, low, high - low, slot + 7)
        unpacked = mover.scatter(work_list, low, high - low, slot + 7)
        while not (packed.query() and unpacked.query()):
            pass
    span = _native.Span(
        np.arange(layers), *(b - np.uint64(a) + np.uint64(i.ctypes.data) for a, b, i in zip(at, bases, images, strict=True)),
        row_strides=rows, token_strides=tokens, dims=(), nbytes=unit, dense=False,
    )  # fmt: skip
    _native.copy_batch(*_native.expand([span], [runs], None, 1, _native.Columns()))
    np.testing.assert_array_equal(down(mover, at[1], sizes[1]), images[1])
    np.testing.assert_array_equal(down(mover, at[0], sizes[0]), images[0])
    with pytest.raises(IndexError, match="expected a range within"):
        mover.gather(work_list, total - 1, 2, slot)
    mover.release(work_list)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_checksums_equal_those_of_the_host(mover: GpuMover, itemsize: int) -> None:
    rng = np.random.default_rng(itemsize)
    heads, dim, layers = 3, 70, 4
    token = heads * dim * itemsize
    content = rng.integers(0, 256, layers * ROWS * POSITIONS * token, dtype=np.uint8)
    address = up(mover, content)
    offsets = np.arange(layers, dtype=np.uint64) * np.uint64(ROWS * POSITIONS * token)
    lengths = rng.integers(1, POSITIONS + 1, 25)
    runs = np.stack(
        [
            rng.permutation(ROWS)[:25],
            rng.integers(0, POSITIONS + 1 - lengths),
            rng.integers(0, 9, 25),
            np.cumsum(lengths) + 100,
            lengths,
        ],
        1,
    )
    what: dict[str, Any] = {
        "row_stride": POSITIONS * token,
        "token_stride": token,
        "itemsize": itemsize,
        "seed": 12345 + itemsize,
    }
    ids = np.array([3, 1, 60, 7])
    for axes in (((heads, dim * itemsize, 5), (dim, itemsize, 0)), ((dim, itemsize, 2), (2, dim * itemsize, 1)), ()):
        parts: list[dict[str, Any]] = [
            {"by_layer": np.full(layers, 7, np.uint64), "by_row": np.full(9, 5, np.uint64)} for _ in range(2)
        ]
        wanted = _native.digest(ids, offsets + np.uint64(content.ctypes.data), runs.astype(np.int64), axes, **what, **parts[0])
        assert mover.digest(ids, offsets + np.uint64(address), runs.astype(np.int64), axes, **what, **parts[1]) == wanted
        assert wanted
        for name in ("by_layer", "by_row"):
            np.testing.assert_array_equal(parts[1][name], parts[0][name])
    nothing = np.zeros((0, 5), np.int64)
    assert mover.digest(ids, offsets + np.uint64(address), nothing, (), **what) == 0
    with pytest.raises(ValueError, match="itemsize"):
        mover.digest(ids, offsets, nothing, (), **{**what, "itemsize": 3})


def _is_quantized(pair: tuple[str, str]) -> bool:
    return all(FORMATS[name].bits == 8 for name in pair)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("source", "destination"), [pair for pair in itertools.permutations(FORMATS, 2) if not _is_quantized(pair)]
)
def test_every_number_is_converted_as_by_the_reference(mover: GpuMover, source: str, destination: str, rounding: str) -> None:
    """All numbers of 8 and 16 bits, and as many of 32. Whole words, and parts that begin and end inside numbers."""
    rng = np.random.default_rng(3)
    ours, theirs = FORMATS[source], FORMATS[destination]
    every = rng.integers(0, 2**32, 1 << 16, np.uint64) if ours.bits == 32 else np.arange(1 << 16) % 2**ours.bits
    stored, unit = every.astype(ours.dtype), 256 * theirs.bits // 8
    scales = (1.0, 0.037, 3.3e-5, 700.0, 1e-37, 3e38) if 8 in (ours.bits, theirs.bits) else (1.0,)
    address = up(mover, np.concatenate([stored] * len(scales)).view(np.uint8))
    bases = np.uint64(address) + np.arange(len(scales), dtype=np.uint64) * np.uint64(stored.nbytes)
    strides = (256 * ours.bits // 8, unit)
    shape = SpanShape(
        bases, bases, (POSITIONS * strides[0], POSITIONS * unit), strides, (), unit, False, (256 // POSITIONS,) * 2,
        (POSITIONS,) * 2, formats=(source, destination, rounding), scales=scales,
    )  # fmt: skip
    shapes = mover.prepare((shape,))
    rows = np.arange(256 // POSITIONS)
    batch = SpanBatch(shapes.shapes, (SpanRuns(0, None, np.stack([rows, 0 * rows, rows, 0 * rows, 0 * rows + POSITIONS], 1)),))
    work_list, total = mover.upload(shapes, batch), batch.total_nbytes
    slot = mover.allocate(total + 64)
    expected = [convert(stored, source, destination, scale=scale, rounding=rounding) for scale in scales]
    for skew, cuts in ((0, [0, total]), (7, [0, 1001, 1002, total // 2 + 3, total])):
        for low, high in itertools.pairwise(cuts):
            packed = mover.gather(work_list, low, high - low, slot + skew + low)
            while not packed.query():
                pass
        found: Any = down(mover, slot + skew, total).view(theirs.dtype)
        wanted: Any = np.concatenate(expected)
        assert same(found, wanted, destination)
    mover.release(work_list)
