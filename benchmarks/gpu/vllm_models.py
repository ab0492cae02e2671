"""vLLM servers of other models, and prefill servers that are killed, on one or two GPUs::

    python -m benchmarks.gpu.vllm_models --gpus 1 --limit-s 400 --json docs/benchmarks/vllm-h200-models.json

The models have random weights (`vllm_weights.py`). Prefill and decode are servers of their own with this library's connector,
over `nvlink`. All compute at most `CHUNK` tokens in a step, and prompts are one token longer than a multiple of it: so every
server computes the last token alone in any case, and an answer of prefill alone is rounded as one of decode after it.

`tokens`: answers through both servers that are equal to those of the prefill server alone, also with blocks of other sizes on
decode. `logprob_max` is the largest difference of a logprob. `alone` counts the equal answers when each server computes all of
a request: each process chooses vLLM's kernels for prompts of Mamba2 by timing, so two servers may round differently;
`alone_logprob_max` is the largest difference of these, and so what rounding alone does with other layouts. `external`
is vLLM's count of tokens that decode has not computed, as a share of those it should have received. `decode_equal` and
`decode_logprob_max` compare with decode alone, where prefill computes with other kernels.

`deepseek-v2-dcp2` is DeepSeek-V2 at TP 2, whose ranks divide the tokens (DCP 2), on decode with larger blocks by 16 at a time;
`deepseek-v2 -> deepseek-v2-dcp2` is prefill at TP 1 and decode at TP 2. `llama-fp8` keeps KV in FP8 on decode only.

`killed`: when prefill gets SIGKILL. `after`: at the first token of decode's answer. `before`: prefill has computed the request,
and decode is asked next. `during`: both were asked at once, and prefill has computed half of it, so decode already gets chunks.
Answers are compared with those of the server that has computed the prompt. `first_token_ms`: from the request to decode
(`before`) or from the signal (`during`) to the first token. `alone_ms` is decode's time to the first token of the same prompt
without a prefill server. `failed_loads` is the connector's own count.

`--gpus 0` tries the program on the CPU with small models.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.vllm_clients import Plan
from benchmarks.gpu.vllm_connectors import FP8, PREFILL
from benchmarks.gpu.vllm_requests import Broken, Reply, hand_over, num_external, prompt_of, stream
from benchmarks.gpu.vllm_servers import SMALL, Wanted, running, start, terminate
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import MODELS, model_writer
from harness.conditions import conditions
from harness.servers import Server

PREFILLS = ("prefill", "spare")
CHUNK, SMALL_CHUNK = 2004, 300
"""Tokens of a step, on the GPU and on the CPU. Not a multiple of a block."""
CHUNKS = (1, 1, 2, 2, 4, 4)
"""Steps of each prompt that is compared."""
MOST_CHUNKS, MOST_SMALL_CHUNKS = 8, 4
"""Steps of the prompt whose prefill is killed, on the GPU and on the CPU."""


@dataclass(frozen=True)
class Variant:
    """Servers of a model with further options: of all servers, of decode, and of decode with larger blocks."""

    model: str
    tp: int = 1
    every: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    larger: tuple[str, ...] = ()


VARIANTS = {
    **{name: Variant(name) for name in MODELS},
    "deepseek-v2-dcp2": Variant(
        "deepseek-v2", 2, ("--decode-context-parallel-size", "2"), larger=("--cp-kv-cache-interleave-size", "16")
    ),
    "llama-fp8": Variant("llama", decode=FP8),
}
NUM_TOKENS = 48
NBYTES = 6_000_000_000
"""Bytes of KV: twice a prompt of `MOST_CHUNKS` for the largest model."""
COMPILING_S = 120.0
"""How long a first answer may take, for which kernels are compiled."""


@dataclass
class Fleet:
    """The servers of one model: decode by the size of its blocks, and what servers answer alone, by port and seed."""

    model: str
    prefills: list[Server]
    decodes: Mapping[int, Server]
    plan: Plan
    chunk: int
    num_chunks: int
    alone: dict[tuple[int, int], Reply] = field(default_factory=dict)

    @property
    def decode(self) -> Server:
        return self.decodes[self.plan.block]

    def prompt(self, chunks: int, seed: int) -> list[int]:
        """A random prompt."""
        return prompt_of(random.Random(seed), chunks * self.chunk + 1)

    def answer(self, server: Server, chunks: int, seed: int) -> Reply:
        """What a server answers alone, asked a second time: the first time compiles."""
        found = self.alone.get((server.port, seed))
        if found is None:
            prompt = self.prompt(chunks, seed)
            for timeout_s in (COMPILING_S, COMPILING_S):
                found = stream(server, prompt, None, max_tokens=NUM_TOKENS, logprobs=0, timeout_s=timeout_s)
            assert found is not None
            self.alone[server.port, seed] = found
        return found


def difference(found: Reply, expected: Reply) -> dict[str, Any]:
    """How far an answer is from the expected one. Logprobs are compared up to the first other token."""
    pairs = enumerate(zip(found.tokens, expected.tokens, strict=False))
    alike = next((place for place, (one, other) in pairs if one != other), len(expected.tokens))
    differences = [abs(one - other) for one, other in zip(found.logprobs[:alike], expected.logprobs[:alike], strict=False)]
    return {"equal": found.tokens == expected.tokens, "logprob_max": round(max(differences, default=math.nan), 5)}


def tokens(fleet: Fleet, block: int) -> dict[str, Any]:
    """How many answers of decode with blocks of `block` tokens are those of prefill alone."""
    prefill, decode, plan = fleet.prefills[0], fleet.decodes[block], fleet.plan
    rows, own, others, num_tokens, hits = [], [], [], 0, 0.0
    for seed, chunks in enumerate(CHUNKS):
        what = f"{fleet.model}, blocks of {block}, {chunks} chunks"
        if plan.is_over(what):
            break
        try:
            expected, alone = (fleet.answer(server, chunks, seed) for server in (prefill, decode))
            prompt = fleet.prompt(chunks, seed)
            before = num_external(decode)
            params = hand_over(prefill, prompt, timeout_s=COMPILING_S)
            found = stream(decode, prompt, params, max_tokens=NUM_TOKENS, logprobs=0)
            hits, num_tokens = hits + num_external(decode) - before, num_tokens + len(prompt) - 1
            rows.append(difference(found, expected))
            own.append(difference(found, alone))
            others.append(difference(alone, expected))
        except Broken as error:
            plan.problems.append(f"{what}: {type(error).__name__}: {error}")
    return {
        "model": fleet.model,
        "blocks": f"{plan.block} -> {block}",
        "vllm_block": block_size(decode),
        "asked": len(CHUNKS),
        "answered": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "logprob_max": max((row["logprob_max"] for row in rows), default=None),
        "alone": sum(row["equal"] for row in others),
        "alone_logprob_max": max((row["logprob_max"] for row in others), default=None),
        "decode_equal": sum(row["equal"] for row in own),
        "decode_logprob_max": max((row["logprob_max"] for row in own), default=None),
        "external": round(hits / num_tokens, 4) if num_tokens else None,
    }


def block_size(server: Server) -> str:
    """The tokens of a block that vLLM has chosen: hybrid models get larger ones than asked for."""
    with suppress(OSError):
        found = re.search(r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)"', server.metrics(), re.MULTILINE)
        return found[1] if found else "unknown"
    return "unknown"


def num_failed(server: Server) -> float:
    """Loads of a server that have failed so far; 0 if it has counted none."""
    try:
        return server.metric("vllm:disagg_failed_loads_total")
    except (OSError, KeyError):
        return 0.0


def killed(fleet: Fleet) -> Iterator[dict[str, Any]]:
    """One row for each moment. One prefill server is killed after one request and before another, the spare one during one."""
    kept: dict[int, dict[str, Any]] = {}
    acts: dict[str, Callable[[int], tuple[Reply, float]]] = {
        "after": partial(after, fleet, kept),
        "before": partial(before, fleet, kept),
    }
    if len(fleet.prefills) > 1:
        acts["during"] = partial(during, fleet)
    for seed, moment in enumerate(acts, start=100):
        what = f"{fleet.model}, prefill killed {moment}"
        if fleet.plan.is_over(what):
            return
        try:
            alone, failed = fleet.answer(fleet.decode, fleet.num_chunks, seed), num_failed(fleet.decode)
            expected = fleet.answer(fleet.prefills[0], fleet.num_chunks, seed) if moment == "after" else alone
            found, first_s = acts[moment](seed)
        except (*Broken, KeyError) as error:
            fleet.plan.problems.append(f"{what}: {type(error).__name__}: {error}")
            continue
        yield {
            "model": fleet.model,
            "killed": moment,
            "tokens": fleet.num_chunks * fleet.chunk + 1,
            **difference(found, expected),
            "failed_loads": num_failed(fleet.decode) - failed,
            "first_token_ms": round(first_s * 1e3, 1),
            "alone_ms": round(alone.times_s[0] * 1e3, 1),
            "gap_ms_max": found.gap_ms_max,
        }


def after(fleet: Fleet, kept: dict[int, dict[str, Any]], seed: int) -> tuple[Reply, float]:
    """Prefill dies at the first token of the answer. It has computed the request of `before` as well, which `kept` gets."""
    prefill, decode, first = fleet.prefills[0], fleet.decode, threading.Event()
    prompt, other = (fleet.prompt(fleet.num_chunks, each) for each in (seed, seed + 1))
    params, kept[seed + 1] = (hand_over(prefill, each, timeout_s=COMPILING_S) for each in (prompt, other))
    with ThreadPoolExecutor(1) as pool:
        asked = partial(stream, decode, prompt, params, max_tokens=NUM_TOKENS, logprobs=0, on_first=first.set)
        answer: Future[Reply] = pool.submit(asked)
        first.wait(COMPILING_S)
        prefill.kill()
        found = answer.result()
    return found, found.times_s[0]


def before(fleet: Fleet, kept: Mapping[int, dict[str, Any]], seed: int) -> tuple[Reply, float]:
    """Decode is asked for a request whose prefill server has died."""
    prompt = fleet.prompt(fleet.num_chunks, seed)
    found = stream(fleet.decode, prompt, kept[seed], max_tokens=NUM_TOKENS, logprobs=0, timeout_s=COMPILING_S)
    return found, found.times_s[0]


def during(fleet: Fleet, seed: int) -> tuple[Reply, float]:
    """Both servers are asked at once, and prefill dies halfway."""
    prefill, decode = fleet.prefills[-1], fleet.decode
    other = fleet.prompt(fleet.num_chunks, seed + 1)
    first = hand_over(prefill, other, timeout_s=COMPILING_S)  # compiles; then both connect
    stream(decode, other, first, max_tokens=2, timeout_s=COMPILING_S)
    begun_s = time.monotonic()
    params = hand_over(prefill, other)
    half_s = (time.monotonic() - begun_s) / 2
    stream(decode, other, params, max_tokens=2)
    prompt, request = fleet.prompt(fleet.num_chunks, seed), secrets.token_hex(16)
    with ThreadPoolExecutor(2) as pool:
        given = {**PREFILL, "remote_request_id": request}
        lost: Future[dict[str, Any]] = pool.submit(partial(hand_over, prefill, prompt, given))
        asked = partial(stream, decode, prompt, {**params, "remote_request_id": request})
        answer: Future[Reply] = pool.submit(partial(asked, max_tokens=NUM_TOKENS, logprobs=0, timeout_s=COMPILING_S))
        time.sleep(half_s)
        killed_s = time.monotonic()
        prefill.kill()
        found = answer.result()
        with suppress(*Broken):
            lost.result()
    return found, found.begun_s + found.times_s[0] - killed_s


def wanted(
    model: str, prefills: tuple[str, ...], blocks: tuple[int, ...], *, chunk: int, gpus: int, nbytes: int
) -> Iterator[Wanted]:
    """The servers of a model: prefill, and decode for each block size."""
    connector = "nvlink" if gpus else "nixl"
    kind = VARIANTS[model]
    for name in prefills:
        yield Wanted(f"{model} {name}", connector, 0, blocks[0], nbytes, chunk, kind.tp, more=kind.every)
    for block in blocks:
        more = (*kind.every, *kind.decode, *(kind.larger if block > blocks[0] else ()))
        yield Wanted(f"{model} decode {block}", connector, 1, block, nbytes, chunk, kind.tp, more=more)


def fleet_of(model: str, ready: Mapping[str, Server], plan: Plan, *, chunk: int, num_chunks: int) -> Fleet | None:
    """The servers of a model that have started, if prefill and decode are among them."""
    prefills = [ready[f"{model} {name}"] for name in PREFILLS if f"{model} {name}" in ready]
    decodes = {block: ready[name] for block in (plan.block, 2 * plan.block) if (name := f"{model} decode {block}") in ready}
    return Fleet(model, prefills, decodes, plan, chunk, num_chunks) if prefills and plan.block in decodes else None


def crossed(fleets: list[Fleet]) -> Iterator[Fleet]:
    """Prefill of one variant of a model and decode of another one with the same format."""
    for one, two in itertools.permutations(fleets, 2):
        kinds = VARIANTS[one.model], VARIANTS[two.model]
        if kinds[0].model == kinds[1].model and not (kinds[0].decode or kinds[1].decode):
            yield replace(one, model=f"{one.model} -> {two.model}", decodes=two.decodes)


def measure(fleets: list[Fleet], *, kills: bool) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete."""
    rows: list[dict[str, Any]] = []
    for fleet in [*fleets, *crossed(fleets)]:
        for block in fleet.decodes:
            rows.append(tokens(fleet, block))
            yield {"tokens": rows}
    deaths: list[dict[str, Any]] = []
    for fleet in fleets if kills else ():
        for row in killed(fleet):
            deaths.append(row)
            yield {"killed": deaths}


