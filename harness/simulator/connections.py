"""Simulated connections between two instances whose processes are killed, cut off, stopped and started anew.

The peer tables are the real ones; processes, the network and the clock are not. Messages take random times. A killed process
closes its connections, a cut loses messages and ends connections that are silent for too long, and libzmq's reconnections are
played as they happen: under the same number on one side, as a new connection on the other, on which everything arrives that
had not left, or was sent while nobody listened.

After each fault both sides must become ready again, and no fault may cost a process its peer more than once. A message about a
request must be taken only by the process that it was sent to.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.protocol.loans import Lender
from disagg.protocol.messages import PROTOCOL_VERSION, AnyMessage, Drained, Hello, Lending, Member, Welcome, decode, encode
from disagg.protocol.peer_effects import (
    Connect,
    ConnectionLimits,
    Disconnect,
    Identity,
    Lost,
    PeerEffect,
    ReplyOn,
    SendHello,
    SendTo,
)
from disagg.protocol.peers import PeerTable
from disagg.protocol.types import PeerRank
from harness.simulator.slots import SlotPool

LIMITS = ConnectionLimits()
NAMES = ("prefill", "decode")
ADDRESSES = {"prefill": "tcp://10.0.0.1:7000", "decode": "tcp://10.0.0.2:7000"}
STEP_S = 0.05
FAULTS_S, SETTLE_S, NUM_SINGLE = 60.0, 25.0, 5
"""How long faults happen in quick succession, how long both sides may take to become ready, and the number of single faults."""
RECONNECT_S = (0.02, 0.3, 1.0)
"""How long libzmq may take to connect again."""
ABOUT_REQUESTS = 0.3
"""How often a process that is ready sends a message about a request."""


@dataclass(eq=False)
class Process:
    """One process of an instance, and the connections that it has opened: dial -> number of the connection under it.
    `travelling` messages have been sent and have not arrived. While the process `is_cut_off`, its messages queue in `unsent`.
    """

    name: str
    table: PeerTable
    lender: Lender
    alive: bool = True
    is_cut_off: bool = False
    opened: dict[int, int] = field(default_factory=dict)
    travelling: list[tuple[int, AnyMessage]] = field(default_factory=list)
    unsent: list[tuple[int, AnyMessage]] = field(default_factory=list)

    @property
    def who(self) -> str:
        return f"{self.name}@{self.table.identity.epoch}"


class ConnectionWorld:
    """Two instances of one rank each. `lost` has the time of every loss, the process that lost its peer, and the cause;
    `misled` the processes that took a message for another one.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.lost: list[tuple[float, str, str]] = []
        self.misled: list[str] = []
        self._rng = random.Random(seed)
        self._epochs = itertools.count(1)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cut_until = 0.0
        self._last: dict[tuple[bytes, str], float] = {}
        self._earlier: set[bytes] = set()
        self.live: dict[str, Process] = {}
        for name in NAMES:
            self.start(name)

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a process of an instance, at its address."""
        epoch = next(self._epochs)
        identity = Identity(name, 0, 1, epoch, "m", "", b"t", ADDRESSES[name], leader=True)

        lender = Lender(effects=deque(), slots=SlotPool(replaces=True))

        def accept(hello: Hello, members: Callable[[], tuple[Member, ...]]) -> Welcome:
            lending = lender.open(PeerRank(hello.instance, hello.rank), hello.epoch, hello.generation)
            return welcome(name, 0, epoch, members(), generation=hello.generation, lending=lending)

        table = PeerTable(
            identity, leader=None, accept_hello=accept, validate_welcome=lambda _: (1, frozenset({0})), limits=LIMITS
        )
        other = _other(name)
        process = self.live[name] = Process(name, table, lender, is_cut_off=other not in self.live)
        table.add_peer(other, ADDRESSES[other], None, self.now)
        self._carry_out(process)
        if (waiting := self.live.get(other)) is not None:
            self._at(self._rng.choice(RECONNECT_S), lambda: self._reconnect(waiting, process))

    def renew(self, name: str) -> None:
        """Start the engine of a process again."""
        process = self.live[name]
        process.table.start_anew(PeerRank(_other(name), 0), "another engine", self.now)
        self._carry_out(process)

    def _reconnect(self, waiting: Process, process: Process) -> None:
        """Send the queued messages to the process that listens now."""
        if not process.alive or not waiting.alive:
            return
        unsent, waiting.unsent, waiting.is_cut_off = waiting.unsent, [], False
        for dial, message in unsent:
            self._send(waiting, dial, message)

    def kill(self, name: str) -> None:
        """End a process. Its connections close, and messages that it has sent still arrive. Of those on their way to it, the
        first are lost; the others had not left, and go to the next process.
        """
        process = self.live.pop(name)
        process.alive = False
        for dial, number in process.opened.items():
            self._close(process, dial, number)
        for other in self.live.values():  # libzmq connects them again, once something listens there
            for dial, number in other.opened.items():
                other.opened[dial] = next(self._numbers)
                self._follow(_connection(other, dial, other.opened[dial]), _connection(other, dial, number))
            num_lost = self._rng.randrange(len(other.travelling) + 1)
            other.unsent = other.travelling[num_lost:] + other.unsent
            other.travelling, other.is_cut_off = [], True

    def _follow(self, later: bytes, earlier: bytes) -> None:
        """What had been answered on the earlier connection still arrives, before anything on the later one."""
        self._earlier.add(earlier)
        self._last[later, "back"] = self._last.get((earlier, "back"), self.now)

    def restart_later(self, name: str, delay_s: float) -> None:
        self._at(delay_s, lambda: self.start(name) if name not in self.live else None)

    def cut(self, seconds: float) -> None:
        """Nothing arrives for a while. A longer silence than the limit ends every connection on both sides."""
        self._cut_until = self.now + seconds
        if seconds >= LIMITS.heartbeat_timeout_s:
            self._at(LIMITS.heartbeat_timeout_s, self._end_all)

    def _end_all(self) -> None:
        for process in list(self.live.values()):
            for dial, number in list(process.opened.items()):
                self._close(process, dial, number)
                process.opened[dial] = next(self._numbers)

    def reset(self) -> None:
        """A connection breaks, and libzmq opens it again."""
        process = self._rng.choice(list(self.live.values())) if self.live else None
        if process is not None and process.opened:
            dial = self._rng.choice(list(process.opened))
            self._close(process, dial, process.opened[dial])
            process.opened[dial] = next(self._numbers)

    # -- network -----------------------------------------------------------------------------------------------------

    def _at(self, delay_s: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), run))

    def _deliver(self, stream: tuple[bytes, str], run: Callable[[], None]) -> None:
        """Call `run` after a random time, and not before what was sent earlier in that direction of a connection."""
        delay_s = self._rng.choice((0.001, 0.01, 0.05, self._rng.random() * 0.5))
        at = self._last[stream] = max(self._last.get(stream, 0.0), self.now + delay_s)
        self._at(at - self.now, run)

    def _close(self, process: Process, dial: int, number: int) -> None:
        """The other side learns that a connection has ended."""
        target, connection = _other(process.name), _connection(process, dial, number)

        def closed() -> None:
            found = self.live.get(target)
            if found is not None:
                found.table.on_closed(connection, self.now)

        self._deliver((connection, "out"), closed)

    def _send(self, process: Process, dial: int, message: AnyMessage) -> None:
        number, target = process.opened.get(dial), self.live.get(_other(process.name))
        if number is None:
            return
        if process.is_cut_off or target is None:
            process.unsent.append((dial, message))
            return
        if self.now < self._cut_until:
            return
        data, connection, sent = encode(message), _connection(process, dial, number), (dial, message)
        process.travelling.append(sent)

        def arrive() -> None:
            if not target.alive:
                return
            process.travelling = [each for each in process.travelling if each is not sent]
            found = decode(data)
            if target.table.on_inbound(connection, "", found, self.now) is None:
                return
            link = target.table.link(PeerRank(process.name, 0))
            if isinstance(found, Drained) and found.nonce != target.table.identity.epoch:
                self.misled.append(f"{target.who} took a message for {target.name}@{found.nonce} at {self.now:.2f}")
            if link is not None and link.epoch != process.table.identity.epoch:
                self.misled.append(f"{target.who} took a message of {process.who} for one of @{link.epoch} at {self.now:.2f}")

        self._deliver((connection, "out"), arrive)

    def _reply(self, process: Process, connection: bytes, message: AnyMessage) -> None:
        epoch, dial, number = map(int, connection.split())
        target = self.live.get(_other(process.name))
        if target is None or target.table.identity.epoch != epoch or self.now < self._cut_until:
            return
        data = encode(message)

        def arrive() -> None:
            if target.alive and (target.opened.get(dial) == number or (connection in self._earlier and dial in target.opened)):
                target.table.on_reply(dial, decode(data), self.now)

        self._deliver((connection, "back"), arrive)

    def _carry_out(self, process: Process) -> None:
        effects = process.table.effects
        while effects:
            self._carry_out_one(process, effects.popleft())

    def _carry_out_one(self, process: Process, effect: PeerEffect) -> None:
        me = process.table.identity
        match effect:
            case Connect(dial):
                process.opened[dial] = next(self._numbers)
            case Disconnect(dial):
                self._close(process, dial, process.opened.pop(dial))
            case SendHello(dial, generation, peer_epoch, again):
                self._send(
                    process, dial, _hello(me, generation, peer_epoch, dial, to=process.table.expected_at(dial), again=again)
                )
            case SendTo(dial, message):
                self._send(process, dial, message)  # type: ignore[arg-type]
            case ReplyOn(connection, message):
                self._reply(process, connection, message)  # type: ignore[arg-type]
            case Lost(peer, epoch, generation, cause):
                process.lender.peer_lost(peer, epoch, generation)
                self.lost.append((self.now, process.who, cause))

    def _ask(self, process: Process) -> None:
        """Send a message about a request, which names the process that it is for."""
        link = process.table.link(PeerRank(_other(process.name), 0))
        if link is not None and self._rng.random() < ABOUT_REQUESTS:
            self._send(process, link.dial, Drained(request_id=bytes(16), attempt=0, nonce=link.epoch))

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self, seconds: float, fault: Callable[[], None] | None = None) -> None:
        """Let time pass. `fault` is called in each step."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            if fault is not None:
                fault()
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for process in list(self.live.values()):
                process.table.tick(self.now)
                self._carry_out(process)
                self._ask(process)

    def ready(self) -> bool:
        """Whether both sides are ready."""
        return all(name in self.live and self.live[name].table.instances[_other(name)].ready for name in NAMES)


