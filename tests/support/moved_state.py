"""Moves the state of one request between instances in this process: cut into shards, sent, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg import KVManager, ModelId, Pages, Slot, Topology, new_request_id
from disagg.core.rows import Rows
from disagg.models import ModelSpec, PoolShape, StagePools, State, allocate
from disagg.state.declare import Role
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS

Array = npt.NDArray[Any]
Arrays = Mapping[tuple[str, int, str], Array]
"""Undivided tensors by state, layer and role: `[token, *inner]`, or `[*inner]` for a slot."""


@dataclass(frozen=True)
class Side:
    """One instance: ranks of tensor parallelism, tokens per page, and the axis order of KV."""

    tp: int
    page_size: int
    order: str


SOURCE, DESTINATION = Side(2, 4, "nhd"), Side(3, 8, "hnd")


def as_held(spec: ModelSpec, arrays: Arrays) -> ModelSpec:
    """The description with the dtypes of `arrays`, and only their roles."""
    states = []
    for state in spec.states:
        layer = state.layers[0]
        roles = [role for role in state.roles if (state.name, layer, role.name) in arrays]
        dtypes = [arrays[state.name, layer, role.name].dtype.name for role in roles]
        states.append(replace(state, roles=tuple(replace(r, dtype=d) for r, d in zip(roles, dtypes, strict=True))))
    return replace(spec, states=tuple(states))


@dataclass
class _Rank:
    """One rank: its pools, its manager, and the rows of the request."""

    topology: Topology
    shape: PoolShape
    pools: StagePools
    manager: KVManager
    rows: Mapping[str, Rows]

    def cells(self, state: State, layer: int, role: Role, num_tokens: int) -> tuple[Array, tuple[Any, ...], tuple[Any, ...]]:
        """The pool's memory of a role with its inner axes in the declared order, the request's cells, and the rank's part."""
        memory = self.pools.tensors[state.name][layer][role.name].view(np.dtype(role.dtype))
        axes = self.shape.axes(role).split()
        inner = list(role.inner)
        part = np.ix_(*[_owned(role, axis, self.topology) for axis in inner])
        rows = self.rows[state.name]
        if isinstance(rows, Slot):
            return memory.transpose([axes.index(axis) for axis in ("slot", *inner)]), (rows.id,), part
        start, stop = state.needed(num_tokens)
        page_size = state.page_tokens(self.shape.page_size)
        page, inside = np.divmod(np.arange(start, stop), page_size)
        pool = memory.transpose([axes.index(axis) for axis in ("page", "token", *inner)])
        return pool, (rows.ids[page - start // page_size], inside), part


def _owned(role: Role, axis: str, topology: Topology) -> npt.NDArray[np.intp]:
    """The rank's positions of an axis, in memory order."""
    size = role.inner[axis].size
    places = role.inner[axis].owned(topology).within(size).locate(np.arange(size))
    held = np.flatnonzero(places >= 0)
    return held[np.argsort(places[held])]


def _start(spec: ModelSpec, side: Side, name: str, num_tokens: int, closing: ExitStack) -> list[_Rank]:
    ranks: list[_Rank] = []
    rng = np.random.default_rng(3)
    for number in range(side.tp):
        topology = Topology(tp=side.tp).at(number)
        shape = PoolShape(page_size=side.page_size, num_pages=2 * num_tokens, num_slots=3, order=side.order)
        pools = allocate(spec, topology, shape)
        rows: dict[str, Rows] = {}
        for state in spec.states:
            start, stop = state.needed(num_tokens)
            page = state.page_tokens(side.page_size)
            ids = rng.permutation(shape.num_pages)[: -(-stop // page) - start // page].astype(np.int32)
            rows[state.name] = Slot(int(rng.integers(3))) if state.rows == "slot" else Pages(ids, first_token=start)
        manager = KVManager(
            name=name,
            topology=topology,
            components=pools.components,
            leader=ranks[0].manager.address if ranks else None,
            model=ModelId(spec.name),
            backend="local",
            limits=FAST,
            connection_limits=FAST_LINKS,
        )
        closing.callback(manager.close)
        ranks.append(_Rank(topology, shape, pools, manager, rows))
    return ranks


@contextmanager
def _connected(spec: ModelSpec, sides: Sequence[Side], num_tokens: int) -> Iterator[tuple[list[_Rank], list[_Rank]]]:
    with ExitStack() as closing:
        sources, destinations = (
            _start(spec, side, name, num_tokens, closing) for side, name in zip(sides, ("prefill", "decode"), strict=True)
        )
        for ranks, others, peer in ((sources, destinations, "decode"), (destinations, sources, "prefill")):
            for rank in ranks:
                rank.manager.add_peer(peer, address=others[0].manager.address)
        for ranks, peer in ((sources, "decode"), (destinations, "prefill")):
            for rank in ranks:
                rank.manager.wait_ready(peer, timeout_s=DEADLINE_S)
        yield sources, destinations


def move(spec: ModelSpec, arrays: Arrays, num_tokens: int) -> dict[tuple[str, int, str], Array]:
    """What an instance with `DESTINATION`'s layout holds after one with `SOURCE`'s sent it the request of `arrays`.

    Ranks that hold the same positions must hold the same values.
    """
    spec = as_held(spec, arrays)
    with _connected(spec, (SOURCE, DESTINATION), num_tokens) as (sources, destinations):
        for rank in sources:
            for key, state, role in _each(spec):
                pool, cells, part = rank.cells(state, key[1], role, num_tokens)
                pool[cells] = _cut(arrays[key], part, state)
        request = new_request_id()
        need = {state.name: state.needed(num_tokens) for state in spec.states if state.rows == "pages"}
        handles: list[Any] = [
            rank.manager.receiver(request, peer="prefill", rows=rank.rows, need=need) for rank in destinations
        ]
        for rank in sources:
            sender = rank.manager.sender(request, peer="decode")
            sender.finish(rank.rows)
            handles.append(sender)
        for handle in handles:
            event = handle.wait(timeout_s=DEADLINE_S)
            assert event.ok, event.error
        return _assembled(spec, destinations, arrays, num_tokens)


def _assembled(spec: ModelSpec, ranks: Sequence[_Rank], arrays: Arrays, num_tokens: int) -> dict[tuple[str, int, str], Array]:
    """The undivided tensors from the ranks' parts. Positions that no rank holds are not numbers."""
    moved = {key: np.full_like(array, np.nan) for key, array in arrays.items()}
    for rank in ranks:
        for key, state, role in _each(spec):
            pool, cells, part = rank.cells(state, key[1], role, num_tokens)
            for undivided, values in zip(moved[key], pool[cells], strict=True) if state.rows == "pages" else ():
                undivided[part] = values
            if state.rows == "slot":
                moved[key][part] = pool[cells]
    for rank in ranks:
        for key, state, role in _each(spec):
            pool, cells, part = rank.cells(state, key[1], role, num_tokens)
            assert pool[cells].tobytes() == _cut(moved[key], part, state).tobytes(), f"{key}: ranks hold different bytes"
    return moved


def _cut(array: Array, part: tuple[Any, ...], state: State) -> Array:
    """A rank's part of an undivided tensor."""
    return array[part] if state.rows == "slot" else np.stack([token[part] for token in array])


def _each(spec: ModelSpec) -> Iterator[tuple[tuple[str, int, str], State, Role]]:
    for state in spec.states:
        for layer in state.layers:
            for role in state.roles:
                yield (state.name, layer, role.name), state, role
