"""Declaration of state: roles with named axes, and a rule of ownership for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.memory import ITEMSIZE, MemoryRegion, RawTensor, raw_tensor
from disagg.core.topology import Topology
from disagg.layout.conversion import Numbers
from disagg.layout.ownership import EVERYTHING, Interval, Intervals, Owned, Periodic, Share, positions_to_intervals, split
from disagg.layout.placement import ORDERS, Component, Placement, TensorPlacement, parse_axes, tensor_placement
from disagg.layout.stages import group_layers
from disagg.layout.tables import LAYER, TOKEN, Axis, ComponentLayout, RowKind, TensorLayout
from disagg.state.overlap import first_overlap, overlaps_itself

T = TypeVar("T")
Rule = Callable[[Topology], Owned]
"""The positions of an axis that a rank owns."""
Scale = Mapping[int, npt.ArrayLike] | float | None
"""An element times its scale is the number that it stands for. One scale for all layers, or by layer, perhaps for each
position of an axis over all ranks. `None`: unknown.
"""


def check_size(size: object, what: str, *, least: int = 1) -> None:
    """Raises `ConfigError` unless it is an integer of at least `least`."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < least:
        raise ConfigError(f"{what}: expected an integer of at least {least}, found {size!r}")


@dataclass(frozen=True)
class Inner:
    size: int
    owned: Rule

    def local_size(self, rank: Topology) -> int:
        return self.owned(rank).within(self.size).count_below(self.size)


def whole(size: int) -> Inner:
    """Every rank of the group owns the whole axis."""
    return Inner(size, lambda _: EVERYTHING)


def by_tp(size: int) -> Inner:
    """Heads or channels divided over tensor-parallel ranks by `split`. With more ranks than heads some ranks are
    replicas.
    """
    return Inner(size, lambda rank: Intervals((split(size, rank.tp, rank.tp_rank),)))


@dataclass(frozen=True)
class Block:
    """A sub-block of a fused axis: `units` of `width` positions each. A rank owns whole units. With `groups` several heads
    share the units: then every rank owns all of them, unless the number of units or of ranks divides the other.
    """

    units: int
    width: int
    groups: bool = False

    def __post_init__(self) -> None:
        check_size(self.units, "block, units")
        check_size(self.width, "block, width")

    @property
    def size(self) -> int:
        return self.units * self.width


def blocks_by_tp(blocks: Iterable[Block]) -> Inner:
    """A fused axis `x ‖ B ‖ C`. Each block is divided over tensor-parallel ranks by `split`, in whole units."""
    parts = tuple(blocks)

    def owned(rank: Topology) -> Owned:
        start, intervals = 0, []
        for block in parts:
            uneven = block.units % rank.tp != 0 and rank.tp % block.units != 0
            whole_block = block.groups and uneven
            first, last = (0, block.units) if whole_block else split(block.units, rank.tp, rank.tp_rank)
            intervals.append(Interval(start + first * block.width, start + last * block.width))
            start += block.size
        return Intervals(tuple(intervals))

    return Inner(sum(block.size for block in parts), owned)


def all_tokens(_: Topology) -> Owned:
    """Every rank of the group owns every token: no context parallelism."""
    return EVERYTHING


def page_blocks(page_size: int) -> Rule:
    """Context-parallel prefill: each rank owns one contiguous block of pages of `page_size` tokens. The block depends on the
    number of tokens, so the receiver's `need` must end in the prompt's last page, or the request fails.
    """
    return lambda rank: Share(rank.cp_rank, rank.cp, page_size)


def pages_in_turn(page_size: int) -> Rule:
    """Page-sharded KV: context-parallel rank `p % cp` owns logical page `p`, as its page `p // cp`."""
    return lambda rank: Periodic(rank.cp_rank * page_size, page_size, rank.cp * page_size)


def tokens_in_turn(rank: Topology) -> Owned:
    """Context-parallel decode: rank `t % cp` owns token `t`, as its token `t // cp`."""
    return Periodic(rank.cp_rank, 1, rank.cp)


