"""A benchmark case: its requests, their rows on each side, and the bytes between every pair of ranks."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.commands.cases.arrivals import TOGETHER, Arrivals
from disagg.commands.cases.instructions import Block, Description, Fault, Item
from disagg.commands.cases.places import RankPlace, rows_of
from disagg.commands.cases.sides import Side
from disagg.core.errors import ConfigError, DisaggError
from disagg.layout.agreement import decode_placements
from disagg.layout.binding import MAX_TOKENS, bind_rows
from disagg.layout.election import elect
from disagg.layout.plan import TransferPlan, make_plan
from disagg.layout.tables import LayoutTable
from disagg.models import ModelSpec
from disagg.protocol.messages import Verify
from disagg.state.declare import State

SPARE_ROWS = 3
"""Unused rows in every pool, which must stay untouched."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run, and how often. The decode side already has the first `prefix_hit` tokens.

    Each rank has up to `concurrency` requests in flight. `chunk_tokens` 0 sends whole requests. `pack_below`: `None` is the
    engine's threshold. Page ids come in runs of `run_pages` consecutive ones. `warm_up` runs are not counted; then come
    `repeat` runs, or with `duration_s` those that begin in that time and one more. `ceiling`: also measure the engine and
    the system alone. `devices`: the NICs of every rank's engine; empty: its choice.
    """

    backend: str
    model: str
    tokens: int
    prefill: Side
    decode: Side
    num_layers: int | None = None
    requests: int = 1
    concurrency: int = 1
    device: str = "cpu"
    transport: str = "auto"
    devices: tuple[str, ...] = ()
    verify: Verify = "off"
    pack_below: int | None = None
    chunk_tokens: int = 0
    prefix_hit: int = 0
    run_pages: int = 1
    warm_up: int = 1
    repeat: int = 10
    duration_s: float | None = None
    ceiling: bool = True
    seed: int = 0
    timeout_s: float = 120.0
    fault: Fault | None = None
    arrivals: Arrivals = TOGETHER

    def __post_init__(self) -> None:
        for name in ("tokens", "requests", "concurrency", "repeat", "run_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.tokens > MAX_TOKENS:
            raise ConfigError(f"tokens: expected at most {MAX_TOKENS}, found {self.tokens}")
        if self.pack_below is not None and self.pack_below < 0:
            raise ConfigError(f"pack-below: expected at least 0, found {self.pack_below}")
        for name in ("chunk_tokens", "warm_up"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name.replace('_', '-')}: expected at least 0, found {getattr(self, name)}")
        if not 0 <= self.prefix_hit < self.tokens:
            raise ConfigError(f"prefix-hit: expected 0 to {self.tokens - 1} of {self.tokens} tokens, found {self.prefix_hit}")
        if (self.prefill.kv is None) != (self.decode.kv is None):
            raise ConfigError(f"kv: expected it of both sides or of none, found {self.prefill} and {self.decode}")
        if self.arrivals.times_s:
            self._check_arrivals()
        if self.device == "cuda" and self.backend == "local":
            raise ConfigError("device: expected 'cpu' with backend 'local', found 'cuda'")
        if self.fault is Fault.KILL and self.backend == "local":
            raise ConfigError("fault: backend 'local' has no separate process to kill")

    def _check_arrivals(self) -> None:
        last = self.arrivals.times_s[-1]
        if last > self.timeout_s / 2:
            raise ConfigError(f"timeout: expected at least {2 * last:.0f} s, since requests arrive for {last:.1f} s")
        if self.prefix_hit >= self.shortest_tokens:
            raise ConfigError(f"prefix-hit: expected less than {self.shortest_tokens}, the tokens of the shortest request")

    @property
    def shortest_tokens(self) -> int:
        return min(self.arrivals.tokens or (self.tokens,))

    def tokens_of(self, number: int) -> int:
        return self.arrivals.tokens[number] if self.arrivals.tokens else self.tokens

    def arrival_of(self, number: int) -> float:
        return self.arrivals.times_s[number] if self.arrivals.times_s else 0.0


def rows_needed(state: State, side: Side, case: Case, *, prefix: int) -> int:
    shares = _shares(state, side, case, prefix)
    return max(sum(shares[first :: side.dp]) for first in range(side.dp)) + SPARE_ROWS


def _shares(state: State, side: Side, case: Case, prefix: int) -> list[int]:
    by_tokens: dict[int, int] = {}
    for tokens in {case.tokens_of(number) for number in range(case.requests)}:
        need = state.needed(tokens, prefix=prefix)
        places = (RankPlace(side, side.topology(rank)) for rank in range(side.num_ranks))
        by_tokens[tokens] = max(place.num_rows(state, tokens, need) for place in places)
    return [by_tokens[case.tokens_of(number)] for number in range(case.requests)]


def items_of(
    spec: ModelSpec, side: Side, peer: Side, case: Case, *, name: str, pools: Mapping[str, int], prefix: int
) -> list[tuple[Item, ...]]:
    """Every rank's requests: group `i mod dp` of each side serves request `i`, in random rows that are the same on all ranks
    of a group. `pools`: rows of each component. The first `prefix` tokens are not needed. Raises `ConfigError` if a pool is
    too small.
    """
    for state in spec.states:
        needed = rows_needed(state, side, case, prefix=prefix)
        if pools.get(state.name, 0) < needed:
            kind = "slots" if state.rows == "slot" else "pages"
            raise ConfigError(
                f"{kind}: expected pools of at least {needed} for component {state.name!r} of {name!r}, "
                f"found {pools.get(state.name, 0)}"
            )
    orders = {s.name: _order(f"{case.seed}/{name}/{s.name}", pools[s.name], case.run_pages) for s in spec.states}
    shares = {state.name: _shares(state, side, case, prefix) for state in spec.states}
    return [
        tuple(_items_of_rank(spec, RankPlace(side, side.topology(rank)), case, orders, shares, prefix=prefix, groups=peer.dp))
        for rank in range(side.num_ranks)
    ]


def _items_of_rank(
    spec: ModelSpec,
    place: RankPlace,
    case: Case,
    orders: Mapping[str, Sequence[int]],
    shares: Mapping[str, Sequence[int]],
    *,
    prefix: int,
    groups: int,
) -> Iterator[Item]:
    used = dict.fromkeys(shares, 0)
    for number in range(place.topology.dp_rank, case.requests, place.side.dp):
        tokens = case.tokens_of(number)
        needs = {state.name: state.needed(tokens, prefix=prefix) for state in spec.states}
        rows = {}
        for state in spec.states:
            first, count = used[state.name], place.num_rows(state, tokens, needs[state.name])
            rows[state.name] = tuple(orders[state.name][first : first + count])
            used[state.name] += shares[state.name][number]
        yield Item(
            number=number, tokens=tokens, needs=needs, rows=rows, group=number % groups, arrival_s=case.arrival_of(number)
        )


def _order(seed: str, count: int, run: int) -> list[int]:
    """The numbers below `count`, shuffled in runs of `run` consecutive ones."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
    starts = np.random.default_rng(number).permutation(-(-count // run)) * run
    order: list[int] = [start + i for start in starts.tolist() for i in range(run) if start + i < count]
    return order


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """`nbytes`: by (source rank, destination rank). `pieces`: with neighbours joined, the descriptors if nothing is packed.
    `plan_s`: for electing writers and planning.
    """

    nbytes: Mapping[tuple[int, int], int]
    pieces: int
    plan_s: float


def planned(
    spec: ModelSpec,
    sources: Sequence[Description],
    destinations: Sequence[Description],
    *,
    sent: Sequence[Sequence[Item]],
    received: Sequence[Sequence[Item]],
) -> Planned:
    """Plans are bound to whole requests; chunks would split some pieces."""
    tables = LayoutTable.decode(sources[0].table), LayoutTable.decode(destinations[0].table)
    placed = [[decode_placements(about.placements) for about in side] for side in (sources, destinations)]
    began = time.perf_counter()
    election = elect(*tables)
    plans: dict[tuple[int, int], TransferPlan] = {}
    for ours, theirs in itertools.product(range(len(sources)), range(len(destinations))):
        groups = ours % len(tables[0].ranks), theirs % len(tables[1].ranks)
        if groups in election.by_pair and sent[ours] and received[theirs]:
            plans[ours, theirs] = make_plan(
                election,
                source=(groups[0], tables[0], placed[0][ours]),
                destination=(groups[1], tables[1], placed[1][theirs]),
            )
    plan_s = time.perf_counter() - began
    nbytes: Counter[tuple[int, int]] = Counter()
    pieces = 0
    for (ours, theirs), plan in plans.items():
        wanted = {item.number: item for item in received[theirs]}
        for item in sent[ours]:
            for total, count in _sizes(spec, plan, item, wanted.get(item.number)):
                nbytes[ours, theirs] += total
                pieces += count
    return Planned({pair: count for pair, count in nbytes.items() if count}, pieces, plan_s)


def _sizes(spec: ModelSpec, plan: TransferPlan, source: Item, destination: Item | None) -> Iterator[tuple[int, int]]:
    if destination is None:
        return
    for name, component in plan.components.items():
        state, need = spec.state(name), destination.needs[name]
        if need[0] < need[1]:
            rows = rows_of(state, source), rows_of(state, destination)
            bound = bind_rows(component, source=rows[0], destination=rows[1], tokens=need, num_tokens=need[1])
            if component.converts:
                yield bound.at_destination()
            else:
                copies = bound.copies()
                yield copies.total_nbytes, len(copies)


def blocks_of(
    pairs: Mapping[tuple[int, int], int], sources: Sequence[Description], destinations: Sequence[Description]
) -> dict[int, tuple[Block, ...]]:
    """The bytes of each pair of ranks as contiguous blocks, by source rank.

    Blocks follow each other in both arenas. A source that writes to several replicas, or converts to larger numbers, may
    send more than its memory holds, and begins again at its start. Raises `DisaggError` if the bytes do not fit into the
    destination's arena.
    """
    ours, theirs = dict.fromkeys(range(len(sources)), 0), dict.fromkeys(range(len(destinations)), 0)
    blocks: dict[int, list[Block]] = {}
    for (source, destination), nbytes in sorted(pairs.items()):
        address, room = destinations[destination].arena
        if theirs[destination] + nbytes > room:
            raise DisaggError(f"ceiling: {nbytes} bytes from rank {source} do not fit into the memory of rank {destination}")
        left, size = nbytes, sources[source].arena[1]
        while left:
            part = min(left, size)
            if ours[source] + part > size:
                ours[source] = 0
            blocks.setdefault(source, []).append(Block(destination, ours[source], address + theirs[destination], part))
            ours[source] += part
            theirs[destination] += part
            left -= part
    return {source: tuple(found) for source, found in blocks.items()}


def check_rank(case: Case, spec: ModelSpec, side: Side, found: Description) -> None:
    """Raises `ConfigError` if a running rank does not match the case."""
    for what, expected, has in (
        ("model", f"{spec.name} with {spec.num_layers} layers", f"{found.model} with {found.num_layers} layers"),
        ("side", str(side), found.side),
        ("backend", found.backend if case.backend == "auto" else case.backend, found.backend),
    ):
        if expected != has:
            raise ConfigError(f"{what}: expected {expected}, found {has} at rank {found.name}/{found.rank}")
