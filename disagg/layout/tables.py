"""Layouts: the positions of each tensor's axes that each rank of an instance owns, as immutable values. Re-sharding is
`ownership.overlap`, axis by axis: every kind of parallelism, replicas, fused sub-blocks and page sizes are only different
ownerships. Invalid values raise `LayoutError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec

from disagg.core.errors import LayoutError
from disagg.core.memory import ITEMSIZE
from disagg.core.rows import MAX_NAME, is_text
from disagg.core.topology import Topology
from disagg.layout.conversion import Held, Numbers, check_numbers, place_of, rule
from disagg.layout.encoding import encode
from disagg.layout.ownership import Interval, Intervals, Owned, count, cuts, merged, num_intervals

LAYER = "layer"
TOKEN = "token"
MAX_AXIS_SIZE = 2**24
"""Tables come from peers and are expanded to intervals, hence these limits."""
MAX_LAYERS = 2**14
MAX_LAYER_IDS = 2**15
"""Limit on the lengths of all different lists of layers of a table."""


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The positions of one axis that one rank owns.

    `size` is global; `None` for the token axis, which is as long as the request, and for the layer axis, whose positions are
    layer ids. On a token axis `granule` tokens share one position (pooled keys), which exists once all of them do.
    """

    name: str
    size: int | None
    owned: Owned
    granule: int = 1

    def __post_init__(self) -> None:
        if self.granule < 1:
            raise LayoutError(f"axis {self.name!r}: expected a granule of at least 1, found {self.granule}")
        if any(cut % self.granule for cut in cuts(self.owned)):
            raise LayoutError(f"axis {self.name!r}: ownership {self.owned} splits granules of {self.granule}")
        if self.size is None and self.name not in (LAYER, TOKEN):
            raise LayoutError(f"axis {self.name!r}: expected a size, found none; only {LAYER!r} and {TOKEN!r} have none")
        if self.size is None:
            return
        if not 0 < self.size <= MAX_AXIS_SIZE:
            raise LayoutError(f"axis {self.name!r}: expected a size of 1 to {MAX_AXIS_SIZE}, found {self.size}")
        num_intervals(self.owned, self.size)
        if isinstance(self.owned, Intervals) and any(part.stop > self.size for part in self.owned.parts):
            raise LayoutError(f"axis {self.name!r}: expected positions below its size {self.size}, found {self.owned}")


class TensorLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one rank owns of one role (`k`, `v`, `conv`, ...) of a component. With `numbers` a peer may hold it in another
    dtype.
    """

    role: str
    dtype: str
    axes: tuple[Axis, ...]
    numbers: Numbers | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise LayoutError(f"tensor {self.role!r}: expected a dtype among {', '.join(ITEMSIZE)}, found {self.dtype!r}")
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names) or names.count(LAYER) != 1:
            raise LayoutError(f"tensor {self.role!r}: expected distinct axes with one {LAYER!r}, found {' '.join(names)!r}")
        if not isinstance(self.axis(LAYER).owned, Intervals):
            raise LayoutError(f"tensor {self.role!r}: expected layers as intervals of ids, found {self.axis(LAYER).owned}")
        if any(part.stop > MAX_LAYERS for part in self.layer_parts):
            raise LayoutError(f"tensor {self.role!r}: expected layer ids below {MAX_LAYERS}, found {self.axis(LAYER).owned}")
        for axis in self.inner_axes:
            if axis.granule != 1:
                what = f"tensor {self.role!r}, axis {axis.name!r}"
                raise LayoutError(f"{what}: only a token axis may have a granule, found {axis.granule}")
        if self.numbers is not None:
            scaled = self._scaled
            num_positions = 1 if scaled is None else count(scaled.owned, scaled.size or 0)
            check_numbers(self.dtype, self.numbers, self.num_layers, num_positions, f"tensor {self.role!r}")

    def axis(self, name: str) -> Axis:
        """Raises `LayoutError` if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"tensor {self.role!r}: no axis {name!r} among {' '.join(a.name for a in self.axes)!r}")

    @property
    def layer_parts(self) -> tuple[Interval, ...]:
        return self.axis(LAYER).owned.within(2**62).parts

    @property
    def num_layers(self) -> int:
        return sum(part.stop - part.start for part in self.layer_parts)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer ids in memory order."""
        return tuple(layer for part in self.layer_parts for layer in range(*part))

    @property
    def _scaled(self) -> Axis | None:
        """The axis whose positions have scales of their own in each layer."""
        if self.numbers is None or self.numbers.axis is None:
            return None
        axis = self.axis(self.numbers.axis)
        if axis not in self.inner_axes:
            raise LayoutError(f"tensor {self.role!r}: expected scales by an axis of constant size, found {axis.name!r}")
        return axis

    @cached_property
    def scales(self) -> dict[tuple[int, int], float]:
        """The scales by layer and position of the axis of `numbers` (0 without one)."""
        if self.numbers is None:
            return {}
        axis = self._scaled
        parts = (Interval(0, 1),) if axis is None else axis.owned.within(axis.size or 0).parts
        positions = [position for part in parts for position in range(*part)]
        return dict(zip(itertools.product(self.layers, positions), self.numbers.scales, strict=True))

    @cached_property
    def layer_set(self) -> frozenset[int]:
        return frozenset(self.layers)

    @cached_property
    def token(self) -> Axis | None:
        """`None` for state that has one value per request."""
        return next((axis for axis in self.axes if axis.name == TOKEN), None)

    @cached_property
    def inner_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.name not in (LAYER, TOKEN))


RowKind = Literal["pages", "slot"]


class ComponentLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What one rank owns of a component, whose tensors share rows: `pages` of tokens, or one `slot` per request."""

    name: str
    rows: RowKind
    tensors: tuple[TensorLayout, ...]
    optional: bool = False

    def __post_init__(self) -> None:
        if not is_text(self.name, MAX_NAME):
            raise LayoutError(f"component: expected a name of 1 to {MAX_NAME} characters, found {self.name[:MAX_NAME]!r}")
        roles = [tensor.role for tensor in self.tensors]
        if len(set(roles)) != len(roles):
            raise LayoutError(f"component {self.name!r}: expected distinct roles, found {roles}")
        for tensor in self.tensors:
            if (tensor.token is not None) != (self.rows == "pages"):
                what = f"component {self.name!r}, tensor {tensor.role!r}"
                found = f"axes {' '.join(axis.name for axis in tensor.axes)!r} and rows {self.rows!r}"
                raise LayoutError(f"{what}: expected a {TOKEN!r} axis with pages and none with slots, found {found}")
        if len({tensor.token.owned for tensor in self.tensors if tensor.token}) > 1:
            raise LayoutError(f"component {self.name!r}: expected tensors that own the same tokens, since they share pages")

    @cached_property
    def tokens(self) -> Owned | None:
        """`None` for slots."""
        return next((tensor.token.owned for tensor in self.tensors if tensor.token), None)

    def tensor(self, role: str) -> TensorLayout:
        """Raises `LayoutError` if there is none."""
        for tensor in self.tensors:
            if tensor.role == role:
                return tensor
        raise LayoutError(f"component {self.name!r}: no tensor {role!r} among {[t.role for t in self.tensors]}")


class RankLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    components: tuple[ComponentLayout, ...]

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise LayoutError(f"rank layout: expected each component once, found {names}")

    @cached_property
    def by_name(self) -> dict[str, ComponentLayout]:
        return {component.name: component for component in self.components}


class TopologySizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def topology(self) -> Topology:
        """The topology of rank 0. Raises `ConfigError` for impossible sizes."""
        return Topology(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep)


