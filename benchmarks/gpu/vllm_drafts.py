"""vLLM servers that speculate, with this library's connector: are as many drafts accepted after a hand-over as alone?

    python -m benchmarks.gpu.vllm_drafts --gpus 2 --limit-s 240 --json docs/benchmarks/vllm-drafts-2xgpu.json

Prefill is on the first half of the GPUs, and decode on the second one. The model is that of `vllm_servers.py`, made so that an
EAGLE head can be right: only its first layer changes what it passes on, and the head has that layer (`write_pair`). Servers
named `plain` have the model alone.

`drafts`: a row for each length of the prompts. `accepted` and `drafted` are vLLM's counts of tokens for all answers of decode,
`alone` when it computes the prompts, `moved` when prefill speculates too, and `without` when prefill has no head, so that the
head's KV is missing. `equal`: how many answers are those of decode alone, of `asked`; `logprob_max` is the largest difference.
As in `vllm_models.py` prompts are one token longer than a multiple of a step: every server computes the last token alone.

`first_token`: milliseconds from the request to decode, after prefill has answered, until the first token; medians of `count`
requests, all servers in turns. `plain` and `eagle` are pairs without and with heads on both sides, and those named `_alone`
decode servers that compute the prompt.

`--gpus 0` tries the program on the CPU with a small model.
"""

from __future__ import annotations

import importlib
import json
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.vllm_clients import WARM_UP, Plan
from benchmarks.gpu.vllm_models import CHUNK, COMPILING_S, SMALL_CHUNK, difference
from benchmarks.gpu.vllm_requests import Broken, Reply, hand_over, num_external, prompt_of, stream
from benchmarks.gpu.vllm_servers import Wanted, running, start, terminate
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import model_writer
from harness.conditions import conditions
from harness.servers import Server

NBYTES = 6_000_000_000
NUM_DRAFTED, NUM_TOKENS = 3, 64
CHUNKS = (1, 4)
"""Steps of the prompts."""
ASKED, TIMED = 8, 21
ACCEPTED, DRAFTED = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"
SETTLED_S = 0.3
"""How long after an answer a server's counts are read."""
CONTEXT = 4.0
"""How much more a token's context changes the next one than in a model with random weights."""


