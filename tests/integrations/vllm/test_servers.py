"""Real vLLM servers over HTTP, with the example's proxy in front: other TP and block size on each side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.servers import Server, vllm_pair
from tests.integrations.vllm.requests import prompts

LENGTHS = (2, 33, 64, 200, 700, 1153)


@pytest.fixture(scope="module")
def servers(model: Callable[[str], Path]) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode, and the proxy."""
    with vllm_pair(model("llama")) as ready:
        yield ready


def test_answers_through_a_proxy(servers: tuple[Server, Server, Server]) -> None:
    prefill, decode, proxy = servers
    asked = prompts(LENGTHS, seed=31)
    expected = [decode.complete(prompt) for prompt in asked]
    before = decode.metric("vllm:external_prefix_cache_hits_total")
    found = [proxy.complete(prompt) for prompt in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        found += pool.map(proxy.complete, asked)
    for one, other in zip([*expected, *expected], found, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert decode.metric("vllm:disagg_failed_loads_total") == 0, decode.log()
    num_tokens = 2 * sum(length - 1 for length in LENGTHS)
    assert decode.metric("vllm:external_prefix_cache_hits_total") - before == num_tokens
    assert decode.metric("vllm:disagg_loaded_tokens_total") == 2 * num_tokens  # on two ranks
    assert prefill.metric("vllm:disagg_sends_total") == 2 * len(LENGTHS)


def test_proxy_without_prefill(servers: tuple[Server, Server, Server]) -> None:
    """Decode answers alone once prefill is gone. Runs last."""
    prefill, decode, proxy = servers
    (prompt,) = prompts((150,), seed=32)
    expected = decode.complete(prompt)
    prefill.stop()
    assert proxy.complete(prompt).tokens == expected.tokens
