"""What the peer table is built from, and the effects that it asks for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from disagg.core.errors import DisaggError
from disagg.protocol.messages import Message, Welcome
from disagg.protocol.types import NEVER, PeerRank, check_seconds


class Undecided(DisaggError):
    """A peer was neither accepted nor refused yet. Its hello is repeated after `retry_s` seconds."""

    def __init__(self, message: str, *, retry_s: float = 0.02) -> None:
        super().__init__(message)
        self.retry_s = retry_s


MAX_HEARTBEAT_S = 1_000_000
"""libzmq counts milliseconds in 32 bits."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Times of the handshake and of liveness, in seconds. Raises `ConfigError` for one that is not above 0.

    libzmq pings each peer every `heartbeat_s`; one that does not answer a ping within `heartbeat_timeout_s` is lost, and
    so is one whose own ping is that late. A hello without an answer is repeated after `hello_retry_s`, then
    at intervals that double up to `max_hello_retry_s`. It is renewed within `renew_s`, towards a leader within
    `max_hello_retry_s` while ranks of its instance are not ready. A refused peer gets another hello after
    `refused_retry_s`. An instance that was admitted, or named by a request only, is forgotten when it has not been ready
    for `forget_s`, or at once if its host refuses connections or is unknown and no connection of it is there.
    """

    hello_retry_s: float = 0.2
    max_hello_retry_s: float = 2.0
    heartbeat_s: float = 6.0
    heartbeat_timeout_s: float = 8.0
    refused_retry_s: float = 30.0
    forget_s: float = 60.0

    @property
    def renew_s(self) -> float:
        """The longest interval of renewals while nothing changes. Changes arrive sooner by other messages."""
        return 8 * self.heartbeat_s

    @property
    def connect_back_s(self) -> float:
        """A peer that has answered must connect to this rank within this time: its interpreter may be busy."""
        return 4 * self.heartbeat_timeout_s

    def __post_init__(self) -> None:
        for each in fields(self):
            most = MAX_HEARTBEAT_S if each.name.startswith("heartbeat") else NEVER
            check_seconds(getattr(self, each.name), f"connection limits {each.name}", most=most)


@dataclass(frozen=True)
class Identity:
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
    """Effect: send a hello on connection `dial`. `again`: ask for one in return."""

    dial: int
    generation: int = 0
    peer_epoch: int = 0
    again: bool = False


class SendTo(NamedTuple):
    """Effect: send a message on a connection that this rank opened."""

    dial: int
    message: Message


class ReplyOn(NamedTuple):
    """Effect: reply on a connection that a peer opened."""

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
    """Effect: find out, without waiting, whether anybody listens at the other end of a connection."""

    dial: int


class Forgotten(NamedTuple):
    """Effect: an instance is not a peer any more."""

    instance: str
    cause: str


class Unanswered(NamedTuple):
    """Effect: a configured peer, or another rank of this instance, has not answered several hellos."""

    instance: str
    address: str


class Refused(NamedTuple):
    """Effect: this rank cannot join its leader before one of them restarts, or a peer refuses it, perhaps only until it knows
    this rank.
    """

    instance: str
    address: str
    problem: str


class Ready(NamedTuple):
    """Effect: a rank answered a hello; transfers to it may start."""

    peer: PeerRank
    epoch: int
    welcome: Welcome


class Lost(NamedTuple):
    """Effect: this generation of the connection has ended. `expected`: the rank said goodbye, or this side forgets its
    instance.
    """

    peer: PeerRank
    epoch: int
    generation: int
    cause: str
    expected: bool = False


PeerEffect = SendHello | SendTo | ReplyOn | Connect | Disconnect | Unanswered | Refused | Probe | Ready | Lost | Forgotten
