"""What the tests ask engines, and how they compare answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.vllm.engine import PREFILL, Answer, Engine

LENGTHS = (2, 7, 32, 33, 64, 65, 200, 700, 1153)
"""Prompts shorter and longer than blocks, windows and a step's 512 tokens, and on the borders of blocks."""


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 1) -> list[list[int]]:
    """Random prompts."""
    chosen = random.Random(seed)
    return [[chosen.randrange(250) for _ in range(length)] for length in lengths]


def hand_over(prefill: Engine, decode: Engine, asked: Sequence[Sequence[int]], *, max_tokens: int = 16) -> list[Answer]:
    """The answers of decode to prompts that prefill has computed, as vLLM's usual proxy asks for them."""
    first = prefill.generate(asked, params=PREFILL)
    return decode.wait(
        [decode.add(prompt, params=answer.params, max_tokens=max_tokens) for prompt, answer in zip(asked, first, strict=True)]
    )


def check_equal(expected: Sequence[Answer], found: Sequence[Answer], *, tolerance: float = 1e-4) -> None:
    """Assert that tokens are equal, and the logprobs of each within `tolerance`."""
    for one, other in zip(expected, found, strict=True):
        assert other.tokens == one.tokens
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert all(abs(ours[token] - theirs[token]) <= tolerance for token in ours.keys() & theirs.keys())


def num_external(found: Sequence[Answer]) -> list[int]:
    """VLLM's own count of the tokens that it did not compute, for each answer."""
    return [answer.num_external for answer in found]


def wait_empty(*engines: Engine) -> None:
    """Assert that every block becomes free. Blocks of a request are freed a step after it has ended."""
    for engine in engines:
        engine.settle()
        assert engine.num_free_blocks() == engine.num_blocks - 1  # one is vLLM's null block
