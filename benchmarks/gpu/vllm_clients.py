"""What clients of vLLM servers see, for `vllm_servers.py`.

`tokens`: greedy answers that are equal to those of the undivided server. `same_path` compares with an answer for which that
server had the whole prompt but its last token in its prefix cache, as decode has after a transfer: the last token alone goes
through other kernels than at the end of a prompt, and rounds differently in bfloat16. `whole` compares with its first answer.
`NixlConnector` compares with the answers of that pair with the same tensor-parallel sizes. `external` is vLLM's count of tokens
that decode has not computed, as a share of those it should have received.

`first_token`: milliseconds from the request to decode until its first token, after prefill has answered, without other
requests. `prefill_ms_p50` is the time until prefill has answered. The pairs take turns. `clients`: requests per second through
prefill and decode with a number of clients, each with one request at a time. The time to the first token includes prefill. The
gap is the longest time between two tokens of a request.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from benchmarks.gpu.vllm_connectors import DECODE_ONLY, OTHERS, exchange
from benchmarks.gpu.vllm_load import ask_many
from benchmarks.gpu.vllm_requests import Broken, Reply, compute, num_external, prompt_of, stream
from benchmarks.gpu.vllm_tables import load_of, rows_of
from harness.servers import Server

NUM_COMPARED = 24
"""Tokens of each answer that are compared."""
WARM_UP, MOST_FAILURES = 2, 3
Result = TypeVar("Result")


@dataclass(kw_only=True)
class TimeLimit:
    """A program measures for `limit_s` seconds, and then ends with the results so far. `problems` lists what failed or was left
    out.
    """

    limit_s: float
    begun_s: float = field(default_factory=time.monotonic)
    problems: list[str] = field(default_factory=list)

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
class Plan(TimeLimit):
    """What to measure. `load`: tokens of prompt and answer. `checked`: lengths of prompts whose answers are compared, one token
    more than whole blocks of both sizes. `clients` are numbers of requests at once.
    """

    block: int
    checked: tuple[int, ...]
    lengths: tuple[int, ...]
    clients: tuple[int, ...]
    load: tuple[int, int]
    repeats: int = 11
    rounds: int = 2
    per_client: int = 8

    @classmethod
    def on_gpu(cls, limit_s: float, *, clients: int = 32) -> Plan:
        """For the large model. `clients` is the larger number of requests at once."""
        checked = tuple(length for length in (33, 353, 1025, 2529, 6017, 12001) for _ in range(3))
        return cls(16, checked, (128, 1024, 4096, 16384), (8, clients), (2048, 64), limit_s=limit_s)

    @classmethod
    def on_cpu(cls, limit_s: float) -> Plan:
        """For the small model."""
        return cls(32, (65, 321, 705), (128, 1024), (2, 4), (256, 8), limit_s=limit_s, repeats=3, rounds=1, per_client=2)


@dataclass
class Pair:
    """Servers with one connector. Without `prefill`, decode is asked alone. `other` is decode with another block size, `tp` and
    `decode_tp` are the tensor-parallel sizes.
    """

    name: str
    prefill: Server | None
    decode: Server
    other: Server | None = None
    tp: int = 1
    decode_tp: int = 1
    num_failures: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it has answered most requests."""
        return self.num_failures < MOST_FAILURES

    @property
    def label(self) -> dict[str, Any]:
        """The first columns of its rows."""
        return {"pair": self.name, "tp": f"{self.tp} -> {self.decode_tp}"}


def ask(pair: Pair, prompt: Sequence[int], *, max_tokens: int, decode: Server | None = None) -> Reply:
    """Send one prompt to prefill, and then to decode. Raises one of `Broken`."""
    begun_s, target = time.monotonic(), decode or pair.decode
    if pair.prefill is None:
        return stream(target, prompt, None, max_tokens=max_tokens)
    sent = exchange(pair.name, pair.prefill, target)
    given = compute(pair.prefill, prompt, sent.prefill, headers=sent.headers)
    prefill_s = time.monotonic() - begun_s
    params = given if sent.decode is None else sent.decode
    reply = stream(target, prompt, params, max_tokens=max_tokens, headers=sent.headers)
    reply.prefill_s = prefill_s
    return reply


def attempt(pair: Pair, plan: Plan, act: Callable[[], Result], what: str) -> Result | None:
    """The result of `act`; `None` if it fails, which is noted."""
    try:
        return act()
    except Broken as error:
        note(pair, plan, what, error)
        return None


def note(pair: Pair, plan: Plan, what: str, error: Exception) -> None:
    """Note that a request has failed."""
    pair.num_failures += 1
    plan.problems.append(f"{pair.name} {pair.tp} -> 1: {what}: {type(error).__name__}: {error}")


