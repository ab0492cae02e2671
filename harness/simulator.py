"""Simulates the protocol: ranks, a network that mistreats messages, an engine that cannot always tell, and peers that die.

Everything is in memory and time is virtual, so a schedule takes a millisecond. Beside the code under test runs a model
of the truth: whose every row is, what every cell holds, and which transfers may still touch memory. After every step:

* no row is released while a transfer may still read or write it, and no byte lands in rows that are someone else's;
* a success has every needed cell, from every elected writer, and the payload; a sender's success is that of all its
  destinations;
* a session moves only along its table, and tells its server exactly once how it ended, by its deadline;
* at the end nothing is left: no session, timer, reserve or lease, but for rows that nothing has proved quiet, and those
  are quarantined.

`python -m harness.simulator --schedules 10000 --seed 1` runs random schedules; a failure names the seed of its
schedule, which `--only` repeats.
"""

from __future__ import annotations

import argparse
import enum
import functools
import heapq
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from disagg.core.errors import LocalProtocolError, RequestAborted
from disagg.core.leases import LeaseState
from disagg.core.rows import Pages, Rows, Slot
from disagg.protocol.messages import Busy, Complete, RequestMessage, TokenRange, decode, encode, unpack_rows
from disagg.protocol.receive_session import RECEIVE_TABLE, ReceiveSession, ReceiveState
from disagg.protocol.send_session import SEND_TABLE, SendSession, SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, Limits, PeerRank, RequestKey, SendMessage, StartTransfer, StartVerify

NEVER = float("inf")
PAGE_TOKENS = 2
NUM_LAYERS = 2
MAX_LANES = 2
STATE_LAYER = 9
NUM_ROWS = 48
PATIENCE_S = 2.0
"""How long after its deadline a request may still be unreported: ticks come late."""


class Violation(AssertionError):
    """The protocol broke one of its promises."""


# ------------------------------------------------------------------------------------------------------- what happens


class Way(enum.Enum):
    """How a transfer goes. `LATE`: unsettled, lands afterwards and settles. `STUCK`: unsettled, lands at the very end."""

    DONE = "done"
    FAILED = "failed"
    LATE = "late"
    STUCK = "stuck"


class Behaviour(NamedTuple):
    """Of one transfer: reported after `seconds`; where that report is `LATE`, over after another `late_s`."""

    way: Way = Way.DONE
    seconds: float = 0.01
    late_s: float = 0.0
    late_error: str = ""


class Fates(Protocol):
    """What becomes of messages, transfers and ticks."""

    def message(self, index: int, now: float) -> tuple[float, ...]:
        """The delays of the copies of the message that arrive: none if it is lost."""

    def transfer(self, index: int) -> Behaviour:
        """How the transfer goes."""

    def foretold(self, index: int) -> float | None:
        """How long after it has landed the receiver of a transfer sees that, told beforehand; `None`: it is not told."""

    def lateness_s(self) -> float:
        """How much later than due a tick comes."""


