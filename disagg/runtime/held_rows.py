"""Rows that requests of this rank hold: no two receives may write the same row, and none may write a row that a send
reads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from disagg.arguments import Ids
from disagg.core.errors import LocalProtocolError
from disagg.core.leases import LeaseState
from disagg.layout.placement import Placement
from disagg.requests import Receiver, Sender


class HeldRows:
    """Thread-safe. Several sends may read one row, such as a page of a common prefix. Rows of a send that was aborted, or
    whose lease is quarantined, count as free: the send has failed, so its data is not used.
    """

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}
        self._senders: dict[int, tuple[Sender, list[tuple[str, Ids]]]] = {}  # with the rows counted for it
        self._number_of = _zeros(placements)
        self._sender_of = _zeros(placements)
        self._num_sends = _zeros(placements)

    def take(self, receiver: Receiver) -> int:
        """The number of a receive, for `forget`. Raises `LocalProtocolError`, with nothing changed, for a row that is
        held.
        """
        with self._lock:
            for name, ids in receiver.ids.items():
                self._check_not_received(name, ids)
                self._check_not_sent(name, ids)
            number = next(self._numbers)
            self._receivers[number] = receiver
            for name, ids in receiver.ids.items():
                self._number_of[name][ids] = number
        return number

    def open(self, sender: Sender) -> int:
        """The number of a send, for `read` and `forget`."""
        with self._lock:
            number = next(self._numbers)
            self._senders[number] = sender, []
        return number

    def read(self, number: int, rows: Mapping[str, Ids]) -> None:
        """Rows may be named again. Raises `LocalProtocolError`, with nothing changed, for a row that a receive holds."""
        with self._lock:
            if number not in self._senders:
                return  # it has ended
            fresh = [(name, ids[self._sender_of[name][ids] != number]) for name, ids in rows.items()]
            for name, ids in fresh:
                self._check_not_received(name, ids)
            for name, ids in fresh:
                if ids.size:
                    self._sender_of[name][ids] = number
                    self._num_sends[name][ids] += 1  # once, also where an id is listed twice
                    self._senders[number][1].append((name, ids))

    def forget(self, number: int) -> None:
        with self._lock:
            self._receivers.pop(number, None)
            _, given = self._senders.pop(number, (None, []))
            for name, ids in given:
                self._num_sends[name][ids] -= 1

    def _check_not_received(self, name: str, ids: Ids) -> None:
        numbers = self._number_of[name][ids]
        for number in set(numbers.tolist()):
            holder = self._receivers.get(number)
            if holder is not None and not holder.is_released:
                row = int(ids[numbers == number][0])
                raise LocalProtocolError(
                    f"rows of {name!r}: expected rows that no other receive needs, found row {row}, which request {holder.key} "
                    f"from {holder.peer!r} holds until its lease is released"
                )

    def _check_not_sent(self, name: str, ids: Ids) -> None:
        sent = ids[self._num_sends[name][ids] > 0]
        for sender, row in self._sends_of(name, sent) if sent.size else ():
            raise LocalProtocolError(
                f"rows of {name!r}: expected rows that no send reads, found row {row}, which request {sender.key} to "
                f"{sender.peer or 'any peer'!r} holds until its lease is released"
            )

    def _sends_of(self, name: str, ids: Ids) -> Iterator[tuple[Sender, int]]:
        """Each with its first such row."""
        for sender, given in self._senders.values():
            if sender.lease.state is LeaseState.HELD and not sender.lease.withdrawn:
                found = [each[np.isin(each, ids)] for component, each in given if component == name]
                yield from ((sender, int(each[0])) for each in found if each.size)


def _zeros(placements: Mapping[str, Placement]) -> dict[str, npt.NDArray[np.int64]]:
    return {name: np.zeros(placement.num_rows, np.int64) for name, placement in placements.items()}
