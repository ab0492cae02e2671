"""`disagg top`: a live table of ranks, from their metrics."""

from __future__ import annotations

import functools
import http.client
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.commands.shell.errors import one_sentence
from disagg.commands.shell.numbers import MAX_SECONDS, Number
from disagg.core.errors import ConfigError
from disagg.core.thread_log import printable

EPILOG = """\b
Examples, for ranks with --metrics-port:
  disagg top http://127.0.0.1:9400 http://127.0.0.1:9401
  disagg top --once prefill-0:9400 decode-0:9400
"""
HEADINGS = ("rank", "health", "peers", "send", "recv", "ok/s", "fail/s", "p50 ms", "p99 ms", "MB/s", "engine")
MIN_WIDTHS = {"rank": 12, "engine": 6}
"""Minimum widths of the columns that narrow terminals fold. The others are never cut."""
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Sample:
    """One rank's metrics, by name and labels, or the `problem` with reading them."""

    at: float
    values: Mapping[tuple[str, Labels], float]
    problem: str = ""

    def total(self, name: str, **labels: str) -> float:
        """The sum of `disagg_NAME` over all samples with these labels."""
        wanted = labels.items()
        return sum(value for (found, has), value in self.values.items() if found == f"disagg_{name}" and wanted <= has)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of `disagg_NAME` by a label."""
        found = {dict(has).get(label, ""): value for (each, has), value in self.values.items() if each == f"disagg_{name}"}
        return {key: found[key] for key in sorted(found) if key and found[key]}

    def build(self, label: str) -> str:
        return next((dict(labels).get(label, "") for found, labels in self.values if found == "disagg_build_info"), "")

    def peers(self, *, ready: bool) -> list[str]:
        return [
            dict(labels).get("peer", "")
            for (found, labels), value in self.values.items()
            if found == "disagg_peer_ready" and bool(value) == ready
        ]

    def buckets(self) -> list[tuple[float, float]]:
        """Upper bounds in seconds of successful requests' durations, with cumulative counts."""
        counts: dict[float, float] = {}
        for (found, labels), value in self.values.items():
            if found == "disagg_request_seconds_bucket" and ("outcome", "ok") in labels:
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return sorted(counts.items())


def metrics_of(url: str) -> str:
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"url: expected http://HOST:PORT or HOST:PORT, found {url!r}")
    return address if address.endswith("/metrics") else f"{address}/metrics"


def read(url: str, *, timeout_s: float) -> Sample:
    try:
        with urllib.request.urlopen(metrics_of(url), timeout=timeout_s) as answer:  # noqa: S310 - what the caller names
            text = answer.read().decode()
        values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Sample(time.monotonic(), {}, str(reason) or type(reason).__name__)
    is_rank = any(name == "disagg_healthy" for name, _ in values)
    problem = "" if is_rank else "these are not a rank's metrics; expected the address of its metrics_port"
    return Sample(time.monotonic(), values, problem)


def quantile(before: Sequence[tuple[float, float]], now: Sequence[tuple[float, float]], share: float) -> float | None:
    """The duration that `share` of the requests between two histograms did not exceed, interpolated within a bucket; `None`
    without requests.
    """
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in now]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted, low, below = counts[-1][1] * share, 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def rank_of(url: str, now: Sample) -> str:
    return f"{now.build('name')}/{now.build('rank')}" if now.build("name") else url


