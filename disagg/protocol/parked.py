"""Reserves that arrived before their sender was opened."""

from __future__ import annotations

from collections import Counter, OrderedDict

from disagg.protocol.messages import (
    Abort,
    Busy,
    Drained,
    PagesRow,
    Reserve,
)
from disagg.protocol.types import NEVER, Limits, PeerRank, RequestKey, ids, key_of

CONTRADICTION = "this attempt is already reserved, with another nonce or other content"


def refusal(message: Reserve, reason: str) -> tuple[Abort, Drained]:
    """The answer to a reserve of which nothing was written, nor will be."""
    named = ids(key_of(message))
    return Abort(**named, nonce=message.nonce, reason=reason, from_writer=True), Drained(
        **named, nonce=message.nonce, reason=reason
    )


class Parked:
    """Reserves without a sender yet, and aborts that overtook their reserve; bounded in number and bytes per instance."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages: dict[RequestKey, dict[PeerRank, Reserve | Abort]] = {}
        self._order: OrderedDict[tuple[RequestKey, PeerRank], float] = OrderedDict()
        self._count: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._order)

    def get(self, peer: PeerRank, key: RequestKey) -> Reserve | Abort | None:
        return self._messages.get(key, {}).get(peer)

    def put(self, peer: PeerRank, key: RequestKey, message: Reserve | Abort, now: float) -> bool:
        """Park a message. Returns whether there was room."""
        whose, nbytes = peer.instance, _nbytes(message)
        if self._count[whose] >= self._limits.max_parked_reserves:
            return False
        if self._nbytes[whose] + nbytes > self._limits.max_parked_nbytes:
            return False
        self._count[whose] += 1
        self._nbytes[whose] += nbytes
        self._messages.setdefault(key, {})[peer] = message
        self._order[key, peer] = now + self._limits.parked_reserve_s
        return True

    def answer(self, peer: PeerRank, message: Reserve, now: float) -> tuple[Abort | Drained | Busy, ...]:
        """Park a reserve. Returns the messages to answer, if it contradicts the parked one or there is no room."""
        key = key_of(message)
        parked = self.get(peer, key)
        if parked is not None:
            return () if parked == message else refusal(message, CONTRADICTION)
        if self.put(peer, key, message, now):
            return ()
        reason = f"{self._count[peer.instance]} reservations of {peer.instance!r} wait for their senders"
        retry_after_s = self._limits.busy_retry_s
        return (Busy(**ids(key), nonce=message.nonce, reason=reason, retry_after_s=retry_after_s),)

    def take(self, key: RequestKey) -> list[tuple[PeerRank, Reserve | Abort]]:
        """Take everything that is parked for a request."""
        found = list(self._messages.get(key, {}).items())
        for peer, _ in found:
            self.drop(peer, key)
        return found

    def drop(self, peer: PeerRank, key: RequestKey) -> None:
        if self._order.pop((key, peer), None) is not None:
            self._count[peer.instance] -= 1
            self._nbytes[peer.instance] -= _nbytes(self._messages[key].pop(peer))
            if not self._messages[key]:
                del self._messages[key]

    def drop_peer(self, peer: PeerRank) -> None:
        for key, parked in [found for found in self._order if found[1] == peer]:
            self.drop(parked, key)

    @property
    def next_expiry(self) -> float:
        return next(iter(self._order.values()), NEVER)

    def expire(self, now: float) -> None:
        while self._order:
            (key, peer), expires = next(iter(self._order.items()))
            if now < expires:
                return
            self.drop(peer, key)


def _nbytes(message: Reserve | Abort) -> int:
    """The approximate size of a parked message; page ids dominate."""
    rows = message.rows.values() if isinstance(message, Reserve) else ()
    return 512 + sum(len(row.ids) for row in rows if isinstance(row, PagesRow))
