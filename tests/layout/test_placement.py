"""Placements in registered memory, axis declarations, pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.memory import MemoryRegion, RawTensor, RemoteRegion
from disagg.layout.ownership import EVERYTHING, Interval, Intervals, Periodic, Share, interval
from disagg.layout.placement import Placement, TensorPlacement, check_placement, parse_axes, tensor_placement
from disagg.layout.tables import Axis, ComponentLayout, TensorLayout

BASE = 4096


def layout(**axes: Axis) -> ComponentLayout:
    """Pages of a tensor `k` of two layers: 3 heads of which 2 are owned, 4 elements of 2 bytes."""
    all_axes = {
        "layer": Axis("layer", None, interval(0, 2)),
        "token": Axis("token", None, EVERYTHING),
        "kv_head": Axis("kv_head", 3, interval(1, 3)),
        "dim": Axis("dim", 4, EVERYTHING),
    } | axes
    return ComponentLayout("kv", "pages", (TensorLayout("k", "float16", tuple(all_axes.values())),))


STRIDES = {"token": 16, "kv_head": 8, "dim": 2}


def placement(
    *, layers: tuple[int, ...] = (0, 1), bases: tuple[int, ...] = (BASE, BASE + 1024), strides: dict[str, int] | None = None
) -> Placement:
    """5 pages of 4 tokens of 16 bytes: 320 bytes per layer."""
    return Placement("kv", 4, 5, (TensorPlacement("k", layers, bases, 64, STRIDES if strides is None else strides),))


def test_rows_must_end_inside_a_region() -> None:
    for region in (MemoryRegion, RemoteRegion):
        exact = [region(BASE, 320), region(BASE + 1024, 320)]
        check_placement(placement(), layout(), exact, whose="this side")
        check_placement(placement(), layout(), [region(1, 2**40)], whose="this side")
        for short in (region(BASE + 1024, 319), region(BASE + 1025, 320)):
            with pytest.raises(
                LayoutError, match=r"peer p, component 'kv', tensor 'k', layer 1: \[0x1400, \+320\) is not inside"
            ):
                check_placement(placement(), layout(), [exact[0], short], whose="peer p")
    with pytest.raises(LayoutError, match="layer 0"):
        check_placement(placement(), layout(), [], whose="peer p")


def test_the_extent_of_a_row_follows_from_the_owned_positions() -> None:
    for owned, count in (
        (Periodic(0, 1, 2), 2),
        (Share(0, 2), 2),
        (interval(1, 2), 1),
        (Intervals((Interval(2, 3), Interval(0, 1))), 2),
        (EVERYTHING, 3),
    ):
        nbytes = 4 * 64 + 3 * 16 + (count - 1) * 8 + 3 * 2 + 2
        heads = layout(kv_head=Axis("kv_head", 3, owned))
        one = placement(layers=(0,), bases=(BASE,))
        only = layout(kv_head=Axis("kv_head", 3, owned), layer=Axis("layer", None, interval(0, 1)))
        check_placement(one, only, [MemoryRegion(BASE, nbytes)], whose="this side")
        with pytest.raises(LayoutError, match=f"\\+{nbytes}\\)"):
            check_placement(one, only, [MemoryRegion(BASE, nbytes - 1)], whose="this side")
        check_placement(placement(), heads, [MemoryRegion(1, 2**40)], whose="this side")


def test_a_granule_shortens_the_token_axis() -> None:
    pooled = layout(token=Axis("token", None, EVERYTHING, 4), layer=Axis("layer", None, interval(0, 1)))
    one = placement(layers=(0,), bases=(BASE,))
    check_placement(one, pooled, [MemoryRegion(BASE, 4 * 64 + 16)], whose="this side")
    with pytest.raises(LayoutError, match="not inside a registered region"):
        check_placement(one, pooled, [MemoryRegion(BASE, 4 * 64 + 15)], whose="this side")


@pytest.mark.parametrize("granule", [3, 8])
def test_a_granule_that_does_not_divide_the_page_is_rejected(granule: int) -> None:
    pooled = layout(token=Axis("token", None, EVERYTHING, granule))
    with pytest.raises(LayoutError, match="granule"):
        check_placement(placement(), pooled, [MemoryRegion(1, 2**40)], whose="this side")


def test_memory_must_match_the_layout() -> None:
    everywhere = [MemoryRegion(1, 2**40)]
    with pytest.raises(LayoutError, match=r"expected memory for layers \(0, 1\), found \(1, 0\)"):
        check_placement(placement(layers=(1, 0)), layout(), everywhere, whose="peer p")
    with pytest.raises(LayoutError, match="expected a stride for axis 'dim', found none"):
        check_placement(placement(strides={"token": 16, "kv_head": 8}), layout(), everywhere, whose="peer p")
    with pytest.raises(LayoutError, match="expected memory for tensor 'k', found none"):
        check_placement(Placement("kv", 4, 5, ()), layout(), everywhere, whose="peer p")
    nothing = layout(layer=Axis("layer", None, Intervals(())))
    check_placement(Placement("kv", 4, 5, ()), nothing, [], whose="peer p")


def test_an_unknown_dtype_from_a_peer_is_a_layout_error() -> None:
    with pytest.raises(LayoutError, match="float7"):
        TensorLayout("k", "float7", layout().tensors[0].axes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorPlacement("k", (0, 1), (BASE,), 1, {}), "expected 2 base addresses, one per layer, found 1"),
        (lambda: TensorPlacement("k", (), (), -1, {}), r"strides of 0 to 2\*\*48 - 1"),
        (lambda: TensorPlacement("k", (), (), 0, {"dim": -2}), r"strides of 0 to 2\*\*48 - 1"),
        (lambda: Placement("kv", 0, 1, ()), "number of rows, found 0 and 1"),
        (lambda: Placement("kv", 1, 0, ()), "found 1 and 0"),
        (lambda: Placement("kv", 2**31, 1, ()), "found"),
        (lambda: Placement("kv", 1, 2**31, ()), "found"),
        (lambda: TensorPlacement("k", (), (), 2**63, {}), "stride"),
        (lambda: TensorPlacement("k", (), (), 0, {"dim": 2**63}), "stride"),
    ],
)
def test_impossible_placements_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_axes_of_a_declaration() -> None:
    known = ("page", "token", "dim")
    assert parse_axes(" token  page ", known=known, what="component 'kv'") == ("token", "page")
    with pytest.raises(ConfigError, match=r"component 'kv': .*found unknown \['tokens'\] in axes 'page tokens'"):
        parse_axes("page tokens", known=known, what="component 'kv'")
    with pytest.raises(ConfigError, match="found a repeated name in axes 'page page'"):
        parse_axes("page page", known=known, what="component 'kv'")


def place(tensors: dict[int, RawTensor], sizes: dict[str, int]) -> tuple[TensorPlacement, int, Sequence[MemoryRegion]]:
    return tensor_placement("k", tensors, ("token", "page", "dim"), row_axis="page", sizes=sizes, what="component 'kv'")


def test_a_tensors_placement_is_its_strides_in_bytes() -> None:
    tensors = {layer: RawTensor(BASE * (layer + 1), (4, 5, 3), (40, 8, 2), "float32") for layer in (7, 2)}
    found, num_rows, regions = place(tensors, {"token": 4, "dim": 3})
    assert found == TensorPlacement("k", (7, 2), (BASE * 8, BASE * 3), 32, {"token": 160, "dim": 8})
    assert num_rows == 5
    assert list(regions) == [MemoryRegion(BASE * (layer + 1), 4 * (3 * 40 + 4 * 8 + 2 * 2 + 1)) for layer in (7, 2)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RawTensor(BASE, (4, 5), (5, 1), "int8"), "layer 1: expected the 3 axes 'token page dim', found shape"),
        (RawTensor(BASE, (4, 6, 3), (40, 8, 2), "int8"), "layer 1, axis 'page': expected 5 positions, found 6"),
        (RawTensor(BASE, (4, 5, 2), (40, 8, 2), "int8"), "layer 1, axis 'dim': expected 3 positions, found 2"),
        (RawTensor(BASE, (4, 5, 3), (15, 3, 1), "int8"), "layer 1: expected strides .* as in layer 0, found"),
        (RawTensor(BASE, (4, 5, 3), (40, 8, 2), "uint8"), "layer 1: expected strides .* as in layer 0, found .* and uint8"),
    ],
)
def test_layers_of_one_role_must_have_one_form(other: RawTensor, message: str) -> None:
    with pytest.raises(ConfigError, match=f"component 'kv', tensor 'k', {message}"):
        place({0: RawTensor(BASE, (4, 5, 3), (40, 8, 2), "int8"), 1: other}, {"token": 4, "dim": 3})


def test_the_checked_extent_is_that_of_a_numpy_array() -> None:
    array = np.zeros((5, 4, 2, 4), np.uint16)
    only = layout(layer=Axis("layer", None, interval(0, 1)))
    address = int(array.ctypes.data)
    check_placement(placement(layers=(0,), bases=(address,)), only, [MemoryRegion(address, array.nbytes)], whose="this side")
