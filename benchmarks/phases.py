"""The phases of six cases, predicted and measured on one machine: `python -m benchmarks.phases --json FILE`.

For each engine the costs of the phases are fitted first, as `disagg-bench --calibrate` does, from requests between two ranks of
a small model. Then six cases of other models, page sizes and ranks run, and are compared with what these costs predict. Some
engines move bytes while a copy is posted, others afterwards, so `post` and `wire` are compared as one. Phases below a tenth
of the whole are too short to tell. `--costs FILE` writes the costs, as `disagg explain` has them. Takes two minutes for each
engine; run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from disagg.commands.bench.command import run_cases, with_prediction
from disagg.commands.bench.report import Row
from disagg.commands.bench.thresholds import SHORTER, fitted, threshold_cases
from disagg.commands.cases.costs import Costs
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.shell.text import indented_json, plain_table, show
from harness.conditions import conditions

ENGINES = {"cma": "shm", "nixl": "tcp", "mooncake": "tcp", "local": "auto"}
"""The engines by default, and their transports."""
SETTINGS = {"tokens": None, "device": "cpu", "devices": (), "warm_up": 1, "repeat": 10, "seed": 0, "timeout_s": 120.0}
CASES: tuple[tuple[str, int, int, str, str], ...] = (
    ("tiny", 4, 4096, "tp=1,page=16", "tp=1,page=16"),
    ("llama-3-8b", 4, 1024, "tp=1,page=64", "tp=1,page=16"),
    ("llama-3-8b", 8, 2048, "tp=1,page=16,layout=hnd", "tp=1,page=16,layout=hnd"),
    ("deepseek-v3.2", 8, 4096, "tp=1,page=64", "tp=1,page=64"),
    ("qwen3-next-80b", 8, 2048, "tp=1,page=16", "tp=1,page=16"),
    ("llama-3-8b", 4, 2048, "tp=2,page=16", "tp=1,page=32"),
)
"""Model, layers, tokens, prefill and decode. The last has three ranks; the costs assume a core for each."""
SHARE = 0.1
"""A phase that takes less of the whole is not compared."""


class Compared(NamedTuple):
    """One phase of a case in seconds, and its share of the measured whole."""

    phase: str
    predicted: float
    measured: float
    share: float

    @property
    def error(self) -> float:
        """How far the prediction is off, relative to the measurement."""
        return self.predicted / self.measured - 1


def compared(row: Row) -> Iterator[Compared]:
    """The phases that are long enough, and the whole."""
    measured, predicted = joined(row.phases), joined(row.predicted)
    whole = sum(measured.values())
    for phase, seconds in measured.items():
        if seconds >= SHARE * whole:
            yield Compared(phase, predicted[phase], seconds, seconds / whole)
    yield Compared("whole", sum(predicted.values()), whole, 1.0)


def joined(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases with `post` and `wire` as one."""
    rest = {name: seconds for name, seconds in phases.items() if name not in ("post", "wire")}
    return {**rest, "post and wire": phases["post"] + phases["wire"]}


def cases(backend: str, transport: str) -> list[Case]:
    """The six cases over one engine."""
    return [
        Case(
            backend=backend,
            transport=transport,
            model=model,
            num_layers=layers,
            tokens=tokens,
            prefill=Side.parse(prefill),
            decode=Side.parse(decode),
            ceiling=False,
            warm_up=2,
            repeat=20,
        )
        for model, layers, tokens, prefill, decode in CASES
    ]


def measure(backend: str, transport: str) -> tuple[Costs, list[Row]]:
    """The costs of an engine, and the rows of the six cases with what these predict."""
    settings = {**SETTINGS, "transport": transport}
    whole, shorter = (list(run_cases(threshold_cases(backend, (), settings, share=share))) for share in (1, SHORTER))
    costs, chosen = fitted(whole, shorter), cases(backend, transport)
    return costs, [with_prediction(row, case, costs) for case, row in zip(chosen, run_cases(chosen), strict=True)]


def report(rows: Sequence[Row]) -> None:
    """Print the phases of each case, predicted and measured."""
    columns = ("case", "way", "phase", "predicted ms", "measured ms", "error")
    lines = []
    for row in rows:
        for each in compared(row):
            figures = (f"{1e3 * each.predicted:.2f}", f"{1e3 * each.measured:.2f}", f"{each.error:+.0%}")
            lines.append((f"{row.model}, {row.prefill} -> {row.decode}", row.way, each.phase, *figures))
    show(plain_table(columns, lines, right=columns[3:]), Console())


def main() -> int:
    """Measure every engine."""
    parser = argparse.ArgumentParser(description="The phases of requests, predicted and measured")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--costs", type=Path)
    options = parser.parse_args()
    about, found, results = conditions(), dict[str, Costs](), list[dict[str, Any]]()
    for engine in options.engines:
        costs, rows = measure(engine, ENGINES[engine])
        found[f"{engine} {rows[0].transport.split(' ')[0]}"] = costs
        print(f"{engine} over {rows[0].transport}")
        report(rows)
        cases_of = [
            {
                **{name: getattr(row, name) for name in ("model", "tokens", "prefill", "decode", "way", "bytes", "pieces")},
                "predicted_s": row.predicted,
                "measured_s": row.phases,
                "errors": {each.phase: round(each.error, 3) for each in compared(row)},
            }
            for row in rows
        ]
        results.append(
            {"engine": engine, "transport": rows[0].transport, "costs": msgspec.to_builtins(costs), "cases": cases_of}
        )
        if not all(row.verified for row in rows):
            return 1
    if options.json:
        options.json.write_bytes(indented_json({**about, "results": results}))
    if options.costs:
        options.costs.write_bytes(indented_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
