"""What decode's prefix cache has after a hand-over is true: later plain requests get the answers of an empty cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.vllm.engine import Engine
from tests.integrations.vllm.requests import check_equal, hand_over, num_external, prompts, wait_empty

BLOCK_SIZES = ((32, 64), (64, 32), (64, 64))
"""Of prefill and decode. vLLM's kernels on the CPU cannot cache prefixes of models with recurrent states."""
LENGTHS = (65, 128, 129, 161, 200, 225, 513)
"""Prompts whose window of 64 tokens begins in the middle, at the start and at the end of a block."""
REACHES = (32, 64, 96, 128, 160, 192, 256)
"""How many tokens later requests share with them."""


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES)
def test_plain_requests_after_a_hand_over(block_sizes: tuple[int, int], start: Callable[..., Engine]) -> None:
    """They share the beginning of a prompt that was handed over, or all of it and its answer."""
    prefill, decode = (start("gemma3", enable_prefix_caching=True, block_size=size) for size in block_sizes)
    asked = prompts(LENGTHS, seed=41)
    prefill.wait_ready()
    decode.wait_ready()
    num_found = 0
    for number, prompt in enumerate(asked):
        (found,) = hand_over(prefill, decode, [prompt], max_tokens=40)
        check_equal(decode.generate([prompt], max_tokens=40, cache_salt="alone"), [found])
        assert num_external([found]) == [len(prompt) - 1]
        (tail,) = prompts((9,), seed=100 + number)
        again = [*prompt, *found.tokens]
        later = [[*prompt[:reach], *tail] for reach in REACHES if reach <= len(prompt)]
        for plain in (prompt, *later, [*again[:-1], *tail], [*again[: len(prompt) + 20], *tail]):
            (answer,) = decode.generate([plain], max_tokens=3)
            check_equal(decode.generate([plain], max_tokens=3, cache_salt="alone"), [answer])
            num_found += answer.num_local
    assert num_found > 0
    wait_empty(prefill, decode)


OURS = {"kv_connector": "DisaggConnector", "kv_connector_module_path": "disagg.integrations.vllm"}
POLICY = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def test_windows_in_a_multi_connector(start: Callable[..., Engine]) -> None:
    """Another connector beside this one may store every full block of a request. So decode loads whole blocks, or none."""
    prefills = {block_size: start("gemma3", block_size=block_size) for block_size in (32, 64)}
    decode = start("gemma3", block_size=64, connector="MultiConnector", extra={"connectors": [{**OURS, **POLICY}]})
    asked = prompts((161, 192), seed=44)  # the second's window begins with a block on each side
    expected = decode.wait_ready().generate(asked, max_tokens=6)
    for block_size, loaded in ((32, [0, 191]), (64, [160, 191])):
        found = hand_over(prefills[block_size].wait_ready(), decode, asked, max_tokens=6)
        check_equal(expected, found)
        assert num_external(found) == loaded
        wait_empty(prefills[block_size], decode)
    assert decode.counts["refused_hand_overs"] == 1
