"""What clients of vLLM servers see, for `vllm_servers.py`.

`tokens`: greedy answers that are equal to those of the undivided server. `same_path` compares with an answer for which that
server had the whole prompt but its last token in its prefix cache, as decode has after a transfer: the last token alone goes
through other kernels than at the end of a prompt, and rounds differently in bfloat16. `whole` compares with its first answer.
`external` is vLLM's count of tokens that decode has not computed, as a share of those it should have received.

`first_token`: milliseconds from the request to decode until its first token, after prefill has answered, without other
requests. The pairs take turns. `load`: requests per second through prefill and decode with a number of clients, each with one
request at a time. The time to the first token includes prefill. The gap is the longest time between two tokens of a request.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Any

from disagg.commands.shell.text import plain_table, table_text
from harness.servers import Server

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` that vLLM's proxies send to prefill."""
NUM_COMPARED = 24
"""Tokens of each answer that are compared."""
WARM_UP, MOST_FAILURES, PATIENCE_S = 2, 3, 20.0
Broken = (OSError, HTTPException, RuntimeError)
"""What a request raises that a server does not answer."""


@dataclass
class Plan:
    """What to measure. `load`: tokens of prompt and answer. `checked`: lengths of prompts whose answers are compared, one token
    more than whole blocks of both sizes.
    """

    block: int
    checked: tuple[int, ...]
    lengths: tuple[int, ...]
    clients: tuple[int, ...]
    load: tuple[int, int]
    limit_s: float
    repeats: int = 9
    rounds: int = 2
    per_client: int = 8
    begun_s: float = field(default_factory=time.monotonic)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def on_gpu(cls, limit_s: float) -> Plan:
        """For the large model."""
        checked = tuple(length for length in (33, 353, 1025, 2529, 6017, 12001) for _ in range(3))
        return cls(16, checked, (128, 1024, 4096, 16384), (8, 32), (2048, 64), limit_s)

    @classmethod
    def on_cpu(cls, limit_s: float) -> Plan:
        """For the small model."""
        return cls(32, (65, 321, 705), (128, 1024), (2, 4), (256, 8), limit_s, repeats=3, rounds=1, per_client=2)

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun_s

    def is_over(self, what: str) -> bool:
        """Whether the time limit has passed. If so, notes that `what` was not measured."""
        if self.elapsed_s() < self.limit_s:
            return False
        self.problems.append(f"{what}: not measured, since the time is over")
        return True


@dataclass
class Pair:
    """Servers with one connector. Without `prefill`, decode is asked alone. `other` is decode with another block size."""

    name: str
    prefill: Server | None
    decode: Server
    other: Server | None
    num_failures: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it has answered most requests."""
        return self.num_failures < MOST_FAILURES


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


def ask(pair: Pair, prompt: Sequence[int], *, max_tokens: int, decode: Server | None = None) -> Reply:
    """Send one prompt to prefill, and then to decode. Raises one of `Broken`."""
    begun_s = time.monotonic()
    params = None if pair.prefill is None else hand_over(pair.prefill, prompt)
    prefill_s = time.monotonic() - begun_s
    reply = stream(decode or pair.decode, prompt, params, max_tokens=max_tokens)
    reply.prefill_s = prefill_s
    return reply


def hand_over(
    prefill: Server, prompt: Sequence[int], params: Mapping[str, Any] = PREFILL, *, timeout_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Send a prompt to prefill. Returns the `kv_transfer_params` for decode. Raises one of `Broken`."""
    with prefill.ask(prompt, timeout_s=timeout_s, max_tokens=1, logprobs=None, kv_transfer_params=params) as answer:
        found: dict[str, Any] | None = json.load(answer)["kv_transfer_params"]
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
) -> Reply:
    """The answer of decode to a prompt, with prefill's `params` or alone. Calls `on_first` at the first token.

    Raises one of `Broken`.
    """
    reply = Reply()
    fields = {} if params is None else {"kv_transfer_params": params}
    asked = server.ask(prompt, timeout_s=timeout_s, max_tokens=max_tokens, logprobs=logprobs, stream=True, **fields)
    with asked as answer:
        for line in answer:
            choices = json.loads(line[6:]).get("choices", ()) if line.startswith(b"data: {") else ()
            found = [token for choice in choices for token in choice.get("token_ids") or ()]
            if found:
                reply.times_s.append(time.monotonic() - reply.begun_s)
                reply.tokens += found
                reply.logprobs += [each for choice in choices for each in (choice["logprobs"] or {}).get("token_logprobs", ())]
                if len(reply.times_s) == 1 and on_first is not None:
                    on_first()
    if len(reply.tokens) != max_tokens:
        raise RuntimeError(f"decode has answered with {len(reply.tokens)} of {max_tokens} tokens")
    return reply


