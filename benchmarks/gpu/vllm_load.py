"""Several clients at once, for `vllm_clients.py`, `vllm_client.py` and `sglang_load.py`, and what they saw.

One event loop notes when each event arrives and reads its tokens later, so that the clients do not wait for each other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp

from benchmarks.gpu.vllm_connectors import exchange
from benchmarks.gpu.vllm_requests import PATIENCE_S, Broken, Reply, tokens_of
from harness.servers import Server, completion


def ask_many(
    prefill: Server,
    decode: Server,
    connector: str,
    prompts: Sequence[Sequence[int]],
    *,
    clients: int,
    max_tokens: int,
    on_failure: Callable[[Exception], None],
) -> list[Reply]:
    """The answers to all prompts, in the order in which they ended. Each client has one request at a time. Failures are passed
    to `on_failure`.
    """
    ask = partial(_ask, prefill, decode, connector, max_tokens)
    return run_clients(ask, prompts, clients=clients, patience_s=PATIENCE_S, on_failure=on_failure)


def run_clients(
    ask: Callable[[aiohttp.ClientSession, Sequence[int]], Awaitable[Reply]],
    prompts: Sequence[Sequence[int]],
    *,
    clients: int,
    patience_s: float,
    on_failure: Callable[[Exception], None],
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Reply]:
    """The answers that `ask` gets, as `ask_many` returns them. After each request a client ends unless `goes_on()`."""
    waiting, replies = iter(prompts), []

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            try:
                replies.append(await ask(session, prompt))
            except (*Broken, aiohttp.ClientError, TimeoutError) as error:
                on_failure(error)
            if not goes_on():
                break

    async def run() -> None:
        patience = aiohttp.ClientTimeout(total=patience_s)
        async with aiohttp.ClientSession(timeout=patience, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))

    asyncio.run(run())
    return replies


def figures(replies: Sequence[Reply], elapsed_s: float) -> dict[str, Any]:
    """What clients saw: requests per second, and in milliseconds, from each request on, the times of the first token, of the
    whole answer and between two tokens.
    """
    gaps_s = [late - early for reply in replies for early, late in itertools.pairwise(reply.times_s)]
    first_s, whole_s = [reply.times_s[0] for reply in replies], [reply.times_s[-1] for reply in replies]
    return {
        "answered": len(replies),
        "rps": round(len(replies) / elapsed_s, 2),
        "first_p50_ms": quantile_ms(first_s, 0.5),
        "first_p99_ms": quantile_ms(first_s, 0.99),
        "whole_p50_ms": quantile_ms(whole_s, 0.5),
        "whole_p99_ms": quantile_ms(whole_s, 0.99),
        "gap_p99_ms": quantile_ms(gaps_s, 0.99),
        "gap_max_ms": quantile_ms(gaps_s, 1.0),
    }


def quantile_ms(times_s: Sequence[float], share: float) -> float | None:
    """The least time that this share of all does not exceed, in milliseconds."""
    ordered = sorted(times_s)
    return round(ordered[max(0, math.ceil(len(ordered) * share) - 1)] * 1e3, 1) if ordered else None


async def _ask(
    prefill: Server, decode: Server, connector: str, max_tokens: int, session: aiohttp.ClientSession, prompt: Sequence[int]
) -> Reply:
    sent, begun_s = exchange(connector, prefill, decode), time.monotonic()
    body = completion(prompt, max_tokens=1, logprobs=None, kv_transfer_params=sent.prefill or None)
    async with session.post(f"{prefill.url}/v1/completions", json=body, headers=sent.headers) as answer:
        answer.raise_for_status()
        given: Any = (await answer.json())["kv_transfer_params"]
    params = given if sent.decode is None else sent.decode
    body = completion(prompt, max_tokens=max_tokens, logprobs=None, stream=True, kv_transfer_params=params or None)
    reply = Reply()
    reply.prefill_s = reply.begun_s - begun_s
    async with session.post(f"{decode.url}/v1/completions", json=body, headers=sent.headers) as answer:
        await read_stream(answer, reply, max_tokens)
    return reply


async def read_stream(
    answer: aiohttp.ClientResponse, reply: Reply, max_tokens: int, *, on_event: Callable[[], None] = lambda: None
) -> None:
    """Note the tokens of a stream, and when each came. Calls `on_event` at each event. Raises `RuntimeError` for another number
    of tokens.
    """
    answer.raise_for_status()
    lines = []
    async for line in answer.content:
        lines.append((time.monotonic() - reply.begun_s, line))
        if line.startswith(b"data: {"):
            on_event()
    for at_s, line in lines:
        tokens = tokens_of(json.loads(line[6:])) if line.startswith(b"data: {") else []
        if tokens:
            reply.times_s.append(at_s)
            reply.tokens += tokens
    if len(reply.tokens) != max_tokens:
        raise RuntimeError(f"decode has answered with {len(reply.tokens)} of {max_tokens} tokens")
