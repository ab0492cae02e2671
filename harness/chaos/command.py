"""The command `python -m harness.chaos`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from harness.chaos.controller import run


def main(arguments: list[str] | None = None) -> int:
    """Run chaos with each engine. Returns 0 if every run was good or, without fencing, if every run found wrong bytes."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos", description="Kill and restart ranks under load")
    parser.add_argument("--engine", action="append", metavar="NAME", help="nixl or mooncake; default: both")
    parser.add_argument("--transport", metavar="NAME", help="the engine's transport; default: tcp")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="number of kills")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the choices; timing still varies")
    parser.add_argument("--fencing", choices=("on", "off"), default="on", help="off: engines report unfinished work as over")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports to FILE")
    options = parser.parse_args(arguments)
    fencing = options.fencing == "on"
    reports = []
    for engine in options.engine or ["nixl", "mooncake"]:
        settings = {"rounds": options.rounds, "transport": options.transport}
        reports.append(run(engine, seed=options.seed, fencing=fencing, **settings))
        sys.stdout.write(f"{reports[-1]}\n\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    return 0 if all(report.good if fencing else report.wrong for report in reports) else 1
