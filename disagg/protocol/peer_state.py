"""Peers as values: what is known of each rank of a peer instance, and the effects of the peer table."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from disagg.core.errors import ConfigError
from disagg.protocol.messages import (
    Message,
    RingGrant,
    Welcome,
)
from disagg.protocol.types import NEVER, PeerRank


@dataclass(frozen=True)
class ConnectionLimits:
    """Times of the handshake and of liveness; seconds."""

    hello_retry_s: float = 0.2
    max_hello_retry_s: float = 2.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 8.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ConfigError(f"connection limits {each.name}: expected more than 0, found {getattr(self, each.name)!r}")


@dataclass(frozen=True)
class Identity:
    """This rank, as it introduces itself."""

    instance: str
    rank: int
    num_ranks: int
    epoch: int
    model: str
    revision: str
    table: bytes
    address: str
    leader: bool


class SendHello(NamedTuple):
    """Effect: send a hello on a connection that this rank opened. `dial` is the number of the connection among all that this
    rank has opened.
    """

    address: str
    generation: int = 0
    dial: int = 0


class SendTo(NamedTuple):
    """Effect: send a message on a connection that this rank opened."""

    address: str
    message: Message


class ReplyOn(NamedTuple):
    """Effect: send a message back on a connection that a peer opened."""

    connection: bytes
    message: Message


class Connect(NamedTuple):
    """Effect: open a connection."""

    address: str
    public_key: str | None


class Disconnect(NamedTuple):
    """Effect: close a connection that this rank opened."""

    address: str


class Ready(NamedTuple):
    """Effect: a rank answered our hello; transfers to it may start."""

    peer: PeerRank
    epoch: int
    welcome: Welcome


class Lost(NamedTuple):
    """Effect: a rank at this epoch is gone, for the reason `cause`. `announced`: it said goodbye. `renewed`: the same process
    has started another generation of its connection, with a ring of its own.
    """

    peer: PeerRank
    epoch: int
    cause: str
    announced: bool = False
    renewed: bool = False


PeerEffect = SendHello | SendTo | ReplyOn | Connect | Disconnect | Ready | Lost


class ConnectionState(enum.Enum):
    GREETING = "greeting"
    READY = "ready"


@dataclass
class PeerConnection:
    """The connection that this rank opened to one rank of a peer instance. The leader's rank is known once it answers.

    A side that gives a connection up starts a new `generation` and names it in its next hello, so that both sides end the old
    one.
    """

    instance: str
    address: str
    rank: int | None
    generation: int = 0
    state: ConnectionState = ConnectionState.GREETING
    epoch: int = 0
    heard_at: float = 0.0
    hello_at: float = 0.0
    hello_retry_s: float = 0.0
    heartbeat_at: float = NEVER
    problem: str = "no answer yet"
    unanswered: int = 0
    dial: int = 0
    ring: RingGrant | None = None

    @property
    def peer(self) -> PeerRank:
        return PeerRank(self.instance, -1 if self.rank is None else self.rank)

    def due(self, limits: ConnectionLimits) -> float:
        """When a hello, a heartbeat or a judgement of silence is next due."""
        if self.state is ConnectionState.GREETING:
            return self.hello_at
        return min(self.heartbeat_at, self.heard_at + limits.heartbeat_timeout_s)

    def greet_soon(self, now: float) -> None:
        """Send a hello at the next tick."""
        self.hello_at, self.hello_retry_s = now, 0.0


@dataclass
class PeerInstance:
    """A configured peer."""

    name: str
    address: str
    public_key: str | None
    links: dict[str, PeerConnection] = field(default_factory=dict)
    num_ranks: int | None = None

    @property
    def ready(self) -> bool:
        """Whether every rank of it has answered."""
        if self.num_ranks is None:
            return False
        answered = {link.rank for link in self.links.values() if link.state is ConnectionState.READY}
        return len(answered) == self.num_ranks

    @property
    def problem(self) -> str:
        """Why it is not ready."""
        waiting = [link for link in self.links.values() if link.state is not ConnectionState.READY]
        return "; ".join(f"{link.address}: {link.problem}" for link in waiting) or "not all of its ranks are known"
