"""Runs the planner on real memory in one process: pools of the reference, components, election, plans. Copies are `memmove`,
checked against the extents of the pools first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from disagg.core.copies import CopyBatch
from disagg.core.rows import Pages
from disagg.core.topology import Topology
from disagg.layout.binding import bind
from disagg.layout.election import Election, elect
from disagg.layout.ownership import Owned, Periodic, Share
from disagg.layout.placement import Component, Placement
from disagg.layout.plan import ComponentPlan, make_plan
from disagg.layout.tables import LayoutTable, layout_table
from disagg.state import declare, paged
from disagg.testing.reference import (
    CANARY,
    STALE,
    Context,
    KVModel,
    KVRank,
    PageList,
    Pools,
    allocate,
    expected,
    fill,
    first_difference,
    pages_needed,
)
from disagg.testing.token_rules import token_rule


@dataclass(frozen=True, kw_only=True)
class Side:
    """One instance: its parallel sizes, the layer ids of each stage (`None`: one stage with all layers), and its pools of
    `num_pages` pages of `page` tokens.
    """

    tp: int = 1
    dp: int = 1
    cp: int = 1
    stages: tuple[tuple[int, ...], ...] | None = None
    page: int = 4
    num_pages: int = 32
    axes: str = "page token kv_head dim"
    context: Context = Context.WHOLE

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, dp=self.dp, cp=self.cp, pp=len(self.stages) if self.stages else 1)

    def rank(self, topology: Topology, *, num_layers: int, num_pages: int | None = None) -> KVRank:
        """`num_layers` counts without `stages`, `num_pages` replaces the side's."""
        return KVRank(
            layers=self.stages[topology.pp_rank] if self.stages else tuple(range(num_layers)),
            page_size=self.page,
            num_pages=self.num_pages if num_pages is None else num_pages,
            axes=self.axes,
            tp=self.tp,
            tp_rank=topology.tp_rank,
            cp=self.cp,
            cp_rank=topology.cp_rank,
            context=self.context,
        )

    @property
    def tokens(self) -> declare.Rule:
        return token_rule(self.context, self.page)

    def component(self, model: KVModel, topology: Topology, pools: Pools) -> Component:
        return paged.gqa(
            {layer: tensors[0] if len(tensors) == 1 else tensors for layer, tensors in pools.items()},
            axes=self.axes,
            num_kv_heads=model.num_kv_heads,
            topology=topology,
            layers_by_stage=self.stages,
            tokens=self.tokens,
            name=model.component,
        )


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A side with memory: for each rank its pools, its component, and the pages of the request."""

    ranks: tuple[KVRank, ...]
    pools: tuple[Pools, ...]
    components: tuple[Component, ...]
    pages: tuple[PageList, ...]
    table: LayoutTable

    def holds(self, rank: int, addresses: np.ndarray, nbytes: np.ndarray) -> bool:
        """Whether every range lies within one pool tensor of `rank`, by the addresses of the arrays."""
        tensors = [tensor for tensors in self.pools[rank].values() for tensor in tensors]
        starts = np.array([tensor.ctypes.data for tensor in tensors], dtype=np.uint64)
        stops = starts + np.array([tensor.nbytes for tensor in tensors], dtype=np.uint64)
        inside = (addresses[:, None] >= starts) & (addresses[:, None] + nbytes[:, None] <= stops)
        return bool(inside.any(axis=1).all())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request of `num_tokens`, of which the destination needs those from `need` on. The source lists pages from
    `source_first` on. `num_layers` is for sides without `stages`.
    """

    model: KVModel
    source: Side
    destination: Side
    num_tokens: int
    need: int = 0
    source_first: int = 0
    num_layers: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Move:
    source: int
    destination: int
    copies: CopyBatch