@dataclass(frozen=True)
class FixedFates:
    """All goes well, but for the messages and transfers that are listed by their number."""

    messages: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    transfers: Mapping[int, Behaviour] = field(default_factory=dict)
    seen_s: Mapping[int, float] = field(default_factory=dict)

    def message(self, index: int, now: float) -> tuple[float, ...]:  # noqa: ARG002
        return self.messages.get(index, (0.001,))

    def transfer(self, index: int) -> Behaviour:
        return self.transfers.get(index, Behaviour())

    def foretold(self, index: int) -> float | None:
        return self.seen_s.get(index)

    def lateness_s(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class RandomFates:
    """Each with its probability; from `heal_at` on, messages arrive."""

    rng: random.Random
    loss: float = 0.0
    double: float = 0.0
    slow: float = 0.0
    trouble: float = 0.0
    stuck: float = 0.0
    heal_at: float = 0.0

    def message(self, index: int, now: float) -> tuple[float, ...]:  # noqa: ARG002
        draw = self.rng.random
        if now >= self.heal_at:
            return (0.001 + 0.002 * draw(),)
        if draw() < self.loss:
            return ()
        first = draw() * (2.0 if draw() < self.slow else 0.01)
        return (first, draw() * 2.0) if draw() < self.double else (first,)

    def transfer(self, index: int) -> Behaviour:  # noqa: ARG002
        draw = self.rng.random
        seconds = draw() * draw()
        if draw() < self.stuck:
            return Behaviour(Way.STUCK, seconds)
        if draw() >= self.trouble:
            return Behaviour(Way.DONE, seconds)
        if draw() < 0.5:
            return Behaviour(Way.FAILED, seconds)
        return Behaviour(Way.LATE, seconds, draw() * 20.0, self.rng.choice(("", "cancelled")))

    def foretold(self, index: int) -> float | None:  # noqa: ARG002
        draw = self.rng.random
        if draw() < 0.5:
            return None
        return NEVER if draw() < self.loss else draw() * draw()

    def lateness_s(self) -> float:
        return self.rng.random() * 0.05


@dataclass(frozen=True)
class Piece:
    """One `send` of a prefill rank: rows of tokens, in some layers, or the state."""

    after_s: float
    tokens: TokenRange = (0, 0)
    layers: tuple[int, ...] | None = None
    state: bool = False


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the servers do about one request; times from the start.

    At `impostor_at` another instance asks for it too, at `stray_at` another group of the right one, which then gives up.
    """

    prompt: int = 5
    hit: int = 0
    reserve_at: float = 0.0
    ready_after_s: float = 0.0
    send_at: float | None = 0.0
    pieces: tuple[Piece, ...] | None = None
    finish_after_s: float | None = 0.1
    deadline_s: float = 20.0
    send_deadline_s: float = 20.0
    receive_aborts: Mapping[int, float] = field(default_factory=dict)
    send_aborts: Mapping[int, float] = field(default_factory=dict)
    reverse: bool = False
    replicated: bool = False
    source_group: int = 0
    destination_group: int = 0
    impostor_at: float | None = None
    stray_at: float | None = None
    repeat: bool = False
    skew_s: float = 0.0

    @property
    def all_pieces(self) -> tuple[Piece, ...]:
        """All at once, and the state, where nothing else is said."""
        if self.pieces is not None:
            return self.pieces
        return (Piece(0.0, (0, self.prompt)), Piece(0.0, state=True))


@dataclass(frozen=True)
class Loss:
    """`rank` dies and comes back; or, with `other`, only the connection of the two ends.

    `proved`: quiet gets proved. `reopen`: the new life asks again for what the old one received.
    """

    at: float
    rank: PeerRank
    other: PeerRank | None = None
    proved: bool = True
    reopen: bool = False
    notice_s: tuple[float, float] = (0.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A whole schedule, but for what becomes of messages and transfers. Instance `P` prefills, `D` decodes, `E` intrudes."""

    scripts: tuple[Script, ...]
    num_senders: int = 1
    num_receivers: int = 1
    num_groups: int = 1
    tp: int = 1
    losses: tuple[Loss, ...] = ()
    heal_at: float = 0.0
    limits: Limits = field(default_factory=lambda: Limits(parked_reserve_s=15.0))

    def size(self, instance: str) -> int:
        """The number of ranks of a group."""
        return {"P": self.num_senders, "D": self.num_receivers, "E": 1}[instance]


# ----------------------------------------------------------------------------------------------------------- the truth


class Request:
    """One request of a scenario, and which cells each pair of ranks moves."""

    def __init__(self, index: int, script: Script, scenario: Scenario) -> None:
        self.index = index
        self.script = script
        self.key = RequestKey(index.to_bytes(16, "big"), index % 3)
        self.source, self.destination = ("D", "P") if script.reverse else ("P", "D")
        self.num_sources, self.num_destinations = scenario.size(self.source), scenario.size(self.destination)
        self.lanes = scenario.tp if self.num_sources % scenario.tp == 0 else 1
        self.payload = b"token %d" % index

    def elected(self, source: int, destination: int) -> dict[str, tuple[int, ...]]:
        """The layers that a source writes of each component, ranks within their groups."""
        parts = {}
        stage, lane = divmod(source, self.lanes)
        layers = tuple(layer for layer in range(NUM_LAYERS) if layer % (self.num_sources // self.lanes) == stage)
        if layers and lane in self.needed_lanes(destination):
            parts["kv"] = layers
        if source == destination % self.num_sources:
            parts["ssm"] = (STATE_LAYER,)
        return parts

    def needed_lanes(self, destination: int) -> tuple[int, ...]:
        return (destination % self.lanes,) if self.script.replicated else tuple(range(self.lanes))

    def value(self, layer: int, token: int, lane: int) -> int:
        """What the cell of this coordinate holds when it is right; never 0."""
        return ((self.index * 16 + layer) * 1024 + token) * MAX_LANES + lane + 1


def cell(layer: int, token: int, lane: int) -> int:
    """The cell of a page."""
    return (layer * PAGE_TOKENS + token % PAGE_TOKENS) * MAX_LANES + lane


class Holding:
    """Rows that one request has on one rank."""

    def __init__(self, request: Request, rank: int, pages: list[int], slot: int) -> None:
        self.request, self.rank = request, rank
        self.pages, self.slot = pages, slot
        self.rows: dict[str, Rows] = {"kv": Pages(np.array(pages, dtype=np.int32)), "ssm": Slot(slot)}


class Host:
    """One life of one rank: its sessions, its memory, and what its server was told."""

    def __init__(self, name: PeerRank, scenario: Scenario) -> None:
        self.name = name
        self.sessions = Sessions(group=name.rank // scenario.size(name.instance), limits=scenario.limits)
        self.alive = True
        self.born = 0
        self.links: dict[PeerRank, int] = {}
        self.tick_at = NEVER
        self.cells = [[0] * (NUM_LAYERS * PAGE_TOKENS * MAX_LANES) for _ in range(NUM_ROWS)]
        self.owner: list[Holding | None] = [None] * NUM_ROWS
        self.free = list(range(NUM_ROWS))
        self.opened: list[Opened] = []
        self.told: dict[int, Event] = {}
        self.unproved: set[PeerRank] = set()

    def hold(self, request: Request, num_tokens: range) -> Holding:
        """Rows for a request, the ones released last first."""
        num_pages = -(-num_tokens.stop // PAGE_TOKENS) - num_tokens.start // PAGE_TOKENS
        if len(self.free) <= num_pages:
            raise RuntimeError("the scenario has too many requests for its pools")
        rank = self.name.rank % (request.num_sources if self.name.instance == request.source else request.num_destinations)
        holding = Holding(request, rank, [self.free.pop() for _ in range(num_pages)], self.free.pop())
        for row in (*holding.pages, holding.slot):
            self.owner[row] = holding
        return holding

    def recycle(self, holding: Holding) -> None:
        """The rows are somebody else's from now on."""
        for row in (*holding.pages, holding.slot):
            if self.owner[row] is not holding:
                raise Violation(f"row {row} of {self.name} was released twice")
            self.owner[row] = None
            self.cells[row] = [0] * len(self.cells[row])
            self.free.append(row)


@dataclass(eq=False)
class Opened:
    """A session, and what is known of it. `states`: as last seen."""

    session: ReceiveSession | SendSession
    holding: Holding
    deadline: float
    states: dict[PeerRank | None, ReceiveState | SendState] = field(default_factory=dict)

    @property
    def nonce(self) -> int | None:
        """Of a reservation made here."""
        return self.session.nonce if isinstance(self.session, ReceiveSession) else None


class Move(NamedTuple):
    """One cell of a transfer."""

    source_row: int
    source_cell: int
    row: int
    cell: int


class Flight:
    """One transfer, as it really is."""

    def __init__(self, source: Host, destination: Host, start: StartTransfer, holding: Holding, moves: list[Move]) -> None:
        self.source, self.destination, self.ticket, self.moves = source, destination, start.ticket, moves
        self.holding = holding
        self.link = source.links[destination.name]
        self.void = destination.born > self.link
        """Whether it goes to a life of the destination that is over."""
        nonce = start.reserve.nonce
        self.target = None if self.void else next((o.holding for o in destination.opened if nonce == o.nonce), None)
        self.foretold: Complete | None = None
        """What its receiver was told beforehand, over `told_by`."""
        self.told_by = self.link


def _reachable(table: Iterable[tuple[object, object]]) -> set[tuple[object, object]]:
    """All pairs of states of which the second may follow the first, in any number of steps."""
    pairs = set(table)
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b is c} | pairs
        if more == pairs:
            return pairs
        pairs = more


_REACHABLE = _reachable(
    [(before, after) for (before, _), after in RECEIVE_TABLE.items()]
    + [(before, after) for (before, _), after in SEND_TABLE.items()]
)


# ----------------------------------------------------------------------------------------------------------- the world


class World:
    """Runs one scenario. Raises `Violation` as soon as a promise is broken."""

    def __init__(self, scenario: Scenario, fates: Fates) -> None:
        self.scenario, self.fates = scenario, fates
        self.now = 0.0
        self.num_messages = self.num_transfers = self.num_steps = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._links = itertools.count(1)
        self.flights: set[Flight] = set()
        self._broken: Violation | None = None
        self.requests = [Request(index, script, scenario) for index, script in enumerate(scenario.scripts)]
        self.hosts: dict[PeerRank, Host] = {}
        for instance in "PDE":
            for rank in range(scenario.size(instance) * scenario.num_groups):
                name = PeerRank(instance, rank)
                self.hosts[name] = Host(name, scenario)
        for host in self.hosts.values():
            host.links = dict.fromkeys(self.hosts, 0)
        for request in self.requests:
            self._plan(request)
        for loss in scenario.losses:
            self.at(loss.at, partial(self._lose, loss))

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._count), action))

    def run(self) -> World:
        """Everything up to some time after the last deadline; then nothing may be left."""
        scripts = self.scenario.scripts
        starts = [max(s.reserve_at, s.send_at or 0.0, s.impostor_at or 0.0, s.stray_at or 0.0) for s in scripts]
        starts += [loss.at + 1.0 for loss in self.scenario.losses]
        last = max(starts) + max(max(s.deadline_s, s.send_deadline_s) for s in scripts)
        end = max(last, self.scenario.heal_at) + self.scenario.limits.drain_timeout_s + 30.0
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            self.num_steps += 1
        self.now = end
        for host in self.hosts.values():
            self._act(host, partial(host.sessions.tick, end))
        self._check_end()
        return self

    # ------------------------------------------------------------------------------------------------------- servers

    def _plan(self, request: Request) -> None:
        """Put into the queue what the servers do about a request."""
        script = request.script
        for rank in range(request.num_destinations):
            host = PeerRank(request.destination, script.destination_group * request.num_destinations + rank)
            when = script.reserve_at + script.skew_s * rank
            self.at(when, partial(self._open_receive, host, request))
            if script.repeat:
                self.at(when + 0.3, partial(self._open_receive, host, request))
            if rank in script.receive_aborts:
                self.at(script.receive_aborts[rank], partial(self._abort, host, request))
        for rank in range(request.num_sources):
            host = PeerRank(request.source, script.source_group * request.num_sources + rank)
            if script.send_at is not None:
                self.at(script.send_at + script.skew_s * rank, partial(self._open_send, host, request))
            if rank in script.send_aborts:
                self.at(script.send_aborts[rank], partial(self._abort, host, request))
        if script.impostor_at is not None:
            self.at(script.impostor_at, partial(self._open_receive, PeerRank("E", 0), request))
        if script.stray_at is not None:
            group = (script.destination_group + 1) % self.scenario.num_groups
            stray = PeerRank(request.destination, group * request.num_destinations)
            self.at(script.stray_at, partial(self._open_receive, stray, request))
            self.at(script.stray_at + 0.05, partial(self._abort, stray, request))

    def _open_receive(self, name: PeerRank, request: Request) -> None:
        host, script = self.hosts[name], request.script
        holding = host.hold(request, range(script.hit, script.prompt))
        need = {"kv": (script.hit, script.prompt), "ssm": (0, script.prompt)}
        first = script.source_group * request.num_sources
        expected = {
            first + source: {part: (layers, need[part]) for part, layers in parts.items()}
            for source in range(request.num_sources)
            if (parts := request.elected(source, holding.rank))
        }
        deadline = self.now + script.deadline_s
        nonce = next(self._count)
        try:
            session = host.sessions.receives.open(
                request.key,
                peer=request.source,
                nonce=nonce,
                source_group=script.source_group,
                rows={"kv": Pages(np.array(holding.pages, dtype=np.int32), script.hit), "ssm": Slot(holding.slot)},
                need=need,
                expected=expected,
                now=self.now,
                deadline=deadline,
                ready=False,
                verify="full" if nonce % 2 else "off",
                tag=len(host.opened),
            )
        except LocalProtocolError:
            host.recycle(holding)
            return
        opened = Opened(session, holding, deadline)
        host.opened.append(opened)
        session.lease.on_release(partial(self._released, host, opened))
        if script.ready_after_s:
            self.at(self.now + script.ready_after_s, partial(self._ready, host, session))
        else:
            self._ready(host, session)

    def _ready(self, host: Host, session: ReceiveSession) -> None:
        self._act(host, partial(host.sessions.receives.ready, session, self.now))

    def _open_send(self, name: PeerRank, request: Request) -> None:
        host, script = self.hosts[name], request.script
        holding = host.hold(request, range(script.prompt))
        deadline = self.now + script.send_deadline_s
        expected = frozenset(r for r in range(request.num_destinations) if request.elected(holding.rank, r))
        session = host.sessions.sends.open(
            request.key,
            peer=request.destination,
            expected=expected,
            peer_group_size=request.num_destinations,
            now=self.now,
            deadline=deadline,
            tag=len(host.opened),
        )
        opened = Opened(session, holding, deadline)
        host.opened.append(opened)
        session.lease.on_release(partial(self._released, host, opened))
        for number, piece in enumerate(script.all_pieces):
            self.at(self.now + piece.after_s, partial(self._send, host, opened, number, piece))
        if script.finish_after_s is not None:
            self.at(self.now + script.finish_after_s, partial(self._finish, host, opened))
        self._act(host, lambda: None)

    def _send(self, host: Host, opened: Opened, number: int, piece: Piece) -> None:
        """Compute the piece, and send it; a server that was told that the request has ended does not."""
        session, holding = opened.session, opened.holding
        assert isinstance(session, SendSession)
        if not host.alive or session.finished or session.tag in host.told or session.lease.released:
            return
        self._fill(host, holding, piece)
        rows = {name: holding.rows[name] for name in (("ssm",) if piece.state else ("kv",))}
        chunk = Chunk(number, rows, None if piece.state else piece.tokens, piece.layers)
        self._act(host, partial(host.sessions.sends.send, session, chunk, self.now))

    def _fill(self, host: Host, holding: Holding, piece: Piece) -> None:
        request = holding.request
        lane = holding.rank % request.lanes
        if piece.state:
            host.cells[holding.slot][0] = request.value(STATE_LAYER, 0, 0)
        for token in range(*piece.tokens):
            for layer in range(NUM_LAYERS):
                host.cells[holding.pages[token // PAGE_TOKENS]][cell(layer, token, lane)] = request.value(layer, token, lane)

    def _finish(self, host: Host, opened: Opened) -> None:
        session = opened.session
        assert isinstance(session, SendSession)
        if host.alive and not session.finished and session.tag not in host.told:
            payload = opened.holding.request.payload
            self._act(host, partial(host.sessions.sends.finish, session, payload, self.now))

    def _abort(self, name: PeerRank, request: Request) -> None:
        host = self.hosts[name]
        error = RequestAborted("the client is gone")
        for opened in host.opened:
            session = opened.session
            if session.key != request.key:
                continue
            if isinstance(session, ReceiveSession):
                self._act(host, partial(host.sessions.receives.abort, session, error, self.now))
            else:
                self._act(host, partial(host.sessions.sends.abort, session, error, self.now))

    # ------------------------------------------------------------------------------------------------ what comes of it

    def _act(self, host: Host, call: Callable[[], None]) -> None:
        """Call into a living host's sessions, carry out the effects, and look at what has changed."""
        if not host.alive:
            return
        call()
        if self._broken is not None:
            raise self._broken
        effects = host.sessions.effects
        while effects:
            effect = effects.popleft()
            if isinstance(effect, SendMessage):
                self._post(host, effect.peer, effect.message)
            elif isinstance(effect, StartTransfer):
                self._start(host, effect)
            elif isinstance(effect, StartVerify):
                self.at(self.now + self.fates.lateness_s(), partial(self._verified, host, effect))
            else:
                self._told(host, effect)
        self._check(host)
        due = host.sessions.next_tick()
        if due < host.tick_at:
            host.tick_at = due
            self.at(max(due, self.now) + self.fates.lateness_s(), partial(self._tick, host, due))

    def _verified(self, host: Host, start: StartVerify) -> None:
        """The bytes themselves are looked at when the host is told."""
        self._act(host, partial(host.sessions.receives.verified, start.peer, start.key, self.now, error=None))

    def _tick(self, host: Host, due: float) -> None:
        if host.tick_at == due:
            host.tick_at = NEVER
        self._act(host, partial(host.sessions.tick, self.now))

    def _post(self, host: Host, peer: PeerRank, message: RequestMessage | Busy) -> None:
        data, link = encode(message), host.links[peer]
        for delay in self.fates.message(self.num_messages, self.now):
            self.at(self.now + delay, partial(self._deliver, host, peer, link, data))
        self.num_messages += 1

    def _deliver(self, source: Host, peer: PeerRank, link: int, data: bytes) -> None:
        """Hand a message in, unless its connection has ended for either side."""
        host = self.hosts[peer]
        if host.links[source.name] == link:
            message = decode(data)
            assert isinstance(message, RequestMessage | Busy)
            self._act(host, partial(host.sessions.on_message, source.name, message, self.now))

    def _told(self, host: Host, event: Event) -> None:
        opened = host.opened[event.tag]
        if event.tag in host.told:
            raise Violation(f"{host.name} was told twice how {event.key} ended")
        if self.now > opened.deadline + PATIENCE_S:
            raise Violation(f"{host.name} was told how {event.key} ended {self.now - opened.deadline} s after its deadline")
        host.told[event.tag] = event
        if event.ok == (event.error is not None):
            raise Violation(f"{host.name}: {event} is both a success and an error, or neither")
        if event.ok and event.direction == "receive":
            self._check_received(host, opened, event)
        elif event.ok:
            self._check_sent(opened)

    def _released(self, host: Host, opened: Opened) -> None:
        """The rows are released. Received ones are decoded from now on, all others go back into the pool at once.

        A lease may guard itself against what its callbacks raise, so a violation waits until the call is over.
        """
        for flight in self.flights:
            if opened.holding in (flight.holding, flight.target):
                rows = f"the rows of {opened.session.key} on {host.name}"
                self._broken = self._broken or Violation(f"{rows} were released during {flight.ticket}")
        if getattr(opened.session, "state", None) is ReceiveState.SUCCEEDED:
            self.at(self.now + 1.0, partial(host.recycle, opened.holding))
        else:
            host.recycle(opened.holding)

    # ---------------------------------------------------------------------------------------------------- the engine

    def _start(self, host: Host, start: StartTransfer) -> None:
        peer = start.ticket.peer
        opened = next(o for o in host.opened if isinstance(o.session, SendSession) and o.session.key == start.ticket.key)
        destination = self.hosts[peer]
        flight = Flight(host, destination, start, opened.holding, list(self._moves(opened.holding, peer, start)))
        self.flights.add(flight)
        behaviour = self.fates.transfer(self.num_transfers)
        seen_s = self.fates.foretold(self.num_transfers)
        self.num_transfers += 1
        if seen_s is not None:  # when it begins or, where it was not its request's last then, half way
            self._foretell(flight)
            self.at(self.now + behaviour.seconds / 2, partial(self._foretell, flight))
        over = self.now + behaviour.seconds
        half = len(flight.moves) // 2
        self.at(self.now + behaviour.seconds / 2, partial(self._land, flight, slice(0, half)))
        if behaviour.way is Way.DONE:
            self.at(over, partial(self._land, flight, slice(half, None), over=True))
            self.at(over, partial(self._over, flight, seen_s))
        elif behaviour.way is Way.FAILED:
            self.at(over, partial(self._land, flight, slice(0, 0), over=True))
            self.at(over, partial(self._settled, flight, "broken wire"))
        else:
            self.at(over, partial(self._settled, flight, "the engine cannot tell", unsettled=True))
        if behaviour.way is Way.LATE:
            self.at(over + behaviour.late_s, partial(self._land, flight, slice(half, None), over=True))
            self.at(over + behaviour.late_s, partial(self._settled, flight, behaviour.late_error))

    def _moves(self, holding: Holding, peer: PeerRank, start: StartTransfer) -> Iterable[Move]:
        """The cells that this rank was elected for, of what is to be written."""
        request = holding.request
        lane = holding.rank % request.lanes
        elected = request.elected(holding.rank, peer.rank % request.num_destinations)
        for written in start.written:
            rows = unpack_rows(start.reserve.rows[written.component])
            if isinstance(rows, Slot):
                yield Move(holding.slot, 0, rows.id, 0)
                continue
            ids, first = rows.ids.tolist(), rows.first_token // PAGE_TOKENS
            for layer in elected.get("kv", ()):
                if written.layers is not None and layer not in written.layers:
                    continue
                for token in range(written.start, written.stop):
                    page, at = token // PAGE_TOKENS, cell(layer, token, lane)
                    yield Move(holding.pages[page], at, ids[page - first], at)

    def _land(self, flight: Flight, part: slice, *, over: bool = False) -> None:
        """Bytes are read and land, also after the death of the source: the network still has them."""
        source, destination = flight.source, flight.destination
        for move in flight.moves[part]:
            if source.alive and source.owner[move.source_row] is not flight.holding:
                raise Violation(f"{flight.ticket} read row {move.source_row} of {source.name}, which is not its own")
            if flight.void or not destination.alive:
                continue
            if flight.target is None or destination.owner[move.row] is not flight.target:
                raise Violation(f"{flight.ticket} wrote row {move.row} of {destination.name}, which is not its own")
            destination.cells[move.row][move.cell] = source.cells[move.source_row][move.source_cell]
        if over:
            self.flights.discard(flight)

    def _foretell(self, flight: Flight) -> None:
        if flight.source.alive and flight.foretold is None:
            flight.foretold = flight.source.sessions.sends.foretell(flight.ticket)
            flight.told_by = flight.source.links[flight.destination.name]

    def _over(self, flight: Flight, seen_s: float | None) -> None:
        """All has landed; a receiver that was told beforehand may see that, and answer, before the sender looks; or never."""
        if flight.foretold is None or seen_s is None:
            self._settled(flight, "")
            return
        told = encode(flight.foretold)
        self.at(self.now + seen_s, partial(self._deliver, flight.source, flight.destination.name, flight.told_by, told))
        self.at(self.now + self.fates.lateness_s(), partial(self._settled, flight, "", known=True))

    def _settled(self, flight: Flight, error: str, *, unsettled: bool = False, known: bool = False) -> None:
        host = flight.source
        settled = host.sessions.sends.settled
        self._act(host, partial(settled, flight.ticket, now=self.now, error=error, unsettled=unsettled, known=known))

    # -------------------------------------------------------------------------------------------------------- losses

    def _lose(self, loss: Loss) -> None:
        """A rank dies and starts anew, or a connection ends; those who had to do with it notice one after the other."""
        link = next(self._links)
        early, late = loss.notice_s
        if loss.other is not None:
            self.at(self.now + early, partial(self._notice, self.hosts[loss.rank], loss.other, link, loss.proved))
            self.at(self.now + late, partial(self._notice, self.hosts[loss.other], loss.rank, link, loss.proved))
            return
        self.hosts[loss.rank].alive = False
        host = self.hosts[loss.rank] = Host(loss.rank, self.scenario)
        host.born = link
        host.links = dict.fromkeys(self.hosts, link)
        for request in self.requests if loss.reopen else ():
            group = range(request.num_destinations * request.script.destination_group, NUM_ROWS)[: request.num_destinations]
            if loss.rank.instance == request.destination and loss.rank.rank in group:
                self.at(max(self.now, request.script.reserve_at) + 0.6, partial(self._open_receive, loss.rank, request))
        for index, other in enumerate(self.hosts.values()):
            if other is not host:
                when = self.now + (late if index % 2 else early)
                self.at(when, partial(self._notice, other, loss.rank, link, loss.proved))

    def _notice(self, host: Host, peer: PeerRank, link: int, proved: bool) -> None:
        if host.links[peer] >= link:
            return
        host.links[peer] = link
        self._act(host, partial(host.sessions.peer_lost, peer, "connection reset", self.now, epoch=link))
        host.unproved.add(peer)
        if proved:
            self._prove(host, peer, link)

    def _prove(self, host: Host, peer: PeerRank, link: int) -> None:
        """Say that the peer is quiet once it is: of the connections that have ended, nothing is in flight or will be."""
        pair = {host.name, peer}
        unaware = self.hosts[peer].links[host.name] < link
        if unaware or any({f.source.name, f.destination.name} == pair and f.link < link for f in self.flights):
            self.at(self.now + 0.5, partial(self._prove, host, peer, link))
        else:
            if host.links[peer] == link:
                host.unproved.discard(peer)
            self._act(host, partial(host.sessions.peer_quiet, peer, epoch=link))

    # -------------------------------------------------------------------------------------------------------- checks

    def _check(self, host: Host) -> None:
        """Sessions move along their tables, and memory is bounded."""
        for opened in host.opened:
            session, seen = opened.session, opened.states
            if isinstance(session, ReceiveSession):
                found: Iterable[tuple[PeerRank | None, ReceiveState | SendState]] = [(None, session.state)]
            else:
                found = [(peer, destination.state) for peer, destination in session.destinations.items()]
            for peer, state in found:
                before = seen.get(peer, state)
                if before is not state and (before, state) not in _REACHABLE:
                    raise Violation(f"{session.key} on {host.name}: {before} became {state}")
                seen[peer] = state
        limits, sends, receives = self.scenario.limits, host.sessions.sends, host.sessions.receives
        peers = len({peer.instance for peer in self.hosts})
        if len(sends._parked) > limits.max_parked_reserves * peers:
            raise Violation(f"{host.name} has {len(sends._parked)} parked reserves")
        if max(len(sends._ended), len(receives._ended)) > limits.max_tombstones * peers:
            raise Violation(f"{host.name} has {len(sends._ended)} and {len(receives._ended)} tombstones")

    def _check_received(self, host: Host, opened: Opened, event: Event) -> None:
        """Every needed cell is right, and the payload is the request's."""
        holding, request = opened.holding, opened.holding.request
        script = request.script
        if host.cells[holding.slot][0] != request.value(STATE_LAYER, 0, 0):
            raise Violation(f"{event.key} succeeded on {host.name} without its state")
        first = script.hit // PAGE_TOKENS
        for token in range(script.hit, script.prompt):
            row = host.cells[holding.pages[token // PAGE_TOKENS - first]]
            for layer in range(NUM_LAYERS):
                for lane in request.needed_lanes(holding.rank):
                    if row[cell(layer, token, lane)] != request.value(layer, token, lane):
                        raise Violation(
                            f"{event.key} succeeded on {host.name} without token {token}, layer {layer}, lane {lane}"
                        )
        if event.payload != request.payload:
            raise Violation(f"{event.key} succeeded on {host.name} with payload {event.payload!r}")

    def _check_sent(self, opened: Opened) -> None:
        """Every living destination was told of a success."""
        session = opened.session
        assert isinstance(session, SendSession)
        for peer, destination in session.destinations.items():
            host = self.hosts[peer]
            for other in host.opened:
                asked = destination.reserve is None or destination.reserve.nonce == other.nonce
                if asked and other.session.key == session.key and not host.told[other.session.tag].ok:
                    raise Violation(f"{session.key} was sent with success, but {host.name} failed")

    def _check_end(self) -> None:
        """Nothing is left but what has a reason."""
        touched = {holding for flight in self.flights for holding in (flight.holding, flight.target)}
        stuck = {holding.request for holding in touched if holding is not None}
        for host in self.hosts.values():
            for opened in host.opened if host.alive else ():
                if opened.session.tag not in host.told:
                    raise Violation(f"{host.name} was never told how {opened.session.key} ended")
                self._check_lease(host, opened, touched)
                stuck.update({opened.holding.request} if host.unproved else ())
        for flight in list(self.flights):
            self._land(flight, slice(None), over=True)
        if stuck:
            return
        for host in self.hosts.values():
            sends, receives = host.sessions.sends, host.sessions.receives
            left = [*sends.sessions, *receives.sessions, *sends._served, *sends._parked._order, *host.sessions._timers._heap]
            if left:
                raise Violation(f"{host.name} still has {left}")

    def _check_lease(self, host: Host, opened: Opened, touched: set[Holding | None]) -> None:
        lease = opened.session.lease
        if lease.state is LeaseState.HELD or (lease.state is LeaseState.QUARANTINED and not lease.reason):
            raise Violation(f"the rows of {opened.session.key} on {host.name} are held, and nothing says why")
        if not lease.released and opened.holding not in touched and not host.unproved:
            raise Violation(f"the rows of {opened.session.key} on {host.name} stay in quarantine: {lease.reason}")


# ---------------------------------------------------------------------------------------------------------- schedules


def random_pieces(rng: random.Random, prompt: int, span_s: float) -> tuple[Piece, ...]:
    """Chunks of tokens, or of layers, in any order; now and then one is missing, or sent twice."""
    cuts = [0, *sorted(rng.sample(range(1, prompt), min(prompt - 1, rng.randrange(4)))), prompt]
    pieces = [Piece(rng.random() * span_s, tokens) for tokens in itertools.pairwise(cuts)]
    if rng.random() < 0.3:
        pieces = [Piece(p.after_s, p.tokens, (layer,)) for p in pieces for layer in range(NUM_LAYERS)]
    pieces.append(Piece(rng.random() * span_s, state=True))
    if rng.random() < 0.15:
        pieces[rng.randrange(len(pieces))] = rng.choice(pieces)
    elif rng.random() < 0.1:
        del pieces[rng.randrange(len(pieces))]
    return tuple(pieces)


def random_script(rng: random.Random, scenario_size: tuple[int, int], num_groups: int) -> Script:
    """What the servers might do about a request."""

    def times(num_ranks: int) -> dict[int, float]:
        probability = rng.choice((0.0, 0.0, 0.0, 0.3, 0.8))
        return {rank: rng.random() * rng.choice((1.0, 4.0, 12.0)) for rank in range(num_ranks) if rng.random() < probability}

    prompt, span = rng.randrange(1, 9), rng.choice((0.0, 1.0, 3.0))
    reverse = num_groups == 1 and rng.random() < 0.15
    num_senders, num_receivers = reversed(scenario_size) if reverse else scenario_size
    return Script(
        prompt=prompt,
        hit=rng.choice((0, 0, prompt, rng.randrange(prompt))),
        reserve_at=rng.random() * rng.choice((0.1, 3.0)),
        ready_after_s=rng.choice((0.0, 0.0, rng.random())),
        send_at=None if rng.random() < 0.04 else rng.random() * rng.choice((0.1, 3.0)),
        pieces=random_pieces(rng, prompt, span),
        finish_after_s=None if rng.random() < 0.04 else span,
        deadline_s=rng.choice((2.0, 10.0, 10.0)),
        send_deadline_s=rng.choice((2.0, 10.0, 10.0)),
        receive_aborts=times(num_receivers),
        send_aborts=times(num_senders),
        reverse=reverse,
        replicated=rng.random() < 0.3,
        source_group=rng.randrange(num_groups),
        destination_group=rng.randrange(num_groups),
        impostor_at=rng.random() * 3.0 if rng.random() < 0.1 else None,
        stray_at=rng.random() * 3.0 if num_groups > 1 and rng.random() < 0.5 else None,
        repeat=rng.random() < 0.1,
        skew_s=rng.choice((0.0, 0.2)),
    )


def random_loss(rng: random.Random, ranks: tuple[int, int]) -> Loss:
    """A death, or the end of a connection."""
    prefill, decode_ = PeerRank("P", rng.randrange(ranks[0])), PeerRank("D", rng.randrange(ranks[1]))
    rank, other = (prefill, decode_) if rng.random() < 0.5 else (decode_, prefill)
    return Loss(
        at=rng.random() * 4.0,
        rank=rank,
        other=other if rng.random() < 0.4 else None,
        proved=rng.random() < 0.8,
        reopen=rng.random() < 0.3,
        notice_s=(rng.random(), rng.random()),
    )


def random_world(seed: int, *, pair: bool = False) -> World:
    """A schedule of random size and unkindness, ready to run; `pair`: of one sender, one receiver and one request."""
    rng = random.Random(seed)
    sizes = (1, 1) if pair else rng.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (2, 3)))
    num_groups = 2 if not pair and rng.random() < 0.1 else 1
    rough = rng.choice((0.0, 0.05, 0.3))
    heal_at = rng.choice((0.0, 3.0, 15.0)) if rough else 0.0
    scenario = Scenario(
        scripts=tuple(random_script(rng, sizes, num_groups) for _ in range(1 if pair else rng.choice((1, 1, 2, 3)))),
        num_senders=sizes[0],
        num_receivers=sizes[1],
        num_groups=num_groups,
        tp=rng.choice((1, 2)),
        losses=tuple(random_loss(rng, sizes) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))),
        heal_at=heal_at,
        limits=Limits(
            max_parked_reserves=rng.choice((1, 2, 64)), parked_reserve_s=15.0, drain_timeout_s=rng.choice((1.0, 10.0))
        ),
    )
    fates = RandomFates(
        rng=rng,
        loss=rough,
        double=rough,
        slow=rough,
        trouble=rng.choice((0.0, 0.0, 0.1, 0.3)),
        stuck=rng.choice((0.0, 0.0, 0.0, 0.05)),
        heal_at=heal_at,
    )
    return World(scenario, fates)


def run_schedules(seeds: range | tuple[int, ...], *, pair: bool = False) -> tuple[int, int, int]:
    """Run the schedules of `seeds`: steps taken, endings, endings that were successful. Raises what a schedule breaks."""
    num_steps = num_events = num_ok = 0
    for seed in seeds:
        world = random_world(seed, pair=pair)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"schedule {seed}, at {world.now:.3f} s")
            raise
        told = [event for host in world.hosts.values() for event in host.told.values()]
        num_steps, num_events, num_ok = num_steps + world.num_steps, num_events + len(told), num_ok + sum(e.ok for e in told)
    return num_steps, num_events, num_ok


