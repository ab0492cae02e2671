"""Steps of one destination of a send: its transfers, and the messages that tell it how they ended."""

from __future__ import annotations

from collections import deque

from disagg.protocol.messages import Abort, Complete, Drained
from disagg.protocol.send_session import Destination, SendSession, SendState, SendStep
from disagg.protocol.timers import Timers, back_off
from disagg.protocol.types import CancelTransfers, Effect, Limits, PeerRank, SendMessage, StartTransfer, Ticket

MAX_RESENT = 20
"""How often a drained message is sent again: for a minute and a half by default."""


class DestinationSteps:
    """Takes the steps of destinations, for every request that this rank sends."""

    def __init__(self, *, limits: Limits, effects: deque[Effect], timers: Timers) -> None:
        self._limits = limits
        self._effects = effects
        self._timers = timers

    def start_chunks(self, session: SendSession, peer: PeerRank, destination: Destination) -> None:
        """Start every chunk that was not started for this destination."""
        if destination.state is not SendState.ACTIVE or destination.reserve is None:
            return
        needs = destination.reserve.need
        for chunk in session.chunks[destination.started :]:
            destination.started += 1
            parts = (chunk.written(name, needs[name]) for name in chunk.rows if name in needs)
            written = tuple(part for part in parts if part is not None)
            if written:
                destination.in_flight.add(chunk.number)
                destination.landed[chunk.number] = written
                ticket = Ticket(peer, session.key, chunk.number)
                self._effects.append(StartTransfer(ticket, chunk, destination.reserve, written))

    def progress(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        """Tell the destination that all has landed, or that nothing is in flight after a failure."""
        if destination.state is SendState.ACTIVE and session.finished and destination.quiet:
            destination.step(SendStep.LANDED)
            if destination.early_outcome:
                destination.step(SendStep.OUTCOME)
                destination.ok = True
            else:
                self.send_complete(session, peer, destination, now)
        elif destination.state is SendState.ABORTING and destination.quiet:
            destination.step(SendStep.QUIET)
            self.send(session, peer, destination, session.drained(destination), now)

    def send_complete(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        complete = session.complete(destination)
        early, destination.early_complete = destination.early_complete, None
        self.send(session, peer, destination, complete if complete != early else None, now)

    def send(
        self,
        session: SendSession,
        peer: PeerRank,
        destination: Destination,
        message: Complete | Abort | Drained | None,
        now: float,
    ) -> None:
        """Send a message, and again until it is answered."""
        back_off(destination, self._limits, now)
        self._timers.arm(session)
        if message is not None:
            self._effects.append(SendMessage(peer, message))

    def fail(
        self, session: SendSession, peer: PeerRank, destination: Destination, reason: str, now: float, *, knows: bool = False
    ) -> None:
        """End the attempt towards this destination. `knows`: the failure is the receiver's own."""
        if not destination.step(SendStep.FAILURE):
            return
        destination.reason = destination.reason or reason
        destination.knows_failure = knows
        if not knows:
            self.send(session, peer, destination, session.abort(destination), now)
        if destination.in_flight:
            self._effects.append(CancelTransfers(peer, session.key))
        self.progress(session, peer, destination, now)

    def resend(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        """Send the last message again: the destination has not answered it. Nothing is sent any more after `MAX_RESENT` times
        if nothing is in flight to it: a receiver that still waits asks, and is answered without the session.
        """
        if destination.state is SendState.COMPLETED:
            self.send_complete(session, peer, destination, now)
        elif destination.state is SendState.ABORTING:
            self.send(session, peer, destination, session.abort(destination), now)
        elif destination.resent == MAX_RESENT:
            destination.step(SendStep.UNANSWERED)
        else:
            destination.resent += 1
            self.send(session, peer, destination, session.drained(destination), now)
