"""Pools of one rank: memory for the state of the layers that its pipeline stage owns, and the rows of it that are free."""

from __future__ import annotations

import itertools
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from disagg.component import Component
from disagg.errors import ConfigError, DisaggError, LocalProtocolError
from disagg.leases import Lease
from disagg.memory import CPU, ITEMSIZE, Device, RawTensor
from disagg.models import ModelSpec
from disagg.state.declare import Role, Rule, State, all_tokens, dtype_of
from disagg.state.paged import ORDERS
from disagg.topology import Topology

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
Ids = npt.NDArray[np.int32]

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes: a cache line, and enough for every dtype."""


class PoolExhausted(DisaggError):
    """There are fewer free rows than were asked for; none was taken."""


# -- pipeline stages ---------------------------------------------------------------------------------------------------


def split_layers(num_layers: int, num_stages: int, counts: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """The layer ids of every pipeline stage: even shares, the remainder to the later stages, one each; or by `counts`.

    Raises `ConfigError` where `counts` do not add up to `num_layers` over `num_stages`.
    """
    if counts is None:
        base, rest = divmod(num_layers, num_stages)
        counts = [base + (stage >= num_stages - rest) for stage in range(num_stages)]
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts, default=0) < 0:
        raise ConfigError(f"layer counts: expected {num_stages} that add up to {num_layers}, found {list(counts)}")
    starts = np.cumsum([0, *counts]).tolist()
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=False))


_PREFIXES = ("model", "language_model", "text_model", "backbone", "transformer")
"""What checkpoints put before a decoder's parts; under another name (a vision tower, say) parts are none of a stage's."""
_FIRST = ("embed_tokens", "embeddings", "embedding", "embed", "word_embeddings", "wte")
_LAST = ("norm", "norm_f", "final_layernorm", "ln_f", "lm_head", "head", "mtp")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers `[start_layer, end_layer)` of `num_layers`. Draft layers have ids from `num_layers` on and follow the last.

    Raises `ConfigError` where that is no range of the model's layers.
    """

    start_layer: int
    end_layer: int
    num_layers: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start_layer <= self.end_layer <= self.num_layers:
            found = f"[{self.start_layer}, {self.end_layer})"
            raise ConfigError(f"stage: expected start_layer and end_layer within [0, {self.num_layers}], found {found}")

    @property
    def is_first(self) -> bool:
        return self.start_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.num_layers

    def owns_layer(self, layer: int) -> bool:
        """Whether a layer is the stage's; draft layers are the last one's."""
        return self.start_layer <= layer < self.end_layer or (layer >= self.num_layers and self.is_last)

    def owns_weight(self, name: str) -> bool:
        """Whether a checkpoint's weight is needed here.

        Layers, with all below them (`model.layers.3.mlp.experts.7.up_proj.weight`), go by their id, embeddings to the first
        stage, final norm, head and draft layers to the last, which needs tied embeddings too. Any other name: everywhere.
        """
        parts = name.split(".")
        while parts and parts[0] in _PREFIXES:
            parts.pop(0)
        head, below = (parts[0], parts[1:]) if parts else ("", [])
        if head == "layers" and below and below[0].isascii() and below[0].isdecimal():
            return self.owns_layer(int(below[0]))
        if head in _FIRST:
            return self.is_first or (self.tied_embeddings and self.is_last)
        return self.is_last if head in _LAST else True


