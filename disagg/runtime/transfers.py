"""Messages about requests, and reports of the transfer worker, become calls of the protocol; its effects become jobs of the
worker, messages, and ends of leases.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import msgspec

from disagg.backends.base import RemotePeer
from disagg.core.errors import RemoteProtocolError, RequestAborted
from disagg.core.events import ReadyEvent
from disagg.core.leases import quarantine, release
from disagg.core.thread_log import ThreadLog
from disagg.core.timeline import TransferPhases
from disagg.protocol.messages import Borrow, Complete, Filled, Message, Reserve, SlotsFilled
from disagg.protocol.receive_session import ReceiveSession, ReceiveState
from disagg.protocol.send_session import SendSession, SendState
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import (
    CancelTransfers,
    Effect,
    Event,
    PeerRank,
    QuarantineLease,
    ReleaseLease,
    ReturnLoans,
    SendMessage,
    StartTransfer,
    StartVerify,
    TakeLoans,
    Ticket,
    UnpackSlot,
    key_of,
)
from disagg.runtime.accounting import Stats
from disagg.runtime.handshake import Handshake
from disagg.runtime.paths import bind_incoming, bind_outgoing, bind_prepared
from disagg.runtime.request_table import RequestTable
from disagg.runtime.verification import Verification
from disagg.transfer.jobs import Broken, Job, Report, Settled, SlotFilled, SlotsWanted, Unpack, Unpacked
from disagg.transfer.staging import Loans
from disagg.transfer.worker import TransferWorker

logger = ThreadLog(__name__)

MAX_STREAMS = 256
"""Streams kept for one request; an earlier one is bound again if another slot of it comes."""


class Transfers:
    """Used by the control thread. `on_unreachable`: the engine's connection to a peer is broken."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        handshake: Handshake,
        worker: TransferWorker,
        verification: Verification,
        requests: RequestTable,
        stats: Stats,
        pack_below: int,
        on_unreachable: Callable[[PeerRank, str, float], None],
    ) -> None:
        self._sessions = sessions
        self._handshake = handshake
        self._worker = worker
        self._verification = verification
        self._requests = requests
        self._stats = stats
        self._pack_below = pack_below
        self._on_unreachable = on_unreachable
        self.not_ready: list[tuple[ReceiveSession, ReadyEvent]] = []
        """Receives whose rows wait for their event."""
        self._settled: list[tuple[Settled, SendSession | None]] = []
        self._ended: list[Event] = []

    @property
    def num_unconnected(self) -> int:
        return sum(len(starts) for _, peer in self._handshake.peers() for starts in tuple(peer.waiting.values()))

    # -- in ----------------------------------------------------------------------------------------------------------

    def on_message(self, peer: PeerRank, message: Message, now: float) -> None:
        if isinstance(message, SlotsFilled | Borrow) and self._handshake.rank(peer) is None:
            return  # no loss would end a loan before the engine is connected; the writer sends the message again
        if isinstance(message, Complete):
            session = self._sessions.receives.sessions.get((peer.instance, key_of(message)))
            if session is not None:
                self._requests.moments_of(session).land(time.monotonic(), TransferPhases(*message.took))
        self._sessions.on_message(peer, message, now)

    def take_ready(self, now: float) -> None:
        waiting, self.not_ready = self.not_ready, []
        for session, ready in waiting:
            if session.error is not None:
                continue
            try:
                passed = bool(ready.query())
            except BaseException as error:  # of the server's event, which may raise SystemExit
                logger.exception("%s: the event of a receiver's rows", self._handshake.me)
                what = f"the event of the rows failed: {type(error).__name__}: {error}"
                self._sessions.receives.abort(session, RequestAborted(what), now)
                continue
            if passed:
                self._sessions.receives.ready(session, now)
            else:
                self.not_ready.append((session, ready))

    # -- effects -----------------------------------------------------------------------------------------------------

    def carry_out(self, send: Callable[[PeerRank, Message], None], now: float) -> None:
        """Also the effects of the worker's reports."""
        self._carry_out_all(send, now)
        for report in self._worker.take_reports():
            self._take(report, now)
        self._sessions.flush(now)
        self._carry_out_all(send, now)

    def _carry_out_all(self, send: Callable[[PeerRank, Message], None], now: float) -> None:
        effects = self._sessions.effects
        while effects:
            effect = effects.popleft()
            try:
                self._carry_out(effect, send, now)
            except BaseException:  # concerns one request, which its deadline ends
                logger.exception("%s: fault in %s", self._handshake.me, type(effect).__name__)

    def _carry_out(self, effect: Effect, send: Callable[[PeerRank, Message], None], now: float) -> None:
        match effect:
            case SendMessage(peer, message):
                if isinstance(message, Reserve):
                    self._lend_ahead(peer)
                send(peer, message)
            case StartTransfer():
                self._start(effect, now)
            case CancelTransfers():
                self._cancel(effect, now)
            case UnpackSlot():
                self._unpack(effect, now)
            case TakeLoans():
                self._take_loans(effect, now)
            case ReturnLoans():  # no request is open towards the peer
                if (loans := self._loans_of(effect.peer)) is not None:
                    self._sessions.borrower.give_back(effect.peer, loans, now)
            case StartVerify():
                self._verification.verify(effect)
            case ReleaseLease() | QuarantineLease():
                _end_lease(effect)
            case Event():
                self._ended.append(effect)

    def carry_out_leases(self) -> None:
        """The control thread is about to end: still release or quarantine the leases for which that has been decided."""
        for effect in self._sessions.effects:
            if isinstance(effect, ReleaseLease | QuarantineLease):
                _end_lease(effect)

    def _start(self, start: StartTransfer, now: float) -> None:
        """Submit a transfer, or keep it until its rank is connected. It fails if the reserving process has ended."""
        ticket = start.ticket
        session = self._sessions.sends.sessions.get((ticket.peer.instance, ticket.key))
        if session is None:
            return
        peer, destination = self._handshake.peer(ticket.peer), session.destinations[ticket.peer]
        rank = peer.remote
        if rank is None and not destination.ended:
            peer.waiting.setdefault(ticket.key, []).append(start)
            return
        if rank is None or not start.is_for(rank.epoch):  # lost just before, so nothing will cancel this
            what = "is gone" if rank is None else "has restarted since it reserved these rows"
            self._sessions.sends.settled(ticket, now=now, error=f"{ticket.peer} {what}")
            return
        if rank.prepared is not None:
            bind = functools.partial(bind_prepared, rank.prepared, rank.plan, start)
        else:
            bind = functools.partial(
                bind_outgoing,
                rank.plan,
                start,
                pack_below=self._pack_below,
                packs=rank.loans is not None,
                direct=rank.direct,
                gathers_from=rank.gathers_from,
                make_stream=rank.pack,
            )
        job = Job(
            ticket,
            rank.engine,
            bind,
            cancelled=lambda: destination.state is not SendState.ACTIVE,
            ready=start.chunk.ready,
            loans=rank.loans,
            is_over=lambda: not destination.is_under_way(ticket.chunk),
        )
        self._worker.submit(job)
        self._verification.start(rank, start)

    def _unpack(self, slot: UnpackSlot, now: float) -> None:
        session: ReceiveSession = slot.session
        rank = self._handshake.rank(slot.peer)
        if rank is None:
            self._sessions.unpacked(slot, now, error=f"{slot.peer} is gone")
            return
        filled, key = slot.filled, (slot.peer, slot.filled.chunk)
        if key not in session.streams:  # bound when the worker unpacks the first slot of the chunk
            bind = functools.partial(
                bind_incoming, rank.incoming, filled.parts, session.rows, session.need, make_stream=rank.unpack
            )
            session.streams[key] = functools.cache(bind)
            if len(session.streams) > MAX_STREAMS:
                del session.streams[next(iter(session.streams))]
        self._worker.unpack([Unpack(slot, session.streams[key], slot.address, filled.offset, filled.nbytes)])

    def _lend_ahead(self, peer: PeerRank) -> None:
        """Lend the slots that a writer will want first, so that it need not ask. But not before it has something to write, if
        its end would cost them.
        """
        rank, lender = self._handshake.rank(peer), self._sessions.lender
        if rank is not None and (rank.has_small if self._handshake.is_direct(peer, rank.epoch) else lender.can_replace):
            lender.ahead(peer)

    def _take_loans(self, effect: TakeLoans, now: float) -> None:
        loans = self._loans_of(effect.peer)
        if loans is None:
            return
        try:
            self._sessions.take_loans(effect, loans, now)
        except RemoteProtocolError as error:
            self._on_unreachable(effect.peer, str(error), now)

    def _loans_of(self, peer: PeerRank) -> Loans | None:
        rank = self._handshake.rank(peer)
        return rank.loans if rank is not None else None

    # -- peers -------------------------------------------------------------------------------------------------------

    def connected(self, peer: PeerRank, now: float) -> None:
        for start in self._take_waiting(peer):
            self._start(start, now)

    def _cancel(self, cancelled: CancelTransfers, now: float) -> None:
        """End the transfers that wait for a connection; for the others the worker asks `Job.cancelled`."""
        for start in self._handshake.peer(cancelled.peer).waiting.pop(cancelled.key, ()):
            self._sessions.sends.settled(start.ticket, now=now, error="the request has failed")

    def lost(self, peer: PeerRank, cause: str, now: float) -> None:
        for start in self._take_waiting(peer):
            self._sessions.sends.settled(start.ticket, now=now, error=f"{peer} is gone: {cause}")

    def _take_waiting(self, peer: PeerRank) -> Iterator[StartTransfer]:
        found = self._handshake.peer(peer)
        waiting, found.waiting = found.waiting, {}
        return itertools.chain(*waiting.values())

    def forget(self, instance: str, now: float) -> None:
        for peer, _ in self._handshake.peers():
            if peer.instance == instance:
                self.lost(peer, "it was removed", now)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _take(self, report: Report, now: float) -> None:
        if isinstance(report, Unpacked):
            self._take_unpacked(report, now)
            return
        ticket = report.ticket
        assert isinstance(ticket, Ticket)
        if isinstance(report, SlotFilled):
            filled = Filled(report.loan, ticket.chunk, report.parts, report.offset, report.nbytes)
            self._sessions.slot_filled(ticket, filled, now)
        elif isinstance(report, SlotsWanted):
            loans = self._loans_of(ticket.peer)
            if loans is not None:
                self._sessions.borrower.want(ticket.peer, loans, now)
        elif isinstance(report, Broken):
            self._end_connection(ticket.peer, report.peer, report.error, now)
        else:
            self._take_settled(ticket, report, now)

    def _take_unpacked(self, report: Unpacked, now: float) -> None:
        slot = report.token
        assert isinstance(slot, UnpackSlot)
        session: ReceiveSession = slot.session
        self._stats.unpack_s += report.seconds
        if session.state is ReceiveState.OPEN:
            self._requests.moments_of(session).unpacked_at = time.monotonic()
        self._sessions.unpacked(slot, now, error=report.error)

    def _take_settled(self, ticket: Ticket, report: Settled, now: float) -> None:
        self._end_connection(ticket.peer, report.unreachable, report.error, now)
        if not report.unsettled:
            session = self._sessions.sends.sessions.get((ticket.peer.instance, ticket.key))
            self._settled.append((report, session if session is not None and not session.reported else None))
        took = msgspec.structs.astuple(report.phases)
        if self._verification.settled(ticket, packed=report.packed, took=took, error=report.error, now=now):
            return
        self._sessions.sends.settled(
            ticket, now=now, error=report.error, unsettled=report.unsettled, packed=report.packed, took=took
        )

    def _end_connection(self, peer: PeerRank, engine: RemotePeer | None, error: str, now: float) -> None:
        """Unless both have connected anew since."""
        rank = self._handshake.rank(peer)
        if engine is not None and rank is not None and rank.engine is engine:
            self._on_unreachable(peer, error, now)

    def finish(self) -> None:
        """Count settled transfers, and end requests. This may yield the GIL, so it runs after all messages have left."""
        for report, session in self._settled:
            self._stats.add(report)
            if session is not None:
                moments = self._requests.moments_of(session)
                moments.land(report.ended_at, report.phases, nbytes=report.written, pieces=report.pieces)
        self._settled.clear()
        if self._ended:
            ended, self._ended = self._ended, []
            self._requests.end(ended)


def _end_lease(effect: ReleaseLease | QuarantineLease) -> None:
    if isinstance(effect, ReleaseLease):
        release(effect.lease)
    else:
        quarantine(effect.lease, effect.reason)
