"""The command `python -m harness.chaos`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import msgspec

from harness.chaos.places import missing_for_places, missing_for_resets
from harness.chaos.rounds import KINDS, OVER_RDMA
from harness.chaos.run import run


def main(arguments: list[str] | None = None) -> int:
    """Run chaos with each engine. Returns 0 if every run was good or, without fencing, if every run found wrong bytes."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos", description="Attack ranks under load and check every byte")
    parser.add_argument("--engine", action="append", metavar="NAME", help="nixl, mooncake or cma; default: the first two")
    parser.add_argument(
        "--transport", metavar="NAME", help="the engine's transport; default: tcp; rdma makes devices, see harness.rdma"
    )
    parser.add_argument(
        "--kinds",
        metavar="KIND,...",
        help=f"kinds of rounds: {', '.join(KINDS)}; default: all that can run here but reset-all and reopen",
    )
    parser.add_argument(
        "--hosts", type=int, choices=(1, 2), help="run on one host or on two only; default: what the kinds need"
    )
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="number of rounds of each run")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="start at least N requests, spread over the rounds"
    )
    parser.add_argument(
        "--slow", type=float, default=1.0, metavar="X", help="multiply deadlines and intervals by X, on a slow machine"
    )
    parser.add_argument("--silence", type=float, default=8.0, metavar="S", help="a rank that is silent for S seconds is lost")
    parser.add_argument("--longest", type=float, default=60.0, metavar="S", help="the longest stop or cut, in seconds")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the choices; timing still varies")
    parser.add_argument("--fencing", choices=("on", "off"), default="on", help="off: engines report unfinished work as over")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports to FILE")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends ranks and removes namespaces first
    fencing = options.fencing == "on"
    reports = []
    for engine in options.engine or ["nixl", "mooncake"]:
        for hosts, kinds in _runs(parser, options).items():
            report = run(
                engine,
                seed=options.seed,
                rounds=options.rounds,
                kinds=kinds,
                hosts=hosts,
                fencing=fencing,
                transport=options.transport,
                silence_s=options.silence,
                longest_s=options.longest,
                requests=options.requests,
                slow=options.slow,
            )
            reports.append(report)
            sys.stdout.write(f"{report}\n\n")
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(msgspec.to_builtins(reports), indent=1) + "\n")
    return 0 if all(report.good if fencing else report.wrong for report in reports) else 1


def _runs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[int, list[str]]:
    """The kinds of each run, by its number of hosts. Kinds that can run on one host or two alone cause no second run."""
    rdma = options.transport == "rdma"
    by_itself = (name for name, kind in KINDS.items() if not kind.needs_link and not kind.may_quarantine)
    wanted = list(OVER_RDMA if rdma else by_itself)
    if options.kinds:
        wanted = options.kinds.split(",")
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        parser.error(f"--kinds: expected some of {', '.join(KINDS)}, found {', '.join(unknown)}")
    if not rdma and (needing := [kind for kind in wanted if KINDS[kind].needs_link]):
        parser.error(f"{', '.join(needing)}: expected --transport rdma")
    needing = [kind for kind in wanted if KINDS[kind].needs_places]
    if (needing or options.hosts == 2) and (missing := missing_for_places()):
        if options.kinds or options.hosts == 2:
            parser.error(f"{', '.join(needing) or '--hosts 2'}: expected {missing}")
        sys.stderr.write(f"chaos: skips {', '.join(needing)}: they need {missing}\n")
        wanted = [kind for kind in wanted if kind not in needing]
    resetting = [kind for kind in wanted if KINDS[kind].needs_resets]
    if resetting and (missing := missing_for_resets()):
        if options.kinds:
            parser.error(f"{', '.join(resetting)}: expected {missing}")
        sys.stderr.write(f"chaos: skips {', '.join(resetting)}: they need {missing}\n")
        wanted = [kind for kind in wanted if kind not in resetting]
    runs = {hosts: [kind for kind in wanted if hosts in KINDS[kind].hosts] for hosts in (1, 2)}
    if options.hosts:
        runs = {options.hosts: runs[options.hosts]}
    elif not any(1 not in KINDS[kind].hosts for kind in wanted):
        del runs[2]
    elif not any(2 not in KINDS[kind].hosts for kind in wanted):
        del runs[1]
    if not all(runs.values()):
        parser.error(f"--kinds: none of {', '.join(wanted)} runs on {options.hosts} hosts")
    return runs
