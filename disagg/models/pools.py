"""Pools of one rank: memory for the state of the layers that its pipeline stage owns."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError
from disagg.core.memory import CPU, ITEMSIZE, Device, RawTensor
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.models.spec import ModelSpec
from disagg.models.stages import Stage, split_layers, stage_of
from disagg.state.allocator import PoolExhausted, RowAllocator
from disagg.state.declare import Role, Rule, State, all_tokens, dtype_of
from disagg.state.paged import ORDERS

__all__ = [
    "ORDERS",
    "PoolExhausted",
    "PoolShape",
    "RowAllocator",
    "Stage",
    "StagePools",
    "allocate",
    "split_layers",
    "stage_of",
    "typed",
]
Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and enough for every dtype."""


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """The sizes of a rank's pools and the order of their axes.

    `page_size` is in tokens. `num_slots` counts rings too: a request has one of either. `rows` overrides the number of rows of
    single components. `order` is the axis order of KV: `nhd` or `hnd`. `layer_counts` are layers per pipeline stage. `tokens`
    says which tokens each rank owns.
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
        """The number of pages, slots or rings of a state's pool."""
        per_request = state.rows == "slot" or state.ring is not None
        return self.rows.get(state.name, self.num_slots if per_request else self.num_pages)

    def axes(self, role: Role) -> str:
        """A role's axes in memory order: `order` for KV by head, the declared order for everything else."""
        return ORDERS[self.order] if set(role.axes.split()) == set(ORDERS["nhd"].split()) else role.axes


@dataclass(frozen=True)
class PoolUse:
    """Memory of one component on this rank, which owns `num_layers` of the `total_layers` that have this state."""

    component: str
    num_layers: int
    total_layers: int
    nbytes: int
    nbytes_per_layer: int

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved by leaving out the layers of other stages."""
        return (self.total_layers - self.num_layers) * self.nbytes_per_layer

    def __str__(self) -> str:
        kept, saved = self.nbytes / 2**20, self.saved_nbytes / 2**20
        return f"{self.component}: {self.num_layers} of {self.total_layers} layers, {kept:.1f} MiB, {saved:.1f} MiB saved"


@dataclass(frozen=True)
class StagePools:
    """One rank's memory: an arena, its tensors by component, layer and role, and the components for a manager.

    The components' memory begins at `address`. This is the arena's address unless `allocate` was given `place`.
    """

    arena: Bytes
    address: int
    tensors: Mapping[str, Mapping[int, Mapping[str, Bytes]]]
    components: tuple[Component, ...]
    stage: Stage
    use: tuple[PoolUse, ...]

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved by not allocating the state of layers of other stages."""
        return sum(use.saved_nbytes for use in self.use)

    def owns_weight(self, name: str) -> bool:
        """Whether this rank needs a checkpoint's weight, as `Stage.owns_weight` has it."""
        return self.stage.owns_weight(name)


@dataclass(frozen=True)
class _Cut:
    """One layer's memory of one state: `num_rows` rows of every role, each role's `(offset, row_stride, shape)` in bytes."""

    nbytes: int
    roles: Mapping[str, tuple[int, int, tuple[int, ...]]]


def allocate(
    model: ModelSpec,
    topology: Topology,
    shape: PoolShape,
    *,
    start_layer: int | None = None,
    end_layer: int | None = None,
    place: Callable[[Bytes], tuple[int, Device]] | None = None,
) -> StagePools:
    """Allocate zeroed, page-aligned, contiguous memory for the state of the layers that this rank's stage owns.

    Tensors are arrays of bytes in their declared shape, with the last axis in bytes. Untouched pages of memory cost nothing.
    With `place` the components lie in other memory with the same layout: `place` takes the arena and returns its address and
    device. Raises `ConfigError` if `shape.rows` names a component that the model lacks, or if the memory cannot be mapped.
    """
    unknown = sorted(set(shape.rows) - {state.name for state in model.states})
    if unknown:
        names = ", ".join(state.name for state in model.states)
        raise ConfigError(f"pool rows: expected components of {names}, found {', '.join(unknown)}")
    stage = stage_of(model, topology, layer_counts=shape.layer_counts, start_layer=start_layer, end_layer=end_layer)
    cuts = {state.name: _cut(state, topology, shape) for state in model.states}
    owned = {state.name: tuple(filter(stage.owns_layer, state.layers)) for state in model.states}
    arena = _arena(sum(cuts[name].nbytes * len(layers) for name, layers in owned.items()))
    offsets = _offsets(cuts, owned)
    tensors = {
        state.name: {layer: _views(arena, next(offsets), cuts[state.name]) for layer in owned[state.name]}
        for state in model.states
    }
    base = int(arena.__array_interface__["data"][0])
    address, device = (base, CPU) if place is None else place(arena)
    typed_ = partial(typed, ahead=address - base, device=device)
    components = tuple(_component(state, tensors[state.name], model, topology, shape, typed_) for state in model.states)
    use = tuple(
        PoolUse(state.name, len(owned[state.name]), len(state.layers), len(owned[state.name]) * cut.nbytes, cut.nbytes)
        for state, cut in zip(model.states, cuts.values(), strict=True)
    )
    return StagePools(arena, address, tensors, components, stage, use)


