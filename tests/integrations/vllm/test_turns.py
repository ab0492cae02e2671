"""Conversations with real engines: every answer is that of one undivided engine. `make turns` holds many more."""

from __future__ import annotations

import pytest

from harness.turns.command import run_case

NUM_ANSWERS = {"llama-adapters": 170, "gemma3": 190}


@pytest.mark.parametrize("case", NUM_ANSWERS)
def test_every_answer_is_that_of_one_engine(case: str) -> None:
    assert run_case("vllm", case, seed=1, num_answers=NUM_ANSWERS[case]) == 0
