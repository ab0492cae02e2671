"""The command `disagg-bench`."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
import typing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from disagg.commands.bench import compare as comparing
from disagg.commands.bench.driver import run
from disagg.commands.bench.environment import Environment, cautions
from disagg.commands.bench.fleet import Progress
from disagg.commands.bench.report import Row, title
from disagg.commands.bench.results import Files, Results, print_rows, results_to
from disagg.commands.bench.timelines import CaseRun, RankRun
from disagg.commands.cases import options
from disagg.commands.cases.arrivals import TOGETHER, Arrivals, Kind, generated, read_trace
from disagg.commands.cases.instructions import Fault
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.shell.errors import one_sentence
from disagg.commands.shell.numbers import MAX_SECONDS, Number
from disagg.core.errors import ConfigError

EPILOG = """\b
Examples:
  disagg-bench --backend nixl --model llama-3-8b --layers 8 --tokens 4096 \\
      --prefill tp=4,page=16 --decode tp=2,page=64
  disagg-bench --backend mooncake --model ./config.json --tokens 2048 \\
      --prefill tp=2 --decode tp=1 --requests 8 --concurrency 4 --json rows.json
  disagg-bench --backend nixl --model tiny --tokens 512 --prefill tp=2 --decode tp=1 \\
      --prefill tp=1 --decode tp=2  (two cases)
  disagg-bench --backend nixl,mooncake --model llama-3-8b --layers 4 --tokens 1024,4096 \\
      --page 8,16 --run-pages 1,16 --prefill tp=2 --decode tp=1          (sixteen cases)
  disagg-bench --backend nixl --model tiny --tokens 512 --prefill tp=1 --decode tp=1 \\
      --connect tcp://10.0.0.1:7100 --connect tcp://10.0.0.2:7100
  disagg-bench --backend nixl --model tiny --tokens 512 --prefill tp=2 --decode tp=1 \\
      --requests 200 --concurrency 8 --arrivals poisson --rate 50
  disagg-bench --backend nixl --model tiny --trace examples/traces/sample.jsonl \\
      --concurrency 8 --prefill tp=2 --decode tp=1 --html report.html
  disagg-bench --backend cma --model tiny --tokens 16,256 --prefill tp=1 --decode tp=1 \\
      --requests 100 --latency --duration 10 --csv latency.csv
  disagg-bench --backend cma --model llama-3-8b --layers 8 --tokens 2048 \\
      --prefill kv=bfloat16 --decode page=64,kv=float8_e4m3fn            (converted in the copy)
  disagg-bench --compare before.json after.json --tolerance 0.05
