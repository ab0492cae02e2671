"""The ranks of one chaos run: starts and replaces them, keeps requests in progress, and collects what the ranks report."""

from __future__ import annotations

import itertools
import json
import queue
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.chaos.jobs import RankSettings
from harness.chaos.launcher import Launcher
from harness.chaos.load import Load
from harness.chaos.places import Hosts, Place
from harness.chaos.processes import INSTANCES, Inbox, Instance, RankProcess
from harness.chaos.report import Healing, Report
from harness.rdma.link import RdmaLink

START_S = 240.0
RECONNECT_S = 60.0
ASK_S = 0.1
"""How often ranks are asked for their states while something is awaited."""
PAUSE_S = 0.003
"""How long the controller waits for a message before it looks at the time again."""
SETTLE_S = 2.5
"""How long ranks are watched after they are connected again."""
UNFENCED = {"unsettle": 0.3, "delay": 0.3, "delay_s": (0.02, 0.3), "fencing": False}
FENCED = {"delay": 0.25, "delay_s": (0.0, 0.2)}
"""A quarter of the transfers is posted late, so that a rank which is stopped or cut off often has some to post afterwards."""
SPARE = 8
"""Pools are this many times larger where rows may stay quarantined."""
FAR = ("prefill-1", "decode-1")
"""The instances on the second host, if there are two."""


class RunEnded(Exception):
    """A rank has crashed, lost a thread or not started: nothing heals any more. The report says which."""


