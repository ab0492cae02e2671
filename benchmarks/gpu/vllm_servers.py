"""vLLM servers with this library's connector beside vLLM's own, on one GPU or several::

    python -m benchmarks.gpu.vllm_servers --gpus 2 --prefill-tp 1 2 --limit-s 540 --json docs/benchmarks/vllm-2xh200.json

Prefill and decode are servers of their own. The model has random weights, and the KV of a Llama with 8 billion parameters:
128 KiB per token. `nvlink` and `nixl` are this library's connector with that backend. The connectors whose names end in
`Connector` are vLLM's. Two decode servers move nothing: `nothing` has vLLM's `DecodeBenchConnector`, which loads within a step,
and `floor` goes the way of every connector that loads between steps; under load it has prefill servers without a connector.
`vllm_clients.py` describes the figures. `--gpus 0` tries the program on the CPU with a small model.

Prefill is on the first half of the GPUs, and decode on the second half; a server of more ranks than that takes GPUs of the
other half too. With one GPU all servers share it. A server that does not start is reported with the end of its log, and the
other ones are measured. All servers are killed in the end.
"""

from __future__ import annotations

import contextlib
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

from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.vllm_clients import Pair, Plan, measure_all
from benchmarks.gpu.vllm_connectors import CONNECTORS, DECODE_ONLY, OTHERS, environment, options
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import model_writer
from harness.conditions import conditions
from harness.ports import free_ports
from harness.servers import Server
from harness.vllm.engine import ENVIRONMENT

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
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
LARGE, SMALL = 9_000_000_000, 3_200_000_000
"""Bytes of KV: for 32 prompts of 2,048 tokens at once, and for one prompt of 16,384 tokens."""


@dataclass(frozen=True)
class Wanted:
    """A server to start. `place` is 0 for prefill, 1 for decode. `nbytes` is its KV on each GPU, `chunk` the most tokens of a
    step, and `clients` the most requests at once. `is_cached`: it has a prefix cache. `more`: further options of vLLM.
    """

    name: str
    connector: str
    place: int
    block: int
    nbytes: int
    chunk: int
    tp: int = 1
    clients: int = 32
    is_cached: bool = False
    more: tuple[str, ...] = ()


def wanted(
    connectors: tuple[str, ...], block: int, chunk: int, sizes: tuple[int, ...], decode_tp: int, clients: int
) -> Iterator[Wanted]:
    """The servers of the pairs: prefill for each tensor-parallel size (of vLLM's own connectors the first one only), decode
    also with blocks of twice as many tokens.
    """
    for connector in connectors:
        if connector in DECODE_ONLY:
            size = LARGE if connector == "floor" else SMALL
            yield Wanted(f"{connector} decode", connector, 1, block, size, chunk, decode_tp, clients)
            for tp in sizes if connector == "floor" else ():
                yield Wanted(f"{connector} prefill {tp}", "none", 0, block, LARGE, chunk, tp, clients)
        elif connector in OTHERS:
            yield Wanted(f"{connector} prefill {sizes[0]}", connector, 0, block, SMALL, chunk, sizes[0], clients)
            yield Wanted(f"{connector} decode", connector, 1, block, SMALL, chunk, decode_tp, clients)
        else:
            for tp in sizes:
                yield Wanted(f"{connector} prefill {tp}", connector, 0, block, LARGE, chunk, tp, clients)
            yield Wanted(f"{connector} decode", connector, 1, block, LARGE, chunk, decode_tp, clients)
            if decode_tp == 1:
                yield Wanted(f"{connector} decode {2 * block}", connector, 1, 2 * block, SMALL, chunk, 1, clients)


