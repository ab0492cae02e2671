"""The command `python -m harness.fuzz`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from disagg.commands.shell.text import plain_table, show
from harness.conditions import conditions
from harness.fuzz.engines import introduce
from harness.fuzz.port import bombard, overload
from harness.fuzz.runs import SHARES, Bounds, Result, fuzz

ENGINES = ("nixl", "mooncake")


def main(arguments: list[str] | None = None) -> int:
    """Fuzz every target, then a live rank. Raises the first `Finding`. Returns 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.fuzz", description="Feed damaged inputs to everything that reads them"
    )
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="number of inputs of all decoders together")
    parser.add_argument("--port", type=int, default=10_000, metavar="N", help="number of inputs of a live control port")
    parser.add_argument("--costly", type=int, default=100, metavar="N", help="number of costly messages to a live control port")
    parser.add_argument("--endpoints", type=int, default=500, metavar="N", help="number of endpoints for each live engine")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="read the one input that a finding named")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of processes")
    parser.add_argument("--max-grown", type=float, default=Bounds.grown_mib, metavar="MIB", help="bound on growth of memory")
    parser.add_argument(
        "--max-silence", type=float, default=Bounds.silence_s, metavar="S", help="bound on a live rank's silence"
    )
    parser.add_argument("--crashes-in", type=Path, metavar="FOLDER", help="write the endpoints before each crash to FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args(arguments)
    if options.only:
        name, _, number = options.only.partition(":")
        fuzz(name, [int(number)], seed=options.seed)
        return 0
    about, results = conditions(), _decoders(options)
    for attack in _attacks(options):
        results.append(attack())
    _print(results)
    if options.json:
        report = {**about, "seed": options.seed, "targets": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    bounds = Bounds(grown_mib=options.max_grown, silence_s=options.max_silence)
    exceeded = [sentence for result in results for sentence in bounds.exceeded(result)]
    sys.stdout.writelines(f"{sentence}\n" for sentence in exceeded)
    return 1 if exceeded else 0


def _decoders(options: argparse.Namespace) -> list[Result]:
    """Feed the decoders, in processes of their own."""
    if not options.inputs:
        return []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        counts = {name: range(int(options.inputs * share)) for name, share in SHARES.items()}
        jobs = [pool.submit(fuzz, name, numbers, seed=options.seed) for name, numbers in counts.items()]
        return [job.result() for job in jobs]


def _attacks(options: argparse.Namespace) -> list[Callable[[], Result]]:
    """The attacks on live ranks, without those of no inputs."""
    attacks: list[tuple[int, Callable[[], Result]]] = [
        (options.port, partial(bombard, options.port, seed=options.seed)),
        (options.costly, partial(overload, options.costly, engine="nixl", seed=options.seed)),
    ]
    for engine in ENGINES:
        attack = partial(introduce, options.endpoints, engine=engine, seed=options.seed, crashes_in=options.crashes_in)
        attacks.append((options.endpoints, attack))
    return [attack for inputs, attack in attacks if inputs]


def _print(results: list[Result]) -> None:
    """A table of the results."""
    columns = ("inputs", "accepted", "seconds", "slowest ms", "grown MiB", "silence ms", "crashes")
    lines = [
        (
            r.target,
            *(f"{r.inputs}", f"{r.accepted}", f"{r.seconds:.1f}", f"{r.slowest_ms:.1f}", f"{r.grown_mib:.1f}"),
            *(f"{r.silence_ms:.1f}", f"{r.crashes}"),
        )
        for r in results
    ]
    show(plain_table(("target", *columns), lines, right=columns), Console())
