"""The example's proxy in front of real vLLM servers: errors, paths, and clients that leave.

The servers run with `VLLM_SERVER_DEV_MODE=1`, and only decode has an adapter.
"""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.ports import free_ports
from harness.servers import Server
from tests.integrations.vllm.mooncake import MooncakeProxy
from tests.integrations.vllm.requests import USED, leave, prompts, wait_unused

PATIENT = {"connection_limits": {"heartbeat_timeout_s": 30.0}}
REFUSED_S = 10.0
"""How soon prefill refuses a reservation of a request that it has not got. Decode itself waits for longer."""
SILENT_S = 10.0
"""How long decode waits for a prefill server that does not answer."""
FREE_S = 2.0
"""How soon blocks are free after an answer or a failure: long before any time limit of the connector."""
LOADED, FAILED = "vllm:disagg_loaded_tokens_total", "vllm:disagg_failed_loads_total"
TEXT = "Prefill computes, decode answers. " * 9
COMMON = {"model": "model", "temperature": 0}
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


@pytest.fixture(scope="module")
def bootstrap_port() -> int:
    """Where prefill serves its name."""
    return free_ports(1)[0]


def begin_prefill(folder: Path, bootstrap_port: int, *, instead_of: Server | None = None) -> Server:
    extra = {**PATIENT, "bootstrap_port": bootstrap_port, "load_timeout_s": REFUSED_S}
    return Server.vllm(folder, "--block-size", "32", extra=extra, instead_of=instead_of)


@pytest.fixture(scope="module")
def servers(
    model: Callable[[str], Path], bootstrap_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode, and the proxy."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder)
    options = ("--block-size", "64", "--enable-lora", "--lora-modules", f"adapter={folder}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with (
            begin_prefill(model("llama"), bootstrap_port) as prefill,
            Server.vllm(model("llama"), *options, extra={**PATIENT, "load_timeout_s": SILENT_S}) as decode,
            Server.proxy(prefill, decode) as proxy,
        ):
            yield prefill.wait_ready(), decode.wait_ready(), proxy.wait_ready()


def write_adapter(folder: Path) -> None:
    """A LoRA adapter of the model `llama`."""
    torch.manual_seed(3)
    weights = {}
    for layer in range(4):
        for name, size in (("q_proj", 256), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 256) * 0.2
            weights[f"{at}.lora_B.weight"] = torch.randn(size, 8) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))


def post(server: Server, path: str, body: Any) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_completions_in_dev_mode(servers: tuple[Server, Server, Server]) -> None:
    _, decode, proxy = servers
    with urllib.request.urlopen(f"{decode.url}/server_info", timeout=60) as answer:
        assert "vllm_config" in json.load(answer)
    (prompt,) = prompts((300,), seed=51)
    expected, before = decode.complete(prompt), decode.metric(LOADED)
    assert proxy.complete(prompt).tokens == expected.tokens
    assert decode.metric_from(LOADED, before + 299) == before + 299


