"""The result of a chaos run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """What a run found. `returns` counts the requests that prefill received from decode."""

    engine: str
    transport: str
    seed: int
    rounds: int
    fencing: str
    seconds: float = 0.0
    requests: int = 0
    successes: int = 0
    returns: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    victims: list[str] = field(default_factory=list)
    heal_s: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)
    quarantined: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    missing_rows: int = 0
    dead_threads: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing was wrong, stuck or left over, and at least one request succeeded."""
        troubles = (self.wrong, self.stuck, self.unhealed, self.dead_threads, self.crashed)
        return not any(troubles) and not self.quarantined and not self.missing_rows and self.successes > 0

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        killed = ", ".join(f"{count} {what}" for what, count in sorted(self.kills.items()))
        rows = (
            ("engine", f"{self.engine} over {self.transport}, seed {self.seed}, fencing {self.fencing}"),
            ("rounds", f"{self.rounds} in {self.seconds:.0f} s: {killed}"),
            ("requests", f"{self.requests}; ends of ranks: {ended}"),
            ("received", f"{self.successes}, of them {self.returns} by prefill from decode"),
            ("reconnected", f"median {self.heal_s.get('median', 0):.2f} s, at most {self.heal_s.get('max', 0):.2f} s"),
            ("wrong bytes", _counted(self.wrong, shown=5)),
            ("stuck requests", _counted(self.stuck, shown=5)),
            ("peers not reconnected", _counted(self.unhealed, shown=5)),
            ("quarantined", f"{self.quarantined} requests" + "".join(f"\n  {n} x {r}" for r, n in self.reasons.items())),
            ("rows missing", str(self.missing_rows)),
            ("dead threads", _counted(self.dead_threads)),
            ("crashed ranks", _counted(self.crashed)),
            ("logs of ranks", "removed after success" if self.good else self.logs),
        )
        return "\n".join(f"{name:<22} {value}" for name, value in rows)


def _counted(items: list[str], *, shown: int | None = None) -> str:
    """The number of items, then the first `shown` of them, one a line."""
    return str(len(items)) + "".join(f"\n  {item}" for item in items[:shown])
