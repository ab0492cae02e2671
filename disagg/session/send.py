"""The sending side: matches reserves with what the server sends, starts transfers, and says when all of it has landed."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import Cause, DisaggError, LocalProtocolError, RequestAborted, RequestTimeout
from disagg.leases import Lease
from disagg.session.types import (
    NEVER,
    Chunk,
    Effect,
    Event,
    Limits,
    PeerRank,
    RequestKey,
    SendMessage,
    StartTransfer,
    State,
    Ticket,
    Timers,
    Tombstone,
    Tombstones,
    back_off,
    brief,
    ids,
    key_of,
)
from disagg.wire import Abort, Busy, Complete, Drained, Outcome, PagesRow, PartialSums, Reserve, TokenRange, Written


class SendState(State):
    """Of one destination. `AWAITED`: no reserve yet. `CLOSED`: outcome known. `LOST`: the peer is gone."""

    AWAITED = "awaited"
    ACTIVE = "active"
    COMPLETED = "completed"
    ABORTING = "aborting"
    DRAINED = "drained"
    CLOSED = "closed"
    LOST = "lost"


class SendStep(State):
    RESERVED = "a reserve arrived"
    LANDED = "everything has been sent and has settled"
    FAILURE = "something failed"
    QUIET = "nothing is in flight"
    OUTCOME = "the receiver's outcome arrived"
    PEER_LOST = "the peer is gone"


SEND_TABLE: dict[tuple[SendState, SendStep], SendState] = {
    (SendState.AWAITED, SendStep.RESERVED): SendState.ACTIVE,
    (SendState.AWAITED, SendStep.FAILURE): SendState.CLOSED,
    (SendState.ACTIVE, SendStep.LANDED): SendState.COMPLETED,
    (SendState.ACTIVE, SendStep.FAILURE): SendState.ABORTING,
    (SendState.ACTIVE, SendStep.PEER_LOST): SendState.LOST,
    (SendState.COMPLETED, SendStep.OUTCOME): SendState.CLOSED,
    (SendState.COMPLETED, SendStep.FAILURE): SendState.ABORTING,
    (SendState.COMPLETED, SendStep.PEER_LOST): SendState.LOST,
    (SendState.ABORTING, SendStep.QUIET): SendState.DRAINED,
    (SendState.ABORTING, SendStep.PEER_LOST): SendState.LOST,
    (SendState.DRAINED, SendStep.OUTCOME): SendState.CLOSED,
    (SendState.DRAINED, SendStep.PEER_LOST): SendState.LOST,
}


@dataclass
class Destination:
    """One destination rank of a send. `told`: it knows that the attempt has failed. `foretold`: what it knows that it will be
    told; `answered`: it has answered that. `lost_at`: the epoch of its loss.
    """

    state: SendState = SendState.AWAITED
    reserve: Reserve | None = None
    in_flight: set[int] = field(default_factory=set)
    unsettled: set[int] = field(default_factory=set)
    landed: dict[int, tuple[Written, ...]] = field(default_factory=dict)
    packed: dict[int, int] = field(default_factory=dict)
    sums: dict[int, tuple[PartialSums, ...]] = field(default_factory=dict)
    started: int = 0
    foretold: Complete | None = None
    answered: bool = False
    reason: str = ""
    told: bool = False
    cause: Cause = Cause.PEER
    ok: bool = False
    retry_at: float = NEVER
    retry_s: float = 0.0
    lost_at: int | None = None

    @property
    def quiet(self) -> bool:
        """Whether nothing is in flight to it."""
        return not self.in_flight and not self.unsettled

    @property
    def ended(self) -> bool:
        return self.state in (SendState.CLOSED, SendState.LOST)

    @property
    def waiting(self) -> bool:
        """Whether it was told something that it has not answered."""
        return self.state in (SendState.COMPLETED, SendState.DRAINED) or (self.state is SendState.ABORTING and not self.told)


@dataclass
class SendSession:
    """One request that this rank sends: to every destination rank that it is an elected writer of."""

    key: RequestKey
    peer: str
    expected: frozenset[int]
    peer_group_size: int
    deadline: float
    tag: Any
    destination_group: int | None = None
    destinations: dict[PeerRank, Destination] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    finished: bool = False
    payload: bytes = b""
    error: DisaggError | None = None
    reported: bool = False
    lease: Lease = field(default_factory=Lease)
    armed_at: float = NEVER

    @property
    def due(self) -> float:
        """When time alone next changes something."""
        judged = self.deadline if self.error is None and not self.reported else NEVER
        return min(judged, *(d.retry_at for d in self.destinations.values() if d.waiting), NEVER)

    def may_reserve(self, peer: PeerRank) -> bool:
        """Whether this rank writes anything to `peer`, as far as the static plan says."""
        group, rank = divmod(peer.rank, self.peer_group_size)
        return rank in self.expected and self.destination_group in (None, group)

    def needed(self, component: str) -> TokenRange | None:
        """The union of what reserved destinations need of `component`; `None` until all have reserved."""
        needs = [
            d.reserve.need[component] for d in tuple(self.destinations.values()) if d.reserve and component in d.reserve.need
        ]
        if len(self.destinations) < len(self.expected) or not needs:
            return None
        return min(start for start, _ in needs), max(stop for _, stop in needs)


class _Parked:
    """Reserves whose `sender` has not been opened yet, and aborts that came even before their reserve; bounded, by number
    and by bytes, for each instance that they come from.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages: dict[RequestKey, dict[PeerRank, Reserve | Abort]] = {}
        self._order: OrderedDict[tuple[RequestKey, PeerRank], float] = OrderedDict()
        self._count: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._order)

    def count(self, peer: PeerRank) -> int:
        """How many are parked of a rank's instance."""
        return self._count[peer.instance]

    def get(self, peer: PeerRank, key: RequestKey) -> Reserve | Abort | None:
        return self._messages.get(key, {}).get(peer)

    def put(self, peer: PeerRank, key: RequestKey, message: Reserve | Abort, now: float) -> bool:
        """Whether there was room for it."""
        whose, nbytes = peer.instance, _nbytes(message)
        if self._count[whose] >= self._limits.max_parked_reserves:
            return False
        if self._nbytes[whose] + nbytes > self._limits.max_parked_nbytes:
            return False
        self._count[whose] += 1
        self._nbytes[whose] += nbytes
        self._messages.setdefault(key, {})[peer] = message
        self._order[key, peer] = now + self._limits.parked_reserve_s
        return True

    def take(self, key: RequestKey) -> list[tuple[PeerRank, Reserve | Abort]]:
        """Everything parked for a request, which is parked no longer."""
        found = list(self._messages.get(key, {}).items())
        for peer, _ in found:
            self.drop(peer, key)
        return found

    def drop(self, peer: PeerRank, key: RequestKey) -> None:
        if self._order.pop((key, peer), None) is not None:
            self._count[peer.instance] -= 1
            self._nbytes[peer.instance] -= _nbytes(self._messages[key].pop(peer))
            if not self._messages[key]:
                del self._messages[key]

    def drop_peer(self, peer: PeerRank) -> None:
        for key, parked in [found for found in self._order if found[1] == peer]:
            self.drop(parked, key)

    @property
    def next_expiry(self) -> float:
        return next(iter(self._order.values()), NEVER)

    def expire(self, now: float) -> None:
        while self._order:
            (key, peer), expires = next(iter(self._order.items()))
            if now < expires:
                return
            self.drop(peer, key)


def _nbytes(message: Reserve | Abort) -> int:
    """What a parked message takes, about: ids are nearly all of a large one."""
    rows = message.rows.values() if isinstance(message, Reserve) else ()
    return 512 + sum(len(row.ids) for row in rows if isinstance(row, PagesRow))


class Sends:
    """Every request that this rank sends."""

    def __init__(self, *, group: int, limits: Limits, effects: deque[Effect], timers: Timers) -> None:
        self._group = group
        self._limits = limits
        self._effects = effects
        self._timers = timers
        self.sessions: dict[tuple[str, RequestKey], SendSession] = {}
        self._served: dict[RequestKey, set[str]] = {}
        self._parked = _Parked(limits)
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
        sums: tuple[PartialSums, ...] = (),
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
            self.abort(session, RequestTimeout(_late(session)), now)
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


def _late(session: SendSession) -> str:
    reserved = len(session.destinations)
    if reserved < len(session.expected):
        found = f"{reserved} of {len(session.expected)} ranks of {session.peer!r} reserved"
        return f"request {session.key}: the deadline passed; {found}"
    waiting = [str(peer) for peer, destination in session.destinations.items() if not destination.ended]
    return f"request {session.key}: the deadline passed while waiting for {', '.join(waiting)}"
