"""The command `python -m harness.turns`."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import harness.turns
from harness.turns.run import Report, converse, shrink
from harness.turns.servers import Servers

ENGINES = ("vllm", "sglang")
OUT = Path("out")
"""Where the servers' logs are."""


def main(arguments: list[str] | None = None) -> int:
    """Hold conversations until enough answers are compared. Returns 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.turns", description=harness.turns.__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True, help="run this in the environment of the engine")
    parser.add_argument("--model", action="append", metavar="NAME", help="a case of the engine; default: all, in turn")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the first conversation; they count up")
    parser.add_argument("--answers", type=int, default=1000, metavar="N", help="compare at least N answers, over all cases")
    parser.add_argument("--only", metavar="TURN,...", help="ask the divided servers only these turns of one conversation")
    parser.add_argument("--keep-going", action="store_true", help="go on after a wrong answer; look for no shorter case")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the servers first
    module = importlib.import_module(f"harness.turns.{options.engine}")
    cases = module.CASES
    if unknown := set(options.model or ()) - set(cases):
        parser.error(f"--model: expected some of {', '.join(cases)}, found {', '.join(sorted(unknown))}")
    chosen = options.model or list(cases)
    only = None if options.only is None else [int(each) for each in options.only.split(",")]
    num_answers, num_wrong = -(-options.answers // len(chosen)), 0
    for name in chosen:
        if missing := module.missing(cases[name]):
            say(f"{options.engine} {name}: NOT RUN: {missing}")
            continue
        num_wrong += run_case(
            options.engine, name, seed=options.seed, num_answers=num_answers, only=only, keep_going=options.keep_going
        )
    return int(num_wrong > 0)


def run_case(
    engine: str, name: str, *, seed: int, num_answers: int, only: Collection[int] | None = None, keep_going: bool = False
) -> int:
    """Hold conversations with the servers of one case, and print a report. Returns how many conversations went wrong, and 1
    more if the servers have not reached what the case is for.
    """
    module, report, num_wrong, seeds = importlib.import_module(f"harness.turns.{engine}"), Report(), 0, itertools.count(seed)
    begun_s = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with output_to(OUT / f"turns-{engine}-{name}.log"):
            servers: Servers = module.start(module.CASES[name], folder, stack)
        ready_s = time.monotonic()
        while report.num_answers < num_answers and (keep_going or not num_wrong):
            now = next(seeds)
            failure = converse(servers, now, report, only=only)
            say(f"{engine} {name}: seed {now}, {report.num_answers} answers compared so far")
            if failure is not None:
                num_wrong += 1
                say(f"WRONG: {engine} {name}, {failure}")
                if failure.turn and not (only or keep_going):
                    failure = shrink(servers, failure, say)
                    say("\n".join(["the shortest case:", *(f"  {turn}" for turn in failure.asked), str(failure)]))
                numbers = ",".join(str(turn.number) for turn in failure.asked)
                say(f"repeat: python -m harness.turns --engine {engine} --model {name} --seed {now} --only {numbers}")
            if only is not None:
                break
        found = servers.counts()
        counts = ", ".join(f"{key} {value:g}" for key, value in found.items())
        if only is None and (missed := [name for name in servers.case.reached if not found[name]]):
            num_wrong += 1
            say(f"WRONG: {engine} {name}: the servers never reached what this case is for: {', '.join(missed)}")
        took = f"{ready_s - begun_s:.0f} s until the servers were ready, {time.monotonic() - ready_s:.0f} s"
        say(f"{engine} {name}: seeds {seed} to {next(seeds) - 1}, {num_wrong} conversations went wrong")
        say("".join(f"  {line}\n" for line in (report, counts, took) if line).rstrip())
    return num_wrong


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Let processes that are started meanwhile write to a file."""
    log.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for number, saved in enumerate(kept, 1):
            os.dup2(saved, number)
            os.close(saved)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
