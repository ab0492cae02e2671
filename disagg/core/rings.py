"""Rings of staging slots."""

from __future__ import annotations

from dataclasses import dataclass

NUM_USES = 1 << 32
"""The uses of one grant's slots are numbered from a multiple of this on, and from there again after so many."""


def next_use(use: int) -> int:
    """The number of the use after `use`."""
    return use - use % NUM_USES + (use + 1) % NUM_USES


def is_same_grant(use: int, other: int) -> bool:
    """Whether both uses are of one grant."""
    return use // NUM_USES == other // NUM_USES


def is_later(use: int, other: int) -> bool:
    """Whether `use` came after `other`, a use of the same grant. Slots are used in turn, so two uses of a slot that are both
    still spoken of are less than half of `NUM_USES` apart.
    """
    return 0 < (use - other) % NUM_USES < NUM_USES // 2


@dataclass(frozen=True)
class Ring:
    """`num_slots` slots of `slot_nbytes` from `address`, in the memory of the side that unpacks them."""

    address: int
    slot_nbytes: int
    num_slots: int

    def slot(self, number: int) -> int:
        """The address of a slot."""
        return self.address + number * self.slot_nbytes
