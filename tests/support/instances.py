"""Instances with any kinds of state in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from disagg.core.memory import raw_tensor
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.layout.tables import LayoutTable, layout_table
from disagg.state import declare, window
from disagg.testing import reference_states as naive
from disagg.testing.reference import CANARY, Context, PageList, pages_needed
from disagg.testing.reference_states import Form, Memory, Ring, Slots, StateRank, StateRows
from disagg.testing.state_models import Place
from disagg.testing.token_rules import token_rule
from tests.support.kinds import Kind, Pools

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class InstanceSpec:
    """One instance: its parallel sizes and the pools of each state.

    Stage `s` has the layers in `[edges[s], edges[s + 1])`, in descending order if `descending`. `forms` replaces the form of
    a state by its name. The instance lacks the states named in `without`.
    """

    tp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 1
    edges: tuple[int, ...] = (0, 1000)
    context: Context = Context.WHOLE
    forms: Mapping[str, Form] = field(default_factory=dict)
    descending: bool = False
    without: frozenset[str] = frozenset()

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, ep=self.ep, cp=self.cp, dp=self.dp, pp=len(self.edges) - 1)

    def stages(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """The layer ids of each stage that have this state."""
        cut = (
            [layer for layer in kind.layers if first <= layer < last]
            for first, last in zip(self.edges[:-1], self.edges[1:], strict=True)
        )
        return tuple(tuple(sorted(layers, reverse=self.descending)) for layers in cut)

    def form(self, kind: Kind) -> Form:
        return self.forms.get(kind.name, kind.form)

    def rule(self, form: Form) -> declare.Rule:
        """The library's ownership of tokens for `context`."""
        return token_rule(self.context, form.page_size)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank with memory. By state: the reference's share, pools, the expected content of them, component, free rows."""

    topology: Topology
    states: dict[str, StateRank]
    memory: dict[str, Memory]
    image: dict[str, Memory]
    components: dict[str, Component]
    free: dict[str, list[int]]

    def take(self, rng: np.random.Generator, kind: Kind, num_tokens: int, tokens: Range) -> StateRows:
        """Allocate rows for a request's `tokens`, in random order."""
        state = self.states[kind.name]
        free = self.free[kind.name]
        count = 1
        if kind.model.paged and not state.form.ring:
            count = pages_needed(state.kv_rank, num_tokens=num_tokens, first_token=tokens[0])
        chosen = [free.pop(int(rng.integers(len(free)))) for _ in range(count)] if state.layers else [0] * count
        if not kind.model.paged:
            return Slots(chosen[0])
        return Ring(chosen[0]) if state.form.ring else PageList(tuple(chosen), tokens[0])

    def give_back(self, kind: Kind, rows: StateRows) -> None:
        if self.states[kind.name].layers:
            self.free[kind.name] += rows.ids if isinstance(rows, PageList) else [rows.id]


def library_rows(rows: StateRows, *, state: StateRank, tokens: Range) -> Rows:
    """The same rows in the library's types."""
    match rows:
        case Slots(slot):
            return Slot(slot)
        case Ring(ring):
            return window.ring_rows(ring, need=tokens, stride=state.form.page_size)
        case PageList(ids, first_token):
            return Pages(np.array(ids, dtype=np.int32), first_token)


def make_rank(spec: InstanceSpec, topology: Topology, kinds: Sequence[Kind], *, byte: int) -> Rank:
    """Pools for every state of the instance, full of `byte`, and the components over them."""
    place = Place(
        tp=spec.tp,
        tp_rank=topology.tp_rank,
        ep=spec.ep,
        cp=spec.cp,
        cp_rank=topology.cp_rank,
        context=spec.context,
    )
    rank = Rank(topology=topology, states={}, memory={}, image={}, components={}, free={})
    for kind in kinds:
        if kind.name in spec.without:
            continue
        form = spec.form(kind)
        stages = spec.stages(kind)
        local = Place(tp=place.tp, tp_rank=place.tp_rank, ep=place.ep) if form.ring or not kind.model.paged else place
        state = StateRank(model=kind.model, place=local, layers=stages[topology.pp_rank], form=form)
        memory = naive.allocate(state, byte=byte)
        pages = {}
        if form.one_page:
            pages = {layer: buffer.reshape(form.num_rows, -1) for (_, layer), buffer in memory.buffers.items()}
        raw = {role: {layer: raw_tensor(pool) for layer, pool in pools.items()} for role, pools in memory.tensors.items()}
        tokens = declare.all_tokens if form.ring else spec.rule(form)
        pools = Pools(tensors=raw, topology=topology, stages=stages, form=form, tokens=tokens, pages=pages)
        rank.states[kind.name], rank.memory[kind.name] = state, memory
        rank.image[kind.name] = naive.allocate(state, byte=byte)
        rank.components[kind.name] = kind.build(pools)
        rank.free[kind.name] = list(range(form.num_rows))
    return rank


@dataclass(frozen=True, kw_only=True)
class Instance:
    """The ranks of an instance, by instance rank, and its layout table."""

    spec: InstanceSpec
    ranks: tuple[Rank, ...]
    table: LayoutTable

    def group(self, number: int) -> tuple[Rank, ...]:
        size = self.spec.topology.group_size
        return self.ranks[number * size : (number + 1) * size]


def make_instance(spec: InstanceSpec, kinds: Sequence[Kind], *, byte: int = CANARY) -> Instance:
    """Every rank of an instance. Raises `AssertionError` if two ranks declare different tables."""
    topology = spec.topology
    ranks = tuple(make_rank(spec, topology.at(number), kinds, byte=byte) for number in range(topology.num_ranks))
    tables = {layout_table(topology, [c.layouts for c in rank.components.values()]).encode() for rank in ranks}
    assert len(tables) == 1, "ranks of one instance declare different tables"
    return Instance(spec=spec, ranks=ranks, table=LayoutTable.decode(tables.pop()))
