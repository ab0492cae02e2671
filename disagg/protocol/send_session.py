"""One request that this rank sends: its states, their table, and its destinations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from disagg.core.errors import Cause, DisaggError
from disagg.core.leases import Lease
from disagg.protocol.messages import (
    Complete,
    PartialChecksums,
    Reserve,
    TokenRange,
    Written,
)
from disagg.protocol.types import (
    NEVER,
    Chunk,
    PeerRank,
    RequestKey,
    State,
)


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
    sums: dict[int, tuple[PartialChecksums, ...]] = field(default_factory=dict)
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


def late_reason(session: SendSession) -> str:
    reserved = len(session.destinations)
    if reserved < len(session.expected):
        found = f"{reserved} of {len(session.expected)} ranks of {session.peer!r} reserved"
        return f"request {session.key}: the deadline passed; {found}"
    waiting = [str(peer) for peer, destination in session.destinations.items() if not destination.ended]
    return f"request {session.key}: the deadline passed while waiting for {', '.join(waiting)}"
