"""What clients of SGLang servers see, for `sglang_servers.py`.

A client asks prefill and decode at once, and decode answers. All times start then, with the client's request.

`tokens`: how many greedy answers are equal: those of both backends (`equal`), and those of one of them and of the undivided
server. `rows`: milliseconds until decode's first token, medians, without other requests; all columns take turns. `floor_ms` is
the first token of the undivided server, which moves nothing, and `*_second_ms` the time to the second token. `load`: medians
and ranges of the rounds of a number of clients, each with one request at a time: requests per second, the median first token,
the 99th percentile of the time between two tokens; and the longest such time in any round. `clients` has each round.
`undivided` are two servers there, one on each GPU. The pairs take turns, in the other order in every second round. Before them
each pair has a round that does not count, after which its servers keep their objects out of Python's garbage collections
(`/freeze_gc`).
"""

from __future__ import annotations

import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.gpu.sglang_load import ask_many
from benchmarks.gpu.sglang_requests import ask
from benchmarks.gpu.vllm_clients import Pair, Plan, attempt, count_equal, note
from benchmarks.gpu.vllm_load import figures
from benchmarks.gpu.vllm_requests import Reply, prompt_of

NUM_COMPARED = 24
"""Tokens of each answer that are compared."""
WARM_UP, MIN_REPEATS = 2, 3
FIRST_PATIENCE_S = 150.0
"""How long a client waits for a server's first answer, for which it compiles kernels."""
ROW_S, LOAD_S, FREEZE_S = 12.0, 8.0, 10.0
"""No row takes longer, if it has the least number of repeats. No client starts a request after that time."""


def warm_up(pairs: Sequence[Pair], plan: Plan) -> list[Pair]:
    """The pairs that answer a short and a long prompt. Servers compile kernels meanwhile, and introduce themselves."""

    def works(pair: Pair) -> bool:
        acts = [
            partial(ask, pair, prompt_of(random.Random(length), length), max_tokens=8, timeout_s=FIRST_PATIENCE_S)
            for length in (plan.lengths[0], plan.lengths[-1], plan.lengths[0])
        ]
        return all(attempt(pair, plan, act, "the first requests") is not None for act in acts)

    with ThreadPoolExecutor(len(pairs) or 1) as pool:
        return [pair for pair, answers in zip(pairs, pool.map(works, pairs), strict=True) if answers]


