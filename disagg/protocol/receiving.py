"""The receiving side: reserves rows at the elected writers, accounts for what lands, and pronounces the outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from disagg.core.errors import Cause, DisaggError, LocalProtocolError, RequestAborted, RequestTimeout
from disagg.core.leases import Lease
from disagg.core.rows import Rows
from disagg.protocol.messages import (
    Abort,
    Busy,
    Complete,
    Drained,
    Outcome,
    RequestMessage,
    SlotsFilled,
    TokenRange,
    Verify,
)
from disagg.protocol.notices import Notices
from disagg.protocol.receive_session import (
    MAX_STEPS,
    Coverage,
    Expected,
    ReceiveSession,
    ReceiveState,
    ReceiveStep,
    Writer,
    WriterState,
    WriterStep,
)
from disagg.protocol.timers import Timers, Tombstone, Tombstones, back_off
from disagg.protocol.types import (
    NEVER,
    Effect,
    Event,
    Limits,
    PeerRank,
    QuarantineLease,
    ReleaseLease,
    RequestKey,
    SendMessage,
    StartVerify,
    brief,
    ids,
    key_of,
)


class Receives:
    def __init__(
        self, *, group: int, epoch: int, limits: Limits, effects: deque[Effect], timers: Timers, notices: Notices
    ) -> None:
        self._group, self._epoch = group, epoch
        self._limits = limits
        self._effects = effects
        self._timers = timers
        self._notices = notices
        self.sessions: dict[tuple[str, RequestKey], ReceiveSession] = {}
        self._ended = Tombstones(limits.max_tombstones)
        self.forget = self._ended.forget

    def open(
        self,
        key: RequestKey,
        *,
        peer: str,
        nonce: int,
        source_group: int,
        rows: Mapping[str, Rows],
        need: Mapping[str, TokenRange],
        expected: Expected,
        now: float,
        deadline: float,
        ready: bool = True,
        verify: Verify = "off",
        tag: Any = None,
        lease: Lease | None = None,
        trace: str = "",
    ) -> ReceiveSession:
        """Reserve `rows` at every writer in `expected`; with `ready=False` only once `ready` is called. With `verify` it
        succeeds only after `verified`. Raises `LocalProtocolError` if this attempt was opened before.
        """
        if (peer, key) in self.sessions or self._ended.get(peer, key) is not None:
            raise LocalProtocolError(
                f"request {key}: this attempt was already received from {peer!r}; use a new attempt number"
            )
        writers = {
            PeerRank(peer, rank): Writer({name: Coverage(*awaited) for name, awaited in parts.items()})
            for rank, parts in sorted(expected.items())
        }
        lease = lease or Lease()
        session = ReceiveSession(
            key, peer, nonce, source_group, self._group, rows, need, writers, deadline, tag, verify, trace, lease=lease
        )
        self.sessions[peer, key] = session
        self._timers.arm(session)
        if ready:
            self.ready(session, now)
        return session

    def ready(self, session: ReceiveSession, now: float) -> None:
        if not session.step(ReceiveStep.READY):
            return
        for writer, at in session.writers.items():
            self._reserve(session, writer, at, now)
        self._judge(session)

    def _reserve(self, session: ReceiveSession, peer: PeerRank, writer: Writer, now: float) -> None:
        if writer.reserve is None:
            writer.reserve = session.reserve(writer.coverage, self._epoch)
        self._schedule(session, writer, now)
        self._effects.append(SendMessage(peer, writer.reserve))

    def abort(self, session: ReceiveSession, error: DisaggError, now: float) -> None:
        if not session.step(ReceiveStep.FAILURE):
            return
        session.error = error
        session.drain_deadline = now + self._limits.drain_timeout_s
        self._timers.arm(session)
        for peer, writer in session.writers.items():
            if writer.reserve is None:
                writer.step(WriterStep.QUIET)
                self._notices.send(peer, self._abort_of(session))
            elif writer.step(WriterStep.FAILURE):
                self._send_abort(session, peer, writer, now)
        self._report(session, ok=False)
        self._settle(session)

    def _send_abort(self, session: ReceiveSession, peer: PeerRank, writer: Writer, now: float) -> None:
        self._schedule(session, writer, now)
        self._effects.append(SendMessage(peer, self._abort_of(session)))

    def _abort_of(self, session: ReceiveSession) -> Abort:
        return Abort(**ids(session.key), nonce=session.nonce, reason=brief(session.error))

    def _judge(self, session: ReceiveSession) -> None:
        if session.local_work:  # a slot that no writer owes is being unpacked into the rows
            return
        for writer in session.writers.values():
            if writer.state is not WriterState.COMPLETE:
                return
        if session.verify == "off":
            self._succeed(session)
        else:
            session.step(ReceiveStep.LANDED)
            session.local_work += 1
            sums = {peer: writer.sums for peer, writer in session.writers.items()}
            start = StartVerify(session.key, session.peer, session.rows, session.need, sums)
            self._effects.append(start)

    def verified(self, peer: str, key: RequestKey, now: float, *, error: DisaggError | None) -> None:
        session = self.sessions[peer, key]
        session.local_work -= 1
        if error is not None:
            self.abort(session, error, now)
        elif session.state is ReceiveState.VERIFYING:
            self._succeed(session)
        self._settle(session)

    def _succeed(self, session: ReceiveSession) -> None:
        session.step(ReceiveStep.COVERED)
        for writer in session.writers.values():
            session.payload = session.payload or writer.payload
        self._end(session, ok=True)
        self._report(session, ok=True)

    def _settle(self, session: ReceiveSession) -> None:
        quiet = not session.local_work and all(writer.state.quiet for writer in session.writers.values())
        if quiet and session.step(ReceiveStep.QUIET):
            self._end(session, ok=False)

    def _end(self, session: ReceiveSession, *, ok: bool) -> None:
        outcome = Outcome(**ids(session.key), nonce=session.nonce, ok=ok, reason=brief(session.error))
        self._ended.put(session.peer, session.key, Tombstone(session.nonce, outcome))
        del self.sessions[session.peer, session.key]
        self._timers.disarm(session)
        self._effects.append(ReleaseLease(session.lease))
        session.streams.clear()  # a server may keep the request's handle
        for peer, writer in session.writers.items():
            if writer.reserve is not None:
                self._effects.append(SendMessage(peer, outcome))

    def on_complete(self, peer: PeerRank, message: Complete, now: float) -> None:
        session = self._receive_of(peer, message)
        writer = session.writers.get(peer) if session else None
        if session is None or writer is None:
            self._answer_ended(peer, message)
            return
        if session.state is ReceiveState.ABORTING:
            writer.step(WriterStep.DRAINED)
            self._settle(session)
            return
        if not writer.account(message.written):
            writer.step(WriterStep.COVERED)
            what = f"the complete message of {peer}: expected at most {MAX_STEPS} ranges, counted for each layer, found more"
            self.abort(session, RequestAborted(what, cause=Cause.INCOMPLETE), now)
            return
        writer.payload, writer.owed, writer.sums = message.payload, dict(message.packed), message.sums
        self._conclude(session, peer, writer, now)

    def _conclude(self, session: ReceiveSession, peer: PeerRank, writer: Writer, now: float) -> None:
        if session.state is not ReceiveState.OPEN or not writer.has_everything:
            return
        writer.step(WriterStep.COVERED)
        for name, coverage in writer.coverage.items():
            if not coverage.complete:
                what = f"{peer} finished without component {name!r}: {coverage}"
                self.abort(session, RequestAborted(what, cause=Cause.INCOMPLETE), now)
                return
        self._judge(session)

    def begin_unpack(self, peer: PeerRank, message: SlotsFilled) -> ReceiveSession | None:
        """The session to unpack a slot into; `None` if it needs no more. Its rows stay leased until `end_unpack`."""
        session = self._receive_of(peer, message)
        if session is None or session.state is not ReceiveState.OPEN or session.writers.get(peer) is None:
            return None
        session.local_work += 1
        return session

    def end_unpack(
        self, session: ReceiveSession, peer: PeerRank, *, chunk: int, nbytes: int, now: float, error: str = ""
    ) -> None:
        session.local_work -= 1
        writer = session.writers[peer]
        writer.unpacked[chunk] = writer.unpacked.get(chunk, 0) + nbytes
        if error:
            self.abort(session, RequestAborted(error, cause=Cause.TRANSFER), now)
        self._conclude(session, peer, writer, now)
        self._settle(session)

    def on_abort(self, peer: PeerRank, message: Abort, now: float) -> None:
        session = self._receive_of(peer, message)
        if session is None or peer not in session.writers:
            self._answer_ended(peer, message)
            return
        self.abort(session, RequestAborted(f"{peer}: {message.reason}", cause=Cause.PEER), now)

    def on_drained(self, peer: PeerRank, message: Drained, now: float) -> None:
        session = self._receive_of(peer, message)
        if session is None or peer not in session.writers:
            self._answer_ended(peer, message)
            return
        session.writers[peer].step(WriterStep.DRAINED)
        reason = message.reason or "the writer ended the attempt"
        self.abort(session, RequestAborted(f"{peer}: {reason}", cause=Cause.PEER), now)
        self._settle(session)

    def on_busy(self, peer: PeerRank, message: Busy, now: float) -> None:
        key = RequestKey(message.request_id or b"", message.attempt)
        session = self.sessions.get((peer.instance, key))
        if session is None or session.nonce != message.nonce:
            return
        writer = session.writers.get(peer)
        if writer is not None and writer.state is WriterState.RESERVED:
            writer.retry_at = now + min(max(message.retry_after_s, 0.001), self._limits.max_retry_s)
            self._timers.arm(session)

    def answer_unknown(self, peer: PeerRank, message: SlotsFilled) -> None:
        """Answer about an unknown or ended attempt, so that its writer does not wait for a deadline."""
        session = self._receive_of(peer, message)
        if session is None or peer not in session.writers:
            self._answer_ended(peer, message)

    def _receive_of(self, peer: PeerRank, message: RequestMessage) -> ReceiveSession | None:
        session = self.sessions.get((peer.instance, key_of(message)))
        return session if session is not None and session.nonce == message.nonce else None

    def _answer_ended(self, peer: PeerRank, message: RequestMessage) -> None:
        tombstone = self._ended.get(peer.instance, key_of(message))
        if tombstone is not None and tombstone.outcome is not None and tombstone.nonce == message.nonce:
            self._effects.append(SendMessage(peer, tombstone.outcome))
        elif not isinstance(message, Abort):
            reason = "the receiver does not know this attempt"
            self._effects.append(
                SendMessage(peer, Outcome(**ids(key_of(message)), nonce=message.nonce, ok=False, reason=reason))
            )

    def peer_lost(self, peer: PeerRank, cause: str, now: float, *, epoch: int = 0, direct: bool = True) -> None:
        """Rows that the peer may still write stay leased until `peer_quiet`."""
        for session in [found for found in self.sessions.values() if peer in found.writers]:
            writer = session.writers[peer]
            if writer.state.quiet or writer.state is WriterState.LOST:
                continue  # the loss of a later process proves nothing about an earlier one
            if not direct:
                writer.step(WriterStep.QUIET)
            elif writer.reserve is not None:
                writer.step(WriterStep.PEER_LOST)
                writer.lost_at = epoch
                self._effects.append(QuarantineLease(session.lease, f"{peer} is gone and may still write: {cause}"))
            self.abort(session, RequestAborted(f"{peer} is gone: {cause}", cause=Cause.PEER_LOST), now)
            self._settle(session)

    def lacks_slots(self, peer: PeerRank, problem: str, now: float) -> None:
        """The peer asks for a slot to write, and gets none if there is a `problem`. It does not say for which request."""
        for session in list(self.sessions.values()) if problem else ():
            writer = session.writers.get(peer)
            if writer is not None and writer.reserve is not None and writer.state is WriterState.RESERVED:
                self.abort(session, RequestAborted(problem, cause=Cause.TRANSFER), now)

    def peer_back(self, peer: PeerRank, now: float, *, epoch: int = 0) -> None:
        """The lost process has reconnected: resend the abort, to get its proof."""
        for session in self.sessions.values():
            writer = session.writers.get(peer)
            if writer is not None and writer.was_lost_at(epoch) and writer.step(WriterStep.PEER_BACK):
                self._send_abort(session, peer, writer, now)

    def peer_quiet(self, peer: PeerRank, *, epoch: int = 0) -> None:
        for session in list(self.sessions.values()):
            writer = session.writers.get(peer)
            if writer is not None and writer.was_lost_at(epoch) and writer.step(WriterStep.QUIET):
                self._settle(session)

    def unproved(self) -> set[tuple[PeerRank, int]]:
        """The ranks that `peer_quiet` would end something for, by the epoch at which they were lost."""
        writers = (found for session in self.sessions.values() for found in session.writers.items())
        lost = ((peer, writer.lost_at) for peer, writer in writers if writer.state is WriterState.LOST)
        return {(peer, epoch) for peer, epoch in lost if epoch is not None}

    def tick(self, session: ReceiveSession, now: float) -> None:
        if now >= session.deadline:
            self.abort(session, RequestTimeout(session.late_reason()), now)
        if now >= session.drain_deadline:
            session.drain_deadline = NEVER
            silent = [str(peer) for peer, writer in session.writers.items() if not writer.state.quiet]
            self._effects.append(QuarantineLease(session.lease, f"no proof that {', '.join(silent)} stopped writing"))
        for peer, writer in session.writers.items():
            if not writer.waiting or now < writer.retry_at:
                continue
            if writer.state is WriterState.RESERVED:
                self._reserve(session, peer, writer, now)
            else:
                self._send_abort(session, peer, writer, now)

    def _report(self, session: ReceiveSession, *, ok: bool) -> None:
        event = Event(session.key, session.peer, "receive", ok, session.payload, session.error, session.lease, session.tag)
        self._effects.append(event)

    def _schedule(self, session: ReceiveSession, writer: Writer, now: float) -> None:
        back_off(writer, self._limits, now)
        self._timers.arm(session)
