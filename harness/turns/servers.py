"""What a conversation needs of the servers of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.turns.answers import Answer
from harness.turns.conversation import Habits, Turn


@dataclass(frozen=True)
class Case:
    """A model on servers of an engine: what clients do, and how much log-probabilities may differ (see `compare`).

    `is_refused`: the two servers must not use each other's state, so decode computes every prompt. `reached` names counts that
    must not be 0 after a run, because the case exists for them.
    """

    habits: Habits
    tolerance: float
    is_refused: bool = False
    reached: tuple[str, ...] = ()


class Servers(Protocol):
    """Servers that prefill and decode, and one that does both. All have caches of prefixes."""

    case: Case

    def alone(self, turns: Sequence[Turn]) -> list[Answer]:
        """The undivided server's answers to prompts that are asked at once."""

    def divided(self, turns: Sequence[Turn]) -> list[Answer | None]:
        """The answers of decode to prompts that are asked at once; none to those that are aborted or that it refuses."""

    def problem(self, turn: Turn, answer: Answer, /) -> str:
        """What is wrong about the way in which decode got a right answer. Empty if nothing is."""

    def refusal(self, turn: Turn, /) -> str:
        """What is wrong about an answer that decode has refused. Empty if it must be refused."""

    def end(self) -> str:
        """Empty all caches between conversations. Returns what is wrong with the servers, empty if nothing is."""

    def counts(self) -> Mapping[str, float]:
        """What the servers have counted so far, for the report."""
