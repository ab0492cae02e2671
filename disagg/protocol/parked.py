"""Reserves that arrived before their sender was opened."""

from __future__ import annotations

from collections import Counter, OrderedDict

from disagg.protocol.messages import (
    Abort,
    PagesRow,
    Reserve,
)
from disagg.protocol.types import (
    NEVER,
    Limits,
    PeerRank,
    RequestKey,
)


class Parked:
    """Reserves whose `sender` has not been opened yet, and aborts that came even before their reserve; bounded, by number
    and by bytes, for each instance that they come from.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages: dict[RequestKey, dict[PeerRank, Reserve | Abort]] = {}
        self._order: OrderedDict[tuple[RequestKey, PeerRank], float] = OrderedDict()
        self._count: Counter[str] = Counter()
        self._nbytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._order)

    def count(self, peer: PeerRank) -> int:
        """How many are parked of a rank's instance."""
        return self._count[peer.instance]

    def get(self, peer: PeerRank, key: RequestKey) -> Reserve | Abort | None:
        return self._messages.get(key, {}).get(peer)

    def put(self, peer: PeerRank, key: RequestKey, message: Reserve | Abort, now: float) -> bool:
        """Whether there was room for it."""
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

    def take(self, key: RequestKey) -> list[tuple[PeerRank, Reserve | Abort]]:
        """Everything parked for a request, which is parked no longer."""
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
    """What a parked message takes, about: ids are nearly all of a large one."""
    rows = message.rows.values() if isinstance(message, Reserve) else ()
    return 512 + sum(len(row.ids) for row in rows if isinstance(row, PagesRow))