def measure_all(pairs: Sequence[Pair], alone: Pair | None, plan: Plan) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete: all figures of one tensor-parallel size, then of the next one."""
    table: dict[str, Any] = {"tokens": [], "rows": [], "load": [], "clients": []}
    prompts = [prompt_of(random.Random(length + place), length) for place, length in enumerate(plan.checked)]
    expected = answers(alone, prompts, plan) if alone is not None else []
    for tp in sorted({pair.tp for pair in pairs}):
        chosen = [pair for pair in pairs if pair.tp == tp]
        table["tokens"].append(tokens(chosen, prompts, expected, plan))
        yield table
        for length in plan.lengths:
            if not plan.is_over(f"{tp} -> 1: first token, {length} tokens"):
                table["rows"].append(row(chosen, alone, length, plan))
                yield table
        asked = [*chosen, *([alone] if alone is not None and alone.other is not None else [])]
        for pair in asked:
            if pair.is_usable and not plan.is_over(f"{tp} -> 1: the load of {pair.name} that does not count"):
                load(pair, max(plan.clients), plan)
                attempt(pair, plan, partial(freeze, pair), "freeze_gc")
        for clients in plan.clients:
            rounds: list[dict[str, Any]] = []
            for turn in range(plan.rounds):
                what = f"{tp} -> 1: load, {clients} clients, round {turn}"
                order = asked[:: -1 if turn % 2 else 1]
                rounds += [load(pair, clients, plan) for pair in order if pair.is_usable and not plan.is_over(what)]
            table["clients"] += rounds
            table["load"].append(load_of(rounds, clients, plan.load[0], tp))
            yield table


def answers(pair: Pair, prompts: Sequence[Sequence[int]], plan: Plan) -> list[Reply | None]:
    """The answers to all prompts, `None` for those that failed or were not asked."""
    found: list[Reply | None] = []
    for prompt in prompts:
        usable = pair.is_usable and not plan.is_over(f"{pair.name} {pair.tp} -> 1: tokens")
        act = partial(ask, pair, prompt, max_tokens=NUM_COMPARED)
        found.append(attempt(pair, plan, act, f"tokens, {len(prompt)} in") if usable else None)
    pair.num_failures = 0
    return found


def tokens(
    chosen: Sequence[Pair], prompts: Sequence[Sequence[int]], expected: Sequence[Reply | None], plan: Plan
) -> dict[str, Any]:
    """How many answers were given, and how many are equal."""
    found = {pair.name: answers(pair, prompts, plan) for pair in chosen}
    line: dict[str, Any] = {"tp": f"{chosen[0].tp} -> 1", "asked": len(prompts)}
    for name, replies in found.items():
        line[f"{name}_answered"] = sum(reply is not None for reply in replies)
        if expected:
            line[f"{name}_undivided"] = count_equal(replies, expected)
    if len(found) == 2:
        line["equal"] = count_equal(*found.values())
    return line


def row(chosen: Sequence[Pair], alone: Pair | None, length: int, plan: Plan) -> dict[str, Any]:
    """The times to the first token at one length, with their ranges."""
    columns: dict[str, tuple[Pair, Callable[[Sequence[int]], Reply]]] = {
        f"{pair.name}_ms": (pair, partial(ask, pair, max_tokens=4)) for pair in chosen
    }
    if alone is not None:
        columns["floor_ms"] = (alone, partial(ask, alone, max_tokens=4))
    times: dict[str, list[float]] = {name: [] for name in columns}
    second: dict[str, list[float]] = {name: [] for name in columns}
    rng, names, begun_s = random.Random(length), list(columns), time.monotonic()
    for turn in range(WARM_UP + plan.repeats):
        if turn >= WARM_UP + MIN_REPEATS and time.monotonic() > begun_s + ROW_S:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            pair, act = columns[name]
            if not pair.is_usable:
                continue
            reply = attempt(pair, plan, partial(act, prompt_of(rng, length)), f"{name}, {length} in")
            if reply is not None and turn >= WARM_UP:
                times[name].append(reply.times_s[0] * 1e3)
                second[name].append(reply.times_s[min(1, len(reply.times_s) - 1)] * 1e3)
    measured = {name: found for name, found in times.items() if found}
    return {
        "tokens": length,
        "tp": f"{chosen[0].tp} -> 1",
        **{name: round(statistics.median(found), 1) for name, found in measured.items()},
        **{f"{name.removesuffix('_ms')}_second_ms": round(statistics.median(second[name]), 1) for name in measured},
        "count": min(map(len, measured.values()), default=0),
        "ranges": {name: [round(min(found), 1), round(max(found), 1)] for name, found in measured.items()},
    }


def load(pair: Pair, clients: int, plan: Plan) -> dict[str, Any]:
    """Requests of several clients at once."""
    rng, (length, max_tokens) = random.Random(9), plan.load
    prompts = [prompt_of(rng, length) for _ in range(clients * plan.per_client)]
    on_failure = partial(note, pair, plan, f"load, {clients} clients")
    begun_s = time.monotonic()
    replies = ask_many(pair, prompts, clients=clients, max_tokens=max_tokens, at_most_s=LOAD_S, on_failure=on_failure)
    elapsed_s = time.monotonic() - begun_s
    return {
        **pair.label,
        "clients": clients,
        "tokens_in": length,
        "tokens_out": max_tokens,
        "elapsed_s": round(elapsed_s, 3),
        **figures(replies, elapsed_s),
    }


def freeze(pair: Pair) -> None:
    """Keep what the servers of a pair have allocated out of later garbage collections, as SGLang's own benchmarks do."""
    for server in filter(None, (pair.prefill, pair.decode, pair.other)):
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/freeze_gc", method="POST"), timeout=FREEZE_S).close()


def load_of(rounds: Sequence[Mapping[str, Any]], clients: int, length: int, tp: int) -> dict[str, Any]:
    """The rounds of all pairs side by side."""
    line: dict[str, Any] = {"concurrency": clients, "tokens": length, "tp": f"{tp} -> 1"}
    for name in dict.fromkeys(each["pair"] for each in rounds):
        own = [each for each in rounds if each["pair"] == name and each["answered"]]
        if not own:
            continue
        line[f"{name}_rounds"] = len(own)
        for column in ("rps", "first_p50_ms", "gap_p99_ms"):
            values = [each[column] for each in own]
            line[f"{name}_{column}"] = round(statistics.median(values), 2)
            line[f"{name}_{column}_range"] = [min(values), max(values)]
        line[f"{name}_max_gap_ms"] = max(each["gap_max_ms"] for each in own)
    return line
