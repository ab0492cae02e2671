"""Which cases became slower between two runs of the benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from disagg.commands.bench.report import Row
from disagg.commands.shell import text
from disagg.core.errors import ConfigError


def read_rows(path: Path) -> list[Row]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Row])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"compare: {path}: expected rows written by disagg-bench --json: {error}") from error


Key = tuple[object, ...]


def _key(row: Row) -> Key:
    """The transport is a result, not part of the case, unless it was asked for: the engine chose it."""
    return (
        row.backend,
        row.device,
        row.model,
        row.tokens,
        row.prefill,
        row.decode,
        row.requests,
        row.concurrency,
        row.pack_below,
        row.run_pages,
        row.num_layers,
        row.verify,
        row.chunk_tokens,
        row.prefix_hit,
        row.asked_transport,
        row.nics,
        row.arrivals,
        None if row.per_s is None else round(row.per_s, 1),
    )


def _numbered(rows: Iterable[Row]) -> dict[Key, Row]:
    seen: Counter[Key] = Counter()
    found: dict[Key, Row] = {}
    for row in rows:
        key = _key(row)
        found[*key, seen[key]] = row
        seen[key] += 1
    return found


@dataclass(frozen=True)
class Comparison:
    before: Row | None
    after: Row | None
    regressions: tuple[str, ...]

    @property
    def case(self) -> Row:
        row = self.before or self.after
        assert row is not None
        return row


def compare(before: Sequence[Row], after: Sequence[Row], *, tolerance: float) -> list[Comparison]:
    """Every case of either run, in order; worse by more than the share `tolerance` is a regression. Speed is compared as a
    share of the same run's ceiling if both have one, since machines vary over time.
    """
    ours, theirs = _numbered(before), _numbered(after)
    found = []
    for key in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(key), theirs.get(key)
        found.append(Comparison(one, other, tuple(_regressions(one, other, tolerance))))
    return found


def _regressions(before: Row | None, after: Row | None, tolerance: float) -> Iterable[str]:
    if after is None:
        yield "the case is missing"
        return
    if not after.verified:
        yield f"not verified: {after.problem}"
    if before is None:
        return
    if after.ending and not before.ending:
        yield f"ended badly: {after.ending}"
    if before.added_ms is not None and after.added_ms is not None:  # at a given rate, which sets GB/s
        if after.added_ms["p50"] > before.added_ms["p50"] * (1 + tolerance):
            yield f"p50 of {after.added_ms['p50']:.2f} ms added instead of {before.added_ms['p50']:.2f}"
    elif before.ratio is not None and after.ratio is not None:
        if after.ratio < before.ratio * (1 - tolerance):
            yield f"{after.ratio:.0%} of the ceiling instead of {before.ratio:.0%}"
    elif after.gbps < before.gbps * (1 - tolerance):
        yield f"{after.gbps:.2f} GB/s instead of {before.gbps:.2f}"
    if after.posts > before.posts * (1 + tolerance):
        yield f"{after.posts} posts instead of {before.posts}"
    if after.bytes != before.bytes:
        yield f"{after.bytes} bytes delivered instead of {before.bytes}"


def show(found: Sequence[Comparison], console: Console, *, names: tuple[str, str], tolerance: float) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("engine, model, tokens", "sides"):
        table.add_column(name, overflow="fold")
    for name in ("GB/s", "of ceiling", "p50 ms", "p99 ms", "posts", "core s/GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        case, bad = each.case, bool(each.regressions)
        table.add_row(
            "WORSE" if bad else "" if each.before else "new",
            f"{case.backend} {case.model} {case.lengths}",
            f"{case.prefill} -> {case.decode}",
            *(_change(each, figure, shown) for figure, shown in FIGURES),
            style="bold red" if bad else None,
        )
    print(f"{names[0]} -> {names[1]}", file=console.file)
    text.show(table, console)
    for each in found:
        case = each.case
        for regression in each.regressions:
            sides = f"{case.prefill} -> {case.decode}"
            print(f"regression: {case.backend}, {sides}, {case.lengths} tokens: {regression}", file=console.file)
    bad_cases = sum(bool(each.regressions) for each in found)
    print(f"{text.counted(len(found), 'case')}, {bad_cases} worse by more than {tolerance:.0%}", file=console.file)


Figure = Callable[[Row], float | None]
FIGURES: tuple[tuple[Figure, Callable[[float], str]], ...] = (
    (lambda row: row.gbps, lambda value: f"{value:.2f}"),
    (lambda row: row.ratio, lambda value: f"{value:.0%}"),
    (lambda row: row.latency_ms["p50"], lambda value: f"{value:.1f}"),
    (lambda row: row.latency_ms["p99"], lambda value: f"{value:.1f}"),
    (lambda row: float(row.posts), lambda value: f"{value:.0f}"),
    (lambda row: row.core_s_per_gb, lambda value: f"{value:.2f}"),
)


def _change(each: Comparison, figure: Figure, text: Callable[[float], str]) -> str:
    """Such as `1.20 -> 1.08 (-10%)`."""
    before, after = (None if row is None else figure(row) for row in (each.before, each.after))
    if before is None and after is None:
        return "-"
    shown = " -> ".join("-" if value is None else text(value) for value in (before, after))
    if not before or after is None or f"{after / before - 1:.0%}" in ("0%", "-0%"):
        return shown
    return f"{shown} ({after / before - 1:+.0%})"