def stage_of(
    model: ModelSpec,
    topology: Topology,
    *,
    layer_counts: Sequence[int] | None = None,
    start_layer: int | None = None,
    end_layer: int | None = None,
) -> Stage:
    """This rank's stage. `start_layer` and `end_layer` are what the server knows of it; without them it follows from the
    topology. Without pipeline parallelism they may be any range; with it they must be the split's.

    Raises `ConfigError` where they are not, since every rank's layers must be known: give `layer_counts`.
    """
    layers = split_layers(model.num_layers, topology.pp, layer_counts)
    counted = np.cumsum([0, *map(len, layers)]).tolist()
    split = counted[topology.pp_rank], counted[topology.pp_rank + 1]
    start, end = (own if given is None else given for own, given in zip(split, (start_layer, end_layer), strict=True))
    if topology.pp > 1 and (start, end) != split:
        raise ConfigError(
            f"stage {topology.pp_rank} of {topology.pp}: expected layers [{split[0]}, {split[1]}), found [{start}, {end}); "
            "layer_counts must say an uneven split"
        )
    return Stage(start_layer=start, end_layer=end, num_layers=model.num_layers, tied_embeddings=model.tied_embeddings)


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """How a rank's pools are cut: tokens per page, pages, slots (and rings: one per request), axis order of KV (`nhd`,
    `hnd`), layers per stage, tokens per rank. `rows` has other numbers of rows, by component.
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
            raise ConfigError(f"pool: expected positive page size and pages, found {self.page_size} and {self.num_pages}")
        if self.num_slots < 1 or any(count < 1 for count in self.rows.values()):
            raise ConfigError(f"pool: expected positive slots and rows, found {self.num_slots} and {dict(self.rows)}")
        if self.order not in ORDERS:
            raise ConfigError(f"pool layout: expected one of {', '.join(ORDERS)}, found {self.order!r}")

    def num_rows(self, state: State) -> int:
        """Pages, slots or rings of a state's pool."""
        per_request = state.rows == "slot" or state.ring is not None
        return self.rows.get(state.name, self.num_slots if per_request else self.num_pages)

    def axes(self, role: Role) -> str:
        """The memory order of a role's axes: KV by head in the order chosen, everything else in its own."""
        return ORDERS[self.order] if set(role.axes.split()) == set(ORDERS["nhd"].split()) else role.axes


@dataclass(frozen=True)
class PoolUse:
    """Memory of one component on this rank: `num_layers` of the model's `total_layers` that have such state."""

    component: str
    num_layers: int
    total_layers: int
    nbytes: int
    nbytes_per_layer: int

    @property
    def saved_nbytes(self) -> int:
        """Bytes less than with every layer's."""
        return (self.total_layers - self.num_layers) * self.nbytes_per_layer

    def __str__(self) -> str:
        kept, saved = self.nbytes / 2**20, self.saved_nbytes / 2**20
        return f"{self.component}: {self.num_layers} of {self.total_layers} layers, {kept:.1f} MiB, {saved:.1f} MiB saved"


