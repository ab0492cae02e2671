"""What a receiver tells ranks that hold no reservation of it, until they answer: that it declines, or gives up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from disagg.protocol.messages import Abort, Decline, Drained
from disagg.protocol.timers import Timers, back_off
from disagg.protocol.types import NEVER, Effect, Limits, PeerRank, RequestKey, SendMessage, key_of

MAX_SENT = 6
"""Within 12.5 s by default."""


@dataclass(eq=False)
class Notice:
    peer: PeerRank
    message: Abort | Decline
    left: int = MAX_SENT - 1
    retry_at: float = NEVER
    retry_s: float = 0.0
    armed_at: float = NEVER

    @property
    def due(self) -> float:
        return self.retry_at


class Notices:
    def __init__(self, *, limits: Limits, effects: deque[Effect], timers: Timers) -> None:
        self._limits, self._effects, self._timers = limits, effects, timers
        self._open: dict[tuple[PeerRank, RequestKey], Notice] = {}
        self._new: list[Notice] = []

    def send(self, peer: PeerRank, message: Abort | Decline) -> None:
        earlier = self._open.get((peer, key_of(message)))
        if earlier is not None:
            self._end(earlier)
        notice = self._open[peer, key_of(message)] = Notice(peer, message)
        self._new.append(notice)
        self._effects.append(SendMessage(peer, message))

    def take(self, peer: PeerRank, message: Drained) -> bool:
        """Whether the message answers a notice."""
        notice = self._open.get((peer, key_of(message)))
        if notice is None or notice.message.nonce != message.nonce:
            return False
        self._end(notice)
        return True

    def tick(self, notice: Notice, now: float) -> None:
        notice.left -= 1
        self._effects.append(SendMessage(notice.peer, notice.message))
        if notice.left:
            back_off(notice, self._limits, now)
        else:
            self._end(notice)

    def flush(self, now: float) -> None:
        new, self._new = self._new, []
        for notice in new:
            if self._open.get((notice.peer, key_of(notice.message))) is notice:
                back_off(notice, self._limits, now)
                self._timers.arm(notice)

    def forget(self, instance: str) -> None:
        for notice in [each for each in self._open.values() if each.peer.instance == instance]:
            self._end(notice)

    def _end(self, notice: Notice) -> None:
        del self._open[notice.peer, key_of(notice.message)]
        notice.retry_at = NEVER
        self._timers.disarm(notice)
