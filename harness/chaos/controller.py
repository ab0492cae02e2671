"""Runs one chaos test: starts ranks, kills and restarts them under load, and collects what they report."""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.chaos.jobs import RankSettings
from harness.chaos.load import DEADLINE_S, GRACE_S, Load
from harness.chaos.processes import INSTANCES, Instance, RankProcess
from harness.chaos.report import Report

START_S = 60.0
RECONNECT_S = 60.0
TRANSPORTS = {"nixl": "tcp", "mooncake": "tcp"}
UNFENCED_S = 30.0
"""Maximum time under load for wrong bytes to appear without fencing; it depends on the machine."""
UNFENCED = {"unsettle": 0.3, "delay": 0.3, "delay_s": (0.02, 0.3), "fencing": False}


class Chaos:
    """One run. `close` ends every process."""

    def __init__(
        self, engine: str, *, seed: int, rounds: int, fencing: bool = True, transport: str, grace_s: float = GRACE_S
    ) -> None:
        self.report = Report(engine, transport, seed, rounds, "on" if fencing else "off")
        self._engine, self._transport, self._grace_s = engine, transport, grace_s
        self._faults: dict[str, Any] = {} if fencing else UNFENCED
        self._rng = random.Random(seed)
        self._kill_rng = random.Random(seed)  # the ranks to kill must not depend on the speed of requests
        self._inbox: queue.SimpleQueue[tuple[RankProcess, dict[str, Any]]] = queue.SimpleQueue()
        self._ranks: dict[tuple[str, int], RankProcess] = {}
        self._load = Load(self._rng, self.report, self._ranks)
        self._kills: Counter[str] = Counter()
        self._reconnect_s: list[float] = []
        self.folder = Path(tempfile.mkdtemp(prefix="disagg-chaos-"))
        self.report.logs = str(self.folder)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self, instance: Instance, rank: int, listen: str) -> RankProcess:
        leader = None if rank == 0 else self._ranks[instance.name, 0].address
        settings = RankSettings(
            name=instance.name,
            tp=instance.tp,
            tp_rank=rank,
            page=instance.page,
            num_pages=instance.num_pages,
            axes=instance.axes,
            backend=self._engine,
            transport=self._transport,
            listen=listen,
            leader=leader,
            pack_below=self._rng.choice((None, 0)),
            verify=self._rng.choice(("off", "off", "sample", "full")),
            faults={**self._faults, "seed": self._rng.randrange(1 << 30)},
        )
        number = self._kills.total()
        process = RankProcess(instance, settings, self.folder / f"{instance.name}-{rank}-{number}.log")
        process.listen(self._inbox)
        self._ranks[instance.name, rank] = process
        return process

    def _await_start(self, ranks: Sequence[RankProcess]) -> None:
        self._pump(lambda: all(rank.address for rank in ranks), START_S, "ranks that did not start")
        for rank in ranks:
            if rank.address:
                self._introduce(rank)

    def _introduce(self, rank: RankProcess) -> None:
        """Send a started rank the leaders of its peers; if it leads, send its address to the ranks of its peers."""
        leaders = {one.instance.name: one for one in self._ranks.values() if one.rank == 0 and one.address}
        others = {n: one.address for n, one in leaders.items() if one.instance.prefills != rank.instance.prefills}
        rank.send({"op": "peers", "peers": others})
        if rank.rank == 0:
            for other in self._ranks.values():
                if other.instance.prefills != rank.instance.prefills:
                    other.send({"op": "peers", "peers": {rank.instance.name: rank.address}})

    def start(self) -> None:
        """Start every rank, and wait until all are connected."""
        for rank in range(max(instance.tp for instance in INSTANCES)):
            started = [self._start(i, rank, "tcp://127.0.0.1:0") for i in INSTANCES if rank < i.tp]
            self._await_start(started)
        self._await_ready("the start")
        self.report.transport = next(iter(self._ranks.values())).transport

    # -- messages -----------------------------------------------------------------------------------------------------

    def _pump(self, done: Callable[[], bool], timeout_s: float, what: str = "") -> bool:
        """Take messages and keep requests in progress until `done()`.

        Returns `False` after `timeout_s`, and then notes `what` unless that is empty.
        """
        end = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end:
                if what:
                    self.report.unhealed.append(f"{what}: {self._problems()}")
                return False
            self._load.step()
            with suppress(queue.Empty):
                self._on_message(*self._inbox.get(timeout=0.003))
        return True

    def _on_message(self, rank: RankProcess, message: dict[str, Any]) -> None:
        if message["op"] == "wrong":
            self.report.wrong.append(f"{rank.name}: {message['what']}")
        if self._ranks.get((rank.instance.name, rank.rank)) is not rank:  # killed
            return
        match message["op"]:
            case "up":
                rank.address, rank.transport = message["address"], message["transport"]
            case "state":
                rank.state = message
                self.report.dead_threads += [f"{rank.name}: {name}" for name in message["dead_threads"]]
                if message["problem"]:
                    self.report.dead_threads.append(f"{rank.name}: {message['problem']}")
            case "ended":
                self._load.ended(rank, message)
            case "gone":
                tail = rank.log.read_text(errors="replace").splitlines()[-12:]
                self.report.crashed.append(f"{rank.name}, status {rank.process.wait()}: " + "\n    ".join(tail))
                raise SystemExit(f"a rank crashed\n{self.report}")

    def _ask(self) -> None:
        """Ask every rank for its state. A stopped rank answers later."""
        for rank in self._ranks.values():
            rank.state = {}
            rank.send({"op": "ask"})

    def _states_satisfy(self, condition: Callable[[dict[str, Any]], bool]) -> Callable[[], bool]:
        """A function that polls the ranks' states, and returns whether all of them satisfy `condition`."""
        asked_at = 0.0

        def done() -> bool:
            nonlocal asked_at
            states = [rank.state for rank in self._ranks.values()]
            if all(states) and all(condition(state) for state in states):
                return True
            if time.monotonic() - asked_at > 0.1:
                asked_at = time.monotonic()
                self._ask()
            return False

        for rank in self._ranks.values():
            rank.state = {}
        return done

    def _await_ready(self, what: str) -> None:
        """Wait until every rank has connected to both peers."""
        began = time.monotonic()
        ready = self._states_satisfy(lambda state: len(state["ready"]) == 2)
        if self._pump(ready, RECONNECT_S, f"{what}: not ready again"):
            self._reconnect_s.append(time.monotonic() - began)

    def _problems(self) -> str:
        """The last known problems of every rank's peers, as JSON; asks for newer ones."""
        states = {rank.name: rank.state for rank in self._ranks.values()}
        self._ask()
        return json.dumps({name: state.get("problems", "no answer") for name, state in states.items()})

    # -- rounds -------------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Kill a rank under load, and restart it."""
        rng = self._kill_rng
        self._wait(0.05 + rng.random() * 0.25)
        rank = self._ranks[rng.choice(sorted(self._ranks))]
        same = (rank.rank == 0 and rank.instance.tp > 1) or rng.random() < 0.5  # followers know their leader's address
        others = [other for other in self._ranks.values() if other.instance.prefills != rank.instance.prefills]
        stopped = rng.choice(others) if rng.random() < 0.3 else None
        if stopped is not None:
            os.kill(stopped.process.pid, signal.SIGSTOP)
            self._wait(rng.random() * 0.1)
        restarted = self._replace(rank, same_address=same, peer_stopped=stopped is not None)
        if stopped is not None:
            self._wait(rng.random() * 0.3)
            os.kill(stopped.process.pid, signal.SIGCONT)
        self._await_start([restarted])
        self._await_ready(f"{rank.name} after {sum(self._kills.values())} kills")

    def _replace(self, rank: RankProcess, *, same_address: bool, peer_stopped: bool) -> RankProcess:
        """Kill a rank and start it again."""
        address, rank.address = rank.address, ""
        del self._ranks[rank.instance.name, rank.rank]
        rank.kill()
        where = "same address" if same_address else "other address"
        self._kills[f"{'frozen peer, ' if peer_stopped else ''}{where}"] += 1
        self.report.victims.append(f"{rank.name}, {where}")
        restarted = self._start(rank.instance, rank.rank, address if same_address else "tcp://127.0.0.1:0")
        self._load.forget(rank)
        return restarted

    def _wait(self, seconds: float) -> None:
        self._pump(lambda: False, seconds)

    def run(self) -> Report:
        """Run all rounds, then wait until nothing is left."""
        began = time.monotonic()
        try:
            self.start()
            self._reconnect_s.clear()
            self._load.running = True
            for _ in range(self.report.rounds):
                self.round()
            if self._faults:
                self._pump(lambda: bool(self.report.wrong), UNFENCED_S)
            else:
                self._wait(0.5)
            self._finish()
        finally:
            self._complete_report(time.monotonic() - began)
        return self.report

    def _finish(self) -> None:
        """Wait until every request has ended, and every row is free."""
        self._load.running = False
        self._pump(lambda: self._load.idle, DEADLINE_S + GRACE_S)
        free = self._states_satisfy(lambda s: not s["under_way"] and not s["leased"] and s["free"] == s["num_pages"])
        self._pump(free, self._grace_s)

    def _complete_report(self, seconds: float) -> None:
        report, states = self.report, [rank.state for rank in self._ranks.values() if rank.state]
        report.seconds = seconds
        report.outcomes, report.kills = dict(self._load.outcomes), dict(self._kills)
        if self._reconnect_s:
            report.heal_s = {"median": statistics.median(self._reconnect_s), "max": max(self._reconnect_s)}
        report.quarantined = sum(state["quarantined"] for state in states)
        reasons: Counter[str] = Counter()
        for state in states:
            reasons.update(state["reasons"])
        report.reasons = dict(reasons)
        report.missing_rows = sum(state["num_pages"] - state["free"] for state in states)
        report.dead_threads = sorted(set(report.dead_threads))

    def close(self) -> None:
        """End every process."""
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGCONT)
            rank.kill()
        self._ranks.clear()


def run(
    engine: str, *, seed: int, rounds: int, fencing: bool = True, transport: str | None = None, grace_s: float = GRACE_S
) -> Report:
    """Run once and return the report. `grace_s`: how long rows may take to be released at the end."""
    transport = transport or TRANSPORTS.get(engine, "auto")
    chaos = Chaos(engine, seed=seed, rounds=rounds, fencing=fencing, transport=transport, grace_s=grace_s)
    try:
        return chaos.run()
    finally:
        chaos.close()
        if chaos.report.good:
            shutil.rmtree(chaos.folder)
            chaos.report.logs = ""
