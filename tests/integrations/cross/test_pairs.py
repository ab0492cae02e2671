"""Real servers of vLLM and SGLang that hand requests over to each other, with the example's proxy in front.

One vLLM server prefills for an SGLang server, and decodes for another. Both sides compare checksums of every byte
(`DISAGG_VERIFY=full`). Tokens must be those of vLLM alone and of SGLang's two servers by themselves, whose answers are those of
one SGLang server (`make test-sglang`), and log-probabilities within rounding.
"""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from yarl import URL

from examples.pd_proxy import FIRST_RANK
from harness.servers import Reply, Server
from harness.vllm.models import write_model
from tests.integrations.cross.cases import PAIRS, Pair
from tests.integrations.vllm.requests import prompts

LENGTHS = (2, 33, 64, 65, 200, 700, 1153)
SEEDS = {31: LENGTHS, 32: LENGTHS, 33: (700, 1100)}
"""The lengths of the prompts that vLLM answers alone, by their seed."""
DIRECTIONS = {"vllm to sglang": 31, "sglang to vllm": 32}
"""The proxies that hand requests over across engines, and the seed of the prompts that they are asked."""
ROOMS = itertools.count(2**61)
NUM_TOKENS = sum(length - 1 for length in LENGTHS)
PATIENT = {"load_timeout_s": 120.0}  # for the first contact on a machine with other work
LOCAL = "vllm:prefix_cache_hits_total"
SENT, WAITING = "vllm:disagg_sends_total", "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"


@dataclass
class Servers:
    """The servers of a pair, and a proxy for each choice of servers."""

    folder: Path
    pair: Pair
    stack: ExitStack
    vllm: Server
    sglang_decode: Server
    sglang_prefill: Server
    proxies: dict[str, Server]
    expected: dict[int, list[Reply]]


def begin_vllm(folder: Path, pair: Pair, *, instead_of: Server | None = None) -> Server:
    return Server.vllm(folder, *pair.vllm, "--enable-prefix-caching", extra=PATIENT, instead_of=instead_of)


def start(folder: Path, pair: Pair, stack: ExitStack) -> Servers:
    """Start all servers of a pair. `expected` are the answers of vLLM alone, by the seed of the prompts.

    With a salt of its own vLLM does not use their blocks for other requests.
    """
    begin = stack.enter_context
    vllm = begin(begin_vllm(folder, pair))
    decode = begin(Server.sglang(folder, *pair.sglang_decode, mode="decode"))
    prefill = begin(Server.sglang(folder, *pair.sglang_prefill, mode="prefill"))
    proxies = {
        name: begin(Server.proxy(*each))
        for name, each in (
            ("vllm to sglang", (vllm, decode)),
            ("sglang to vllm", (prefill, vllm)),
            ("sglang", (prefill, decode)),
        )
    }
    for server in (vllm, decode, prefill, *proxies.values()):
        server.wait_ready()
    expected = {seed: [vllm.complete(each, cache_salt="alone") for each in prompts(SEEDS[seed], seed=seed)] for seed in SEEDS}
    return Servers(folder, pair, stack, vllm, decode, prefill, proxies, expected)