REQUESTS = {
    "/v1/responses": {"input": TEXT, "max_output_tokens": 6, "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6},
}


def text_of(path: str, data: bytes, *, stream: bool) -> str:
    """What was generated."""
    if stream:
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
        return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)
    found = json.loads(data)
    (part,) = (found["output"][0] if path == "/v1/responses" else found)["content"]
    return str(part["text"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", REQUESTS)
def test_other_paths_are_handed_over(servers: tuple[Server, Server, Server], path: str, stream: bool) -> None:
    _, decode, proxy = servers
    body = {**COMMON, **REQUESTS[path], "stream": stream}
    status, data = post(decode, path, body)
    assert status == 200
    expected, before = text_of(path, data, stream=stream), decode.metric(LOADED)
    assert expected
    status, data = post(proxy, path, body)
    assert (status, text_of(path, data, stream=stream)) == (200, expected)
    if path == "/v1/responses":  # to decode alone all that it loads is cached
        assert re.findall(rb'"cached_tokens": ?(\d+)', data)[-1] == b"0"
    num_tokens = before + len(TEXT) - 1  # a token for each byte
    assert decode.metric_from(LOADED, num_tokens) == num_tokens


BAD: dict[str, Any] = {
    "an unknown model": {**COMMON, "model": "nobody's", "prompt": "a"},
    "a long prompt": {**COMMON, "prompt": [1] * 5000},
    "a negative number": {**COMMON, "prompt": "a", "max_tokens": -1},
    "a list of objects": {**COMMON, "prompt": [{"a": 1}, {}]},
    "an unknown token": {**COMMON, "prompt": [10**6]},
    "a large token": {**COMMON, "prompt": [2**70]},
    "a model of another type": {**COMMON, "model": ["a"], "prompt": "a"},
    "nothing": {},
    "not a number": b'{"model": "model", "prompt": "a", "temperature": NaN}',
    "half a surrogate": {**COMMON, "prompt": "\ud800"},
    "nesting": b'{"model": "model", "prompt": "a", "logit_bias": ' + b'{"a": ' * 500 + b"1" + b"}" * 501,
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_servers(servers: tuple[Server, Server, Server], name: str) -> None:
    prefill, decode, proxy = servers
    found = post(proxy, "/v1/completions", BAD[name])
    assert found[0] == (404 if name == "an unknown model" else 400)
    assert found in (post(decode, "/v1/completions", BAD[name]), post(prefill, "/v1/completions", BAD[name]))


def test_other_requests_are_decodes(servers: tuple[Server, Server, Server]) -> None:
    _, decode, proxy = servers
    for path, body in (
        ("/tokenize", {"model": "model", "prompt": "hello"}),
        ("/v1/embeddings", {"model": "model", "input": "hello"}),
        ("/nothing", {}),
    ):
        assert post(proxy, path, body) == post(decode, path, body)
    for path in ("/health", "/version"):
        with urllib.request.urlopen(proxy.url + path) as one, urllib.request.urlopen(decode.url + path) as other:
            assert one.read() == other.read()


def test_an_adapter_that_only_decode_has(servers: tuple[Server, Server, Server]) -> None:
    _, decode, proxy = servers
    (prompt,) = prompts((200,), seed=52)
    plain, expected = decode.complete(prompt), decode.complete(prompt, model="adapter")
    assert expected.tokens != plain.tokens
    before = decode.metric(LOADED)
    assert proxy.complete(prompt, model="adapter").tokens == expected.tokens
    assert decode.metric(LOADED) == before


def test_blocks_come_back(servers: tuple[Server, Server, Server]) -> None:
    """Long before `hold_s`: after lists, several answers, errors of decode, and clients that leave at any moment."""
    prefill, decode, proxy = servers
    held = {"do_remote_decode": True, "remote_request_id": "ab" * 16}
    status, _ = post(prefill, "/v1/completions", {**COMMON, "prompt": TEXT, "max_tokens": 1, "kv_transfer_params": held})
    assert status == 200
    assert prefill.metric(USED) > 0  # what prefill has computed for nobody stays
    aborted = {"abort_request_id": held["remote_request_id"]}
    post(prefill, "/v1/completions", {**COMMON, "prompt": "a", "max_tokens": 1, "kv_transfer_params": aborted})
    wait_unused(prefill)
    several = {**COMMON, "temperature": 1, "max_tokens": 4}
    for fields, status in (
        ({"prompt": [TEXT, TEXT[1:]]}, 200),
        ({"prompt": TEXT, "n": 4}, 200),
        ({"prompt": [TEXT, TEXT[1:]], "n": 2}, 200),
        ({"prompt": TEXT, "n": 2, "temperature": 0}, 400),  # decode refuses it after prefill
    ):
        assert post(proxy, "/v1/completions", {**several, **fields})[0] == status
        wait_unused(prefill, decode)
    sends = "vllm:disagg_sends_total"
    before = prefill.metric(sends)
    for index, prompt in enumerate(prompts((1100,) * 16, seed=53)):
        leave(proxy.port, {**COMMON, "prompt": prompt, "max_tokens": 300, "stream": index % 2 == 0}, after_s=index**2 / 200)
    wait_unused(prefill, decode)
    assert prefill.metric(sends) > before  # some left only after the hand-over
    (prompt,) = prompts((300,), seed=54)
    assert proxy.complete(prompt).tokens == decode.complete(prompt).tokens


CHAT = {"messages": [{"role": "user", "content": TEXT}]}
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": TEXT, "max_tokens": 9, "logprobs": 1}),
    "one token": ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "logprobs": 1}),
    "a prompt of one token": ("/v1/completions", {"prompt": [17], "max_tokens": 4, "logprobs": 1}),
    "stop": ("/v1/completions", {"prompt": TEXT, "max_tokens": 40, "stop_token_ids": list(range(0, 250, 9)), "logprobs": 1}),
    "several": ("/v1/completions", {"prompt": TEXT, "max_tokens": 4, "n": 2, "temperature": 1, "seed": 5, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1}),
}


def choices_of(data: bytes, *, stream: bool) -> dict[int, tuple[list[int], list[float], str]]:
    """Tokens, log-probabilities and the reason of the end of each answer."""
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")] if stream else [data]
    found: dict[int, tuple[list[int], list[float], str]] = {}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        tokens, values, reason = found.get(choice["index"], ([], [], ""))
        tokens += choice.get("token_ids") or ()
        given = choice.get("logprobs") or {}
        values += given.get("token_logprobs") or [each["logprob"] for each in given.get("content") or ()]
        found[choice["index"]] = tokens, values, choice["finish_reason"] or reason
    return found


