"""One rank's side of every request, without I/O and without a clock.

Calls, messages, settled transfers and the time go in. Effects come out of `effects`, for the caller to carry out.

The receiver is the arbiter of its rank: it tells which tokens it needs, accounts for what each elected writer reports, and
pronounces the outcome.
"""

from __future__ import annotations

import functools
import secrets
from collections import deque
from collections.abc import Callable, Iterable

from disagg.core.errors import RemoteProtocolError
from disagg.protocol.loans import Borrower, HeldLoans, Lender, Slots
from disagg.protocol.messages import (
    Abort,
    Borrow,
    Busy,
    Complete,
    Decline,
    Drained,
    Filled,
    Lend,
    Message,
    Outcome,
    Reserve,
    SlotsFilled,
    Wanted,
)
from disagg.protocol.notices import Notice, Notices
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.receiving import Receives
from disagg.protocol.send_session import SendSession, SendState
from disagg.protocol.send_table import Readers
from disagg.protocol.sending import Sends
from disagg.protocol.timers import Timers
from disagg.protocol.types import Effect, Limits, PeerRank, RequestKey, SendMessage, TakeLoans, Ticket, UnpackSlot, ids


class Sessions:
    """Not thread-safe: one thread owns it.

    `epoch` is that of this rank's process. `slots` are what it lends to its writers, `draw(n)` returns `n` random bits.
    `readers_of`: see `SendTable`.
    """

    def __init__(
        self,
        *,
        group: int = 0,
        epoch: int = 0,
        limits: Limits | None = None,
        slots: Slots | None = None,
        draw: Callable[[int], int] = secrets.randbits,
        readers_of: Callable[[str], Readers] = lambda _: (frozenset(), 1),
    ) -> None:
        limits = limits or Limits()
        self._group = group
        self.effects: deque[Effect] = deque()
        self._timers = Timers()
        self.notices = Notices(limits=limits, effects=self.effects, timers=self._timers)
        self.receives = Receives(
            group=group, epoch=epoch, limits=limits, effects=self.effects, timers=self._timers, notices=self.notices
        )
        self.sends = Sends(group=group, limits=limits, effects=self.effects, timers=self._timers, readers_of=readers_of)
        self.lender = Lender(effects=self.effects, limits=limits, slots=slots, draw=draw)
        self.borrower = Borrower(limits=limits, effects=self.effects)

    def on_message(self, peer: PeerRank, message: Message, now: float) -> None:
        """A message that fits no request changes nothing, or is answered. Raises `RemoteProtocolError` for one that is not
        about requests.
        """
        match message:
            case Reserve():
                self.sends.on_reserve(peer, message, now)
            case Decline():
                self.sends.on_decline(peer, message, now)
            case Wanted():
                self.sends.on_wanted(peer, message, now)
            case SlotsFilled():
                self.receives.answer_unknown(peer, message)
                begin = functools.partial(self.receives.begin_unpack, peer, message)
                for filled in message.slots:
                    self.lender.on_filled(peer, filled, begin)
            case Complete():
                self.receives.on_complete(peer, message, now)
            case Abort(from_writer=True):
                self.receives.on_abort(peer, message, now)
            case Abort():
                self.sends.on_abort(peer, message, now)
            case Drained():
                if not self.notices.take(peer, message):
                    self.receives.on_drained(peer, message, now)
            case Outcome():
                self.sends.on_outcome(peer, message, now)
            case Lend():
                self.borrower.on_lend(peer, message)
            case Borrow():
                self.receives.lacks_slots(peer, self.lender.on_borrow(peer, message, now), now)
            case Busy():
                self.receives.on_busy(peer, message, now)
            case _:
                found = type(message).__name__
                raise RemoteProtocolError(f"peer {peer}: expected a message about a request, found {found}")

    def slot_filled(self, ticket: Ticket, filled: Filled, now: float) -> None:
        """Report a written slot to its destination, unless that is lost: it would never answer."""
        session = self.sends.sessions.get((ticket.peer.instance, ticket.key))
        destination = session.destinations.get(ticket.peer) if session is not None else None
        if destination is not None and destination.state is not SendState.LOST:
            self.borrower.report(ticket.peer, ticket.key, destination.reserved.nonce, filled, now)

    def take_loans(self, lent: TakeLoans, loans: HeldLoans, now: float) -> None:
        """Raises `RemoteProtocolError` as `HeldLoans.listed` does."""
        self.borrower.take(lent, loans, now, is_open=self.sends.has_open(lent.peer))

    def unpacked(self, slot: UnpackSlot, now: float, *, error: str = "") -> None:
        self.lender.unpacked(slot)
        filled = slot.filled
        self.receives.end_unpack(slot.session, slot.peer, chunk=filled.chunk, nbytes=filled.nbytes, now=now, error=error)

    def peer_lost(
        self, peer: PeerRank, cause: str, now: float, *, epoch: int = 0, generation: int = 0, direct: bool = True
    ) -> None:
        """The process of a peer, or this generation of its connection, is gone. One that is not `direct` has written slots
        only.
        """
        self.receives.peer_lost(peer, cause, now, epoch=epoch, direct=direct)
        self.sends.peer_lost(peer, cause, now, epoch=epoch)
        self.lender.peer_lost(peer, epoch, generation)
        self.borrower.peer_lost(peer)

    def peer_quiet(self, peer: PeerRank, *, epoch: int = 0) -> None:
        """The peer lost at that epoch and this rank cannot touch each other's memory any more."""
        self.peer_closed(peer, epoch=epoch)
        self.sends.peer_quiet(peer, epoch=epoch)

    def peer_closed(self, peer: PeerRank, *, epoch: int = 0) -> None:
        """The peer lost at that epoch cannot touch this rank's memory any more."""
        self.receives.peer_quiet(peer, epoch=epoch)
        self.lender.peer_quiet(peer, epoch)

    @property
    def are_idle(self) -> bool:
        """Whether all requests have ended, and only their rows may be held. No peer waits for one."""
        ended = all(session.error is not None for session in self.receives.sessions.values())
        return ended and all(each.reported for each in self.sends.sessions.values()) and not self.sends.parked.has_reserves

    def unproved(self) -> set[tuple[PeerRank, int]]:
        """The lost ranks, by epoch, that `peer_quiet` would end something for. Nothing adds to it but `peer_lost`, and a new
        connection of the same process.
        """
        return self.receives.unproved() | self.sends.unproved() | self.lender.unproved()

    def decline(self, key: RequestKey, *, peer: str, nonce: int, source_group: int, ranks: Iterable[int]) -> None:
        message = Decline(**ids(key), nonce=nonce, source_group=source_group, destination_group=self._group)
        for rank in ranks:
            self.notices.send(PeerRank(peer, rank), message)

    def give_up(self, key: RequestKey, *, peer: str, nonce: int, source_group: int, ranks: Iterable[int], reason: str) -> None:
        """Tell ranks that a receive has failed before it reserved anything."""
        del source_group  # an attempt is of one
        for rank in ranks:
            self.notices.send(PeerRank(peer, rank), Abort(**ids(key), nonce=nonce, reason=reason))

    def want(self, key: RequestKey, *, peer: str, nonce: int, source_group: int, ranks: Iterable[int]) -> None:
        message = Wanted(**ids(key), nonce=nonce, source_group=source_group)
        self.effects.extend(SendMessage(PeerRank(peer, rank), message) for rank in ranks)

    def forget(self, instance: str, now: float) -> None:
        self.receives.forget(instance)
        self.sends.forget(instance, now)
        self.lender.forget(instance)
        self.notices.forget(instance)

    def tick(self, now: float) -> None:
        """Resend, and enforce deadlines. Call it after all arrived messages were taken: what has arrived in time counts."""
        while (session := self._timers.pop(now)) is not None:
            if isinstance(session, ReceiveSession):
                self.receives.tick(session, now)
            elif isinstance(session, Notice):
                self.notices.tick(session, now)
            else:
                assert isinstance(session, SendSession)
                self.sends.tick(session, now)
            self._timers.arm(session)
        self.sends.expire(now)
        self.lender.tick(now)
        self.borrower.tick(now)

    def flush(self, now: float) -> None:
        self.notices.flush(now)
        self.lender.flush(now)
        self.borrower.flush()

    @property
    def next_tick(self) -> float:
        return min(self._timers.next, self.sends.parked.next_expiry, self.lender.next_tick, self.borrower.next_tick)