class Chaos:
    """One run. `close` ends every process.

    `rng` chooses what is done to ranks: it must not depend on the speed of requests. `hosts`: the ranks run on two hosts.
    `silence_s`: a rank that is silent for this long counts as lost. `link`: engines of prefill and of decode
    ranks use its two devices. Deadlines and intervals are multiplied by `slow`. `may_post`: some ranks write into rows of
    other hosts themselves.
    """

    def __init__(
        self,
        report: Report,
        *,
        hosts: Hosts | None,
        link: RdmaLink | None,
        silence_s: float,
        longest_s: float,
        grace_s: float,
        slow: float,
        may_post: bool,
    ) -> None:
        self._may_post = may_post
        self.report, self.hosts, self.link, self.silence_s = report, hosts, link, silence_s * slow
        self._longest_s, self._grace_s, self._slow = longest_s, grace_s, slow
        self._fenced = report.fencing == "on"
        self._rng = random.Random(report.seed)
        self.rng = random.Random(report.seed)
        self._inbox: Inbox = queue.SimpleQueue()
        self.ranks: dict[tuple[str, int], RankProcess] = {}
        self.load = Load(self._rng, self.report, self.ranks, slow=slow)
        self._numbers = itertools.count()
        self._healing: dict[str, list[float]] = {}
        self._launchers: dict[Place, Launcher] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="disagg-chaos-"))
        self.report.logs = str(self.folder)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self, instance: Instance, rank: int, *, address: str = "", place: Place | None = None) -> RankProcess:
        """Start a rank at an address, by default a free port of its host, and in a place, by default its host as this user."""
        leader = None if rank == 0 else self.ranks[instance.name, 0].address
        host, namespace = "127.0.0.1", None
        if self.hosts is not None:
            side = int(instance.name in FAR)
            host, namespace = self.hosts.addresses[side], self.hosts.namespaces[side]
        settings = RankSettings(
            name=instance.name,
            tp=instance.tp,
            tp_rank=rank,
            page=instance.page,
            num_pages=instance.num_pages * (SPARE if self.report.may_quarantine else 1),
            axes=instance.axes,
            backend=self.report.engine,
            transport=self.report.transport,
            devices=self._devices(instance),
            listen=address or f"tcp://{host}:0",
            leader=leader,
            pack_below=self._rng.choice((None, 0)) if self._may_post else None,
            verify=self._rng.choice(("off", "full")),
            faults={**(FENCED if self._fenced else UNFENCED), "seed": self._rng.randrange(1 << 30)},
            silence_s=self.silence_s,
            slow=self._slow,
            off_loopback=self.hosts is not None,
        )
        log = self.folder / f"{instance.name}-{rank}-{next(self._numbers)}.log"
        process = RankProcess(instance, settings, log, self._launcher(place or Place(namespace)), self._inbox)
        self.ranks[instance.name, rank] = process
        return process

    def _launcher(self, place: Place) -> Launcher:
        """What starts ranks in that place."""
        if place not in self._launchers:
            self._launchers[place] = Launcher(place, engine=self.report.engine)
        return self._launchers[place]

    def _devices(self, instance: Instance) -> tuple[str, ...]:
        """The RDMA devices of an instance's engines. UCX's names have a port."""
        if self.link is None:
            return ()
        port = ":1" if self.report.engine == "nixl" else ""
        return tuple(device.name + port for device in self.link.side(0 if instance.prefills else 1))

    def _await_start(self, ranks: Sequence[RankProcess]) -> None:
        if not self.pump(lambda: all(rank.address for rank in ranks), START_S * self._slow, "ranks that did not start"):
            raise RunEnded
        for rank in ranks:
            self._introduce(rank)

    def _introduce(self, rank: RankProcess) -> None:
        """Send a started rank the leaders of its peers; if it leads, send its address to the ranks of its peers."""
        leaders = {one.instance.name: one for one in self.ranks.values() if one.rank == 0 and one.address}
        others = {n: one.address for n, one in leaders.items() if one.instance.prefills != rank.instance.prefills}
        rank.send({"op": "peers", "peers": others})
        if rank.rank == 0:
            for other in self.ranks.values():
                if other.instance.prefills != rank.instance.prefills:
                    other.send({"op": "peers", "peers": {rank.instance.name: rank.address}})

    def start(self) -> None:
        """Start every rank, and wait until all are connected."""
        for rank in range(max(instance.tp for instance in INSTANCES)):
            started = [self._start(i, rank) for i in INSTANCES if rank < i.tp]
            self._await_start(started)
        self.heal("the start", "the start")
        self.report.transport = next(iter(self.ranks.values())).transport

    def restart(self, rank: RankProcess, *, address: str, place: Place | None = None) -> RankProcess:
        """Start a rank that was killed again, at `address` or, if that is empty, at another one. Returns its new process."""
        restarted = self._start(rank.instance, rank.rank, address=address, place=place)
        self._await_start([restarted])
        return restarted

    def reopen(self, rank: RankProcess) -> None:
        """Have a rank close its manager and open another one at the same address, and wait until it has."""
        rank.address = ""
        rank.send({"op": "reopen"})
        self._await_start([rank])

    def leave(self, rank: RankProcess) -> str:
        """Have a rank execute another program. Returns the address that it had."""
        address = rank.address
        rank.leave()
        self.load.forget(rank)
        return address

    def kill(self, rank: RankProcess) -> str:
        """Kill a rank. Returns the address that it had."""
        address = rank.address
        rank.kill()
        self.load.forget(rank)
        return address

    def opposite(self, rank: RankProcess) -> list[RankProcess]:
        """The live ranks of the other role."""
        return [other for other in self.live() if other.instance.prefills != rank.instance.prefills]

    def longest(self, seconds: float) -> float:
        """How long a fault may last that takes up to `seconds` by itself."""
        return min(seconds, self._longest_s)

    def live(self) -> list[RankProcess]:
        """The ranks that were not killed, in a fixed order."""
        return [self.ranks[key] for key in sorted(self.ranks) if not self.ranks[key].killed]

    # -- messages -----------------------------------------------------------------------------------------------------

    def pump(self, done: Callable[[], bool], timeout_s: float, what: str = "") -> bool:
        """Take messages and keep requests in progress until `done()`.

        Returns `False` after `timeout_s`, and then notes `what` unless that is empty.
        """
        end = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > end:
                if what:
                    self.report.unhealed.append(f"{what}: {self._problems()}")
                return False
            self.load.step()
            with suppress(queue.Empty):
                self._on_message(*self._inbox.get(timeout=PAUSE_S * self._slow))
        return True

    def _on_message(self, rank: RankProcess, message: dict[str, Any]) -> None:
        if message["op"] == "wrong":
            self.report.wrong.append(f"{rank.name}: {message['what']}")
        if rank.killed:
            return
        match message["op"]:
            case "up":
                rank.address, rank.transport = message["address"], message["transport"]
            case "state":
                rank.state, rank.asked = message, False
                self.report.dead_threads += [f"{rank.name}: {name}" for name in message["dead_threads"]]
                if message["problem"]:
                    self.report.dead_threads.append(f"{rank.name}: {message['problem']}")
                if self.report.dead_threads:
                    raise RunEnded
            case "ended":
                self.load.ended(rank, message)
            case "refused":
                self.load.refused(message["error"])
            case "gone" if not rank.may_end:
                tail = rank.log.read_text(errors="replace").splitlines()[-12:]
                self.report.crashed.append(f"{rank.name}, status {rank.wait()}: " + "\n    ".join(tail))
                raise RunEnded

    def _ask(self) -> None:
        """Ask every rank for its state, except those that are stopped or have not answered yet."""
        for rank in self.live():
            if not rank.stopped and not rank.asked:
                rank.asked = True
                rank.send({"op": "ask", "at": time.monotonic()})

    def states_satisfy(
        self, condition: Callable[[dict[str, Any]], bool], ranks: Sequence[RankProcess] = ()
    ) -> Callable[[], bool]:
        """A function that polls the states of `ranks` (default: all live ones) and returns whether they satisfy `condition`.

        Only answers to questions that were asked after this call count.
        """
        since, asked_at = time.monotonic(), 0.0

        def done() -> bool:
            nonlocal asked_at
            states = [rank.state for rank in ranks or self.live()]
            if all(state and state["asked_at"] >= since and condition(state) for state in states):
                return True
            if time.monotonic() - asked_at > ASK_S * self._slow:
                asked_at = time.monotonic()
                self._ask()
            return False

        return done

    def heal(self, kind: str, what: str) -> None:
        """Wait until every rank has connected to both peers. `what` describes the fault."""
        began = time.monotonic()
        ready = self.states_satisfy(lambda state: len(state["ready"]) == 2)
        if self.pump(ready, RECONNECT_S * self._slow, f"{what}: not ready again"):
            self.note_time(kind, time.monotonic() - began)

    def losses(self) -> dict[RankProcess, int]:
        """How many peers each rank has lost so far."""
        self.pump(self.states_satisfy(bool), RECONNECT_S * self._slow, "no answer")
        return {rank: rank.state.get("losses", 0) for rank in self.live()}

    def stays_healed(self, what: str, *, since: dict[RankProcess, int] | None = None) -> None:
        """Keep requests in progress for `SETTLE_S`, and note every rank that has lost peers again since then or `since`.

        A rank that was started later must not have lost any.
        """
        before = self.losses() if since is None else since
        self.wait(SETTLE_S)
        for rank, losses in self.losses().items():
            if losses != before.get(rank, 0):
                self.report.relapses.append(f"{rank.name}, {losses - before.get(rank, 0)} times, after {what}")

    def note_time(self, kind: str, seconds: float) -> None:
        """Note how long something of a kind took, for the table of the report."""
        self._healing.setdefault(kind, []).append(seconds)

    def _problems(self) -> str:
        """The last known problems of every rank's peers, as JSON; asks for newer ones."""
        states = {rank.name: rank.state for rank in self.live()}
        self._ask()
        return json.dumps({name: state.get("problems", "no answer") for name, state in states.items()})

    def wait(self, seconds: float) -> None:
        self.pump(lambda: False, seconds)

    def finish(self) -> None:
        """Wait until every request has ended, and every row is free."""
        self.load.running = False
        self.pump(lambda: self.load.idle, self.load.deadline_s + self.load.grace_s)
        self.pump(self.states_satisfy(lambda s: not s["under_way"] and self._missing(s) == 0), self._grace_s * self._slow)

    def _missing(self, state: dict[str, Any]) -> int:
        """Rows of a rank that are neither free nor, where that may be, quarantined."""
        quarantined = state["quarantined_pages"] if self.report.may_quarantine else 0
        return int(state["num_pages"] - state["free"] - quarantined)

    def receives_again(self, what: str) -> None:
        """Wait until a request succeeds."""
        before = self.report.successes
        self.pump(lambda: self.report.successes > before, RECONNECT_S * self._slow, f"nothing was received after {what}")

    def complete_report(self) -> None:
        """Enter what is known of the ranks now."""
        report, states = self.report, [rank.state for rank in self.live() if rank.state]
        report.outcomes = dict(self.load.outcomes)
        report.healing = {kind: Healing.of(seconds) for kind, seconds in self._healing.items()}
        report.quarantined = sum(state["quarantined"] for state in states)
        reasons: Counter[str] = Counter()
        for state in states:
            reasons.update(state["reasons"])
        report.reasons = dict(reasons)
        report.missing_rows = sum(self._missing(state) for state in states)
        report.quarantined_rows = sum(state["quarantined_pages"] for state in states)
        report.dead_threads = sorted(set(report.dead_threads))

    def close(self) -> None:
        """End every process."""
        for rank in self.ranks.values():
            rank.kill()
        self.ranks.clear()
        for launcher in self._launchers.values():
            launcher.close()
