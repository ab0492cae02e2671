"""Drives the planner over real memory: pools made by the naive reference, components, election, plans, raw copies.

For tests and for a benchmark's dry run: everything here is in one process, and copies are plain `memmove`, each checked
against the extents of the pools before it is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True, kw_only=True)
class Side:
    """One instance: its parallel sizes, the layer ids of every stage, and the form of its pools (`spare_pages` unused)."""

    tp: int = 1
    cp: int = 1
    stages: tuple[tuple[int, ...], ...] = ((0, 1),)
    page_size: int = 4
    axes: str = "page token kv_head dim"
    context: Context = Context.WHOLE
    spare_pages: int = 2

    def ranks(self, *, num_pages: int) -> Iterator[tuple[Topology, KVRank]]:
        """Every rank of the group: tensor parallelism fastest, then context, then pipeline."""
        for pp_rank, layers in enumerate(self.stages):
            for cp_rank in range(self.cp):
                for tp_rank in range(self.tp):
                    topology = Topology(
                        pp=len(self.stages), cp=self.cp, tp=self.tp, pp_rank=pp_rank, cp_rank=cp_rank, tp_rank=tp_rank
                    )
                    yield (
                        topology,
                        KVRank(
                            tp=self.tp,
                            tp_rank=tp_rank,
                            cp=self.cp,
                            cp_rank=cp_rank,
                            layers=layers,
                            page_size=self.page_size,
                            num_pages=num_pages,
                            axes=self.axes,
                            context=self.context,
                        ),
                    )

    @property
    def tokens(self) -> declare.Rule:
        """The ownership of tokens that the library has for what `context` says in words."""
        match self.context:
            case Context.WHOLE:
                return declare.all_tokens
            case Context.PAGE_BLOCKS:
                return declare.page_blocks(self.page_size)
            case Context.TOKENS_IN_TURN:
                return declare.tokens_in_turn
            case Context.PAGES_IN_TURN:
                return declare.pages_in_turn(self.page_size)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A side with memory: per group rank the pools, the component, and the pages that a request has there."""

    ranks: tuple[KVRank, ...]
    pools: tuple[Pools, ...]
    components: tuple[Component, ...]
    pages: tuple[PageList, ...]
    table: LayoutTable

    def holds(self, rank: int, addresses: np.ndarray, nbytes: np.ndarray) -> bool:
        """Whether every range lies in one pool tensor of `rank`, by the arrays' own addresses."""
        tensors = [tensor for tensors in self.pools[rank].values() for tensor in tensors]
        starts = np.array([tensor.ctypes.data for tensor in tensors], dtype=np.uint64)
        stops = starts + np.array([tensor.nbytes for tensor in tensors], dtype=np.uint64)
        inside = (addresses[:, None] >= starts) & (addresses[:, None] + nbytes[:, None] <= stops)
        return bool(inside.any(axis=1).all())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request from one instance to another: `num_tokens` long, of which the destination needs `need` onwards."""

    model: KVModel
    source: Side
    destination: Side
    num_tokens: int
    need: int = 0
    source_first: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Move:
    """The copies from one source rank to one destination rank."""

    source: int
    destination: int
    copies: CopyBatch


@dataclass
class Scene:
    """A case set up in memory, its election and its moves."""

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

    def _instance(self, side: Side, *, first_token: int, byte: int | None = None) -> Instance:
        model, num_tokens = self.case.model, self.case.num_tokens
        num_pages = -(-num_tokens // side.page_size) + side.spare_pages
        placed = list(side.ranks(num_pages=num_pages))
        ranks = tuple(rank for _, rank in placed)
        pools = tuple(allocate(model, rank) if byte is None else allocate(model, rank, byte=byte) for rank in ranks)
        components = tuple(
            paged.gqa(
                {layer: tensors[0] if rank.packed else tensors for layer, tensors in found.items()},
                axes=side.axes,
                num_kv_heads=model.num_kv_heads,
                topology=topology,
                layers_by_stage=side.stages,
                tokens=side.tokens,
                name=model.component,
            )
            for (topology, rank), found in zip(placed, pools, strict=True)
        )
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
            table=layout_table(placed[0][0], [components[0].layouts]),
        )

    @cached_property
    def election(self) -> Election:
        return elect(self.source.table, self.destination.table)

    def plan(self, source: int, destination: int) -> ComponentPlan:
        """What one pair of ranks moves."""
        plan = make_plan(
            self.election,
            source=(source, self.source.table, _placements(self.source.components[source])),
            destination=(destination, self.destination.table, _placements(self.destination.components[destination])),
        )
        return plan.components[self.case.model.component]

    def rows(self, source: int, destination: int) -> tuple[Pages, Pages]:
        """The pages of the request at both."""
        lists = self.source.pages[source], self.destination.pages[destination]
        ours, theirs = (Pages(np.array(pages.ids, dtype=np.int32), pages.first_token) for pages in lists)
        return ours, theirs

    def bind(self, source: int, destination: int, *, tokens: tuple[int, int] | None = None) -> CopyBatch:
        """The copies of one pair of ranks."""
        ours, theirs = self.rows(source, destination)
        tokens = tokens or (self.case.need, self.case.num_tokens)
        return bind(self.plan(source, destination), source=ours, destination=theirs, tokens=tokens)

    def moves(self) -> list[Move]:
        """The copies of every pair that the election names, in its order."""
        return [Move(source, destination, self.bind(source, destination)) for source, destination in self.election.by_pair]

    def run(self, moves: list[Move] | None = None) -> None:
        """Make the copies. Raises `AssertionError` where one leaves the pools, or a destination byte has two writers."""
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
        """Where the destination's pools differ from the reference: every byte of every rank; `None` where they do not."""
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
    """The positions of an axis of `size` that `owned` names, in memory order, by definition: one at a time."""
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
