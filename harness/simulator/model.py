"""The model of the truth: the owner of each row, the content of each cell, and which transfers may still touch memory.

A row is a page or a slot. A page has one cell per layer, token and tensor-parallel rank; a slot uses its first cell.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from disagg.core.rows import Pages, Rows, Slot
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.send_session import SendSession
from disagg.protocol.send_table import Readers
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import NEVER, Event, PeerRank, RequestKey, StartTransfer, State
from harness.simulator.scenario import DECODE, INTRUDER, PREFILL, Scenario, Script
from harness.simulator.slots import SlotPool

PAGE_TOKENS = 2
NUM_LAYERS = 2
MAX_TP = 2
STATE_LAYER = 9
NUM_ROWS = 48


class Violation(AssertionError):
    """The protocol broke one of its promises."""


class Request:
    """One request of a scenario, and the cells that each pair of ranks moves."""

    def __init__(self, index: int, script: Script, scenario: Scenario) -> None:
        self.index = index
        self.script = script
        self.key = RequestKey(index.to_bytes(16, "big"), index % 3)
        self.source, self.destination = (DECODE, PREFILL) if script.reverse else (PREFILL, DECODE)
        self.num_sources = scenario.group_size(self.source)
        self.num_destinations = scenario.group_size(self.destination)
        self.tp = scenario.tp if self.num_sources % scenario.tp == 0 else 1
        self.payload = b"token %d" % index
        self.received: set[PeerRank] = set()
        """The ranks that have received it, also those that have died since."""

    def elected(self, source: int, destination: int) -> dict[str, tuple[int, ...]]:
        """The layers of each component that `source` writes to `destination`; both are ranks within their groups."""
        parts = {}
        stage, tp_rank = divmod(source, self.tp)
        layers = tuple(layer for layer in range(NUM_LAYERS) if layer % (self.num_sources // self.tp) == stage)
        if layers and tp_rank in self.needed_tp_ranks(destination):
            parts["kv"] = layers
        if source == destination % self.num_sources:
            parts["ssm"] = (STATE_LAYER,)
        return parts

    def readers(self, source: int, instance: str, group_size: int) -> Readers:
        """The group ranks of an instance that `source`, a rank within its group, writes to, and their number. Those of the
        intruder have the layout of the first ranks of the destination.
        """
        if instance == self.source:
            return frozenset(), group_size
        return frozenset(rank for rank in range(group_size) if self.elected(source, rank)), group_size

    def takers(self, sizes: Callable[[str], int]) -> list[tuple[str, int]]:
        """The groups, by instance and number, of which every rank has received it. `sizes`: of the groups of an instance."""
        ranks = Counter((peer.instance, peer.rank // sizes(peer.instance)) for peer in self.received)
        return sorted(group for group, count in ranks.items() if count == sizes(group[0]))

    def key_of(self, receiver: PeerRank) -> RequestKey:
        """The attempt that a rank asks for."""
        another = self.script.any_attempt and receiver.instance == INTRUDER
        return self.key._replace(attempt=self.key.attempt + another)

    def needed_tp_ranks(self, destination: int) -> tuple[int, ...]:
        return (destination % self.tp,) if self.script.replicated else tuple(range(self.tp))

    def value(self, layer: int, token: int, tp_rank: int) -> int:
        """The correct content of a cell. Never 0, and different for every request and cell."""
        return ((self.index * 16 + layer) * 1024 + token) * MAX_TP + tp_rank + 1


def cell(layer: int, token: int, tp_rank: int) -> int:
    """The index of a cell within its page."""
    return (layer * PAGE_TOKENS + token % PAGE_TOKENS) * MAX_TP + tp_rank


class Holding:
    """The rows that one request holds on one rank; `rank` is counted within its group."""

    def __init__(self, request: Request, rank: int, pages: list[int], slot: int) -> None:
        self.request, self.rank = request, rank
        self.pages, self.slot = pages, slot
        self.rows: dict[str, Rows] = {"kv": Pages(np.array(pages, dtype=np.int32)), "ssm": Slot(slot)}


@dataclass(eq=False)
class OpenSession:
    """A session, its rows, and the last state seen of each of its peers (`None`: its own)."""

    session: ReceiveSession | SendSession
    holding: Holding
    deadline: float
    states: dict[PeerRank | None, State] = field(default_factory=dict)

    @property
    def nonce(self) -> int | None:
        """The nonce of a receive session; `None` for a send session."""
        return self.session.nonce if isinstance(self.session, ReceiveSession) else None


class Host:
    """One rank from start to death: its sessions, its memory, and the events its server got.

    `epochs` counts the connections to each peer; `born` is the epoch in which the rank started. `heard`: the newest process of
    each peer that it has heard of. It does nothing before `stopped_until`. Of a dead rank, what it has sent is read until
    `read_until`, also by ranks that know of its death, but not once they have heard of its successor.
    """

    def __init__(self, name: PeerRank, scenario: Scenario, requests: Sequence[Request], *, born: int = 0) -> None:
        self.name, self.born = name, born
        self._scenario, self._requests = scenario, requests
        self.slots = SlotPool(replaces=scenario.replaces_slots)
        draws = itertools.count(1)
        self.sessions = Sessions(
            group=name.rank // scenario.group_size(name.instance),
            epoch=self.process,
            limits=scenario.limits,
            slots=self.slots,
            draw=lambda _bits: next(draws),
            readers_of=self._readers_of,
        )
        self.alive = True
        self.stopped_until = self.stopped_s = self.read_until = 0.0
        self.heard: dict[PeerRank, int] = {}
        self.epochs: dict[PeerRank, int] = {}
        self.tick_at = NEVER
        self.cells = [[0] * (NUM_LAYERS * PAGE_TOKENS * MAX_TP) for _ in range(NUM_ROWS)]
        self.owner: list[Holding | None] = [None] * NUM_ROWS
        self.free = list(range(NUM_ROWS))
        self.opened: list[OpenSession] = []
        self.events: dict[int, Event] = {}
        self.unproved: set[tuple[PeerRank, int]] = set()  # by the epoch that was lost

    def _readers_of(self, instance: str) -> Readers:
        """The ranks of an instance that this one writes to, the same for all requests that it keeps."""
        size = self._scenario.group_size(instance)
        for request in self._requests:
            if request.script.kept and request.source == self.name.instance:
                return request.readers(self.name.rank % request.num_sources, instance, size)
        return frozenset(), size

    @property
    def process(self) -> int:
        """The epoch of its process, as reserves name it: never 0."""
        return self.born + 1

    def hold(self, request: Request, num_tokens: range) -> Holding:
        """Allocate rows for a request, the most recently released first."""
        num_pages = -(-num_tokens.stop // PAGE_TOKENS) - num_tokens.start // PAGE_TOKENS
        if len(self.free) <= num_pages:
            raise RuntimeError(f"{self.name} has {len(self.free)} free rows, the scenario needs {num_pages + 1}")
        rank = self.name.rank % (request.num_sources if self.name.instance == request.source else request.num_destinations)
        holding = Holding(request, rank, [self.free.pop() for _ in range(num_pages)], self.free.pop())
        for row in (*holding.pages, holding.slot):
            self.owner[row] = holding
        return holding

    def recycle(self, holding: Holding) -> None:
        """Zero the rows and return them to the pool."""
        for row in (*holding.pages, holding.slot):
            if self.owner[row] is not holding:
                raise Violation(f"row {row} of {self.name} was released twice")
            self.owner[row] = None
            self.cells[row] = [0] * len(self.cells[row])
            self.free.append(row)


class Move(NamedTuple):
    """One cell of a transfer."""

    source_row: int
    source_cell: int
    row: int
    cell: int


class Flight:
    """One transfer and the memory that it may touch."""

    def __init__(self, source: Host, destination: Host, start: StartTransfer, holding: Holding, moves: list[Move]) -> None:
        self.source, self.destination, self.ticket, self.moves = source, destination, start.ticket, moves
        self.holding = holding
        self.epoch = source.epochs[destination.name]
        self.stale = destination.born > self.epoch
        """Whether the rank that it writes to has restarted since."""
        nonce = start.reserve.nonce
        self.target = None if self.stale else next((o.holding for o in destination.opened if nonce == o.nonce), None)
        self.reserved = self.target
        """The destination's rows that stay leased until the transfer settles, also if it writes into slots."""
        self.packed = False
        """Whether it writes into slots of its destination, and not into rows."""
        self.late_write: Callable[[], None] | None = None
        """The write of a packed transfer that lands late, or when the simulation ends."""
