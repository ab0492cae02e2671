"""The requests of a chaos run: starts random ones, and tracks which ranks have not reported their end."""

from __future__ import annotations

import random
import re
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
MAX_STOPPED = 16
"""Requests in progress with a stopped rank, beyond those of `WINDOW`; its end of them waits in its standard input."""


@dataclass
class Waiting:
    """A request in progress: the ranks that have not reported its end, and the time by which they must. That time is put off
    while one of them is stopped, since it may read the request only when it goes on.

    `sent_to`: the only instance that may receive it.
    """

    job: Job
    ranks: set[RankProcess]
    late_at: float
    sent_to: Instance
    contested: bool = False
    failed: bool = False

    @property
    def has_stopped(self) -> bool:
        """Whether a stopped rank has not reported its end."""
        return any(rank.stopped for rank in self.ranks)


class Load:
    """Keeps up to `WINDOW` requests in progress while `running`, between the ranks of `processes`.

    Requests have at most `deadline_s`, and their ends must be reported within `grace_s` after it; both are multiplied by
    `slow`.
    `contest`: the share of requests that another instance reserves, too, and for which the right one opens a second receiver.
    `disorder`: requests are sent in many chunks, in any order.
    """

    def __init__(
        self, rng: random.Random, report: Report, processes: Mapping[tuple[str, int], RankProcess], *, slow: float = 1.0
    ) -> None:
        self.deadline_s, self.grace_s = DEADLINE_S * slow, GRACE_S * slow
        self.running = False
        self.contest = 0.0
        self.disorder = False
        self.received: Counter[RankProcess] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._rng, self._report, self._processes = rng, report, processes
        self._waiting: dict[tuple[str, int], Waiting] = {}
        self._next_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether every request has ended on every rank."""
        return not self._waiting

    @property
    def num_contested(self) -> int:
        """Contested requests in progress."""
        return sum(one.contested for one in self._waiting.values())

    def step(self) -> None:
        """Start a request if one is due, and note every request that is late."""
        now = time.monotonic()
        if self.running and now >= self._next_at and sum(not one.has_stopped for one in self._waiting.values()) < WINDOW:
            self._next_at = now + INTERVAL_S
            self._begin()
        for waiting in self._waiting.values():
            if waiting.has_stopped:
                waiting.late_at = self._late_at(waiting.job)
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
        self.received[rank] += received
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        if waiting.contested and message["direction"] == "receive":
            self._judge_contest(rank, waiting, message)
        waiting.ranks.discard(rank)
        waiting.failed |= outcome == "failed"
        if outcome == "skipped":
            for other in waiting.ranks:  # as a router would
                other.send({"op": "abort", "request_id": key[0], "attempt": key[1]})
        self._finish(key, waiting)

    def _judge_contest(self, rank: RankProcess, waiting: Waiting, message: dict[str, Any]) -> None:
        """Note a request that reached an instance to which it was not sent, or that failed without a reason."""
        outcome, right = message["outcome"], rank.instance is waiting.sent_to
        self._report.contests[f"{'right' if right else 'other'} instance, {outcome}"] += 1
        if outcome == "ok" and not right:
            self._report.wrong.append(f"{waiting.job.request_id}: {rank.name} received what was sent to {waiting.sent_to.name}")
        if outcome != "ok":
            self.refused(message["error"])

    def refused(self, error: str) -> None:
        """Count the reason why a contested request failed somewhere; an empty one is a finding."""
        if not error:
            self._report.wrong.append("a contested request failed without a reason")
        self._report.refusals[re.sub(r"[0-9a-f]{32}#[0-9]+|[0-9]+", "N", error)] += 1

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
        parts = [(source, destination, "send"), (destination, source, "receive")]
        contested = rng.random() < self.contest
        if contested:
            rival = next(i for i in INSTANCES if i.prefills == destination.prefills and i is not destination)
            parts.insert(rng.randrange(3), (rival, source, "receive"))
        ranks = {rank for instance, _, _ in parts for rank in self._ranks(instance) if rank.address}
        if any(rank.stopped for rank in ranks) and sum(one.has_stopped for one in self._waiting.values()) >= MAX_STOPPED:
            return
        first_job = self._job(retry)
        for instance, peer, direction in parts:
            for rank in self._ranks(instance):
                if not rank.address:
                    continue
                job = msgspec.structs.replace(
                    first_job,
                    direction=direction,
                    peer=peer.name,
                    first=first_job.first if direction == "receive" else 0,
                    delay_s=rng.choice((0.0, rng.random() * 0.03)),
                    abort_s=rng.random() * 0.05 if rng.random() < 0.08 else None,
                    hold_s=rng.random() * 0.05,
                )
                rank.send({"op": "job", "job": msgspec.to_builtins(job)})
                if contested and instance is destination:
                    rank.send({"op": "rival", "job": msgspec.to_builtins(job)})
        if ranks:
            waiting = Waiting(first_job, ranks, self._late_at(first_job), destination, contested)
            self._report.requests += 1
            self._waiting[first_job.request_id, first_job.attempt] = waiting

    def _late_at(self, job: Job) -> float:
        """The time by which a request that begins now must have ended on every rank."""
        return time.monotonic() + job.deadline_s + self.grace_s

    def _job(self, retry: Job | None) -> Job:
        """A random request, without what differs between its ranks; `retry`: another attempt of that one."""
        rng = self._rng
        tokens = rng.randint(1, 48)
        num_cuts = rng.randrange(tokens) if self.disorder else rng.choice((0, 0, 1, 3))
        chunks = tuple(sorted({rng.randrange(1, tokens) for _ in range(num_cuts)})) if tokens > 1 else ()
        order = list(range(len(chunks) + 1))
        if self.disorder:
            rng.shuffle(order)
        return Job(
            request_id=retry.request_id if retry else rng.randbytes(16).hex(),
            attempt=retry.attempt + 1 if retry else 0,
            direction="",
            peer="",
            tokens=tokens,
            first=rng.choice((0, 0, rng.randrange(tokens))),
            deadline_s=rng.choice((0.01, 0.1, *4 * (self.deadline_s,))),
            delay_s=0.0,
            abort_s=None,
            hold_s=0.0,
            chunks=chunks,
            order=tuple(order),
        )

    def _ranks(self, instance: Instance) -> list[RankProcess]:
        return [self._processes[instance.name, rank] for rank in range(instance.tp)]
