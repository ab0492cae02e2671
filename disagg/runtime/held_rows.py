"""Rows that receives of this rank hold: no two may write the same row."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping

import numpy as np

from disagg.arguments import Ids
from disagg.core.errors import LocalProtocolError
from disagg.layout.placement import Placement
from disagg.requests import Receiver


class HeldRows:
    """The last receive that each row was given to. Thread-safe."""

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}
        self._number_of = {name: np.zeros(placement.num_rows, np.int64) for name, placement in placements.items()}

    def take(self, receiver: Receiver) -> int:
        """Give a receive the rows that it needs, and return its number for `forget`.

        Raises `LocalProtocolError`, with nothing changed, for a row that another receive holds.
        """
        with self._lock:
            for name, ids in receiver.ids.items():
                self._check_free(name, ids)
            number = next(self._numbers)
            self._receivers[number] = receiver
            for name, ids in receiver.ids.items():
                self._number_of[name][ids] = number
        return number

    def forget(self, number: int) -> None:
        """The rows of a receive are released."""
        self._receivers.pop(number, None)

    def _check_free(self, name: str, ids: Ids) -> None:
        numbers = self._number_of[name][ids]
        for number in set(numbers.tolist()):
            holder = self._receivers.get(number)
            if holder is not None and not holder.is_released:
                row = int(ids[numbers == number][0])
                raise LocalProtocolError(
                    f"rows of {name!r}: expected rows that no other receive needs, found row {row}, which request {holder.key} "
                    f"from {holder.peer!r} holds until its lease is released"
                )
