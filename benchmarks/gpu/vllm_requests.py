"""Requests to vLLM servers, as a proxy and its clients send them."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from benchmarks.gpu.vllm_connectors import PREFILL
from harness.servers import Server

PATIENCE_S = 20.0
Broken = (OSError, HTTPException, RuntimeError)
"""What a request raises that a server does not answer."""


def prompt_of(rng: random.Random, length: int, *, num_tokens: int = 256) -> list[int]:
    """A random prompt of the first `num_tokens` tokens of the vocabulary."""
    return [rng.randrange(num_tokens) for _ in range(length)]


@dataclass
class Reply:
    """An answer: its tokens, their logprobs if asked for, the seconds from `begun_s`, when decode was asked, until each event
    with tokens, and the seconds of prefill.
    """

    begun_s: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0

    @property
    def gap_ms_max(self) -> float:
        """The longest time between two tokens."""
        return round(max((late - early for early, late in itertools.pairwise(self.times_s)), default=0.0) * 1e3, 1)


def compute(
    prefill: Server,
    prompt: Sequence[int],
    params: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> dict[str, Any]:
    """Send a prompt to prefill. Returns the `kv_transfer_params` of its answer, perhaps none. Raises one of `Broken`."""
    fields = {"max_tokens": 1, "logprobs": None, "kv_transfer_params": params or None}
    with prefill.ask(prompt, timeout_s=timeout_s, headers=headers, **fields) as answer:
        found: dict[str, Any] = json.load(answer)["kv_transfer_params"] or {}
    return found


def hand_over(
    prefill: Server, prompt: Sequence[int], params: Mapping[str, Any] = PREFILL, *, timeout_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Send a prompt to prefill. Returns the `kv_transfer_params` for decode. Raises one of `Broken`."""
    found = compute(prefill, prompt, params, timeout_s=timeout_s)
    if not found:
        raise RuntimeError("prefill has answered without kv_transfer_params")
    return found


def stream(
    server: Server,
    prompt: Sequence[int],
    params: Mapping[str, Any] | None,
    *,
    max_tokens: int,
    logprobs: int | None = None,
    timeout_s: float = PATIENCE_S,
    on_first: Callable[[], None] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """The answer of decode to a prompt, with prefill's `params` or alone. Calls `on_first` at the first token.

    Raises one of `Broken`.
    """
    reply = Reply()
    fields = {"max_tokens": max_tokens, "logprobs": logprobs, "kv_transfer_params": params or None}
    asked = server.ask(prompt, timeout_s=timeout_s, headers=headers, stream=True, **fields)
    with asked as answer:
        for line in answer:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            found = tokens_of(event)
            if found:
                reply.times_s.append(time.monotonic() - reply.begun_s)
                reply.tokens += found
                for choice in event["choices"]:
                    reply.logprobs += (choice["logprobs"] or {}).get("token_logprobs", ())
                if len(reply.times_s) == 1 and on_first is not None:
                    on_first()
    if len(reply.tokens) != max_tokens:
        raise RuntimeError(f"decode has answered with {len(reply.tokens)} of {max_tokens} tokens")
    return reply


def tokens_of(event: Mapping[str, Any]) -> list[int]:
    """The tokens in one event of a stream."""
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]


def num_external(decode: Server) -> float:
    """Prompt tokens that have come to a server from others so far; not a number if it does not answer."""
    try:
        return decode.num_moved()
    except (OSError, KeyError):
        return math.nan
