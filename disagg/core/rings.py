"""Rings of staging slots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """`num_slots` slots of `slot_nbytes` from `address`, in the memory of the side that unpacks them."""

    address: int
    slot_nbytes: int
    num_slots: int

    def slot(self, number: int) -> int:
        """The address of a slot."""
        return self.address + number * self.slot_nbytes
