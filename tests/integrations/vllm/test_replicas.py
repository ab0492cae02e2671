"""Real vLLM servers of several data-parallel replicas each, with the example's proxy in front."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from harness.servers import Server
from tests.integrations.vllm.requests import prompts, wait_unused


def test_replicas_on_both_sides(model: Callable[[str], Path]) -> None:
    """Of a dense model. The answers to one prompt run on any of decode's replicas, and the first one loads."""
    options = ("--data-parallel-size", "2")
    with (
        Server.vllm(model("llama"), "--block-size", "32", *options) as prefill,
        Server.vllm(model("llama"), "--block-size", "64", *options) as decode,
    ):
        prefill.wait_ready(), decode.wait_ready()
        asked, several = prompts((300,) * 9, seed=37), prompts((310,) * 4, seed=38)
        expected = [decode.complete(prompt) for prompt in asked]
        with Server.proxy(prefill, decode).wait_ready() as proxy:
            found = [proxy.complete(prompt) for prompt in asked]
            assert [reply.tokens for reply in found] == [reply.tokens for reply in expected]
            for prompt in several:
                with proxy.ask(prompt, n=3, temperature=0.8, seed=1, max_tokens=8) as answer:
                    assert len(json.load(answer)["choices"]) == 3
        num_tokens = len(asked) * 299 + len(several) * 309
        assert decode.metric_from("vllm:disagg_loaded_tokens_total", num_tokens) == decode.num_moved() == num_tokens
        assert decode.metric("vllm:disagg_failed_loads_total") == 0, decode.log()
        wait_unused(prefill, decode)