"""


QUIET_S = 30.0
"""How long a case shows no progress in a log."""


class PlainProgress:
    def __init__(self) -> None:
        self._case, self._shown_at = "", 0.0

    def show(self, text: str) -> None:
        """Print the first step of each case, `case N of M, ...: step`, and one if nothing was printed for `QUIET_S`."""
        case, now = text.rpartition(": ")[0], time.monotonic()
        if case != self._case or now >= self._shown_at + QUIET_S:
            print(text, file=sys.stderr, flush=True)
            self._case, self._shown_at = case, now


@contextmanager
def progress_to(console: Console) -> Iterator[Progress]:
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield PlainProgress().show


def run_cases(
    cases: Sequence[Case], *, connect: Sequence[str] = (), console: Console | None = None, runs: list[CaseRun] | None = None
) -> Iterator[Row]:
    """The last run of each case is added to `runs`."""
    with progress_to(console or Console(stderr=True)) as progress:
        for number, case in enumerate(cases, 1):
            what = f"case {number} of {len(cases)}, {title(case)}: "
            last: deque[Sequence[RankRun]] = deque(maxlen=1)
            row = run(case, lambda text, what=what: progress(what + text), connect=connect, observe=last.append)  # type: ignore[misc]
            if runs is not None:
                runs.append((title(case), last.pop()))
            yield row


def compare_files(before: Path, after: Path, *, tolerance: float) -> bool:
    for path in (before, after):
        if not path.exists():
            raise ConfigError(f"compare: {path}: there is no such file")
    rows = comparing.read_rows(before)
    if not rows:
        raise ConfigError(f"compare: {before}: expected rows written by disagg-bench --json, found none")
    found = comparing.compare(rows, comparing.read_rows(after), tolerance=tolerance)
    comparing.show(found, Console(), names=(str(before), str(after)), tolerance=tolerance)
    return not any(each.regressions for each in found)


class Several(click.ParamType[Any]):
    """A comma-separated list. Each value makes cases."""

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self._kind = kind
        self.name = f"{kind.name}[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        parts = [str(value)] if os.path.exists(str(value)) else str(value).split(",")  # noqa: PTH110  (pathlib raises for long names)
        return tuple(self._kind.convert(part, param, ctx) for part in parts)


COUNTS = Several(click.IntRange(1))
SWEPT = ("backend", "model", "tokens", "requests", "concurrency", "run_pages")


def paced(settings: Mapping[str, Any], *, has_requests: bool) -> tuple[list[Arrivals], dict[str, Any]]:
    """The arrivals for each number of requests, and the other settings with the trace's requests and tokens. Raises
    `ConfigError` and `OSError`.
    """
    rest = dict(settings)
    kind, per_s, trace = rest.pop("arrivals"), rest.pop("per_s"), rest.pop("trace")
    if trace is None:
        return [generated(kind, requests=n, per_s=per_s, seed=rest["seed"]) for n in rest["requests"]], rest
    if kind != "together" or rest["tokens"] is not None:
        raise ConfigError("trace: expected neither --arrivals nor --tokens with it: the trace has both")
    found = [read_trace(trace, requests=n, per_s=per_s) for n in (rest["requests"] if has_requests else (None,))]
    rest |= {"requests": tuple(len(each.times_s) for each in found), "tokens": (max(max(each.tokens) for each in found),)}
    return found, rest


def cases_of(
    sides: Sequence[tuple[Side, Side]],
    pages: Sequence[int],
    settings: Mapping[str, Any],
    *,
    arrivals: Sequence[Arrivals] = (),
    **same: Any,
) -> list[Case]:
    """Every pair of sides, with every page size (none: the sides' own) and every combination of `SWEPT`. `arrivals`: for
    each number of requests.
    """
    paced_by = dict(zip(settings["requests"], arrivals, strict=True)) if arrivals else {}
    rest = {name: value for name, value in settings.items() if name not in SWEPT}
    cases = []
    for chosen in itertools.product(*(settings[name] for name in SWEPT)):
        for prefill, decode in sides:
            for page in pages or (None,):
                ours, theirs = (side if page is None else replace(side, page=page) for side in (prefill, decode))
                swept = dict(zip(SWEPT, chosen, strict=True))
                at = paced_by.get(swept["requests"], TOGETHER)
                swept["tokens"] = max(at.tokens, default=swept["tokens"])
                cases.append(Case(prefill=ours, decode=theirs, arrivals=at, **swept, **rest, **same))
    return cases


def parse_sides(prefill: Sequence[str], decode: Sequence[str]) -> list[tuple[Side, Side]]:
    if len(prefill) != len(decode):
        raise ConfigError(f"sides: expected as many --decode as --prefill, found {len(decode)} and {len(prefill)}")
    return [(Side.parse(ours), Side.parse(theirs)) for ours, theirs in zip(prefill, decode, strict=True)]


def check_options(settings: Mapping[str, Any], *, prefill: Sequence[str], connect: Sequence[str]) -> None:
    missing = [f"--{name}" for name in ("backend", "model", "tokens") if settings[name] is None]
    if missing or not prefill:
        raise ConfigError(f"options: expected {', '.join(missing or ['--prefill', '--decode'])} for a run, or --compare")
    if connect and settings["pack_below"] is not None:
        raise ConfigError("pack-below: running ranks keep the threshold they were started with; omit it with --connect")
    if connect and settings["devices"]:
        raise ConfigError("device-nic: running ranks keep the NICs they were started with; omit it with --connect")
    for name, unset in (("verify", "off"), ("transport", "auto"), ("device", "cpu")) if connect else ():
        if settings[name] != unset:
            raise ConfigError(f"{name}: running ranks keep what they were started with; omit it with --connect")


def check_latency(settings: Mapping[str, Any], prefills: Sequence[Side]) -> None:
    if max(settings["concurrency"]) > 1:
        raise ConfigError(
            f"latency: expected --concurrency 1, found {max(settings['concurrency'])}: requests would wait for others"
        )
    if wrong := next((side for side in prefills if side.dp > 1), None):
        raise ConfigError(f"latency: expected --prefill with dp=1, found {wrong}: its groups would send at the same time")


def check_connected(cases: Sequence[Case]) -> None:
    if len({(case.model, str(case.prefill), str(case.decode)) for case in cases}) > 1:
        raise ConfigError(f"connect: running ranks have one model and two sides, found {len(cases)} cases")


def measure(cases: Sequence[Case], results: Results, *, connect: Sequence[str], latency: bool) -> None:
    """Prints the rows even if a case fails."""
    about = Environment.here()
    try:
        for row in run_cases(cases, connect=connect, runs=results.runs):
            results.rows.append(msgspec.structs.replace(row, environment=about))
    finally:
        if results.rows:
            for sentence in () if connect else cautions(about, cases):
                print(f"note: {sentence}", file=sys.stderr, flush=True)
            print_rows(results.rows, latency=latency)


def exit_status(rows: Sequence[Row]) -> int:
    """Wrong bytes are worse than ranks that ended badly."""
    if not all(row.verified for row in rows):
        return 1
    return 3 if any(row.ending for row in rows) else 0


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.option(
    "--backend",
    type=Several(click.STRING),
    help="Engine (required for a run): cma, nixl, mooncake, nvlink, local, auto, or a third party's.",
)
@click.option("--model", type=Several(click.STRING), help=options.MODEL_HELP + " Required for a run.")
@click.option("--tokens", type=COUNTS, help="Tokens of each request (required for a run).")
@click.option(
    "--prefill", multiple=True, metavar="SIDE", help="The prefill side, such as tp=4,pp=2,page=16. Repeat for more cases."
)
@click.option(
    "--decode", multiple=True, metavar="SIDE", help="The decode side. Repeat as often as --prefill; they are paired in order."
)
@click.option("--requests", type=COUNTS, default="1", help="Requests per run.")
@click.option("--concurrency", type=COUNTS, default="1", help="Requests that each rank has in flight at a time.")
@click.option(
    "--arrivals",
    type=click.Choice(typing.get_args(Kind)),
    default="together",
    help="When requests arrive: as soon as the concurrency allows, at random, or 8 at a time at random.",
)
@click.option("--rate", "per_s", type=Number(0, min_open=True), help="Requests per second, over the whole run.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take times and lengths of requests from a file in Mooncake's JSONL format: timestamp (ms), input_length. "
    "--requests takes its first lines, --rate stretches its times.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Memory of the pools.")
@click.option(
    "--transport", type=click.Choice(["auto", "rdma", "tcp", "shm"]), default="auto", help="Transport that the engine may use."
)
@click.option(
    "--device-nic",
    "devices",
    multiple=True,
    metavar="NIC",
    help="A NIC that the engine of every rank may use, with the name that it has for `disagg prefill`. Repeat for several.",
)
@click.option(
    "--verify",
    type=click.Choice(["off", "full"]),
    default="off",
    help="The library's checksums. The benchmark always compares every byte itself.",
)
@options.pack_below
@options.layers
@options.kv_heads
@options.head_dim
@click.option("--chunk-tokens", type=click.IntRange(0), default=0, help="Tokens per chunk that is sent; 0: whole requests.")
@options.prefix_hit
@click.option("--page", "pages", type=COUNTS, default=(), show_default=False, help="Tokens per page; overrides the sides.")
@click.option("--run-pages", type=COUNTS, default="1", help="Length of the runs of consecutive page ids.")
@click.option("--warm-up", type=click.IntRange(0), default=1, help="Runs before the measured ones.")
@click.option("--repeat", type=click.IntRange(1), default=10, help="Measured runs of each case; the row shows the median.")
@click.option(
    "--duration",
    "duration_s",
    type=Number(0, MAX_SECONDS, min_open=True),
    metavar="SECONDS",
    help="Measure each case for this long, instead of --repeat.",
)
@click.option(
    "--latency",
    is_flag=True,
    help="Print the spread of the requests' latencies instead of rates: one request at a time, without --ceiling.",
)
@click.option("--ceiling/--no-ceiling", default=True, help="Also measure engine, system and memory alone, between runs.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the random page ids.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Number(1, MAX_SECONDS),
    default=120.0,
    help="Seconds that each step may take: the start of the ranks, their connection, each run, and their end.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as JSON.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as CSV.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the rows (png, svg or pdf).")
@click.option(
    "--timeline",
    "timeline_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every request of the last run of each case, by phase and rank, as a trace for Perfetto.",
)
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a report as one HTML file.")
@click.option(
    "--connect", multiple=True, metavar="ADDRESS", help="Driver address of a running rank. Repeat for all ranks of the case."
)
@click.option(
    "--tolerance",
    type=Number(0, 1),
    default=0.1,
    help="With --compare: the share by which a case may be worse.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="A.json B.json",
    help="Compare two files written by --json. Exit status 1 if a case of A is missing, wrong or slower in B, 2 if a file "
    "cannot be read.",
)
@click.option("--fault", type=click.Choice([fault.value for fault in Fault]), hidden=True, help="Inject a fault.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@one_sentence
def bench(
    *,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    pages: tuple[int, ...],
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
    html_file: Path | None,
    timeline_file: Path | None,
    connect: tuple[str, ...],
    fault: str | None,
    compare: tuple[Path, Path] | None,
    tolerance: float,
    latency: bool,
    **settings: Any,
) -> None:
    """Move requests between real prefill and decode ranks, compare every byte with an independent reference, and print
    one line per case. Options marked [,...] take comma-separated values; every combination is a case. The exit status
    is 0 if every byte of every case is correct, 1 if one is not or a case fails, 2 for invalid options, and 3 if all
    bytes are correct, but ranks did not end by themselves.
    """
    files = Files(json_file, plot_file, html_file, timeline_file, csv_file)
    if compare is not None:
        if any(files):
            raise ConfigError("compare: expected no file to write, which is for a run")
        sys.exit(0 if compare_files(*compare, tolerance=tolerance) else 1)
    logging.basicConfig(level=logging.ERROR)
    files.check()
    with results_to(files) as results:
        shape = options.shape_of(settings["model"], layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        settings["model"], layers = ((shape,), None) if shape else (settings["model"], layers)
        has_requests = click.get_current_context().get_parameter_source("requests") is ParameterSource.COMMANDLINE
        arrivals, settings = paced(settings, has_requests=has_requests)
        check_options(settings, prefill=prefill, connect=connect)
        sides = parse_sides(prefill, decode)
        if latency:
            check_latency(settings, [ours for ours, _ in sides])
            settings["ceiling"] = False
        same = {"num_layers": layers, "fault": Fault(fault) if fault else None}
        cases = cases_of(sides, pages, settings, arrivals=arrivals, **same)
        if connect:
            check_connected(cases)
        measure(cases, results, connect=connect, latency=latency)
    sys.exit(exit_status(results.rows))
