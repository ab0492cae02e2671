"""Other projects' routers in front of real vLLM servers: each kind of request has the answer of one undivided server.

That is decode, asked without a router. Prefill and decode have other block sizes, and no prefix cache.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.ports import free_ports
from harness.servers import Server
from tests.integrations.vllm.requests import USED, leave, prompts, wait_unused
from tests.integrations.vllm.routers import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Direct,
    HttpAnswer,
    ProductionStack,
    Router,
    Sidecar,
    SidecarAtOnce,
    answer_of,
    begin,
    differences,
    written,
)

PATIENT = {"connection_limits": {"heartbeat_timeout_s": 30.0}}
NUM_BLOCKS = 1024
"""One is vLLM's null block."""
BLOCKS_OF_1200 = 38
"""Of 32 tokens, for a prompt of 1,200."""
OPTIONS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--enable-scale-out",
    "--num-gpu-blocks-override",
    str(NUM_BLOCKS),
    "--enable-log-requests",
    "--max-log-len",
    "0",
)
LOADED, FAILED = "vllm:disagg_loaded_tokens_total", "vllm:disagg_failed_loads_total"
HOLD_S = 600.0
"""How long prefill holds blocks that no decode server takes: longer than the tests wait for them to be free."""
TEXT = "Prefill computes, decode answers. " * 5
OTHER = "Another prompt, as long as three blocks of the prefill server, and then some more. " * 2
UNICODE = "Größe, 数量, размер, حجم, 🙂👩‍👩‍👧, \u0000\t\u2028. " * 4
LONG = "x" + TEXT * 8
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "switch", "description": "Switch it.", "parameters": SCHEMA}}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Kind:
    """A kind of request, and how many prompt tokens decode gets from prefill if it is divided."""

    path: str
    body: Any
    moved: int = 0
    headers: tuple[tuple[str, str], ...] = ()


def completion(
    prompt: Any = TEXT, *, moved: int | None = None, headers: tuple[tuple[str, str], ...] = (), **fields: Any
) -> Kind:
    """A token is a byte."""
    length = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 5, "return_token_ids": True, **fields}
    return Kind(COMPLETIONS, body, max(0, length - 1) if moved is None else moved, headers)


def chat(text: Any = TEXT, *, moved: int | None = None, **fields: Any) -> Kind:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    common = {"model": "model", "messages": messages, "temperature": 0, "max_completion_tokens": 5, "return_token_ids": True}
    num_tokens = sum(len(message["content"]) for message in messages) - 1 if moved is None else moved
    return Kind(CHAT, {**common, **fields}, num_tokens)


