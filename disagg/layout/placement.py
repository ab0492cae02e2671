"""A component as one rank has it: what every rank of its group owns, and where this rank's own rows lie in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.memory import ITEMSIZE, MemoryRegion, RawTensor, RemoteRegion
from disagg.core.topology import Topology
from disagg.layout.tables import LAYER, ComponentLayout


class TensorPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one role's rows lie: row `i` of `layers[n]` starts at `bases[n] + i * row_stride`; all strides in bytes.

    `strides` has one entry per token and inner axis: bytes from one local position to the next.
    """

    role: str
    layers: tuple[int, ...]
    bases: tuple[int, ...]
    row_stride: int
    strides: dict[str, int]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.bases):
            raise LayoutError(f"tensor {self.role!r}: {len(self.layers)} layers but {len(self.bases)} base addresses")
        if not all(0 <= stride < 2**48 for stride in (self.row_stride, *self.strides.values())):
            raise LayoutError(f"tensor {self.role!r}: expected strides of at least 0, found {self.row_stride}, {self.strides}")


class Placement(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Where a rank's rows of a component lie: `num_rows` pages of `page_size` tokens, or slots (`page_size` 1)."""

    component: str
    page_size: int
    num_rows: int
    tensors: tuple[TensorPlacement, ...]

    def __post_init__(self) -> None:
        if not (0 < self.page_size < 2**31 and 0 < self.num_rows < 2**31):
            raise LayoutError(
                f"component {self.component!r}: expected positive page size and rows, "
                f"found {self.page_size} and {self.num_rows}"
            )

    def tensor(self, role: str) -> TensorPlacement:
        """The placement of that role; raises `LayoutError` where there is none."""
        for tensor in self.tensors:
            if tensor.role == role:
                return tensor
        raise LayoutError(f"component {self.component!r}: no memory is given for tensor {role!r}")


def check_placement(
    placement: Placement, layout: ComponentLayout, regions: Sequence[MemoryRegion | RemoteRegion], *, whose: str
) -> None:
    """That every row of every tensor of `layout` lies inside one of `regions`.

    Raises `LayoutError` naming the first that does not.
    """
    for tensor in layout.tensors:
        if not tensor.layers:
            continue
        where = placement.tensor(tensor.role)
        if where.layers != tensor.layers:
            raise LayoutError(
                f"{whose}, component {layout.name!r}, tensor {tensor.role!r}: memory and layout list other layers"
            )
        extent = ITEMSIZE[tensor.dtype] + (placement.num_rows - 1) * where.row_stride
        for axis in (a for a in tensor.axes if a.name != LAYER):
            if axis.name not in where.strides:
                raise LayoutError(
                    f"{whose}, component {layout.name!r}, tensor {tensor.role!r}: no stride for axis {axis.name!r}"
                )
            if axis.size is None and placement.page_size % axis.granule:
                raise LayoutError(
                    f"{whose}, component {layout.name!r}, tensor {tensor.role!r}: "
                    f"a granule of {axis.granule} tokens does not divide the page of {placement.page_size}"
                )
            owned = (
                placement.page_size // axis.granule
                if axis.size is None
                else axis.owned.within(axis.size).count_below(axis.size)
            )
            extent += max(owned - 1, 0) * where.strides[axis.name]
        for layer, base in zip(where.layers, where.bases, strict=True):
            if not any(r.address <= base and base + extent <= r.address + r.nbytes for r in regions):
                raise LayoutError(
                    f"{whose}, component {layout.name!r}, tensor {tensor.role!r}, layer {layer}: "
                    f"[{base:#x}, +{extent}) is in no registered region"
                )


@dataclass(frozen=True)
class Component:
    """A component for `KVManager`: `layouts` by group rank (`None`: that rank holds none of it), and this rank's memory.

    `placement` is `None` exactly where this rank holds nothing of the component.
    """

    name: str
    layouts: tuple[ComponentLayout | None, ...]
    placement: Placement | None
    regions: tuple[MemoryRegion, ...]


def parse_axes(axes: str, *, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Axis names of a declaration such as `"page token kv_head dim"`; raises `ConfigError` quoting it where it is wrong."""
    names = tuple(axes.split())
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names):
        wrong = f"unknown {unknown}" if unknown else "a name twice"
        raise ConfigError(f"{what}: axes {axes!r} have {wrong}; expected each of {' '.join(known)!r} at most once")
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
    """The placement of one role over its layers, the number of rows, and the memory to register.

    `sizes` gives the local size of every axis but the rows'. Raises `ConfigError` where a tensor's rank, sizes, strides
    or dtype are not those of its neighbours or of the declaration, naming the layer, the axis and both values.
    """
    first_layer, first = next(iter(tensors.items()))
    for layer, tensor in tensors.items():
        where = f"{what}, tensor {role!r}, layer {layer}"
        if len(tensor.shape) != len(axes):
            raise ConfigError(f"{where}: axes {' '.join(axes)!r} name {len(axes)} axes, the tensor has shape {tensor.shape}")
        for name, found in zip(axes, tensor.shape, strict=True):
            expected = sizes.get(name, first.shape[list(axes).index(row_axis)])
            if found != expected:
                raise ConfigError(
                    f"{where}, axis {name!r}: expected {expected} positions, found {found} (shape {tensor.shape})"
                )
        if (tensor.strides, tensor.dtype) != (first.strides, first.dtype):
            raise ConfigError(
                f"{where}: strides {tensor.strides} and dtype {tensor.dtype} differ from layer {first_layer}'s "
                f"{first.strides} and {first.dtype}"
            )
    strides = {name: stride * first.itemsize for name, stride in zip(axes, first.strides, strict=True)}
    row_stride = strides.pop(row_axis)
    placement = TensorPlacement(role, tuple(tensors), tuple(t.pointer for t in tensors.values()), row_stride, strides)
    return placement, first.shape[list(axes).index(row_axis)], tuple(t.region for t in tensors.values())


def group_layers(
    topology: Topology, own_layers: Sequence[int], layers_by_stage: Sequence[Sequence[int]] | None, *, what: str
) -> tuple[tuple[int, ...], ...]:
    """The layer ids of every pipeline stage, in memory order.

    Without pipeline parallelism they are this rank's own. With it they must be given, since a table names every rank's;
    raises `ConfigError` where they are missing, overlap, or contradict this rank's own.
    """
    own = tuple(own_layers)
    if layers_by_stage is None:
        if topology.pp > 1:
            raise ConfigError(f"{what}: pp={topology.pp}, so layers_by_stage must say which layer ids each stage holds")
        return (own,)
    stages = tuple(tuple(stage) for stage in layers_by_stage)
    if len(stages) != topology.pp:
        raise ConfigError(f"{what}: expected layers_by_stage of {topology.pp} stages, found {len(stages)}")
    for number, stage in enumerate(stages):
        if len(set(stage)) != len(stage):
            raise ConfigError(f"{what}: layers_by_stage gives a layer to stage {number} twice: {stage}")
    ids = [layer for stage in stages for layer in stage]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{what}: layers_by_stage gives a layer to two stages: {stages}")
    if stages[topology.pp_rank] != own:
        raise ConfigError(
            f"{what}: layers_by_stage gives stage {topology.pp_rank} the layers {stages[topology.pp_rank]}, "
            f"its tensors are of {own}"
        )
    return stages
