"""The cost of requests without a pause between them: `python -m benchmarks.back_to_back --pair 2 1 --pair 4 2`.

Each rank of both sides is a process. Every rank sends or receives its share of the same requests, one after the other, and
reports the time of each request and the CPU time of each of its threads. The bytes are not verified: `disagg-bench` does that.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

from disagg import KVManager, ModelId, Pages, RawTensor, Topology, new_request_id
from disagg.state import paged
from harness.conditions import conditions

LAYERS, HEADS, DIM, PAGE = 4, 8, 128, 16
WARM_UP = 20
TIMEOUT_S = 60.0


def rank(role: str, number: int, num_ranks: int, tokens: int, engine: tuple[str, str], pipe: Connection) -> None:
    """The process of one rank. `engine`: a backend and its transport."""
    heads, pages = HEADS // num_ranks, tokens // PAGE
    one = pages * PAGE * heads * DIM * 2
    memory = np.ones(2 * LAYERS * one, dtype=np.uint8)
    strides = (PAGE * heads * DIM, heads * DIM, DIM, 1)
    tensors = [
        RawTensor(memory.ctypes.data + i * one, (pages, PAGE, heads, DIM), strides, "bfloat16") for i in range(2 * LAYERS)
    ]
    topology = Topology(tp=num_ranks, tp_rank=number)
    layers = {layer: (tensors[2 * layer], tensors[2 * layer + 1]) for layer in range(LAYERS)}
    kv = paged.gqa(layers, axes="nhd", num_kv_heads=HEADS, topology=topology)
    leader = pipe.recv() if number else None
    with KVManager(
        name=role,
        topology=topology,
        components=[kv],
        model=ModelId("back-to-back"),
        backend=engine[0],
        transport=engine[1],
        leader=leader,
    ) as manager:
        pipe.send(manager.address)
        other = "decode" if role == "prefill" else "prefill"
        manager.add_peer(other, address=pipe.recv())
        manager.wait_ready(other, timeout_s=TIMEOUT_S)
        pipe.send("ready")
        pipe.send(requests(manager, role, other, pipe.recv(), tokens))
        pipe.recv()


def requests(manager: KVManager, role: str, other: str, ids: list[bytes], tokens: int) -> dict[str, Any]:
    """Send or receive all requests; returns milliseconds per request, in all and for each thread."""
    order = np.random.default_rng(1).permutation(tokens // PAGE).astype(np.int32)
    took, before, began = [], Counter[str](), 0.0
    for number, request in enumerate(ids):
        if number == WARM_UP:
            before, began = busy(), time.perf_counter()
        started = time.perf_counter()
        if role == "decode":
            receiver = manager.receiver(request, peer=other, rows={"kv": Pages(order[::-1])}, need={"kv": (0, tokens)})
            event = receiver.wait(timeout_s=TIMEOUT_S)
        else:
            sender = manager.sender(request, peer=other)
            sender.finish({"kv": Pages(order)})
            event = sender.wait(timeout_s=TIMEOUT_S)
        if not event.ok:
            raise SystemExit(f"a request failed: {event.error}")
        manager.events()
        took.append(time.perf_counter() - started)
    count = len(ids) - WARM_UP
    threads = {name: (ns - before[name]) / count / 1e6 for name, ns in busy().items()}
    wall = (time.perf_counter() - began) / count * 1e3
    return {"rank": role, "wall_ms": wall, "p50_ms": float(np.median(took[WARM_UP:])) * 1e3, "threads_ms": threads}


def busy() -> Counter[str]:
    """CPU time in nanoseconds of each thread of this process by name; "ended" sums the threads that have ended."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        found[name] += int((task / "schedstat").read_text().split()[0])
    found["ended"] = time.process_time_ns() - found.total()
    return found


def measure(pair: tuple[int, int], tokens: int, count: int, engine: tuple[str, str]) -> dict[str, Any]:
    """Measure one pair of sides."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[tuple[str, Connection]] = []
    addresses: dict[str, str] = {}
    for role, num_ranks in zip(("prefill", "decode"), pair, strict=True):
        for number in range(num_ranks):
            ours, theirs = spawn.Pipe()
            arguments = (role, number, num_ranks, tokens, engine, theirs)
            spawn.Process(target=rank, args=arguments, daemon=True).start()
            if number:
                ours.send(addresses[role])
            addresses.setdefault(role, ours.recv())
            pipes.append((role, ours))
    for role, pipe in pipes:
        pipe.send(addresses["decode" if role == "prefill" else "prefill"])
    for _, pipe in pipes:
        pipe.recv()
    ids = [new_request_id() for _ in range(count + WARM_UP)]
    for _, pipe in pipes:
        pipe.send(ids)
    ranks = [pipe.recv() for _, pipe in pipes]
    for _, pipe in pipes:
        pipe.send("over")
    cores = sum(sum(found["threads_ms"].values()) for found in ranks)
    nbytes = tokens * HEADS * DIM * 2 * 2 * LAYERS
    return {"prefill": pair[0], "decode": pair[1], "bytes": nbytes, "core_ms_per_request": cores, "ranks": ranks}


@click.command(context_settings={"show_default": True})
@click.option(
    "--pair",
    "pairs",
    type=(int, int),
    multiple=True,
    default=((2, 1),),
    help="TP of prefill and of decode; repeat for several.",
)
@click.option("--tokens", type=click.IntRange(PAGE), default=4096, help="Tokens per request, in whole pages of 16.")
@click.option("--count", type=click.IntRange(1), default=200, help="Requests to measure.")
@click.option("--backend", default="nixl", help="Engine.")
@click.option("--transport", default="shm", help="Transport of the engine.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to this file.")
def main(
    *, pairs: tuple[tuple[int, int], ...], tokens: int, count: int, backend: str, transport: str, json_file: Path | None
) -> None:
    """Measure requests back to back."""
    about = conditions()
    rows = [measure(pair, tokens, count, (backend, transport)) for pair in pairs]
    for row in rows:
        slowest = max(found["p50_ms"] for found in row["ranks"])
        click.echo(
            f"TP {row['prefill']} to {row['decode']}, {row['bytes'] / 1e6:.1f} MB: "
            f"{row['core_ms_per_request']:.1f} ms of CPU time per request, {slowest:.1f} ms per request (p50)"
        )
    if json_file is not None:
        json_file.write_text(json.dumps({**about, "backend": backend, "transport": transport, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
