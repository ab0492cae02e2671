"""Real servers of vLLM and SGLang that hand requests over to each other, with the example's proxy in front.

One vLLM server prefills for an SGLang server, and decodes for another. Both sides compare checksums of every byte
(`DISAGG_VERIFY=full`). Tokens must be those of each engine alone, and log-probabilities within rounding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.servers import Reply, Server
from harness.vllm.models import write_model
from tests.integrations.cross.cases import PAIRS, Pair
from tests.integrations.vllm.requests import prompts

LENGTHS = (2, 33, 64, 65, 200, 700, 1153)
NUM_TOKENS = sum(length - 1 for length in LENGTHS)
PATIENT = {"load_timeout_s": 120.0}  # for the first contact on a machine with other work
EXTERNAL, LOCAL = "vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"
SENT = "vllm:disagg_sends_total"


@dataclass
class Servers:
    """The servers of a pair. The proxies are named after prefill and decode."""

    folder: Path
    pair: Pair
    stack: ExitStack
    vllm: Server
    sglang_decode: Server
    sglang_prefill: Server
    vllm_to_sglang: Server
    sglang_to_vllm: Server
    expected: dict[int, list[Reply]]


def begin_vllm(folder: Path, pair: Pair, *, instead_of: Server | None = None) -> Server:
    return Server.vllm(folder, *pair.vllm, "--enable-prefix-caching", extra=PATIENT, instead_of=instead_of)


def start(folder: Path, pair: Pair, stack: ExitStack) -> Servers:
    """Start all servers of a pair. `expected` are the answers of SGLang alone, by the seed of the prompts."""
    begin = stack.enter_context
    alone = begin(Server.sglang(folder))
    vllm = begin(begin_vllm(folder, pair))
    alone.wait_ready()
    expected = {seed: [alone.complete(prompt) for prompt in prompts(LENGTHS, seed=seed)] for seed in (31, 32)}
    alone.stop()
    decode = begin(Server.sglang(folder, *pair.sglang_decode, mode="decode"))
    prefill = begin(Server.sglang(folder, *pair.sglang_prefill, mode="prefill"))
    for server in (vllm, decode, prefill):
        server.wait_ready()
    to_sglang, to_vllm = begin(Server.proxy(vllm, decode)), begin(Server.proxy(prefill, vllm))
    return Servers(folder, pair, stack, vllm, decode, prefill, to_sglang.wait_ready(), to_vllm.wait_ready(), expected)


@pytest.fixture(scope="module", params=PAIRS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    pair = PAIRS[request.param]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("DISAGG_VERIFY", "full")
        yield start(write_model(pair.model, tmp_path_factory.mktemp("model") / pair.model), pair, stack)


def check(expected: list[Reply], found: list[Reply]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_vllm_prefills_and_sglang_decodes(servers: Servers) -> None:
    asked = prompts(LENGTHS, seed=31)
    proxy, expected = servers.vllm_to_sglang, servers.expected[31]
    check(expected, [proxy.complete(prompt) for prompt in asked])
    before = servers.vllm.metric(LOCAL)
    check(expected, [proxy.complete(prompt, stream=False) for prompt in asked])
    assert servers.vllm.metric(LOCAL) > before  # prefill had a part of each prompt
    with ThreadPoolExecutor(len(asked)) as pool:
        check(expected, list(pool.map(proxy.complete, asked)))
    assert servers.vllm.metric(EXTERNAL) == 0
    check(expected, [servers.vllm.complete(prompt) for prompt in asked])  # vLLM alone


def test_sglang_prefills_and_vllm_decodes(servers: Servers) -> None:
    """No token but the last is computed by vLLM. The second time it has some of them in its own cache."""
    asked = prompts(LENGTHS, seed=32)
    proxy, expected, vllm = servers.sglang_to_vllm, servers.expected[32], servers.vllm
    external, local = vllm.metric(EXTERNAL), vllm.metric(LOCAL)
    check(expected, [proxy.complete(prompt) for prompt in asked])
    assert (vllm.metric(EXTERNAL) - external, vllm.metric(LOCAL) - local) == (NUM_TOKENS, 0)
    with ThreadPoolExecutor(len(asked)) as pool:
        check(expected, list(pool.map(proxy.complete, asked)))
    external, local = vllm.metric(EXTERNAL) - external, vllm.metric(LOCAL) - local
    assert external + local == 2 * NUM_TOKENS
    assert local > 0
    assert vllm.metric("vllm:disagg_failed_loads_total") == 0


def test_clients_that_leave(servers: Servers) -> None:
    """Their requests end on both servers, and others are answered."""
    (prompt,) = prompts((1100,), seed=33)
    for proxy, expected in ((servers.vllm_to_sglang, servers.expected[31]), (servers.sglang_to_vllm, servers.expected[32])):
        with proxy.ask(prompt, max_tokens=300, stream=True) as answer:
            assert answer.readline().startswith(b"data: ")
        with ThreadPoolExecutor() as pool, pytest.raises(TimeoutError):
            pool.submit(proxy.ask, prompt[1:], max_tokens=300, stream=False, timeout_s=0.2).result()
        seed = 31 if proxy is servers.vllm_to_sglang else 32
        check(expected, [proxy.complete(each) for each in prompts(LENGTHS, seed=seed)])
    wait_idle(servers.vllm)


def wait_idle(vllm: Server) -> None:
    """Assert that vLLM gives every block back, long before `hold_s`."""
    until = time.monotonic() + 30
    while any(vllm.metric(f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")):
        assert time.monotonic() < until, f"{vllm.metric('vllm:kv_cache_usage_perc'):.1%} of the blocks are in use"
        time.sleep(0.2)


def test_servers_are_killed(servers: Servers) -> None:
    """The proxies ask again until a server answers at the same address. Each client gets one answer."""
    sent = servers.vllm.metric(SENT)
    with ThreadPoolExecutor() as pool:
        waiting = {seed: pool.submit(ask_for_long, servers, seed) for seed in (31, 32)}
        while servers.vllm.metric(SENT) == sent and not waiting[31].done():
            time.sleep(0.05)  # until SGLang decodes
        if servers.pair.killed == "vllm":
            servers.vllm.kill()
            servers.vllm = servers.stack.enter_context(begin_vllm(servers.folder, servers.pair, instead_of=servers.vllm))
        else:
            servers.sglang_decode.kill()
            servers.sglang_prefill.kill()
            check(servers.expected[32][-1:], [waiting[32].result()])  # vLLM computes what it does not get
            servers.sglang_decode = servers.stack.enter_context(
                Server.sglang(servers.folder, *servers.pair.sglang_decode, mode="decode", instead_of=servers.sglang_decode)
            )
        for seed, answer in waiting.items():
            check(servers.expected[seed][-1:], [answer.result()])
    for proxy, seed in ((servers.vllm_to_sglang, 31), (servers.sglang_to_vllm, 32)):
        check(servers.expected[seed], [proxy.complete(each) for each in prompts(LENGTHS, seed=seed)])
    wait_idle(servers.vllm)


def ask_for_long(servers: Servers, seed: int) -> Reply:
    """The first tokens of an answer that takes long enough for a server to be killed meanwhile."""
    proxy = servers.vllm_to_sglang if seed == 31 else servers.sglang_to_vllm
    reply = proxy.complete(prompts(LENGTHS, seed=seed)[-1], max_tokens=300, stream=False, timeout_s=400)
    assert len(reply.tokens) == 300
    return Reply(reply.tokens[:16], reply.logprobs[:16], 0.0)
