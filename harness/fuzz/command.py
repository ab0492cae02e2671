"""The command `python -m harness.fuzz`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from harness.fuzz.port import bombard
from harness.fuzz.runs import SHARES, fuzz


def main(arguments: list[str] | None = None) -> int:
    """Fuzz every target and the control port. Raises the first `Finding`."""
    parser = argparse.ArgumentParser(prog="python -m harness.fuzz", description="Feed damaged inputs to every decoder")
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="number of inputs of all targets together")
    parser.add_argument("--port", type=int, default=10_000, metavar="N", help="number of inputs of a live control port")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="read the one input that a finding named")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args(arguments)
    if options.only:
        name, _, number = options.only.partition(":")
        fuzz(name, [int(number)], seed=options.seed)
        return 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        counts = {name: range(int(options.inputs * share)) for name, share in SHARES.items()}
        jobs = [pool.submit(fuzz, name, numbers, seed=options.seed) for name, numbers in counts.items()]
        results = [job.result() for job in jobs]
    if options.port:
        results.append(bombard(options.port, seed=options.seed))
    sys.stdout.write(f"{'target':<10}{'inputs':>9}{'accepted':>10}{'seconds':>9}{'slowest ms':>12}{'grown MiB':>11}\n")
    for r in results:
        sys.stdout.write(
            f"{r.target:<10}{r.inputs:>9}{r.accepted:>10}{r.seconds:>9.1f}{r.slowest_ms:>12.1f}{r.grown_mib:>11.1f}\n"
        )
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "targets": [asdict(r) for r in results]}, indent=1) + "\n")
    return 0
