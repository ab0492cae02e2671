"""Components, where their rows lie in memory, and checks of a server's tensors against a declaration. Invalid placements
raise `LayoutError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.memory import ITEMSIZE, MemoryRegion, RawTensor, RemoteRegion
from disagg.core.topology import Topology
from disagg.layout.ownership import Interval, Intervals, overlap
from disagg.layout.tables import LAYER, MAX_LAYERS, Axis, ComponentLayout, TensorLayout

MAX_AXES = 64


class TensorPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Row `i` of `layers[n]` starts at `bases[n] + i * row_stride`. `strides`: bytes between neighbouring local positions,
    for the token axis and each inner axis.
    """

    role: str
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    bases: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    row_stride: int
    strides: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_AXES)]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.bases):
            raise LayoutError(
                f"tensor {self.role!r}: expected {len(self.layers)} base addresses, one per layer, found {len(self.bases)}"
            )
        if not all(0 <= stride < 2**48 for stride in (self.row_stride, *self.strides.values())):
            raise LayoutError(
                f"tensor {self.role!r}: expected strides of 0 to 2**48 - 1, found {self.row_stride}, {self.strides}"
            )

    def addresses(self, layers: Sequence[int], offset: int) -> npt.NDArray[np.uint64]:
        """The address `offset` bytes into row 0, in each of `layers`."""
        bases = dict(zip(self.layers, self.bases, strict=True))
        return np.array([bases[layer] + offset for layer in layers], dtype=np.uint64)

    def box_offset(self, tensor: TensorLayout, box: Mapping[str, Interval]) -> int:
        """Bytes from the start of a row to the first element of a box of the inner axes, which this rank owns."""
        offset = 0
        for name, part in box.items():
            axis = tensor.axis(name)
            (piece,) = overlap(axis.owned, Intervals((part,)), size=axis.size or 0)
            offset += piece.source_offset * self.strides[name]
        return offset


class Placement(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """`num_rows` pages of `page_size` tokens, or `num_rows` slots (`page_size` 1)."""

    component: str
    page_size: int
    num_rows: int
    tensors: tuple[TensorPlacement, ...]

    def __post_init__(self) -> None:
        if not (0 < self.page_size < 2**31 and 0 < self.num_rows < 2**31):
            raise LayoutError(
                f"component {self.component!r}: expected 1 to 2**31 - 1 for the page size and the number of rows, "
                f"found {self.page_size} and {self.num_rows}"
            )

    def tensor(self, role: str) -> TensorPlacement:
        """Raises `LayoutError` if there is none."""
        for tensor in self.tensors:
            if tensor.role == role:
                return tensor
        raise LayoutError(f"component {self.component!r}: expected memory for tensor {role!r}, found none")


def check_placement(
    placement: Placement, layout: ComponentLayout, regions: Sequence[MemoryRegion | RemoteRegion], *, whose: str
) -> None:
    """Raises `LayoutError`, with the first tensor and layer, unless every row lies inside one of `regions`."""
    for tensor in layout.tensors:
        if not tensor.layers:
            continue
        what = f"{whose}, component {layout.name!r}, tensor {tensor.role!r}"
        place = placement.tensor(tensor.role)
        if place.layers != tensor.layers:
            raise LayoutError(f"{what}: expected memory for layers {tensor.layers}, found {place.layers}")
        extent = ITEMSIZE[tensor.dtype] + (placement.num_rows - 1) * place.row_stride
        for axis in (a for a in tensor.axes if a.name != LAYER):
            if axis.name not in place.strides:
                raise LayoutError(f"{what}: expected a stride for axis {axis.name!r}, found none")
            extent += max(_num_positions(axis, placement.page_size, what) - 1, 0) * place.strides[axis.name]
        for layer, base in zip(place.layers, place.bases, strict=True):
            if not any(r.address <= base and base + extent <= r.address + r.nbytes for r in regions):
                raise LayoutError(f"{what}, layer {layer}: [{base:#x}, +{extent}) is not inside a registered region")


def _num_positions(axis: Axis, page_size: int, what: str) -> int:
    if axis.size is not None:
        return axis.owned.within(axis.size).count_below(axis.size)
    if page_size % axis.granule:
        raise LayoutError(f"{what}: a granule of {axis.granule} tokens does not divide the page of {page_size}")
    return page_size // axis.granule


@dataclass(frozen=True)
class Component:
    """A component for `KVManager`: the layouts of all ranks of the group, and this rank's memory.

    `layouts` are by group rank, and `placement` is this rank's; `None` where a rank owns none. While `joined` is false, the
    layouts are those of this rank's pipeline stage only: `join_stages` gives the whole component.
    """

    name: str
    layouts: tuple[ComponentLayout | None, ...]
    placement: Placement | None
    regions: tuple[MemoryRegion, ...]
    topology: Topology
    joined: bool = True


ORDERS = {"nhd": "page token kv_head dim", "hnd": "page kv_head token dim"}
"""Axis orders of KV pages, by their usual names."""


def parse_axes(axes: str, *, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Parses axes such as `"page token kv_head dim"`, or a named order. Raises `ConfigError` for unknown or repeated
    names.
    """
    if not isinstance(axes, str):
        raise ConfigError(f"{what}: expected axes as a str, found {axes!r}")
    names = tuple(ORDERS.get(axes.lower(), axes).split())
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names):
        found = f"unknown {unknown}" if unknown else "a repeated name"
        raise ConfigError(f"{what}: expected each of {' '.join(known)!r} at most once, found {found} in axes {axes!r}")
    return names


def tensor_placement(
    role: str,
    tensors: Mapping[int, RawTensor],
    axes: Sequence[str],
    *,
    row_axis: str,
    sizes: Mapping[str, int],
    what: str,
) -> tuple[TensorPlacement, int, tuple[MemoryRegion, ...]]:
    """The placement of one role, the number of rows, and the memory to register. `sizes`: the local size of every axis but
    the row axis. Raises `ConfigError`, with the layer, the axis and both values, if a tensor differs from the declaration or
    from the first layer's.
    """
    first_layer, first = next(iter(tensors.items()))
    for layer, tensor in tensors.items():
        where = f"{what}, tensor {role!r}, layer {layer}"
        if len(tensor.shape) != len(axes):
            raise ConfigError(f"{where}: expected the {len(axes)} axes {' '.join(axes)!r}, found shape {tensor.shape}")
        for name, found in zip(axes, tensor.shape, strict=True):
            expected = sizes.get(name, first.shape[list(axes).index(row_axis)])
            if found != expected:
                raise ConfigError(
                    f"{where}, axis {name!r}: expected {expected} positions, found {found} (shape {tensor.shape})"
                )
        if tensor.pointer <= 0 or 0 in tensor.shape:
            raise ConfigError(f"{where}: expected memory, found shape {tensor.shape} at address {tensor.pointer:#x}")
        if (tensor.strides, tensor.dtype) != (first.strides, first.dtype):
            raise ConfigError(
                f"{where}: expected strides {first.strides} and dtype {first.dtype} as in layer {first_layer}, "
                f"found {tensor.strides} and {tensor.dtype}"
            )
    strides = {name: stride * first.itemsize for name, stride in zip(axes, first.strides, strict=True)}
    row_stride = strides.pop(row_axis)
    placement = TensorPlacement(role, tuple(tensors), tuple(t.pointer for t in tensors.values()), row_stride, strides)
    return placement, first.shape[list(axes).index(row_axis)], tuple(t.region for t in tensors.values())
