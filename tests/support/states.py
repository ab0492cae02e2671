"""Transfers of any kinds of state between two instances in memory, checked against the reference.

A `Scene` has the pools of every rank of two instances. Each pool has an image: its expected content after all requests so far.
Requests come and go, rows are reused, and whole images are compared.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from disagg.core.copies import CopyBatch
from disagg.layout.binding import bind, check_rows
from disagg.layout.election import Election, elect
from disagg.layout.plan import ComponentPlan, make_plan
from disagg.testing import reference_states as naive
from disagg.testing.reference import STALE
from disagg.testing.reference_states import Memory, StateRows
from tests.support.instances import InstanceSpec, Range, Rank, library_rows, make_instance
from tests.support.kinds import Kind


@dataclass(frozen=True)
class Move:
    """The copies of one state from one rank to another; ranks are counted within their groups."""

    source: int
    destination: int
    component: str
    copies: CopyBatch


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, and its rows in both groups by group rank and state."""

    number: int
    num_tokens: int
    needs: dict[str, Range]
    held: dict[str, Range]
    source_group: int
    destination_group: int
    source_rows: list[dict[str, StateRows]] = field(default_factory=list)
    destination_rows: list[dict[str, StateRows]] = field(default_factory=list)


class Scene:
    """Two instances of one model. `transfer` moves requests and checks every byte of every pool."""

    def __init__(self, kinds: Sequence[Kind], source: InstanceSpec, destination: InstanceSpec, *, seed: int = 0) -> None:
        self.kinds = tuple(kinds)
        self.rng = np.random.default_rng(seed)
        self.source = make_instance(source, kinds, byte=STALE)
        self.destination = make_instance(destination, kinds)
        self.requests = 0
        self._plans: dict[tuple[int, int, int, int], dict[str, ComponentPlan]] = {}

    @cached_property
    def election(self) -> Election:
        return elect(self.source.table, self.destination.table)

    def transfer(self, num_tokens: int = 9, *, keep: bool = False, **changes: Any) -> list[Move]:
        """Move one request, check both instances, and release its rows unless `keep`."""
        request = self.open(num_tokens, **changes)
        moves = self.moves(request)
        self.run(request, moves)
        found = self.difference(request)
        assert found is None, found
        if not keep:
            self.close(request)
        return moves

    def open(
        self,
        num_tokens: int,
        *,
        needs: Mapping[str, Range] | None = None,
        held: Mapping[str, Range] | None = None,
        prefix: int = 0,
        ahead: int = 0,
        source_group: int = 0,
        destination_group: int = 0,
    ) -> Request:
        """Allocate rows for a new request on both sides, and write its content to the source's pools.

        `needs` are the tokens that the destination needs (default: from `prefix` or the start of the window), `held` those for
        which the source lists rows (default: the needed ones). The destination allocates rows for `ahead` more tokens.
        """
        self.requests += 1
        needed = {kind.name: (needs or {}).get(kind.name, usual_need(kind, num_tokens, prefix)) for kind in self.kinds}
        request = Request(
            number=self.requests,
            num_tokens=num_tokens,
            needs=needed,
            held={name: (held or {}).get(name, need) for name, need in needed.items()},
            source_group=source_group,
            destination_group=destination_group,
        )
        for rank in self.source.group(source_group):
            request.source_rows.append(self._take(rank, num_tokens, request.held))
            for kind in self.on(rank):
                self._fill(rank, kind, request, request.source_rows[-1][kind.name])
        for rank in self.destination.group(destination_group):
            listed = {name: (start, stop + ahead) for name, (start, stop) in needed.items()}
            request.destination_rows.append(self._take(rank, num_tokens, listed))
        return request

    def _take(self, rank: Rank, num_tokens: int, tokens: Mapping[str, Range]) -> dict[str, StateRows]:
        return {
            kind.name: rank.take(self.rng, kind, max(num_tokens, tokens[kind.name][1]), tokens[kind.name])
            for kind in self.on(rank)
        }

    def on(self, rank: Rank) -> list[Kind]:
        """The states of the rank's instance."""
        return [kind for kind in self.kinds if kind.name in rank.states]

    def _fill(self, rank: Rank, kind: Kind, request: Request, rows: StateRows) -> None:
        start, stop = request.held[kind.name]
        for memory in (rank.memory[kind.name], rank.image[kind.name]):
            naive.write(
                rank.states[kind.name],
                memory,
                rows,
                request=request.number,
                num_tokens=max(request.num_tokens, stop),
                tokens=(start, stop),
            )

    def moves(self, request: Request) -> list[Move]:
        """The copies of every pair of ranks in the election."""
        found = []
        for source, destination in self.election.by_pair:
            for name, plan in self.plan(request, source, destination).items():
                found.append(Move(source, destination, name, self.bind(request, plan, source, destination)))
        return found

    def plan(self, request: Request, source: int, destination: int) -> dict[str, ComponentPlan]:
        """The plan of each state between two ranks of the request's groups."""
        key = (request.source_group, request.destination_group, source, destination)
        if key not in self._plans:
            ours = self.source.group(request.source_group)[source]
            theirs = self.destination.group(request.destination_group)[destination]
            self._plans[key] = make_plan(
                self.election,
                source=(source, self.source.table, _placements(ours)),
                destination=(destination, self.destination.table, _placements(theirs)),
            ).components
        return self._plans[key]

    def bind(self, request: Request, plan: ComponentPlan, source: int, destination: int) -> CopyBatch:
        """The copies of one state between two ranks."""
        name = plan.name
        ours = self.source.group(request.source_group)[source].states[name]
        theirs = self.destination.group(request.destination_group)[destination].states[name]
        need = request.needs[name]
        return bind(
            plan,
            source=library_rows(request.source_rows[source][name], state=ours, tokens=request.held[name]),
            destination=library_rows(request.destination_rows[destination][name], state=theirs, tokens=need),
            tokens=need if ours.model.paged else None,
        )

    def run(self, request: Request, moves: Iterable[Move]) -> None:
        """Make the copies. Raises `AssertionError` if one leaves the pools of its ranks, or a byte is written twice."""
        sources = self.source.group(request.source_group)
        destinations = self.destination.group(request.destination_group)
        written: dict[int, list[CopyBatch]] = {}
        for move in moves:
            copies = move.copies
            assert (copies.nbytes > 0).all()
            assert _inside(sources[move.source].memory[move.component], copies.source, copies.nbytes), move
            assert _inside(destinations[move.destination].memory[move.component], copies.destination, copies.nbytes), move
            written.setdefault(move.destination, []).append(copies)
            columns = (copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist())
            for target, where, nbytes in zip(*columns, strict=True):
                ctypes.memmove(target, where, nbytes)
        for batches in written.values():
            copies = CopyBatch.concatenate(batches)
            order = np.argsort(copies.destination)
            starts, sizes = copies.destination[order], copies.nbytes[order]
            assert (starts[1:] >= starts[:-1] + sizes[:-1]).all(), "a byte has two writers"

    def difference(self, request: Request) -> str | None:
        """The first byte in which a pool of either group differs from its image after this request; `None` if all are equal."""
        for rank, rows in zip(self.destination.group(request.destination_group), request.destination_rows, strict=True):
            for kind in self.on(rank):
                naive.write(
                    rank.states[kind.name],
                    rank.image[kind.name],
                    rows[kind.name],
                    request=request.number,
                    num_tokens=max(request.num_tokens, request.needs[kind.name][1]),
                    tokens=request.needs[kind.name],
                )
        for what, ranks in (
            ("source", self.source.group(request.source_group)),
            ("destination", self.destination.group(request.destination_group)),
        ):
            for number, rank in enumerate(ranks):
                for name, image in rank.image.items():
                    found = naive.first_difference(image, rank.memory[name])
                    if found:
                        return f"{what} rank {number}, {name}: {found}"
        return None

    def start_over(self) -> None:
        """Clear the destination's pools and their images, for example after a request that failed half way."""
        for rank in self.destination.ranks:
            for memory in [*rank.memory.values(), *rank.image.values()]:
                memory.clear()

    def close(self, request: Request) -> None:
        """Free the rows for other requests; their content stays."""
        for ranks, rows in (
            (self.source.group(request.source_group), request.source_rows),
            (self.destination.group(request.destination_group), request.destination_rows),
        ):
            for rank, taken in zip(ranks, rows, strict=True):
                for kind in self.on(rank):
                    rank.give_back(kind, taken[kind.name])