KINDS: dict[str, Kind] = {
    "several prompts": completion([TEXT, OTHER, TEXT + OTHER], moved=len(TEXT) - 1),
    "several prompts, stream": completion([TEXT, OTHER], moved=len(TEXT) - 1, stream=True),
    "several prompts of token ids": completion([list(range(1, 100)), list(range(9, 200))], moved=98),
    "several prompts and answers": completion([TEXT, OTHER], moved=len(TEXT) - 1, n=2, **SAMPLED),
    "beam search": completion(use_beam_search=True, n=2, moved=0),
    "completion": completion(logprobs=1),
    "completion, stream": completion(stream=True, logprobs=1),
    "usage of a stream": completion(**STREAM),
    "usage of each event": completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "one token": completion(max_tokens=1, logprobs=1),
    "one token, stream": completion(max_tokens=1, stream=True),
    "max_tokens of null": completion(max_tokens=None),
    "min_tokens": completion(min_tokens=4, max_tokens=8, stop_token_ids=list(range(0, 250, 9))),
    "end of text": completion(logit_bias={"257": 100}),
    "ignore_eos": completion(logit_bias={"257": 100}, ignore_eos=True),
    "stop texts": completion(max_tokens=30, stop=["a", "e", "i", "o"]),
    "stop texts that are kept": completion(max_tokens=30, stop=["a", "e", "i", "o"], include_stop_str_in_output=True),
    "stop tokens": completion(max_tokens=40, stop_token_ids=list(range(0, 250, 9)), logprobs=1),
    "stop tokens, stream": completion(max_tokens=40, stop_token_ids=list(range(0, 250, 9)), stream=True),
    "sampled": completion(**SAMPLED, logprobs=1),
    "sampled, stream": completion(**SAMPLED, stream=True),
    "top_p, top_k and min_p": completion(**SAMPLED, top_p=0.9, top_k=40, min_p=0.01),
    "penalties": completion(presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.3, max_tokens=12),
    "logit_bias": completion(logit_bias={"65": 9, "66": 8}, max_tokens=6),
    "allowed tokens": completion(allowed_token_ids=list(range(65, 91))),
    "bad words": completion(bad_words=["a", "be"]),
    "several answers": completion(**SAMPLED, n=3),
    "several answers, stream": completion(**SAMPLED, n=3, stream=True),
    "best_of": completion(**SAMPLED, best_of=2),
    "echo": completion(echo=True),
    "echo with logprobs": completion(echo=True, logprobs=1, moved=0),
    "prompt_logprobs": completion(prompt_logprobs=1, moved=0),
    "five logprobs": completion(logprobs=5),
    "logprobs of the chosen token": completion(logprobs=0),
    "token ids": completion(list(range(1, 201)), logprobs=1),
    "token ids, stream": completion(list(range(1, 201)), stream=True),
    "one token id": completion([17]),
    "an empty prompt": completion(""),
    "a prompt of no tokens": completion([]),
    "a long prompt": completion(LONG),
    "a prompt as long as the model takes": completion([7] * 1535, max_tokens=1),
    "a prompt that is too long": completion([7] * 1536),
    "more tokens than the model takes": completion([7] * 1530, max_tokens=100),
    "other scripts": completion(UNICODE, max_tokens=9),
    "truncated": completion(truncate_prompt_tokens=50, moved=49),
    "special tokens": completion(add_special_tokens=False, skip_special_tokens=False, spaces_between_special_tokens=False),
    "a request id": completion(headers=(("X-Request-Id", "the-clients-own"),)),
    "a request id in the body": completion(request_id="the-clients-own-too"),
    "priority 0": completion(priority=0),
    "another priority": completion(priority=3),
    "cache_salt": completion(cache_salt="salt"),
    "no token ids": completion(return_token_ids=False),
    "token ids as texts": completion(return_tokens_as_token_ids=True, logprobs=1),
    "user and unknown fields": completion(user="somebody", metadata={"a": "b"}, not_a_field=[1]),
    "parameters of the client": completion(kv_transfer_params={"do_remote_prefill": True, "remote_request_id": "zz"}),
    "one of a choice": completion(structured_outputs={"choice": ["prefill", "decode"]}, max_tokens=12),
    "a regular expression": completion(structured_outputs={"regex": "[a-f]{4}"}, max_tokens=8),
    "JSON by a schema": completion(structured_outputs={"json": SCHEMA}, max_tokens=24),
    "guided_choice": completion(guided_choice=["prefill", "decode"]),
    "chat": chat(logprobs=True, top_logprobs=2),
    "chat, stream": chat(logprobs=True, top_logprobs=2, **STREAM),
    "chat with max_tokens": chat(max_completion_tokens=None, max_tokens=6),
    "chat with both limits": chat(max_tokens=9, max_completion_tokens=4),
    "chat of several turns": chat(
        [
            {"role": "system", "content": "Be short. "},
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": "Yes. "},
            {"role": "user", "content": OTHER},
        ]
    ),
    "chat of parts": chat([{"role": "user", "content": [{"type": "text", "text": TEXT}]}], moved=len(TEXT) - 1),
    "chat with several answers": chat(**SAMPLED, n=2),
    "chat with several answers, stream": chat(**SAMPLED, n=2, **STREAM),
    "chat that stops": chat(max_completion_tokens=30, stop=["a", "e", "i", "o"]),
    "chat with min_tokens": chat(min_tokens=4, max_completion_tokens=8, stop_token_ids=list(range(0, 250, 9))),
    "tools": chat(tools=[TOOL], tool_choice="auto"),
    "a required tool": chat(tools=[TOOL], tool_choice="required", max_completion_tokens=40),
    "a named tool": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "switch"}}, max_completion_tokens=24
    ),
    "a named tool, stream": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "switch"}}, max_completion_tokens=24, stream=True
    ),
    "a JSON object": chat(response_format={"type": "json_object"}, max_completion_tokens=8),
    "a JSON schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "switch", "schema": SCHEMA}}, max_completion_tokens=24
    ),
    "chat with prompt_logprobs": chat(prompt_logprobs=1, moved=0),
    "chat that goes on": chat(
        [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "It is"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "chat with a template's fields": chat(chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "a"}]),
    "response": Kind(RESPONSES, {"model": "model", "input": TEXT, "temperature": 0, "max_output_tokens": 5}, len(TEXT) - 1),
    "response, stream": Kind(
        RESPONSES, {"model": "model", "input": TEXT, "temperature": 0, "max_output_tokens": 5, "stream": True}, len(TEXT) - 1
    ),
    "message": Kind(
        MESSAGES,
        {"model": "model", "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 5},
        len(TEXT) - 1,
    ),
    "message, stream": Kind(
        MESSAGES,
        {"model": "model", "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 5, "stream": True},
        len(TEXT) - 1,
    ),
    "tokens to tokens": Kind(
        GENERATE,
        {"model": "model", "token_ids": list(range(1, 201)), "sampling_params": {"temperature": 0, "max_tokens": 5}},
        199,
    ),
    "an unknown model": completion(model="nobody's"),
    "a negative limit": completion(max_tokens=-1),
    "a negative temperature": completion(temperature=-1),
    "several greedy answers": completion(n=2),
    "no prompt": Kind(COMPLETIONS, {"model": "model"}),
    "a prompt of objects": completion([{"a": 1}, {}]),
    "an unknown token": completion([10**6]),
    "a suffix": completion(suffix="the end"),
    "too many logprobs": completion(logprobs=1000),
    "a schema that is none": completion(structured_outputs={"json": {"type": "nothing"}}),
    "no messages": chat([]),
    "messages that are text": Kind(CHAT, {"model": "model", "messages": "a"}),
    "a picture": chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}], moved=0
    ),
    "a template of the client": chat(chat_template="{{ messages[0]['content'] }}"),
    "a tool that there is not": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nobody"}}),
    "not JSON": Kind(COMPLETIONS, b'{"model": "model", '),
    "a list": Kind(COMPLETIONS, []),
    "embeddings": Kind("/v1/embeddings", {"model": "model", "input": TEXT}),
    "tokenize": Kind("/tokenize", {"model": "model", "prompt": TEXT}),
}


