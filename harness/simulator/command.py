"""The command `python -m harness.simulator`: runs random schedules."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from harness.simulator.connections import check_connections
from harness.simulator.schedules import random_simulation


def run_schedules(seeds: range | tuple[int, ...], *, pair: bool = False, kept: bool = False) -> tuple[int, int, int, int]:
    """Run the schedules of `seeds`: the number of steps, of ends, of successful ends, and of kept requests that were taken.

    Raises the first error, with a note of its seed and its virtual time.
    """
    num_steps = num_events = num_ok = num_taken = 0
    for seed in seeds:
        simulation = random_simulation(seed, pair=pair, kept=kept)
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"schedule {seed}, at {simulation.now:.3f} s")
            raise
        events = [event for host in simulation.hosts.values() for event in host.events.values()]
        num_steps += simulation.num_steps
        num_events += len(events)
        num_ok += sum(event.ok for event in events)
        num_taken += len(simulation.takers)
    return num_steps, num_events, num_ok, num_taken


def main(arguments: list[str] | None = None) -> int:
    """Run random schedules and print how many. Raises if one of them breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m harness.simulator", description="Run random schedules of the protocol")
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="number of schedules")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="number the schedules from S*1000000")
    parser.add_argument("--only", type=int, metavar="SEED", help="run the one schedule that a failure named")
    parser.add_argument("--pair", action="store_true", help="one sender, one receiver and one request in each schedule")
    parser.add_argument("--kept", action="store_true", help="every request is kept for whoever takes it first")
    parser.add_argument("--connections", action="store_true", help="simulate connections of instances instead of requests")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of processes")
    options = parser.parse_args(arguments)
    first = options.seed * 1_000_000
    seeds = range(first, first + options.schedules)
    if options.connections:
        problems = [problem for seed in seeds for problem in check_connections(seed)]
        sys.stdout.write("".join(f"{problem}\n" for problem in problems))
        sys.stdout.write(f"{len(seeds)} schedules of connections, {len(problems)} problems\n")
        return 1 if problems else 0
    parts = [seeds[i :: options.jobs] for i in range(options.jobs)] if options.only is None else [(options.only,)]
    run = functools.partial(run_schedules, pair=options.pair, kept=options.kept)
    began = time.perf_counter()
    if len(parts) == 1:
        sums = [run(parts[0])]
    else:
        with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as pool:
            sums = list(pool.map(run, parts))
    seconds = time.perf_counter() - began
    num_steps, num_events, num_ok, num_taken = (sum(column) for column in zip(*sums, strict=True))
    count = sum(len(part) for part in parts)
    ended = f"{num_ok} of {num_events} endings successful, {num_taken} kept requests taken"
    sys.stdout.write(f"{count} schedules, {num_steps} steps, {ended}; {count / seconds:.0f} schedules/s\n")
    return 0
