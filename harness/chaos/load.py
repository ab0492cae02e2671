"""The requests of a chaos run: starts random ones, and tracks which ranks have not reported their end."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.chaos.jobs import Job
from harness.chaos.processes import INSTANCES, Instance, RankProcess
from harness.chaos.report import Report

WINDOW = 8
"""Maximum number of requests in progress."""
DEADLINE_S = 4.0
GRACE_S = 30.0
"""How long after its deadline the end of a request may be reported, and how long rows may take to be released."""
INTERVAL_S = 0.004


@dataclass
class Waiting:
    """A request in progress: the ranks that have not reported its end, and the time by which they must."""

    job: Job
    ranks: set[RankProcess]
    late_at: float
    failed: bool = False


class Load:
    """Keeps up to `WINDOW` requests in progress while `running`, between the ranks of `processes`."""

    def __init__(self, rng: random.Random, report: Report, processes: Mapping[tuple[str, int], RankProcess]) -> None:
        self.running = False
        self.outcomes: Counter[str] = Counter()
        self._rng, self._report, self._processes = rng, report, processes
        self._waiting: dict[tuple[str, int], Waiting] = {}
        self._next_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether every request has ended on every rank."""
        return not self._waiting

    def step(self) -> None:
        """Start a request if one is due, and note every request that is late."""
        now = time.monotonic()
        if self.running and len(self._waiting) < WINDOW and now >= self._next_at:
            self._next_at = now + INTERVAL_S
            self._begin()
        for key in [key for key, waiting in self._waiting.items() if now > waiting.late_at]:
            silent = sorted(rank.name for rank in self._waiting.pop(key).ranks)
            self._report.stuck.append(f"{key[0]}#{key[1]} at {', '.join(silent)}")

    def ended(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Record the end of a request on one rank. Aborts the request on its other ranks if this rank skipped it."""
        key = message["request_id"], message["attempt"]
        outcome = message["outcome"]
        self.outcomes[f"{message['direction']} {outcome}"] += 1
        received = outcome == "ok" and message["direction"] == "receive"
        self._report.successes += received
        self._report.returns += received and rank.instance.prefills
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        waiting.ranks.discard(rank)
        waiting.failed |= outcome == "failed"
        if outcome == "skipped":
            for other in waiting.ranks:  # as a router would
                other.send({"op": "abort", "request_id": key[0], "attempt": key[1]})
        self._finish(key, waiting)

    def forget(self, rank: RankProcess) -> None:
        """Expect no more from a rank that was killed."""
        for key, waiting in list(self._waiting.items()):
            if rank in waiting.ranks:
                waiting.ranks.discard(rank)
                self._finish(key, waiting)

    def _finish(self, key: tuple[str, int], waiting: Waiting) -> None:
        if waiting.ranks:
            return
        self._waiting.pop(key, None)
        if waiting.failed and self.running and self._rng.random() < 0.3:
            self._begin(retry=waiting.job)

    def _begin(self, retry: Job | None = None) -> None:
        """Send a random request to every rank of a random pair of instances; `retry`: another attempt of that one."""
        rng = self._rng
        prefills = rng.choice([i for i in INSTANCES if i.prefills])
        decodes = rng.choice([i for i in INSTANCES if not i.prefills])
        source, destination = (prefills, decodes) if rng.random() < 0.8 else (decodes, prefills)
        tokens = rng.randint(1, 48)
        deadline_s = rng.choice((0.01, 0.1, *4 * (DEADLINE_S,)))
        request_id = retry.request_id if retry else rng.randbytes(16).hex()
        attempt = retry.attempt + 1 if retry else 0
        first = rng.choice((0, 0, rng.randrange(tokens)))
        chunks = tuple(sorted({rng.randrange(1, tokens) for _ in range(rng.choice((0, 0, 1, 3)))})) if tokens > 1 else ()
        waiting: Waiting | None = None
        for instance, peer, direction in ((source, destination, "send"), (destination, source, "receive")):
            for rank in self._ranks(instance):
                job = Job(
                    request_id=request_id,
                    attempt=attempt,
                    direction=direction,
                    peer=peer.name,
                    tokens=tokens,
                    first=first if direction == "receive" else 0,
                    deadline_s=deadline_s,
                    delay_s=rng.choice((0.0, rng.random() * 0.03)),
                    abort_s=rng.random() * 0.05 if rng.random() < 0.08 else None,
                    hold_s=rng.random() * 0.05,
                    chunks=chunks,
                )
                if not rank.address:
                    continue
                waiting = waiting or Waiting(job, set(), time.monotonic() + deadline_s + GRACE_S)
                waiting.ranks.add(rank)
                rank.send({"op": "job", "job": msgspec.to_builtins(job)})
        if waiting is not None:
            self._report.requests += 1
            self._waiting[request_id, attempt] = waiting

    def _ranks(self, instance: Instance) -> list[RankProcess]:
        return [self._processes[instance.name, rank] for rank in range(instance.tp)]