def check_connections(seed: int) -> list[str]:
    """Run one schedule: faults in quick succession, then single ones. Returns what was wrong; empty if nothing was."""
    world, rng = ConnectionWorld(seed), random.Random(seed + 1)

    def fault() -> None:
        if rng.random() < 0.008:
            _fault(world, rng)

    world.run(FAULTS_S, fault)
    world.run(SETTLE_S)
    found = [] if world.ready() else ["not ready after many faults"]
    for _ in range(NUM_SINGLE):
        before = len(world.lost)
        what, allowed = _fault(world, rng)
        world.run(SETTLE_S)
        lost = Counter(who for _, who, _ in world.lost[before:])
        if not world.ready():
            found.append(f"not ready after {what}")
        if any(lost[who] > allowed.get(who, 0) for who in lost):
            found.append(f"after {what}, more losses than {allowed}: {world.lost[before:]}")
    return [f"seed {seed}: {each}" for each in (*found, *world.misled)]


def _fault(world: ConnectionWorld, rng: random.Random) -> tuple[str, dict[str, int]]:
    """Make one fault. Returns what it is, and how often each process may lose its peer for it."""
    name = rng.choice(NAMES)
    kind = rng.choice(("kill", "kill", "cut", "reset", "renew"))
    if kind == "kill" and name in world.live:
        survivor = world.live.get(_other(name))
        world.kill(name)
        delay_s = rng.choice((0.05, 0.3, 1.0, 12.0))
        world.restart_later(name, delay_s)
        return f"{name} was killed and restarted {delay_s} s later", {survivor.who: 1} if survivor is not None else {}
    once = {process.who: 1 for process in world.live.values()}
    if kind == "cut":
        seconds = rng.choice((0.2, 2.0, 10.0))
        world.cut(seconds)
        return f"a cut of {seconds} s", once
    if kind == "renew" and name in world.live:
        world.renew(name)
        return f"{name} started its engine again", once
    world.reset()
    return "a connection broke", once


def _other(name: str) -> str:
    return NAMES[1 - NAMES.index(name)]


def _connection(process: Process, dial: int, number: int) -> bytes:
    return f"{process.table.identity.epoch} {dial} {number}".encode()


def _hello(me: Identity, generation: int, peer_epoch: int, dial: int, *, to: PeerRank | None, again: bool) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        instance=me.instance,
        rank=me.rank,
        epoch=me.epoch,
        model=me.model,
        revision=me.revision,
        table=me.table,
        address=me.address,
        generation=generation,
        peer_epoch=peer_epoch,
        dial=dial,
        again=again,
        to=to,
    )


def welcome(
    instance: str = "decode-0",
    rank: int = 0,
    epoch: int = 7,
    members: tuple[Member, ...] = (),
    *,
    version: int = PROTOCOL_VERSION,
    generation: int = 0,
    lending: Lending | None = None,
) -> Welcome:
    """The answer of a rank that moves nothing."""
    return Welcome(
        version=version,
        instance=instance,
        rank=rank,
        epoch=epoch,
        model="m",
        revision="",
        table=b"t",
        plans=b"",
        members=members,
        placements=b"",
        backend="local",
        endpoint=b"",
        generation=generation,
        lending=lending,
    )