def write_pair(model: Path, head: Path) -> None:
    """Change a Llama so that an EAGLE head can predict it, and write the head.

    All layers but the first pass on what they get, though each has K and V of its own. The head has no norm before its layer,
    so that all embeddings have the root mean square 1. It never sees the first token, and is not always right therefore.
    """
    torch, files = importlib.import_module("torch"), importlib.import_module("safetensors.torch")
    weights = files.load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(0.0 if ".layers.0." not in name else CONTEXT if "o_proj" in name else 1.0)
    embedding = weights["model.embed_tokens.weight"]
    size = embedding.float().square().mean(dim=1, keepdim=True).sqrt()
    embedding.copy_(embedding.float() / size.clamp(min=1e-6))  # that of padding is zero
    files.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    first, width = "model.layers.0.", embedding.shape[1]
    own = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith(first)}
    del own["layers.0.input_layernorm.weight"]
    own["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1).to(embedding.dtype)
    head.mkdir()
    files.save_file({name: weight.clone() for name, weight in own.items()}, head / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def counts(server: Server) -> Counter[str]:
    """The drafts of a server so far."""
    time.sleep(SETTLED_S)
    found: Counter[str] = Counter()
    for name, metric in (("accepted", ACCEPTED), ("drafted", DRAFTED)):
        found[name] = int(server.metric(metric))
    return found


def answers(decode: Server, prefill: Server | None, prompts: list[list[int]]) -> tuple[list[Reply], dict[str, int], float]:
    """Decode's answers to prompts, which prefill computes if it is given, the drafts of all, and the tokens handed over."""
    before, external = counts(decode), num_external(decode)
    found = []
    for prompt in prompts:
        params = None if prefill is None else hand_over(prefill, prompt, timeout_s=COMPILING_S)
        found.append(stream(decode, prompt, params, max_tokens=NUM_TOKENS, logprobs=0, timeout_s=COMPILING_S))
    return found, dict(counts(decode) - before), num_external(decode) - external


def drafts(ready: Mapping[str, Server], chunk: int, chunks: int, plan: Plan) -> dict[str, Any]:
    """A row of `drafts`."""
    length = chunks * chunk + 1
    prompts = [prompt_of(random.Random(seed), length) for seed in range(100 * chunks, 100 * chunks + ASKED)]
    decode = ready["eagle decode"]
    answers(decode, None, prompts[:1])  # compiles
    alone, of_alone, _ = answers(decode, None, prompts)
    row: dict[str, Any] = {"tokens": length, "asked": ASKED, "alone": of_alone}
    for name, prefill in (("moved", "eagle prefill"), ("without", "plain prefill")):
        found, row[name], num_tokens = answers(decode, ready[prefill], prompts)
        if num_tokens != ASKED * (length - 1):
            plan.problems.append(f"{name}, {length} tokens: {num_tokens:.0f} of {ASKED * (length - 1)} came from prefill")
        rows = [difference(one, other) for one, other in zip(found, alone, strict=True)]
        row[f"{name}_equal"] = sum(each["equal"] for each in rows)
        row[f"{name}_logprob_max"] = max(each["logprob_max"] for each in rows)
    return row


def first_token(ready: Mapping[str, Server], chunk: int, chunks: int, _: Plan) -> dict[str, Any]:
    """A row of `first_token`."""
    length, rng = chunks * chunk + 1, random.Random(chunks)
    times: dict[str, list[float]] = {name: [] for name in ("plain", "eagle", "plain_alone", "eagle_alone")}
    for turn in range(WARM_UP + TIMED):
        for name, each in times.items():
            kind, prompt = name.removesuffix("_alone"), prompt_of(rng, length)
            params = None if kind != name else hand_over(ready[f"{kind} prefill"], prompt)
            reply = stream(ready[f"{kind} decode"], prompt, params, max_tokens=8)
            if turn >= WARM_UP:
                each.append(reply.times_s[0])
    medians = {f"{name}_ms": round(statistics.median(each) * 1e3, 2) for name, each in times.items()}
    return {"tokens": length, "count": TIMED, **medians}


def measure(ready: Mapping[str, Server], chunk: int, plan: Plan) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete."""
    table: dict[str, list[dict[str, Any]]] = {"drafts": [], "first_token": []}
    acts = {"drafts": drafts, "first_token": first_token}
    for part, act in acts.items():
        for chunks in CHUNKS:
            what = f"{part}, {chunks} chunks"
            if plan.is_over(what):
                continue
            try:
                table[part].append(act(ready, chunk, chunks, plan))
            except (*Broken, KeyError) as error:
                plan.problems.append(f"{what}: {type(error).__name__}: {error}")
            yield table


def wanted(head: Path, block: int, chunk: int, backend: str) -> Iterator[Wanted]:
    """The servers."""
    for place, name in enumerate(("prefill", "decode")):
        speculation = {"method": "eagle", "model": str(head), "num_speculative_tokens": NUM_DRAFTED}
        for kind, more in (("plain", ()), ("eagle", ("--speculative-config", json.dumps(speculation)))):
            yield Wanted(f"{kind} {name}", backend, place, block, NBYTES, chunk, more=more)


def main() -> None:
    """Start the servers, measure, and write the table."""
    given = server_options(__doc__, gpus=2, limit_s=240.0, start_s=160.0).parse_args()
    signal.signal(signal.SIGTERM, terminate)
    plan = Plan.on_gpu(given.limit_s) if given.gpus else Plan.on_cpu(given.limit_s)
    chunk, backend = (CHUNK, "nvlink") if given.gpus else (SMALL_CHUNK, "nixl")
    table: dict[str, Any] = {**conditions(), "gpus": given.gpus, "chunk": chunk, "num_speculative_tokens": NUM_DRAFTED}
    with tempfile.TemporaryDirectory() as folder:
        model, head = model_writer(given.gpus)("llama", Path(folder) / "llama"), Path(folder) / "eagle-llama"
        write_pair(model, head)
        print(f"the models are written after {plan.elapsed_s():.0f} s", flush=True)
        starts = {one.name: partial(start, one, model, given.gpus) for one in wanted(head, plan.block, chunk, backend)}
        with running(starts, plan.problems, patience_s=given.start_s, logs=given.logs) as ready:
            for part in measure(ready, chunk, plan):
                table.update(part)
                given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
    show(table, plan.problems, elapsed_s=plan.elapsed_s())


if __name__ == "__main__":
    main()
