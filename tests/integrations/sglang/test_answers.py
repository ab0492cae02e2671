"""Kinds of models and of parallelism on real servers: every answer is that of one undivided server, and decode computes none of
the prompt. `test_servers` has more of what can happen to servers.
"""

from __future__ import annotations

import itertools
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.servers import NO_OVERLAP, Reply, Server
from harness.vllm.models import write_model
from tests.integrations.vllm.requests import prompts

PROMPTS = prompts((33, 63, 64, 65, 300), seed=51)
"""Shorter and longer than the models' windows of 32 and 64 tokens."""
ROOMS = itertools.count(2**60)
JSON = {"Content-Type": "application/json"}
WORKERS = ("--tokenizer-worker-num", "2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """`options` and `environ` are those of all servers. `rounds`: again, all at once, with prefixes that
    prefill has in its cache.
    """

    model: str
    prefill: Sequence[str]
    decode: Sequence[str]
    options: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int = 16
    rounds: int = 2


CASES = {
    "windows in one pool": Case(
        model="gemma3",
        prefill=("--page-size", "16", *WORKERS),
        decode=("--page-size", "16", *WORKERS),
    ),
    # Triton runs the kernels in NumPy: half a second for a token.
    "windows in a pool of their own": Case(
        model="gpt-oss",
        prefill=("--page-size", "16", "--chunked-prefill-size", "128"),
        decode=("--page-size", "64"),
        options=("--attention-backend", "triton"),
        environ={"TRITON_INTERPRET": "1"},
        max_tokens=4,
        rounds=1,
    ),
    "GDN": Case(
        model="qwen3-next",
        prefill=("--tp", "2", "--chunked-prefill-size", "128"),
        decode=("--page-size", "64"),
        options=("--max-mamba-cache-size", "64", NO_OVERLAP),  # the undivided server's cache needs a GPU otherwise
        environ={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    # Without `--enable-dp-lm-head` ranks exchange logits of batches of one size with an operator that only GPUs have.
    "stages to data-parallel attention": Case(
        model="qwen3",
        prefill=("--pp-size", "2", "--page-size", "16", "--chunked-prefill-size", "128"),
        decode=("--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-dp-lm-head", "--page-size", "64"),
        max_tokens=6,
    ),
    "stages on both sides": Case(
        model="qwen3",
        prefill=("--tp", "2", "--page-size", "16", "--chunked-prefill-size", "128"),
        decode=("--pp-size", "2", "--page-size", "64", "--max-total-tokens", "2048"),
        max_tokens=6,
    ),
}


@dataclass
class Servers:
    case: Case
    prefill: Server
    decode: Server
    expected: list[Reply]


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    case: Case = request.param
    model = write_model(case.model, tmp_path_factory.mktemp("models") / case.model)

    def start(*options: str, mode: str | None = None) -> Server:
        server = Server.sglang(model, *case.options, *options, mode=mode, instead_of=None, **case.environ)
        return stack.enter_context(server)

    with ExitStack() as stack:
        alone, prefill, decode = start(), start(*case.prefill, mode="prefill"), start(*case.decode, mode="decode")
        alone.wait_ready(timeout_s=600)
        expected = [alone.complete(prompt, max_tokens=case.max_tokens) for prompt in PROMPTS]
        alone.kill()
        yield Servers(case, prefill.wait_ready(timeout_s=600), decode.wait_ready(timeout_s=600), expected)


def hand_over(servers: Servers, prompt: list[int], *, prefilled: list[int] | None = None) -> Reply:
    """Ask both servers at once, as SGLang's router does. `prefilled`: what prefill is asked, if it is something else."""
    where: dict[str, Any] = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": servers.prefill.bootstrap_port,
        "bootstrap_room": next(ROOMS),
        "max_tokens": servers.case.max_tokens,
    }
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(servers.prefill.complete, prefilled or prompt, stream=False, **where)
        found = servers.decode.complete(prompt, stream=False, **where)
        asked.result()
    return found


def num_computed(server: Server) -> tuple[int, int]:
    """SGLang's own count of prompt tokens: computed, and found in its cache. Of several pipeline stages those of the first."""
    lines = [line for line in server.log(length=1 << 24).splitlines() if "Prefill batch" in line and " PP1" not in line]
    found = [re.findall(r"#(?:new|cached)-token: (\d+)", line) for line in lines]
    return sum(int(new) for new, _ in found), sum(int(cached) for _, cached in found)


def test_answers_are_those_of_one_server(servers: Servers) -> None:
    total = sum(map(len, PROMPTS))
    for number in range(servers.case.rounds):
        with ThreadPoolExecutor(len(PROMPTS) if number else 1) as pool:
            replies = list(pool.map(hand_over, itertools.repeat(servers), PROMPTS))
        for prompt, right, found in zip(PROMPTS, servers.expected, replies, strict=True):
            assert found.tokens == right.tokens, len(prompt)
            assert found.logprobs == pytest.approx(right.logprobs, abs=1e-5), len(prompt)
        assert num_computed(servers.decode) == (0, 0)
        if number == 0:
            computed, cached = num_computed(servers.prefill)
            assert (computed, cached) == (total, 0)
    for server in (servers.prefill, servers.decode):
        for _ in range(4):  # by each of several tokenizer workers
            asked = urllib.request.Request(f"{server.url}/release_memory_occupation", data=b"{}", headers=JSON)
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(asked, timeout=60)
        server.flush()  # refused with a request left; SGLang ends if its pools are not free
        server.wait_ready()


def test_pages_of_requests_that_fail_are_free_on_all_ranks(servers: Servers) -> None:
    """Together they need more pages than decode's pipeline stages have."""
    one, other = prompts((300, 300), seed=52)
    for _ in range(8):
        with pytest.raises(urllib.error.HTTPError) as refused:
            hand_over(servers, one, prefilled=other)
        assert "expected the state of this request's prompt" in refused.value.read().decode()
    assert hand_over(servers, PROMPTS[4]).tokens == servers.expected[4].tokens
