"""Pools of one rank: memory for the state of the layers that its pipeline stage owns."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError
from disagg.core.memory import CPU, ITEMSIZE, Device, MemoryRegion, RawTensor
from disagg.core.topology import Topology
from disagg.layout.placement import ORDERS, Component
from disagg.models.spec import ModelSpec
from disagg.models.stages import Stage, stage_of
from disagg.state.declare import Role, Rule, State, all_tokens, dtype_of

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64
"""Tensors begin at multiples of a cache line, enough for every dtype."""


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """`page_size` is in tokens. `num_slots` counts rings too: a request has one of either. `rows` overrides the number of
    rows of single components. `order` is the axis order of KV: `nhd` or `hnd`. `layer_counts`: layers per pipeline stage.
    `tokens`: which tokens each rank owns.
    """

    page_size: int = 16
    num_pages: int
    num_slots: int = 8
    rows: Mapping[str, int] = field(default_factory=dict)
    order: str = "nhd"
    layer_counts: tuple[int, ...] | None = None
    tokens: Rule = all_tokens

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 1:
            raise ConfigError(
                f"pool: expected a positive page size and number of pages, found {self.page_size} and {self.num_pages}"
            )
        if self.num_slots < 1 or any(count < 1 for count in self.rows.values()):
            raise ConfigError(
                f"pool: expected positive numbers of slots and rows, found {self.num_slots} and {dict(self.rows)}"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"pool layout: expected one of {', '.join(ORDERS)}, found {self.order!r}")

    def num_rows(self, state: State) -> int:
        per_request = state.rows == "slot" or state.ring is not None
        return self.rows.get(state.name, self.num_slots if per_request else self.num_pages)

    def axes(self, role: Role) -> str:
        """The chosen order for KV by head, the declared order for everything else."""
        return ORDERS[self.order] if set(role.axes.split()) == set(ORDERS["nhd"].split()) else role.axes


@dataclass(frozen=True)
class PoolUse:
    """Memory of one component, for `num_layers` of the model's `total_layers` with such state."""

    component: str
    num_layers: int
    total_layers: int
    nbytes: int
    nbytes_per_layer: int

    @property
    def saved_nbytes(self) -> int:
        return (self.total_layers - self.num_layers) * self.nbytes_per_layer

    def __str__(self) -> str:
        kept, saved = self.nbytes / 2**20, self.saved_nbytes / 2**20
        return f"{self.component}: {self.num_layers} of {self.total_layers} layers, {kept:.1f} MiB, {saved:.1f} MiB saved"


@dataclass(frozen=True)
class StagePools:
    """An arena, its tensors by component, layer and role, and the components for a manager, whose memory begins at
    `address`: the arena's, unless `allocate` got another place.
    """

    arena: Bytes
    address: int
    tensors: Mapping[str, Mapping[int, Mapping[str, Bytes]]]
    components: tuple[Component, ...]
    stage: Stage
    use: tuple[PoolUse, ...]

    @property
    def saved_nbytes(self) -> int:
        return sum(use.saved_nbytes for use in self.use)

    def owns_weight(self, name: str) -> bool:
        return self.stage.owns_weight(name)


@dataclass(frozen=True)
class LayerCut:
    """One layer's memory of one state: each role's `(offset, row_stride, shape)` in bytes."""

    nbytes: int
    roles: Mapping[str, tuple[int, int, tuple[int, ...]]]


