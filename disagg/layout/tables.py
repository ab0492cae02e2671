"""Who owns which positions of which tensor: the layout algebra, as immutable values and total functions.

A tensor has named global axes. On each axis a rank owns a set of positions, held in a known memory order; the *local
index* of a position is its place in that order. Re-sharding is nothing but `overlap`, axis by axis: tensor, pipeline,
context and expert parallelism, replicas, fused sub-blocks and page sizes are different ownerships, never other code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec

from disagg.core.errors import LayoutError
from disagg.core.memory import ITEMSIZE
from disagg.core.rows import MAX_NAME
from disagg.core.topology import Topology
from disagg.layout.ownership import MAX_AXIS_SIZE, Intervals, Owned, Periodic, cuts, plain_integer, positions_to_intervals

LAYER = "layer"
TOKEN = "token"
MAX_LAYERS = 2**14


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One axis of a tensor, as one rank owns it.

    `size` is the global number of positions, `None` where it is not a constant of the model: the token axis (as long
    as the request) and the layer axis (the layers are named by id). `granule` tokens share one position of a token axis
    (pooled keys), which exists once it has all of them.
    """

    name: str
    size: int | None
    owned: Owned
    granule: int = 1

    def __post_init__(self) -> None:
        if self.granule < 1:
            raise LayoutError(f"axis {self.name!r}: expected a granule of at least 1, found {self.granule}")
        if any(cut % self.granule for cut in cuts(self.owned)):
            raise LayoutError(f"axis {self.name!r}: owned {self.owned} cuts through granules of {self.granule}")
        if self.size is None and self.name not in (LAYER, TOKEN):
            raise LayoutError(f"axis {self.name!r}: only {LAYER!r} and {TOKEN!r} may be without a size")
        if self.size is None:
            return
        if not 0 < self.size <= MAX_AXIS_SIZE:
            raise LayoutError(f"axis {self.name!r}: expected a size of 1 to {MAX_AXIS_SIZE}, found {self.size}")
        if isinstance(self.owned, Periodic):
            self.owned.within(self.size)
        if isinstance(self.owned, Intervals) and any(part.stop > self.size for part in self.owned.parts):
            raise LayoutError(f"axis {self.name!r}: owned {self.owned} reaches beyond its size {self.size}")


class TensorLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """One role (`k`, `v`, `conv`, ...) of a component, as one rank owns it, over all of its layers."""

    role: str
    dtype: str
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise LayoutError(f"tensor {self.role!r}: expected a dtype of {', '.join(ITEMSIZE)}, found {self.dtype!r}")
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names) or names.count(LAYER) != 1:
            raise LayoutError(f"tensor {self.role!r}: expected distinct axes with one {LAYER!r}, found {' '.join(names)!r}")
        if not isinstance(self.axis(LAYER).owned, Intervals):
            raise LayoutError(f"tensor {self.role!r}: layers are owned as intervals of ids")
        if any(part.stop > MAX_LAYERS for part in self.axis(LAYER).owned.within(2**62).parts):
            raise LayoutError(f"tensor {self.role!r}: expected layer ids below {MAX_LAYERS}, found {self.axis(LAYER).owned}")
        for axis in self.inner_axes:
            if axis.granule != 1:
                raise LayoutError(f"tensor {self.role!r}, axis {axis.name!r}: only a token axis may have a granule")

    def axis(self, name: str) -> Axis:
        """The axis of that name; raises `LayoutError` where there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"tensor {self.role!r}: no axis {name!r} among {' '.join(a.name for a in self.axes)!r}")

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer ids in memory order."""
        return tuple(layer for part in self.axis(LAYER).owned.within(2**62).parts for layer in range(*part))

    @cached_property
    def layer_set(self) -> frozenset[int]:
        return frozenset(self.layers)

    @cached_property
    def token(self) -> Axis | None:
        """The token axis; none for state that has one value per request."""
        return next((axis for axis in self.axes if axis.name == TOKEN), None)

    @cached_property
    def inner_axes(self) -> tuple[Axis, ...]:
        """The axes of constant size: neither layer nor token."""
        return tuple(axis for axis in self.axes if axis.name not in (LAYER, TOKEN))


RowKind = Literal["pages", "slot"]


class ComponentLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """A named group of tensors with one index space, as one rank owns it. `pages` hold tokens; a `slot` holds a request."""

    name: str
    rows: RowKind
    tensors: tuple[TensorLayout, ...]
    optional: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= MAX_NAME:
            raise LayoutError(f"component: expected a name of 1 to {MAX_NAME} characters, found {self.name[:MAX_NAME]!r}")
        roles = [tensor.role for tensor in self.tensors]
        if len(set(roles)) != len(roles):
            raise LayoutError(f"component {self.name!r}: roles must be distinct, found {roles}")
        for tensor in self.tensors:
            if (tensor.token is not None) != (self.rows == "pages"):
                raise LayoutError(
                    f"component {self.name!r}, tensor {tensor.role!r}: pages have a {TOKEN!r} axis and slots none"
                )
        if len({tensor.token.owned for tensor in self.tensors if tensor.token}) > 1:
            raise LayoutError(f"component {self.name!r}: its tensors own different tokens, but share their pages")

    @cached_property
    def tokens(self) -> Owned | None:
        """The tokens that this rank's pages hold; none for slots."""
        return next((tensor.token.owned for tensor in self.tensors if tensor.token), None)

    def tensor(self, role: str) -> TensorLayout:
        """The tensor of that role; raises `LayoutError` where there is none."""
        for tensor in self.tensors:
            if tensor.role == role:
                return tensor
        raise LayoutError(f"component {self.name!r}: no tensor {role!r} among {[t.role for t in self.tensors]}")


class RankLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Everything one rank owns."""

    components: tuple[ComponentLayout, ...]

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise LayoutError(f"a rank names each component once, found {names}")

    @cached_property
    def by_name(self) -> dict[str, ComponentLayout]:
        return {component.name: component for component in self.components}


class TopologySizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a topology, without a rank."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def topology(self) -> Topology:
        """As rank 0 sees it; raises `ConfigError` where the sizes are impossible."""
        return Topology(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep)


class LayoutTable(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """What every rank of a group owns, by group rank. All groups of an instance are alike."""

    sizes: TopologySizes
    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        expected = self.sizes.topology.group_size
        if len(self.ranks) != expected:
            raise LayoutError(f"layout table: expected {expected} ranks ({self.sizes}), found {len(self.ranks)}")

    @cached_property
    def components(self) -> dict[str, tuple[ComponentLayout | None, ...]]:
        """Each component's layout per group rank, `None` on ranks that hold none of it."""
        names = dict.fromkeys(c.name for rank in self.ranks for c in rank.components)
        return {name: tuple(rank.by_name.get(name) for rank in self.ranks) for name in names}

    def encode(self) -> bytes:
        """As bytes; equal tables give equal bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> LayoutTable:
        """The table of `encode`; raises `LayoutError` naming the path of what is wrong."""
        try:
            return _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LayoutError(f"layout table of {len(data)} bytes cannot be read: {error}") from error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain_integer)
_DECODER = msgspec.msgpack.Decoder(LayoutTable)


def layout_table(topology: Topology, per_component: Sequence[Sequence[ComponentLayout | None]]) -> LayoutTable:
    """The table of an instance from each component's layouts by group rank."""
    sizes = TopologySizes(topology.dp, topology.pp, topology.cp, topology.tp, topology.ep)
    ranks = tuple(
        RankLayout(tuple(layouts[i] for layouts in per_component if layouts[i] is not None))  # type: ignore[misc]
        for i in range(topology.group_size)
    )
    return LayoutTable(sizes, ranks)


def agreed_components(local: LayoutTable, remote: LayoutTable) -> tuple[str, ...]:
    """The components that both sides have, sorted; optional ones that one side lacks are left out.

    Raises `LayoutError` naming what does not match: a required component that one side lacks, and, in what both have,
    rows, roles, dtype, axis names, global sizes, granules or layers.
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
        ours.pop("optional"), theirs.pop("optional")
        for field in sorted(ours.keys() | theirs.keys()):
            if ours.get(field) != theirs.get(field):
                raise LayoutError(f"component {name!r}, {field}: {ours.get(field)} here, {theirs.get(field)} at the peer")
        agreed.append(name)
    return tuple(agreed)


def _facts(table: LayoutTable, name: str) -> dict[str, object] | None:
    """What must match of a component, by field; checks that the ranks of the table agree among themselves."""
    facts: dict[str, object] = {}
    layers: dict[str, set[int]] = {}
    for component in table.components.get(name, ()):
        if component is None:
            continue
        found: dict[str, object] = {"rows": component.rows, "optional": component.optional}
        for tensor in component.tensors:
            axes = {axis.name: (axis.size, axis.granule) for axis in tensor.axes}
            found[f"tensor {tensor.role!r}: dtype"] = tensor.dtype
            found[f"tensor {tensor.role!r}: axes"] = " ".join(sorted(axes))
            for axis, (size, granule) in axes.items():
                found[f"tensor {tensor.role!r}, axis {axis!r}: global size"] = size
                found[f"tensor {tensor.role!r}, axis {axis!r}: granule"] = granule
            layers.setdefault(tensor.role, set()).update(tensor.layers)
        for field, value in found.items():
            if facts.setdefault(field, value) != value:
                raise LayoutError(f"component {name!r}, {field}: ranks of one instance differ, {facts[field]} and {value}")
    for role, ids in layers.items():
        facts[f"tensor {role!r}: layers"] = _brief(sorted(ids))
    return facts or None


def _brief(ids: list[int]) -> str:
    return str(positions_to_intervals(ids))
