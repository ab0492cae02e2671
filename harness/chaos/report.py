"""The result of a chaos run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.commands.shell.text import plain_table
from harness.tables import table_text


@dataclass
class Healing:
    """How long it took, in seconds, until all ranks were connected again after a kind of fault was over. `seconds` has each
    time in ascending order, so that several runs can be counted together.
    """

    times: int
    median: float
    p95: float
    max: float
    seconds: list[float]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Healing:
        """The figures of at least one time; `p95` by nearest rank."""
        ordered = sorted(seconds)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return cls(len(ordered), statistics.median(ordered), p95, ordered[-1], [round(one, 3) for one in ordered])


@dataclass
class Report:
    """What a run found. `returns` counts the requests that prefill received from decode.

    `contests` counts the ends of requests that two instances had reserved, `refusals` the reasons of those that failed.
    `relapses`: ranks that lost a peer again after all were connected. `cpu`: cores used by the ranks with many peers.
    `may_quarantine`: nothing proves that a peer is quiet after what is done here, so rows may stay quarantined.
    """

    engine: str
    transport: str
    hosts: int
    seed: int
    rounds: int
    fencing: str
    may_quarantine: bool = False
    seconds: float = 0.0
    requests: int = 0
    successes: int = 0
    returns: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    rounds_done: int = 0
    lost_packets: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    victims: list[str] = field(default_factory=list)
    healing: dict[str, Healing] = field(default_factory=dict)
    contests: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    cpu: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    relapses: list[str] = field(default_factory=list)
    quarantined: int = 0
    quarantined_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    missing_rows: int = 0
    dead_threads: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing was wrong, stuck or left over, and at least one request succeeded."""
        troubles = (self.wrong, self.stuck, self.unhealed, self.relapses, self.dead_threads, self.crashed)
        return (
            not any(troubles) and (self.may_quarantine or not self.quarantined) and not self.missing_rows and self.successes > 0
        )

    def __str__(self) -> str:
        where = "one host" if self.hosts == 1 else f"{self.hosts} hosts"
        rows = [
            ("engine", f"{self.engine} over {self.transport}, {where}, seed {self.seed}, fencing {self.fencing}"),
            ("rounds", f"{self.rounds_done} of {self.rounds} in {self.seconds:.0f} s{_tally(self.faults)}"),
            ("requests", f"{self.requests}; ends of ranks{_tally(self.outcomes)}"),
            ("received", f"{self.successes}, of them {self.returns} by prefill from decode"),
            *([("packets lost", str(self.lost_packets))] if self.lost_packets else []),
            ("wrong bytes", _counted(self.wrong, shown=5)),
            ("stuck requests", _counted(self.stuck, shown=5)),
            ("peers not reconnected", _counted(self.unhealed, shown=5)),
            ("peers lost again", _counted(self.relapses, shown=5)),
            ("quarantined", f"{self.quarantined} requests, {self.quarantined_rows} rows{_tally(self.reasons)}"),
            ("rows missing", str(self.missing_rows)),
            ("dead threads", _counted(self.dead_threads)),
            ("crashed ranks", _counted(self.crashed)),
            ("logs of ranks", "removed after success" if self.good else self.logs),
        ]
        if self.contests:
            rows.append(("contested requests", f"{self.contests.total()} ends{_tally(self.contests)}"))
            rows.append(("their refusals", f"{self.refusals.total()}{_tally(dict(self.refusals.most_common(8)))}"))
        if self.cpu:
            rows.append(
                ("CPU with many peers", ", ".join(f"{share:.1%}" for share in self.cpu) + " of a core, without requests")
            )
        text = table_text(plain_table(rows[0], rows[1:], right=()))
        return f"{text}\n\n{self._healing_text()}" if self.healing else text

    def _healing_text(self) -> str:
        columns = ("connected again after", "times", "median s", "p95 s", "max s")
        lines = [
            (kind, str(found.times), *(f"{seconds:.2f}" for seconds in (found.median, found.p95, found.max)))
            for kind, found in self.healing.items()
        ]
        return table_text(plain_table(columns, lines, right=columns[1:]))


def _tally(counts: dict[str, int]) -> str:
    """One line for each key, after its count."""
    return "".join(f"\n{count} x {what}" for what, count in sorted(counts.items()))


def _counted(items: list[str], *, shown: int | None = None) -> str:
    """The number of items, then the first `shown` of them, one a line."""
    return str(len(items)) + "".join(f"\n{item}" for item in items[:shown])
