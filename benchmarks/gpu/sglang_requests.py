"""Requests to SGLang servers, as SGLang's router and its clients send them: to prefill and decode at once, and decode answers.

They use SGLang's own interface, which gives the ids of tokens. All times are from when both servers were asked.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpu.vllm_clients import Pair
from benchmarks.gpu.vllm_requests import PATIENCE_S, Reply
from harness.servers import Server


def where(prefill: Server | None) -> dict[str, Any]:
    """What the router adds to a new request, for both servers. Nothing for a server that does everything."""
    if prefill is None:
        return {}
    room = secrets.randbits(62) + 1
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room}


def body(prompt: Sequence[int], place: Mapping[str, Any], *, max_tokens: int, stream: bool) -> dict[str, Any]:
    """A greedy request."""
    chosen = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": chosen, "stream": stream, **place}


def ask(pair: Pair, prompt: Sequence[int], *, max_tokens: int, timeout_s: float = PATIENCE_S) -> Reply:
    """Send a prompt to both servers of a pair at once, or to the one that does everything. Raises one of `Broken`."""
    place, pool, reply = where(pair.prefill), ThreadPoolExecutor(1), Reply()
    try:
        asked = pool.submit(compute, pair.prefill, prompt, place, timeout_s=timeout_s) if pair.prefill is not None else None
        with _post(pair.decode, body(prompt, place, max_tokens=max_tokens, stream=True), timeout_s) as answer:
            fill(reply, ((time.monotonic(), line) for line in answer), max_tokens=max_tokens)
        if asked is not None:
            reply.prefill_s = asked.result().times_s[0]
    finally:
        pool.shutdown(wait=False)  # if decode has failed, prefill may wait for it for long
    return reply


def compute(prefill: Server, prompt: Sequence[int], place: Mapping[str, Any], *, timeout_s: float = PATIENCE_S) -> Reply:
    """Send a prompt to prefill only, and wait for its answer. Raises one of `Broken`."""
    reply = Reply()
    with _post(prefill, body(prompt, place, max_tokens=1, stream=False), timeout_s) as answer:
        reply.tokens = json.load(answer)["output_ids"]
    reply.times_s.append(time.monotonic() - reply.begun_s)
    return reply


def _post(server: Server, request: Mapping[str, Any], timeout_s: float) -> Any:
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/generate", data=json.dumps(request).encode(), headers=headers)
    return urllib.request.urlopen(asked, timeout=timeout_s)


def fill(reply: Reply, lines: Iterable[tuple[float, bytes]], *, max_tokens: int) -> None:
    """Fill in a reply from the lines of a stream and the time of each. An event has all tokens so far.

    Raises `RuntimeError` if there are not `max_tokens` in the end.
    """
    event: dict[str, Any] = {}
    for at_s, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        found = event.get("output_ids", [])
        if len(found) > len(reply.tokens):
            reply.times_s.append(at_s - reply.begun_s)
            reply.tokens = found
    if len(reply.tokens) != max_tokens:
        why = event.get("error") or event.get("meta_info", {}).get("finish_reason")
        raise RuntimeError(f"decode has answered with {len(reply.tokens)} of {max_tokens} tokens: {why}")
