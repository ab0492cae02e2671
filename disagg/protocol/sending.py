"""The sending side: matches reserves with what the server sends, starts transfers, and says when all of it has landed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from disagg.core.errors import Cause, DisaggError, LocalProtocolError, RequestAborted, RequestTimeout
from disagg.protocol.messages import (
    Abort,
    Busy,
    Complete,
    Drained,
    Outcome,
    PartialChecksums,
    Reserve,
    Written,
)
from disagg.protocol.parked import Parked
from disagg.protocol.send_session import SEND_TABLE, Destination, SendSession, SendState, SendStep, late_reason
from disagg.protocol.timers import Timers, Tombstone, Tombstones, back_off
from disagg.protocol.types import (
    Chunk,
    Effect,
    Event,
    Limits,
    PeerRank,
    RequestKey,
    SendMessage,
    StartTransfer,
    Ticket,
    brief,
    ids,
    key_of,
)


class Sends:
    """Every request that this rank sends."""

    def __init__(self, *, group: int, limits: Limits, effects: deque[Effect], timers: Timers) -> None:
        self._group = group
        self._limits = limits
        self._effects = effects
        self._timers = timers
        self.sessions: dict[tuple[str, RequestKey], SendSession] = {}
        self._served: dict[RequestKey, set[str]] = {}
        self._parked = Parked(limits)
        self._ended = Tombstones(limits.max_tombstones)

    @property
    def num_parked(self) -> int:
        """Messages that wait for their senders to be opened."""
        return len(self._parked)

    def open(
        self,
        key: RequestKey,
        *,
        peer: str,
        expected: frozenset[int],
        peer_group_size: int,
        now: float,
        deadline: float,
        tag: Any = None,
    ) -> SendSession:
        """Serve one request to `peer`, whose group ranks `expected` (of `peer_group_size`) have this rank as a writer.

        Raises `LocalProtocolError` where this attempt was opened before.
        """
        if (peer, key) in self.sessions or self._ended.get(peer, key) is not None:
            raise LocalProtocolError(f"request {key}: this attempt was already sent to {peer!r}; use a new attempt number")
        session = SendSession(key, peer, expected, peer_group_size, deadline, tag)
        self.sessions[peer, key] = session
        self._served.setdefault(key, set()).add(peer)
        for waiting, message in self._parked.take(key):
            if isinstance(message, Reserve):
                self.on_reserve(waiting, message, now)
            else:
                self.on_abort(waiting, message, now)
        self._timers.arm(session)
        return session

    def send(self, session: SendSession, chunk: Chunk, now: float) -> None:
        """Send the rows of `chunk` to every destination: those that have reserved now, the others when they do.

        Raises `LocalProtocolError` after `finish`. On a request that has ended it does nothing.
        """
        if session.finished:
            raise LocalProtocolError(f"request {session.key}: nothing can be sent after finish()")
        if session.error is not None:
            return
        session.chunks.append(chunk)
        for peer, destination in session.destinations.items():
            self._start_chunks(session, peer, destination)
            self._progress(session, peer, destination, now)

    def finish(self, session: SendSession, payload: bytes, now: float) -> None:
        """Nothing more will be sent. Raises `LocalProtocolError` the second time."""
        if session.finished:
            raise LocalProtocolError(f"request {session.key}: finish() was already called")
        session.finished, session.payload = True, payload
        for peer, destination in session.destinations.items():
            self._progress(session, peer, destination, now)
        self._settle(session)

    def abort(self, session: SendSession, error: DisaggError, now: float) -> None:
        """End the request towards every destination, also those that have not reserved yet; once ended, nothing changes.

        The server is told at once; the lease follows when nothing reads the rows any more.
        """
        if session.reported:
            return
        session.error = error
        self._report(session)
        for peer, destination in session.destinations.items():
            self._fail_destination(session, peer, destination, brief(error), now)
        self._settle(session)

    def foretell(self, ticket: Ticket) -> Complete | None:
        """What its destination will be told if a transfer that is under way succeeds, and nothing else happens before: for who
        tells it now, can show it that moment, and says at `settled` whether that was seen. `None` where the transfer is not the
        last, or its sums are still to come.
        """
        session = self.sessions.get((ticket.peer.instance, ticket.key))
        destination = session.destinations.get(ticket.peer) if session else None
        if session is None or destination is None or destination.state is not SendState.ACTIVE or not session.finished:
            return None
        if destination.in_flight != {ticket.chunk} or destination.unsettled or self._reserve_of(destination).verify != "off":
            return None
        destination.foretold = self._complete_of(session, destination)
        return destination.foretold

    def settled(
        self,
        ticket: Ticket,
        *,
        now: float,
        error: str = "",
        unsettled: bool = False,
        packed: int = 0,
        sums: tuple[PartialChecksums, ...] = (),
        known: bool = False,
    ) -> None:
        """A started transfer is over: done, failed with `error`, or (`unsettled`) not provably over. `packed` of its bytes
        went into the receiver's ring; `sums` are those that the reserve asked for. `known`: the receiver sees that it is done,
        so what was foretold is not said, unless that is not answered.

        A transfer that was reported unsettled may be reported again once it has settled.
        """
        session = self.sessions.get((ticket.peer.instance, ticket.key))
        destination = session.destinations.get(ticket.peer) if session else None
        if session is None or destination is None:
            return
        if ticket.chunk not in destination.in_flight and ticket.chunk not in destination.unsettled:
            return
        if not known:
            destination.foretold = None
        destination.in_flight.discard(ticket.chunk)
        if packed:
            destination.packed[ticket.chunk] = packed
        if sums:
            destination.sums[ticket.chunk] = sums
        destination.unsettled.discard(ticket.chunk)
        if unsettled:
            destination.unsettled.add(ticket.chunk)
            session.lease.quarantine(error)
        if error:
            destination.landed.pop(ticket.chunk, None)
            destination.cause = destination.cause if destination.reason else Cause.TRANSFER
            self._fail_destination(session, ticket.peer, destination, brief(error), now)
        self._progress(session, ticket.peer, destination, now)
        self._settle(session)

    def on_reserve(self, peer: PeerRank, message: Reserve, now: float) -> None:
        key = key_of(message)
        session = self.sessions.get((peer.instance, key))
        ended = self._ended.get(peer, key) or self._ended.get(peer.instance, key)
        known = session.destinations.get(peer) if session else None
        if known is not None:
            if known.reserve is None:
                self._refuse(peer, message, known.reason)
            elif known.reserve != message:
                self._refuse(peer, message, "this attempt is already reserved, with another nonce or other content")
        elif ended is not None:
            self._refuse(peer, message, ended.reason or "this attempt has ended")
        elif message.source_group != self._group:
            self._refuse(peer, message, f"reserve of source group {message.source_group} came to group {self._group}")
        elif session is not None:
            self._accept(session, peer, message, now)
        elif self._served.get(key):
            self._refuse(peer, message, f"the request is not served to {peer.instance}")
        else:
            self._park(peer, key, message, now)

    def _accept(self, session: SendSession, peer: PeerRank, message: Reserve, now: float) -> None:
        if peer.rank // session.peer_group_size != message.destination_group or not session.may_reserve(peer):
            self._refuse(peer, message, f"{peer} of group {message.destination_group} is no destination of this request here")
            return
        session.destination_group = message.destination_group
        destination = session.destinations[peer] = Destination()
        self._step(destination, SendStep.RESERVED)
        destination.reserve = message
        if session.error is not None:
            self._fail_destination(session, peer, destination, brief(session.error), now)
        else:
            self._start_chunks(session, peer, destination)
        self._progress(session, peer, destination, now)
        self._settle(session)

    def _park(self, peer: PeerRank, key: RequestKey, message: Reserve, now: float) -> None:
        parked = self._parked.get(peer, key)
        if parked is not None and parked != message:
            self._refuse(peer, message, "this attempt is already reserved, with another nonce or other content")
        elif parked is None and not self._parked.put(peer, key, message, now):
            reason = f"{self._parked.count(peer)} reservations of {peer.instance!r} wait for their senders"
            busy = Busy(**ids(key), nonce=message.nonce, reason=reason, retry_after_s=self._limits.busy_retry_s)
            self._effects.append(SendMessage(peer, busy))

    def _refuse(self, peer: PeerRank, message: Reserve, reason: str) -> None:
        """Nothing of this reservation was or will be written."""
        named = ids(key_of(message))
        self._effects.append(SendMessage(peer, Abort(**named, nonce=message.nonce, reason=reason, from_writer=True)))
        self._effects.append(SendMessage(peer, Drained(**named, nonce=message.nonce, reason=reason)))

    def _start_chunks(self, session: SendSession, peer: PeerRank, destination: Destination) -> None:
        """Start every chunk that this destination has not had yet."""
        if destination.state is not SendState.ACTIVE or destination.reserve is None:
            return
        for chunk in session.chunks[destination.started :]:
            destination.started += 1
            found = []
            for name, need in destination.reserve.need.items():
                part = chunk.written(name, need)
                if part is not None:
                    found.append(part)
            if not found:
                continue
            destination.in_flight.add(chunk.number)
            written = destination.landed[chunk.number] = tuple(found)
            ticket = Ticket(peer, session.key, chunk.number)
            self._effects.append(StartTransfer(ticket, chunk, destination.reserve, written))

    def _progress(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        """Say what has landed, or that all is quiet."""
        if destination.state is SendState.ACTIVE and session.finished and destination.quiet:
            self._step(destination, SendStep.LANDED)
            if destination.answered:
                self._step(destination, SendStep.OUTCOME)
                destination.ok = True
            else:
                self._say_complete(session, peer, destination, now)
        elif destination.state is SendState.ABORTING and destination.quiet:
            self._step(destination, SendStep.QUIET)
            self._say_drained(session, peer, destination, now)

    def _say_complete(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        self._schedule(session, destination, now)
        complete = self._complete_of(session, destination)
        foretold, destination.foretold = destination.foretold, None
        if complete != foretold:
            self._effects.append(SendMessage(peer, complete))

    def _complete_of(self, session: SendSession, destination: Destination) -> Complete:
        return Complete(
            **ids(session.key),
            nonce=self._reserve_of(destination).nonce,
            written=_joined(w for number in sorted(destination.landed) for w in destination.landed[number]),
            payload=session.payload,
            packed=tuple(sorted(destination.packed.items())),
            sums=tuple(part for number in sorted(destination.sums) for part in destination.sums[number]),
        )

    @staticmethod
    def _reserve_of(destination: Destination) -> Reserve:
        assert destination.reserve is not None
        return destination.reserve

    def _say_drained(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        self._schedule(session, destination, now)
        drained = Drained(**ids(session.key), nonce=self._reserve_of(destination).nonce, reason=destination.reason)
        self._effects.append(SendMessage(peer, drained))

    def _fail_destination(
        self, session: SendSession, peer: PeerRank, destination: Destination, reason: str, now: float, *, told: bool = False
    ) -> None:
        """This destination's attempt ends; `told`: the receiver said so itself."""
        if not self._step(destination, SendStep.FAILURE):
            return
        destination.reason = destination.reason or reason
        destination.told = told
        if not told:
            self._say_abort(session, peer, destination, now)
        self._progress(session, peer, destination, now)

    def _say_abort(self, session: SendSession, peer: PeerRank, destination: Destination, now: float) -> None:
        self._schedule(session, destination, now)
        nonce, reason = self._reserve_of(destination).nonce, destination.reason
        abort = Abort(**ids(session.key), nonce=nonce, reason=reason, from_writer=True)
        self._effects.append(SendMessage(peer, abort))

    def on_abort(self, peer: PeerRank, message: Abort, now: float) -> None:
        key = key_of(message)
        session = self.sessions.get((peer.instance, key))
        destination = session.destinations.get(peer) if session else None
        if session is None or destination is None or destination.reserve is None:
            if self._ended.get(peer, key) is None:
                self._ended.put(peer, key, Tombstone(message.nonce, reason=message.reason))
            self._effects.append(SendMessage(peer, Drained(**ids(key), nonce=message.nonce)))
            self._parked.drop(peer, key)
            if session is not None and session.may_reserve(peer):
                self._unreserved_end(session, peer, message.reason)
            elif session is None and self._ended.get(peer.instance, key) is None:
                self._parked.put(peer, key, message, now)
            return
        if destination.reserve.nonce != message.nonce:  # that reservation was refused, or will be
            self._effects.append(SendMessage(peer, Drained(**ids(key), nonce=message.nonce)))
            return
        if destination.state is SendState.DRAINED or (destination.ended and destination.quiet):
            self._say_drained(session, peer, destination, now)
        else:
            destination.told = True
            self._fail_destination(session, peer, destination, message.reason, now, told=True)
        self._settle(session)

    def _unreserved_end(self, session: SendSession, peer: PeerRank, reason: str) -> None:
        """A destination that gave up before its reserve got here."""
        session.destination_group = peer.rank // session.peer_group_size
        destination = session.destinations.setdefault(peer, Destination(reason=reason))
        if self._step(destination, SendStep.FAILURE):
            self._settle(session)

    def on_outcome(self, peer: PeerRank, message: Outcome, now: float) -> None:
        session = self.sessions.get((peer.instance, key_of(message)))
        destination = session.destinations.get(peer) if session else None
        if session is None or destination is None or destination.reserve is None or destination.reserve.nonce != message.nonce:
            return
        destination.told |= not message.ok
        destination.answered |= message.ok and destination.foretold is not None  # before this side knows, it may be
        if destination.state is SendState.ACTIVE and not message.ok:
            self._fail_destination(session, peer, destination, message.reason, now, told=True)
        if self._step(destination, SendStep.OUTCOME):
            destination.ok = message.ok
            destination.reason = "" if message.ok else destination.reason or message.reason
        self._settle(session)

    def _settle(self, session: SendSession) -> None:
        """Release the source rows when nothing reads them any more; report when every destination has ended."""
        destinations = session.destinations.values()
        if session.error is None and len(session.destinations) < len(session.expected):
            return  # some are not known yet
        ended, read = True, False
        for destination in destinations:
            ended = ended and destination.ended
            read = read or destination.state is SendState.ACTIVE or not destination.quiet
        if ended and not session.reported:
            worst = next((d for d in destinations if not d.ok), None)
            if worst is not None:
                session.error = RequestAborted(worst.reason or "a destination failed", cause=worst.cause)
            if session.finished or session.error is not None:
                self._report(session)
        if not read and (session.finished or session.error is not None):
            session.lease.release()
        if session.reported and ended and session.lease.released:
            self._bury(session)

    def _report(self, session: SendSession) -> None:
        session.reported = True
        ok, payload = session.error is None, session.payload
        self._effects.append(Event(session.key, session.peer, "send", ok, payload, session.error, session.lease, session.tag))

    def _bury(self, session: SendSession) -> None:
        if self.sessions.pop((session.peer, session.key), None) is None:
            return
        self._timers.disarm(session)
        self._served[session.key].discard(session.peer)
        if not self._served[session.key]:
            del self._served[session.key]
        self._ended.put(session.peer, session.key, Tombstone(None, reason=brief(session.error)))

    def peer_lost(self, peer: PeerRank, cause: str, *, epoch: int = 0) -> None:
        """Its share of every request ends; source rows stay leased while a transfer to it may still read them."""
        self._parked.drop_peer(peer)
        for session in [found for found in self.sessions.values() if found.peer == peer.instance]:
            destination = session.destinations.get(peer)
            if destination is not None and self._step(destination, SendStep.PEER_LOST):
                destination.lost_at = epoch
                if not destination.reason:
                    destination.reason, destination.cause = f"{peer} is gone: {cause}", Cause.PEER_LOST
                self._settle(session)

    def peer_quiet(self, peer: PeerRank, *, epoch: int = 0) -> None:
        """It is proved that nothing to the peer that was lost at that epoch is in flight any more."""
        for session in list(self.sessions.values()):
            destination = session.destinations.get(peer)
            if destination is not None and destination.state is SendState.LOST and destination.lost_at == epoch:
                destination.in_flight.clear()
                destination.unsettled.clear()
                self._settle(session)

    def tick(self, session: SendSession, now: float) -> None:
        """Judge the deadline of one session, and say again what was not answered."""
        if now >= session.deadline and not session.reported:
            self.abort(session, RequestTimeout(late_reason(session)), now)
        for peer, destination in session.destinations.items():
            if not destination.waiting or now < destination.retry_at:
                continue
            if destination.state is SendState.COMPLETED:
                self._say_complete(session, peer, destination, now)
            elif destination.state is SendState.ABORTING:
                self._say_abort(session, peer, destination, now)
            else:
                self._say_drained(session, peer, destination, now)

    def expire(self, now: float) -> None:
        """Forget reserves that nobody served in time; their receivers have their own deadlines."""
        self._parked.expire(now)

    @property
    def next_expiry(self) -> float:
        return self._parked.next_expiry

    def _schedule(self, session: SendSession, destination: Destination, now: float) -> None:
        back_off(destination, self._limits, now)
        self._timers.arm(session)

    def _step(self, destination: Destination, step: SendStep) -> bool:
        state = SEND_TABLE.get((destination.state, step))
        if state is not None:
            destination.state = state
        return state is not None


def _joined(written: Iterable[Written]) -> tuple[Written, ...]:
    """The same, with what goes on where another ends, in the same layers, as one: a request may be sent in very many chunks."""
    joined: dict[tuple[str, tuple[int, ...] | None], list[Written]] = {}
    for each in written:
        parts = joined.setdefault((each.component, each.layers), [])
        if parts and parts[-1].stop == each.start:
            parts[-1] = Written(each.chunk, each.component, each.layers, parts[-1].start, each.stop)
        else:
            parts.append(each)
    return tuple(part for parts in joined.values() for part in parts)
