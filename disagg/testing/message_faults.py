"""A control channel around a manager's own that injects faults into messages."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.core import _native
from disagg.core.errors import ConfigError
from disagg.protocol.messages import MESSAGE_TYPES, decode, message_type
from disagg.runtime.channel import Channel
from disagg.runtime.wire import Arrival
from disagg.testing.backend_faults import check_probabilities

if TYPE_CHECKING:
    from disagg.manager import KVManager


@dataclass(frozen=True, kw_only=True)
class MessageFaults:
    """The probability that a sent message is lost, duplicated or delayed.

    Delays are random within `delay_s`, so messages overtake each other. `kinds` limits the faults to these message types,
    such as `"complete"`. There are at most `at_most` faults. Raises `ConfigError` for impossible probabilities and unknown
    types.
    """

    seed: int = 0
    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.2)
    kinds: frozenset[str] | None = None
    at_most: float = float("inf")

    def __post_init__(self) -> None:
        check_probabilities("message faults", self, ["lose", "double", "delay"])
        unknown = sorted((self.kinds or frozenset()) - MESSAGE_TYPES)
        if unknown:
            raise ConfigError(f"message faults: expected kinds of {', '.join(sorted(MESSAGE_TYPES))}, found {unknown[0]!r}")


@dataclass
class FaultyChannel:
    """Used by the control thread only."""

    inner: Channel
    faults: MessageFaults
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.faults.seed)
        self._due: list[tuple[float, int, Callable[[], bool]]] = []
        self._count = itertools.count()

    @property
    def address(self) -> str:
        return self.inner.address

    def connect(self, dial: int, address: str, *, public_key: str | None = None) -> None:
        self.inner.connect(dial, address, public_key=public_key)

    def disconnect(self, dial: int) -> None:
        self.inner.disconnect(dial)

    def wake(self) -> None:
        self.inner.wake()

    def busy_poll(self, seconds: float, completions: list[_native.Completion]) -> bool:
        return self.inner.busy_poll(seconds, completions)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()

    def send(self, dial: int, data: bytes) -> bool:
        return self._send(data, lambda: self.inner.send(dial, data))

    def reply(self, connection: bytes, data: bytes) -> bool:
        return self._send(data, lambda: self.inner.reply(connection, data))

    def poll(self, timeout_s: float) -> Iterator[Arrival]:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        due = self._due[0][0] - now if self._due else timeout_s
        yield from self.inner.poll(min(timeout_s, due))

    def _send(self, data: bytes, send: Callable[[], bool]) -> bool:
        fault = self._draw(data)
        if fault is None:
            return send()
        self.counts[fault] += 1
        if fault == "double":
            send()
        if fault != "lose":
            low, high = self.faults.delay_s
            seconds = low + self._rng.random() * (high - low)
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), send))
        return True

    def _draw(self, data: bytes) -> str | None:
        draw = self._rng.random()
        if self.counts.total() >= self.faults.at_most:
            return None
        if self.faults.kinds is not None and message_type(decode(data)) not in self.faults.kinds:
            return None
        for fault in ("lose", "double", "delay"):
            draw -= getattr(self.faults, fault)
            if draw < 0:
                return fault
        return None


def mistreat(manager: KVManager, faults: MessageFaults) -> FaultyChannel:
    """Inject faults into the messages that a manager sends from now on. Raises `LocalProtocolError` the second time."""
    wrapped: list[FaultyChannel] = []

    def wrap(channel: Channel) -> FaultyChannel:
        wrapped.append(FaultyChannel(channel, faults))
        return wrapped[0]

    manager.interpose(wrap)
    return wrapped[0]
