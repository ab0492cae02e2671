"""Chaos: real engines, real processes, and ranks that are killed while they work.

Two prefill and two decode instances of different tensor-parallel sizes, page sizes and axis orders, one process per rank,
keep a few requests under way in tiny pools whose pages are used again at once. Requests are aborted and run out of time at
random moments, some go back from decode to prefill. Every round a random rank is killed (SIGKILL), sometimes while one of
its peers is stopped (SIGSTOP) so that bytes are left in sockets, and started again, at its address or another one.

A run is good when no byte is wrong, every request ends, everyone who lives finds everyone again, and in the end no row is
missing, no thread is dead and nobody has crashed::

    python -m harness.chaos --engine nixl --rounds 200 --seed 1 --json chaos.json

`--fencing off` has the engines lie about what is over: the same harness must then find wrong bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness.chaos_rank import Job, RankOrders

START_S = 60.0
HEAL_S = 60.0
WINDOW = 8
"""Requests under way."""
DEADLINE_S = 4.0
GRACE_S = 30.0
"""How long after its deadline a request may take to be reported, and how long rows may take to come back in the end."""
TRANSPORTS = {"nixl": "tcp", "mooncake": "tcp"}
NHD, HND = "page token kv_head dim", "page kv_head token dim"
LIES_S = 30.0
"""How long lying engines are loaded at most, until bytes are wrong: how much a machine does in a while is its own matter."""
LYING = {"unsettle": 0.3, "delay": 0.3, "delay_s": (0.02, 0.3), "fencing": False}


@dataclass(frozen=True)
class Instance:
    """One instance: its side, its tensor-parallel size, its pages."""

    name: str
    prefills: bool
    tp: int
    page: int
    axes: str
    num_pages: int


INSTANCES = (
    Instance("prefill-0", True, 2, 4, NHD, 32),
    Instance("prefill-1", True, 1, 8, HND, 16),
    Instance("decode-0", False, 1, 16, NHD, 10),
    Instance("decode-1", False, 2, 2, HND, 64),
)


class Life:
    """One process of one rank, from its start to its end."""

    def __init__(self, instance: Instance, orders: RankOrders, log: Path) -> None:
        self.instance, self.rank = instance, orders.tp_rank
        self.name = f"{instance.name}/{orders.tp_rank}"
        self.address = ""
        self.transport = ""
        self.state: dict[str, Any] = {}
        self.log = log
        self._errors = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.chaos_rank", msgspec.json.encode(orders).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def listen(self, into: queue.SimpleQueue[tuple[Life, dict[str, Any]]]) -> None:
        """Pass on what it says, until it ends."""

        def run() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                with suppress(json.JSONDecodeError):  # a line that was cut by its end
                    into.put((self, json.loads(line)))
            into.put((self, {"op": "gone"}))

        threading.Thread(target=run, name=f"chaos-{self.name}", daemon=True).start()

    def say(self, words: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it is being killed
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


@dataclass
class Waiting:
    """A request under way: whose word is still awaited, and by when."""

    job: Job
    receiver: Instance
    lives: set[Life]
    late_at: float
    failed: bool = False


@dataclass
class Report:
    """What a run has shown."""

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
        """Whether nothing was lost, misplaced or left over, and something was moved at all."""
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
            ("healed", f"median {self.heal_s.get('median', 0):.2f} s, at most {self.heal_s.get('max', 0):.2f} s"),
            ("wrong bytes", str(len(self.wrong)) + "".join(f"\n  {what}" for what in self.wrong[:5])),
            ("stuck requests", str(len(self.stuck)) + "".join(f"\n  {what}" for what in self.stuck[:5])),
            ("peers not found again", str(len(self.unhealed)) + "".join(f"\n  {what}" for what in self.unhealed[:5])),
            ("quarantined", f"{self.quarantined} requests" + "".join(f"\n  {n} x {r}" for r, n in self.reasons.items())),
            ("rows missing", str(self.missing_rows)),
            ("dead threads", str(len(self.dead_threads)) + "".join(f"\n  {what}" for what in self.dead_threads)),
            ("crashed ranks", str(len(self.crashed)) + "".join(f"\n  {what}" for what in self.crashed)),
            ("logs of ranks", "removed: all went well" if self.good else self.logs),
        )
        return "\n".join(f"{name:<22} {value}" for name, value in rows)


class Chaos:
    """One run. `close` ends every process."""

    def __init__(
        self, engine: str, *, seed: int, rounds: int, fencing: bool = True, transport: str, grace_s: float = GRACE_S
    ) -> None:
        self.report = Report(engine, transport, seed, rounds, "on" if fencing else "off")
        self._engine, self._transport, self._grace_s = engine, transport, grace_s
        self._faults: dict[str, Any] = {} if fencing else LYING
        self._rng = random.Random(seed)
        self._fate = random.Random(seed)  # what is killed must not depend on how fast requests go
        self._said: queue.SimpleQueue[tuple[Life, dict[str, Any]]] = queue.SimpleQueue()
        self._lives: dict[tuple[str, int], Life] = {}
        self._waiting: dict[tuple[str, int], Waiting] = {}
        self._outcomes: Counter[str] = Counter()
        self._kills: Counter[str] = Counter()
        self._heals: list[float] = []
        self._loaded = False
        self._next_at = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="disagg-chaos-"))
        self.report.logs = str(self.folder)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self, instance: Instance, rank: int, listen: str) -> Life:
        leader = None if rank == 0 else self._lives[instance.name, 0].address
        orders = RankOrders(
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
        life = Life(instance, orders, self.folder / f"{instance.name}-{rank}-{number}.log")
        life.listen(self._said)
        self._lives[instance.name, rank] = life
        return life

    def _await_up(self, lives: Sequence[Life]) -> None:
        self._pump(lambda: all(life.address for life in lives), START_S, "ranks that did not start")
        for life in lives:
            if life.address:
                self._introduce(life)

    def _introduce(self, life: Life) -> None:
        """The new rank learns of the other side, and the other side of it if it leads."""
        leaders = {one.instance.name: one for one in self._lives.values() if one.rank == 0 and one.address}
        others = {n: one.address for n, one in leaders.items() if one.instance.prefills != life.instance.prefills}
        life.say({"op": "peers", "peers": others})
        if life.rank == 0:
            for other in self._lives.values():
                if other.instance.prefills != life.instance.prefills:
                    other.say({"op": "peers", "peers": {life.instance.name: life.address}})

    def start(self) -> None:
        """Every rank, up and ready."""
        for rank in range(max(instance.tp for instance in INSTANCES)):
            started = [self._start(i, rank, "tcp://127.0.0.1:0") for i in INSTANCES if rank < i.tp]
            self._await_up(started)
        self._heal("the start")
        self.report.transport = next(iter(self._lives.values())).transport

    # -- what is said -------------------------------------------------------------------------------------------------

    def _pump(self, done: Callable[[], bool], timeout_s: float, what: str) -> bool:
        """Take what ranks say and keep requests under way, until `done`; notes `what` where that takes too long."""
        end = time.monotonic() + timeout_s
        while not done():
            now = time.monotonic()
            if now > end:
                if what:
                    self.report.unhealed.append(f"{what}: {self._who_is_not_ready()}")
                return False
            if self._loaded and len(self._waiting) < WINDOW and now >= self._next_at:
                self._next_at = now + 0.004
                self._begin()
            for key in [key for key, waiting in self._waiting.items() if now > waiting.late_at]:
                silent = sorted(life.name for life in self._waiting.pop(key).lives)
                self.report.stuck.append(f"{key[0]}#{key[1]} at {', '.join(silent)}")
            with suppress(queue.Empty):
                self._take(*self._said.get(timeout=0.003))
        return True

    def _take(self, life: Life, words: dict[str, Any]) -> None:
        if self._lives.get((life.instance.name, life.rank)) is not life:
            if words["op"] == "wrong":
                self.report.wrong.append(f"{life.name}: {words['what']}")
            return
        match words["op"]:
            case "up":
                life.address, life.transport = words["address"], words["transport"]
            case "wrong":
                self.report.wrong.append(f"{life.name}: {words['what']}")
            case "state":
                life.state = words
                self.report.dead_threads += [f"{life.name}: {name}" for name in words["dead_threads"]]
                if words["problem"]:
                    self.report.dead_threads.append(f"{life.name}: {words['problem']}")
            case "ended":
                self._end(life, words)
            case "gone":
                tail = life.log.read_text(errors="replace").splitlines()[-12:]
                self.report.crashed.append(f"{life.name}, status {life.process.wait()}: " + "\n    ".join(tail))
                raise SystemExit(f"a rank crashed\n{self.report}")

    def _end(self, life: Life, words: dict[str, Any]) -> None:
        key = words["request_id"], words["attempt"]
        outcome = words["outcome"]
        self._outcomes[f"{words['direction']} {outcome}"] += 1
        received = outcome == "ok" and words["direction"] == "receive"
        self.report.successes += received
        self.report.returns += received and life.instance.prefills
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        waiting.lives.discard(life)
        waiting.failed |= outcome == "failed"
        if outcome == "skipped":
            for other in waiting.lives:  # as a router would: nobody waits for a rank that has no room
                other.say({"op": "abort", "request_id": key[0], "attempt": key[1]})
        self._finish(key, waiting)

    def _finish(self, key: tuple[str, int], waiting: Waiting) -> None:
        if waiting.lives:
            return
        self._waiting.pop(key, None)
        if waiting.failed and self._loaded and self._rng.random() < 0.3:
            self._begin(again=waiting.job)

    # -- load ---------------------------------------------------------------------------------------------------------

    def _begin(self, again: Job | None = None) -> None:
        """Tell every rank of a random pair of instances about a request; `again`: another attempt of that one."""
        rng = self._rng
        prefills = rng.choice([i for i in INSTANCES if i.prefills])
        decodes = rng.choice([i for i in INSTANCES if not i.prefills])
        source, sink = (prefills, decodes) if rng.random() < 0.8 else (decodes, prefills)
        tokens = rng.randint(1, 48)
        deadline_s = rng.choice((0.01, 0.1, *4 * (DEADLINE_S,)))
        request_id = again.request_id if again else rng.randbytes(16).hex()
        attempt = again.attempt + 1 if again else 0
        first = rng.choice((0, 0, rng.randrange(tokens)))
        chunks = tuple(sorted({rng.randrange(1, tokens) for _ in range(rng.choice((0, 0, 1, 3)))})) if tokens > 1 else ()
        waiting: Waiting | None = None
        for instance, direction in ((source, "send"), (sink, "receive")):
            for rank in range(instance.tp):
                life = self._lives[instance.name, rank]
                job = Job(
                    request_id=request_id,
                    attempt=attempt,
                    direction=direction,
                    peer=(sink if direction == "send" else source).name,
                    tokens=tokens,
                    first=first if direction == "receive" else 0,
                    deadline_s=deadline_s,
                    delay_s=rng.choice((0.0, rng.random() * 0.03)),
                    abort_s=rng.random() * 0.05 if rng.random() < 0.08 else None,
                    hold_s=rng.random() * 0.05,
                    chunks=chunks,
                )
                if not life.address:
                    continue
                waiting = waiting or Waiting(job, sink, set(), time.monotonic() + deadline_s + GRACE_S)
                waiting.lives.add(life)
                life.say({"op": "job", "job": msgspec.to_builtins(job)})
        if waiting is not None:
            self.report.requests += 1
            self._waiting[request_id, attempt] = waiting

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _ask(self) -> dict[str, Life]:
        """Ask all who are up how they are; the ones that are stopped answer later."""
        for life in self._lives.values():
            life.state = {}
            life.say({"op": "ask"})
        return {life.name: life for life in self._lives.values()}

    def _settled(self, condition: Callable[[dict[str, Any]], bool]) -> Callable[[], bool]:
        """Whether the latest answers of all satisfy `condition`; asks again until they do."""
        asked_at = [0.0]

        def done() -> bool:
            states = [life.state for life in self._lives.values()]
            if all(states) and all(condition(state) for state in states):
                return True
            if time.monotonic() - asked_at[0] > 0.1:
                asked_at[0] = time.monotonic()
                self._ask()
            return False

        for life in self._lives.values():
            life.state = {}
        return done

    def _heal(self, what: str) -> None:
        """Wait until everyone has found everyone."""
        began = time.monotonic()
        if self._pump(self._settled(lambda state: len(state["ready"]) == 2), HEAL_S, f"{what}: not ready again"):
            self._heals.append(time.monotonic() - began)

    def _who_is_not_ready(self) -> str:
        states = {name: life.state for name, life in self._ask().items()}
        return json.dumps({name: state.get("problems", "no answer") for name, state in states.items()})

    def round(self) -> None:
        """Kill a rank under load, and start it again."""
        rng = self._fate
        self._pump(lambda: False, 0.05 + rng.random() * 0.25, "")
        life = self._lives[rng.choice(sorted(self._lives))]
        same = (life.rank == 0 and life.instance.tp > 1) or rng.random() < 0.5  # a leader of several is not looked for
        others = [other for other in self._lives.values() if other.instance.prefills != life.instance.prefills]
        frozen = rng.choice(others) if rng.random() < 0.3 else None
        if frozen is not None:
            os.kill(frozen.process.pid, signal.SIGSTOP)
            self._pump(lambda: False, rng.random() * 0.1, "")
        address, life.address = life.address, ""
        del self._lives[life.instance.name, life.rank]
        life.kill()
        self._kills[f"{'frozen peer, ' if frozen else ''}{'same' if same else 'other'} address"] += 1
        self.report.victims.append(f"{life.name}, {'same' if same else 'other'} address")
        again = self._start(life.instance, life.rank, address if same else "tcp://127.0.0.1:0")
        for key, waiting in list(self._waiting.items()):
            if life in waiting.lives:
                waiting.lives.discard(life)
                self._finish(key, waiting)
        if frozen is not None:
            self._pump(lambda: False, rng.random() * 0.3, "")
            os.kill(frozen.process.pid, signal.SIGCONT)
        self._await_up([again])
        self._heal(f"{life.name} after {sum(self._kills.values())} kills")

    def run(self) -> Report:
        """All rounds, then the end: nothing may be left."""
        began = time.monotonic()
        try:
            self.start()
            self._heals.clear()
            self._loaded = True
            for _ in range(self.report.rounds):
                self.round()
            if self._faults:
                self._pump(lambda: bool(self.report.wrong), LIES_S, "")
            else:
                self._pump(lambda: False, 0.5, "")
            self._finish_up()
        finally:
            self._note(time.monotonic() - began)
        return self.report

    def _finish_up(self) -> None:
        self._loaded = False
        self._pump(lambda: not self._waiting, DEADLINE_S + GRACE_S, "")
        over = self._settled(lambda s: not s["under_way"] and not s["leased"] and s["free"] == s["num_pages"])
        self._pump(over, self._grace_s, "")

    def _note(self, seconds: float) -> None:
        report, states = self.report, [life.state for life in self._lives.values() if life.state]
        report.seconds = seconds
        report.outcomes, report.kills = dict(self._outcomes), dict(self._kills)
        if self._heals:
            report.heal_s = {"median": statistics.median(self._heals), "max": max(self._heals)}
        report.quarantined = sum(state["quarantined"] for state in states)
        reasons: Counter[str] = Counter()
        for state in states:
            reasons.update(state["reasons"])
        report.reasons = dict(reasons)
        report.missing_rows = sum(state["num_pages"] - state["free"] for state in states)
        report.dead_threads = sorted(set(report.dead_threads))

    def close(self) -> None:
        """End every process."""
        for life in self._lives.values():
            with suppress(ProcessLookupError):
                os.kill(life.process.pid, signal.SIGCONT)
            life.kill()
        self._lives.clear()


def run(
    engine: str, *, seed: int, rounds: int, fencing: bool = True, transport: str | None = None, grace_s: float = GRACE_S
) -> Report:
    """One run, and its report. `grace_s`: how long rows may take to come back in the end."""
    transport = transport or TRANSPORTS.get(engine, "auto")
    chaos = Chaos(engine, seed=seed, rounds=rounds, fencing=fencing, transport=transport, grace_s=grace_s)
    try:
        return chaos.run()
    finally:
        chaos.close()
        if chaos.report.good:
            shutil.rmtree(chaos.folder)
            chaos.report.logs = ""


def main(arguments: list[str] | None = None) -> int:
    """Run chaos with each engine; the exit status is 0 if every run was good (`--fencing off`: if each found wrong bytes)."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos", description="Ranks that are killed while they work")
    parser.add_argument("--engine", action="append", metavar="NAME", help="nixl, mooncake; by default both")
    parser.add_argument("--transport", metavar="NAME", help="what the engine may use; by default tcp")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="kills")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of choices; what processes make of it is their own")
    parser.add_argument("--fencing", choices=("on", "off"), default="on", help="off: the engines lie about what is over")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    fencing = options.fencing == "on"
    reports = []
    for engine in options.engine or ["nixl", "mooncake"]:
        settings = {"rounds": options.rounds, "transport": options.transport}
        reports.append(run(engine, seed=options.seed, fencing=fencing, **settings))
        sys.stdout.write(f"{reports[-1]}\n\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    return 0 if all(report.good if fencing else report.wrong for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
