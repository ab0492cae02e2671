"""The tokens of a request that a rank holds, and the rows they are in, by the formulas of models and servers and not by the
library's plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.commands.cases.instructions import Item
from disagg.commands.cases.sides import Side
from disagg.core.errors import ConfigError
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.state.declare import Role, State
from disagg.state.window import ring_rows
from disagg.testing import reference
from disagg.testing.reference import KVRank
from disagg.testing.state_models import GlobalAxis, Part, Place, fused, per_head, replicated

Ints = npt.NDArray[np.int64]

WHOLE = ("dim", "width", "byte", "state", "head_dim", "key_dim", "value_dim")
"""Axes that no parallelism splits."""


def streams(state: State) -> bool:
    """Rows are sent in chunks as they are computed; windows, rings and slots are sent at the end of a request."""
    return state.rows == "pages" and state.window is None and state.ring is None


def rows_of(state: State, item: Item) -> Rows:
    ids, need = item.rows[state.name], item.needs[state.name]
    if state.rows == "slot":
        return Slot(ids[0])
    if state.ring is not None:
        return ring_rows(ids[0], need=need, stride=state.ring)
    return Pages(np.array(ids, dtype=np.int32), first_token=need[0])


@dataclass(frozen=True)
class RankPlace:
    side: Side
    topology: Topology

    @property
    def place(self) -> Place:
        t = self.topology
        return Place(tp=t.tp, tp_rank=t.tp_rank, ep=t.ep, cp=t.cp, cp_rank=t.cp_rank, context=self.side.context_kind)

    def tokens(self, num_tokens: int) -> Ints:
        t = self.topology
        kind = self.side.context_kind
        rank = KVRank(layers=(), page_size=self.side.page, num_pages=1, cp=t.cp, cp_rank=t.cp_rank, context=kind)
        return reference.tokens_of(rank, num_tokens)

    def page_range(self, state: State, num_tokens: int, tokens: tuple[int, int]) -> tuple[int, int]:
        """The range `[start, stop)` of the request's pages on this rank that hold its tokens of a range."""
        mine, size = self.tokens(num_tokens), state.page_tokens(self.side.page)
        before, until = (int((mine < token).sum()) for token in tokens)
        return before // size, max(-(-until // size), before // size)

    def num_rows(self, state: State, num_tokens: int, need: tuple[int, int]) -> int:
        if state.rows == "slot" or state.ring is not None:
            return 1
        start, stop = self.page_range(state, num_tokens, need)
        return stop - start

    def entries(self, state: State, role: Role, item: Item) -> tuple[Ints, Ints, Ints]:
        """Global numbers of an item's entries of one tensor on this rank, and the row and offset of each."""
        ids, (start, stop) = np.asarray(item.rows[state.name], dtype=np.int64), item.needs[state.name]
        if state.rows == "slot":
            zero = np.zeros(1, dtype=np.int64)
            return zero, ids, zero
        mine = np.arange(item.tokens, dtype=np.int64) if state.ring is not None else self.tokens(item.tokens)
        last = mine + role.granule - 1
        chosen = np.flatnonzero((mine % role.granule == 0) & (start <= last) & (last < stop))
        if state.ring is not None:
            offset = mine[chosen] % state.ring
            return mine[chosen] // role.granule, np.full(len(chosen), ids[0]), offset // role.granule
        index, offset = np.divmod(chosen, state.page_tokens(self.side.page))
        first, _ = self.page_range(state, item.tokens, (start, stop))
        return mine[chosen] // role.granule, ids[index - first], offset // role.granule


def global_axis(state: State, role: Role, axis: str) -> GlobalAxis:
    """Raises `ConfigError` for an axis that the reference does not know."""
    size = role.inner[axis].size
    if axis in ("kv_head", "head"):
        return per_head(size)
    if axis == "channel":
        return _channels(state, role, size)
    if axis not in WHOLE:
        raise ConfigError(f"component {state.name!r}, tensor {role.name!r}: the benchmark has no reference for axis {axis!r}")
    return replicated(size)


def _channels(state: State, role: Role, size: int) -> GlobalAxis:
    """The sizes of the temporal state, if there is one, determine the parts of a convolution's channels."""
    temporal = next((each.inner for each in state.roles if each.name == "temporal"), {})
    match {axis: inner.size for axis, inner in temporal.items()}:
        case {"head": heads, "key_dim": key_dim, "value_dim": value_dim}:  # GDN, KDA: q, k, v
            keys = Part((size - heads * value_dim) // 2 // key_dim, key_dim)
            parts = [keys, keys, Part(heads, value_dim)]
        case {"head": heads, "head_dim": head_dim, "state": state_size}:  # Mamba2: x, B, C
            groups = Part((size - heads * head_dim) // 2 // state_size, state_size, grouped=True)
            parts = [Part(heads, head_dim), groups, groups]
        case _:  # Mamba1, short convolutions
            parts = [Part(size, 1)]
    axis = fused(*parts)
    if axis.size != size:
        raise ConfigError(f"component {state.name!r}, tensor {role.name!r}: expected {axis.size} channels, found {size}")
    return axis
