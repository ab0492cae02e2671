"""Timers of sessions, retries with back-off, and the bounded memory of ended attempts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

import msgspec

from disagg.protocol.messages import Outcome
from disagg.protocol.types import NEVER, Limits, PeerRank, RequestKey

MAX_KEPT_REASON = 200
MIN_STALE = 64
"""Stale heap entries kept before they are swept."""


class Tombstone(msgspec.Struct, frozen=True):
    """An ended attempt, remembered so that repeated messages can be answered. `at` is the time at which a send was given up."""

    nonce: int | None
    outcome: Outcome | None = None
    reason: str = ""
    at: float = -math.inf


class Tombstones:
    """The newest tombstones, at most `limit` for all peer instances together. At the limit, an instance replaces its own
    oldest, or, if it has less than an equal share, the oldest of the instance with the most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_instance: dict[str, OrderedDict[Hashable, Tombstone]] = {}
        self._count = 0

    def put(self, peer: str | PeerRank, key: RequestKey, tombstone: Tombstone) -> None:
        found = self._by_instance.setdefault(_instance(peer), OrderedDict())
        self._count += (peer, key) not in found
        found[peer, key] = msgspec.structs.replace(tombstone, reason=tombstone.reason[:MAX_KEPT_REASON])
        found.move_to_end((peer, key))
        if self._count > self._limit:
            has_share = len(found) * len(self._by_instance) > self._limit
            (found if has_share else max(self._by_instance.values(), key=len)).popitem(last=False)
            self._count -= 1

    def get(self, peer: str | PeerRank, key: RequestKey) -> Tombstone | None:
        found = self._by_instance.get(_instance(peer))
        return found.get((peer, key)) if found is not None else None

    def drop(self, peer: str | PeerRank, key: RequestKey) -> None:
        found = self._by_instance.get(_instance(peer))
        if found is not None and found.pop((peer, key), None) is not None:
            self._count -= 1

    def forget(self, instance: str) -> None:
        self._count -= len(self._by_instance.pop(instance, ()))

    def __len__(self) -> int:
        return self._count


def _instance(peer: str | PeerRank) -> str:
    return peer.instance if isinstance(peer, PeerRank) else peer


class Timed(Protocol):
    armed_at: float

    @property
    def due(self) -> float: ...


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed]] = []
        self._count = itertools.count()
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def arm(self, session: Timed) -> None:
        due = session.due
        if due < session.armed_at:
            self._stale += session.armed_at < NEVER
            session.armed_at = due
            heapq.heappush(self._heap, (due, next(self._count), session))

    def disarm(self, session: Timed) -> None:
        """Unschedule an ended session, so that a far deadline does not keep it in memory."""
        if session.armed_at < NEVER:
            session.armed_at = NEVER
            self._stale += 1
        if self._stale > len(self._heap) // 2 + MIN_STALE:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].armed_at]
            heapq.heapify(self._heap)
            self._stale = 0

    def pop(self, now: float) -> Timed | None:
        """The caller arms it again."""
        while self._heap and self._heap[0][0] <= now:
            due, _, session = heapq.heappop(self._heap)
            if due == session.armed_at:  # otherwise it has been armed for an earlier time since
                session.armed_at = NEVER
                return session
            self._stale -= 1
        return None

    @property
    def next(self) -> float:
        return self._heap[0][0] if self._heap else NEVER


class Waiting(Protocol):
    retry_at: float
    retry_s: float


def back_off(waiting: Waiting, limits: Limits, now: float) -> None:
    waiting.retry_s = min(waiting.retry_s * 2 or limits.retry_s, limits.max_retry_s)
    waiting.retry_at = now + waiting.retry_s
