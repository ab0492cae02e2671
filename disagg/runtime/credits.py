"""Rings and their credits: slots filled, unpacked, credited."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from disagg.layout.plan import TransferPlan
from disagg.protocol.messages import Complete, Credit, Filled, RingGrant
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.timers import back_off
from disagg.protocol.types import Limits, PeerRank, Ticket
from disagg.runtime.paths import bind_incoming
from disagg.runtime.streams import StreamOf, destination_stream
from disagg.transfer.jobs import PackedStream, SlotFilled, Unpack, Unpacked
from disagg.transfer.staging import Ring, RingPool

logger = logging.getLogger(__name__)
USES_BITS = 32
"""Uses of one grant's slots are numbered from a multiple of 2 to this power."""


@dataclass
class _Said:
    """A filled slot whose credit has not come."""

    message: Complete
    retry_at: float = 0.0
    retry_s: float = 0.0


@dataclass
class _Granted:
    """A ring that was granted, and per slot the newest use of it: its sequence number, and whether it was unpacked."""

    epoch: int
    generation: int
    ring: Ring
    first: int
    uses: dict[int, tuple[int, bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Token:
    """Names an unpacking."""

    peer: PeerRank
    session: ReceiveSession
    granted: _Granted
    filled: Filled


class Packing:
    """What is said about slots, in both directions."""

    def __init__(self, rings: RingPool | None, *, limits: Limits) -> None:
        self._rings = rings
        self._messages: list[tuple[PeerRank, Complete | Credit]] = []
        self._limits = limits
        self._said: dict[tuple[PeerRank, int], _Said] = {}
        self._granted: dict[PeerRank, _Granted] = {}
        self._epochs: dict[PeerRank, int] = {}
        self._retired: dict[tuple[PeerRank, int], list[_Granted]] = {}

    def take_messages(self) -> list[tuple[PeerRank, Complete | Credit]]:
        """What is to be sent since the last call: slots filled for one request in one message, credits to one rank too."""
        merged: dict[tuple[PeerRank, bytes, int, int] | tuple[PeerRank, int], tuple[PeerRank, Complete | Credit]] = {}
        for peer, message in self._messages:
            if isinstance(message, Credit):
                of = peer, message.ring
                known = merged.get(of, (peer, None))[1]
                slots = known.slots if isinstance(known, Credit) else ()
                merged[of] = peer, Credit(ring=message.ring, slots=slots + message.slots)
                continue
            key = peer, message.request_id, message.attempt, message.nonce
            earlier = merged.get(key, (peer, None))[1]
            before = earlier.filled if isinstance(earlier, Complete) else ()
            merged[key] = peer, msgspec.structs.replace(message, filled=before + message.filled)
        self._messages.clear()
        return list(merged.values())

    def grant(self, peer: PeerRank, epoch: int, generation: int) -> RingGrant | None:
        """The ring of a rank's connection; a new one for every epoch and generation, since late writes may hit the old."""
        self._epochs[peer] = epoch
        granted = self._granted.get(peer)
        if granted is None or (granted.epoch, granted.generation) != (epoch, generation):
            if granted is not None:
                self._retired.setdefault((peer, granted.epoch), []).append(granted)
            ring = self._rings.take() if self._rings is not None else None
            if ring is None:
                if self._rings is not None:
                    logger.warning("no ring is left for %s: its small pieces will travel one by one", peer)
                self._granted.pop(peer, None)
                return None
            granted = self._granted[peer] = _Granted(epoch, generation, ring, secrets.randbits(30) << USES_BITS)
        ring = granted.ring
        return RingGrant(ring.address, ring.slot_nbytes, ring.num_slots, granted.first)

    def on_slot_filled(self, peer: PeerRank, ticket: Ticket, nonce: int, report: SlotFilled, now: float) -> None:
        """Tell a receiver what is in a slot, until it answers with its credit."""
        filled = Filled(report.slot, report.sequence, ticket.chunk, report.parts, report.offset, report.nbytes, report.ring)
        request_id, attempt = ticket.key
        message = Complete(request_id=request_id, attempt=attempt, nonce=nonce, final=False, filled=(filled,))
        said = self._said[peer, report.slot] = _Said(message)
        back_off(said, self._limits, now)
        self._messages.append((peer, message))

    def on_credit(self, peer: PeerRank, ring: int, slot: int, sequence: int) -> None:
        """A slot was unpacked: it need not be told of again."""
        said = self._said.get((peer, slot))
        if said is not None and (said.message.filled[0].ring, said.message.filled[0].sequence) == (ring, sequence):
            del self._said[peer, slot]

    def _grant_of(self, peer: PeerRank, ring: int) -> _Granted | None:
        """The grant of a ring to a rank at its present epoch; also one of an earlier connection, which the writer may still
        take for the newest.
        """
        newest = self._granted.get(peer)
        if newest is not None and newest.ring.address == ring:
            return newest
        earlier = self._retired.get((peer, self._epochs.get(peer, 0)), ())
        return next((granted for granted in earlier if granted.ring.address == ring), None)

    def take(
        self,
        peer: PeerRank,
        filled: Filled,
        begin: Callable[[], ReceiveSession | None],
        incoming: TransferPlan,
        stream_of: StreamOf = destination_stream,
    ) -> Unpack | None:
        """What to do about a slot that a writer has filled; `None` where it was told of before, or nobody waits for it."""
        granted = self._grant_of(peer, filled.ring)
        if granted is None or filled.slot >= granted.ring.num_slots or not 0 < filled.nbytes <= granted.ring.slot_nbytes:
            return None
        if filled.sequence >> USES_BITS != granted.first >> USES_BITS:
            return None  # it lies in a ring that was granted before this one
        newest, done = granted.uses.get(filled.slot, (granted.first, True))
        if filled.sequence <= newest:
            if filled.sequence == newest and done:
                self._credit(peer, filled)
            return None
        session = begin()
        granted.uses[filled.slot] = filled.sequence, session is None
        if session is None:
            self._credit(peer, filled)
            return None
        token = _Token(peer, session, granted, filled)
        stream = self._stream(session, peer, filled, incoming, stream_of)
        return Unpack(token, stream, granted.ring.slot(filled.slot), filled.offset, filled.nbytes)

    @staticmethod
    def _stream(
        session: ReceiveSession, peer: PeerRank, filled: Filled, incoming: TransferPlan, stream_of: StreamOf
    ) -> Callable[[], PackedStream]:
        """A chunk's stream, bound by the worker when it is first unpacked."""
        key = peer, filled.chunk
        if key not in session.streams:
            bind = functools.partial(bind_incoming, incoming, filled.parts, session.rows, session.need, stream_of=stream_of)
            session.streams[key] = functools.cache(bind)
        stream: Callable[[], PackedStream] = session.streams[key]
        return stream

    def unpacked(self, report: Unpacked) -> tuple[ReceiveSession, PeerRank, Filled]:
        """A slot was scattered: give it back to its writer."""
        token: _Token = report.token
        token.granted.uses[token.filled.slot] = token.filled.sequence, True
        if self._grant_of(token.peer, token.filled.ring) is token.granted:
            self._credit(token.peer, token.filled)
        return token.session, token.peer, token.filled

    def _credit(self, peer: PeerRank, filled: Filled) -> None:
        self._messages.append((peer, Credit(ring=filled.ring, slots=((filled.slot, filled.sequence),))))

    def lose(self, peer: PeerRank) -> None:
        """A rank is gone: nothing more is told to it."""
        for key in [found for found in self._said if found[0] == peer]:
            del self._said[key]

    def quiet(self, peer: PeerRank, epoch: int, *, renewed: bool = False) -> None:
        """It is proved that a rank that was lost at that epoch writes no more: its rings are free again, but for the newest
        where the same process has `renewed` its connection.
        """
        grants = self._retired.pop((peer, epoch), [])
        newest = self._granted.get(peer)
        if newest is not None and newest.epoch == epoch and not renewed:
            grants.append(self._granted.pop(peer))
        for granted in grants:
            assert self._rings is not None
            self._rings.give_back(granted.ring)

    def tick(self, now: float) -> None:
        """Say again what was not answered."""
        for (peer, _), said in self._said.items():
            if now >= said.retry_at:
                back_off(said, self._limits, now)
                self._messages.append((peer, said.message))

    def next_tick(self) -> float:
        """When `tick` next has something to do."""
        return min((said.retry_at for said in self._said.values()), default=float("inf"))