@dataclass(frozen=True, kw_only=True)
class Role:
    """A tensor that each layer has, such as K or V.

    `axes`: its axes in memory order, with `page` or `slot` among them. `inner`: those of constant size. `granule` tokens share
    one position of the token axis, which is moved with the chunk that has the last of them: send such components in order (a
    block scale exists earlier, so it is a separate component: `docs/states.md`). `dtype` is required if a rank may have no
    layer of the role. `tensors` are by layer; a role without them describes memory to allocate.

    With a `scale` a peer may hold the role in another dtype, and the writer converts it. The scale is 1 for formats of 16
    and 32 bits. With a `scale_axis` each layer has a scale for every position of that inner axis, over all ranks.
    `rounding`: how this server makes numbers of 8 bits (`disagg.core.formats`); `None`: in a way that nobody else can.
    """

    name: str
    axes: str
    inner: Mapping[str, Inner]
    dtype: str | None = None
    granule: int = 1
    tensors: Mapping[int, Any] = field(default_factory=dict)
    scale: Scale = None
    scale_axis: str | None = None
    rounding: str | None = "nearest"

    def __post_init__(self) -> None:
        check_size(self.granule, f"tensor {self.name!r}, granule")
        for axis, inner in self.inner.items():
            check_size(inner.size, f"tensor {self.name!r}, axis {axis!r}")

    def numbers(self, layers: Sequence[int], rank: Topology, what: str) -> Numbers | None:
        """`None` without a `scale`. Raises `ConfigError` for a layer without scales, or with a wrong number of them."""
        if self.scale is None:
            return None
        what = f"{what}, tensor {self.name!r}"
        scales = self.scale if isinstance(self.scale, Mapping) else dict.fromkeys(layers, self.scale)
        missing = [layer for layer in layers if layer not in scales]
        if missing:
            raise ConfigError(f"{what}: expected a scale for layer {missing[0]}, found none")
        own = [scale for layer in layers for scale in self._scales_of(layer, scales[layer], rank, what)]
        return Numbers(tuple(own), self.rounding, self.scale_axis)

    def _scales_of(self, layer: int, given: npt.ArrayLike, rank: Topology, what: str) -> list[float]:
        scales = np.asarray(given, dtype=np.float64)
        if self.scale_axis is None:
            if scales.ndim:
                raise ConfigError(f"{what}: expected one scale for layer {layer}, found {scales.shape}, and no scale_axis")
            return [float(scales)]
        if self.scale_axis not in self.inner:
            raise ConfigError(f"{what}, scale_axis: expected one of {', '.join(self.inner)}, found {self.scale_axis!r}")
        inner = self.inner[self.scale_axis]
        if scales.shape != (inner.size,):
            raise ConfigError(
                f"{what}: expected {inner.size} scales for layer {layer}, one for each {self.scale_axis}, found {scales.shape}"
            )
        return [float(scale) for part in inner.owned(rank).within(inner.size).parts for scale in scales[slice(*part)]]

    def of(self, tensors: Mapping[int, Any], *, axes: str | None = None) -> Role:
        """`axes`: the tensors' memory order if it differs."""
        return replace(self, tensors=tensors, axes=axes or self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot, or of `granule` tokens, in one layer, over all ranks and without replicas."""
        return math.prod(inner.size for inner in self.inner.values()) * ITEMSIZE[dtype_of(self, self.name)]

    def local_shape(self, rank: Topology, *, rows: int, page_size: int) -> tuple[int, ...]:
        """The shape of one layer's tensor on `rank`, with `rows` pages of `page_size` tokens, or `rows` slots."""
        sizes = {"page": rows, "slot": rows, TOKEN: page_size // self.granule}
        return tuple(
            self.inner[axis].local_size(rank) if axis in self.inner else sizes[axis]
            for axis in ORDERS.get(self.axes, self.axes).split()
        )


def by_layer(tensors: Mapping[int, Any], convert: Callable[[Any], T], *, what: str) -> dict[int, T]:
    """Each layer's tensor, converted. Its `ConfigError` names the layer."""
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"{what}: expected a mapping from layers to tensors, found {type(tensors).__name__}")
    converted = {}
    for layer, tensor in tensors.items():
        try:
            converted[layer] = convert(tensor)
        except ConfigError as error:
            raise ConfigError(f"{what}, layer {layer}: {error}") from error
    return converted


def declare(
    name: str,
    roles: Sequence[Role],
    *,
    rows: RowKind,
    topology: Topology,
    layers_by_stage: Sequence[Sequence[int]] | None = None,
    tokens: Rule = all_tokens,
    page_size: int | None = None,
    optional: bool = False,
) -> Component:
    """What each rank of the group owns, and where this rank's rows lie.

    `layers_by_stage` has the layer ids of each pipeline stage; a stage without layers of this component gives no tensors.
    Without it the component is this stage's part, for `join_stages`. Raises `ConfigError`, with the layer, the axis and both
    values, if tensors contradict the declaration.
    """
    what = f"component {name!r}"
    if not isinstance(topology, Topology):
        raise ConfigError(f"{what}: expected a Topology, found {topology!r}")
    row_axis = "page" if rows == "pages" else "slot"
    placements: list[TensorPlacement] = []
    regions: list[MemoryRegion] = []
    found: list[tuple[int, int]] = []
    given: list[tuple[str, Mapping[int, RawTensor]]] = []
    for role in roles:
        tensors = by_layer(role.tensors, raw_tensor, what=f"{what}, tensor {role.name!r}")
        axes = _axes(role, row_axis, what)
        if not tensors:
            continue
        given.append((role.name, tensors))
        place, num_rows, memory = _place(role, tensors, axes, row_axis, topology, what)
        placements.append(place)
        regions.extend(memory)
        sample = next(iter(tensors.values()))
        size = sample.shape[axes.index(TOKEN)] * role.granule if rows == "pages" else 1
        found.append((num_rows, size))
    _check_apart(given, what)
    if len(set(found)) > 1:
        raise ConfigError(f"{what}: expected tensors with the same (rows, tokens per page), found {sorted(set(found))}")
    own = next((tuple(role.tensors) for role in roles if role.tensors), ())
    if any(tuple(role.tensors) != own for role in roles):
        raise ConfigError(f"{what}: expected tensors of the same layers, found {[tuple(r.tensors) for r in roles]}")
    if page_size is not None and found and found[0][1] != page_size:
        raise ConfigError(f"{what}: expected pages of {page_size} tokens, found {found[0][1]}")
    stages = group_layers(topology, own, layers_by_stage, what=what)
    layouts = tuple(
        ComponentLayout(name, rows, _tensor_layouts(roles, rank, stages[rank.pp_rank], rows, tokens, component=name), optional)
        if stages[rank.pp_rank]
        else None
        for rank in topology.group()
    )
    placement = Placement(name, found[0][1], found[0][0], tuple(placements)) if found else None
    joined = layers_by_stage is not None or topology.pp == 1
    return Component(name, layouts, placement, tuple(regions), topology, joined)


def last_tokens(num_tokens: int, *, window: int, prefix: int = 0) -> tuple[int, int]:
    """The last `window` tokens without the first `prefix`: `[max(prefix, num_tokens - window), num_tokens)`, or none."""
    return min(max(prefix, num_tokens - window, 0), num_tokens), num_tokens


@dataclass(frozen=True, kw_only=True)
class State:
    """One kind of state of a model, without memory. `layers`: ids of the layers that have it. Decode needs the last `window`
    tokens (`None`: all). With `ring` the rows are rings of that many tokens, one per request, addressed by `token % ring`.
    With `packed` the roles follow each other within a page, each with all tokens of the page.
    """

    name: str
    rows: RowKind
    layers: tuple[int, ...]
    roles: tuple[Role, ...]
    window: int | None = None
    ring: int | None = None
    packed: bool = False
    optional: bool = False

    def role(self, name: str) -> Role:
        """Raises `ConfigError` if there is none."""
        for role in self.roles:
            if role.name == name:
                return role
        raise ConfigError(f"component {self.name!r}: expected one of {', '.join(r.name for r in self.roles)}, found {name!r}")

    def page_tokens(self, page_size: int) -> int:
        """Tokens per page, given `page_size` for ordinary pools. A ring is one page, and a granule is never split."""
        return self.ring or math.lcm(page_size, *(role.granule for role in self.roles))

    def nbytes(self, num_tokens: int, *, prefix: int = 0) -> int:
        """Bytes of all layers that decode needs if it has the first `prefix` tokens, without replicas."""
        start, stop = self.needed(num_tokens, prefix=prefix)
        per_layer = sum((stop // role.granule - start // role.granule) * role.nbytes for role in self.roles)
        return len(self.layers) * per_layer

    def needed(self, num_tokens: int, *, prefix: int = 0) -> tuple[int, int]:
        """The tokens `[start, stop)` that decode needs if it has the first `prefix`. `(0, 1)` for a slot."""
        if self.rows == "slot":
            return 0, 1
        return last_tokens(num_tokens, window=num_tokens if self.window is None else self.window, prefix=prefix)

    def component(
        self,
        tensors: Mapping[str, Mapping[int, Any]],
        *,
        topology: Topology,
        layers_by_stage: Sequence[Sequence[int]] | None = None,
        axes: Mapping[str, str] | None = None,
        tokens: Rule = all_tokens,
    ) -> Component:
        """The component over this rank's `tensors`, by role and layer; a role has none on a stage without its layers.
        `axes`: memory orders that differ from the role's, by role. Raises `ConfigError` if a role is missing, or if tensors
        contradict it.
        """
        expected = [role.name for role in self.roles]
        if not isinstance(tensors, Mapping):
            raise ConfigError(
                f"component {self.name!r}: expected a mapping from roles to tensors by layer, found {type(tensors).__name__}"
            )
        if sorted(expected) != sorted(tensors):
            found = ", ".join(tensors) or "none"
            raise ConfigError(f"component {self.name!r}: expected tensors for {', '.join(expected)}, found {found}")
        orders = axes or {}
        return declare(
            self.name,
            [role.of(tensors[role.name], axes=orders.get(role.name)) for role in self.roles],
            rows=self.rows,
            topology=topology,
            layers_by_stage=layers_by_stage,
            tokens=tokens,
            optional=self.optional,
        )


def _axes(role: Role, row_axis: str, what: str) -> tuple[str, ...]:
    expected = [row_axis, *([TOKEN] if row_axis == "page" else []), *role.inner]
    axes = parse_axes(role.axes, known=expected, what=what)
    missing = [axis for axis in expected if axis not in axes]
    if missing:
        raise ConfigError(f"{what}, tensor {role.name!r}: axes {role.axes!r} lack {' '.join(missing)!r}")
    return axes


def _check_apart(given: Sequence[tuple[str, Mapping[int, RawTensor]]], what: str) -> None:
    """Raises `ConfigError` unless all positions of all tensors have separate memory."""
    named = [(f"tensor {role!r} of layer {layer}", tensor) for role, tensors in given for layer, tensor in tensors.items()]
    for where, tensor in named:
        if overlaps_itself(tensor):
            found = f"strides {tensor.strides} of shape {tensor.shape}"
            raise ConfigError(f"{what}, {where}: expected separate memory for every position, found {found}")
    overlap = first_overlap([tensor for _, tensor in named])
    if overlap is not None:
        other, where = (named[index][0] for index in overlap)
        raise ConfigError(f"{what}, {where}: expected separate memory, found that of {other}, or a part of it")


def _place(
    role: Role, tensors: Mapping[int, RawTensor], axes: tuple[str, ...], row_axis: str, topology: Topology, what: str
) -> tuple[TensorPlacement, int, Sequence[MemoryRegion]]:
    sample = next(iter(tensors.values()))
    if role.dtype is not None and sample.dtype != role.dtype:
        raise ConfigError(f"{what}, tensor {role.name!r}: expected dtype {role.dtype}, found {sample.dtype}")
    sizes = {axis: inner.local_size(topology) for axis, inner in role.inner.items()}
    if TOKEN in axes and len(sample.shape) == len(axes):
        sizes[TOKEN] = sample.shape[axes.index(TOKEN)]
    return tensor_placement(role.name, tensors, axes, row_axis=row_axis, sizes=sizes, what=what)


def _tensor_layouts(
    roles: Sequence[Role], rank: Topology, layers: Sequence[int], rows: RowKind, tokens: Rule, *, component: str
) -> tuple[TensorLayout, ...]:
    tensors, what = [], f"component {component!r}"
    for role in roles:
        axes = [Axis(LAYER, None, positions_to_intervals(layers))]
        if rows == "pages":
            axes.append(Axis(TOKEN, None, tokens(rank), role.granule))
        axes.extend(Axis(axis, inner.size, inner.owned(rank)) for axis, inner in role.inner.items())
        try:
            numbers = role.numbers(layers, rank, what)
            tensors.append(TensorLayout(role.name, dtype_of(role, component), tuple(axes), numbers))
        except LayoutError as error:
            raise ConfigError(f"{what}, {error}") from error
    return tuple(tensors)


def dtype_of(role: Role, component: str) -> str:
    for tensor in role.tensors.values():
        return raw_tensor(tensor).dtype
    if role.dtype is None:
        raise ConfigError(
            f"component {component!r}, tensor {role.name!r}: expected a dtype, since this stage has no layer of it, found none"
        )
    return role.dtype