@dataclass(frozen=True)
class Own:
    """What a router makes of a kind of request by itself: another status, or other fields than the server's."""

    why: str
    status: int = 200
    fields: str = ""


NO_JSON = Own("it reads the body first, and has an error of its own", 400)
NO_OBJECT = Own("it expects an object and fails", 500)
SCHEMA_OF_ITS_OWN = Own("it has a schema of its own for bodies, which are refused before a server sees them", 422)
ONE_TOKEN_AT_LEAST_FOUR = Own("it asks prefill for one token and leaves `min_tokens`, which prefill refuses", 400)
OWN: dict[str, dict[str, Own]] = {
    "vllm-router": {
        "echo with logprobs": Own(
            "it puts prefill's log-probabilities of the prompt before decode's", fields=".choices[0].logprobs"
        ),
        "a negative limit": SCHEMA_OF_ITS_OWN,
        "no prompt": SCHEMA_OF_ITS_OWN,
        "a prompt of objects": SCHEMA_OF_ITS_OWN,
        "messages that are text": SCHEMA_OF_ITS_OWN,
        "a list": SCHEMA_OF_ITS_OWN,
        "not JSON": NO_JSON,
        "embeddings": Own("it does not divide embeddings, and does not pass them on", 501),
    },
    "sidecar": {"not JSON": NO_JSON, "a list": NO_JSON},
    "production-stack": {
        "not JSON": NO_OBJECT,
        "a list": NO_OBJECT,
        "tokens to tokens": Own("it does not know the path", 404),
        "min_tokens": ONE_TOKEN_AT_LEAST_FOUR,
        "chat with min_tokens": ONE_TOKEN_AT_LEAST_FOUR,
    },
}


@dataclass
class Servers:
    """Prefill, decode, the port where prefill serves its name, and decode's answers so far."""

    prefill: Server
    decode: Server
    bootstrap_port: int
    answers: dict[str, HttpAnswer]

    def expected(self, name: str) -> HttpAnswer:
        """What decode answers by itself."""
        if name not in self.answers:
            self.answers[name] = ask(Direct(self.decode), name)
        return self.answers[name]


@pytest.fixture(scope="module")
def servers(model: Callable[[str], Path]) -> Iterator[Servers]:
    (port,) = free_ports(1)
    folder, extra = model("llama"), {**PATIENT, "hold_s": HOLD_S}
    with (
        Server.vllm(
            folder, "--block-size", "32", *OPTIONS, extra={**extra, "bootstrap_port": port}, VLLM_LOGGING_LEVEL="DEBUG"
        ) as prefill,
        Server.vllm(folder, "--block-size", "64", *OPTIONS, extra=extra, VLLM_LOGGING_LEVEL="INFO") as decode,
    ):
        yield Servers(prefill.wait_ready(), decode.wait_ready(), port, {})


@pytest.fixture(scope="module")
def replays(servers: Servers) -> dict[str, Router]:
    prefill, decode = servers.prefill, servers.decode
    return {
        "sidecar": Sidecar(prefill, decode),
        "sidecar, at once": SidecarAtOnce(prefill, decode, bootstrap_port=servers.bootstrap_port),
        "production-stack": ProductionStack(prefill, decode),
    }


