"""Tensors that share bytes: compared with the bytes of every position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import ConfigError, Topology
from disagg.core.memory import CPU, Device, RawTensor
from disagg.state import paged
from disagg.state.overlap import first_overlap, overlaps_itself

TOPOLOGY = Topology()
DTYPES = {1: "uint8", 2: "float16", 4: "float32"}


def positions(tensor: RawTensor) -> list[set[int]]:
    """The bytes of every position."""
    found = []
    for index in itertools.product(*(range(size) for size in tensor.shape)):
        start = tensor.pointer + sum(i * s for i, s in zip(index, tensor.strides, strict=True)) * tensor.itemsize
        found.append(set(range(start, start + tensor.itemsize)))
    return found


@st.composite
def tensors(draw: st.DrawFn) -> RawTensor:
    shape = tuple(draw(st.lists(st.integers(0 if draw(st.booleans()) else 1, 5), max_size=4)))
    strides = tuple(draw(st.integers(0, 40)) for _ in shape)
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    return RawTensor(4096 + draw(st.integers(0, 200)), shape, strides, dtype, draw(st.sampled_from((CPU, CPU, Device("cuda")))))


@given(tensors())
def test_overlap_within_a_tensor_equals_that_of_its_bytes(tensor: RawTensor) -> None:
    found = positions(tensor)
    assert overlaps_itself(tensor) == (len(set().union(*found)) < sum(len(each) for each in found))


@given(st.lists(tensors(), max_size=4))
def test_overlap_of_tensors_equals_that_of_their_bytes(given: list[RawTensor]) -> None:
    held = [{(tensor.device, byte) for position in positions(tensor) for byte in position} for tensor in given]
    expected = {(a, b) for a, b in itertools.combinations(range(len(given)), 2) if held[a] & held[b]}
    found = first_overlap(given)
    assert found in expected if expected else found is None


def test_strides_that_are_too_irregular_count_as_an_overlap() -> None:
    """Large sizes whose strides have no common divisor, and do not nest: nobody's pool."""
    sizes = (100_003, 100_019, 100_043)
    assert overlaps_itself(RawTensor(4096, sizes, (2 * 100_049, 2 * 100_057, 2 * 100_069), "uint8"))


def gqa(k: np.ndarray, v: np.ndarray, axes: str = "page token kv_head dim") -> None:
    paged.gqa({0: (k, v)}, axes=axes, num_kv_heads=2, topology=TOPOLOGY)


BUFFER = np.zeros(1 << 16, np.float16)


def view(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A view of the buffer; offset and strides in elements."""
    return np.lib.stride_tricks.as_strided(BUFFER[offset:], shape, tuple(2 * stride for stride in strides))


SHAPE = (8, 4, 2, 16)
OTHER = np.zeros(SHAPE, np.float16)


@pytest.mark.parametrize(
    "strides",
    [
        (64, 32, 16, 1),  # a page begins in the middle of the last one
        (128, 16, 16, 1),  # heads of one token are the next token's
        (128, 32, 8, 1),  # half a head
        (128, 32, 16, 0),
        (100, 32, 16, 1),
        (1, 16, 64, 4),
    ],
)
def test_positions_of_a_tensor_that_share_bytes_are_refused(strides: tuple[int, ...]) -> None:
    for k, v, role in ((view(0, SHAPE, strides), OTHER, "k"), (OTHER, view(0, SHAPE, strides), "v")):
        with pytest.raises(ConfigError, match=f"tensor '{role}' of layer 0: expected separate memory for every position"):
            gqa(k, v)


@pytest.mark.parametrize(
    ("offset", "strides"),
    [
        (0, (128, 32, 16, 1)),
        (512, (128, 32, 16, 1)),  # the second half
        (1023, (128, 32, 16, 1)),  # one element
        (1, (256, 32, 16, 1)),
        (120, (2048, 256, 128, 8)),  # single elements
    ],
)
def test_k_and_v_that_share_bytes_are_refused(offset: int, strides: tuple[int, ...]) -> None:
    k = view(0, SHAPE, (128, 32, 16, 1))
    with pytest.raises(ConfigError, match="'v' of layer 0: expected separate memory, found that of tensor 'k' of layer 0"):
        gqa(k, view(offset, SHAPE, strides))


def test_views_that_interleave_are_accepted() -> None:
    fused = np.zeros((8, 2, 4, 2, 16), np.float16)  # page, k or v, token, head, dim
    gqa(fused[:, 0], fused[:, 1])
    gqa(np.zeros((2, *SHAPE), np.float16)[0], np.zeros((2, *SHAPE), np.float16)[1])
    by_dim = np.zeros((8, 4, 2, 32), np.float16)
    gqa(by_dim[..., :16], by_dim[..., 16:])
    gqa(by_dim[..., ::2], by_dim[..., 1::2])
    heads_first = np.zeros((8, 2, 2, 4, 16), np.float16)
    gqa(heads_first[:, :, 0], heads_first[:, :, 1], axes="page kv_head token dim")
    gqa(view(0, SHAPE, (128, 32, 16, 1)), view(1024, SHAPE, (128, 32, 16, 1)))
    layers = np.zeros((8, 64, 2, 4, 2, 16), np.float16)  # page, layer, k or v, ...
    pools = {layer: (layers[:, layer, 0], layers[:, layer, 1]) for layer in range(64)}
    paged.gqa(pools, axes="page token kv_head dim", num_kv_heads=2, topology=TOPOLOGY)
    with pytest.raises(ConfigError, match="'v' of layer 63: expected separate memory, found that of tensor 'k' of layer 62"):
        paged.gqa(
            {**pools, 63: (pools[63][0], layers[:, 62, 0])}, axes="page token kv_head dim", num_kv_heads=2, topology=TOPOLOGY
        )


def test_tensors_without_positions_share_nothing_and_a_span_is_no_overlap() -> None:
    empty, column = RawTensor(4096, (0, 4), (4, 1), "uint8"), RawTensor(4096, (4, 2), (5, 1), "uint8")
    assert not overlaps_itself(empty)
    assert first_overlap([empty, column, RawTensor(4098, (4, 3), (5, 1), "uint8")]) is None
    assert first_overlap([empty, RawTensor(4098, (4, 4), (5, 1), "uint8"), column]) == (1, 2)
    assert first_overlap([column, RawTensor(4098, (2,), (7,), "uint8")]) is None
    assert first_overlap([column, RawTensor(4098, (3,), (7,), "uint8")]) == (0, 1)
