"""What sending layer by layer could save a vLLM pair on the CPU, where both engines are asked at once.

    .venv-vllm/bin/python -m benchmarks.vllm_layers --out docs/benchmarks/vllm-layers.json

Chunks travel as they are computed, so the bytes of the last one are left when prefill has answered. `left_ms` is the time from
that answer to decode's first token, and `cached_ms` decode's time for a prompt in its prefix cache: at most their difference
could be saved. `send_us` is one call of `send` in the engine's thread: with layers there would be one for each layer and chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from disagg import new_request_id
from disagg.requests import Sender
from harness.conditions import conditions
from harness.vllm.engine import ENVIRONMENT, PREFILL, Engine

os.environ.update(ENVIRONMENT)  # before vLLM is imported


from harness.vllm.models import write_model

LENGTHS = (449, 1409)
"""One step of prefill, and three. Both are whole blocks and a token, so that a prefix cache has all but the last one."""
ROUNDS = 15
CALLS_S: list[float] = []


def time_sends(_: Any) -> None:
    """In prefill's process: note how long each call of `send` takes."""
    plain = Sender.send

    def timed(self: Sender, *args: Any, **options: Any) -> None:
        begun_s = time.perf_counter()
        plain(self, *args, **options)
        CALLS_S.append(time.perf_counter() - begun_s)

    Sender.send = timed  # type: ignore[method-assign]


def send_us(_: Any) -> float:
    """In prefill's process: the median of these times."""
    return statistics.median(CALLS_S) * 1e6


def measure(prefill: Engine, decode: Engine, length: int) -> dict[str, Any]:
    """Medians for prompts of `length` tokens, each new."""
    chosen = random.Random(length)
    server: dict[str, Any] = {}
    times: dict[str, list[float]] = {"prefill_ms": [], "left_ms": [], "cached_ms": []}
    for number in range(ROUNDS + 1):
        prompt = [chosen.randrange(250) for _ in range(length)]
        name = {"remote_request_id": new_request_id().hex()}
        both = {"do_remote_prefill": True, **server, **name}
        begun_s = time.monotonic()
        loading = decode.add(prompt, params=both, max_tokens=1) if server else ""
        (first,) = prefill.generate([prompt], params={**PREFILL, **name})
        answered_s = time.monotonic()
        assert first.params is not None
        if not server:  # the first round connects
            server = {key: first.params[key] for key in ("remote_engine_id", "remote_address")}
            loading = decode.add(prompt, params=first.params, max_tokens=1)
        (found,) = decode.wait([loading])
        ended_s = time.monotonic()
        (cached,) = decode.generate([prompt], max_tokens=1)
        assert (found.num_external, cached.num_local, cached.tokens) == (length - 1, length - 1, found.tokens)
        if number:
            times["prefill_ms"].append(answered_s - begun_s)
            times["left_ms"].append(ended_s - answered_s)
            times["cached_ms"].append(cached.first_token_s or 0.0)
    return {"tokens": length, **{name: round(statistics.median(found) * 1e3, 2) for name, found in times.items()}}


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    given, about = parser.parse_args(), conditions()
    options: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": True}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model("llama", Path(folder) / "llama"))
        with Engine(model, block_size=32, **options) as prefill, Engine(model, block_size=64, **options) as decode:
            prefill.run(time_sends)
            rows = [measure(prefill, decode, length) for length in LENGTHS]
            result = {**about, "send_us": round(prefill.run(send_us), 1), "rows": rows}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"send_us": result["send_us"], "rows": rows}))


if __name__ == "__main__":
    main()