def check_answers(expected: bytes, found: bytes, *, stream: bool) -> None:
    one, other = choices_of(expected, stream=stream), choices_of(found, stream=stream)
    assert one.keys() == other.keys()
    for index, (tokens, values, reason) in one.items():
        assert tokens
        assert (other[index][0], other[index][2]) == (tokens, reason)
        assert other[index][1] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_one_server(
    servers: tuple[Server, Server, Server], bootstrap_port: int, name: str, stream: bool
) -> None:
    """Through the example's proxy, and asked as MooncakeConnector's proxy does."""
    prefill, decode, proxy = servers
    path, given = ANSWERS[name]
    body = {**COMMON, "ignore_eos": True, "return_token_ids": True, **given, "stream": stream}
    status, expected = post(decode, path, body)
    assert status == 200
    num_tokens, before, failed = len(given.get("prompt", TEXT)), decode.metric(LOADED), decode.metric(FAILED)
    status, found = post(proxy, path, body)
    assert status == 200
    check_answers(expected, found, stream=stream)
    loaded = before + num_tokens - 1
    assert decode.metric_from(LOADED, loaded) == loaded
    with MooncakeProxy(prefill, decode, bootstrap_port=bootstrap_port) as mooncake:
        answer, prefilled = mooncake.ask(path, body)
        with answer:
            check_answers(expected, answer.read(), stream=stream)
        assert prefilled.result() == 200
    loaded += num_tokens - 1
    assert decode.metric_from(LOADED, loaded) == loaded
    assert decode.metric(FAILED) == failed, decode.log()
    wait_unused(prefill, decode, timeout_s=FREE_S)


def test_mooncakes_proxy_and_a_prefill_that_refuses(servers: tuple[Server, Server, Server], bootstrap_port: int) -> None:
    """That proxy does not tell decode, which would wait for long. Prefill refuses what nobody has asked it for."""
    prefill, decode, _ = servers
    body = {**COMMON, "model": "adapter", "prompt": TEXT, "max_tokens": 6, "return_token_ids": True, "logprobs": 1}
    _, expected = post(decode, "/v1/completions", body)
    with MooncakeProxy(prefill, decode, bootstrap_port=bootstrap_port) as mooncake:
        answer, prefilled = mooncake.ask("/v1/completions", body)
        with answer:
            check_answers(expected, answer.read(), stream=False)
        assert prefilled.result() == 404
    assert f"nobody has sent the request within {REFUSED_S:g} s" in decode.log(length=1 << 20)
    wait_unused(prefill, decode, timeout_s=FREE_S)


def test_a_prefill_server_that_does_not_answer(servers: tuple[Server, Server, Server]) -> None:
    """Decode waits for it less long than for a request in the queue of one that answers."""
    _, decode, _ = servers
    (prompt,) = prompts((200,), seed=57)
    expected = decode.complete(prompt)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = {"remote_engine_id": "silent", "remote_address": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}
        params = {"do_remote_prefill": True, **where, "remote_request_id": "cd" * 16}
        assert decode.complete(prompt, kv_transfer_params=params).tokens == expected.tokens
    wait_unused(decode, timeout_s=FREE_S)


def test_mooncakes_clients_leave(servers: tuple[Server, Server, Server], bootstrap_port: int) -> None:
    """While decode waits for prefill, or answers. Decode tells prefill, whose answer nobody reads."""
    prefill, decode, _ = servers
    with MooncakeProxy(prefill, decode, bootstrap_port=bootstrap_port) as mooncake:
        for number, prompt in enumerate(prompts((1100,) * 4, seed=55)):
            answer, prefilled = mooncake.ask("/v1/completions", {**COMMON, "prompt": prompt, "max_tokens": 300, "stream": True})
            if number % 2:
                assert answer.readline().startswith(b"data: ")
            else:
                wait_until(lambda: decode.metric(USED) > 0)  # it has reserved blocks
            answer.close()
            assert prefilled.result() == 200
            wait_unused(prefill, decode, timeout_s=FREE_S)


def test_prefill_is_killed_and_comes_back(
    servers: tuple[Server, Server, Server], bootstrap_port: int, model: Callable[[str], Path]
) -> None:
    """Under the same URL it has another name and control address. Every answer is right; only some are computed by decode. Runs
    last.
    """
    prefill, decode, proxy = servers
    asked = prompts((1400, 1300, 1200, 700, 300), seed=56)
    expected = [decode.complete(prompt) for prompt in asked]
    proxy.complete(asked[-1])
    with ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(proxy.complete, prompt) for prompt in asked]
        wait_until(lambda: decode.metric(USED) > 0)
        prefill.kill()
        found = [each.result() for each in waiting]
    found.append(proxy.complete(asked[-1], stream=False))
    for one, other in zip([*expected, expected[-1]], found, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    wait_unused(decode, timeout_s=FREE_S)
    with begin_prefill(model("llama"), bootstrap_port, instead_of=prefill) as again:
        again.wait_ready()
        for prompt, one in zip(asked, expected, strict=True):
            before = decode.metric(LOADED)
            assert proxy.complete(prompt).tokens == one.tokens
            assert decode.metric_from(LOADED, before + 1) - before == len(prompt) - 1
        wait_unused(again, decode, timeout_s=FREE_S)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)
