"""One request that this rank sends: its states, their table, and its destinations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg.core.errors import Cause, DisaggError, RequestAborted
from disagg.core.leases import Lease
from disagg.core.ranges import Ranges
from disagg.protocol.messages import MAX_SECONDS, Abort, Complete, Drained, PartialChecksums, Reserve, TokenRange, Written
from disagg.protocol.types import NEVER, Chunk, PeerRank, RequestKey, State, ids, take_step

_SUMS = np.dtype("<u8")


class SendState(State):
    """`AWAITED`: no reserve yet. `CLOSED`: outcome known. `LOST`: the peer is gone."""

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
    DECLINED = "the receiver needs nothing"
    UNANSWERED = "the receiver has not answered for a long time"


SEND_TABLE: dict[tuple[SendState, SendStep], SendState] = {
    (SendState.AWAITED, SendStep.RESERVED): SendState.ACTIVE,
    (SendState.AWAITED, SendStep.FAILURE): SendState.CLOSED,
    (SendState.AWAITED, SendStep.DECLINED): SendState.CLOSED,
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
    (SendState.DRAINED, SendStep.UNANSWERED): SendState.CLOSED,
}


@dataclass
class Destination:
    """`sums` are by component, over its chunks. `knows_failure`: the receiver knows that the attempt has failed. `lost_at`
    is the epoch at which the peer was lost.
    """

    state: SendState = SendState.AWAITED
    reserve: Reserve | None = None
    in_flight: set[int] = field(default_factory=set)
    unsettled: set[int] = field(default_factory=set)
    landed: dict[int, tuple[Written, ...]] = field(default_factory=dict)
    packed: dict[int, int] = field(default_factory=dict)
    sums: dict[str, PartialChecksums] = field(default_factory=dict)
    took: tuple[float, ...] = ()
    started: int = 0
    reason: str = ""
    knows_failure: bool = False
    cause: Cause = Cause.PEER
    ok: bool = False
    retry_at: float = NEVER
    retry_s: float = 0.0
    resent: int = 0
    lost_at: int | None = None

    def step(self, step: SendStep) -> bool:
        return take_step(SEND_TABLE, self, step)

    def settle(self, chunk: int, *, packed: int, sums: Iterable[PartialChecksums], unsettled: bool) -> None:
        """Checksums of chunks add up modulo 2**64. Another thread may ask `is_under_way` at any time."""
        (self.unsettled.add if unsettled else self.unsettled.discard)(chunk)
        self.in_flight.discard(chunk)
        if packed:
            self.packed[chunk] = packed
        for part in sums:
            known = self.sums.get(part.component)
            self.sums[part.component] = part if known is None else _added(known, part)

    def is_under_way(self, chunk: int) -> bool:
        return chunk in self.in_flight or chunk in self.unsettled

    @property
    def quiet(self) -> bool:
        return not self.in_flight and not self.unsettled

    @property
    def ended(self) -> bool:
        return self.state in (SendState.CLOSED, SendState.LOST)

    @property
    def is_read_for(self) -> bool:
        return self.state is SendState.ACTIVE or not self.quiet

    @property
    def waiting(self) -> bool:
        if self.state is SendState.ABORTING:
            return not self.knows_failure
        return self.state in (SendState.COMPLETED, SendState.DRAINED)

    @property
    def reserved(self) -> Reserve:
        assert self.reserve is not None
        return self.reserve


@dataclass
class SendSession:
    """One request that this rank sends.

    It is bound to a peer from the start, or by the first message about it. Until then `expected` is `None`, `peer` may be
    empty (any), and the attempt of `key` counts only unless `any_attempt`. `names_attempt`: one attempt was offered to any
    peer. `wanted_at`: when a receiver last sent `Wanted`.
    """

    key: RequestKey
    peer: str
    expected: frozenset[int] | None
    peer_group_size: int
    deadline: float
    tag: Any
    any_attempt: bool = False
    destination_group: int | None = None
    destinations: dict[PeerRank, Destination] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    finished: bool = False
    payload: bytes = b""
    error: DisaggError | None = None
    reported: bool = False
    released: bool = False
    lease: Lease = field(default_factory=Lease)
    wanted_at: float | None = None
    given_up_at: float = -math.inf
    armed_at: float = NEVER
    names_attempt: bool = field(init=False)

    def __post_init__(self) -> None:
        self.names_attempt = not self.peer and not self.any_attempt

    @property
    def due(self) -> float:
        judged = self.deadline if self.error is None and not self.reported else NEVER
        return min(judged, *(d.retry_at for d in self.destinations.values() if d.waiting), NEVER)

    @property
    def is_bound(self) -> bool:
        return self.expected is not None

    @property
    def num_awaited(self) -> int:
        """Destinations not known yet; 1 while the peer is unknown."""
        return 1 if self.expected is None else len(self.expected) - len(self.destinations)

    def may_reserve(self, peer: PeerRank) -> bool:
        """Whether the static plan has this rank write to `peer`."""
        group, rank = divmod(peer.rank, self.peer_group_size)
        return self.expected is not None and rank in self.expected and self.destination_group in (None, group)

    def reserve(self, peer: PeerRank, message: Reserve) -> Destination:
        destination = self._destination(peer, "")
        destination.step(SendStep.RESERVED)
        destination.reserve = message
        return destination

    def decline(self, peer: PeerRank) -> None:
        if self.may_reserve(peer):
            destination = self._destination(peer, "the receiver has declined the request")
            destination.ok = destination.step(SendStep.DECLINED) or destination.ok

    def end_unreserved(self, peer: PeerRank, reason: str) -> bool:
        """A destination gave up before its reserve arrived. Returns whether that is new."""
        return self._destination(peer, reason).step(SendStep.FAILURE)

    def _destination(self, peer: PeerRank, reason: str) -> Destination:
        self.destination_group = peer.rank // self.peer_group_size
        return self.destinations.setdefault(peer, Destination(reason=reason))

    @property
    def have_ended(self) -> bool:
        return all(destination.ended for destination in self.destinations.values())

    @property
    def is_read(self) -> bool:
        return any(destination.is_read_for for destination in self.destinations.values())

    @property
    def failure(self) -> RequestAborted | None:
        worst = next((d for d in self.destinations.values() if not d.ok), None)
        return None if worst is None else RequestAborted(worst.reason or "a destination failed", cause=worst.cause)

    def needed(self, component: str) -> TokenRange | None:
        """What reserved destinations need of `component`, from the first to the last token; `None` until all have reserved."""
        needs = [
            d.reserve.need[component] for d in tuple(self.destinations.values()) if d.reserve and component in d.reserve.need
        ]
        if self.num_awaited > 0 or not needs:
            return None
        some = [need for need in needs if need[0] < need[1]] or needs[:1]
        return min(start for start, _ in some), max(stop for _, stop in some)

    def complete(self, destination: Destination) -> Complete:
        return Complete(
            **ids(self.key),
            nonce=destination.reserved.nonce,
            written=_joined(w for number in sorted(destination.landed) for w in destination.landed[number]),
            payload=self.payload,
            packed=tuple(sorted(destination.packed.items())),
            sums=tuple(destination.sums.values()),
            took=tuple(min(seconds, MAX_SECONDS) for seconds in destination.took),
        )

    def abort(self, destination: Destination) -> Abort:
        return Abort(**ids(self.key), nonce=destination.reserved.nonce, reason=destination.reason, from_writer=True)

    def drained(self, destination: Destination) -> Drained:
        return Drained(**ids(self.key), nonce=destination.reserved.nonce, reason=destination.reason)

    def late_reason(self) -> str:
        if self.expected is None:
            return f"request {self.key}: the deadline passed; no rank of {self.peer or 'any peer'} has reserved"
        reserved = len(self.destinations)
        if self.num_awaited > 0:
            return (
                f"request {self.key}: the deadline passed; {reserved} of {len(self.expected)} ranks of {self.peer!r} reserved"
            )
        if not self.finished:
            return f"request {self.key}: the deadline passed before the sender's finish was called"
        waiting = [str(peer) for peer, destination in self.destinations.items() if not destination.ended]
        return f"request {self.key}: the deadline passed while waiting for {', '.join(waiting)}"


def _added(ours: PartialChecksums, theirs: PartialChecksums) -> PartialChecksums:
    pairs = (ours.by_layer, theirs.by_layer), (ours.by_page, theirs.by_page)
    sums = [(np.frombuffer(one, _SUMS) + np.frombuffer(other, _SUMS)).tobytes() for one, other in pairs]
    return PartialChecksums(ours.component, *sums)


def _joined(written: Iterable[Written]) -> tuple[Written, ...]:
    """Join adjacent ranges of the same layers: a request may be sent in very many chunks, in any order."""
    joined: dict[tuple[str, tuple[int, ...] | None], tuple[Ranges, dict[int, int]]] = {}
    for each in written:
        ranges, chunks = joined.setdefault((each.component, each.layers), (Ranges(), {}))
        ranges.add(each.start, each.stop)
        chunks[each.stop] = each.chunk
    return tuple(
        Written(chunks[stop], component, layers, start, stop)
        for (component, layers), (ranges, chunks) in joined.items()
        for start, stop in ranges
    )
