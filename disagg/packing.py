"""Which pieces travel packed, and the talk about it: slots filled, unpacked, credited. In the control thread.

Both sides know the order of a stream without naming its addresses: span classes of the plan, layers, tokens in order, cut
where either side's pages end. The writer says of each slot which bytes of which stream it holds; the receiver derives where
they belong from its own rows.
"""

from __future__ import annotations

import enum
import functools
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from disagg.copies import CopyBatch
from disagg.errors import LocalProtocolError
from disagg.plan import ComponentPlan, Placed, RowSpace, SpanClass, Stream, TransferPlan, first_page, place
from disagg.rows import Pages, Rows, Slot
from disagg.session import PeerRank, ReceiveSession, StartTransfer, Ticket
from disagg.session.types import Limits, back_off
from disagg.spanwise import AtSource, StreamOf, destination_stream, source_stream
from disagg.staging import Ring, RingPool
from disagg.transfers import Bound, PackedStream, SlotFilled, Unpack, Unpacked
from disagg.wire import Complete, Credit, Filled, Part, RingGrant, Written, unpack_rows

logger = logging.getLogger(__name__)

USES_BITS = 32
"""Uses of one grant's slots are numbered from a multiple of 2 to this power."""
MIN_PIECES = 32
"""Fewer pieces than this go one by one: a slot costs two messages."""


def is_small(plan: ComponentPlan, span: SpanClass, pack_below: int) -> bool:
    """Whether the pieces of a span class are below the threshold; runs of tokens end with the shorter page."""
    if not span.dense:
        return span.nbytes < pack_below
    return span.nbytes * (min(plan.source.page_size, plan.destination.page_size) // span.granule) < pack_below


class Way(enum.Enum):
    """How bytes go: piece by piece; piece by piece because the engine collects them; packed at the source and written where
    they belong; or packed into the peer's ring.
    """

    DIRECT = "direct"
    COLLECTED = "collected"
    SOURCE = "source"
    RING = "packed"


def way_of(small: Placed, pack_below: int, gathers_from: int | None = None) -> Way:
    """How small pieces of a request go: directly where neighbours joined are long on the average; packed at the source where
    they lie together at their destination alone, unless the engine collects pieces of that length.
    """
    destination = destination_stream([("", small)])
    if destination.total >= small.num_copies() * pack_below:
        return Way.DIRECT
    collected = gathers_from is not None and _collects(source_stream([("", small)]), gathers_from)
    # The threshold is for pieces that lie apart on both sides; of collected ones the source's side costs no more than packing.
    if destination.total < destination.num_pieces * (pack_below / 2 if collected else pack_below):
        return Way.RING
    return Way.COLLECTED if collected else Way.SOURCE


def bind_outgoing(
    plan: TransferPlan,
    start: StartTransfer,
    *,
    pack_below: int,
    has_ring: bool = True,
    gathers_from: int | None = None,
    stream_of: StreamOf = source_stream,
) -> Bound:
    """Every copy of a transfer, by the way it goes; `gathers_from` as of `Gathering`. Raises `LayoutError` where rows do not
    fit.
    """
    direct: list[CopyBatch] = []
    parts: list[Part] = []
    packed: list[tuple[str, Placed]] = []
    gathered: list[tuple[str, Placed]] = []
    for written in start.written:
        component = plan.components.get(written.component)
        source = start.chunk.rows.get(written.component)
        if component is None or source is None:
            continue
        reserved = start.reserve.rows.get(written.component)
        if reserved is None:
            raise LocalProtocolError(f"component {written.component!r} is needed, but the receiver reserved no rows for it")
        placed = functools.partial(
            _place, component, written, source, unpack_rows(reserved), start.reserve.need[written.component][1]
        )
        small = tuple(i for i, span in enumerate(component.spans) if is_small(component, span, pack_below))
        whole = placed()
        if not small or not whole.has_copies(MIN_PIECES):
            direct.append(whole.copies())
            continue
        large = tuple(i for i in range(len(component.spans)) if i not in small)
        chosen = placed(small) if large else whole
        # Only streams of host memory say where their bytes lie; elsewhere looking at every piece takes longer than packing.
        way = way_of(chosen, pack_below, gathers_from) if stream_of is source_stream else Way.RING
        if way in (Way.DIRECT, Way.COLLECTED) or (way is Way.RING and not has_ring):
            direct.append(whole.copies())
            continue
        if large:
            direct.append(placed(large).copies())
        if way is Way.SOURCE:
            gathered.append((written.component, chosen))
        else:
            packed.append((written.component, chosen))
            parts.append(Part(written.component, small, written.layers, written.start, written.stop))
    stream = stream_of(packed) if packed else None
    return Bound(
        CopyBatch.concatenate(direct),
        stream,
        tuple(parts),
        source=AtSource.of(gathered) if gathered else None,
        listed=stream if isinstance(stream, Stream) and _collects(stream, gathers_from) else None,
    )


def _collects(stream: Stream, gathers_from: int | None) -> bool:
    """Whether the engine is to take a stream's pieces from where they lie."""
    return gathers_from is not None and 0 < gathers_from * stream.num_pieces <= stream.total


def bind_incoming(
    plan: TransferPlan,
    parts: tuple[Part, ...],
    rows: Mapping[str, Rows],
    need: Mapping[str, tuple[int, int]],
    *,
    stream_of: StreamOf = destination_stream,
) -> PackedStream:
    """Where a writer's packed stream belongs, by this side's rows. Raises `LayoutError` for parts that do not fit."""
    packed: list[tuple[str, Placed]] = []
    for part in parts:
        component, destination, needed = plan.components.get(part.component), rows.get(part.component), need.get(part.component)
        fits = component is not None and all(span < len(component.spans) for span in part.spans)
        if component is None or destination is None or needed is None or not fits:
            raise LocalProtocolError(f"packed stream: component {part.component!r}, span classes {part.spans} are not expected")
        written = Written(0, part.component, part.layers, max(part.start, needed[0]), min(part.stop, needed[1]))
        source = _any_rows(component.source, written, needed[1])
        packed.append((part.component, _place(component, written, source, destination, needed[1], part.spans)))
    return stream_of(packed)


def _place(
    component: ComponentPlan,
    written: Written,
    source: Rows,
    destination: Rows,
    num_tokens: int,
    spans: tuple[int, ...] | None = None,
) -> Placed:
    return place(
        component,
        source=source,
        destination=destination,
        tokens=(written.start, written.stop),
        num_tokens=num_tokens,
        layers=written.layers,
        spans=spans,
    )


def _any_rows(space: RowSpace, written: Written, num_tokens: int) -> Rows:
    """Rows as the writer may have them: their ids do not matter for the order, only where pages end."""
    if space.tokens is None:
        return Slot(0)
    first = first_page(space, written.start, num_tokens)
    count = first_page(space, max(written.stop - 1, written.start), num_tokens) - first + 1
    return Pages(np.arange(count + 1, dtype=np.int32) % space.num_rows, written.start)


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
