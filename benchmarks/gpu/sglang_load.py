"""Several clients of SGLang servers at once, for `sglang_clients.py`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import aiohttp

from benchmarks.gpu.sglang_requests import body, fill, where
from benchmarks.gpu.vllm_clients import Pair
from benchmarks.gpu.vllm_load import run_clients
from benchmarks.gpu.vllm_requests import Reply

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
    until = time.monotonic() + at_most_s
    return run_clients(
        partial(_ask, pair, itertools.count(), max_tokens),
        prompts,
        clients=clients,
        patience_s=PATIENCE_S,
        on_failure=on_failure,
        goes_on=lambda: time.monotonic() <= until and pair.is_usable,
    )


async def _ask(
    pair: Pair, turns: Iterator[int], max_tokens: int, session: aiohttp.ClientSession, prompt: Sequence[int]
) -> Reply:
    """Undivided servers take turns."""
    place, reply = where(pair.prefill), Reply()
    server = pair.other if pair.prefill is None and pair.other is not None and next(turns) % 2 else pair.decode
    prefilling = (
        [] if pair.prefill is None else [_compute(session, pair.prefill.url, body(prompt, place, max_tokens=1, stream=False))]
    )
    prefilled = asyncio.gather(*prefilling)
    try:
        request = body(prompt, place, max_tokens=max_tokens, stream=True)
        async with session.post(f"{server.url}/generate", json=request) as answer:
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
