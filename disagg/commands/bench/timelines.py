"""Where the time of requests went, and a file of it for viewers such as Perfetto or speedscope."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from disagg.commands.cases.instructions import Direction, Result, RunReport
from disagg.core.timeline import PHASES


def phases_of(start: float, last: Result) -> dict[str, float]:
    """The seconds of each phase of a request, from its first `send` at `start`. Only `wait` differs from the receiver's own
    timeline, which begins when that was opened.
    """
    phases = dict.fromkeys(PHASES, 0.0) | last.phases
    phases["wait"] = max(0.0, last.end - start - sum(seconds for name, seconds in phases.items() if name != "wait"))
    return phases


class RankRun(NamedTuple):
    """Times are on the driver's clock."""

    rank: str
    direction: Direction
    report: RunReport


CaseRun = tuple[str, Sequence[RankRun]]
"""A case's title, and one run of it."""


def write_timeline(file: Path, runs: Iterable[CaseRun]) -> None:
    """Chrome's trace event format: a process of the trace is a rank, a thread a request. Raises `OSError`."""
    ranks = [(title, rank) for title, run in runs for rank in run]
    zero = min((result.opened_at for _, rank in ranks for result in _opened(rank)), default=0.0)
    events: list[dict[str, Any]] = []
    for process, (title, rank) in enumerate(ranks, 1):
        events.append(_named("process_name", f"{rank.rank}, {title}", process))
        for result in _opened(rank):
            events += _request(result, rank.direction, process, zero)
    file.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n")


def _opened(run: RankRun) -> list[Result]:
    return [result for result in run.report.results if result.phases]


def _request(result: Result, direction: Direction, process: int, zero: float) -> Iterator[dict[str, Any]]:
    """Times are whole microseconds since `zero`, so that each phase ends where the next begins."""
    ends = itertools.accumulate(result.phases.values(), initial=result.opened_at - zero)
    edges = [round(1e6 * seconds) for seconds in ends]
    same = {"ph": "X", "pid": process, "tid": result.number + 1}
    yield _named("thread_name", f"request {result.number}", process, thread=result.number + 1)
    whole = {"queued_ms": round(1e3 * result.queued_s, 3), "error": result.error}
    yield {"name": f"{direction.value} {result.number}", **same, "ts": edges[0], "dur": edges[-1] - edges[0], "args": whole}
    for phase, (begin, end) in zip(result.phases, itertools.pairwise(edges), strict=True):
        if end > begin:
            yield {"name": phase, **same, "ts": begin, "dur": end - begin}


def _named(kind: str, name: str, process: int, *, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