class LayoutTable(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What each rank of a group owns, by group rank. All groups of an instance are alike."""

    sizes: TopologySizes
    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        expected = self.sizes.topology.group_size
        if len(self.ranks) != expected:
            raise LayoutError(f"layout table: expected {expected} ranks for {self.sizes}, found {len(self.ranks)}")

    @cached_property
    def components(self) -> dict[str, tuple[ComponentLayout | None, ...]]:
        """Layouts by group rank; `None` for ranks that own none of the component."""
        names = dict.fromkeys(c.name for rank in self.ranks for c in rank.components)
        return {name: tuple(rank.by_name.get(name) for rank in self.ranks) for name in names}

    def encode(self) -> bytes:
        """Equal tables give equal bytes."""
        return encode(self)

    @classmethod
    def decode(cls, data: bytes) -> LayoutTable:
        """Raises `LayoutError` with the path of the wrong value."""
        try:
            table = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LayoutError(f"layout table of {len(data)} bytes cannot be read: {error}") from error
        table._share_layers()
        return table

    def _share_layers(self) -> None:
        """Have tensors of equal layers share the list of them, which may take a thousand times the bytes of its intervals."""
        shared: dict[tuple[Interval, ...], dict[str, object]] = {}
        num_ids = 0
        for tensor in (tensor for rank in self.ranks for component in rank.components for tensor in component.tensors):
            if tensor.layer_parts not in shared:
                num_ids += tensor.num_layers
                if num_ids > MAX_LAYER_IDS:
                    raise LayoutError(f"layout table: expected at most {MAX_LAYER_IDS} layer ids in lists that differ")
                shared[tensor.layer_parts] = {"layers": tensor.layers, "layer_set": tensor.layer_set}
            tensor.__dict__.update(shared[tensor.layer_parts])


_DECODER = msgspec.msgpack.Decoder(LayoutTable)


def layout_table(topology: Topology, per_component: Sequence[Sequence[ComponentLayout | None]]) -> LayoutTable:
    sizes = TopologySizes(topology.dp, topology.pp, topology.cp, topology.tp, topology.ep)
    ranks = tuple(
        RankLayout(tuple(layouts[i] for layouts in per_component if layouts[i] is not None))  # type: ignore[misc]
        for i in range(topology.group_size)
    )
    return LayoutTable(sizes, ranks)


def agreed_components(local: LayoutTable, remote: LayoutTable) -> tuple[str, ...]:
    """The names of the components that both sides have, sorted. Raises `LayoutError` if one side lacks a component that is
    not optional, or if rows, roles, axis names, global sizes, granules or layers of a common one differ. Dtypes may differ
    only if both sides' `numbers` can be converted.
    """
    names = sorted(local.components.keys() | remote.components.keys())
    agreed = []
    for name in names:
        ours, theirs = _facts(local, name), _facts(remote, name)
        if ours is None or theirs is None:
            present = ours if theirs is None else theirs
            if present is not None and present.pop("optional"):
                continue
            lacking = "the peer" if theirs is None else "this side"
            raise LayoutError(f"component {name!r}: required, but {lacking} does not have it")
        del ours["optional"], theirs["optional"]
        for field in sorted(ours.keys() | theirs.keys()):
            if ours.get(field) != theirs.get(field):
                raise LayoutError(f"component {name!r}, {field}: {ours.get(field)} here, {theirs.get(field)} at the peer")
        converted(local, remote, name)
        agreed.append(name)
    return tuple(agreed)


def converted(source: LayoutTable, destination: LayoutTable, component: str) -> tuple[str, ...]:
    """Roles that are converted. Raises `LayoutError` if one would have to be and there is no rule."""
    ours, theirs = _numbers(source, component), _numbers(destination, component)
    found = []
    for role, held in ours.items():
        try:
            if rule(held, theirs[role]):
                found.append(role)
        except LayoutError as error:
            raise LayoutError(f"component {component!r}, tensor {role!r}: {error}") from error
    return tuple(found)


def _numbers(table: LayoutTable, name: str) -> dict[str, Held]:
    """Raises `LayoutError` if the table's ranks disagree."""
    found: dict[str, Held] = {}
    for component in table.components.get(name, ()):
        for tensor in component.tensors if component is not None else ():
            if tensor.numbers is None:
                continue
            what = f"component {name!r}, tensor {tensor.role!r}"
            own = tensor.dtype, tensor.numbers.rounding, tensor.numbers.axis
            *first, scales = found.setdefault(tensor.role, Held(*own, {}))
            if own != tuple(first):
                raise LayoutError(f"{what}: ranks of one instance differ: {tuple(first)} and {own}")
            for place, scale in tensor.scales.items():
                if scales.setdefault(place, scale) != scale:
                    where = f"{what}, {place_of(place, tensor.numbers.axis)}"
                    raise LayoutError(f"{where}: ranks of one instance differ: scales {scales[place]} and {scale}")
    return found


def _facts(table: LayoutTable, name: str) -> dict[str, object] | None:
    """What both sides must agree on, by field. Raises `LayoutError` if the table's ranks disagree."""
    facts: dict[str, object] = {}
    layers: dict[str, set[Interval]] = {}
    for component in table.components.get(name, ()):
        if component is None:
            continue
        found: dict[str, object] = {"rows": component.rows, "optional": component.optional}
        for tensor in component.tensors:
            axes = {axis.name: (axis.size, axis.granule) for axis in tensor.axes}
            found[f"tensor {tensor.role!r}: dtype"] = tensor.dtype if tensor.numbers is None else "any with scales"
            found[f"tensor {tensor.role!r}: axes"] = " ".join(sorted(axes))
            for axis, (size, granule) in axes.items():
                found[f"tensor {tensor.role!r}, axis {axis!r}: global size"] = size
                found[f"tensor {tensor.role!r}, axis {axis!r}: granule"] = granule
            layers.setdefault(tensor.role, set()).update(tensor.layer_parts)
        for field, value in found.items():
            if facts.setdefault(field, value) != value:
                raise LayoutError(f"component {name!r}, {field}: ranks of one instance differ: {facts[field]} and {value}")
    for role, parts in layers.items():
        facts[f"tensor {role!r}: layers"] = str(merged(parts))
    return facts or None