def usual_need(kind: Kind, num_tokens: int, prefix: int = 0) -> Range:
    """The needed tokens: `[max(prefix, n - window), n)`; a slot is needed whole."""
    if not kind.model.paged:
        return 0, num_tokens
    start = max(prefix, 0 if kind.window is None else num_tokens - kind.window)
    return min(max(start, 0), num_tokens), num_tokens


def check_every_row(scene: Scene, request: Request) -> None:
    """Raises unless the library's check before a reservation accepts the destination's rows."""
    for rank, rows in zip(scene.destination.group(request.destination_group), request.destination_rows, strict=True):
        for name, component in rank.components.items():
            layout = component.layouts[rank.topology.group_rank]
            if layout is None or component.placement is None:
                continue
            need = request.needs[name]
            check_rows(layout, component.placement, library_rows(rows[name], state=rank.states[name], tokens=need), need)


def _placements(rank: Rank) -> dict[str, Any]:
    return {name: component.placement for name, component in rank.components.items() if component.placement is not None}


def _inside(memory: Memory, addresses: Any, nbytes: Any) -> bool:
    buffers = list(memory.buffers.values())
    starts = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64)
    stops = starts + np.array([buffer.nbytes for buffer in buffers], dtype=np.uint64)
    inside = (addresses[:, None] >= starts) & (addresses[:, None] + nbytes[:, None] <= stops)
    return bool(inside.any(axis=1).all())


def runs_by_writer(scene: Scene, moves: Iterable[Move], *, source_group: int = 0) -> Counter[int]:
    """The number of (component, layer, reader) runs that each source rank writes, found by the addresses it reads."""
    ranks = scene.source.group(source_group)
    runs: set[tuple[int, str, int, int]] = set()
    for move in moves:
        for (_, layer), buffer in ranks[move.source].memory[move.component].buffers.items():
            start = np.uint64(buffer.ctypes.data)
            inside = (move.copies.source >= start) & (move.copies.source < start + np.uint64(buffer.nbytes))
            if inside.any():
                runs.add((move.source, move.component, layer, move.destination))
    return Counter(dict.fromkeys(range(len(ranks)), 0) | Counter(run[0] for run in runs))


def moved(
    kinds: Sequence[Kind] | Kind, source: InstanceSpec, destination: InstanceSpec, num_tokens: int = 9, **changes: Any
) -> list[Move]:
    """Move one request between two new instances, and check it."""
    return Scene([kinds] if isinstance(kinds, Kind) else kinds, source, destination).transfer(num_tokens, **changes)


def tp_pairs(largest: int = 8) -> Iterator[tuple[InstanceSpec, InstanceSpec]]:
    """Every pair of tensor-parallel sizes up to `largest`."""
    for source in range(1, largest + 1):
        for destination in range(1, largest + 1):
            yield InstanceSpec(tp=source), InstanceSpec(tp=destination)