def attempt(pair: Pair, plan: Plan, act: Callable[[], Reply], what: str) -> Reply | None:
    """The result of `act`; `None` if it fails, which is noted."""
    try:
        return act()
    except Broken as error:
        pair.num_failures += 1
        plan.problems.append(f"{pair.name}: {what}: {type(error).__name__}: {error}")
        return None


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """A random prompt."""
    return [rng.randrange(256) for _ in range(length)]


def measure_all(pairs: list[Pair], plan: Plan) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete."""
    moving = [pair for pair in pairs if pair.prefill]
    timed = [pair for pair in pairs if pair.name != "undivided"]
    prompts = [prompt_of(random.Random(length + place), length) for place, length in enumerate(plan.checked)]
    expected = [answers_alone(pair, prompts, plan) for pair in pairs if pair.name == "undivided"]
    yield {"tokens": [tokens(pair, pair.decode, prompts, expected, plan) for pair in moving]}
    yield {"transport": {pair.name: transport(pair) for pair in moving}}
    rows: list[dict[str, Any]] = []
    for length in plan.lengths if timed else ():
        rows += [] if plan.is_over(f"first token, {length} tokens") else first_token(timed, length, plan)
        yield {"first_token": rows}
    loads: list[dict[str, Any]] = []
    for clients, turn in itertools.product(plan.clients, range(plan.rounds)):
        what = f"load, {clients} clients, round {turn}"
        loads += [load(pair, clients, plan) for pair in moving if pair.is_usable and not plan.is_over(f"{pair.name}: {what}")]
        yield {"load": loads}
    others = [(pair, pair.other) for pair in moving if pair.other and not plan.is_over(f"{pair.name}: another block size")]
    yield {"tokens_of_other_block": [tokens(pair, other, prompts, expected, plan) for pair, other in others]}


def answers_alone(alone: Pair, prompts: list[list[int]], plan: Plan) -> dict[str, list[Reply | None]]:
    """The undivided server's first answers (`whole`), and those with the prompt in its prefix cache (`same_path`)."""
    found: dict[str, list[Reply | None]] = {"whole": [], "same_path": []}
    for prompt, replies in itertools.product(prompts, found.values()):
        replies.append(attempt(alone, plan, partial(ask, alone, prompt, max_tokens=NUM_COMPARED), "tokens"))
    return found


def tokens(
    pair: Pair, decode: Server, prompts: list[list[int]], expected: list[dict[str, list[Reply | None]]], plan: Plan
) -> dict[str, Any]:
    """How many answers of a pair are those of the undivided server, if there is one."""
    before, found = num_external(decode), []
    for prompt in prompts:
        if pair.is_usable and not plan.is_over(f"{pair.name}: tokens"):
            act = partial(ask, pair, prompt, max_tokens=NUM_COMPARED, decode=decode)
            found.append(attempt(pair, plan, act, f"tokens, {len(prompt)} in"))
    pair.num_failures = 0
    return {
        "pair": pair.name,
        "asked": len(prompts),
        "answered": sum(reply is not None for reply in found),
        **{name: count_equal(found, replies) for each in expected for name, replies in each.items()},
        "external": round((num_external(decode) - before) / sum(len(prompt) - 1 for prompt in prompts), 4),
    }


