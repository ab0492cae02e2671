"""The result of a case: a row of figures, as a line of a table and as JSON."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import msgspec
from rich.table import Table

from disagg.commands.bench.environment import Environment
from disagg.commands.bench.timelines import phases_of
from disagg.commands.cases.instructions import Description, Raw, Result, RunReport
from disagg.commands.cases.workload import Case, Planned
from disagg.commands.shell.text import indented_json, plain_table, size
from disagg.core.timeline import PHASES

STAGES = ("plan", "bind", "pack", "post", "wire", "unpack", "total")


class RequestTimes(NamedTuple):
    """A request that succeeded. `latency_s`: from its first `send` to its last success; `queued_s`: from its arrival to that
    `send`. The seconds of `phases` add up to the latency.
    """

    number: int
    latency_s: float
    queued_s: float
    phases: dict[str, float]

    @property
    def added_s(self) -> float:
        """What the transfer adds to the time to the first token."""
        return self.queued_s + self.latency_s


@dataclass(frozen=True)
class Sample:
    """One run of a case. `requests`: those that succeeded. `seconds`: by stage, of the rank that spent most in it.
    `problem`: empty if every byte was correct.
    """

    total_s: float
    requests: tuple[RequestTimes, ...]
    seconds: dict[str, float]
    posts: int
    ways: dict[str, int]
    problem: str
    cpu_s: float = 0.0

    @classmethod
    def of(cls, *, sent: Sequence[RunReport], received: Sequence[RunReport], problem: str, cpu_s: float = 0.0) -> Self:
        """All reports must be on one clock."""
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        lasts: dict[int, Result] = {}
        queued: dict[int, float] = {}
        for report in sent:
            for result in _succeeded(report):
                starts[result.number] = min(result.start, starts.get(result.number, result.start))
                queued[result.number] = starts[result.number] - (result.start - result.queued_s)
        for report in received:
            for result in _succeeded(report):
                if result.end >= ends.get(result.number, result.end):
                    ends[result.number], lasts[result.number] = result.end, result
        seconds: dict[str, float] = defaultdict(float)
        ways: Counter[str] = Counter()
        for report in (*sent, *received):
            ways.update(report.ways)
            for stage, spent in report.seconds.items():
                seconds[stage] = max(seconds[stage], spent)
        return cls(
            total_s=max(ends.values()) - min(starts.values()) if starts and ends else 0.0,
            requests=tuple(
                RequestTimes(number, ends[number] - start, queued[number], phases_of(start, lasts[number]))
                for number, start in starts.items()
                if number in ends
            ),
            seconds=dict(seconds),
            posts=sum(report.posts for report in (*sent, *received)),
            ways=dict(ways),
            problem=problem,
            cpu_s=cpu_s,
        )


@dataclass(frozen=True)
class Alone:
    """GB/s and CPU seconds without the library: of the engine with one block per pair of ranks, of a copy in memory by one
    thread, and of the system mechanism below the transport.
    """

    gbps: float
    cpu_s: float
    memcpy_gbps: float
    raw_gbps: float | None

    @classmethod
    def median(cls, found: Sequence[Self]) -> Self | None:
        if not found:
            return None
        raw = [each.raw_gbps for each in found if each.raw_gbps is not None]
        return cls(
            statistics.median(each.gbps for each in found),
            statistics.median(each.cpu_s for each in found),
            statistics.median(each.memcpy_gbps for each in found),
            statistics.median(raw) if raw else None,
        )


def mechanism_of(about: Description) -> Raw | None:
    """`None` if programs cannot use the mechanism without the engine."""
    if about.backend == "local" or about.device != "cpu":
        return None
    if about.transport.removeprefix("cma: ").startswith("shm"):  # the prefix of `auto`
        return Raw.WRITEV
    return Raw.SOCKET if about.transport.startswith("tcp") else None


def _succeeded(report: RunReport) -> Iterator[Result]:
    return (result for result in report.results if result.ok)


class MedianRequest(msgspec.Struct, frozen=True):
    """The request with the median latency. Runs are counted from 1, the requests of a run from 0."""

    run: int
    request: int
    tokens: int


class Row(msgspec.Struct, frozen=True):
    """One case, as a row of the table and of the JSON. Figures that were not measured are `None`.

    * `tokens`: of each request. If lengths differ, those of the longest, and `shortest_tokens` those of the shortest.
    * `bytes`: delivered per run. `gbps`: `bytes` / 1e9 / `seconds["total"]`, which is from the first `send` to the last
      success of the median run. `seconds` of the other stages are the busiest rank's; `plan` is spent once per pair of
      instances.
    * `pieces`: the plan's, with neighbors joined. `posts`: descriptors for the engine; packed pieces share staging buffers.
    * `latency_ms`: over all requests of all runs (`count`), from the first `send` to the last success. Percentiles are of
      the nearest rank. `median`: the request with the p50; `phases`: its seconds by phase (`disagg.core.timeline`).
    * `arrivals`: how requests arrive, `per_s` of them a second. Unless they arrive together, `queue_ms` is the time from a
      request's arrival to its first `send`, and `added_ms` to its last success.
    * `ceiling_gbps`: the engine alone, with one block per pair of ranks; `ratio`: `gbps` as a share of it, if requests
      arrive together. `raw_gbps`: the system mechanism `raw` with the same blocks. `memcpy_gbps`: one thread.
    * `problem`: where a byte was wrong. `ending`: what went wrong when the ranks were to end.
    * `core_s_per_gb`: CPU seconds of all ranks per GB delivered; `ceiling_core_s_per_gb`: the same for the ceiling. Where
      cores are the limit, their quotient bounds `ratio`. `cpu_percent`: of the median run; 100 is one core.
    * `num_layers`, `verify`, `chunk_tokens`, `prefix_hit`, `seed`, `asked_transport` and `nics`: as the options of the same
      names; `num_layers` is `None` for all.
    * `ways`: bytes by path. `thresholds`: the packing thresholds of the prefill ranks, by origin: `declared` or `set`.
    """

    backend: str
    transport: str
    device: str
    model: str
    tokens: int
    prefill: str
    decode: str
    components: tuple[str, ...]
    bytes: int
    pieces: int
    piece_bytes_mean: float
    way: str
    ways: dict[str, int]
    seconds: dict[str, float]
    latency_ms: dict[str, float]
    gbps: float
    ceiling_gbps: float | None
    ratio: float | None
    verified: bool
    versions: dict[str, str]
    posts: int = 0
    pack_below: int | None = None
    requests: int = 1
    concurrency: int = 1
    repeat: int = 1
    run_pages: int = 1
    warm_up: int = 0
    raw: str | None = None
    raw_gbps: float | None = None
    memcpy_gbps: float | None = None
    core_s_per_gb: float | None = None
    ceiling_core_s_per_gb: float | None = None
    thresholds: dict[str, list[int]] = {}
    problem: str = ""
    ending: str = ""
    arrivals: str = "together"
    per_s: float | None = None
    queue_ms: dict[str, float] | None = None
    added_ms: dict[str, float] | None = None
    shortest_tokens: int | None = None
    median: MedianRequest | None = None
    phases: dict[str, float] = {}
    cpu_percent: float | None = None
    count: int = 0
    num_layers: int | None = None
    verify: str = "off"
    chunk_tokens: int = 0
    prefix_hit: int = 0
    seed: int = 0
    asked_transport: str = "auto"
    nics: tuple[str, ...] = ()
    environment: Environment | None = None

    @property
    def lengths(self) -> str:
        return str(self.tokens) if self.shortest_tokens is None else f"{self.shortest_tokens}-{self.tokens}"


def summarise(
    case: Case,
    *,
    sources: Sequence[Description],
    destinations: Sequence[Description],
    planned: Planned,
    samples: Sequence[Sample],
    alone: Alone | None,
) -> Row:
    runs = dict(enumerate(samples, 1))
    good = {run: sample for run, sample in runs.items() if not sample.problem} or runs
    median = sorted(good.values(), key=lambda sample: sample.total_s)[_place(50, len(good))]
    moved = [(run, request) for run, sample in good.items() for request in sample.requests]
    moved.sort(key=lambda each: each[1].latency_s)
    run, middle = moved[_place(50, len(moved))] if moved else (0, None)
    is_paced = bool(case.arrivals.times_s)
    problem = next((sample.problem for sample in samples if sample.problem), "")
    spent = {**median.seconds, "plan": planned.plan_s, "total": median.total_s}
    nbytes = sum(planned.nbytes.values())
    gbps = nbytes / median.total_s / 1e9 if median.total_s else 0.0
    everyone = [*sources, *destinations]
    mechanism = mechanism_of(sources[0])
    return Row(
        backend=sources[0].backend,
        transport=_joined(about.transport for about in everyone),
        device=_joined(about.device for about in everyone),
        model=sources[0].model,
        tokens=case.tokens,
        shortest_tokens=case.shortest_tokens if case.shortest_tokens < case.tokens else None,
        prefill=str(case.prefill),
        decode=str(case.decode),
        components=tuple(sorted({name for about in everyone for name in about.rows})),
        bytes=nbytes,
        pieces=planned.pieces,
        piece_bytes_mean=nbytes / planned.pieces if planned.pieces else 0.0,
        way=next(iter(median.ways), "none") if len(median.ways) < 2 else "mixed",
        ways=median.ways,
        seconds={stage: spent.get(stage, 0.0) for stage in STAGES},
        latency_ms=percentiles(request.latency_s for _, request in moved),
        gbps=gbps,
        ceiling_gbps=alone.gbps if alone else None,
        ratio=gbps / alone.gbps if alone and not is_paced else None,
        verified=not problem,
        versions=sources[0].versions,
        posts=median.posts,
        pack_below=case.pack_below,
        requests=case.requests,
        concurrency=case.concurrency,
        repeat=len(samples),
        run_pages=case.run_pages,
        warm_up=case.warm_up,
        raw=mechanism.value if mechanism and alone and alone.raw_gbps else None,
        raw_gbps=alone.raw_gbps if alone else None,
        memcpy_gbps=alone.memcpy_gbps if alone else None,
        core_s_per_gb=statistics.median(sample.cpu_s for sample in good.values()) / nbytes * 1e9 if nbytes else None,
        ceiling_core_s_per_gb=alone.cpu_s / nbytes * 1e9 if alone and nbytes else None,
        thresholds=_merged(about.thresholds for about in sources),
        problem=problem,
        arrivals=case.arrivals.name,
        per_s=case.arrivals.per_s,
        queue_ms=percentiles(request.queued_s for _, request in moved) if is_paced else None,
        added_ms=percentiles(request.added_s for _, request in moved) if is_paced else None,
        median=MedianRequest(run, middle.number, case.tokens_of(middle.number)) if middle else None,
        phases=middle.phases if middle else {},
        cpu_percent=100 * median.cpu_s / median.total_s if median.total_s else None,
        count=len(moved),
        num_layers=case.num_layers,
        verify=case.verify,
        chunk_tokens=case.chunk_tokens,
        prefix_hit=case.prefix_hit,
        seed=case.seed,
        asked_transport=case.transport,
        nics=case.devices,
    )


def _place(percent: float, count: int) -> int:
    """The index among `count` sorted values, by the nearest rank. `percent` has at most one decimal."""
    return -(-round(10 * percent) * count // 1000) - 1


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    found = sorted(1e3 * each for each in seconds) or [0.0]
    percentiles = {f"p{percent:g}": found[_place(percent, len(found))] for percent in (50, 90, 99, 99.9)}
    return {"min": found[0], "mean": statistics.fmean(found), **percentiles, "max": found[-1]}


def _merged(found: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    merged: dict[str, list[int]] = defaultdict(list)
    for each in found:
        for origin, sizes in each.items():
            merged[origin] += sizes
    return dict(merged)


def _joined(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def to_json(rows: Sequence[Row]) -> bytes:
    return indented_json(list(rows))


def to_csv(rows: Sequence[Row]) -> str:
    """A column is named after a value in the JSON, such as `latency_ms.p50`."""
    flat = [dict(_flat(msgspec.to_builtins(row))) for row in rows]
    target = io.StringIO()
    writer = csv.DictWriter(target, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return target.getvalue()


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", " ".join(map(str, value)) if isinstance(value, list | tuple) else value


COLUMNS = (
    "backend", "transport", "model", "tokens", "prefill", "decode", "bytes", "pieces", "of", "way",
    "p50 ms", "p99 ms", "GB/s", "ceiling", "ratio", "CPU %", "verified", "ended",
)  # fmt: skip


LEGEND = (
    "of: mean size of a piece. way: pieces are packed into buffers, or go direct from row to row. ceiling: GB/s of the engine "
    "alone, with one block for each pair of ranks; ratio: GB/s as a share of it. CPU %: 100 is one core. ended: whether the "
    "ranks ended by themselves. (inferred): the engine does not say which transport it uses."
)
"""Explains columns whose names do not."""


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.backend,
        row.transport,
        row.model,
        row.lengths,
        row.prefill,
        row.decode,
        size(row.bytes),
        str(row.pieces),
        size(row.piece_bytes_mean),
        row.way,
        f"{row.latency_ms['p50']:.1f}",
        f"{row.latency_ms['p99']:.1f}",
        f"{row.gbps:.2f}",
        "-" if row.ceiling_gbps is None else f"{row.ceiling_gbps:.2f}",
        "-" if row.ratio is None else f"{row.ratio:.0%}",
        "-" if row.cpu_percent is None else f"{row.cpu_percent:.0f}",
        "yes" if row.verified else "NO",
        "BADLY" if row.ending else "well",
    )


def title(case: Case | Row) -> str:
    """A case in words, with what else a sweep may vary."""
    counts = (("requests", case.requests), ("concurrency", case.concurrency), ("run pages", case.run_pages))
    varied = "".join(f", {what} {count}" for what, count in counts if count > 1)
    return f"{case.backend}, {case.model}, tokens {case.tokens}{varied}: {case.prefill} -> {case.decode}"


def problems_of(row: Row) -> Iterator[str]:
    case = title(row)
    if not row.verified:
        yield f"{case}: not verified: {row.problem}"
    if row.ending:
        yield f"{case}: ended badly: {row.ending}"


RIGHT = {name for name in COLUMNS[COLUMNS.index("bytes") : COLUMNS.index("verified")] if name != "way"}


def table(rows: Sequence[Row]) -> Table:
    return plain_table(COLUMNS, map(cells, rows), right=RIGHT)


PHASES_TITLE = "phases of the median request (p50) in ms, from first send to last event:"
LATENCY_COLUMNS = (
    "backend", "transport", "model", "tokens", "bytes", "prefill", "decode", "way", "requests", "min ms", "mean ms",
    "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "CPU %", "verified", "ended",
)  # fmt: skip


def latency_table(rows: Sequence[Row]) -> Table:
    return plain_table(LATENCY_COLUMNS, map(latency_cells, rows), right=set(LATENCY_COLUMNS[8:17]) | {"tokens", "bytes"})


def latency_cells(row: Row) -> tuple[str, ...]:
    times = (row.latency_ms[name] for name in ("min", "mean", "p50", "p90", "p99", "p99.9", "max"))
    per_request, last = size(row.bytes // row.requests), cells(row)[-3:]
    case = (row.backend, row.transport, row.model, row.lengths, per_request, row.prefill, row.decode, row.way, str(row.count))
    return (*case, *(f"{each:.3f}" for each in times), *last)


PHASES_COLUMNS = ("backend", "transport", "prefill", "decode", "way", "run", "request", "tokens", *PHASES, "all")


def phases_table(rows: Sequence[Row]) -> Table | None:
    found = [cells for row in rows for cells in phases_cells(row)]
    return plain_table(PHASES_COLUMNS, found, right=PHASES_COLUMNS[5:]) if found else None


def phases_cells(row: Row) -> Iterator[tuple[str, ...]]:
    if row.phases:
        which = tuple(map(str, msgspec.structs.astuple(row.median))) if row.median else ("",) * 3
        figures = [*(row.phases[phase] for phase in PHASES), sum(row.phases.values())]
        yield (
            row.backend,
            row.transport,
            row.prefill,
            row.decode,
            row.way,
            *which,
            *(f"{1e3 * seconds:.2f}" for seconds in figures),
        )


PACED_TITLE = "from arrival to the last byte, which adds to the time to the first token:"
PACED_COLUMNS = ("prefill", "decode", "arrivals", "per s", "queue p50 ms", "queue p99 ms", "added p50 ms", "added p99 ms")


def paced_table(rows: Sequence[Row]) -> Table | None:
    paced = [paced_cells(row) for row in rows if row.added_ms is not None]
    return plain_table(PACED_COLUMNS, paced, right=PACED_COLUMNS[3:]) if paced else None


def paced_cells(row: Row) -> tuple[str, ...]:
    figures = [each[name] for each in (row.queue_ms, row.added_ms) if each is not None for name in ("p50", "p99")]
    per_s = "-" if row.per_s is None else f"{row.per_s:.1f}"
    return (row.prefill, row.decode, row.arrivals, per_s, *(f"{figure:.1f}" for figure in figures))
