"""Speculative decoding: after a hand-over a server drafts as one undivided server does.

Wrong draft KV never changes an answer, since the model verifies what is drafted. So these tests count accepted drafts, with a
draft model that is the model itself, and compare what is drafted where random weights are never right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.vllm.engine import Engine
from harness.vllm.models import write_head
from tests.integrations.vllm.conftest import Start
from tests.integrations.vllm.requests import check_equal, hand_over, num_external, prompts, wait_empty

LENGTHS = (7, 33, 64, 200, 600)
MAX_TOKENS = 16
BLOCKS = 30
"""So many of decode's blocks have room for one round of prompts, and not for the last one's answers."""


def take_accepted(engine: Engine) -> int:
    """How many drafts of `engine` were accepted since the last call."""
    return engine.counts.pop("accepted", 0)


def test_drafts_of_a_draft_model_are_accepted(start: Start, model: Callable[[str], Path], tmp_path: Path) -> None:
    """The draft model is the model, so that all drafts are accepted, but not after a hand-over without their KV: from a server
    without a draft model, or with another one.
    """
    drafts = {"method": "draft_model", "model": str(model("llama")), "num_speculative_tokens": 2}
    decode = start(block_size=64, blocks=BLOCKS, speculative_config=drafts, enable_prefix_caching=True)
    same = start(block_size=32, tensor_parallel_size=2, speculative_config=drafts | {"num_speculative_tokens": 1})
    none = start(block_size=32)
    eagle = {"method": "eagle", "model": str(write_head(tmp_path / "eagle-llama")), "num_speculative_tokens": 2}
    other = start(block_size=32, speculative_config=eagle)
    for engine in (decode, same, none, other):
        engine.wait_ready()

    every = len(LENGTHS) * (MAX_TOKENS - 1) * 2 // 3  # of three tokens in a step two were drafted
    decode.generate(prompts(LENGTHS, seed=70), max_tokens=MAX_TOKENS)
    assert take_accepted(decode) == every
    for prefill, seed in ((same, 71), (none, 72), (other, 73)):
        asked = prompts(LENGTHS, seed=seed)
        found = hand_over(prefill, decode, asked, max_tokens=MAX_TOKENS)
        check_equal(none.generate(asked, max_tokens=MAX_TOKENS), found)
        assert num_external(found) == [length - 1 for length in LENGTHS]
        num_accepted = take_accepted(decode)
        assert num_accepted == every if prefill is same else num_accepted < every // 2, (seed, num_accepted, every)
        if prefill is same:  # decode has cached the prompt's blocks, and those of its own tokens
            longer = [[*prompt, *answer.tokens] for prompt, answer in zip(asked, found, strict=True)]
            found = decode.generate(longer, max_tokens=MAX_TOKENS)
            check_equal(none.generate(longer, max_tokens=MAX_TOKENS), found)
            assert all(answer.num_local >= length // 64 * 64 for answer, length in zip(found, LENGTHS, strict=True))
            assert take_accepted(decode) == every

    asked = prompts([200] * 8, seed=74)
    found = hand_over(same, decode, asked, max_tokens=151)
    check_equal(none.generate(asked, max_tokens=151), found)
    assert decode.counts["preempted"] > 0
    assert take_accepted(decode) > len(asked) * 150 // 2
    assert decode.counts["failed_loads"] == 0
    wait_empty(decode, same, none, other)


CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "EAGLE, TP 1 to 2, blocks 32 to 64": ("eagle", 4, {"block_size": 32}, {"tensor_parallel_size": 2, "block_size": 64}),
    "EAGLE with 2 KV heads, TP 2 to 1": ("eagle", 2, {"tensor_parallel_size": 2}, {"block_size": 64}),
    "EAGLE3, TP 2 to 1": ("eagle3", 4, {"tensor_parallel_size": 2}, {"block_size": 64}),
    "DFlash, TP 1 to 2, blocks 32 to 64": ("dflash", 4, {"block_size": 32}, {"tensor_parallel_size": 2, "block_size": 64}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_drafts_are_those_of_one_server(case: str, start: Start, tmp_path: Path) -> None:
    method, num_kv_heads, prefill_options, decode_options = CASES[case]
    head = write_head(tmp_path / f"{method}-llama", method, num_kv_heads=num_kv_heads)
    drafts: dict[str, Any] = {"method": method, "model": str(head), "num_speculative_tokens": 2}
    prefill = start(speculative_config=drafts | {"num_speculative_tokens": 1}, **prefill_options)
    decode = start(speculative_config=drafts, **decode_options)
    asked = prompts(LENGTHS, seed=75)
    expected = decode.wait_ready().generate(asked, max_tokens=4)
    found = hand_over(prefill.wait_ready(), decode, asked, max_tokens=4)
    check_equal(expected, found)
    assert num_external(found) == [length - 1 for length in LENGTHS]
    assert [answer.drafts[0] for answer in found] == [answer.drafts[0] for answer in expected]
    wait_empty(prefill, decode)


NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_ngram_on_decode_only(start: Start) -> None:
    prefill, decode = start(block_size=32), start(block_size=64, tensor_parallel_size=2, speculative_config=NGRAM)
    asked = [(prompt[:30] * 30)[:length] for prompt, length in zip(prompts(LENGTHS, seed=76), LENGTHS, strict=True)]
    expected = decode.wait_ready().generate(asked, max_tokens=MAX_TOKENS)
    num_alone = take_accepted(decode)
    found = hand_over(prefill.wait_ready(), decode, asked, max_tokens=MAX_TOKENS)
    check_equal(expected, found)
    assert num_external(found) == [length - 1 for length in LENGTHS]
    assert take_accepted(decode) == num_alone > 0
    wait_empty(prefill, decode)


def test_states_of_a_prefill_server_that_speculates(start: Start) -> None:
    """Its convolution windows have more places, and its requests have blocks for the states of drafts."""
    prefill, decode = start("falcon-h1", block_size=64, speculative_config=NGRAM), start("falcon-h1", block_size=128)
    asked = prompts(LENGTHS, seed=77)
    expected = decode.wait_ready().generate(asked, max_tokens=8)
    found = hand_over(prefill.wait_ready(), decode, asked, max_tokens=8)
    check_equal(expected, found)
    assert num_external(found) == [length - 1 for length in LENGTHS]
    wait_empty(prefill, decode)


def test_states_where_both_servers_speculate(start: Start) -> None:
    """Gated delta nets with multi-token prediction: vLLM's only kernels for the CPU that verify drafts of recurrent models.

    The prompt is what the undivided server was asked, and its first token: then the first step after the hand-over is the
    undivided server's second. Its drafts are compared if the undivided server has not accepted what it drafted before.
    """
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    prefill = start("qwen3-next-mtp", block_size=64, speculative_config=drafts | {"num_speculative_tokens": 1})
    decode = start("qwen3-next-mtp", block_size=128, speculative_config=drafts)
    asked = prompts((33, 64, 65, 200, 500), seed=78)
    expected = [decode.wait_ready().generate([prompt], max_tokens=9)[0] for prompt in asked]
    longer = [[*prompt, answer.tokens[0]] for prompt, answer in zip(asked, expected, strict=True)]
    found = [hand_over(prefill.wait_ready(), decode, [prompt], max_tokens=8)[0] for prompt in longer]
    assert num_external(found) == [len(prompt) - 1 for prompt in longer]
    pairs = [
        (one.drafts[1], other.drafts[0])
        for one, other in zip(expected, found, strict=True)
        if one.drafts[0][0] != one.tokens[1]
    ]
    assert len(pairs) > len(asked) // 2
    assert all(one == other for one, other in pairs)
    for answer in expected:
        del answer.tokens[0], answer.logprobs[0]
    check_equal(expected, found)
    wait_empty(prefill, decode)
