"""Peer tables of `prefill-0`, and the messages of its peer `decode-0`, for the tests."""

from __future__ import annotations

from collections.abc import Callable

from disagg.core.errors import LayoutError, RemoteProtocolError
from disagg.protocol.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Drained,
    Hello,
    Member,
    Message,
    Welcome,
)
from disagg.protocol.peer_effects import (
    ConnectionLimits,
    Identity,
    PeerEffect,
    ReplyOn,
)
from disagg.protocol.peers import PeerTable
from disagg.protocol.types import PeerRank
from harness.simulator.connections import welcome

LEADER, SECOND = "tcp://10.0.0.1:80", "tcp://10.0.0.1:8000"
LIMITS = ConnectionLimits(hello_retry_s=1.0, max_hello_retry_s=4.0, heartbeat_s=5.0, heartbeat_timeout_s=20.0)
DECODE = PeerRank("decode-0", 0)
DRAINED = Drained(request_id=bytes(16), attempt=0, nonce=1)
EPOCH = 1
"""Of the rank under test."""


def hello(instance: str = "decode-0", rank: int = 0, epoch: int = 7, **fields: object) -> Hello:
    defaults = {"version": PROTOCOL_VERSION, "model": "m", "revision": "", "table": b"t"}
    return Hello(instance=instance, rank=rank, epoch=epoch, **{**defaults, **fields})  # type: ignore[arg-type]


def peer_table(
    *,
    num_ranks: int = 1,
    rank: int = 0,
    leader: str | None = None,
    peer_ranks: int = 1,
    own_key: str | None = None,
    limits: ConnectionLimits = LIMITS,
) -> PeerTable:
    """The table of one rank of `prefill-0`.

    Every peer has `peer_ranks` ranks. A peer with the layout table `b"bad"` is refused.
    """

    def accept_hello(message: Hello, members: Callable[[], tuple[Member, ...]]) -> Welcome:
        if message.table == b"bad":
            raise LayoutError("axis 'kv_head': 4 here, 8 at the peer")
        return welcome("prefill-0", rank, EPOCH, members(), generation=message.generation)

    def validate_welcome(message: Welcome) -> tuple[int, frozenset[int]]:
        if message.table == b"bad":
            raise LayoutError("no")
        if message.version != PROTOCOL_VERSION:
            raise RemoteProtocolError("protocol version")
        return peer_ranks, frozenset(range(peer_ranks))

    me = Identity(
        instance="prefill-0",
        rank=rank,
        num_ranks=num_ranks,
        epoch=EPOCH,
        model="m",
        revision="",
        table=b"t",
        address=f"tcp://127.0.0.1:{7000 + rank}",
        leader=rank == 0,
    )
    return PeerTable(
        me, leader=leader, own_key=own_key, accept_hello=accept_hello, validate_welcome=validate_welcome, limits=limits
    )


def dial_of(table: PeerTable, address: str) -> int:
    """The number of the connection that a table has opened to an address."""
    return next(link.dial for link in reversed(table._links.all()) if link.address == address)


def reply(table: PeerTable, address: str, message: AnyMessage, now: float) -> None:
    """Deliver a message that came back on the connection to an address; a welcome as if a hello had asked for it."""
    dial = dial_of(table, address)
    link = table._links.get(dial)
    assert link is not None
    link.asked += isinstance(message, Welcome)
    table.on_reply(dial, message, now)


def take_effects(table: PeerTable) -> list[PeerEffect]:
    effects = list(table.effects)
    table.effects.clear()
    return effects


def make_ready(table: PeerTable, *, epoch: int = 7, now: float = 0.0) -> None:
    """Add peer `decode-0`, which has one rank, and deliver its welcome, and its hello on connection `c1`."""
    table.add_peer("decode-0", LEADER, None, now)
    table.tick(now)
    reply(table, LEADER, welcome(epoch=epoch), now)
    table.on_inbound(b"c1", "", hello(epoch=epoch), now)
    take_effects(table)


def take_reply(table: PeerTable) -> Message:
    """The only reply since the last call."""
    (effect,) = [e for e in take_effects(table) if isinstance(e, ReplyOn)]
    return effect.message
