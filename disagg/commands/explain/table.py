"""The table that `disagg explain` prints."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from disagg.commands.explain.summary import BUSY, Pair, Part, Summary
from disagg.commands.shell import text
from disagg.commands.shell.text import size

PATHS = {"direct": "direct", "packed": "packed (buffers)"}
MAX_PAIRS = 256
"""Among more pairs than these, those with the same figures share a line."""


def show(found: Summary, console: Console) -> None:
    sides = f"prefill {found.prefill} -> decode {found.decode}"
    print(f"{found.model}, {found.tokens} tokens: {sides}, {found.backend} over {found.transport}", file=console.file)
    shown = distinct(found.pairs)
    text.show(pairs_table(found, shown), console)
    if left_out := len(found.pairs) - len(shown):
        print(f"{left_out} more pairs of ranks have the figures of one of these; --json lists them all", file=console.file)
    for line in itertools.chain(reasons(found.pairs), fans(found), ends(found)):
        print(line, file=console.file)


def distinct(pairs: Sequence[Pair]) -> Sequence[Pair]:
    if len(pairs) <= MAX_PAIRS:
        return pairs
    found: dict[Hashable, Pair] = {}
    for pair in pairs:
        found.setdefault(tuple((*_cells(part), *_key(part)) for part in pair.components), pair)
    return list(found.values())


def pairs_table(found: Summary, shown: Sequence[Pair]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("prefill", "decode", "component"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "runs", "mean run", *PATHS.values()):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("way", no_wrap=True)
    numbers = numbered(found.pairs)
    for pair in shown:
        ranks = (str(pair.source), str(pair.destination))
        for part in pair.components:
            table.add_row(*ranks, *_cells(part), f"{part.way} [dim]({numbers[_key(part)]})[/dim]")
            ranks = ("", "")
    return table


def _cells(part: Part) -> tuple[str, ...]:
    by_path = [str(part.ways[path].descriptors) if path in part.ways else "-" for path in PATHS]
    return part.name, size(part.bytes), str(part.runs), size(part.run_bytes_mean), *by_path


def _key(part: Part) -> tuple[str, str, str]:
    return part.name, part.way, part.reason


def numbered(pairs: Sequence[Pair]) -> Mapping[tuple[str, str, str], int]:
    keys = dict.fromkeys(_key(part) for pair in pairs for part in pair.components)
    return {key: number for number, key in enumerate(keys, 1)}


def reasons(pairs: Sequence[Pair]) -> Iterator[str]:
    for (name, way, reason), number in numbered(pairs).items():
        yield f"({number}) {name}, {way}: {reason}."


def fans(found: Summary) -> Iterator[str]:
    for role, verbs, partners, other in (
        ("prefill", ("writes to", "write to"), found.fan_out, "decode"),
        ("decode", ("is written by", "are written by"), found.fan_in, "prefill"),
    ):
        alike: dict[tuple[int, str], list[int]] = defaultdict(list)
        nbytes: Counter[int] = Counter()
        for pair in found.pairs:
            nbytes[pair.source if role == "prefill" else pair.destination] += pair.bytes
        for rank, theirs in partners.items():
            alike[len(theirs), size(nbytes[rank])].append(rank)
        for (count, moved), ranks in alike.items():
            many = len(ranks) > 1
            each = " each" if many else ""
            whom = f"{count} {other} rank{'s' * (count > 1)}"
            yield f"{role} rank{'s' * many} {ranges(ranks)} {verbs[many]} {whom}{each}: {moved}{each}"


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""
    groups = [list(group) for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(g[0][1]) if len(g) == 1 else f"{g[0][1]}-{g[-1][1]}" for g in groups)


def ends(found: Summary) -> Iterator[str]:
    yield from (f"hot spot: {line}" for line in found.hot_spots)
    if not found.hot_spots:
        yield f"no hot spots: no rank moves more than {BUSY} times the mean of its side"
    yield f"total: {found.total_bytes} bytes delivered in {found.runs} runs, as {found.descriptors} descriptors" + (
        "; every needed byte is written exactly once" if found.covered else "; NOT every needed byte is covered"
    )
    if found.link_seconds is not None:
        yield f"link: {1e3 * found.link_seconds:.3g} ms for the bytes alone of the busiest rank, at {found.link}"
    yield from nics(found)


def nics(found: Summary) -> Iterator[str]:
    """Ranks and NICs with the same figures share a line. Nothing if ranks have one NIC."""
    by_rank: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for share in found.nics:
        by_rank[share.role, share.rank].append((size(share.bytes), share.work_requests))
    alike: dict[tuple[str, tuple[tuple[str, int], ...]], list[int]] = defaultdict(list)
    for (role, rank), carried in by_rank.items():
        alike[role, tuple(carried)].append(rank)
    for (role, all_carried), ranks in alike.items():
        for moved, work_requests in dict.fromkeys(all_carried):
            numbers = [number for number, carried in enumerate(all_carried) if carried == (moved, work_requests)]
            whose = f"NIC{'s' * (len(numbers) > 1)} {ranges(numbers)} of {role} rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
            yield f"{whose}: {moved} {'sent' if role == 'prefill' else 'received'} by each, {work_requests} work requests"