def main(arguments: list[str] | None = None) -> int:
    """Run random schedules; the exit status is 1 if one of them breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m harness.simulator", description="Random schedules of the protocol")
    parser.add_argument("--schedules", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="schedules with the seeds S*1000000 and following")
    parser.add_argument("--only", type=int, metavar="SEED", help="the one schedule that a failure has named")
    parser.add_argument("--pair", action="store_true", help="one sender, one receiver and one request each")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the schedules")
    options = parser.parse_args(arguments)
    first = options.seed * 1_000_000
    seeds = range(first, first + options.schedules)
    parts = [seeds[i :: options.jobs] for i in range(options.jobs)] if options.only is None else [(options.only,)]
    run = functools.partial(run_schedules, pair=options.pair)
    began = time.perf_counter()
    if len(parts) == 1:
        sums = [run(parts[0])]
    else:
        with ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn")) as pool:
            sums = list(pool.map(run, parts))
    seconds = time.perf_counter() - began
    num_steps, num_events, num_ok = (sum(column) for column in zip(*sums, strict=True))
    count = sum(len(part) for part in parts)
    ended = f"{num_ok} of {num_events} endings successful"
    sys.stdout.write(f"{count} schedules, {num_steps} steps, {ended}; {count / seconds:.0f} schedules/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
