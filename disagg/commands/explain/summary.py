"""The result of `disagg explain` as its JSON has it, and the totals over all pairs of ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from disagg.commands.cases.costs import Costs
from disagg.commands.shell.text import size

BUSY = 1.25
"""A rank that moves more than this many times the mean of its side is a hot spot."""
CUT_FROM_NBYTES = 8 << 10
"""NIXL's UCX gives every NIC a part of pieces of this size; it sent pieces of 4,000 bytes by the first NIC alone."""


class PathShare(msgspec.Struct, frozen=True):
    """The bytes of a component that take one path. `descriptors` go to the engine: one per run, or one per staging buffer."""

    bytes: int
    runs: int
    descriptors: int


class Part(msgspec.Struct, frozen=True):
    """One component between a pair of ranks. `runs` are pieces with neighbours joined; `descriptors` go to the engine.
    `seconds` is what it would take alone.
    """

    name: str
    bytes: int
    runs: int
    run_bytes_mean: float
    descriptors: int
    way: str
    reason: str
    ways: dict[str, PathShare]
    seconds: float | None


class Pair(msgspec.Struct, frozen=True):
    """What one prefill rank writes to one decode rank; ranks are numbered within their instances. `seconds` is what it would
    take alone.
    """

    source: int
    destination: int
    components: tuple[Part, ...]
    bytes: int
    seconds: float | None


class NicShare(msgspec.Struct, frozen=True):
    """What one NIC of a rank carries: bytes, and the work requests that write them, rounded up. Those of a decode rank are its
    peers'.
    """

    role: str
    rank: int
    nic: int
    bytes: int
    work_requests: int


class Faster(msgspec.Struct, frozen=True):
    """A packing threshold with which the same costs predict a shorter time."""

    pack_below: int
    seconds: float


class Summary(msgspec.Struct, frozen=True):
    """One request, explained. `seconds` is the busiest rank's time if each rank has its own core and link; `phases` divides it,
    if the costs have phases. `faster`: the best threshold, if it is not the engine's. `nics`: what each NIC of each rank
    carries, if the costs are those of several.
    """

    model: str
    tokens: int
    prefill: str
    decode: str
    backend: str
    transport: str
    pack_below: int
    slot_bytes: int
    costs: Costs | None
    pairs: tuple[Pair, ...]
    total_bytes: int
    covered: bool
    runs: int
    descriptors: int
    seconds: float | None
    fan_out: dict[int, tuple[int, ...]]
    fan_in: dict[int, tuple[int, ...]]
    hot_spots: tuple[str, ...]
    phases: dict[str, float] = {}
    faster: Faster | None = None
    nics: tuple[NicShare, ...] = ()


def partners(pairs: Sequence[Pair], *, of: str) -> dict[int, tuple[int, ...]]:
    """The peer ranks of each rank of one side, `source` or `destination`."""
    found: dict[int, list[int]] = defaultdict(list)
    for pair in pairs:
        one, other = (pair.source, pair.destination) if of == "source" else (pair.destination, pair.source)
        found[one].append(other)
    return {rank: tuple(sorted(found[rank])) for rank in sorted(found)}


def shares(parts: Iterable[Part]) -> dict[str, tuple[int, int]]:
    """Pieces and bytes by path."""
    found: dict[str, tuple[int, int]] = {}
    for part in parts:
        for path, share in part.ways.items():
            pieces, nbytes = found.get(path, (0, 0))
            found[path] = pieces + share.runs, nbytes + share.bytes
    return found


def predict(pairs: Sequence[Pair], costs: Costs, *, one_link: bool) -> tuple[float, dict[str, float]]:
    """The seconds of a request by its busiest ranks, and those of each phase, if the costs have phases. `one_link` is as in
    `Costs.phases_s`.
    """
    sent, received = (_busiest(pairs, costs, of=side) for side in ("source", "destination"))
    phases = costs.phases_s(sent, received, one_link=one_link)
    if phases:
        return sum(phases.values()), phases
    return max(costs.seconds(sent), costs.seconds(received) if one_link else 0.0), {}


def _busiest(pairs: Sequence[Pair], costs: Costs, *, of: str) -> dict[str, tuple[int, int]]:
    """The shares of the rank of one side, `source` or `destination`, that takes longest."""
    parts: dict[int, list[Part]] = defaultdict(list)
    for pair in pairs:
        parts[pair.source if of == "source" else pair.destination].extend(pair.components)
    return max((shares(each) for each in parts.values()), key=costs.seconds, default={})


def nic_shares(pairs: Sequence[Pair], *, num_nics: int, cuts: bool) -> Iterator[NicShare]:
    """What each of the `num_nics` NICs of each rank carries, if all have the same rate.

    An engine spreads whole pieces or, with `cuts`, gives each NIC a part of every piece, and the first one all that are shorter
    than `CUT_FROM_NBYTES`. Both were counted on soft devices.
    """
    for role in ("prefill", "decode"):
        carried: dict[int, list[list[float]]] = {}
        for pair in pairs:
            rank = pair.source if role == "prefill" else pair.destination
            nics = carried.setdefault(rank, [[0.0, 0.0] for _ in range(num_nics)])
            for share in (share for part in pair.components for share in part.ways.values()):
                short = cuts and share.bytes < CUT_FROM_NBYTES * share.descriptors
                for nic in nics[:1] if short else nics:
                    nic[0] += share.bytes / (1 if short else num_nics)
                    nic[1] += share.descriptors / (1 if cuts else num_nics)
        for rank, nics in sorted(carried.items()):
            for number, (nbytes, work_requests) in enumerate(nics):
                yield NicShare(role, rank, number, math.ceil(nbytes), math.ceil(work_requests))


def hot_spots(pairs: Sequence[Pair], num_sources: int, num_destinations: int) -> Iterator[str]:
    """Ranks that move far more than the mean of their side, and prefill ranks that move nothing."""
    written, received = Counter[int](), Counter[int]()
    for pair in pairs:
        written[pair.source] += pair.bytes
        received[pair.destination] += pair.bytes
    sides = (("prefill", "writes", written, num_sources), ("decode", "receives", received, num_destinations))
    for role, verb, moved, num_ranks in sides:
        mean = sum(moved.values()) / num_ranks
        for rank in range(num_ranks):
            if moved[rank] > BUSY * mean:
                yield f"{role} rank {rank} {verb} {size(moved[rank])}, {moved[rank] / mean:.1f} times the mean of its side"
        idle = [rank for rank in range(num_ranks) if not moved[rank]]
        if idle and role == "prefill":
            yield f"prefill ranks {', '.join(map(str, idle))} write nothing"
