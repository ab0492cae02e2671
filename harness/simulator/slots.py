"""The staging slots of one simulated rank."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from disagg.protocol.types import Ticket

SLOT_CELLS = 3
"""Cells in one slot."""


class SlotContent(NamedTuple):
    """What a slot holds: by which loan and transfer it was filled, and `(row, cell, value)` of each cell."""

    ticket: Ticket
    loan: int
    cells: list[tuple[int, int, int]]


class SlotPool:
    """Few slots, so that writers wait for them. `memory` has the content of each by address. If it `replaces` slots, there are
    always addresses left.
    """

    slot_nbytes = SLOT_CELLS
    window = 2
    batch = 1
    total = 5

    def __init__(self, *, replaces: bool) -> None:
        self._replaces = replaces
        self.free = [4096 * (number + 1) for number in range(self.total)]
        self.memory: dict[int, SlotContent] = {}
        self._unused: list[int] = []
        self._addresses = itertools.count(self.total + 1)

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def can_replace(self) -> bool:
        return self._replaces

    def take(self) -> int:
        """A free slot, the one given back last."""
        return self.free.pop()

    def give_back(self, address: int) -> None:
        """The slot may be lent to another writer."""
        self.free.append(address)

    def replace(self, address: int) -> bool:  # noqa: ARG002
        """An address that nobody writes to takes the place of another."""
        if self._replaces:
            self.free.append(self._unused.pop() if self._unused else 4096 * next(self._addresses))
        return self._replaces

    def renew(self, address: int) -> None:
        """Nobody writes to a slot that was replaced."""
        self._unused.append(address)
