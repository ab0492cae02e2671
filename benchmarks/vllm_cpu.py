"""vLLM on the CPU with this library's connector beside its own NixlConnector: the same engines, prompts and machine.

    .venv-vllm/bin/python -m benchmarks.vllm_cpu --out docs/benchmarks/vllm-cpu.json

For each connector and block size of decode: the time from the request to decode until its first token, how many answers are
those of one undivided engine, the CPU that idle engines use, and the time until the first token if prefill was killed after its
answer. The connectors take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.conditions import conditions
from harness.vllm.engine import ENVIRONMENT, PREFILL, Engine

os.environ.update(ENVIRONMENT)  # before vLLM is imported


from harness.vllm.models import write_model

CONNECTORS = ("DisaggConnector", "NixlConnector")
BLOCKS = ((32, 32), (32, 64))
LENGTHS = (100, 400, 700, 1000, 1300)
ROUNDS, REPEATS, IDLE_S = 2, 7, 5.0


@contextlib.contextmanager
def pair(model: Path, connector: str, blocks: tuple[int, int]) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine. NixlConnector needs a port of its own in each."""
    with contextlib.ExitStack() as stack:
        engines = []
        for number, size in enumerate(blocks):
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(5700 + number)
            engine = Engine(str(model), connector=connector, block_size=size, dtype="float32")
            stack.callback(engine.stop)
            engines.append(engine)
        yield engines[0].wait_ready(), engines[1].wait_ready()


def measure(model: Path, connector: str, blocks: tuple[int, int]) -> dict[str, Any]:
    """One pair: times in milliseconds by prompt length, equal answers, and cores that idle engines use."""
    prompts = {length: [(length + 7 * place) % 250 for place in range(length)] for length in LENGTHS}
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    equal = 0
    with pair(model, connector, blocks) as (prefill, decode):
        expected = {length: decode.generate([prompt], max_tokens=8)[0] for length, prompt in prompts.items()}
        for repeat in range(REPEATS + 1):
            for length, prompt in prompts.items():
                (first,) = prefill.generate([prompt], params=PREFILL)
                (found,) = decode.wait([decode.add(prompt, params=first.params, max_tokens=8)])
                equal += repeat > 0 and found.tokens == expected[length].tokens
                if repeat > 0 and found.first_token_s is not None:  # the first round connects
                    times[length].append(found.first_token_s * 1e3)
        prefill.settle()
        before = prefill.cpu_s(), decode.cpu_s()
        time.sleep(IDLE_S)
        shares = [(engine.cpu_s() - used) / IDLE_S for engine, used in zip((prefill, decode), before, strict=True)]
        killed_ms = without_prefill(prefill, decode, prompts[LENGTHS[-1]])
    return {
        "times": times,
        "equal": equal,
        "asked": REPEATS * len(LENGTHS),
        "idle_cores": [round(share, 3) for share in shares],
        "killed_ms": killed_ms,
    }


def without_prefill(prefill: Engine, decode: Engine, prompt: list[int]) -> float:
    """Milliseconds until the first token of a request whose prefill engine was killed after its answer."""
    (first,) = prefill.generate([prompt], params=PREFILL)
    prefill.kill()
    (found,) = decode.wait([decode.add(prompt, params=first.params, max_tokens=8)])
    return round((found.first_token_s or 0.0) * 1e3, 1)


def rows(model: Path) -> Iterator[dict[str, Any]]:
    """One row for each connector and pair of block sizes."""
    found: dict[tuple[str, tuple[int, int]], list[dict[str, Any]]] = {}
    for _ in range(ROUNDS):
        for blocks in BLOCKS:
            for connector in CONNECTORS:
                result = measure(model, connector, blocks)
                print(connector, blocks, {key: value for key, value in result.items() if key != "times"}, flush=True)
                found.setdefault((connector, blocks), []).append(result)
    for (connector, blocks), results in found.items():
        times = {length: [each for result in results for each in result["times"][length]] for length in LENGTHS}
        yield {
            "connector": connector,
            "prefill_block": blocks[0],
            "decode_block": blocks[1],
            "equal": sum(result["equal"] for result in results),
            "asked": sum(result["asked"] for result in results),
            "first_token_ms_p50": {length: round(statistics.median(each), 1) for length, each in times.items()},
            "first_token_ms_min": {length: round(min(each), 1) for length, each in times.items()},
            "prefill_killed_first_token_ms": [result["killed_ms"] for result in results],
            "idle_cores": [max(shares) for shares in zip(*(result["idle_cores"] for result in results), strict=True)],
        }


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    given, about = parser.parse_args(), conditions()
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(write_model("llama", Path(folder) / "llama")))
    given.out.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
