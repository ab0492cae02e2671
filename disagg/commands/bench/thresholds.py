"""`disagg-bench --thresholds`: the piece size below which packing is faster, for one engine and transport.

Every piece size is a page size: one prefill rank sends the same bytes in random pages to one decode rank, once piece by piece
and once packed. Time is that of whole requests, so it includes binding, packing, unpacking and the protocol's messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from disagg.commands.bench.report import Row
from disagg.commands.cases.costs import ALWAYS, Costs, Measured, fitted_costs, fitted_phases
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.explain.engine import engine_of_row
from disagg.commands.shell.text import counted, indented_json, plain_table, show, size
from disagg.core.errors import ConfigError, DisaggError
from disagg.runtime.paths import MIN_PIECES

MODEL = "tiny"
TOKEN_NBYTES = 512
"""Bytes of a token in each of the model's tensors, which are contiguous: a page of N tokens is a piece of N times as many."""
TENSORS = 8
"""K and V of each of the model's layers: pieces per page."""
TOKENS = 8192
PAGES = tuple(1 << power for power in range(10))
"""Page sizes by default: pieces of 512 B to 256 KiB."""
SHORTER = 8
"""A calibration also measures requests of this part of the length."""
SAME = ("device", "transport", "devices", "warm_up", "repeat", "seed", "timeout_s")
OPTIONS = {*SAME, "thresholds_only", "calibrate_file", "backend", "tokens", "pages", "json_file", "plot_file", "debug"}
"""The options that go with `--thresholds`."""


def threshold_cases(backend: str, pages: Sequence[int], settings: Mapping[str, Any], *, share: int = 1) -> list[Case]:
    """Two cases for each piece size: sent directly, and packed; of a request's tokens, one in `share`. Raises `ConfigError` for
    pages that are too long.
    """
    tokens = max(1, (settings["tokens"] or TOKENS) // share)
    longest = tokens * TENSORS // MIN_PIECES
    if pages and max(pages) > longest:
        raise ConfigError(f"page: expected at most {longest} tokens for a request of {tokens}, found {max(pages)}")
    same = {name: settings[name] for name in SAME}
    return [
        Case(
            backend=backend,
            model=MODEL,
            tokens=tokens,
            prefill=Side(page=page),
            decode=Side(page=page),
            pack_below=pack_below,
            ceiling=False,
            **same,
        )
        for page in sorted(pages or (page for page in PAGES if page <= longest))
        for pack_below in (0, ALWAYS)
    ]


def single_length(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with one number of tokens, or none."""
    return {**settings, "tokens": (settings["tokens"] or (None,))[0]}


@dataclass(frozen=True)
class PathSpeeds:
    """GB/s (1e9) of the same bytes in pieces of `nbytes`, sent directly and packed."""

    nbytes: int
    direct: float
    packed: float


def path_speeds(rows: Sequence[Row]) -> list[PathSpeeds]:
    """The speeds by ascending piece size, from the rows of `threshold_cases`.

    Raises `DisaggError` if a row is not verified, or its bytes did not take the path they should.
    """
    gbps: dict[int, dict[str, float]] = {}
    for row in rows:
        expected = "packed" if row.pack_below else "direct"
        if not row.verified or row.way != expected:
            problem = row.problem or f"expected all bytes to be sent {expected}, found {row.ways}"
            raise DisaggError(f"thresholds, {row.backend} over {row.transport}: {problem}")
        gbps.setdefault(Side.parse(row.prefill).page * TOKEN_NBYTES, {})[expected] = row.gbps
    return [PathSpeeds(nbytes, **found) for nbytes, found in sorted(gbps.items())]


def break_even(speeds: Sequence[PathSpeeds]) -> float | None:
    """The piece size in bytes from which on sending directly is at least as fast; `None` if the largest is faster packed.

    Between two measured sizes the ratio of the speeds is taken to be a power of the size. The result is the smallest size
    measured if packing is faster at none.
    """
    slower = [number for number, each in enumerate(speeds) if each.direct < each.packed]
    if not slower:
        return float(speeds[0].nbytes)
    if slower[-1] + 1 == len(speeds):
        return None
    before, after = speeds[slower[-1]], speeds[slower[-1] + 1]
    deficit, lead = math.log(before.packed / before.direct), math.log(after.direct / after.packed)
    return float(before.nbytes * (after.nbytes / before.nbytes) ** (deficit / (deficit + lead)))


def fitted(rows: Sequence[Row], shorter: Sequence[Row]) -> Costs:
    """The costs that fit the rows of `threshold_cases`. With shorter requests, what each phase costs per request, per piece and
    per byte can be told apart. Raises `ConfigError` where nothing fits.
    """
    path_speeds(shorter)
    costs = fitted_costs([(each.nbytes, each.direct, each.packed) for each in path_speeds(rows)])
    phases = fitted_phases([Measured(row.way, row.pieces, row.bytes, row.phases) for row in (*rows, *shorter)])
    return msgspec.structs.replace(costs, phases=phases, engine=engine_of_row(rows[0].backend, rows[0].transport))


def write_costs(file: Path, costs: Costs) -> None:
    """Write costs as JSON, and print a summary."""
    file.write_bytes(indented_json(costs))
    print(f"costs: {1e6 * costs.piece_s:.3g} us per piece, {costs.gbps:.3g} GB/s direct, {costs.packed_gbps:.3g} GB/s packed")


def show_thresholds(rows: Sequence[Row], console: Console) -> None:
    """Print a table of the speeds by piece size, and the break-even size, for the engine and transport of `rows`."""
    speeds = path_speeds(rows)
    columns = ("piece", "direct GB/s", "packed GB/s")
    lines = [(size(each.nbytes), f"{each.direct:.2f}", f"{each.packed:.2f}") for each in speeds]
    first = rows[0]
    print(
        f"{first.backend} over {first.transport}, {size(first.bytes)} per run, median of {counted(first.repeat, 'run')}",
        file=console.file,
    )
    show(plain_table(columns, lines, right=columns), console)
    print(f"break-even: {_in_words(speeds)}", file=console.file)


def _in_words(speeds: Sequence[PathSpeeds]) -> str:
    if all(each.direct >= each.packed for each in speeds):
        return f"below {size(speeds[0].nbytes)}: packing is faster at none of these sizes"
    found = break_even(speeds)
    if found is None:
        return f"above {size(speeds[-1].nbytes)}: packing is still faster at the largest of these sizes"
    return f"{size(found)}: packing is faster below"
