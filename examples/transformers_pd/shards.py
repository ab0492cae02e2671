"""Each rank's part of a request by closed formulas: splits global arrays, stores the parts in pools, and assembles them.

A server has such code anyway, to compute and store its state. Nothing here uses disagg's planner, so received state is
compared with something independent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology

from .architectures import ARCHITECTURES, describe
from .components import ComponentSpec, TensorSpec, TokenRange, everything
from .content import NUMPY_DTYPES, Array, CacheContent

Layers = dict[int, dict[str, Array]]
"""A component's tensors by layer and role."""

Shard = dict[str, Layers]
"""A rank's part of `CacheContent.arrays`: the layers of its stage, and its share of each split axis."""

_SWAPPED = (("token", "kv_head"), ("channel", "width"))
"""Pairs of axes that servers store in either order."""

_BLANK = 0xA5
"""The value of every unwritten byte of a pool."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one side divides the model over ranks, and the layout of its pools.

    `order` is `nhd` (tokens, then heads; convolutions by channel) or `hnd` (heads first; convolutions by column).
    """

    tp: int = 1
    pp: int = 1
    page_size: int = 16
    num_pages: int = 64
    num_slots: int = 8
    order: str = "nhd"

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def topology(self, rank: int) -> Topology:
        return Topology(tp=self.tp, pp=self.pp).at(rank)

    def __str__(self) -> str:
        return f"TP {self.tp} PP {self.pp} page {self.page_size} {self.order.upper()}"


# --- ownership ----------------------------------------------------------------------------------------------------------


