"""vLLM servers with this library's connector beside vLLM's own, on one or two GPUs::

    python -m benchmarks.gpu.vllm_servers --gpus 1 --limit-s 540 --json docs/benchmarks/vllm-h200.json

Prefill and decode are servers of their own. The model has random weights, and the KV of a Llama with 8 billion parameters:
128 KiB per token. `nvlink` and `nixl` are this library's connector with that backend. `NixlConnector` is vLLM's. `nothing` is a
decode server with vLLM's `DecodeBenchConnector`, which moves nothing. `vllm_clients.py` describes the figures. `--gpus 0` tries
the program on the CPU with a small model.

With two GPUs prefill is on the first one, and decode on the second one. With one GPU all servers share it. A server that does
not start is reported with the end of its log, and the other ones are measured. All servers are killed in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.vllm_clients import Pair, Plan, measure_all, show
from benchmarks.gpu.vllm_weights import write_large_model
from harness.conditions import conditions
from harness.ports import free_ports
from harness.servers import Server, transfer_config
from harness.vllm.engine import ENVIRONMENT

CONNECTORS = ("nvlink", "nixl", "NixlConnector", "nothing", "undivided")
GPU_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "TRANSFORMERS_OFFLINE": "1",
    "UCX_LOG_LEVEL": "warn",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
LARGE, SMALL = 9_000_000_000, 3_200_000_000
"""Bytes of KV: for 32 prompts of 2,048 tokens at once, and for one prompt of 16,384 tokens."""


@dataclass(frozen=True)
class Wanted:
    """A server to start. `place` is its GPU, if there are two, `nbytes` its KV, and `chunk` the most tokens of a step."""

    name: str
    connector: str
    place: int
    block: int
    nbytes: int
    chunk: int


def wanted(connectors: tuple[str, ...], block: int, chunk: int) -> Iterator[Wanted]:
    """The servers of the pairs; each decode server also with blocks of twice as many tokens."""
    for connector in connectors:
        if connector in ("nothing", "undivided"):
            yield Wanted(connector, connector, 1, block, SMALL, chunk)
        else:
            yield Wanted(f"{connector} prefill", connector, 0, block, LARGE, chunk)
            yield Wanted(f"{connector} decode", connector, 1, block, LARGE, chunk)
            yield Wanted(f"{connector} decode {2 * block}", connector, 1, 2 * block, SMALL, chunk)


def start(one: Wanted, model: Path, gpus: int) -> Server:
    """Start a server."""
    port, side_port = free_ports(2)
    own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    if gpus:
        first = one.place % gpus
        environ = {
            **GPU_ENVIRONMENT,
            **own,
            "CUDA_VISIBLE_DEVICES": ",".join(str((first + each) % gpus) for each in range(gpus)),
        }
        size = ["--dtype", "bfloat16", "--compilation-config", json.dumps(GRAPHS), "--max-model-len", "20480"]
        size += ["--kv-cache-memory-bytes", str(one.nbytes)]
    else:
        environ = {**ENVIRONMENT, **own, "VLLM_LOGGING_LEVEL": "INFO"}
        size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1536", "--num-gpu-blocks-override", "512"]
    caching = "--enable-prefix-caching" if one.connector == "undivided" else "--no-enable-prefix-caching"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "model",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--block-size", str(one.block), "--max-num-seqs", "32", caching]
    command += ["--max-num-batched-tokens", str(one.chunk)]
    command += ["--gpu-memory-utilization", "0.02" if gpus else "0.05", *size, *connector_options(one.connector)]
    return Server(command, port, environ)


def connector_options(connector: str) -> list[str]:
    """The options of vLLM for a connector."""
    if connector == "undivided":
        return []
    if connector in ("nvlink", "nixl"):
        return ["--kv-transfer-config", transfer_config({"backend": connector})]
    name = {"nothing": "DecodeBenchConnector"}.get(connector, connector)
    config = {"kv_connector": name, "kv_role": "kv_both"}
    return [
        "--kv-transfer-config",
        json.dumps(config if connector == "nothing" else {**config, "kv_load_failure_policy": "recompute"}),
    ]


@contextlib.contextmanager
def running(
    servers: Mapping[str, Callable[[], Server]], plan: Plan, *, patience_s: float, logs: Path | None
) -> Iterator[dict[str, Server]]:
    """Start servers. Yields those that are ready, by name.

    `plan.problems` gets those that did not start. `logs` gets the ends of all logs.
    """
    with ExitStack() as stack:
        started = {}
        for name, begin in servers.items():
            started[name] = begin()
            stack.callback(end, name, started[name], logs)
        until, ready = time.monotonic() + patience_s, {}
        for name, server in started.items():
            try:
                ready[name] = server.wait_ready(timeout_s=max(1.0, until - time.monotonic()))
            except RuntimeError:
                plan.problems.append(f"{name}: did not start")
                print(f"--- {name} did not start; the end of its log:\n{server.log()}\n---", flush=True)
        print(f"{len(ready)} of {len(started)} servers are ready after {plan.elapsed_s():.0f} s", flush=True)
        yield ready


def end(name: str, server: Server, logs: Path | None) -> None:
    """Kill a server at once, and copy the end of its log to the folder `logs`."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name.replace(' ', '-')}.log").write_text(server.log(length=200_000))
    with contextlib.suppress(ProcessLookupError):
        server.kill()
    server.stop()


def pairs_of(ready: Mapping[str, Server], connectors: tuple[str, ...], block: int) -> Iterator[Pair]:
    """The complete pairs among the servers that have started."""
    for connector in connectors:
        if connector in ready:
            yield Pair(connector, None, ready[connector], None)
        elif {f"{connector} prefill", f"{connector} decode"} <= ready.keys():
            other = ready.get(f"{connector} decode {2 * block}")
            yield Pair(connector, ready[f"{connector} prefill"], ready[f"{connector} decode"], other)


def terminate(number: int, _: object) -> None:
    """End as after an exception, so that the servers are killed."""
    sys.exit(128 + number)


def main() -> None:
    """Start the servers, measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=1, help="0: a small model on the CPU")
    parser.add_argument("--connectors", nargs="+", choices=CONNECTORS, default=list(CONNECTORS))
    parser.add_argument(
        "--limit-s", type=float, default=540.0, metavar="SECONDS", help="end after this time, with the results so far"
    )
    parser.add_argument("--start-s", type=float, default=240.0, metavar="SECONDS", help="how long to wait for the servers")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where to put the logs of the servers")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, terminate)
    connectors = tuple(given.connectors)
    plan = Plan.on_gpu(given.limit_s) if given.gpus else Plan.on_cpu(given.limit_s)
    table = {**conditions(), "gpus": given.gpus}
    with tempfile.TemporaryDirectory() as folder:
        if given.gpus:
            model = write_large_model("llama", Path(folder))
        else:
            model = importlib.import_module("harness.vllm.models").write_model("llama", Path(folder))
        print(f"the model is written after {plan.elapsed_s():.0f} s", flush=True)
        servers = wanted(connectors, plan.block, 20480 if given.gpus else 1536)
        starts = {one.name: partial(start, one, model, given.gpus) for one in servers}
        with running(starts, plan, patience_s=given.start_s, logs=given.logs) as ready:
            for part in measure_all(list(pairs_of(ready, connectors, plan.block)), plan):
                table.update(part)
                given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
    show(table, plan)


if __name__ == "__main__":
    main()
