"""Regions, devices and raw tensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.core.memory import CPU, ITEMSIZE, Device, MemoryRegion, RawTensor, merge_regions, raw_tensor


def test_item_sizes_match_numpy() -> None:
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "float16",
        "int32",
        "uint32",
        "float32",
        "int64",
        "uint64",
        "float64",
    ):
        assert ITEMSIZE[name] == np.dtype(name).itemsize
    assert ITEMSIZE["bfloat16"] == 2
    assert ITEMSIZE["float8_e4m3fn"] == 1


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", CPU), ("cuda", Device("cuda", 0)), ("cuda:0", Device("cuda", 0)), ("cuda:11", Device("cuda", 11))],
)
def test_devices_from_text(text: str, device: Device) -> None:
    assert Device.parse(text) == device
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize("text", ["", "gpu", "cuda:x", "cuda:-1", "cuda:1:2", "cuda: 1", "CPU", "cuda:"])
def test_other_texts_are_rejected_as_devices(text: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        Device.parse(text)


def test_an_unknown_kind_of_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="found 'tpu'"):
        Device("tpu")


@pytest.mark.parametrize(("address", "nbytes"), [(0, 1), (-4, 8), (16, 0), (16, -1), (2**64 - 4, 5)])
def test_impossible_regions_are_rejected(address: int, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="memory region"):
        MemoryRegion(address, nbytes)


DEVICES = (CPU, Device("cuda", 0), Device("cuda", 1))
regions_ = st.lists(
    st.builds(MemoryRegion, address=st.integers(1, 60), nbytes=st.integers(1, 9), device=st.sampled_from(DEVICES)), max_size=12
)


@given(regions_)
def test_merged_regions_have_the_same_bytes_in_order(regions: list[MemoryRegion]) -> None:
    before = list(regions)
    merged = merge_regions(regions)
    assert regions == before
    for device in DEVICES:
        ours = [r for r in merged if r.device == device]
        assert {b for r in ours for b in range(r.address, r.address + r.nbytes)} == {
            b for r in regions if r.device == device for b in range(r.address, r.address + r.nbytes)
        }
        for left, right in itertools.pairwise(ours):
            apart = right.address - left.address - left.nbytes
            assert apart > 0 if device == CPU else apart >= 0  # touching regions of a GPU may be two allocations


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4), st.sampled_from(sorted(ITEMSIZE)))
def test_spanned_bytes_end_with_the_last_element(axes: list[tuple[int, int]], dtype: str) -> None:
    tensor = RawTensor(4096, tuple(size for size, _ in axes), tuple(stride for _, stride in axes), dtype)
    elements = [
        sum(i * s for i, (_, s) in zip(at, axes, strict=True)) for at in itertools.product(*(range(n) for n, _ in axes))
    ]
    assert tensor.nbytes_spanned == (max(elements) + 1) * ITEMSIZE[dtype] if elements else tensor.nbytes_spanned == 0
    if elements:
        assert tensor.region == MemoryRegion(4096, tensor.nbytes_spanned)


def test_an_empty_tensor_spans_no_bytes() -> None:
    assert RawTensor(4096, (3, 0, 2), (0, 2, 1), "float16").nbytes_spanned == 0


def test_select_matches_numpy() -> None:
    array = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    for axis in range(3):
        for index in range(array.shape[axis]):
            view = array[tuple(index if i == axis else slice(None) for i in range(3))]
            assert raw_tensor(array).select(axis, index) == raw_tensor(view)
        with pytest.raises(ConfigError, match=f"axis {axis}: .*found {array.shape[axis]}"):
            raw_tensor(array).select(axis, array.shape[axis])
        with pytest.raises(ConfigError, match=f"axis {axis}: .*found -1"):
            raw_tensor(array).select(axis, -1)


@pytest.mark.parametrize(
    ("shape", "strides", "dtype", "message"),
    [
        ((2,), (1,), "float7", "dtype: .*'float7'"),
        ((2, 3), (1,), "int8", r"expected 2 strides for shape \(2, 3\), found 1"),
        ((-2,), (1,), "int8", "at least 0"),
        ((2,), (-1,), "int8", "at least 0"),
    ],
)
def test_impossible_tensors_are_rejected(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RawTensor(64, shape, strides, dtype)


def test_arrays_become_raw_tensors() -> None:
    array = np.zeros((4, 6), dtype=np.uint16)
    assert raw_tensor(array) == RawTensor(array.ctypes.data, (4, 6), (6, 1), "uint16")
    assert raw_tensor(array[1:, ::2].T) == RawTensor(array.ctypes.data + 12, (3, 3), (2, 6), "uint16")
    tensor = RawTensor(64, (1,), (1,), "int8")
    assert raw_tensor(tensor) is tensor


@dataclass
class FakeTorch:
    """The members of a torch tensor that `raw_tensor` uses."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "torch.bfloat16"
    device: str = "cuda:1"

    def data_ptr(self) -> int:
        return 4096

    def stride(self) -> tuple[int, ...]:
        return (3, 1)


def test_torch_tensors_and_tuples_become_raw_tensors() -> None:
    wanted = RawTensor(4096, (2, 3), (3, 1), "bfloat16", Device("cuda", 1))
    assert raw_tensor(FakeTorch()) == wanted
    assert raw_tensor((4096, [2, 3], [3, 1], "torch.bfloat16", "cuda:1")) == wanted
    assert raw_tensor((4096, (2, 3), (3, 1), "bfloat16", Device("cuda", 1))) == wanted


def _misaligned() -> Any:
    return np.zeros(3, dtype=[("a", np.uint8), ("b", np.uint16)])["b"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.zeros(2, dtype=np.complex64), "dtype: .*'complex64'"),
        (lambda: np.zeros(2, dtype=">u2"), "dtype: .*'>u2'"),
        (_misaligned, "whole elements of"),
        (lambda: np.zeros(4, dtype=np.uint8)[::-1], "at least 0"),
        (lambda: [1, 2], "found list"),
        (lambda: (1, 2), "found tuple"),
        (lambda: FakeTorch(device="mps"), "device kind"),
        (lambda: FakeTorch(dtype="torch.complex64"), "dtype"),
    ],
)
def test_other_objects_are_rejected_as_tensors(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raw_tensor(make())


def test_numpy_integers_become_python_integers() -> None:
    address: Any = np.uint64(4096)
    assert [type(value) for value in (MemoryRegion(address, 64).address, RawTensor(address, (4,), (1,), "int8").pointer)] == [
        int
    ] * 2
    sizes: Any = (np.int64(4),)
    assert [type(size) for size in RawTensor(4096, sizes, sizes, "int8").shape] == [int]
    wrong: Any = 4096.0
    with pytest.raises(ConfigError, match=r"MemoryRegion address: expected integers, found 4096\.0"):
        MemoryRegion(wrong, 64)
