"""The result of `disagg explain` as its JSON has it, and the totals over all pairs of ranks."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError

BUSY = 1.25
"""A rank that moves more than this many times the mean of its side is a hot spot."""
CUT_FROM_NBYTES = 8 << 10
"""NIXL's UCX divides pieces of this size among the NICs; it sent pieces of 4,000 bytes by the first NIC alone."""


class PathShare(msgspec.Struct, frozen=True):
    """`descriptors` go to the engine: one per run, or one per staging buffer."""

    bytes: int
    runs: int
    descriptors: int


class Part(msgspec.Struct, frozen=True):
    """One component between two ranks. `runs`: pieces with neighbours joined."""

    name: str
    bytes: int
    runs: int
    run_bytes_mean: float
    descriptors: int
    way: str
    reason: str
    ways: dict[str, PathShare]


class Pair(msgspec.Struct, frozen=True):
    source: int
    destination: int
    components: tuple[Part, ...]
    bytes: int


class NicShare(msgspec.Struct, frozen=True):
    """Bytes that one NIC sends or receives, and the work requests that write them, rounded up."""

    role: str
    rank: int
    nic: int
    bytes: int
    work_requests: int


class Link(msgspec.Struct, frozen=True):
    num_nics: int
    gbits: float

    def __str__(self) -> str:
        return f"{self.num_nics}x{self.gbits:g}gbit" if self.num_nics > 1 else f"{self.gbits:g}gbit"


class Summary(msgspec.Struct, frozen=True):
    """`link_seconds`: for the busiest rank's bytes at its `link`'s rate. `nics`: if ranks have several."""

    model: str
    tokens: int
    prefill: str
    decode: str
    backend: str
    transport: str
    pack_below: int
    slot_bytes: int
    pairs: tuple[Pair, ...]
    total_bytes: int
    covered: bool
    runs: int
    descriptors: int
    fan_out: dict[int, tuple[int, ...]]
    fan_in: dict[int, tuple[int, ...]]
    hot_spots: tuple[str, ...]
    link: Link | None = None
    link_seconds: float | None = None
    nics: tuple[NicShare, ...] = ()


_LINK = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)gbit")


def parse_link(text: str) -> Link:
    """A link such as `400gbit`, or `8x400gbit` for eight NICs. Raises `ConfigError`."""
    found = _LINK.fullmatch(text)
    link = Link(int(found[1] or 1), float(found[2])) if found else None
    if link is None or not link.num_nics * link.gbits:
        raise ConfigError(f"link: expected a rate such as 400gbit or 8x400gbit, found {text!r}")
    return link


def link_seconds(pairs: Sequence[Pair], link: Link) -> float:
    moved = Counter[tuple[str, int]]()
    for pair in pairs:
        moved["prefill", pair.source] += pair.bytes
        moved["decode", pair.destination] += pair.bytes
    return max(moved.values(), default=0) * 8 / (link.num_nics * link.gbits * 1e9)


def partners(pairs: Sequence[Pair], *, of: str) -> dict[int, tuple[int, ...]]:
    """The peers of each rank of one side, `source` or `destination`."""
    found: dict[int, list[int]] = defaultdict(list)
    for pair in pairs:
        one, other = (pair.source, pair.destination) if of == "source" else (pair.destination, pair.source)
        found[one].append(other)
    return {rank: tuple(sorted(found[rank])) for rank in sorted(found)}


def nic_shares(pairs: Sequence[Pair], *, num_nics: int, cuts: bool) -> Iterator[NicShare]:
    """If all NICs have the same rate. An engine spreads whole pieces or, with `cuts`, divides each piece among the NICs, but
    sends those below `CUT_FROM_NBYTES` by the first. Both were counted on soft devices.
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