def stages(name: str, component: ComponentSpec, pp: int) -> tuple[tuple[int, ...], ...]:
    """The component's layers by pipeline stage: of `N` layers of the model, stage `s` of `P` runs `[s*N//P, (s+1)*N//P)`."""
    bounds = [stage * ARCHITECTURES[name].num_layers // pp for stage in range(pp + 1)]
    return tuple(tuple(layer for layer in component.layers if start <= layer < stop) for start, stop in pairwise(bounds))


def owned(tensor: TensorSpec, topology: Topology) -> NDArray[np.intp]:
    """A rank's positions along the split axis, in memory order: its share of every block, at least one unit."""
    positions = []
    block_start = 0
    for block in tensor.blocks:
        start = topology.tp_rank * block.num_units // topology.tp
        stop = max(start + 1, (topology.tp_rank + 1) * block.num_units // topology.tp)
        if block.groups and block.num_units % topology.tp and topology.tp % block.num_units:
            start, stop = 0, block.num_units
        positions.append(block_start + np.arange(start * block.unit_size, stop * block.unit_size))
        block_start += block.size
    return np.concatenate(positions)


def _part(tensor: TensorSpec, topology: Topology) -> tuple[Any, ...]:
    """The index of a rank's part in a global array."""
    if tensor.split is None:
        return ()
    return (slice(None),) * tensor.axes.index(tensor.split) + (owned(tensor, topology),)


def cut(content: CacheContent, topology: Topology) -> Shard:
    """A rank's part of the state of a request."""
    return {
        component.name: {
            layer: {t.role: content.arrays[component.name][layer][t.role][_part(t, topology)] for t in component.tensors}
            for layer in stages(content.name, component, topology.pp)[topology.pp_rank]
        }
        for component in describe(content.name)
    }


def assemble(name: str, num_tokens: int, dtype: str, *, sharding: Sharding, shards: Sequence[Shard]) -> CacheContent:
    """The global state from the shards of all ranks of a side, in rank order.

    Raises `ValueError` if two ranks hold different bytes for the same positions.
    """
    content = CacheContent.empty(name, num_tokens, dtype)
    for rank, shard in enumerate(shards):
        for component in describe(name):
            for layer, by_role in shard[component.name].items():
                for tensor in component.tensors:
                    array = content.arrays[component.name][layer][tensor.role]
                    array[_part(tensor, sharding.topology(rank))] = by_role[tensor.role]
    for rank, shard in enumerate(shards):
        if not _same(cut(content, sharding.topology(rank)), shard):
            raise ValueError(f"{name}: rank {rank} does not hold the same bytes as its replica")
    return content


def _same(one: Shard, other: Shard) -> bool:
    return all(
        array.tobytes() == other[name][layer][role].tobytes()
        for name, layers in one.items()
        for layer, by_role in layers.items()
        for role, array in by_role.items()
    )


# --- pools --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """One rank's memory for one component. `tensors[layer][role]` has the axes `axes[role]`, in memory order.

    The first axis is `page` or `slot`. Paged tensors have their tokens, or granules of them, inside the page.
    """

    component: ComponentSpec
    page_size: int
    axes: Mapping[str, tuple[str, ...]]
    tensors: Layers

    @classmethod
    def allocate(cls, name: str, component: ComponentSpec, *, sharding: Sharding, topology: Topology, dtype: str) -> "Pool":
        """Allocate memory for the layers of the rank's stage, full of `_BLANK`."""
        axes = {t.role: _memory_axes(component, t, sharding.order) for t in component.tensors}
        page_size = math.lcm(sharding.page_size, component.granule)
        layers = stages(name, component, topology.pp)[topology.pp_rank]
        tensors: Layers = {layer: {} for layer in layers}
        for tensor in component.tensors:
            sizes = dict(zip(tensor.axes, tensor.shape(page_size // component.granule), strict=True))
            sizes |= {"page": sharding.num_pages, "slot": sharding.num_slots}
            if tensor.split is not None:
                sizes[tensor.split] = len(owned(tensor, topology))
            shape = [sizes[axis] for axis in axes[tensor.role]]
            for layer in layers:
                array = np.empty(shape, NUMPY_DTYPES[tensor.dtype or dtype])
                array.view(np.uint8)[...] = _BLANK
                tensors[layer][tensor.role] = array
        return cls(component, page_size, axes, tensors)

    def write(self, rows: Rows, layers: Layers, tokens: TokenRange) -> None:
        """Write the tokens `[start, stop)` of a shard to the request's rows; a slot is written whole."""
        for layer, by_role in layers.items():
            for role, array in by_role.items():
                self._view(layer, role)[self._cells(rows, tokens)] = array[self._part(rows, tokens)]

    def read(self, rows: Rows, tokens: TokenRange) -> Layers:
        """The reverse of `write`: a copy of the tokens."""
        cells = self._cells(rows, tokens)
        return {
            layer: {role: np.array(self._view(layer, role)[cells], order="C") for role in roles}
            for layer, roles in self.tensors.items()
        }

    @property
    def streams(self) -> bool:
        """Whether tokens never change once written, so that they can be sent before the prompt ends."""
        return self.component.paged and self.component.tokens is everything

    def rows_from(self, rows: Rows, token: int) -> Rows:
        """The pages from the one that holds `token` on; a slot unchanged."""
        if isinstance(rows, Slot):
            return rows
        return Pages(rows.ids[token // self.page_size - rows.first_token // self.page_size :], first_token=token)

    def wipe(self, rows: Rows, tokens: TokenRange) -> None:
        """Reset these cells to `_BLANK`."""
        values = self.read(rows, tokens)
        for by_role in values.values():
            for array in by_role.values():
                array.view(np.uint8)[...] = _BLANK
        self.write(rows, values, tokens)

    def is_blank(self) -> bool:
        """Whether every byte of the pool is `_BLANK`."""
        return all((a.view(np.uint8) == _BLANK).all() for by_role in self.tensors.values() for a in by_role.values())

    def flip_bit(self, rows: Rows, tokens: TokenRange, *, topology: Topology) -> None:
        """Flip the sign bit of the globally last value of the request, if this rank holds it (little endian).

        Of index keys, flip an exponent bit: they only select tokens, and a sign may not change the selection.
        """
        layer, tensor = self.component.layers[-1], self.component.tensors[-1]
        last_is_here = (
            tensor.split is None or owned(tensor, topology)[-1] == tensor.shape(0)[tensor.axes.index(tensor.split)] - 1
        )
        if layer in self.tensors and last_is_here:
            values = self.read(rows, tokens)
            values[layer][tensor.role].view(np.uint8).flat[-1] ^= 0x40 if tensor.role == "key" else 0x80
            self.write(rows, values, tokens)

    def _view(self, layer: int, role: str) -> Array:
        """A tensor with its axes in the declared order, after the page or slot axis."""
        tensor = next(t for t in self.component.tensors if t.role == role)
        order = [self.axes[role].index(axis) for axis in (self.axes[role][0], *tensor.axes)]
        return self.tensors[layer][role].transpose(order)

    def _cells(self, rows: Rows, tokens: TokenRange) -> tuple[Any, ...]:
        """The index into `_view` of `[token, ...]`, or of a slot's `[...]`."""
        if isinstance(rows, Slot):
            return (rows.id,)
        granules = np.arange(tokens[0] // self.component.granule, tokens[1] // self.component.granule)
        page, inside = np.divmod(granules, self.page_size // self.component.granule)
        return rows.ids[page - rows.first_token // self.page_size], inside

    def _part(self, rows: Rows, tokens: TokenRange) -> slice:
        """The rows of `tokens` in a shard's array, which begins at the first token of `rows`."""
        if isinstance(rows, Slot):
            return slice(None)
        start, stop = (self.component.num_rows((rows.first_token, token)) for token in tokens)
        return slice(start, stop)


def _memory_axes(component: ComponentSpec, tensor: TensorSpec, order: str) -> tuple[str, ...]:
    """The axes of a pool's tensor: as declared for `nhd`, with the pairs in `_SWAPPED` exchanged for `hnd`."""
    axes = ["page" if component.paged else "slot", *tensor.axes]
    for pair in _SWAPPED if order == "hnd" else ():
        if set(pair) <= set(axes):
            first, second = map(axes.index, pair)
            axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)
