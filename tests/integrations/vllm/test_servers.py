"""Real vLLM servers over HTTP, with the example's proxy in front: other TP and block size on each side."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.servers import Server, vllm_pair
from harness.vllm.engine import PREFILL
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
    before = decode.num_moved()
    found = [proxy.complete(prompt) for prompt in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        found += pool.map(proxy.complete, asked)
    for one, other in zip([*expected, *expected], found, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert decode.metric("vllm:disagg_failed_loads_total") == 0, decode.log()
    num_tokens = 2 * sum(length - 1 for length in LENGTHS)
    assert decode.num_moved() - before == num_tokens
    assert decode.metric("vllm:disagg_loaded_tokens_total") == 2 * num_tokens  # on two ranks
    num_sends = 2 * len(LENGTHS)  # prefill learns of an end after decode, and counts it in a step of its own
    assert prefill.metric_from("vllm:disagg_sends_total", num_sends) == num_sends
    assert [server.metric("vllm:disagg_healthy") for server in (prefill, decode)] == [1, 1]


def post(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    """The open answer of a server, asked as vLLM's own proxies ask it."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-Request-Id": body["user"]}
    return urllib.request.urlopen(urllib.request.Request(server.url + path, json.dumps(body).encode(), headers), timeout=120)


def generated(answer: Any, *, stream: bool) -> tuple[str, list[int]]:
    """The text and the tokens of an answer."""
    lines = (line.decode().strip().removeprefix("data: ") for line in answer) if stream else [answer.read()]
    choices = [choice for line in lines if line and line != "[DONE]" for choice in json.loads(line)["choices"]]
    said = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    text = "".join(each.get("content") or each.get("text") or "" for each in said)
    return text, [token for choice in choices for token in choice.get("token_ids") or ()]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Prefill computes, decode answers. " * 9, "max_tokens": 9}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Prefill computes, decode answers. " * 7}], "max_completion_tokens": 9},
    ),
}
NO_ADDRESS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_messages_of_vllms_own_proxies(servers: tuple[Server, Server, Server], kind: str, stream: bool) -> None:
    """The proxies of NixlConnector know nothing of this connector: they ask prefill for one token, with parameters that are
    null, and give its answer's parameters to decode, under the same request id.
    """
    prefill, decode, _ = servers
    path, given = REQUESTS[kind]
    common = {"model": "model", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "user": f"{kind}-{stream}"}
    body = {**common, **given, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    expected = generated(post(decode, path, body), stream=stream)
    assert len(expected[1]) == 9
    before = {server: server.num_moved() for server in (prefill, decode)}
    one = {**body, "stream": False, "max_tokens": 1, **({"max_completion_tokens": 1} if kind == "chat" else {})}
    one.pop("stream_options", None)
    answer = json.load(post(prefill, path, {**one, "kv_transfer_params": {**PREFILL, **NO_ADDRESS}}))
    assert answer["usage"]["completion_tokens"] == 1
    found = generated(post(decode, path, {**body, "kv_transfer_params": answer["kv_transfer_params"]}), stream=stream)
    assert found == expected
    assert decode.num_moved() - before[decode] == answer["usage"]["prompt_tokens"] - 1
    assert prefill.num_moved() == before[prefill]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_whose_state_comes_back(servers: tuple[Server, Server, Server], stream: bool) -> None:
    """The proxy gives prefill what decode keeps of each turn. Here the servers cache no prefixes.

    vLLM's own count of what came has no request whose answer is given up, as prefill's is if decode's has ended before.
    """
    prefill, decode, _ = servers
    loaded = "vllm:disagg_loaded_tokens_total"
    common: dict[str, Any] = {"model": "model", "user": f"conversation-{stream}"}
    letters = json.load(post(decode, "/tokenize", {**common, "prompt": "abcdefghijklmnopqrstuvwxyz"}))["tokens"]
    common |= {"temperature": 0, "max_completion_tokens": 80, "return_token_ids": True, "stream": stream}
    messages: list[dict[str, str]] = []
    before: list[int] = []
    with Server.proxy(prefill, decode, "--keep").wait_ready() as proxy:
        for number in range(4):
            messages.append(
                {"role": "user", "content": f"Turn {number}, {'stream' if stream else 'whole'}: " + "and then? " * 9}
            )
            body = {**common, "messages": messages, "allowed_token_ids": letters}
            whole = json.load(post(decode, "/v1/chat/completions", {**body, "stream": False, "cache_salt": "alone"}))
            moved, before_turn, num_known = prefill.num_moved(), prefill.metric(loaded), max(0, len(before) - 1)
            text, tokens = generated(post(proxy, "/v1/chat/completions", body), stream=stream)
            assert (text, tokens) == (whole["choices"][0]["message"]["content"], whole["choices"][0]["token_ids"])
            prompt = whole["prompt_token_ids"]
            assert prompt[: len(before)] == before
            assert prefill.metric_from(loaded, before_turn + num_known) == before_turn + num_known, f"turn {number + 1}"
            assert prefill.num_moved() - moved in (num_known, 0), f"turn {number + 1}"
            before = prompt + tokens
            messages.append({"role": "assistant", "content": text})
    assert prefill.metric("vllm:disagg_failed_loads_total") == 0, prefill.log()


def test_warnings_of_the_library_are_in_the_servers_log(servers: tuple[Server, Server, Server]) -> None:
    """Those of the scheduler's process and those of a worker's."""
    _, decode, _ = servers
    (prompt,) = prompts((70,), seed=33)
    expected = decode.complete(prompt)
    damaged = {"do_remote_prefill": True, "remote_engine_id": "nobody", "remote_address": "?", "remote_request_id": "00" * 16}
    for params in (damaged, {**damaged, "remote_engine_id": 7}):
        assert decode.complete(prompt, kv_transfer_params=params).tokens == expected.tokens
    warnings = [line for line in decode.log(length=1 << 20).splitlines() if "WARNING" in line]
    assert any("worker.py" in line and "Worker_TP" in line and "expected tcp://" in line for line in warnings), warnings
    assert any("scheduler.py" in line and "kv_transfer_params of another connector" in line for line in warnings), warnings


def test_proxy_without_prefill(servers: tuple[Server, Server, Server]) -> None:
    """Decode answers alone once prefill is gone. Runs last."""
    prefill, decode, proxy = servers
    (prompt,) = prompts((150,), seed=32)
    expected = decode.complete(prompt)
    prefill.stop()
    assert proxy.complete(prompt).tokens == expected.tokens


def test_prefill_that_is_told_to_end_hands_over_what_it_has(model: Callable[[str], Path]) -> None:
    """With `--shutdown-timeout`, although decode asks for it only then."""
    folder = model("llama")
    with (
        Server.vllm(folder, "--block-size", "32", "--shutdown-timeout", "60", VLLM_LOGGING_LEVEL="INFO") as prefill,
        Server.vllm(folder, "--block-size", "64") as decode,
    ):
        prefill.wait_ready(), decode.wait_ready()
        (prompt,) = prompts((300,), seed=33)
        expected = decode.complete(prompt)
        with prefill.ask(prompt, max_tokens=1, stream=False, kv_transfer_params=dict(PREFILL)) as answer:
            params = json.load(answer)["kv_transfer_params"]
        os.kill(prefill.pid, signal.SIGTERM)
        until = time.monotonic() + 60
        while "mode=drain" not in prefill.log():
            assert time.monotonic() < until, prefill.log()
            time.sleep(0.1)
        found = decode.complete(prompt, kv_transfer_params=params)
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert decode.num_moved() == 299, decode.log()
        assert prefill.wait_ended(timeout_s=60.0) == 0, prefill.log()