def num_external(decode: Server) -> float:
    """Tokens that a server has not computed so far; not a number if it does not answer."""
    try:
        return decode.metric("vllm:external_prefix_cache_hits_total")
    except (OSError, KeyError):
        return math.nan


def count_equal(found: Sequence[Reply | None], expected: Sequence[Reply | None]) -> int:
    """The answers with equal tokens."""
    return sum(bool(one and other and one.tokens == other.tokens) for one, other in zip(found, expected, strict=False))


def transport(pair: Pair) -> str:
    """The path of the bytes, from the log of prefill, if its connector reports one."""
    assert pair.prefill is not None
    found = re.findall(r"requests are written to decode by (.*)", pair.prefill.log(length=1 << 22))
    return str(found[-1]) if found else "not reported"


def first_token(pairs: list[Pair], length: int, plan: Plan) -> list[dict[str, Any]]:
    """One row for each pair."""
    rng = random.Random(length)
    times: dict[str, list[float]] = {pair.name: [] for pair in pairs}
    for turn in range(WARM_UP + plan.repeats):
        for pair in pairs[turn % len(pairs) :] + pairs[: turn % len(pairs)]:
            if not pair.is_usable:
                continue
            prompt = prompt_of(rng, length)
            reply = attempt(pair, plan, partial(ask, pair, prompt, max_tokens=4), f"first token, {length} in")
            if reply is not None and turn >= WARM_UP:
                times[pair.name].append(reply.times_s[0] * 1e3)
    return [
        {
            "pair": name,
            "tokens": length,
            "ms_p50": round(statistics.median(found), 1),
            "ms_min": round(min(found), 1),
            "ms_max": round(max(found), 1),
            "count": len(found),
        }
        for name, found in times.items()
        if found
    ]


def load(pair: Pair, clients: int, plan: Plan) -> dict[str, Any]:
    """Requests of several clients at once."""
    rng = random.Random(9)
    length, max_tokens = plan.load
    prompts = [prompt_of(rng, length) for _ in range(clients * plan.per_client)]
    what = f"load, {clients} clients"
    begun_s = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        found = pool.map(lambda prompt: attempt(pair, plan, partial(ask, pair, prompt, max_tokens=max_tokens), what), prompts)
        replies = [reply for reply in found if reply is not None]
    elapsed_s = time.monotonic() - begun_s
    first_s = sorted(reply.prefill_s + reply.times_s[0] for reply in replies)
    return {
        "pair": pair.name,
        "clients": clients,
        "tokens_in": length,
        "tokens_out": max_tokens,
        "asked": len(prompts),
        "answered": len(replies),
        "requests_per_s": round(len(replies) / elapsed_s, 2),
        "first_token_ms_p50": round(statistics.median(first_s) * 1e3, 1) if first_s else None,
        "first_token_ms_max": round(first_s[-1] * 1e3, 1) if first_s else None,
        "gap_ms_max": max((reply.gap_ms_max for reply in replies), default=None),
    }


def show(table: dict[str, Any], plan: Plan) -> None:
    """Print the table, and what could not be measured."""
    for part, rows in table.items():
        if isinstance(rows, list) and rows:
            lines = [[str(value) for value in row.values()] for row in rows]
            print(f"\n{part}\n{table_text(plain_table(list(rows[0]), lines, right=list(rows[0])))}")
    for name, path in table.get("transport", {}).items():
        print(f"{name}: {path}")
    for problem in plan.problems[:20]:
        print(f"PROBLEM {problem}")
    print(f"{len(plan.problems)} problems; {plan.elapsed_s():.0f} s", flush=True)