@pytest.fixture(scope="module", params=PAIRS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    pair = PAIRS[request.param]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("DISAGG_VERIFY", "full")
        patch.setenv("DISAGG_CONNECTION_LIMITS", "heartbeat_timeout_s=30")  # five servers on two cores stop each other for 9 s
        started = start(write_model(pair.model, tmp_path_factory.mktemp("model") / pair.model), pair, stack)
        yield started
        for server in (started.vllm, started.sglang_decode, started.sglang_prefill):
            with suppress(ProcessLookupError):
                server.kill()  # an end in good order takes SGLang ten seconds


def check(expected: list[Reply], found: list[Reply]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_each_engine_answers_the_same_by_itself(servers: Servers) -> None:
    check(servers.expected[31], [servers.proxies["sglang"].complete(prompt) for prompt in prompts(LENGTHS, seed=31)])


def test_vllm_prefills_and_sglang_decodes(servers: Servers) -> None:
    asked = prompts(LENGTHS, seed=31)
    proxy, expected = servers.proxies["vllm to sglang"], servers.expected[31]
    check(expected, [proxy.complete(prompt) for prompt in asked])
    before = servers.vllm.metric(LOCAL)
    check(expected, [proxy.complete(prompt, stream=False) for prompt in asked])
    assert servers.vllm.metric(LOCAL) > before  # prefill had a part of each prompt
    with ThreadPoolExecutor(len(asked)) as pool:
        check(expected, list(pool.map(proxy.complete, asked)))
    assert servers.vllm.num_moved() == 0


def test_vllm_samples_the_first_token_as_sglang_does(servers: Servers) -> None:
    """SGLang's repetition penalty is for tokens of the answer only."""
    asked = prompts((200, 700, 1100), seed=36)
    expected, found = (
        [servers.proxies[name].complete(prompt, repetition_penalty=1.5) for prompt in asked]
        for name in ("sglang", "vllm to sglang")
    )
    check(expected, found)


def test_sglang_prefills_and_vllm_decodes(servers: Servers) -> None:
    """No token but the last is computed by vLLM. The second time it has some of them in its own cache."""
    asked = prompts(LENGTHS, seed=32)
    proxy, expected, vllm = servers.proxies["sglang to vllm"], servers.expected[32], servers.vllm
    moved, local = vllm.num_moved(), vllm.metric(LOCAL)
    check(expected, [proxy.complete(prompt) for prompt in asked])
    assert (vllm.num_moved() - moved, vllm.metric(LOCAL) - local) == (NUM_TOKENS, 0)
    with ThreadPoolExecutor(len(asked)) as pool:
        check(expected, list(pool.map(proxy.complete, asked)))
    moved, local = vllm.num_moved() - moved, vllm.metric(LOCAL) - local
    assert moved + local == 2 * NUM_TOKENS
    assert local > 0
    assert vllm.metric("vllm:disagg_failed_loads_total") == 0


def test_vllm_prefills_before_or_after_sglang_is_asked(servers: Servers) -> None:
    """Without the proxy, which asks vLLM first."""
    (prompt,), expected = prompts(LENGTHS, seed=31)[-1:], servers.expected[31][-1:]
    prefilled = prefill_on_vllm(servers, next(ROOMS), prompt)
    check(expected, [decode_on_sglang(servers, prompt, prefilled)])
    room = next(ROOMS)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(decode_on_sglang, servers, prompt, replace(prefilled, room=room))
        servers.sglang_decode.wait_queued("decode_transfer")
        prefill_on_vllm(servers, room, prompt)
        check(expected, [waiting.result()])


@dataclass(frozen=True)
class Prefilled:
    """A request that vLLM has prefilled: where it is, and the log-probability of its first token."""

    room: int
    name: str
    address: URL
    first_logprob: float


def prefill_on_vllm(servers: Servers, room: int, prompt: list[int]) -> Prefilled:
    asked = {"do_remote_decode": True, "remote_request_id": room.to_bytes(16, "big").hex(), "first_token": True}
    with servers.vllm.ask(prompt, max_tokens=1, stream=False, kv_transfer_params=asked) as answer:
        found = json.load(answer)
    params, (logprob,) = found["kv_transfer_params"], found["choices"][0]["logprobs"]["token_logprobs"]
    return Prefilled(room, params["remote_engine_id"], URL(params["remote_address"]), logprob)


def decode_on_sglang(servers: Servers, prompt: list[int], at: Prefilled) -> Reply:
    """SGLang's answer. It does not know the log-probability of the first token."""
    where: dict[str, Any] = {"bootstrap_host": f"{at.name}@{at.address.host}", "bootstrap_port": at.address.port}
    reply = servers.sglang_decode.complete(prompt, stream=False, bootstrap_room=at.room, **where)
    first, *others = map(str, reply.logprobs)
    assert first == "None"
    return Reply(reply.tokens, [at.first_logprob, *map(float, others)], reply.first_token_s)


def test_sglang_prefills_before_or_after_vllm_is_asked(servers: Servers) -> None:
    """Without the proxy, which asks both at once. Each of them waits for the other."""
    prefill, vllm = servers.sglang_prefill, servers.vllm
    moved = vllm.num_moved()
    for vllm_is_first, prompt, expected in zip((True, False), prompts(SEEDS[33], seed=33), servers.expected[33], strict=True):
        met, params = meeting(servers)
        ask_prefill = partial(prefill.complete, prompt, stream=False, **met)
        ask_vllm = partial(vllm.complete, prompt, stream=False, kv_transfer_params=params)
        with ThreadPoolExecutor() as pool:
            if vllm_is_first:
                answered = pool.submit(ask_vllm)
                wait_until(lambda: vllm.metric(WAITING) > 0)
                ask_prefill()
            else:
                pool.submit(ask_prefill)
                prefill.wait_queued("prefill_bootstrap")
                answered = pool.submit(ask_vllm)
            check([expected], [answered.result()])
        moved += len(prompt) - 1
        assert vllm.num_moved() == moved


def meeting(servers: Servers) -> tuple[dict[str, Any], dict[str, Any]]:
    """What SGLang's prefill and vLLM's decode are told of a new request."""
    port, room = servers.sglang_prefill.bootstrap_port, next(ROOMS)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/route?{urlencode(FIRST_RANK)}") as answer:
        rank = json.load(answer)
    name = f"{rank['rank_ip']}:{rank['rank_port']}"
    where = {"remote_engine_id": name, "remote_address": f"tcp://{name}", "remote_request_id": room.to_bytes(16, "big").hex()}
    met = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    return met, {"do_remote_prefill": True, **where}


def test_state_of_another_prompt_is_not_taken(servers: Servers) -> None:
    """Of as many tokens. SGLang's decode fails, and vLLM's computes the prompt. If another of decode's ranks sees it first, the
    answer of rank 0 says so, and the log has the reason.
    """
    reason = "expected the state of this request's prompt"
    one, other = prompts((300, 300), seed=35)
    with pytest.raises(urllib.error.HTTPError) as refused:
        decode_on_sglang(servers, one, prefill_on_vllm(servers, next(ROOMS), other))
    said = refused.value.read().decode()
    assert reason in said or ("from another rank" in said and reason in servers.sglang_decode.log(length=1 << 20))
    met, params = meeting(servers)
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(servers.vllm.complete, one, stream=False, kv_transfer_params=params)
        servers.sglang_prefill.complete(other, stream=False, **met)
        check([servers.vllm.complete(one, cache_salt="alone")], [answered.result()])


def test_a_turn_goes_on_at_the_other_engine(servers: Servers) -> None:
    """With what the first turn's server has kept, if it is of full attention only: SGLang keeps and takes no windows."""
    is_full = servers.pair.model == "llama"
    (text, tail) = prompts((300, 30), seed=37)
    vllm, prefill, decode = servers.vllm, servers.sglang_prefill, servers.sglang_decode

    def at_sglang(prompt: list[int], keep: str, kept: Any = None) -> tuple[list[int], int]:
        """The answer, which decode keeps, and how many tokens prefill did not compute."""
        prefill.flush()
        port, room = prefill.bootstrap_port, next(ROOMS)
        where: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        with ThreadPoolExecutor() as pool:
            told = {"disagg_kept": kept} if kept else {}
            prefilled = pool.submit(generate, prefill, prompt, told, **where)
            found = generate(decode, prompt, {"disagg_keep": keep}, **where)
            return found["output_ids"], prefilled.result()["meta_info"]["cached_tokens"]

    first = vllm.complete(text, cache_salt="alone").tokens
    whole = [*text, *first, *tail]
    second = vllm.complete(whole, cache_salt="alone")

    assert at_sglang(text, "a" * 32) == (first, 0)
    room: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": next(ROOMS)}
    (kept,) = generate(decode, [0], {"disagg_kept_request_id": "a" * 32}, max_tokens=1, **room)["meta_info"]["disagg_kept"]
    assert (kept is not None) is is_full
    moved = vllm.num_moved()
    found = vllm.complete(whole, kv_transfer_params={"kept": kept} if kept else None)
    check([second], [found])
    assert vllm.num_moved() - moved == (len(text) + len(first) - 1 if is_full else 0)

    with vllm.ask(text, max_tokens=16, stream=False, kv_transfer_params={"keep": True}) as answer:
        kept = json.load(answer)["kv_transfer_params"]["kept"]
    tokens, cached = at_sglang(whole, "b" * 32, kept)
    assert tokens == second.tokens
    page_size = int(servers.pair.sglang_prefill[1])
    assert cached == ((len(text) + len(first) - 1) // page_size * page_size if is_full else 0)


def generate(server: Server, prompt: list[int], told: dict[str, Any], *, max_tokens: int = 16, **where: Any) -> Any:
    """An SGLang server's answer to a request that tells its backend something."""
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True, "custom_params": told}
    body = json.dumps({"input_ids": prompt, "sampling_params": params, **where}).encode()
    asked = urllib.request.Request(f"{server.url}/generate", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.load(answer)


def test_clients_that_leave(servers: Servers) -> None:
    """Their requests end on both servers, and others are answered."""
    (prompt,) = prompts((1100,), seed=34)
    for name, seed in DIRECTIONS.items():
        proxy = servers.proxies[name]
        with proxy.ask(prompt, max_tokens=300, stream=True) as answer:
            assert answer.readline().startswith(b"data: ")
        with ThreadPoolExecutor() as pool, pytest.raises(TimeoutError):
            pool.submit(proxy.ask, prompt[1:], max_tokens=300, stream=False, timeout_s=0.2).result()
        check(servers.expected[seed], [proxy.complete(each) for each in prompts(LENGTHS, seed=seed)])
    wait_idle(servers.vllm)


def wait_idle(vllm: Server) -> None:
    """Assert that vLLM gives every block back, long before `hold_s`."""
    wait_until(lambda: not any(vllm.metric(name) for name in (WAITING, "vllm:num_requests_running", USED)))


def wait_until(is_so: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_servers_are_killed(servers: Servers) -> None:
    """The proxies ask again until a server answers at the same address. Each client gets one answer."""
    sent = servers.vllm.metric(SENT)
    with ThreadPoolExecutor() as pool:
        waiting = {seed: pool.submit(ask_for_long, servers, name) for name, seed in DIRECTIONS.items()}
        wait_until(lambda: servers.vllm.metric(SENT) > sent or waiting[31].done())  # SGLang decodes
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
    for name, seed in DIRECTIONS.items():
        check(servers.expected[seed], [servers.proxies[name].complete(each) for each in prompts(LENGTHS, seed=seed)])
    wait_idle(servers.vllm)


def ask_for_long(servers: Servers, name: str) -> Reply:
    """The first tokens of an answer that takes long enough for a server to be killed meanwhile."""
    prompt = prompts(LENGTHS, seed=DIRECTIONS[name])[-1]
    reply = servers.proxies[name].complete(prompt, max_tokens=300, stream=False, timeout_s=400)
    assert len(reply.tokens) == 300
    return Reply(reply.tokens[:16], reply.logprobs[:16], 0.0)
