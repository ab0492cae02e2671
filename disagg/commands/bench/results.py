"""Where the results of a run go: tables on standard output, and files."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from disagg.commands.bench.html import write_html
from disagg.commands.bench.plot import check_plot, plot
from disagg.commands.bench.report import (
    LEGEND,
    PACED_TITLE,
    PHASES_TITLE,
    Row,
    latency_table,
    paced_table,
    phases_table,
    problems_of,
    table,
    to_csv,
    to_json,
)
from disagg.commands.bench.timelines import CaseRun, write_timeline
from disagg.commands.shell.files import check_files
from disagg.commands.shell.text import show
from disagg.core.errors import ConfigError


@dataclass(frozen=True)
class Results:
    rows: list[Row] = field(default_factory=list)
    runs: list[CaseRun] = field(default_factory=list)


class Files(NamedTuple):
    json: Path | None
    plot: Path | None
    html: Path | None
    timeline: Path | None
    csv: Path | None = None

    def check(self) -> None:
        for picture in filter(None, (self.plot, self.html and self.html.with_suffix(".svg"))):
            check_plot(picture)
        if any(str(file) == "-" for file in self):
            raise ConfigError("-: expected a file: standard output has the table")
        check_files(self)

    def write(self, results: Results) -> None:
        """Writes the others even if one cannot be written. Raises `OSError`."""
        with ExitStack() as all_of_them:
            if self.timeline is not None:
                all_of_them.callback(write_timeline, self.timeline, results.runs)
            if self.html is not None:
                all_of_them.callback(write_html, results.rows, self.html)
            if self.plot is not None:
                all_of_them.callback(plot, results.rows, self.plot)
            if self.csv is not None:
                all_of_them.callback(self.csv.write_text, to_csv(results.rows), encoding="utf-8")
            if self.json is not None:
                all_of_them.callback(self.json.write_bytes, to_json(results.rows))


@contextmanager
def results_to(files: Files) -> Iterator[Results]:
    """Written however the block ends, also by SIGTERM: a failed case does not cost those before it. In the main thread."""
    results = Results()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield results
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # no file is cut off
        try:
            if results.rows:
                files.write(results)
        finally:
            signal.signal(signal.SIGTERM, before)


def print_rows(rows: Sequence[Row], *, latency: bool = False) -> None:
    console = Console()
    show(latency_table(rows) if latency else table(rows), console)
    if not latency:
        print(LEGEND, flush=True)
    if (phases := phases_table(rows)) is not None:
        console.print(f"\n{PHASES_TITLE}")
        show(phases, console)
    if (paced_rows := paced_table(rows)) is not None:
        console.print(f"\n{PACED_TITLE}")
        show(paced_rows, console)
    print_problems(rows)


def print_problems(rows: Sequence[Row]) -> None:
    for row in rows:
        for sentence in problems_of(row):
            print(sentence, file=sys.stderr)