@pytest.fixture(scope="module")
def vllm_router(servers: Servers) -> Iterator[dict[str, Direct]]:
    """The real one, once as for NixlConnector and once as for MooncakeConnector."""
    prefill, decode = (server.url for server in (servers.prefill, servers.decode))
    between = ("--vllm-pd-disaggregation", "--prefill", prefill, str(servers.bootstrap_port), "--decode", decode)
    with ExitStack() as stack:
        routers = {
            connector: stack.enter_context(begin("vllm_router.launch_router", *between, "--kv-connector", connector))
            for connector in ("nixl", "mooncake")
        }
        yield {f"vllm-router, {connector}": Direct(router.wait_ready()) for connector, router in routers.items()}


def ask(router: Router, name: str) -> HttpAnswer:
    kind = KINDS[name]
    return router.ask(kind.path, kind.body if isinstance(kind.body, bytes) else written(kind.body), kind.headers)


def check(router: str, name: str, expected: HttpAnswer, found: HttpAnswer) -> None:
    """Assert that an answer is the expected one, or what the router makes of it."""
    own = OWN[router.partition(",")[0]].get(name, Own("", expected.status))
    assert found.status == own.status, (router, own.why, found)
    if found.is_error:
        if not own.why and router != "production-stack":  # that one puts the server's error into a text of its own
            assert answer_of(found) == answer_of(expected), router
        return
    for difference in differences(answer_of(expected), answer_of(found)):
        assert own.fields, (router, difference)
        assert difference.startswith(own.fields), (router, difference)


def is_asked(router: str, name: str) -> bool:
    """Whether a router is asked with a kind of request: one real and one replayed router with all, the others with every third
    and those of which they make something of their own. With `TEST_ALL_KINDS` all are.
    """
    is_chosen = list(KINDS).index(name) % 3 == 0 or name in OWN[router.partition(",")[0]]
    return is_chosen or router in ("sidecar", "vllm-router, nixl") or bool(os.environ.get("TEST_ALL_KINDS"))


def check_kind(servers: Servers, all_routers: Mapping[str, Router], name: str) -> None:
    """Ask the routers at once, and count the tokens that decode gets from prefill meanwhile."""
    routers = {router: each for router, each in all_routers.items() if is_asked(router, name)}
    expected, before = servers.expected(name), servers.decode.metric(LOADED)
    with ThreadPoolExecutor(len(routers)) as pool:
        found = dict(zip(routers, pool.map(lambda router: ask(router, name), routers.values()), strict=True))
    for router, reply in found.items():
        check(router, name, expected, reply)
    num_tokens = before + KINDS[name].moved * sum(not reply.is_error for reply in found.values())
    assert servers.decode.metric_from(LOADED, num_tokens) == num_tokens


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_replayed_routers(servers: Servers, replays: dict[str, Router], name: str) -> None:
    check_kind(servers, replays, name)


@pytest.mark.parametrize("name", KINDS)
def test_vllm_router(servers: Servers, vllm_router: dict[str, Direct], name: str) -> None:
    check_kind(servers, vllm_router, name)


def test_nothing_has_failed_or_is_kept(servers: Servers) -> None:
    """Nor for several answers or a list of prompts, of which decode loads one, are blocks held. Runs after the tests above."""
    assert servers.decode.metric(FAILED) == 0, servers.decode.log()
    wait_unused(servers.prefill, servers.decode)


def test_clients_leave(servers: Servers, vllm_router: dict[str, Direct]) -> None:
    """Clients of 24 requests leave at any moment. No block is held of those that decode was asked for.

    This router asks decode once it has prefill's answer. If the client leaves just before, neither server hears of it, and
    prefill holds the blocks for `hold_s`.
    """
    for router in vllm_router.values():
        for number, prompt in enumerate(prompts([1200] * 24, seed=55)):
            asked = {"model": "model", "prompt": prompt, "max_tokens": 300, "stream": number % 2 == 0}
            leave(router.port, asked, after_s=(number // 2) ** 2 / 72)
    wait_unused(servers.decode)
    until = time.monotonic() + 30.0
    while (used := servers.prefill.metric(USED) * (NUM_BLOCKS - 1)) > 0.5:
        held = held_by(servers.prefill)
        if used == pytest.approx(BLOCKS_OF_1200 * len(held)) and not held & asked_for(servers.decode):
            break
        assert time.monotonic() < until, (used, held, asked_for(servers.decode), servers.prefill.log(length=2000))
        time.sleep(0.5)


def held_by(prefill: Server) -> set[str]:
    """The ids of the requests whose blocks prefill holds, by its log; without what a server adds to each."""
    log = prefill.log(length=10**9)
    held = re.findall(r"request (\S+)-0-[0-9a-f]+: its blocks are held until", log)
    sent = re.findall(r"Finished sending KV transfer for request (\S+)-0-[0-9a-f]+", log)
    return set(held) - set(sent)


def asked_for(decode: Server) -> set[str]:
    """The ids of the requests that decode was asked for, by its log."""
    return set(re.findall(r"Received request (\S+)-0: ", decode.log(length=10**9)))
