"""Rings and credits: which slots of a ring a writer has filled, and which of them the receiver has unpacked.

A receiver grants one ring to each connection. The writer reports filled slots until their credit comes; the receiver unpacks
each use of a slot once, however often it is reported, and answers with a credit, which frees the slot.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.core.rings import NUM_USES, Ring, is_later, is_same_grant
from disagg.protocol.messages import Credit, Filled, RingGrant, SlotsFilled
from disagg.protocol.timers import back_off
from disagg.protocol.types import (
    NEVER,
    CreditSlots,
    Effect,
    Limits,
    PeerRank,
    RequestKey,
    SendMessage,
    UnpackSlot,
    ids,
)

MAX_RINGS = 4
"""Rings of one peer rank once they are scarce, so that one that connects anew without end does not take those of others."""


class Rings(Protocol):
    """Where rings come from."""

    def take(self) -> Ring | None:
        """A free ring, or `None`."""

    def give_back(self, ring: Ring, /) -> None:
        """The ring is free again."""

    @property
    def are_scarce(self) -> bool:
        """Whether at most half of the rings are free."""


@dataclass
class _Unacknowledged:
    """A filled slot whose credit has not come."""

    message: SlotsFilled
    retry_at: float = 0.0
    retry_s: float = 0.0


@dataclass
class GrantedRing:
    """A ring that was granted to one connection. `uses` has each slot's newest use: its sequence number, and whether that use
    was unpacked.
    """

    epoch: int
    generation: int
    ring: Ring
    first: int
    uses: dict[int, tuple[int, bool]] = field(default_factory=dict)


class Credits:
    """Both directions of one rank. `draw` returns that many random bits. Nothing is sent before `flush`."""

    def __init__(
        self,
        *,
        limits: Limits,
        effects: deque[Effect],
        rings: Rings | None = None,
        draw: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._limits = limits
        self._effects = effects
        self._rings = rings
        self._draw = draw
        self._outbox: list[tuple[PeerRank, SlotsFilled | Credit]] = []
        self._unacknowledged: dict[tuple[PeerRank, int], _Unacknowledged] = {}
        self._granted: dict[PeerRank, GrantedRing] = {}
        self._epochs: dict[PeerRank, int] = {}
        self._without: dict[PeerRank, tuple[int, int]] = {}
        self._retired: dict[tuple[PeerRank, int], list[GrantedRing]] = {}

    # -- the receiver's side -----------------------------------------------------------------------------------------

    def grant(self, peer: PeerRank, epoch: int, generation: int) -> RingGrant | None:
        """The ring of a rank's connection, or `None` if no ring is left. A new epoch or generation gets a new ring, since late
        writes may still hit the old one. Once rings are scarce, a rank that has `MAX_RINGS` gets no more; those that
        are not proved quiet count.
        """
        self._epochs[peer] = epoch
        if self._without.get(peer) == (epoch, generation):
            return None  # both sides must mean the same ring for as long as the connection lasts
        granted = self._granted.get(peer)
        if granted is None or (granted.epoch, granted.generation) != (epoch, generation):
            if granted is not None:
                self._retired.setdefault((peer, granted.epoch), []).append(granted)
            retired = sum(len(grants) for (whose, _), grants in self._retired.items() if whose == peer)
            has_enough = self._rings is None or (retired >= MAX_RINGS and self._rings.are_scarce)
            ring = self._rings.take() if self._rings is not None and not has_enough else None
            if ring is None:
                self._granted.pop(peer, None)
                self._without[peer] = epoch, generation
                return None
            granted = self._granted[peer] = GrantedRing(epoch, generation, ring, self._draw(30) * NUM_USES)
        ring = granted.ring
        return RingGrant(ring.address, ring.slot_nbytes, ring.num_slots, granted.first)

    def on_filled(self, peer: PeerRank, filled: Filled, begin: Callable[[], Any]) -> None:
        """Unpack a slot into the session that `begin` returns, or give it back at once if that is `None`. A use that was
        reported before is credited again if it was unpacked.
        """
        granted = self._find(peer, filled.ring)
        if granted is None or filled.slot >= granted.ring.num_slots or not 0 < filled.nbytes <= granted.ring.slot_nbytes:
            return
        if not is_same_grant(filled.sequence, granted.first):
            return  # a use of a ring that was granted before this one
        newest, unpacked = granted.uses.get(filled.slot, (granted.first, True))
        if not is_later(filled.sequence, newest):
            if filled.sequence == newest and unpacked:
                self._credit(peer, filled)
            return
        session = begin()
        granted.uses[filled.slot] = filled.sequence, session is None
        if session is None:
            self._credit(peer, filled)
            return
        self._effects.append(UnpackSlot(peer, session, filled, granted.ring.slot(filled.slot), granted))

    def unpacked(self, slot: UnpackSlot) -> None:
        """A slot was unpacked, or could not be: give it back to its writer, if the writer's connection still has that ring."""
        granted, filled = slot.grant, slot.filled
        granted.uses[filled.slot] = filled.sequence, True
        if self._find(slot.peer, filled.ring) is granted:
            self._credit(slot.peer, filled)

    def _find(self, peer: PeerRank, ring: int) -> GrantedRing | None:
        """The grant of a ring to a rank at its present epoch. It may be of an earlier connection, which the writer may still
        take for the newest.
        """
        newest = self._granted.get(peer)
        if newest is not None and newest.ring.address == ring:
            return newest
        earlier = self._retired.get((peer, self._epochs.get(peer, 0)), ())
        return next((granted for granted in earlier if granted.ring.address == ring), None)

    def _credit(self, peer: PeerRank, filled: Filled) -> None:
        self._outbox.append((peer, Credit(ring=filled.ring, slots=((filled.slot, filled.sequence),))))

    # -- the writer's side -------------------------------------------------------------------------------------------

    def report(self, peer: PeerRank, key: RequestKey, nonce: int, filled: Filled, now: float) -> None:
        """Report a filled slot to its receiver, until the credit comes."""
        message = SlotsFilled(**ids(key), nonce=nonce, slots=(filled,))
        unacknowledged = self._unacknowledged[peer, filled.slot] = _Unacknowledged(message)
        back_off(unacknowledged, self._limits, now)
        self._outbox.append((peer, message))

    def on_credit(self, peer: PeerRank, message: Credit) -> None:
        """Slots of the peer's ring are free again."""
        for slot, sequence in message.slots:
            found = self._unacknowledged.get((peer, slot))
            if found is not None and (found.message.slots[0].ring, found.message.slots[0].sequence) == (message.ring, sequence):
                del self._unacknowledged[peer, slot]
        self._effects.append(CreditSlots(peer, message.ring, message.slots))

    # -- both sides --------------------------------------------------------------------------------------------------

    def peer_lost(self, peer: PeerRank) -> None:
        """A rank is gone: nothing more is sent to it."""
        for key in [found for found in self._unacknowledged if found[0] == peer]:
            del self._unacknowledged[key]

    def peer_quiet(self, peer: PeerRank, epoch: int, *, renewed: bool = False) -> None:
        """A rank that was lost at that epoch is proved to write no more: its rings are free again. If the same process has
        `renewed` its connection, the newest ring stays granted.
        """
        grants = self._retired.pop((peer, epoch), [])
        newest = self._granted.get(peer)
        if newest is not None and newest.epoch == epoch and not renewed:
            grants.append(self._granted.pop(peer))
        for granted in grants:
            assert self._rings is not None
            self._rings.give_back(granted.ring)

    def forget(self, instance: str) -> None:
        """An instance is not known any more. Its rings come back once it is proved quiet."""
        for peer in [peer for peer in self._epochs if peer.instance == instance]:
            del self._epochs[peer]
            self._without.pop(peer, None)

    def tick(self, now: float) -> None:
        """Report again the slots whose credit has not come."""
        for (peer, _), unacknowledged in self._unacknowledged.items():
            if now >= unacknowledged.retry_at:
                back_off(unacknowledged, self._limits, now)
                self._outbox.append((peer, unacknowledged.message))

    @property
    def next_tick(self) -> float:
        """When `tick` next has something to do."""
        return min((found.retry_at for found in self._unacknowledged.values()), default=NEVER)

    def flush(self) -> None:
        """Send what has come together since the last call: one message for each request and peer, one credit for each ring."""
        if not self._outbox:
            return
        slots: dict[tuple[PeerRank, RequestKey, int], list[Filled]] = {}
        freed: dict[tuple[PeerRank, int], list[tuple[int, int]]] = {}
        for peer, message in self._outbox:
            if isinstance(message, Credit):
                freed.setdefault((peer, message.ring), []).extend(message.slots)
            else:
                key = RequestKey(message.request_id, message.attempt)
                slots.setdefault((peer, key, message.nonce), []).extend(message.slots)
        self._outbox.clear()
        for (peer, key, nonce), filled in slots.items():
            self._effects.append(SendMessage(peer, SlotsFilled(**ids(key), nonce=nonce, slots=tuple(filled))))
        for (peer, ring), uses in freed.items():
            self._effects.append(SendMessage(peer, Credit(ring=ring, slots=tuple(uses))))
