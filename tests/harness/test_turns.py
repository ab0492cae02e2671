"""Conversations, and the rule by which answers are compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from harness.turns import command
from harness.turns.answers import Answer, compare
from harness.turns.conversation import Conversation, Habits, Prompt, Turn, Way
from harness.turns.run import Report, converse, shrink
from harness.turns.servers import Case

HABITS = Habits(ways={Way.HANDED_OVER: 6, Way.PLAIN: 3, Way.NEVER_DECODED: 1}, mistakes=0.3, adapters=(None, "a", "b"))


def held(seed: int, answer: int = 7) -> list[Turn]:
    """The turns of a conversation in which every token of the answers is the same."""
    conversation, asked = Conversation(seed, HABITS), []
    for _ in conversation.rounds():
        turns = conversation.next_round()
        conversation.answered(turns, [() if turn.way.is_aborted else (answer,) * turn.max_tokens for turn in turns])
        asked += turns
    return asked


def shared(one: Prompt, other: Prompt) -> int:
    """How many tokens two prompts begin with in common."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one.tokens), len(other.tokens)))


def test_a_conversation_is_a_function_of_its_seed_and_the_answers() -> None:
    assert held(1) == held(1) != held(2)
    assert [turn.number for turn in held(1)] == list(range(1, len(held(1)) + 1))
    for one, other in zip(held(1), held(1, answer=8), strict=True):
        assert (one.way, one.made, len(one.prompt.tokens)) == (other.way, other.made, len(other.prompt.tokens))


def test_prompts_share_prefixes_with_those_before() -> None:
    turns = [turn for seed in range(20) for turn in held(seed)]
    assert all(0 < len(turn.prompt.tokens) <= HABITS.longest for turn in turns)
    assert {turn.way for turn in turns} == set(HABITS.ways)
    for seed in range(20):
        asked = held(seed)
        longest = [
            max((shared(turn.prompt, before.prompt) for before in asked[:at]), default=0) for at, turn in enumerate(asked)
        ]
        assert sum(tokens >= HABITS.unit for tokens in longest) > len(asked) / 4


def test_a_hand_over_of_another_prompt_differs_before_the_last_token() -> None:
    mistaken = [turn for seed in range(20) for turn in held(seed) if turn.is_mistaken]
    assert {turn.prompt.adapter == turn.prefilled.adapter for turn in mistaken} == {True, False}
    for turn in mistaken:
        if turn.prompt.adapter == turn.prefilled.adapter:
            assert shared(turn.prompt, turn.prefilled) < min(len(turn.prompt.tokens), len(turn.prefilled.tokens)) - 1


LIKELY = {1: -0.5, 2: -0.50001, 3: -4.0}
OTHER = {1: -0.50001, 2: -0.5, 3: -4.0}


@pytest.mark.parametrize(
    ("found", "problem", "is_tied"),
    [
        (Answer([1, 1], [LIKELY, LIKELY]), "", False),
        (Answer([1, 1], [LIKELY, OTHER]), "", False),
        (Answer([2, 3], [OTHER, {3: 0.0}]), "", True),
        (Answer([1, 3], [LIKELY, {3: -0.4, 1: -0.5}]), "token 2 of the answer: expected 1", False),
        (Answer([1, 1], [{1: -0.51, 2: -0.6}, LIKELY]), "token 1 of the answer: expected 1", False),
        (Answer([4, 1], [{4: -0.5, 1: -0.5}, LIKELY]), "token 1 of the answer: expected 1", False),
        (Answer([1], [LIKELY]), "2 tokens expected, 1 found", False),
    ],
    ids=["equal", "rounding", "near-tie", "another token", "another probability", "a token that was unlikely", "cut"],
)
def test_answers_are_compared_up_to_the_first_tie(found: Answer, problem: str, is_tied: bool) -> None:
    comparison = compare(Answer([1, 1], [LIKELY, LIKELY]), found, 1e-4)
    assert comparison.problem.startswith(problem) if problem else not comparison.problem
    assert comparison.is_tied == is_tied


class Poisoned:
    """Servers on which turn 9 is wrong if turn 4 was asked before it."""

    case = Case(HABITS, 1e-5)

    def __init__(self) -> None:
        self.asked: list[int] = []

    def alone(self, turns: Sequence[Turn]) -> list[Answer]:
        return [Answer([7] * turn.max_tokens, [{7: 0.0}] * turn.max_tokens) for turn in turns]

    def divided(self, turns: Sequence[Turn]) -> list[Answer | None]:
        self.asked += [turn.number for turn in turns]
        return [None if turn.way.is_aborted else answer for turn, answer in zip(turns, self.alone(turns), strict=True)]

    def problem(self, turn: Turn, _: Answer) -> str:
        return "poisoned" if turn.number == 9 and 4 in self.asked else ""

    def refusal(self, _: Turn) -> str:
        return "refused"

    def end(self) -> str:
        self.asked.clear()
        return ""

    def counts(self) -> Mapping[str, float]:
        return {}


def test_a_failure_is_reduced_to_the_turns_that_it_takes() -> None:
    seed = next(seed for seed in range(50) if not any(held(seed)[number - 1].way.is_aborted for number in (4, 9)))
    servers, report = Poisoned(), Report()
    failure = converse(servers, seed, report)
    assert failure is not None
    assert failure.turn == held(seed)[8]
    assert "poisoned" in str(failure)
    smallest = shrink(servers, failure, lambda _: None)
    assert [turn.number for turn in smallest.asked] == [4, 9]
    assert converse(servers, seed, report, only=[4]) is None
    assert report.num_answers > 9


@pytest.mark.parametrize("num_retracted", [0, 3])
def test_a_run_that_never_reached_what_its_case_is_for_has_failed(
    num_retracted: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Right(Poisoned):
        case = Case(HABITS, 1e-5, reached=("retracted",))

        def problem(self, *_: object) -> str:
            return ""

        def counts(self) -> Mapping[str, float]:
            return {"retracted": num_retracted}

    engine = SimpleNamespace(CASES={"any": Right.case}, start=lambda *_: Right())
    monkeypatch.setitem(sys.modules, "harness.turns.right", cast("ModuleType", engine))
    monkeypatch.setattr(command, "OUT", tmp_path)
    assert command.run_case("right", "any", seed=1, num_answers=20) == int(num_retracted == 0)
    assert ("never reached what this case is for: retracted" in capsys.readouterr().out) is (num_retracted == 0)