def row(url: str, before: Sample | None, now: Sample) -> tuple[str, ...]:
    """Without `before`, rates are dashes and durations are since the rank's start."""
    if now.problem:
        return (url, "silent", *[""] * (len(HEADINGS) - 2))
    if before is not None and before.problem:
        before = None

    def rate(name: str, *, unit: float = 1.0, **labels: str) -> str:
        if before is None:
            return "-"
        grown = max(0.0, now.total(name, **labels) - before.total(name, **labels))
        return f"{grown / unit / max(now.at - before.at, 1e-6):.1f}"

    num_ready = len(now.peers(ready=True))
    histogram = [] if before is None else before.buckets()
    durations = [quantile(histogram, now.buckets(), share) for share in (0.5, 0.99)]
    return (
        rank_of(url, now),
        "ok" if now.total("healthy") else "dead",
        f"{num_ready}/{num_ready + len(now.peers(ready=False))}",
        f"{now.total('requests', direction='send'):.0f}",
        f"{now.total('requests', direction='receive'):.0f}",
        rate("requests_ended_total", outcome="ok"),
        rate("requests_ended_total", outcome="failed"),
        *("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in durations),
        rate("transfer_bytes_total", unit=1e6),
        engine_of(now),
    )


def engine_of(now: Sample) -> str:
    """`auto` already names the engines in use."""
    engine, transport = now.build("backend"), re.sub(r" \([^)]*\)", "", now.build("transport"))
    return transport if engine == "auto" else f"{engine}: {transport}"


def problems(url: str, now: Sample) -> str:
    found = [now.problem] if now.problem else []
    if not now.problem and not now.total("healthy"):
        found.append("a thread of it has died: its log has the cause, restart it")
    if lost := now.peers(ready=False):
        found.append(f"not ready: {', '.join(sorted(lost))}")
    if rows := now.total("quarantined_rows"):
        reasons = ", ".join(f"{reason}: {count:.0f}" for reason, count in now.by("quarantined_rows", "reason").items())
        found.append(f"{rows:.0f} quarantined rows{f' ({reasons})' if reasons else ''}")
    return f"{rank_of(url, now)}: {'; '.join(found)}" if found else ""


def is_bad(heading: str, cell: str) -> bool:
    ready, _, known = cell.partition("/")
    return {"health": cell != "ok", "peers": ready != known, "fail/s": cell not in ("-", "", "0.0")}.get(heading, False)


def shown(urls: Sequence[str], before: Sequence[Sample | None], now: Sequence[Sample]) -> Group:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(
            heading,
            justify="left" if heading in ("rank", "health", "engine") else "right",
            no_wrap=heading not in MIN_WIDTHS,
            overflow="fold",
            min_width=MIN_WIDTHS.get(heading),
        )
    for each in zip(urls, before, now, strict=True):
        cells = zip(HEADINGS, row(*each), strict=True)
        table.add_row(*(Text(printable(cell), style="red" if is_bad(heading, cell) else "") for heading, cell in cells))
    lines = filter(None, map(problems, urls, now))
    return Group(table, *(Text(printable(line), style="red", overflow="fold") for line in lines))


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--interval", default=2.0, type=Number(0.1, MAX_SECONDS), metavar="SECONDS", help="Time between two readings.")
@click.option(
    "--timeout", default=2.0, type=Number(0.1, MAX_SECONDS), metavar="SECONDS", help="How long a rank may take to answer."
)
@click.option("--once", is_flag=True, help="Read twice, print one table, and exit with status 1 if a rank is dead or silent.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@one_sentence
def top(*, urls: tuple[str, ...], interval: float, timeout: float, once: bool) -> None:
    """Show the requests, rates, health and problems of ranks, from the metrics that each serves at URL.

    `send` and `recv` are requests in progress, `p50` and `p99` the times of requests that ended in the interval, and
    `MB/s` the rate at which bytes are written to peers.
    """
    for url in urls:
        metrics_of(url)
    console, read_now = Console(), functools.partial(read, timeout_s=timeout)
    with ThreadPoolExecutor(min(len(urls), 32)) as pool:
        before = list(pool.map(read_now, urls))
        table = shown(urls, [None] * len(urls), before)
        with Live(table, console=console, auto_refresh=False, transient=once) as live:
            while True:
                time.sleep(interval)
                now = list(pool.map(read_now, urls))
                table, before = shown(urls, before, now), now
                if once:
                    break
                if console.is_terminal:
                    live.update(table, refresh=True)
                else:  # rich would print the last one only
                    console.print(table)
    console.print(table)
    sys.exit(any(sample.problem or not sample.total("healthy") for sample in now))
