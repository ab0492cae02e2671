"""The machine that a case is measured on."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from disagg.commands.cases.workload import Case

BUSY = 0.3
"""The share of the cores that other programs may use without a warning."""


class Environment(msgspec.Struct, frozen=True):
    """`cores`: those that this process may use. `load`: mean running processes in the minute before the first case."""

    date: str
    host: str
    cpu: str
    cores: int
    kernel: str
    load: float

    @classmethod
    def here(cls) -> Environment:
        return cls(
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            host=platform.node(),
            cpu=cpu_name(),
            cores=len(os.sched_getaffinity(0)),
            kernel=platform.release(),
            load=round(os.getloadavg()[0], 2),
        )


def cpu_name() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found is not None else platform.machine()


def cautions(about: Environment, cases: Sequence[Case]) -> Iterator[str]:
    if about.load > BUSY * about.cores:
        yield f"the machine is busy: load {about.load:.1f} on {about.cores} cores before the first case. Figures vary with it"
    most = max((case.prefill.num_ranks + case.decode.num_ranks for case in cases if case.backend != "local"), default=0)
    if most > about.cores:
        yield f"{most} ranks share {about.cores} cores: their times include the wait for a core"