def _cut(state: State, topology: Topology, shape: PoolShape) -> LayerCut:
    """The roles of a packed state share every row; otherwise role follows role."""
    num_rows, page_size = shape.num_rows(state), state.page_tokens(shape.page_size)
    dims = {}
    for role in state.roles:
        local = role.of({}, axes=shape.axes(role)).local_shape(topology, rows=num_rows, page_size=page_size)
        dims[role.name] = (*local[:-1], local[-1] * ITEMSIZE[dtype_of(role, state.name)])
    row_nbytes = {name: math.prod(local[1:]) for name, local in dims.items()}
    sizes = row_nbytes if state.packed else {name: _aligned(num_rows * nbytes) for name, nbytes in row_nbytes.items()}
    starts = dict(zip(sizes, itertools.accumulate((0, *sizes.values())), strict=False))
    stride = sum(row_nbytes.values())
    total = _aligned(num_rows * stride) if state.packed else sum(sizes.values())
    return LayerCut(total, {n: (starts[n], stride if state.packed else row_nbytes[n], local) for n, local in dims.items()})


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _strides(row_stride: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in bytes. The row axis comes first in every declared order; the other axes are dense."""
    return (row_stride, *(math.prod(dims[axis + 1 :]) for axis in range(1, len(dims))))


@dataclass(frozen=True, eq=False)
class PoolLayout:
    """Where the state of one rank's stage lies: `offsets` by component and layer, from the start of its memory."""

    model: ModelSpec
    topology: Topology
    shape: PoolShape
    stage: Stage
    cuts: Mapping[str, LayerCut]
    offsets: Mapping[str, Mapping[int, int]]
    nbytes: int

    def components(self, address: int, device: Device = CPU) -> tuple[Component, ...]:
        """The components of memory that begins at `address`, which is never touched. It is one region: layers lie apart."""
        whole = (MemoryRegion(address, self.nbytes, device),) if self.nbytes else ()
        found = (self._component(state, address, device) for state in self.model.states)
        return tuple(replace(each, regions=whole) if each.regions else each for each in found)

    def _component(self, state: State, address: int, device: Device) -> Component:
        topology, shape, cut = self.topology, self.shape, self.cuts[state.name]
        at = {layer: address + offset for layer, offset in self.offsets[state.name].items()}
        return state.component(
            {
                role.name: {
                    layer: _tensor(start, cut.roles[role.name], dtype_of(role, state.name), device)
                    for layer, start in at.items()
                }
                for role in state.roles
            },
            topology=topology,
            axes={role.name: shape.axes(role) for role in state.roles},
            layers_by_stage=self._layers_by_stage(state) if topology.pp > 1 else None,
            tokens=all_tokens if state.ring is not None else shape.tokens,
        )

    def _layers_by_stage(self, state: State) -> list[tuple[int, ...]]:
        first = self.topology.dp_rank * self.topology.group_size
        ranks = (self.topology.at(first + stage * self.topology.cp * self.topology.tp) for stage in range(self.topology.pp))
        stages = [stage_of(self.model, rank, layer_counts=self.shape.layer_counts) for rank in ranks]
        return [tuple(filter(stage.owns_layer, state.layers)) for stage in stages]


def _tensor(address: int, cut: tuple[int, int, tuple[int, ...]], dtype: str, device: Device) -> RawTensor:
    """Shape and strides in elements."""
    offset, row_stride, dims = cut
    itemsize = ITEMSIZE[dtype]
    strides = (*(stride // itemsize for stride in _strides(row_stride, dims)[:-1]), 1)
    return RawTensor(address + offset, (*dims[:-1], dims[-1] // itemsize), strides, dtype, device)


def lay_out(
    model: ModelSpec, topology: Topology, shape: PoolShape, *, start_layer: int | None = None, end_layer: int | None = None
) -> PoolLayout:
    """Allocates nothing. Raises `ConfigError` for a shape that names a component the model does not have."""
    unknown = sorted(set(shape.rows) - {state.name for state in model.states})
    if unknown:
        names = ", ".join(state.name for state in model.states)
        raise ConfigError(f"pool rows: expected components of {names}, found {', '.join(unknown)}")
    stage = stage_of(model, topology, layer_counts=shape.layer_counts, start_layer=start_layer, end_layer=end_layer)
    cuts = {state.name: _cut(state, topology, shape) for state in model.states}
    offsets, end = {}, 0
    for state in model.states:
        owned, nbytes = tuple(filter(stage.owns_layer, state.layers)), cuts[state.name].nbytes
        offsets[state.name] = {layer: end + nbytes * number for number, layer in enumerate(owned)}
        end += nbytes * len(owned)
    return PoolLayout(model, topology, shape, stage, cuts, offsets, end)


def allocate(
    model: ModelSpec,
    topology: Topology,
    shape: PoolShape,
    *,
    start_layer: int | None = None,
    end_layer: int | None = None,
    place: Callable[[Bytes], tuple[int, Device]] | None = None,
) -> StagePools:
    """Allocate zeroed, page-aligned memory in one piece for everything that this rank's stage owns.

    Tensors are arrays of bytes in their declared shape, the last axis in bytes. `place` may return the address and device of
    other memory with the same layout, for the components. Raises `ConfigError` as `lay_out` does, or beyond the address
    space.
    """
    layout = lay_out(model, topology, shape, start_layer=start_layer, end_layer=end_layer)
    arena = _arena(layout.nbytes)
    tensors = {
        name: {layer: _views(arena, offset, layout.cuts[name]) for layer, offset in offsets.items()}
        for name, offsets in layout.offsets.items()
    }
    address, device = (int(arena.__array_interface__["data"][0]), CPU) if place is None else place(arena)
    use = tuple(
        PoolUse(state.name, len(owned), len(state.layers), len(owned) * cut.nbytes, cut.nbytes)
        for state in model.states
        for owned, cut in ((layout.offsets[state.name], layout.cuts[state.name]),)
    )
    return StagePools(arena, address, tensors, layout.components(address, device), layout.stage, use)


def _arena(nbytes: int) -> Bytes:
    try:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"pool: cannot map {nbytes} bytes: {error}") from error


def _views(arena: Bytes, offset: int, cut: LayerCut) -> dict[str, Bytes]:
    return {
        name: np.ndarray(dims, np.uint8, arena.data, offset + start, _strides(row_stride, dims))
        for name, (start, row_stride, dims) in cut.roles.items()
    }