def _arena(nbytes: int) -> Bytes:
    try:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"pool: cannot map {nbytes} bytes: {error}") from error


def _offsets(cuts: Mapping[str, _Cut], owned: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """The offsets in the arena at which each layer of each component begins, in order."""
    sizes = [cuts[name].nbytes for name, layers in owned.items() for _ in layers]
    return iter(itertools.accumulate([0, *sizes[:-1]]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _cut(state: State, topology: Topology, shape: PoolShape) -> _Cut:
    """One layer's memory: roles follow each other within every row if the state is packed, else each role has all its rows."""
    num_rows, page_size = shape.num_rows(state), state.page_tokens(shape.page_size)
    dims = {}
    for role in state.roles:
        local = role.of({}, axes=shape.axes(role)).local_shape(topology, rows=num_rows, page_size=page_size)
        dims[role.name] = (*local[:-1], local[-1] * ITEMSIZE[dtype_of(role, state.name)])
    row_nbytes = {name: math.prod(local[1:]) for name, local in dims.items()}
    sizes = row_nbytes if state.packed else {name: _aligned(num_rows * nbytes) for name, nbytes in row_nbytes.items()}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    stride = sum(row_nbytes.values())
    total = _aligned(num_rows * stride) if state.packed else sum(sizes.values())
    return _Cut(total, {n: (starts[n], stride if state.packed else row_nbytes[n], local) for n, local in dims.items()})


def _views(arena: Bytes, offset: int, cut: _Cut) -> dict[str, Bytes]:
    """One layer's tensors. The row axis comes first in every declared order; the other axes are dense."""
    views = {}
    for name, (start, row_stride, dims) in cut.roles.items():
        strides = (row_stride, *(math.prod(dims[axis + 1 :]) for axis in range(1, len(dims))))
        views[name] = np.ndarray(dims, np.uint8, arena.data, offset + start, strides)
    return views


def _component(
    state: State,
    tensors: Mapping[int, Mapping[str, Bytes]],
    model: ModelSpec,
    topology: Topology,
    shape: PoolShape,
    typed: Callable[[Bytes, str], RawTensor],
) -> Component:
    stages = [
        stage_of(model, topology.at(topology.dp_rank * topology.group_size + stage * topology.cp * topology.tp),
                 layer_counts=shape.layer_counts)
        for stage in range(topology.pp)
    ]  # fmt: skip
    return state.component(
        {
            role.name: {layer: typed(roles[role.name], dtype_of(role, state.name)) for layer, roles in tensors.items()}
            for role in state.roles
        },
        topology=topology,
        axes={role.name: shape.axes(role) for role in state.roles},
        layers_by_stage=[tuple(filter(stage.owns_layer, state.layers)) for stage in stages] if topology.pp > 1 else None,
        tokens=all_tokens if state.ring is not None else shape.tokens,
    )


def typed(array: Bytes, dtype: str, *, ahead: int = 0, device: Device = CPU) -> RawTensor:
    """An array of bytes as a tensor of `dtype` on `device`, `ahead` bytes further on. Its last axis is in elements."""
    itemsize = ITEMSIZE[dtype]
    dims = (*array.shape[:-1], array.shape[-1] // itemsize)
    strides = (*(stride // itemsize for stride in array.strides[:-1]), 1)
    return RawTensor(array.__array_interface__["data"][0] + ahead, dims, strides, dtype, device)
