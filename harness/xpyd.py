"""`python -m harness.xpyd --seconds 300`: prefill and decode workers that come and go under load.

Three workers of each role (`examples/minimal_server.py`) serve requests in every combination. Every few seconds one of them is
killed or closed, and another starts. The router introduces each worker to those of the other role, and repeats a failed
request elsewhere with the next attempt number. Each answer is compared with that of a single worker; each failure must have a
reason.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import queue
import random
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg import new_request_id
from examples import minimal_server
from examples.minimal_server import Remote, generate, introduce
from harness.conditions import conditions

ROLES = ("prefill", "decode")
NUM_WORKERS = 3
NUM_OPEN = 12
"""Requests that are under way at a time."""
LOST_S = 100.0
"""A request without an answer for so long is lost: deadlines are shorter."""


class Worker:
    """A worker's process, and a thread that passes its answers on; `None` when it has ended."""

    def __init__(self, role: str, name: str, *, backend: str, answers: queue.SimpleQueue[tuple[Worker, Any]]) -> None:
        self.role, self.name = role, name
        self.started = False
        self.remote = Remote([sys.executable, minimal_server.__file__, role], {"DISAGG_NAME": name, "DISAGG_BACKEND": backend})
        self._answers = answers
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while (answer := self.remote.read()) is not None:
            self._answers.put((self, answer))
        self._answers.put((self, None))

    def end(self, *, kill: bool) -> None:
        """Kill the process, or close its input, which ends it."""
        if kill:
            self.remote.process.kill()
        self.remote.close_input()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._thread.join(60)
        self.remote.close()


@dataclass
class Open:
    """A request under way: its decode worker, and when it was sent."""

    request: dict[str, Any]
    decode: Worker
    since: float


