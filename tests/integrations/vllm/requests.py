"""What the tests ask engines, and how they compare answers."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from disagg import new_request_id
from harness.servers import Server
from harness.vllm.engine import PREFILL, Answer, Engine

LENGTHS = (2, 7, 32, 33, 64, 65, 200, 700, 1153)
"""Prompts shorter and longer than blocks, windows and a step's 512 tokens, and on the borders of blocks."""

USED = "vllm:kv_cache_usage_perc"
NOTHING: Mapping[str, Any] = {}


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 1) -> list[list[int]]:
    """Random prompts."""
    chosen = random.Random(seed)
    return [[chosen.randrange(250) for _ in range(length)] for length in lengths]


def hand_over(
    prefill: Engine, decode: Engine, asked: Sequence[Sequence[int]], *, max_tokens: int = 16, logprobs: int = 1
) -> list[Answer]:
    """The answers of decode to prompts that prefill has computed, as vLLM's usual proxy asks for them."""
    first = prefill.generate(asked, params=PREFILL)
    return decode.wait(
        [
            decode.add(prompt, params=answer.params, max_tokens=max_tokens, logprobs=logprobs)
            for prompt, answer in zip(asked, first, strict=True)
        ]
    )


def connect(prefill: Engine, decode: Engine, *, seed: int = 20) -> dict[str, Any]:
    """Where decode finds the prefill engine, once it has got a request from there."""
    (prompt,) = prompts((50,), seed=seed)
    (first,) = prefill.generate([prompt], params=PREFILL)
    assert first.params is not None
    decode.generate([prompt], params=first.params, max_tokens=1)
    prefill.settle()
    return {name: first.params[name] for name in ("remote_engine_id", "remote_address")}


def ask_both(
    prefill: Engine,
    decode: Engine,
    asked: Sequence[Sequence[int]],
    *,
    server: Mapping[str, Any],
    max_tokens: int = 16,
    given: Mapping[str, Any] = NOTHING,
    own: Mapping[str, Any] = NOTHING,
) -> tuple[dict[str, str], list[str]]:
    """Ask both engines at once, as a proxy does that names the requests itself: prefill with the fields `given`, decode with
    its `own`. Returns prefill's names of the requests, with the id of each transfer, and those of decode.
    """
    names = [new_request_id().hex() for _ in asked]
    loading = [
        decode.add(
            prompt, params={"do_remote_prefill": True, **server, "remote_request_id": name}, max_tokens=max_tokens, **own
        )
        for prompt, name in zip(asked, names, strict=True)
    ]
    computing = [
        prefill.add(prompt, params={**PREFILL, "remote_request_id": name}, **given)
        for prompt, name in zip(asked, names, strict=True)
    ]
    return dict(zip(computing, names, strict=True)), loading


def num_waiting(core: Any) -> int:
    """In an engine's process: how many requests wait for another server."""
    return sum(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in core.scheduler.requests.values())


def wait_waiting(engine: Engine, count: int = 1) -> None:
    """Wait until requests of an engine wait for another server. Raises `TimeoutError`."""
    until = time.monotonic() + 60
    while engine.run(num_waiting) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"expected {count} requests that wait, found {engine.run(num_waiting)}")


def wait_for(engine: Engine, count: str, at_least: int) -> None:
    """Wait until one of the connector's counts has reached a number. Raises `TimeoutError`."""
    until = time.monotonic() + 60
    while engine.counts[count] < at_least:
        engine.poll(0.05)
        if time.monotonic() > until:
            raise TimeoutError(f"{count}: expected {at_least}, found {engine.counts[count]}")


def check_equal(expected: Sequence[Answer], found: Sequence[Answer], *, tolerance: float = 1e-4) -> None:
    """Assert that tokens are equal, and the logprobs of each within `tolerance`."""
    for one, other in zip(expected, found, strict=True):
        assert other.tokens == one.tokens
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert all(abs(ours[token] - theirs[token]) <= tolerance for token in ours.keys() & theirs.keys())


def num_external(found: Sequence[Answer]) -> list[int]:
    """VLLM's own count of the tokens that it did not compute, for each answer."""
    return [answer.num_external for answer in found]


def wait_empty(*engines: Engine) -> None:
    """Assert that every block becomes free. Blocks of a request are freed a step after it has ended."""
    for engine in engines:
        engine.settle()
        assert engine.num_free_blocks() == engine.num_blocks - 1  # one is vLLM's null block


def wait_free(*engines: Engine) -> None:
    """Wait until nothing is kept."""
    until = time.monotonic() + 60
    for engine in engines:
        while engine.num_free_blocks() < engine.num_blocks - 1:
            assert time.monotonic() < until
            time.sleep(0.05)


def leave(port: int, body: Mapping[str, Any], *, after_s: float) -> None:
    """Ask a server or a router for a completion, and close the connection."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(after_s)


def wait_unused(*servers: Server, timeout_s: float = 30.0) -> None:
    """Wait until no request has a block."""
    until = time.monotonic() + timeout_s
    while used := {server.url: server.metric(USED) for server in servers if server.metric(USED)}:
        assert time.monotonic() < until, (used, *(server.log(length=2000) for server in servers))
        time.sleep(0.05)
