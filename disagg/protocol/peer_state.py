"""Peers as values: what is known of each rank of a peer instance, and the effects of the peer table."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from disagg.core.errors import DisaggError
from disagg.protocol.messages import (
    Lending,
    Message,
    Welcome,
)
from disagg.protocol.types import NEVER, PeerRank, check_seconds


class Undecided(DisaggError):
    """A peer was neither accepted nor refused yet. Its hello is repeated after `retry_s` seconds."""

    def __init__(self, message: str, *, retry_s: float = 0.02) -> None:
        super().__init__(message)
        self.retry_s = retry_s


MAX_HEARTBEAT_S = 1_000_000
"""Limit on the times of heartbeats: libzmq counts milliseconds in 32 bits."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Times of the handshake and of liveness; seconds.

    Every `heartbeat_s` libzmq pings each peer. This rank renews its hello every `renew_s`, and at least every
    `max_hello_retry_s` while ranks of the peer's instance are not ready. A peer whose libzmq does not answer for
    `heartbeat_timeout_s` is lost. A peer that was refused gets a hello again after `refused_retry_s`. An instance that was
    admitted, or named by a request only, is forgotten when it has not been ready for `forget_s`, and at once if its host
    refuses connections to its address, or is not known, and no connection of it is there.
    """

    hello_retry_s: float = 0.2
    max_hello_retry_s: float = 2.0
    heartbeat_s: float = 4.0
    heartbeat_timeout_s: float = 8.0
    refused_retry_s: float = 30.0
    forget_s: float = 60.0

    @property
    def renew_s(self) -> float:
        """How often a hello is renewed while nothing changes: what it tells has come by other ways by then."""
        return 8 * self.heartbeat_s

    @property
    def connect_back_s(self) -> float:
        """How long a peer that has answered may take to connect to this rank: its interpreter may be busy."""
        return 4 * self.heartbeat_timeout_s

    def __post_init__(self) -> None:
        for each in fields(self):
            most = MAX_HEARTBEAT_S if each.name.startswith("heartbeat") else NEVER
            check_seconds(getattr(self, each.name), f"connection limits {each.name}", most=most)


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

    @property
    def peer(self) -> PeerRank:
        return PeerRank(self.instance, self.rank)

    def __str__(self) -> str:
        return f"{self.instance}/{self.rank}"


class SendHello(NamedTuple):
    """Effect: send a hello on connection `dial`, the number of a connection among all that this rank has opened. `again`: ask
    for one in return.
    """

    dial: int
    generation: int = 0
    peer_epoch: int = 0
    again: bool = False


class SendTo(NamedTuple):
    """Effect: send a message on a connection that this rank opened."""

    dial: int
    message: Message


class ReplyOn(NamedTuple):
    """Effect: send a message back on a connection that a peer opened."""

    connection: bytes
    message: Message


class Connect(NamedTuple):
    """Effect: open connection number `dial`."""

    dial: int
    address: str
    public_key: str | None


class Disconnect(NamedTuple):
    """Effect: close a connection that this rank opened."""

    dial: int


class Probe(NamedTuple):
    """Effect: find out whether anybody listens at the other end of a connection that this rank opened, without waiting."""

    dial: int


class Forgotten(NamedTuple):
    """Effect: an instance is not a peer any more, for the reason `cause`."""

    instance: str
    cause: str


class Unanswered(NamedTuple):
    """Effect: a configured peer has not answered several hellos."""

    instance: str
    address: str


class Ready(NamedTuple):
    """Effect: a rank answered our hello; transfers to it may start."""

    peer: PeerRank
    epoch: int
    welcome: Welcome


class Lost(NamedTuple):
    """Effect: a rank at this epoch is gone, for the reason `cause`. `announced`: it said goodbye. `renewed`: the same process
    has started another generation of its connection, with loans of its own.
    """

    peer: PeerRank
    epoch: int
    cause: str
    announced: bool = False
    renewed: bool = False


PeerEffect = SendHello | SendTo | ReplyOn | Connect | Disconnect | Unanswered | Probe | Ready | Lost | Forgotten


LEADER = 0
"""The rank that answers for its instance."""
NO_ANSWER = "no answer yet"
"""The problem of a connection before anything has come back on it."""


class ConnectionState(enum.Enum):
    GREETING = "greeting"
    READY = "ready"


@dataclass
class PeerConnection:
    """The connection that this rank opened to one rank of a peer instance.

    `dial` is the number of the connection. `epoch` is that of the peer's process, 0 until it is known. A side that gives a
    connection up starts a new `generation` and names it in its next hello, so that both sides end the old one; a new process
    starts at generation 0. `asked` counts the hellos whose welcome may still come. `heard`: the peer has said hello since this
    side last did. The peer is lost at `lost_at`, unless a connection that it opened is there by then. `is_welcome`: the last
    hello was answered with a welcome, and nothing has called for another hello since. `armed_at` is when it is looked at next.
    """

    instance: str
    address: str
    rank: int
    dial: int
    generation: int = 0
    state: ConnectionState = ConnectionState.GREETING
    epoch: int = 0
    hello_at: float = 0.0
    hello_retry_s: float = 0.0
    lost_at: float = NEVER
    ended: bool = False
    problem: str = NO_ANSWER
    refused: bool = False
    unanswered: int = 0
    asked: int = 0
    heard: bool = False
    lending: Lending | None = None
    is_welcome: bool = False
    armed_at: float = NEVER

    @property
    def peer(self) -> PeerRank:
        return PeerRank(self.instance, self.rank)

    @property
    def is_ready(self) -> bool:
        return self.state is ConnectionState.READY

    @property
    def due(self) -> float:
        """When a hello or the loss of the peer is next due."""
        return min(self.hello_at, self.lost_at) if self.is_ready else self.hello_at

    def greet_soon(self, now: float) -> None:
        """Send a hello at the next tick."""
        self.hello_at, self.hello_retry_s, self.refused, self.is_welcome = now, 0.0, False, False

    def refuse(self, problem: str, retry_at: float, *, final: bool) -> None:
        """The other side cannot be used. `final`: for a reason that will not pass by itself."""
        self.problem, self.hello_at, self.hello_retry_s, self.refused = problem, retry_at, 0.0, final

    def wait_until(self, lost_at: float, *, ended: bool) -> None:
        """The peer is lost at `lost_at`. `ended`: the connection that it had opened has ended."""
        self.lost_at, self.ended = lost_at, ended

    def confirm(self) -> None:
        """A connection that the peer opened is there."""
        self.lost_at, self.ended = NEVER, False


@dataclass
class PeerInstance:
    """A peer. One that is not configured for good is forgotten at `forget_at`. `members`: the ranks that its leader names, by
    address; others are not taken before `members_at`. `admitted`: nobody but itself has named it. Any thread may read the
    properties.
    """

    name: str
    address: str
    public_key: str | None
    forget_at: float = NEVER
    links: dict[str, PeerConnection] = field(default_factory=dict)
    num_ranks: int | None = None
    members: dict[str, int] = field(default_factory=dict)
    members_at: float = 0.0
    admitted: bool = False

    @property
    def ready(self) -> bool:
        """Whether every rank of it has answered."""
        if self.num_ranks is None:
            return False
        answered = {link.rank for link in tuple(self.links.values()) if link.is_ready}
        return len(answered) == self.num_ranks

    @property
    def refusal(self) -> str:
        """Why it cannot become ready before one side is started anew; empty if it can."""
        return "; ".join(f"{link.address}: {link.problem}" for link in tuple(self.links.values()) if link.refused)

    @property
    def problem(self) -> str:
        """Why it is not ready."""
        waiting = [link for link in tuple(self.links.values()) if not link.is_ready]
        return "; ".join(f"{link.address}: {link.problem}" for link in waiting) or "not all of its ranks are known"
