"""Conversations with real servers: every answer is that of one undivided server. `make turns` holds many more."""

from __future__ import annotations

import pytest

from harness.turns.command import run_case

NUM_ANSWERS = {"mistral": 80, "llama-retracted": 60}


@pytest.mark.parametrize("case", NUM_ANSWERS)
def test_every_answer_is_that_of_one_server(case: str) -> None:
    assert run_case("sglang", case, seed=1, num_answers=NUM_ANSWERS[case]) == 0