@dataclass
class Summary:
    """What a run did."""

    answered: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    pairs: set[tuple[str, str]] = field(default_factory=set)
    failed_workers: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every request was answered rightly, whatever happened to workers."""
        return not (self.wrong or self.lost or self.failed_workers) and self.answered > 0 and "" not in self.reasons

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "answered": self.answered,
            "lost": self.lost,
            "wrong": self.wrong,
            "pairs": len(self.pairs),
            "workers": self.events,
            "failed_attempts": dict(self.reasons.most_common()),
            "failed_workers": self.failed_workers,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.answered} requests answered by {len(self.pairs)} pairs, {len(self.wrong)} wrong, {self.lost} lost",
            "workers: " + ", ".join(f"{count} {what}" for what, count in sorted(self.events.items())),
            f"{self.reasons.total()} attempts failed and were repeated:",
            *(f"  {count:5d}  {reason}" for reason, count in self.reasons.most_common()),
            *self.wrong[:5],
            *self.failed_workers,
        ]
        return "\n".join(lines)


class Run:
    """Workers, the router and the load."""

    def __init__(self, *, backend: str, seed: int) -> None:
        self.summary = Summary()
        self._backend = backend
        self._random = random.Random(seed)
        self._answers: queue.SimpleQueue[tuple[Worker, Any]] = queue.SimpleQueue()
        self._workers: dict[str, Worker] = {}
        self._ended: list[Worker] = []
        self._numbers = itertools.count()
        self._open: dict[str, Open] = {}
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()  # for a worker of either role

    def run(self, *, seconds: float, change_every_s: float) -> Summary:
        """Serve requests for `seconds` while a worker goes and another comes every `change_every_s`."""
        try:
            for role in ROLES:
                for _ in range(NUM_WORKERS):
                    self._start(role)
            while any(len(self._started(role)) < NUM_WORKERS for role in ROLES) and not self.summary.failed_workers:
                self._take(0.1)
            until = time.monotonic() + seconds
            next_change = time.monotonic() + change_every_s
            while time.monotonic() < until or ((self._open or self._waiting) and time.monotonic() < until + LOST_S):
                while self._waiting and self._submit(self._waiting[0]):
                    self._waiting.popleft()
                while len(self._open) < NUM_OPEN and time.monotonic() < until and self._submit(self._new_request()):
                    pass
                if next_change <= time.monotonic() < until:
                    self._change()
                    next_change += change_every_s
                self._take(0.05)
                self._expire()
            self.summary.lost += len(self._open) + len(self._waiting)
        finally:
            for worker in (*self._workers.values(), *self._ended):
                worker.end(kill=False)
            for worker in (*self._workers.values(), *self._ended):
                worker.join()
        return self.summary

    def _start(self, role: str) -> None:
        name = f"{role}-{next(self._numbers)}"
        self._workers[name] = Worker(role, name, backend=self._backend, answers=self._answers)
        self.summary.events["started"] += 1

    def _started(self, role: str) -> list[Worker]:
        """The workers of a role that have been introduced to those of the other."""
        return [worker for worker in self._workers.values() if worker.role == role and worker.started]

    def _change(self) -> None:
        """End a worker that has started, and start another of its role; nothing if none has."""
        found = [worker for role in ROLES for worker in self._started(role)]
        if not found:
            return
        victim = self._random.choice(found)
        kill = self._random.random() < 0.5
        del self._workers[victim.name]
        self._ended.append(victim)
        self.summary.events["killed" if kill else "closed"] += 1
        victim.end(kill=kill)
        self._start(victim.role)

    def _new_request(self) -> dict[str, Any]:
        prompt = [self._random.randrange(32000) for _ in range(self._random.randrange(20, 400))]
        return {"id": new_request_id().hex(), "attempt": 0, "prompt": prompt, "output": 4}

    def _submit(self, request: dict[str, Any]) -> bool:
        known = [self._started(role) for role in ROLES]
        if not all(known):
            return False
        prefill, decode = (self._random.choice(workers) for workers in known)
        self._open[request["id"]] = Open(request, decode, time.monotonic())
        prefill.remote.send(do="prefill", peer=decode.name, **request)
        decode.remote.send(do="decode", peer=prefill.name, **request)
        request["prefill"] = prefill.name
        return True

    def _take(self, timeout_s: float) -> None:
        """Take the answers of workers."""
        try:
            worker, answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return
        if answer is None:
            self._worker_ended(worker)
        elif "address" in answer:
            self._worker_started(worker, answer)
        elif "id" in answer and worker.role == "decode":
            found = self._open.get(answer["id"])
            if found is not None and found.decode is worker:
                self._take_answer(found, answer)

    def _take_answer(self, found: Open, answer: dict[str, Any]) -> None:
        request = found.request
        if "error" in answer:
            self._repeat(found, answer["error"])
            return
        del self._open[request["id"]]
        self.summary.pairs.add((request["prefill"], found.decode.name))
        if answer["tokens"] == generate(request["prompt"], request["output"]):
            self.summary.answered += 1
        else:
            self.summary.wrong.append(f"wrong answer: {answer}")

    def _repeat(self, found: Open, reason: str) -> None:
        """Try a request again elsewhere."""
        self.summary.reasons[_kind(reason)] += 1
        request = {**found.request, "attempt": found.request["attempt"] + 1}
        request.pop("prefill", None)
        if not self._submit(request):
            del self._open[request["id"]]
            self._waiting.append(request)

    def _worker_started(self, worker: Worker, answer: dict[str, Any]) -> None:
        """Introduce a worker to those of the other role, unless it is to end."""
        worker.remote.name, worker.remote.address = answer["name"], answer["address"]
        if self._workers.get(worker.name) is worker:
            for other in self._started(_other_role(worker.role)):
                introduce(worker.remote, other.remote)
            worker.started = True

    def _worker_ended(self, worker: Worker) -> None:
        for other in self._started(_other_role(worker.role)):
            other.remote.send(do="forget", name=worker.name)
        if self._workers.pop(worker.name, None) is not None:
            self.summary.failed_workers.append(f"{worker.name} ended by itself with status {worker.remote.process.wait()}")
        for found in [each for each in self._open.values() if each.decode is worker]:
            self._repeat(found, "its decode worker has ended")

    def _expire(self) -> None:
        for found in [each for each in self._open.values() if time.monotonic() > each.since + LOST_S]:
            del self._open[found.request["id"]]
            self.summary.lost += 1


def _other_role(role: str) -> str:
    return ROLES[1 - ROLES.index(role)]


def _kind(reason: str) -> str:
    """A reason without names and numbers."""
    return re.sub(r"(prefill|decode)-[0-9]+(/[0-9]+)?|'[^']*'|[0-9a-f]{32}|tcp://\S+|[0-9.]+", "*", reason)[:100]


def run(*, seconds: float, change_every_s: float = 3.0, backend: str = "auto", seed: int = 0) -> Summary:
    """Serve requests for `seconds` by workers of which one is replaced every `change_every_s`."""
    return Run(backend=backend, seed=seed).run(seconds=seconds, change_every_s=change_every_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--change-every", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    given = parser.parse_args()
    about = conditions()
    summary = run(seconds=given.seconds, change_every_s=given.change_every, backend=given.backend, seed=given.seed)
    sys.stdout.write(f"{summary}\n")
    if given.json is not None:
        case = {name: value for name, value in vars(given).items() if name != "json"}
        given.json.write_text(json.dumps({**about, **case, **summary.figures()}, indent=1) + "\n")
    sys.exit(not summary.ok)


if __name__ == "__main__":
    main()
