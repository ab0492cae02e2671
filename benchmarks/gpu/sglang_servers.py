"""SGLang 0.5.16 servers with this library as transfer backend beside SGLang's own NIXL backend, on two GPUs::

    python -m benchmarks.gpu.sglang_servers --gpus 2 --staging --limit-s 450 --json docs/benchmarks/sglang-2xh200.json

Prefill and decode are servers of their own: prefill on the first GPU, with TP 2 on both, and decode on the second one, with
CUDA graphs. The model has random weights, and the KV of a Llama with 8 billion parameters: 128 KiB per token. `disagg` is this
library over `nvlink`, `nixl` is SGLang's backend, and `undivided` is one server that does everything; under load two, one on
each GPU. `sglang_clients.py` describes the figures. `--gpus 0` tries the program on the CPU with a small model.

SGLang 0.5.16 is the last version for torch 2.11. It cannot hold back the pages of failed requests, so this measures speed only.
A server that does not start is reported with the end of its log, and the other ones are measured. All servers are killed in the
end. The file is written after each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.sglang_clients import measure_all, warm_up
from benchmarks.gpu.vllm_clients import Pair, Plan
from benchmarks.gpu.vllm_servers import running, terminate
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import model_writer
from harness.conditions import conditions
from harness.ports import free_ports
from harness.servers import ROOT, Server

BACKENDS = ("disagg", "nixl", "undivided")
OLDER, PLUGIN = "0.5.16", "disagg-older"
ENGINES = ("nvlink", "nixl", "cma")
PAGE_SIZE = 16
GPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": "2",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",  # the GPUs have other servers, too
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "UCX_LOG_LEVEL": "warn",
}
CPU_ENVIRONMENT = {"TRITON_INTERPRET": "1"}  # a Triton kernel chooses pages
MAX_TOKENS = 90112
"""KV of a server on a GPU: 12 GB, for 32 requests of 2,112 tokens and those that wait for a place."""
STAGING_MIB = "1024"
"""Of each of SGLang's buffers on prefill. A chunk of a TP-2 rank has 512 MiB. With the default of 64 MiB it was not staged, and
requests of 6,017 tokens and more were not answered.
"""
GPU_OPTIONS = (
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--max-total-tokens", str(MAX_TOKENS), "--max-running-requests", "64", "--mem-fraction-static", "0.9"),
    *("--cuda-graph-bs-decode", "1", "2", "4", "8", "16", "24", "32", "--disable-prefill-cuda-graph"),
    *("--chunked-prefill-size", "8192", "--disable-custom-all-reduce", "--skip-server-warmup"),
)


@dataclass(frozen=True)
class Wanted:
    """A server to start, on the first GPU (`place` 0) or the last one. `mode` is `prefill`, `decode` or `null`. `staging`: with
    SGLang's buffers for unequal TP.
    """

    name: str
    backend: str
    mode: str
    tp: int = 1
    engine: str = ""
    staging: bool = False
    place: int = 1


def wanted(backends: tuple[str, ...], sizes: tuple[int, ...], engine: str, *, staging: bool) -> Iterator[Wanted]:
    """The servers of all pairs: of each backend one decode server, and a prefill server for each tensor-parallel size."""
    for backend in backends:
        if backend == "undivided":
            yield Wanted(backend, backend, "null")
            yield Wanted(f"{backend} 0", backend, "null", place=0)
            continue
        staged = staging and backend == "nixl"
        for tp in sizes:
            yield Wanted(f"{backend} prefill {tp}", backend, "prefill", tp, engine, staged, place=0)
        yield Wanted(f"{backend} decode", backend, "decode", 1, engine, staged)


def plugin(folder: Path) -> dict[str, str]:
    """The environment in which SGLang 0.5.16 finds the backend, by an entry point of its own. Empty for newer versions."""
    import sglang

    if sglang.__version__ != OLDER:
        return {}
    names = folder / f"plugin/{PLUGIN.replace('-', '_')}-0.dist-info"  # its name ends at the first hyphen
    names.mkdir(parents=True, exist_ok=True)
    (names / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (names / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{PLUGIN} = benchmarks.gpu.sglang_older:register\n")
    path = [str(names.parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "SGLANG_PLUGINS": PLUGIN}


def start(one: Wanted, model: Path, gpus: int) -> Server:
    """Start a server."""
    port, nccl_port, bootstrap_port = free_ports(3)
    options = ["--page-size", str(PAGE_SIZE), "--disable-radix-cache", "--tp", str(one.tp), "--nccl-port", str(nccl_port)]
    environ = {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB": STAGING_MIB} if one.staging else {}
    if one.mode != "null":
        options += ["--disaggregation-mode", one.mode, "--disaggregation-transfer-backend", one.backend]
        options += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if one.mode == "decode":
        options += ["--num-reserved-decode-tokens", "128"]
    if one.backend == "disagg":
        environ |= {"DISAGG_BACKEND": one.engine, "SGLANG_DISAGG_ANY_VERSION": "1", **plugin(model.parent)}
    else:
        environ["SGLANG_PLUGINS"] = "none"
    if gpus:
        first = one.place * (gpus - 1)
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((first + each) % gpus) for each in range(gpus))
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
        server = Server([*command, "--port", str(port), *GPU_OPTIONS, *options], port, {**GPU_ENVIRONMENT, **environ})
    else:
        server = Server.sglang(model, *options, mode=None, instead_of=None, **CPU_ENVIRONMENT, **environ)
    server.bootstrap_port = bootstrap_port
    return server


def pairs_of(ready: Mapping[str, Server], backends: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[Pair]:
    """The complete pairs among the servers that have started, and the undivided server."""
    for backend in backends:
        if backend in ready:
            yield Pair(backend, None, ready[backend], ready.get(f"{backend} 0"))
        for tp in sizes:
            if {f"{backend} prefill {tp}", f"{backend} decode"} <= ready.keys():
                yield Pair(backend, ready[f"{backend} prefill {tp}"], ready[f"{backend} decode"], tp=tp)


def make_plan(gpus: int, limit_s: float) -> Plan:
    """What to measure, with the large model or the small one."""
    if not gpus:
        return Plan(
            PAGE_SIZE, (7, 33, 250, 700), (128, 1024), (4,), (256, 8), limit_s=limit_s, repeats=3, rounds=2, per_client=2
        )
    checked = tuple(length for length in (33, 353, 1025, 2529, 6017, 12001) for _ in range(2))
    return Plan(PAGE_SIZE, checked, (128, 1024, 4096, 16384), (32, 12), (2048, 64), limit_s=limit_s, repeats=9, rounds=8)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = server_options(__doc__, gpus=2, limit_s=450.0, start_s=200.0)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--engine", choices=ENGINES, help="of this library (default: nvlink, and cma on the CPU)")
    parser.add_argument("--prefill-tp", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--staging", action="store_true", help="give SGLang's NIXL backend its buffers for unequal TP")
    return parser.parse_args()


def main() -> None:
    """Start the servers, measure, and write the table."""
    given = parse()
    signal.signal(signal.SIGTERM, terminate)
    backends, sizes = tuple(given.backends), tuple(given.prefill_tp)
    engine = given.engine or ("nvlink" if given.gpus else "cma")
    plan = make_plan(given.gpus, given.limit_s)
    table = {**conditions(), "gpus": given.gpus, "engine": engine, "staging": given.staging}
    table["load_before"] = table.pop("load")  # of the machine; `load` is that of the servers
    with tempfile.TemporaryDirectory() as folder:
        model = model_writer(given.gpus)("llama", Path(folder))
        print(f"the model is written after {plan.elapsed_s():.0f} s", flush=True)
        servers = wanted(backends, sizes, engine, staging=given.staging)
        starts = {one.name: partial(start, one, model, given.gpus) for one in servers}
        with running(starts, plan.problems, patience_s=given.start_s, logs=given.logs) as ready:
            usable = warm_up(list(pairs_of(ready, backends, sizes)), plan)
            print(f"{len(usable)} pairs have answered after {plan.elapsed_s():.0f} s", flush=True)
            alone = next((pair for pair in usable if pair.prefill is None), None)
            for part in measure_all([pair for pair in usable if pair.prefill is not None], alone, plan):
                table.update(part)
                given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
                print(f"{len(table['rows'])} rows, {len(table['load'])} loads after {plan.elapsed_s():.0f} s", flush=True)
            given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
    show(table, plan.problems, elapsed_s=plan.elapsed_s())


if __name__ == "__main__":
    main()
