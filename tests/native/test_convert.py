"""The compiled core stores numbers as torch does and as the reference does, for every input and at any offset."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from disagg.core import _native
from disagg.core.formats import ROUNDINGS
from disagg.layout.binding import Stream
from disagg.testing.reference_numbers import FORMATS, Stored, convert, same

torch = pytest.importorskip("torch")

FLOATS, QUANTIZED = ("float32", "bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2")
PAIRS = [(a, b) for a, b in itertools.product(FORMATS, FORMATS) if a != b and not (a in QUANTIZED and b in QUANTIZED)]
SCALES = (1.0, 0.5, 0.0123, 3.7, 1e-30)


def every(source: str) -> Stored:
    """Every value of a format; of float32 those near every value of the others, and a million of any bits."""
    if FORMATS[source].bits < 32:
        return np.arange(2 ** FORMATS[source].bits).astype(FORMATS[source].dtype)
    near = [FORMATS[each].numbers(every(each)).astype(np.float32).view(np.uint32) for each in FORMATS if each != "float32"]
    steps = [bits + np.uint32(step) for bits in near for step in (0, 1, 2, 2**32 - 1)]
    middles = [(np.sort(bits)[1:] // 2 + np.sort(bits)[:-1] // 2) for bits in near]
    anything = np.random.default_rng(1).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    return np.concatenate([*steps, *middles, anything])


def converted(stored: Stored, source: str, destination: str, *, scale: float, rounding: str, cuts: tuple[int, ...] = ()) -> Any:
    """What the core gathers, in parts that end at `cuts`."""
    size = FORMATS[destination].bits // 8
    at = np.array([stored.ctypes.data], dtype=np.uint64)
    span = _native.Span(
        np.zeros(1, np.int64), at, np.zeros(1, np.uint64), row_strides=(0, 0), token_strides=(stored.itemsize, size), dims=(),
        nbytes=size, dense=True, formats=(source, destination, rounding), scales=[scale],
    )  # fmt: skip
    stream = Stream(source=True)
    stream.append([span], [np.array([[0, 0, 0, 0, len(stored)]], dtype=np.int64)], None)
    assert stream.total == size * len(stored)
    assert stream.converts
    found = np.full(stream.total + 2, 0xA5, np.uint8)
    for start, stop in itertools.pairwise((0, *cuts, stream.total)):
        stream.gather(start, stop - start, found.ctypes.data + 1 + start)
    assert found[0] == found[-1] == 0xA5
    return found[1:-1].copy().view(FORMATS[destination].dtype)


def by_torch(stored: Stored, source: str, destination: str, *, scale: float, rounding: str) -> Stored:
    """What torch's cast stores, after the division and the limits that engines put before it."""
    numbers = torch.from_numpy(stored.view(f"i{stored.itemsize}")).view(getattr(torch, source)).float()
    if source in QUANTIZED:
        numbers = numbers * scale
    elif destination in QUANTIZED:
        numbers = numbers / scale
        if rounding == "nearest":
            largest = torch.finfo(getattr(torch, destination)).max
            numbers = numbers.clamp(-largest, largest)
    result = numbers.to(getattr(torch, destination))
    dtype = FORMATS[destination].dtype
    return np.asarray(result.view(getattr(torch, f"int{FORMATS[destination].bits}")).numpy().view(dtype))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_number_is_stored_as_by_torch_and_by_the_reference(pair: tuple[str, str], rounding: str) -> None:
    stored = every(pair[0])
    for scale in SCALES if set(pair) & set(QUANTIZED) else (1.0,):
        found = converted(stored, *pair, scale=scale, rounding=rounding)
        # Torch has no rounding toward zero. Its older versions overflow to NaN in E4M3; newer ones saturate.
        if pair[1] in QUANTIZED and (rounding == "toward_zero" or (pair[1] == "float8_e4m3fn" and rounding == "unbounded")):
            assert same(found, convert(stored, *pair, scale=scale, rounding=rounding), pair[1]), scale
            continue
        assert same(found, by_torch(stored, *pair, scale=scale, rounding=rounding), pair[1]), scale
        few = np.random.default_rng(2).permutation(len(stored))[:100_000]
        assert same(found[few], convert(stored[few], *pair, scale=scale, rounding=rounding), pair[1]), scale


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_parts_may_end_inside_an_element(pair: tuple[str, str]) -> None:
    stored = np.random.default_rng(3).integers(0, 2**8, 64 * 4, dtype=np.uint8).view(FORMATS[pair[0]].dtype)[:50]
    whole = converted(stored, *pair, scale=0.5, rounding="nearest")
    assert same(whole, convert(stored, *pair, scale=0.5), pair[1])
    total = whole.nbytes
    for cuts in ((1,), (3, 5, 6), tuple(range(1, total)), (total - 1,)):
        parts = converted(stored, *pair, scale=0.5, rounding="nearest", cuts=cuts)
        assert parts.tobytes() == whole.tobytes(), cuts


NO_RULE = "expected formats with a rule between them, found "
REFUSED = {
    ("float8_e4m3fn", "float8_e5m2", "nearest"): NO_RULE + "float8_e4m3fn and float8_e5m2",
    ("int8", "bfloat16", "nearest"): NO_RULE + "int8 and bfloat16",
    ("bfloat16", "int8", "nearest"): NO_RULE + "bfloat16 and int8",
    ("bfloat16", "float8_e4m3fn", "up"): "rounding: expected nearest, unbounded or toward_zero, found up",
}


@pytest.mark.parametrize("formats", REFUSED, ids="-".join)
def test_formats_without_a_rule_are_refused(formats: tuple[str, str, str]) -> None:
    one = np.zeros(1, np.uint64)
    with pytest.raises(ValueError, match=REFUSED[formats]):
        _native.Span(
            np.zeros(1, np.int64), one, one, row_strides=(0, 0), token_strides=(1, 1), dims=(), nbytes=2, dense=True,
            formats=formats, scales=[1.0],
        )  # fmt: skip
