"""Moves the state of one request over NIXL to another process: cut into shards, sent, and put together again."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg import KVManager, ModelId, Pages, Slot, Topology, new_request_id
from disagg.core.errors import DisaggError
from disagg.core.rows import Rows
from disagg.models import ModelSpec, PoolShape, StagePools, State, allocate, from_config
from disagg.state.declare import Role
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS

Array = npt.NDArray[Any]
Key = tuple[str, int, str]
"""State, layer and role."""
Arrays = Mapping[Key, Array]
"""Undivided tensors: `[token, *inner]`, or `[*inner]` for a slot."""
Forms = Mapping[Key, tuple[tuple[int, ...], str]]
"""Shapes and dtypes of undivided tensors."""


@dataclass(frozen=True)
class Side:
    """One instance: ranks of tensor parallelism, tokens per page, and the axis order of KV."""

    tp: int
    page_size: int
    order: str


SOURCE, DESTINATION = Side(2, 4, "nhd"), Side(3, 8, "hnd")


def _as_held(spec: ModelSpec, forms: Forms) -> ModelSpec:
    """The description with the dtypes of `forms`, and only their roles."""
    states = []
    for state in spec.states:
        layer = state.layers[0]
        roles = [role for role in state.roles if (state.name, layer, role.name) in forms]
        dtypes = [forms[state.name, layer, role.name][1] for role in roles]
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


@contextmanager
def _instance(spec: ModelSpec, side: Side, name: str, num_tokens: int) -> Iterator[list[_Rank]]:
    """The ranks of one instance, not yet connected. Closes their managers at the end."""
    with ExitStack() as closing:
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
                backend="nixl",
                limits=FAST,
                connection_limits=FAST_LINKS,
            )
            closing.callback(manager.close)
            ranks.append(_Rank(topology, shape, pools, manager, rows))
        yield ranks


def _connect(ranks: Sequence[_Rank], peer: str, address: str) -> None:
    for rank in ranks:
        rank.manager.add_peer(peer, address=address)
    for rank in ranks:
        rank.manager.wait_ready(peer, timeout_s=DEADLINE_S)


def _wait(handles: Sequence[Any]) -> None:
    for handle in handles:
        event = handle.wait(timeout_s=DEADLINE_S)
        assert event.ok, event.error


def _decode(pipe: Connection) -> None:
    """The decode process: for every model that arrives, receive one request and answer with what all ranks hold."""
    while (given := pipe.recv()) is not None:
        try:
            _receive(pipe, *given)
        except (AssertionError, DisaggError) as error:
            error.add_note(f"in the decode process: {traceback.format_exc()}")
            pipe.send(error)


def _receive(pipe: Connection, config: Mapping[str, Any], name: str, forms: Forms, num_tokens: int) -> None:
    spec = _as_held(from_config(config, name=name), forms)
    with _instance(spec, DESTINATION, "decode", num_tokens) as ranks:
        pipe.send(ranks[0].manager.address)
        address, request = pipe.recv()
        _connect(ranks, "prefill", address)
        need = {state.name: state.needed(num_tokens) for state in spec.states if state.rows == "pages"}
        _wait([rank.manager.receiver(request, peer="prefill", rows=rank.rows, need=need) for rank in ranks])
        pipe.send(_assembled(spec, ranks, forms, num_tokens))
        pipe.recv()  # a sender whose peer ends before the outcome arrives has lost it


class DecodeProcess:
    """A process that holds decode instances, one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_decode, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(DEADLINE_S)
        self._process.kill()

    def move(self, config: Mapping[str, Any], arrays: Arrays, *, name: str, num_tokens: int) -> dict[Key, Array]:
        """What the decode process holds after an instance of this process sent it the request of `arrays` over NIXL.

        The instances have the layouts `SOURCE` and `DESTINATION`. Ranks that hold the same positions must hold the same values.
        """
        forms = {key: (array.shape, array.dtype.name) for key, array in arrays.items()}
        spec = _as_held(from_config(config, name=name), forms)
        self._pipe.send((config, name, forms, num_tokens))
        with _instance(spec, SOURCE, "prefill", num_tokens) as ranks:
            for rank in ranks:
                for key, state, role in _each(spec):
                    pool, cells, part = rank.cells(state, key[1], role, num_tokens)
                    pool[cells] = _cut(arrays[key], part, state)
            address, request = self._answer(), new_request_id()
            self._pipe.send((ranks[0].manager.address, request))
            _connect(ranks, "decode", address)
            senders = [rank.manager.sender(request, peer="decode") for rank in ranks]
            for rank, sender in zip(ranks, senders, strict=True):
                sender.finish(rank.rows)
            moved: dict[Key, Array] = self._answer()
            _wait(senders)
            self._pipe.send("sent")
            return moved

    def _answer(self) -> Any:
        """The next answer of the process. Raises its exception if it failed."""
        assert self._pipe.poll(2 * DEADLINE_S), "no answer from the decode process"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _assembled(spec: ModelSpec, ranks: Sequence[_Rank], forms: Forms, num_tokens: int) -> dict[Key, Array]:
    """The undivided tensors from the ranks' parts. Positions that no rank holds are not numbers."""
    moved = {key: np.full(shape, np.nan, dtype) for key, (shape, dtype) in forms.items()}
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


def _each(spec: ModelSpec) -> Iterator[tuple[Key, State, Role]]:
    for state in spec.states:
        for layer in state.layers:
            for role in state.roles:
                yield (state.name, layer, role.name), state, role
