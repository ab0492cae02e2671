"""When bytes move: one protocol for every backend, without I/O and without a clock.

`Sessions` is one rank's side. Calls, messages, settled transfers and the time go in; effects come out of `effects`, for
the caller to carry out: messages to send, transfers to start, events for the server. What a request may do next is a
row of `RECEIVE_TABLE` or `SEND_TABLE`; a step that is in neither changes nothing.

The receiver is the arbiter of its rank: it says which tokens it needs, accounts for what each elected writer says has
landed, and pronounces the outcome. A failed transfer fails the attempt: data is never re-sent, control messages are.
"""

from __future__ import annotations

from collections import deque

from disagg.protocol.messages import Abort, Busy, Complete, Drained, Outcome, RequestMessage, Reserve
from disagg.protocol.receive_session import RECEIVE_TABLE, Coverage, Expected, ReceiveSession, ReceiveState, ReceiveStep
from disagg.protocol.receiving import Receives
from disagg.protocol.send_session import SEND_TABLE, SendSession, SendState, SendStep
from disagg.protocol.sending import Sends
from disagg.protocol.timers import Timers
from disagg.protocol.types import (
    Chunk,
    Effect,
    Event,
    Limits,
    PeerRank,
    RequestKey,
    SendMessage,
    StartTransfer,
    StartVerify,
    Ticket,
)

__all__ = [
    "RECEIVE_TABLE",
    "SEND_TABLE",
    "Chunk",
    "Coverage",
    "Effect",
    "Event",
    "Expected",
    "Limits",
    "PeerRank",
    "ReceiveSession",
    "ReceiveState",
    "ReceiveStep",
    "RequestKey",
    "SendMessage",
    "SendSession",
    "SendState",
    "SendStep",
    "Sessions",
    "StartTransfer",
    "StartVerify",
    "Ticket",
]


class Sessions:
    """One rank's side of every request it sends or receives. Not thread-safe: one thread owns it."""

    def __init__(self, *, group: int = 0, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.effects: deque[Effect] = deque()
        self._timers = Timers()
        self.receives = Receives(group=group, limits=limits, effects=self.effects, timers=self._timers)
        self.sends = Sends(group=group, limits=limits, effects=self.effects, timers=self._timers)

    def on_message(self, peer: PeerRank, message: RequestMessage | Busy, now: float) -> None:
        """Take one message of an accepted peer. What fits no request changes nothing, or is answered."""
        match message:
            case Reserve():
                self.sends.on_reserve(peer, message, now)
            case Complete():
                self.receives.on_complete(peer, message, now)
            case Abort(from_writer=True):
                self.receives.on_abort(peer, message, now)
            case Abort():
                self.sends.on_abort(peer, message, now)
            case Drained():
                self.receives.on_drained(peer, message, now)
            case Outcome():
                self.sends.on_outcome(peer, message, now)
            case _:
                assert isinstance(message, Busy)
                self.receives.on_busy(peer, message, now)

    def peer_lost(self, peer: PeerRank, cause: str, now: float, *, epoch: int = 0) -> None:
        """The peer's process or its connection is gone for good at this epoch."""
        self.receives.peer_lost(peer, cause, now, epoch=epoch)
        self.sends.peer_lost(peer, cause, epoch=epoch)

    def peer_quiet(self, peer: PeerRank, *, epoch: int = 0) -> None:
        """It is proved that nothing of a peer that was lost at that epoch can touch memory here, nor from here there."""
        self.receives.peer_quiet(peer, epoch=epoch)
        self.sends.peer_quiet(peer, epoch=epoch)

    def tick(self, now: float) -> None:
        """Retry and judge deadlines. Call it after everything that has arrived was handed in: what arrived counts."""
        while (session := self._timers.pop(now)) is not None:
            if isinstance(session, ReceiveSession):
                self.receives.tick(session, now)
            else:
                assert isinstance(session, SendSession)
                self.sends.tick(session, now)
            self._timers.arm(session)
        self.sends.expire(now)

    def next_tick(self) -> float:
        """The earliest time at which `tick` may have something to do; infinity where nothing is open."""
        return min(self._timers.next, self.sends.next_expiry)
