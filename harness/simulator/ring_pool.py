"""The staging rings of one simulated rank."""

from __future__ import annotations

from typing import NamedTuple

from disagg.core.rings import Ring
from disagg.protocol.types import PeerRank, Ticket

SLOT_CELLS = 3
"""Cells in one slot."""


class SlotContent(NamedTuple):
    """What a slot holds: which transfer and which use of the slot, and `(row, cell, value)` of each cell."""

    ticket: Ticket
    sequence: int
    cells: list[tuple[int, int, int]]


class RingPool:
    """Rings to grant. `owners` has the writer of each granted ring by address, `memory` the content of each slot by address.

    `next_owner` is set before a grant.
    """

    def __init__(self, num_rings: int = 6, num_slots: int = 2) -> None:
        self._free = [Ring(4096 * (number + 1), SLOT_CELLS, num_slots) for number in range(num_rings)]
        self.owners: dict[int, PeerRank] = {}
        self.memory: dict[int, SlotContent] = {}
        self.next_owner: PeerRank | None = None

    def take(self) -> Ring | None:
        """A free ring, the one given back last."""
        if not self._free:
            return None
        ring = self._free.pop()
        assert self.next_owner is not None
        self.owners[ring.address] = self.next_owner
        return ring

    def give_back(self, ring: Ring) -> None:
        """The ring may be granted to another writer."""
        del self.owners[ring.address]
        self._free.append(ring)

    @property
    def are_scarce(self) -> bool:
        return False