@dataclass
class Scene:
    """A case in memory. Pools have at least two pages more than the request needs."""

    case: Case
    rng: np.random.Generator = field(init=False)
    source: Instance = field(init=False)
    destination: Instance = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.rng = np.random.default_rng(case.seed)
        self.source = self._instance(case.source, first_token=case.source_first, byte=STALE)
        self.destination = self._instance(case.destination, first_token=case.need)
        for rank, pools, pages in zip(self.source.ranks, self.source.pools, self.source.pages, strict=True):
            fill(case.model, rank, pools, pages, num_tokens=case.num_tokens)

    def _instance(self, side: Side, *, first_token: int, byte: int = CANARY) -> Instance:
        case, model, num_tokens = self.case, self.case.model, self.case.num_tokens
        num_pages = max(side.num_pages, -(-num_tokens // side.page) + 2)
        topologies = [side.topology.at(number) for number in range(side.topology.group_size)]
        ranks = tuple(side.rank(topology, num_layers=case.num_layers, num_pages=num_pages) for topology in topologies)
        pools = tuple(allocate(model, rank, byte=byte) for rank in ranks)
        components = tuple(side.component(model, *placed) for placed in zip(topologies, pools, strict=True))
        pages = tuple(
            PageList(
                tuple(
                    self.rng.permutation(num_pages)[
                        : pages_needed(rank, num_tokens=num_tokens, first_token=first_token)
                    ].tolist()
                ),
                first_token,
            )
            for rank in ranks
        )
        return Instance(
            ranks=ranks,
            pools=pools,
            components=components,
            pages=pages,
            table=layout_table(side.topology, [components[0].layouts]),
        )

    @cached_property
    def election(self) -> Election:
        return elect(self.source.table, self.destination.table)

    def plan(self, source: int, destination: int) -> ComponentPlan:
        plan = make_plan(
            self.election,
            source=(source, self.source.table, _placements(self.source.components[source])),
            destination=(destination, self.destination.table, _placements(self.destination.components[destination])),
        )
        return plan.components[self.case.model.component]

    def rows(self, source: int, destination: int) -> tuple[Pages, Pages]:
        lists = self.source.pages[source], self.destination.pages[destination]
        ours, theirs = (Pages(np.array(pages.ids, dtype=np.int32), pages.first_token) for pages in lists)
        return ours, theirs

    def bind(self, source: int, destination: int, *, tokens: tuple[int, int] | None = None) -> CopyBatch:
        ours, theirs = self.rows(source, destination)
        tokens = tokens or (self.case.need, self.case.num_tokens)
        return bind(self.plan(source, destination), source=ours, destination=theirs, tokens=tokens)

    def moves(self) -> list[Move]:
        """The copies of every pair of ranks in the election, in its order."""
        return [Move(source, destination, self.bind(source, destination)) for source, destination in self.election.by_pair]

    def run(self, moves: list[Move] | None = None) -> None:
        """Make the copies. Raises `AssertionError` if a copy leaves the pools, or a destination byte has two writers."""
        moves = self.moves() if moves is None else moves
        for destination in range(len(self.destination.ranks)):
            copies = CopyBatch.concatenate([move.copies for move in moves if move.destination == destination])
            order = np.argsort(copies.destination)
            starts, nbytes = copies.destination[order], copies.nbytes[order]
            assert (starts[1:] >= starts[:-1] + nbytes[:-1]).all(), f"destination rank {destination}: a byte has two writers"
        for move in moves:
            copies = move.copies
            assert (copies.nbytes > 0).all()
            assert self.source.holds(move.source, copies.source, copies.nbytes), f"{move}: reads outside the source's pools"
            assert self.destination.holds(move.destination, copies.destination, copies.nbytes), (
                f"{move}: writes outside the pools"
            )
            for where, target, nbytes_ in zip(
                copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True
            ):
                ctypes.memmove(target, where, nbytes_)

    def difference(self) -> str | None:
        """The first difference from the reference; `None` if there is none."""
        case = self.case
        for number, (rank, pools, pages) in enumerate(
            zip(self.destination.ranks, self.destination.pools, self.destination.pages, strict=True)
        ):
            wanted = expected(case.model, rank, pages, num_tokens=case.num_tokens, need=(case.need, case.num_tokens))
            found = first_difference(wanted, pools)
            if found:
                return f"destination rank {number}: {found}"
        return None


def _placements(component: Component) -> Mapping[str, Placement]:
    assert component.placement is not None
    return {component.name: component.placement}


def owned_positions(owned: Owned, *, size: int) -> list[int]:
    """In memory order, computed one by one from the definition."""
    match owned:
        case Periodic(offset=offset, run=run, period=period):
            return [p for p in range(size) if p >= offset and (p - offset) % period < run]
        case Share(index=index, parts=parts, granule=granule):
            granules = [list(range(size))[start : start + granule] for start in range(0, size, granule)]
            counts = [len(granules) // parts + (1 if i < len(granules) % parts else 0) for i in range(parts)]
            mine = granules[sum(counts[:index]) : sum(counts[: index + 1])]
            return [position for granule_ in mine for position in granule_]
        case _:
            return [position for start, stop in owned.parts for position in range(start, stop) if position < size]
