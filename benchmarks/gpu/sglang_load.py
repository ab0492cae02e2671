"""Several clients of SGLang servers at once, for `sglang_clients.py`.

One event loop notes when each event arrives and reads its tokens later, so that the clients do not wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from benchmarks.gpu.sglang_requests import body, fill, where
from benchmarks.gpu.vllm_clients import Pair
from benchmarks.gpu.vllm_requests import Broken, Reply

PATIENCE_S = 60.0


def ask_many(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    clients: int,
    max_tokens: int,
    at_most_s: float,
    on_failure: Callable[[Exception], None],
) -> list[Reply]:
    """The answers to prompts. Each client has one request at a time, and begins none after `at_most_s` or when the pair is
    not usable any more. Failures are passed to `on_failure`.
    """
    waiting, replies, until = iter(prompts), [], time.monotonic() + at_most_s

    async def client(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            try:
                replies.append(await _ask(session, pair, prompt, max_tokens))
            except (*Broken, aiohttp.ClientError, TimeoutError) as error:
                on_failure(error)
            if time.monotonic() > until or not pair.is_usable:
                break

    async def run() -> None:
        patience = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=patience, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))

    asyncio.run(run())
    return replies


async def _ask(session: aiohttp.ClientSession, pair: Pair, prompt: Sequence[int], max_tokens: int) -> Reply:
    assert pair.prefill is not None
    place, reply = where(pair.prefill), Reply()
    prefilled = asyncio.create_task(_compute(session, pair.prefill.url, body(prompt, place, max_tokens=1, stream=False)))
    try:
        request = body(prompt, place, max_tokens=max_tokens, stream=True)
        async with session.post(f"{pair.decode.url}/generate", json=request) as answer:
            answer.raise_for_status()
            lines = [(time.monotonic(), line) async for line in answer.content]
        await prefilled
    finally:
        prefilled.cancel()
    fill(reply, lines, max_tokens=max_tokens)
    return reply


async def _compute(session: aiohttp.ClientSession, url: str, request: dict[str, object]) -> None:
    async with session.post(f"{url}/generate", json=request) as answer:
        answer.raise_for_status()
        await answer.read()