def start(one: Wanted, model: Path, gpus: int) -> Server:
    """Start a server."""
    port, side_port = free_ports(2)
    own = environment(one.connector, side_port)
    if gpus:
        first = one.place * (gpus // 2)
        environ = {
            **GPU_ENVIRONMENT,
            **own,
            "CUDA_VISIBLE_DEVICES": ",".join(str((first + each) % gpus) for each in range(gpus)),
        }
        graphs = {**GRAPHS, "cudagraph_capture_sizes": [1 << power for power in range(one.clients.bit_length())]}
        size = ["--dtype", "bfloat16", "--compilation-config", json.dumps(graphs), "--max-model-len", "20480"]
        size += ["--kv-cache-memory-bytes", str(one.nbytes)]
    else:
        environ = {**ENVIRONMENT, **own, "VLLM_LOGGING_LEVEL": "INFO"}
        size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1536", "--num-gpu-blocks-override", "512"]
    is_cached = one.is_cached or one.connector == "undivided"
    caching = "--enable-prefix-caching" if is_cached else "--no-enable-prefix-caching"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "model",
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--block-size",
        str(one.block),
        "--max-num-seqs",
        str(one.clients),
        caching,
    ]
    command += ["--max-num-batched-tokens", str(one.chunk), "--tensor-parallel-size", str(one.tp)]
    command += ["--gpu-memory-utilization", "0.02" if gpus else "0.05", *size]
    command += [*options(one.connector, decodes=one.place == 1, side_port=side_port), *one.more]
    server = Server(command, port, environ)
    server.bootstrap_port = side_port
    return server


@contextlib.contextmanager
def running(
    servers: Mapping[str, Callable[[], Server]], problems: list[str], *, patience_s: float, logs: Path | None
) -> Iterator[dict[str, Server]]:
    """Start servers. Yields those that are ready, by name.

    `problems` gets those that did not start. `logs` gets the ends of all logs.
    """
    begun_s = time.monotonic()
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
                problems.append(f"{name}: did not start")
                print(f"--- {name} did not start; the end of its log:\n{server.log()}\n---", flush=True)
        print(f"{len(ready)} of {len(started)} servers are ready after {time.monotonic() - begun_s:.0f} s", flush=True)
        yield ready


def end(name: str, server: Server, logs: Path | None) -> None:
    """Kill a server at once, and copy the end of its log to the folder `logs`."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name.replace(' ', '-')}.log").write_text(server.log(length=200_000))
    with contextlib.suppress(ProcessLookupError):
        server.kill()
    server.stop()


def pairs_of(
    ready: Mapping[str, Server], connectors: tuple[str, ...], block: int, sizes: tuple[int, ...], decode_tp: int
) -> Iterator[Pair]:
    """The complete pairs among the servers that have started. Only those of TP 1 have a decode server with other blocks."""
    for connector in connectors:
        if connector in DECODE_ONLY and f"{connector} decode" in ready:
            yield Pair(connector, None, ready[f"{connector} decode"], decode_tp=decode_tp)
        for tp in sizes:
            if {f"{connector} prefill {tp}", f"{connector} decode"} <= ready.keys():
                other = ready.get(f"{connector} decode {2 * block}") if tp == 1 else None
                yield Pair(connector, ready[f"{connector} prefill {tp}"], ready[f"{connector} decode"], other, tp, decode_tp)


def terminate(number: int, _: object) -> None:
    """End as after an exception, so that the servers are killed."""
    sys.exit(128 + number)


def main() -> None:
    """Start the servers, measure, and write the table."""
    parser = server_options(__doc__, gpus=1, most_gpus=8, limit_s=540.0)
    parser.add_argument("--connectors", nargs="+", choices=CONNECTORS, default=list(CONNECTORS))
    parser.add_argument(
        "--prefill-tp", nargs="+", type=int, choices=(1, 2, 4), default=[1], help="tensor-parallel sizes of prefill"
    )
    parser.add_argument("--decode-tp", type=int, choices=(1, 2, 4), default=1, help="tensor-parallel size of decode")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="the most requests at once")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, terminate)
    connectors, sizes = tuple(given.connectors), tuple(given.prefill_tp)
    plan = Plan.on_gpu(given.limit_s, clients=given.clients) if given.gpus else Plan.on_cpu(given.limit_s)
    table = {**conditions(), "gpus": given.gpus}
    with tempfile.TemporaryDirectory() as folder:
        model = model_writer(given.gpus)("llama", Path(folder))
        print(f"the model is written after {plan.elapsed_s():.0f} s", flush=True)
        servers = wanted(connectors, plan.block, 20480 if given.gpus else 1536, sizes, given.decode_tp, given.clients)
        starts = {one.name: partial(start, one, model, given.gpus) for one in servers}
        with running(starts, plan.problems, patience_s=given.start_s, logs=given.logs) as ready:
            for part in measure_all(list(pairs_of(ready, connectors, plan.block, sizes, given.decode_tp)), plan):
                table.update(part)
                given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
    show(table, plan.problems, elapsed_s=plan.elapsed_s())


if __name__ == "__main__":
    main()
