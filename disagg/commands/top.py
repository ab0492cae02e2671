"""`disagg top`: a live table of ranks, from their metrics."""

from __future__ import annotations

import functools
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.commands.shell.errors import one_sentence
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError

EPILOG = """\b
Examples, for ranks with --metrics-port:
  disagg top http://127.0.0.1:9400 http://127.0.0.1:9401
  disagg top --once prefill-0:9400 decode-0:9400
"""
HEADINGS = (
    "rank",
    "engine",
    "health",
    "peers",
    "sending",
    "receiving",
    "ok/s",
    "failed/s",
    "p50",
    "p99",
    "written/s",
    "quarantined",
)
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Sample:
    """One rank's metrics at one moment: `values` by name and labels, or the `problem` with reading them."""

    at: float
    values: Mapping[tuple[str, Labels], float]
    problem: str = ""

    def total(self, name: str, **labels: str) -> float:
        """The sum of `disagg_NAME` over all samples that have these labels."""
        wanted = labels.items()
        return sum(value for (found, has), value in self.values.items() if found == f"disagg_{name}" and wanted <= has)

    def label(self, name: str, label: str) -> str:
        """A label of the first sample of `disagg_NAME`."""
        return next((dict(labels).get(label, "") for found, labels in self.values if found == f"disagg_{name}"), "")

    def buckets(self) -> list[tuple[float, float]]:
        """The upper bounds in seconds of the successful requests' durations, and how many requests took at most as long."""
        counts: dict[float, float] = {}
        for (found, labels), value in self.values.items():
            if found == "disagg_request_seconds_bucket" and ("outcome", "ok") in labels:
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return sorted(counts.items())


def metrics_of(url: str) -> str:
    """The address of a rank's metrics, from `HOST:PORT` or its server's address. Raises `ConfigError` for another scheme."""
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"url: expected http://HOST:PORT or HOST:PORT, found {url!r}")
    return address if address.endswith("/metrics") else f"{address}/metrics"


def read(url: str, *, timeout_s: float) -> Sample:
    """Read a rank's metrics now. If that fails, or takes longer than `timeout_s`, the sample says why."""
    try:
        with urllib.request.urlopen(metrics_of(url), timeout=timeout_s) as answer:  # noqa: S310 - what the caller names
            text = answer.read().decode()
        values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Sample(time.monotonic(), {}, str(reason))
    return Sample(time.monotonic(), values, "" if values else "no metrics")


def quantile(before: Sequence[tuple[float, float]], now: Sequence[tuple[float, float]], share: float) -> float | None:
    """The duration in seconds that `share` of the requests between two histograms did not exceed, by interpolation within a
    bucket; `None` without requests.
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


def row(url: str, before: Sample | None, now: Sample) -> tuple[str, ...]:
    """The cells of one rank. Rates are those since `before`; without it, the totals since the rank's start are averaged over
    nothing and shown as a dash.
    """
    if now.problem:
        return (url, "", now.problem, *[""] * (len(HEADINGS) - 3))
    if before is not None and before.problem:
        before = None

    def rate(name: str, **labels: str) -> float | None:
        if before is None:
            return None
        return max(0.0, now.total(name, **labels) - before.total(name, **labels)) / max(now.at - before.at, 1e-6)

    ready = [value for (name, _), value in now.values.items() if name == "disagg_peer_ready"]
    histogram = [] if before is None else before.buckets()
    written = rate("transfer_bytes_total")
    name = now.label("build_info", "name") or url
    return (
        f"{name}/{now.label('build_info', 'rank')}",
        f"{now.label('build_info', 'backend')} {now.label('build_info', 'transport')}",
        "ok" if now.total("healthy") else "dead",
        f"{sum(ready):.0f}/{len(ready)}",
        f"{now.total('requests', direction='send'):.0f}",
        f"{now.total('requests', direction='receive'):.0f}",
        _number(rate("requests_ended_total", outcome="ok")),
        _number(rate("requests_ended_total", outcome="failed")),
        *(_milliseconds(quantile(histogram, now.buckets(), share)) for share in (0.5, 0.99)),
        "-" if written is None else size(written),
        f"{now.total('quarantined_rows'):.0f}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def table(rows: Sequence[tuple[str, ...]]) -> Table:
    """The rows, with what needs attention in colour."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if number < 3 else "right", no_wrap=number != 2)
    for cells in rows:
        bad = [
            (number == 2 and cell != "ok") or (number in (7, 11) and cell not in ("-", "", "0", "0.0"))
            for number, cell in enumerate(cells)
        ]
        shown.add_row(*(Text(cell, style="red" if is_bad else "") for cell, is_bad in zip(cells, bad, strict=True)))
    return shown


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--interval", default=2.0, type=click.FloatRange(min=0.1), metavar="SECONDS", help="Time between two readings.")
@click.option(
    "--timeout", default=2.0, type=click.FloatRange(min=0.1), metavar="SECONDS", help="How long a rank may take to answer."
)
@click.option("--once", is_flag=True, help="Read twice, print one table, and exit with status 1 if a rank is dead or silent.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@one_sentence
def top(*, urls: tuple[str, ...], interval: float, timeout: float, once: bool) -> None:
    """Show the requests, rates and health of ranks, from the metrics that each serves at URL."""
    for url in urls:
        metrics_of(url)
    console, read_now = Console(), functools.partial(read, timeout_s=timeout)
    with ThreadPoolExecutor(min(len(urls), 32)) as pool:
        before = list(pool.map(read_now, urls))
        shown = table([row(url, None, sample) for url, sample in zip(urls, before, strict=True)])
        with Live(shown, console=console, auto_refresh=False, transient=once) as live:
            while True:
                time.sleep(interval)
                now = list(pool.map(read_now, urls))
                rows = [row(*each) for each in zip(urls, before, now, strict=True)]
                before = now
                if once:
                    break
                live.update(table(rows), refresh=True)
    console.print(table(rows))
    sys.exit(any(cells[2] != "ok" for cells in rows))
