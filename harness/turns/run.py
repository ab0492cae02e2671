"""Holds a conversation with servers and compares every answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from harness.turns.answers import Answer, compare
from harness.turns.conversation import Conversation, Turn
from harness.turns.servers import Servers


@dataclass
class Report:
    """What was compared. `error` is the largest difference of log-probabilities, `first_error` that of first tokens."""

    num_answers: int = 0
    num_tied: int = 0
    num_refused: int = 0
    error: float = 0.0
    first_error: float = 0.0
    ways: Counter[str] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        ways = ", ".join(f"{name} {count}" for name, count in self.ways.most_common())
        return (
            f"{self.num_answers} answers compared ({ways}), {self.num_tied} with a near-tie, {self.num_refused} refused; "
            f"log-probabilities differ by {self.error:.2g} at most, those of first tokens by {self.first_error:.2g}"
        )


@dataclass(frozen=True)
class Failure:
    """A wrong answer of a conversation; without a `turn`, a server's state after it, or requests that do not end."""

    seed: int
    turn: Turn | None
    problem: str
    asked: tuple[Turn, ...]
    expected: Answer | None = None
    found: Answer | None = None

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.turn or f'after turn {self.asked[-1].number}'}: {self.problem}"]
        for name, answer in (("expected", self.expected), ("found", self.found)):
            if answer is not None:
                first = ", ".join(f"{token}: {logprob:.5f}" for token, logprob in list(answer.logprobs[0].items())[:3])
                lines.append(f"  {name}: tokens {list(answer.tokens)}, first log-probabilities {first}")
        return "\n".join(lines)


Known = dict[int, Answer]


def converse(
    servers: Servers, seed: int, report: Report, *, only: Collection[int] | None = None, known: Known | None = None
) -> Failure | None:
    """Hold the conversation of a seed until an answer is wrong. Returns what is, if anything.

    The divided servers are asked the turns `only`, by default all. `known` are answers of the undivided server, which gets
    more of them.
    """
    known = {} if known is None else known
    conversation = Conversation(seed, servers.case.habits)
    asked: list[Turn] = []
    failure: Failure | None = None
    for _ in conversation.rounds():
        turns = conversation.next_round()
        answered = [turn for turn in turns if not turn.way.is_aborted and turn.number not in known]
        known.update(zip((turn.number for turn in answered), servers.alone(answered), strict=True))
        here = [turn for turn in turns if only is None or turn.number in only]
        asked += here
        try:
            answers = servers.divided(here) if here else []
        except TimeoutError as error:
            return Failure(seed, None, str(error), tuple(asked))
        for turn, found in zip(here, answers, strict=True):
            report.ways[turn.way.value] += 1
            if turn.way.is_aborted or failure:
                continue
            if problem := _problem(servers, turn, known[turn.number], found, report):
                failure = Failure(seed, turn, problem, tuple(asked), known[turn.number], found)
        if failure or (only is not None and asked and turns[-1].number >= max(only)):
            break
        conversation.answered(turns, [known[turn.number].tokens if turn.number in known else () for turn in turns])
    problem = servers.end()
    return failure or (Failure(seed, None, problem, tuple(asked)) if problem else None)


def _problem(servers: Servers, turn: Turn, expected: Answer, found: Answer | None, report: Report) -> str:
    if found is None:
        report.num_refused += 1
        return servers.refusal(turn)
    comparison = compare(expected, found, servers.case.tolerance)
    report.num_answers += 1
    report.num_tied += comparison.is_tied
    if not comparison.problem:
        report.error = max(report.error, comparison.error)
        report.first_error = max(report.first_error, comparison.first_error)
    return comparison.problem or servers.problem(turn, found)


def shrink(servers: Servers, failure: Failure, say: Callable[[str], None]) -> Failure:
    """Leave out turns, the last ones first, as long as an answer is wrong. Each attempt is a conversation of its own."""
    known: Known = {}
    smallest = failure
    for turn in reversed(failure.asked):
        if turn == smallest.turn:
            continue
        kept = [each.number for each in smallest.asked if each != turn]
        found = converse(servers, failure.seed, Report(), only=kept, known=known) if kept else None
        if found is not None:
            smallest = found
            say(f"  still wrong without turn {turn.number}: {len(found.asked)} turns")
    return smallest
