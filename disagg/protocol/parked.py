"""Messages about requests whose sender was not opened yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from disagg.protocol.messages import (
    Abort,
    Busy,
    Decline,
    Drained,
    PagesRow,
    Reserve,
)
from disagg.protocol.timers import Timers
from disagg.protocol.types import NEVER, Limits, PeerRank, RequestKey, ids, key_of

K = TypeVar("K", str, PeerRank)
CONTRADICTION = "this attempt is already reserved, with another nonce or other content"


def add(counts: Counter[K], key: K, number: int) -> None:
    """A count of zero is not kept: names come and go."""
    counts[key] += number
    if not counts[key]:
        del counts[key]


def refusal(message: Reserve, reason: str) -> tuple[Abort, Drained]:
    """The answer to a reserve of which nothing was or will be written."""
    named = ids(key_of(message))
    return Abort(**named, nonce=message.nonce, reason=reason, from_writer=True), Drained(
        **named, nonce=message.nonce, reason=reason
    )


Early = Reserve | Abort | Decline


@dataclass(eq=False)
class Expiry:
    peer: PeerRank
    key: RequestKey
    due: float
    armed_at: float = NEVER


class Parked:
    """Bounded in number per instance, and in bytes, which instances share. Reserves count in `num_reserved`, by rank."""

    def __init__(self, limits: Limits, num_reserved: Counter[PeerRank]) -> None:
        self._limits = limits
        self._num_reserved = num_reserved
        self._messages: dict[bytes, dict[tuple[PeerRank, RequestKey], Early]] = {}
        self._expiries: dict[tuple[PeerRank, RequestKey], Expiry] = {}
        self._timers = Timers()
        self._count: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._expiries)

    @property
    def has_reserves(self) -> bool:
        return any(isinstance(each, Reserve) for found in self._messages.values() for each in found.values())

    def get(self, peer: PeerRank, key: RequestKey) -> Early | None:
        return self._messages.get(key.request_id, {}).get((peer, key))

    def put(self, peer: PeerRank, key: RequestKey, message: Early, now: float, *, for_s: float = NEVER) -> bool:
        """Park a message in place of an earlier one, `for_s` at most. Returns whether there was room."""
        self.drop(peer, key)
        whose = peer.instance
        if self._count[whose] >= self._limits.max_parked_reserves:
            return False
        num_sharing = len(self._nbytes) + (whose not in self._nbytes)
        if (self._nbytes[whose] + _nbytes(message)) * num_sharing > self._limits.max_parked_nbytes:
            return False
        self._add(peer, message, 1)
        self._messages.setdefault(key.request_id, {})[peer, key] = message
        self._expiries[peer, key] = expiry = Expiry(peer, key, now + min(for_s, self._limits.parked_reserve_s))
        self._timers.arm(expiry)
        return True

    def answer(self, peer: PeerRank, message: Reserve, now: float, *, for_s: float) -> tuple[Abort | Drained | Busy, ...]:
        """Park a reserve. Returns the answer if it contradicts the parked one or there is no room."""
        key = key_of(message)
        parked = self.get(peer, key)
        if parked is not None:
            return () if parked == message else refusal(message, CONTRADICTION)
        if self.put(peer, key, message, now, for_s=for_s):
            return ()
        reason = f"{self._count[peer.instance]} reservations of {peer.instance!r} wait for their senders"
        retry_after_s = self._limits.busy_retry_s
        return (Busy(**ids(key), nonce=message.nonce, reason=reason, retry_after_s=retry_after_s),)

    def find(self, request_id: bytes, *, instance: str, attempt: int | None) -> tuple[str, RequestKey] | None:
        """The instance and the newest attempt with something parked, among this instance (empty: any) and attempt (`None`:
        any).
        """
        found = [
            (key.attempt, peer.instance)
            for peer, key in self._messages.get(request_id, {})
            if instance in ("", peer.instance) and attempt in (None, key.attempt)
        ]
        if not found:
            return None
        newest, whose = max(found, key=lambda each: each[0])
        return whose, RequestKey(request_id, newest)

    def take(self, key: RequestKey) -> list[tuple[PeerRank, Early]]:
        found = [(peer, message) for (peer, of), message in self._messages.get(key.request_id, {}).items() if of == key]
        for peer, _ in found:
            self.drop(peer, key)
        return found

    def drop(self, peer: PeerRank, key: RequestKey) -> None:
        if (expiry := self._expiries.pop((peer, key), None)) is not None:
            self._timers.disarm(expiry)
            parked = self._messages[key.request_id]
            self._add(peer, parked.pop((peer, key)), -1)
            if not parked:
                del self._messages[key.request_id]

    def _add(self, peer: PeerRank, message: Early, sign: int) -> None:
        add(self._count, peer.instance, sign)
        add(self._nbytes, peer.instance, sign * _nbytes(message))
        add(self._num_reserved, peer, sign * isinstance(message, Reserve))

    def drop_peer(self, peer: PeerRank) -> None:
        self._drop_all(lambda found: found == peer)

    def forget(self, instance: str) -> None:
        self._drop_all(lambda found: found.instance == instance)

    def _drop_all(self, are_of: Callable[[PeerRank], bool]) -> None:
        for peer, key in [each for each in self._expiries if are_of(each[0])]:
            self.drop(peer, key)

    @property
    def next_expiry(self) -> float:
        return self._timers.next

    def expire(self, now: float) -> Iterator[tuple[PeerRank, Early]]:
        while isinstance(expiry := self._timers.pop(now), Expiry):
            yield expiry.peer, self._messages[expiry.key.request_id][expiry.peer, expiry.key]
            self.drop(expiry.peer, expiry.key)


def _nbytes(message: Early) -> int:
    match message:
        case Reserve():
            ids_nbytes = sum(len(row.ids) for row in message.rows.values() if isinstance(row, PagesRow))
            return 512 + 320 * (len(message.rows) + len(message.need)) + ids_nbytes
        case Abort():
            return 512 + 4 * len(message.reason)
        case _:
            return 512