def main() -> None:
    """Start the servers, measure, and write the table."""
    parser = server_options(__doc__, gpus=1, limit_s=400.0, start_s=200.0)
    parser.add_argument("--models", nargs="+", choices=list(VARIANTS), default=list(MODELS))
    parser.add_argument("--no-spare", action="store_true", help="start one prefill server only, and leave out `during`")
    parser.add_argument("--no-deaths", action="store_true", help="leave out `killed`")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, terminate)
    plan = Plan.on_gpu(given.limit_s) if given.gpus else Plan.on_cpu(given.limit_s)
    chunk, num_chunks = (CHUNK, MOST_CHUNKS) if given.gpus else (SMALL_CHUNK, MOST_SMALL_CHUNKS)
    write = model_writer(given.gpus)
    prefills = PREFILLS[:1] if given.no_spare else PREFILLS
    table: dict[str, Any] = {**conditions(), "gpus": given.gpus, "chunk": chunk}
    with tempfile.TemporaryDirectory() as folder:
        starts = {}
        for model in given.models:
            path = write(VARIANTS[model].model, Path(folder) / model)
            blocks = (plan.block,) if model == "llama" else (plan.block, 2 * plan.block)
            nbytes = SMALL if given.no_deaths else NBYTES
            for one in wanted(model, prefills, blocks, chunk=chunk, gpus=given.gpus, nbytes=nbytes):
                starts[one.name] = partial(start, one, path, given.gpus)
        print(f"the models are written after {plan.elapsed_s():.0f} s", flush=True)
        with running(starts, plan.problems, patience_s=given.start_s, logs=given.logs) as ready:
            found = [fleet_of(model, ready, plan, chunk=chunk, num_chunks=num_chunks) for model in given.models]
            for part in measure([fleet for fleet in found if fleet is not None], kills=not given.no_deaths):
                table.update(part)
                given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
    show(table, plan.problems, elapsed_s=plan.elapsed_s())


if __name__ == "__main__":
    main()