def measure_all(pairs: list[Pair], plan: Plan) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete."""
    moving = [pair for pair in pairs if pair.prefill and pair.name not in DECODE_ONLY]
    timed = [pair for pair in pairs if pair.name != "undivided" and (pair in moving or not pair.prefill)]
    prompts = [prompt_of(random.Random(length + place), length) for place, length in enumerate(plan.checked)]
    expected = [answers_alone(pair, prompts, plan) for pair in pairs if pair.name == "undivided"]
    yield {"tokens": tokens([(pair, pair.decode) for pair in moving], prompts, expected, plan)}
    yield {"transport": {f"{pair.name} {pair.tp} -> 1": transport(pair) for pair in moving}}
    rows: list[dict[str, Any]] = []
    for length in plan.lengths if timed else ():
        rows += [] if plan.is_over(f"first token, {length} tokens") else first_token(timed, length, plan)
        yield {"rows": rows_of(rows), "first_token": rows}
    loads: list[dict[str, Any]] = []
    loaded = [pair for pair in pairs if pair.prefill and pair.name not in OTHERS]
    for clients, turn in itertools.product(plan.clients, range(plan.rounds)):
        what = f"load, {clients} clients, round {turn}"
        loads += [load(pair, clients, plan) for pair in loaded if pair.is_usable and not plan.is_over(f"{pair.name}: {what}")]
        yield {"load": load_of(loads), "clients": loads}
    others = [(pair, pair.other) for pair in moving if pair.other and not plan.is_over(f"{pair.name}: another block size")]
    yield {"tokens_of_other_block": tokens(others, prompts, expected, plan)}


def answers_alone(alone: Pair, prompts: list[list[int]], plan: Plan) -> dict[str, list[Reply | None]]:
    """The undivided server's first answers (`whole`), and those with the prompt in its prefix cache (`same_path`)."""
    found: dict[str, list[Reply | None]] = {"whole": [], "same_path": []}
    for prompt, replies in itertools.product(prompts, found.values()):
        replies.append(attempt(alone, plan, partial(ask, alone, prompt, max_tokens=NUM_COMPARED), "tokens"))
    return found


def tokens(
    asked: Sequence[tuple[Pair, Server]],
    prompts: list[list[int]],
    expected: list[dict[str, list[Reply | None]]],
    plan: Plan,
) -> list[dict[str, Any]]:
    """One row for each pair and decode server: how many answers are equal to others."""
    found = []
    for pair, decode in asked:
        before = num_external(decode)
        replies = answers(pair, decode, prompts, plan)
        found.append((pair, replies, num_external(decode) - before))
    theirs = {pair.tp: replies for pair, replies, _ in found if pair.name == "NixlConnector"}
    return [
        {
            **pair.label,
            "asked": len(prompts),
            "answered": sum(reply is not None for reply in replies),
            **{name: count_equal(replies, others) for each in expected for name, others in each.items()},
            "NixlConnector": count_equal(replies, theirs[pair.tp]) if pair.tp in theirs else None,
            "external": round(external / sum(len(prompt) - 1 for prompt in prompts), 4),
        }
        for pair, replies, external in found
    ]


def answers(pair: Pair, decode: Server, prompts: list[list[int]], plan: Plan) -> list[Reply | None]:
    """The answers of one decode server of a pair to all prompts, `None` for those that failed or were not asked."""
    found: list[Reply | None] = []
    for prompt in prompts:
        usable = pair.is_usable and not plan.is_over(f"{pair.name}: tokens")
        act = partial(ask, pair, prompt, max_tokens=NUM_COMPARED, decode=decode)
        found.append(attempt(pair, plan, act, f"tokens, {len(prompt)} in") if usable else None)
    pair.num_failures = 0
    return found


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
    replies: list[list[Reply]] = [[] for _ in pairs]
    for turn in range(WARM_UP + plan.repeats):
        for place in sorted(range(len(pairs)), key=lambda place: (place - turn) % len(pairs)):
            pair, prompt = pairs[place], prompt_of(rng, length)
            if not pair.is_usable:
                continue
            reply = attempt(pair, plan, partial(ask, pair, prompt, max_tokens=4), f"first token, {length} in")
            if reply is not None and turn >= WARM_UP:
                replies[place].append(reply)
    return [
        {
            **pair.label,
            "tokens": length,
            **spread([reply.times_s[0] * 1e3 for reply in found]),
            "prefill_ms_p50": round(statistics.median(reply.prefill_s for reply in found) * 1e3, 1),
            "count": len(found),
        }
        for pair, found in zip(pairs, replies, strict=True)
        if found
    ]


def spread(times_ms: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most."""
    found = {"ms_p50": statistics.median(times_ms), "ms_min": min(times_ms), "ms_max": max(times_ms)}
    return {name: round(value, 1) for name, value in found.items()}


def load(pair: Pair, clients: int, plan: Plan) -> dict[str, Any]:
    """Requests of several clients at once."""
    rng = random.Random(9)
    length, max_tokens = plan.load
    prompts = [prompt_of(rng, length) for _ in range(clients * plan.per_client)]
    assert pair.prefill is not None
    on_failure = partial(note, pair, plan, f"load, {clients} clients")
    begun_s = time.monotonic()
    replies = ask_many(
        pair.prefill, pair.decode, pair.name, prompts, clients=clients, max_tokens=max_tokens, on_failure=on_failure
    )
    elapsed_s = time.monotonic() - begun_s
    first_s = sorted(reply.prefill_s + reply.times_s[0] for reply in replies)
    return {
        **pair.label,
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
