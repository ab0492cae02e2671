"""Sliding windows on SGLang: decode needs the tokens that its own layers attend to, whatever `config.json` says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from harness.servers import Reply, Server
from harness.vllm.models import write_model
from tests.integrations.vllm.requests import prompts

LENGTHS = (33, 63, 64, 65, 300)
"""Prompts shorter and longer than the models' window of 64 tokens."""
PROMPTS = prompts(LENGTHS, seed=51)
PAGES = ("--page-size", "16")
ROOMS = itertools.count(2**60)


@dataclass
class Servers:
    prefill: Server
    decode: Server
    expected: list[Reply]


@pytest.fixture(scope="module", params=["mistral", "gemma3"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """SGLang applies the window of Gemma 3, and ignores that of Mistral."""
    model = write_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    with (
        Server.sglang(model, *PAGES) as alone,
        Server.sglang(model, *PAGES, mode="prefill") as prefill,
        Server.sglang(model, *PAGES, mode="decode") as decode,
    ):
        expected = [alone.wait_ready().complete(prompt) for prompt in PROMPTS]
        alone.kill()
        yield Servers(prefill.wait_ready(), decode.wait_ready(), expected)


def hand_over(servers: Servers, prompt: list[int]) -> Reply:
    """Ask both servers at once, as SGLang's router does."""
    where: dict[str, Any] = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": servers.prefill.bootstrap_port,
        "bootstrap_room": next(ROOMS),
    }
    with ThreadPoolExecutor() as pool:
        pool.submit(servers.prefill.complete, prompt, stream=False, **where)
        return servers.decode.complete(prompt, stream=False, **where)


def test_answers_are_those_of_one_server(servers: Servers) -> None:
    for length, prompt, right in zip(LENGTHS, PROMPTS, servers.expected, strict=True):
        found = hand_over(servers, prompt)
        assert found.tokens == right.tokens, length
        assert found.logprobs == pytest.approx(right.logprobs, abs=1e-5), length