@dataclass(frozen=True)
class StagePools:
    """One rank's memory: an arena, the tensors in it by component, layer and role, and the components for a manager.

    The components' memory begins at `address`: the arena's own, unless `allocate` was told of another place.
    """

    arena: Bytes
    address: int
    tensors: Mapping[str, Mapping[int, Mapping[str, Bytes]]]
    components: tuple[Component, ...]
    stage: Stage
    use: tuple[PoolUse, ...]

    @property
    def saved_nbytes(self) -> int:
        """Bytes less than if the stage allocated the state of every layer of the model."""
        return sum(use.saved_nbytes for use in self.use)

    def owns_weight(self, name: str) -> bool:
        """As `Stage.owns_weight`."""
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
    """Zeroed memory, page-aligned and in one piece, for everything that this rank's stage owns, and nothing else.

    Tensors are arrays of bytes in their declared shape, the last axis in bytes. Memory that nobody touches costs nothing.
    `place` gives the address and device of memory that the components are over instead, laid out as the arena is.
    Raises `ConfigError` for a shape that names no component of the model, or that is more than there are addresses for.
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
        raise ConfigError(f"pool: {nbytes} bytes cannot be mapped: {error}") from error


def _offsets(cuts: Mapping[str, _Cut], owned: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """Where each layer of each component begins in the arena."""
    sizes = [cuts[name].nbytes for name, layers in owned.items() for _ in layers]
    return iter(itertools.accumulate([0, *sizes[:-1]]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _cut(state: State, topology: Topology, shape: PoolShape) -> _Cut:
    """A state's roles behind each other: in every row where it is packed, else each with all its rows."""
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
    """One layer's tensors. The row axis comes first in every declared order, the others are dense."""
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
    """An array of bytes as a tensor of `dtype`: its last axis in elements; `ahead` bytes further on, on `device`."""
    itemsize = ITEMSIZE[dtype]
    dims = (*array.shape[:-1], array.shape[-1] // itemsize)
    strides = (*(stride // itemsize for stride in array.strides[:-1]), 1)
    return RawTensor(array.__array_interface__["data"][0] + ahead, dims, strides, dtype, device)


# -- rows --------------------------------------------------------------------------------------------------------------

_FREE, _USED, _LEASED, _RESERVED = range(4)
_STATES = ("free", "in use", "freed already, and waiting for its lease", "reserved")


class RowAllocator:
    """Which rows (pages, slots or rings) of a pool are free. Thread-safe.

    `reserved` rows are never given: row 0 is a dummy or null page in common servers. Rows that are freed with a lease come
    back when it is released, and not before: until then a transfer may touch them.
    """

    def __init__(self, num_rows: int, *, reserved: Iterable[int] = (0,)) -> None:
        kept = sorted(set(reserved))
        if not 0 < num_rows < 2**31 or any(not 0 <= row < num_rows for row in kept):
            raise ConfigError(f"rows: expected a positive number and reserved ones among them, found {num_rows} and {kept}")
        self._lock = threading.Lock()
        self._states = np.full(num_rows, _FREE, dtype=np.uint8)
        self._states[kept] = _RESERVED
        self._num_free = num_rows - len(kept)
        self._num_leased = 0

    @property
    def num_rows(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Rows that may be allocated."""
        return self._num_free

    @property
    def num_leased(self) -> int:
        """Rows that were freed and whose leases are not released yet."""
        return self._num_leased

    def can_allocate(self, num_rows: int) -> bool:
        return num_rows <= self._num_free

    def allocate(self, num_rows: int) -> Ids:
        """The lowest free rows, in ascending order. Raises `PoolExhausted` where there are too few, and takes none."""
        if num_rows < 0:
            raise ConfigError(f"rows: expected a number of at least 0, found {num_rows!r}")
        with self._lock:
            if num_rows > self._num_free:
                raise PoolExhausted(
                    f"rows: {num_rows} asked for, {self._num_free} of {self.num_rows} are free and {self._num_leased} wait "
                    "for their leases"
                )
            ids = np.flatnonzero(self._states == _FREE)[:num_rows].astype(np.int32)
            self._states[ids] = _USED
            self._num_free -= num_rows
        return ids

    def free(self, ids: npt.ArrayLike, *, lease: Lease | None = None) -> None:
        """Give rows back: at once, or when `lease` is released.

        Raises `LocalProtocolError` for a row that is not in use, and gives none back.
        """
        rows = np.asarray(ids, dtype=np.int64).ravel()
        with self._lock:
            self._check_used(rows)
            self._states[rows] = _LEASED
            self._num_leased += len(rows)
        if lease is None:
            self._give_back(rows)
        else:
            lease.on_release(lambda: self._give_back(rows))

    def _check_used(self, rows: npt.NDArray[np.int64]) -> None:
        outside = rows[(rows < 0) | (rows >= self.num_rows)]
        if len(outside):
            raise LocalProtocolError(f"row {outside[0]}: expected 0 to {self.num_rows - 1}; nothing was freed")
        wrong = rows[self._states[rows] != _USED]
        if len(wrong):
            raise LocalProtocolError(f"row {wrong[0]} is {_STATES[self._states[wrong[0]]]}; nothing was freed")
        unique, counts = np.unique(rows, return_counts=True)
        if len(unique) != len(rows):
            raise LocalProtocolError(f"row {unique[counts > 1][0]} is given twice; nothing was freed")

    def _give_back(self, rows: npt.NDArray[np.int64]) -> None:
        with self._lock:
            self._states[rows] = _FREE
            self._num_leased -= len(rows)
            self._num_free += len(rows)
