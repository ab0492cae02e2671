"""The sending side: matches reserves with sends, starts transfers, and tells receivers when all has landed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from disagg.core.errors import Cause, DisaggError, LocalProtocolError, RequestAborted, RequestTimeout
from disagg.core.leases import Lease
from disagg.protocol.messages import Abort, Complete, Decline, Drained, Outcome, PartialChecksums, Reserve, Wanted
from disagg.protocol.parked import CONTRADICTION, Early, add, refusal
from disagg.protocol.send_session import Destination, SendSession, SendState, SendStep
from disagg.protocol.send_table import Readers, SendTable
from disagg.protocol.timers import Timers, Tombstone, back_off
from disagg.protocol.types import (
    NEVER,
    CancelTransfers,
    Chunk,
    Effect,
    Event,
    Limits,
    PeerRank,
    QuarantineLease,
    ReleaseLease,
    RequestKey,
    ReturnLoans,
    SendMessage,
    StartTransfer,
    Ticket,
    brief,
    ids,
    key_of,
)

REOFFER_S, REOFFER_LATE_S = 2.0, 0.2
"""How long messages wait for another offer once one of any attempt was given up, since a client may ask once more: from then
on, and at least.
"""
MAX_RESENT = 20
"""How often a drained message is resent: for a minute and a half by default."""


class Sends:
    def __init__(
        self,
        *,
        group: int,
        limits: Limits,
        effects: deque[Effect],
        timers: Timers,
        readers_of: Callable[[str], Readers],
    ) -> None:
        self._group = group
        self._effects = effects
        self._timers = timers
        self._limits = limits
        self.table = SendTable(limits, readers_of)
        self.sessions = self.table.sessions
        self.parked = self.table.parked

    # -- calls -------------------------------------------------------------------------------------------------------

    def open(
        self,
        key: RequestKey,
        *,
        peer: str,
        expected: frozenset[int] | None = None,
        peer_group_size: int = 1,
        any_attempt: bool = False,
        now: float,
        deadline: float,
        tag: Any = None,
        lease: Lease | None = None,
    ) -> SendSession:
        """Serve one request to `peer`, whose group ranks `expected` (of `peer_group_size`) have this rank as a writer.

        With `expected=None` the first message about the request binds it to `peer` (empty: to its sender), and to an attempt
        if `any_attempt`. Raises `LocalProtocolError` if this attempt was opened before.
        """
        session = SendSession(key, peer, expected, peer_group_size, deadline, tag, any_attempt, lease=lease or Lease())
        self._take(self.table.open(session), now)
        self._timers.arm(session)
        return session

    def _take(self, messages: Iterable[tuple[PeerRank, Early]], now: float) -> None:
        for peer, message in messages:
            match message:
                case Reserve():
                    self.on_reserve(peer, message, now)
                    self._return_loans(peer)  # it may have been refused
                case Decline():
                    self.on_decline(peer, message, now)
                case _:
                    self.on_abort(peer, message, now)

    def send(self, session: SendSession, chunk: Chunk, now: float) -> None:
        """Send `chunk` to every destination, now or once it reserves. Raises `LocalProtocolError` after `finish`."""
        if session.finished:
            raise LocalProtocolError(f"request {session.key}: nothing can be sent after finish()")
        if session.error is not None:
            return
        session.chunks.append(chunk)
        for peer, destination in session.destinations.items():
            self._start_chunks(session, peer, destination)
            self._progress(session, peer, destination, now)

    def finish(self, session: SendSession, payload: bytes, now: float) -> None:
        if session.finished:
            raise LocalProtocolError(f"request {session.key}: finish() was already called")
        session.finished, session.payload = True, payload
        for peer, destination in session.destinations.items():
            self._progress(session, peer, destination, now)
        self._settle(session)

    def abort(self, session: SendSession, error: DisaggError, now: float) -> None:
        """End the request towards every destination, including those still to reserve. The server gets its event at once.
        The lease is released once nothing reads the rows.
        """
        if session.reported:
            return
        session.error, session.given_up_at = error, now
        self._report(session)
        for peer, destination in session.destinations.items():
            self._fail(session, peer, destination, brief(error), now)
        self._settle(session)

    def settled(
        self,
        ticket: Ticket,
        *,
        now: float,
        error: str = "",
        unsettled: bool = False,
        packed: int = 0,
        sums: tuple[PartialChecksums, ...] = (),
        took: tuple[float, ...] = (),
    ) -> None:
        """A transfer is done, failed with `error`, or not provably finished. One that is `unsettled` is reported again if it
        settles. `packed`, `sums`, `took` are for the complete message.
        """
        session, destination = self._find(ticket.peer, ticket.key)
        if session is None or destination is None or not destination.is_under_way(ticket.chunk):
            return
        destination.took = took
        destination.settle(ticket.chunk, packed=packed, sums=sums, unsettled=unsettled)
        if unsettled:
            self._effects.append(QuarantineLease(session.lease, error))
        if error:
            destination.landed.pop(ticket.chunk, None)
            destination.cause = destination.cause if destination.reason else Cause.TRANSFER
            self._fail(session, ticket.peer, destination, brief(error), now)
        self._progress(session, ticket.peer, destination, now)
        self._settle(session)

    # -- messages ----------------------------------------------------------------------------------------------------

    def on_reserve(self, peer: PeerRank, message: Reserve, now: float) -> None:
        key = key_of(message)
        ended = self._claim(peer, key, now)
        session, known = self._find(peer, key)
        if known is not None:
            if known.reserve is None:
                self._refuse(peer, message, known.reason)
            elif known.reserve != message:
                self._refuse(peer, message, CONTRADICTION)
        elif ended is not None:
            self._refuse(peer, message, ended.reason or "this attempt has ended")
        elif message.source_group != self._group:
            self._refuse(peer, message, f"expected a reserve of source group {self._group}, found {message.source_group}")
        elif session is not None:
            self._accept(session, peer, message, now)
        elif reason := self.table.refusal(peer, key):
            self._refuse(peer, message, reason)
        else:
            answers = self.parked.answer(peer, message, now, for_s=self._parked_s(peer, key, now))
            self._effects.extend(SendMessage(peer, answer) for answer in answers)

    def on_decline(self, peer: PeerRank, message: Decline, now: float) -> None:
        """The peer may be one that this rank does not write to. It is answered, unless there is no room: it comes again."""
        key = key_of(message)
        if message.source_group != self._group:
            return
        ended = self._claim(peer, key, now)
        session, _ = self._find(peer, key)
        for_s = self._parked_s(peer, key, now)
        if ended is None and session is None and not self.parked.put(peer, key, message, now, for_s=for_s):
            return
        self._effects.append(SendMessage(peer, Drained(**ids(key), nonce=message.nonce)))
        if ended is None and session is not None:
            session.decline(peer)
            self._settle(session)

    def on_wanted(self, peer: PeerRank, message: Wanted, now: float) -> None:
        """A receiver waits before it reserves. This binds nothing."""
        key = key_of(message)
        session = self.sessions.get((peer.instance, key)) or self.table.offer(peer.instance, key)
        if session is not None and message.source_group == self._group:
            session.wanted_at = now

    def on_abort(self, peer: PeerRank, message: Abort, now: float) -> None:
        key = key_of(message)
        self._claim(peer, key, now)
        session, destination = self._find(peer, key)
        if session is None or destination is None or destination.reserve is None:
            if self.table.ended.get(peer, key) is None:
                self.table.ended.put(peer, key, Tombstone(message.nonce, reason=message.reason))
            self._effects.append(SendMessage(peer, Drained(**ids(key), nonce=message.nonce)))
            self.parked.drop(peer, key)
            self._return_loans(peer)
            if session is not None:
                if session.may_reserve(peer) and session.end_unreserved(peer, message.reason):
                    self._end_awaited(session, session.destinations[peer], now)
                self._settle(session)
            elif self.table.ended.get(peer.instance, key) is None:
                self.parked.put(peer, key, message, now, for_s=self._parked_s(peer, key, now))
            return
        if destination.reserve.nonce != message.nonce:  # that reservation was refused, or will be
            self._effects.append(SendMessage(peer, Drained(**ids(key), nonce=message.nonce)))
            return
        if destination.state is SendState.DRAINED or (destination.ended and destination.quiet):
            self._send_message(session, peer, destination, session.drained(destination), now)
        else:
            destination.knows_failure = True
            self._fail(session, peer, destination, message.reason, now, knows=True)
            self._end_awaited(session, destination, now)
        self._settle(session)

    def on_outcome(self, peer: PeerRank, message: Outcome, now: float) -> None:
        session, destination = self._find(peer, key_of(message))
        if session is None or destination is None or destination.reserve is None or destination.reserve.nonce != message.nonce:
            return
        destination.knows_failure |= not message.ok
        if destination.state is SendState.ACTIVE and not message.ok:
            self._fail(session, peer, destination, message.reason, now, knows=True)
            self._end_awaited(session, destination, now)
        if destination.step(SendStep.OUTCOME):
            destination.ok = message.ok
            destination.reason = "" if message.ok else destination.reason or message.reason
        self._settle(session)

    # -- peers and time ----------------------------------------------------------------------------------------------

    def _end_awaited(self, session: SendSession, failed: Destination, now: float) -> None:
        """The request has failed on one rank of the receiver: others might never reserve it, or in vain."""
        if session.num_awaited > 0:
            self.abort(session, RequestAborted(failed.reason, cause=failed.cause), now)

    def peer_lost(self, peer: PeerRank, cause: str, now: float, *, epoch: int = 0) -> None:
        """Source rows stay leased while a transfer to the peer may still read them."""
        self.parked.drop_peer(peer)
        for session in [found for found in self.sessions.values() if found.peer == peer.instance]:
            destination = session.destinations.get(peer)
            if destination is not None and destination.step(SendStep.PEER_LOST):
                destination.lost_at = epoch
                if not destination.reason:
                    destination.reason, destination.cause = f"{peer} is gone: {cause}", Cause.PEER_LOST
                self._end_awaited(session, destination, now)
                self._settle(session)

    def peer_quiet(self, peer: PeerRank, *, epoch: int = 0) -> None:
        for session in list(self.sessions.values()):
            destination = session.destinations.get(peer)
            if destination is not None and destination.state is SendState.LOST and destination.lost_at == epoch:
                destination.in_flight.clear()
                destination.unsettled.clear()
                self._settle(session)

    def unproved(self) -> set[tuple[PeerRank, int]]:
        """The ranks that `peer_quiet` would end something for, by the epoch at which they were lost."""
        destinations = (found for session in self.sessions.values() for found in session.destinations.items())
        lost = ((peer, each.lost_at) for peer, each in destinations if each.state is SendState.LOST and not each.quiet)
        return {(peer, epoch) for peer, epoch in lost if epoch is not None}

    def forget(self, instance: str, now: float) -> None:
        """Ranks that never connected were not reported as lost, so their requests end here."""
        removed = f"peer {instance!r} was removed"
        for session in self.table.of(instance):
            for peer in tuple(session.destinations):
                self.peer_lost(peer, removed, now)
            self.abort(session, RequestAborted(removed, cause=Cause.PEER_LOST), now)
        self.table.forget(instance)

    def tick(self, session: SendSession, now: float) -> None:
        if now >= session.deadline and not session.reported:
            self.abort(session, RequestTimeout(session.late_reason()), now)
        for peer, destination in session.destinations.items():
            if not destination.waiting or now < destination.retry_at:
                continue
            self._resend(session, peer, destination, now)
        self._settle(session)

    def expire(self, now: float) -> None:
        for peer, message in list(self.parked.expire(now)):
            if isinstance(message, Reserve):
                late = f"nobody has sent the request within {self._limits.parked_reserve_s:g} s"
                given_up = self.table.given_up(peer, message.request_id)
                self._refuse(peer, message, late if given_up is None else given_up.reason)
                self._return_loans(peer)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _claim(self, peer: PeerRank, key: RequestKey, now: float) -> Tombstone | None:
        """Bind an offer that fits this message. If the attempt has ended, bind nothing and return how."""
        ended = self.table.has_ended(peer, key)
        if ended is None:
            self._take(self.table.claim(peer, key), now)
        return ended

    def _parked_s(self, peer: PeerRank, key: RequestKey, now: float) -> float:
        """How long a message may wait for its sender, if not for the usual time."""
        given_up = self.table.given_up(peer, key.request_id)
        return NEVER if given_up is None else max(REOFFER_LATE_S, given_up.at + REOFFER_S - now)

    def _find(self, peer: PeerRank, key: RequestKey) -> tuple[SendSession | None, Destination | None]:
        session = self.sessions.get((peer.instance, key))
        return session, session.destinations.get(peer) if session is not None else None

    def _refuse(self, peer: PeerRank, message: Reserve, reason: str) -> None:
        self._effects.extend(SendMessage(peer, answer) for answer in refusal(message, reason))

    def _accept(self, session: SendSession, peer: PeerRank, message: Reserve, now: float) -> None:
        if peer.rank // session.peer_group_size != message.destination_group or not session.may_reserve(peer):
            self._refuse(
                peer, message, f"{peer} of group {message.destination_group} is not a destination of this request here"
            )
            return
        destination = session.reserve(peer, message)
        add(self.table.num_reserved, peer, 1)
        if session.error is not None:
            self._fail(session, peer, destination, brief(session.error), now)
        else:
            self._start_chunks(session, peer, destination)
        self._progress(session, peer, destination, now)
        self._settle(session)

    def _start_chunks(self, session: SendSession, peer: PeerRank, destination: Destination) -> None:
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

    def _progress(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        """Tell the destination that all has landed, or that nothing is in flight after a failure.

        After the server's abort nothing is reported as landed: the last bytes may be another request's.
        """
        has_landed = session.finished and destination.quiet and not session.lease.withdrawn
        if destination.state is SendState.ACTIVE and has_landed:
            destination.step(SendStep.LANDED)
            self._send_message(session, peer, destination, session.complete(destination), now)
        elif destination.state is SendState.ABORTING and destination.quiet:
            destination.step(SendStep.QUIET)
            self._send_message(session, peer, destination, session.drained(destination), now)

    def _send_message(
        self,
        session: SendSession,
        peer: PeerRank,
        destination: Destination,
        message: Complete | Abort | Drained,
        now: float,
    ) -> None:
        """Send a message, and resend it until it is answered."""
        back_off(destination, self._limits, now)
        self._timers.arm(session)
        self._effects.append(SendMessage(peer, message))

    def _fail(
        self, session: SendSession, peer: PeerRank, destination: Destination, reason: str, now: float, *, knows: bool = False
    ) -> None:
        """`knows`: the failure is the receiver's own."""
        if not destination.step(SendStep.FAILURE):
            return
        destination.reason = destination.reason or reason
        destination.knows_failure = knows
        if not knows:
            self._send_message(session, peer, destination, session.abort(destination), now)
        if destination.in_flight:
            self._effects.append(CancelTransfers(peer, session.key))
        self._progress(session, peer, destination, now)

    def _resend(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        """Resend the last message. Give up after `MAX_RESENT` times with nothing in flight: a receiver that still waits
        asks, and is answered without the session.
        """
        if destination.state is SendState.COMPLETED:
            self._send_message(session, peer, destination, session.complete(destination), now)
        elif destination.state is SendState.ABORTING:
            self._send_message(session, peer, destination, session.abort(destination), now)
        elif destination.resent == MAX_RESENT:
            destination.step(SendStep.UNANSWERED)
        else:
            destination.resent += 1
            self._send_message(session, peer, destination, session.drained(destination), now)

    def _settle(self, session: SendSession) -> None:
        """Release the source rows when nothing reads them, and report when every destination has ended."""
        if session.error is None and session.num_awaited > 0:
            return  # some are not known yet
        ended = session.have_ended
        if ended and not session.reported:
            session.error = session.failure or session.error
            if session.finished or session.error is not None:
                self._report(session)
        if not session.is_read and not session.released and (session.finished or session.error is not None):
            session.released = True
            self._effects.append(ReleaseLease(session.lease))
        if session.reported and ended and session.released and self.table.remove(session, brief(session.error)):
            self._timers.disarm(session)
            self._close(session)

    def _close(self, session: SendSession) -> None:
        for peer in [peer for peer, destination in session.destinations.items() if destination.reserve is not None]:
            add(self.table.num_reserved, peer, -1)
            self._return_loans(peer)

    def has_open(self, peer: PeerRank) -> bool:
        """Whether a rank has reserved for a request that is open, or will be."""
        return peer in self.table.num_reserved

    def _return_loans(self, peer: PeerRank) -> None:
        """Return a rank's loans if it has nothing open."""
        if not self.has_open(peer):
            self._effects.append(ReturnLoans(peer))

    def _report(self, session: SendSession) -> None:
        session.reported = True
        ok, payload = session.error is None, session.payload
        self._effects.append(Event(session.key, session.peer, "send", ok, payload, session.error, session.lease, session.tag))
