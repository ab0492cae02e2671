"""Scales of K and V, as a server declares them."""

from __future__ import annotations

import numpy as np
import pytest

from disagg import ConfigError, Topology
from disagg.core.memory import RawTensor
from disagg.state import paged
from disagg.state.declare import Role, declare, whole
from tests.support.numbers import BF16, E4M3, HALVES, HEADS, LAYERS, Scales

WRONG = {
    "a scale for integers": ("int8", 1.0, r"expected a dtype among float32, .* for scales, found int8"),
    "a scale of floats": (BF16, 0.5, r"expected scale 1 for bfloat16, found 0\.5"),
    "zero": (E4M3, 0.0, r"scales: expected positive numbers of single precision, found 0\.0"),
    "no number": (E4M3, float("nan"), "scales: expected positive numbers of single precision, found nan"),
    "too large": (E4M3, 1e39, r"scales: expected positive numbers of single precision, found 1e\+39"),
    "too small": (E4M3, 1e-46, "scales: expected positive numbers of single precision, found 1e-46"),
    "a layer without one": (E4M3, {0: 1.0, 2: 1.0}, "expected a scale for layer 1, found none"),
    "several": (E4M3, HALVES, r"expected one scale for layer 0, found \(4,\), and no scale_axis"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_scales_are_an_error_of_the_declaration(case: tuple[str, Scales, str]) -> None:
    dtype, scale, match = case
    layers = {layer: tuple(wrong_pool(dtype) for _ in "kv") for layer in range(LAYERS)}
    with pytest.raises(ConfigError, match=match):
        paged.gqa(layers, axes="nhd", num_kv_heads=HEADS, topology=Topology(), k_scale=scale, v_scale=1.0)


@pytest.mark.parametrize("given", [1.0, {0: [1.0] * 4, 1: [1.0] * 3, 2: [1.0] * 4}])
def test_scales_of_other_heads_are_an_error_of_the_declaration(given: Scales) -> None:
    layers = {layer: tuple(wrong_pool(E4M3) for _ in "kv") for layer in range(LAYERS)}
    with pytest.raises(ConfigError, match=r"expected 4 scales for layer [01], one for each kv_head, found \((3,)?\)"):
        paged.gqa(
            layers, axes="nhd", num_kv_heads=HEADS, topology=Topology(), k_scale=given, v_scale=given, scales_by_head=True
        )


def test_an_unknown_rounding_is_an_error_of_the_declaration() -> None:
    layers = {layer: tuple(wrong_pool(E4M3) for _ in "kv") for layer in range(LAYERS)}
    with pytest.raises(ConfigError, match="rounding: expected one of nearest, unbounded, toward_zero, found 'up'"):
        paged.gqa(layers, axes="nhd", num_kv_heads=HEADS, topology=Topology(), k_scale=1.0, v_scale=1.0, rounding="up")


def wrong_pool(dtype: str) -> RawTensor:
    pool = np.zeros((2, 4, HEADS, 6), np.uint16 if dtype == BF16 else np.uint8)
    return RawTensor(pool.ctypes.data, pool.shape, tuple(s // pool.itemsize for s in pool.strides), dtype, owner=pool)


def test_scales_are_by_an_axis_of_the_role() -> None:
    role = Role(name="x", axes="slot dim", inner={"dim": whole(6)}, scale=1.0, scale_axis="kv_head")
    with pytest.raises(ConfigError, match="tensor 'x', scale_axis: expected one of dim, found 'kv_head'"):
        declare("state", [role.of({0: np.zeros((2, 6), np.float16)})], rows="slot", topology=Topology())
