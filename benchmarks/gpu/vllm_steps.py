"""Where the time between a client's request and its first token goes, in vLLM servers that are both asked at once::

    python -m benchmarks.gpu.vllm_steps --gpus 2 --json docs/benchmarks/vllm-steps-2xh200.json

`rows`: medians of milliseconds from the client's request, without other requests, until

* `scheduled`: prefill's scheduler has begun the step of the prompt's last token;
* `launched`: that step's kernels have been given to the GPU, and its tokens to the connector;
* `sampled`: prefill's scheduler has ended the request, so its answer is on the way;
* `received`: decode's connector reports the load to vLLM;
* `known`: decode's scheduler is told of it;
* `decoding`: decode's scheduler has begun the step that computes the first token;
* `first_token`: the client has it. `undivided` is the first token of one server.

Its connector writes these moments, which cost microseconds. All processes read the same clock, so all are on one host.
`--gpus 0` tries the program on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from benchmarks.gpu import vllm_older
from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.vllm_client import PATIENCE_S, Ways
from benchmarks.gpu.vllm_clients import WARM_UP, Plan
from benchmarks.gpu.vllm_requests import prompt_of
from benchmarks.gpu.vllm_servers import LARGE, Wanted, running, start, terminate
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import model_writer
from disagg.integrations.vllm.metadata import BlockIds
from harness.conditions import conditions

FOLDER = "VLLM_STEPS_FOLDER"
"""The environment variable with the folder to which connectors write."""
MOMENTS = ("scheduled", "launched", "sampled", "received", "known", "decoding")
PAUSE_S = 0.05
"""After a request its servers have this long for their last steps, which belong to no other request."""


class DisaggConnector(vllm_older.OlderConnector):
    """The connector for vLLM 0.23, which notes when it is called."""

    def _note(self, moment: str) -> None:
        path = Path(os.environ[FOLDER]) / f"{os.getpid()}.txt"
        with path.open("a") as file:
            file.write(f"{time.monotonic():.6f} {moment}\n")

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        counts = scheduler_output.num_scheduled_tokens.values()
        if counts:
            self._note("decoding" if max(counts) == 1 else "scheduled")
        return super().build_connector_meta(scheduler_output)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        has_finished = bool(self._step.finishes)
        sent, received = super().get_finished(finished_req_ids)
        if has_finished:
            self._note("launched")
        if received:
            self._note("received")
        return sent, received

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.finished_recving:
            self._note("known")
        super().update_connector_output(connector_output)

    def request_finished_all_groups(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        self._note("sampled")
        return super().request_finished_all_groups(request, block_ids)


def moments(folder: Path) -> list[tuple[float, str]]:
    """What all connectors have written, in order."""
    lines = [line.split() for path in folder.glob("*.txt") for line in path.read_text().splitlines()]
    return sorted((float(at), moment) for at, moment in lines)


def ask_all(ways: Ways, plan: Plan) -> Iterator[tuple[int, float, float, float]]:
    """Lengths of prompts, when the client asked both servers and when it had the first token; the seconds of one server."""

    async def ask(way: str, prompt: Sequence[int]) -> tuple[float, float]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            begun_s = time.monotonic()
            reply = await ways.names(is_load=False)[way](session, prompt)
            await asyncio.sleep(PAUSE_S)
        return begun_s, reply.begun_s + reply.times_s[0]

    for length in plan.lengths:
        rng = random.Random(length)
        for turn in range(WARM_UP + plan.repeats):
            alone = asyncio.run(ask("undivided", prompt_of(rng, length)))
            begun_s, first_s = asyncio.run(ask("both", prompt_of(rng, length)))
            if turn >= WARM_UP:
                yield length, begun_s, first_s, alone[1] - alone[0]


def row(length: int, asked: Sequence[tuple[float, float, float]], noted: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """The medians of one length. Of moments that come in many steps the last one of prefill counts, and the first of decode."""
    times: dict[str, list[float]] = {name: [] for name in (*MOMENTS, "first_token", "undivided")}
    for begun_s, first_s, undivided_s in asked:
        within = [(at - begun_s, moment) for at, moment in noted if begun_s <= at <= first_s]
        for name in MOMENTS:
            found = [at for at, moment in within if moment == name]
            if found:
                times[name].append(found[-1] if name in ("scheduled", "launched") else found[0])
        times["first_token"].append(first_s - begun_s)
        times["undivided"].append(undivided_s)
    return {"tokens": length, **{f"{name}_ms": round(statistics.median(each) * 1e3, 1) for name, each in times.items() if each}}


def main() -> None:
    """Start the servers, measure, and write the table."""
    given = server_options(__doc__, gpus=2, limit_s=600.0).parse_args()
    signal.signal(signal.SIGTERM, terminate)
    backend = "nvlink" if given.gpus else "nixl"
    plan = Plan.on_gpu(given.limit_s) if given.gpus else Plan.on_cpu(given.limit_s)
    chunk = 20480 if given.gpus else 1536
    table: dict[str, Any] = {**conditions(), "gpus": given.gpus, "backend": backend}
    table["load_before"] = table.pop("load")  # of the machine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[FOLDER] = name
        model = model_writer(given.gpus)("llama", folder)
        chosen = [
            Wanted(f"{backend} prefill 1", f"recorded {backend}", 0, plan.block, LARGE, chunk),
            Wanted(f"{backend} decode", f"recorded {backend}", 1, plan.block, LARGE, chunk),
            Wanted("none 0", "none", 0, plan.block, LARGE, chunk),
        ]
        starts = {one.name: partial(start, one, model, given.gpus) for one in chosen}
        with running(starts, plan.problems, patience_s=given.start_s, logs=given.logs) as ready:
            asked = list(ask_all(Ways(ready, backend, 1, max_tokens=4), plan))
        noted = moments(folder)
    table["rows"] = [row(length, [each[1:] for each in asked if each[0] == length], noted) for length in plan.lengths]
    given.json.write_text(json.dumps({**table, "problems": plan.problems}, indent=1) + "\n")
    show(table, plan.problems, elapsed_s=plan.elapsed_s())


if __name__ == "__main__":
    main()
