"""Faults of messages, transfers and timers: as listed, or at random."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class TransferResult(enum.Enum):
    """How a transfer ends.

    `LATE`: reported unsettled; its bytes land later, and it settles. `STUCK`: reported unsettled, never settles; its
    bytes land when the simulation ends.
    """

    DONE = "done"
    FAILED = "failed"
    LATE = "late"
    STUCK = "stuck"


class Behaviour(NamedTuple):
    """One transfer reports its result after `seconds`; a `LATE` one settles `late_s` after that, with `late_error`."""

    result: TransferResult = TransferResult.DONE
    seconds: float = 0.01
    late_s: float = 0.0
    late_error: str = ""


class Faults(Protocol):
    """Decides what happens to messages, transfers and ticks. Messages and transfers are numbered from 0."""

    def message(self, index: int, now: float) -> tuple[float, ...]:
        """The delay of each copy of the message that arrives; empty if the message is lost."""

    def transfer(self, index: int) -> Behaviour:
        """How the transfer behaves."""

    def packed(self, index: int) -> bool:
        """Whether the transfer goes through slots of its destination."""

    def unpack_s(self) -> float:
        """How long the next slot takes to unpack."""

    def lateness_s(self) -> float:
        """How late the next tick runs."""


@dataclass(frozen=True)
class FixedFaults:
    """Faults for the messages and transfers listed by number; all others succeed."""

    messages: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    transfers: Mapping[int, Behaviour] = field(default_factory=dict)
    packed_transfers: Set[int] = frozenset()

    def message(self, index: int, now: float) -> tuple[float, ...]:  # noqa: ARG002
        return self.messages.get(index, (0.001,))

    def transfer(self, index: int) -> Behaviour:
        return self.transfers.get(index, Behaviour())

    def packed(self, index: int) -> bool:
        return index in self.packed_transfers

    def unpack_s(self) -> float:
        return 0.003

    def lateness_s(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Random faults. From `heal_at` on, every message arrives.

    Probabilities: of messages, `loss`, `double` and `slow`; of transfers, `trouble` (failed or late) and `stuck`.
    """

    rng: random.Random
    loss: float = 0.0
    double: float = 0.0
    slow: float = 0.0
    trouble: float = 0.0
    stuck: float = 0.0
    heal_at: float = 0.0

    def message(self, index: int, now: float) -> tuple[float, ...]:  # noqa: ARG002
        draw = self.rng.random
        if now >= self.heal_at:
            return (0.001 + 0.002 * draw(),)
        if draw() < self.loss:
            return ()
        first = draw() * (2.0 if draw() < self.slow else 0.01)
        return (first, draw() * 2.0) if draw() < self.double else (first,)

    def transfer(self, index: int) -> Behaviour:  # noqa: ARG002
        draw = self.rng.random
        seconds = draw() * draw()
        if draw() < self.stuck:
            return Behaviour(TransferResult.STUCK, seconds)
        if draw() >= self.trouble:
            return Behaviour(TransferResult.DONE, seconds)
        if draw() < 0.5:
            return Behaviour(TransferResult.FAILED, seconds)
        return Behaviour(TransferResult.LATE, seconds, draw() * 20.0, self.rng.choice(("", "cancelled")))

    def packed(self, index: int) -> bool:  # noqa: ARG002
        return self.rng.random() < 0.4

    def unpack_s(self) -> float:
        return self.rng.random() * self.rng.random()

    def lateness_s(self) -> float:
        return self.rng.random() * 0.05
