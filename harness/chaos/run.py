"""One chaos run: a number of rounds with one engine, on one host or two."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from harness.chaos.controller import Chaos, RunEnded
from harness.chaos.load import GRACE_S
from harness.chaos.places import Hosts
from harness.chaos.report import Report
from harness.chaos.rounds import KINDS
from harness.rdma.link import RdmaLink

TRANSPORTS = {"nixl": "tcp", "mooncake": "tcp"}
REQUEST_S = 1.0
"""The longest mean time between two requests."""
UNFENCED_S = 30.0
"""Maximum time under load for wrong bytes to appear without fencing; it depends on the machine."""


def schedule(kinds: Sequence[str], rounds: int, *, seed: int) -> list[str]:
    """The kinds of the rounds: each once in a random order, then random ones by their weights."""
    rng = random.Random(f"{seed}:schedule")
    first = rng.sample(kinds, len(kinds))
    return [*first, *rng.choices(kinds, [KINDS[kind].weight for kind in kinds], k=rounds)][:rounds]


def run(
    engine: str,
    *,
    seed: int,
    rounds: int,
    kinds: Sequence[str] = ("kill",),
    hosts: int = 1,
    fencing: bool = True,
    transport: str | None = None,
    silence_s: float = 8.0,
    longest_s: float = 60.0,
    grace_s: float = GRACE_S,
    requests: int = 0,
    slow: float = 1.0,
    link: RdmaLink | None = None,
) -> Report:
    """Run once and return the report. Ends early once a rank has crashed, lost a thread or not started.

    `silence_s`: a rank that is silent for this long counts as lost. `longest_s`: the longest stop or cut of a random length.
    `grace_s`: how long rows may take to be released at the end. `requests`: how many are started at least, spread over the
    rounds. Deadlines and intervals are multiplied by `slow`. `link`: the devices of a run over RDMA, which stay; without one
    the run makes its own.
    """
    report = Report(
        engine,
        transport or TRANSPORTS.get(engine, "auto"),
        hosts,
        seed,
        rounds,
        "on" if fencing else "off",
    )
    report.may_quarantine = report.transport == "rdma" or any(KINDS[kind].may_quarantine for kind in kinds)
    between = Hosts() if hosts == 2 else None
    made: list[Hosts | RdmaLink] = [between] if between is not None else []
    if report.transport == "rdma" and link is None:
        link = RdmaLink(0)
        link.create()
        made.append(link)
    chaos = Chaos(
        report,
        hosts=between,
        link=link,
        silence_s=silence_s,
        longest_s=longest_s,
        grace_s=grace_s,
        slow=slow,
        may_post=hosts == 1 or not any(KINDS[kind].ends_ranks for kind in kinds),
    )
    began = time.monotonic()
    try:
        with suppress(RunEnded):
            chaos.start()
            chaos.load.running = True
            for kind in schedule(kinds, rounds, seed=seed):
                KINDS[kind].run(chaos)
                report.rounds_done += 1
                due = requests * report.rounds_done // rounds
                _await_requests(chaos, due, timeout_s=requests * REQUEST_S * slow)
                progress = (
                    f"{report.rounds_done} of {rounds} rounds, {report.requests} requests, {time.monotonic() - began:.0f} s"
                )
                sys.stderr.write(f"chaos: {progress}, the last: {kind}\n")
            if fencing:
                chaos.wait(0.5)
                chaos.finish()
            else:
                chaos.pump(lambda: bool(report.wrong), UNFENCED_S)
    finally:
        report.seconds = time.monotonic() - began
        chaos.complete_report()
        chaos.close()
        for each in made:
            each.close()
    if report.good:
        shutil.rmtree(chaos.folder)
        report.logs = ""
    return report


def _await_requests(chaos: Chaos, number: int, *, timeout_s: float) -> None:
    """Wait until that many requests were started in this run."""
    chaos.pump(lambda: chaos.report.requests >= number, timeout_s, f"fewer than {number} requests were started")
