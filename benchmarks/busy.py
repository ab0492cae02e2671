"""Requests of servers whose interpreter is busy: from `finish` to the receiver's event, in the server's own code.

A prefill and a decode process of one host, each a small server that computes in one of `SERVERS`. Decode opens a receiver for
each request in turn; prefill sends it some milliseconds after it has seen the reservation. Both read the same clock::

    python -m benchmarks.busy --json docs/benchmarks/busy-host.json
    python -m benchmarks.busy --engines nvlink nixl --device cuda --json docs/benchmarks/busy-h200.json

On a machine with one GPU both processes share it. `benchmarks.control` measures what a Python loop loses during transfers.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology
from disagg.backends.cuda.driver import second_gpu
from disagg.state import paged
from harness.conditions import conditions

PAGE, HEADS, DIM, LAYERS = 16, 8, 128, 8
SIZES = {"2 MB": 4, "67 MB": 128}
"""Pages of a request."""
COUNTS = {"2 MB": 60, "67 MB": 20}
WARM_UP = 5
STEP_S, PAUSE_S = 0.010, (0.002, 0.012)
WORK_S, WORKS_PER_S = 0.0003, 1000
DEADLINE_S, PATIENCE_S = 60.0, 300.0


@dataclass(frozen=True)
class Case:
    """One server pair. `size` is a key of `SIZES`, and `switch_interval_s` what both give `sys.setswitchinterval`."""

    engine: str
    device: str
    server: str
    size: str
    switch_interval_s: float = sys.getswitchinterval()

    @property
    def count(self) -> int:
        return COUNTS[self.size] + WARM_UP


class Rank:
    """One side's manager, its pools, and the requests so far. `times`: of `finish` on prefill, of the event on decode."""

    def __init__(self, case: Case, role: str, pipe: Connection) -> None:
        self.case, self.role = case, role
        sys.setswitchinterval(case.switch_interval_s)
        self.torch: Any = importlib.import_module("torch")
        self.torch.set_num_threads(1)
        pages, other = SIZES[case.size], "decode" if role == "prefill" else "prefill"
        self.device = "cpu" if case.device == "cpu" else f"cuda:{second_gpu() if role == 'decode' else 0}"
        shape = (pages, PAGE, HEADS, DIM)
        pools = {
            layer: tuple(self.torch.full(shape, 7, dtype=self.torch.bfloat16, device=self.device) for _ in "kv")
            for layer in range(LAYERS)
        }
        kv = paged.gqa(pools, axes="nhd", num_kv_heads=HEADS, topology=Topology())
        self.manager = KVManager(name=role, topology=Topology(), components=[kv], model=ModelId("busy"), backend=case.engine)
        self.rows = {"kv": Pages(np.random.default_rng(1).permutation(pages).astype(np.int32))}
        pipe.send(self.manager.address)
        self.manager.add_peer(other, address=pipe.recv())
        self.manager.wait_ready(other, timeout_s=DEADLINE_S)
        self.times: list[float] = []
        self.rng = random.Random(3)
        self.current: Any = None
        self.send_at: float | None = None

    @property
    def is_over(self) -> bool:
        return len(self.times) == self.case.count and self.current is None

    def begin(self) -> None:
        """Open the next request, if none is open and one is left."""
        if self.current is not None or len(self.times) == self.case.count:
            return
        request = hashlib.sha256(f"{self.case}{len(self.times)}".encode()).digest()[:16]
        if self.role == "prefill":
            self.current, self.send_at = self.manager.sender(request, peer="decode", deadline_s=DEADLINE_S), None
        else:
            need = {"kv": (0, SIZES[self.case.size] * PAGE)}
            self.current = self.manager.receiver(request, peer="prefill", rows=self.rows, need=need, deadline_s=DEADLINE_S)

    def send(self) -> bool:
        """Prefill: finish the request if its time has come. Returns whether it has been finished now."""
        if self.role == "decode" or self.current is None or self.send_at == 0.0 or self.current.needed("kv") is None:
            return False
        if self.send_at is None:
            self.send_at = time.monotonic() + self.rng.uniform(*PAUSE_S)
        if time.monotonic() < self.send_at:
            return False
        self.send_at = 0.0
        self.times.append(time.monotonic())
        self.current.finish(self.rows)
        return True

    def end(self, event: Any) -> None:
        """Take the event of the current request."""
        if self.role == "decode":
            self.times.append(time.monotonic())
        if not event.ok:
            raise RuntimeError(f"a request failed: {event.error}")
        self.current = None

    def work(self, seconds: float) -> None:
        """Pure Python for a time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            sum(number & 3 for number in range(50))


# -- servers ------------------------------------------------------------------------------------------------------------


def waits(rank: Rank) -> None:
    """The main thread waits for each request."""
    while not rank.is_over:
        rank.begin()
        if rank.role == "prefill":
            while not rank.send():
                time.sleep(0.0005)
        rank.end(rank.current.wait(timeout_s=PATIENCE_S))
        rank.manager.events()


def steps(rank: Rank) -> None:
    """The main thread computes for `STEP_S`, then asks for events, and so on."""
    while not rank.is_over:
        rank.begin()
        rank.send()
        rank.work(STEP_S)
        for event in rank.manager.events():
            rank.end(event)


async def _serve(rank: Rank) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def on_events() -> None:
        for event in rank.manager.events():
            rank.end(event)
        rank.begin()
        if rank.is_over:
            over.set()

    loop.add_reader(rank.manager.fileno(), on_events)
    rank.begin()
    due = time.monotonic()
    while not over.is_set():
        rank.send()
        rank.work(WORK_S)
        due = max(due + 1 / WORKS_PER_S, time.monotonic() - 0.1)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    loop.remove_reader(rank.manager.fileno())


def serves(rank: Rank) -> None:
    """An asyncio server that learns of events by `fileno()`, beside `WORKS_PER_S` pieces of Python work of `WORK_S`."""
    asyncio.run(_serve(rank))


def launches(rank: Rank, stop: threading.Event) -> None:
    """Small torch operations, one after the other."""
    tensor = rank.torch.ones(256, device=rank.device)
    while not stop.is_set():
        for _ in range(100):
            tensor.add_(1)


def computes(rank: Rank, stop: threading.Event) -> None:
    """Pure Python without end."""
    while not stop.is_set():
        rank.work(0.001)


SERVERS: dict[str, tuple[Callable[[Rank], None], Callable[[Rank, threading.Event], None] | None]] = {
    "free interpreter, wait()": (waits, None),
    "a thread of small torch operations, wait()": (waits, launches),
    "steps of 10 ms, events()": (steps, None),
    "a thread of pure Python, wait()": (waits, computes),
    "asyncio, fileno()": (serves, None),
}
"""What the main thread does, and what another thread of each process does meanwhile."""


def serve(pipe: Connection, case: Case, role: str) -> None:
    """One process: connect, serve all requests, and send the times."""
    rank = Rank(case, role, pipe)
    main, other = SERVERS[case.server]
    stop = threading.Event()
    thread = threading.Thread(target=other, args=(rank, stop)) if other is not None else None
    if thread is not None:
        thread.start()
    pipe.send("ready")
    pipe.recv()
    main(rank)
    pipe.send((rank.times, rank.manager.backend.transport))
    pipe.recv()
    stop.set()
    if thread is not None:
        thread.join()
    rank.manager.close()


# -- the driver ---------------------------------------------------------------------------------------------------------


@contextmanager
def processes(case: Case) -> Iterator[list[Connection]]:
    """Both processes of a case, killed at the end of the block if they still run."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    started = [
        context.Process(target=serve, args=(theirs, case, role))
        for (_, theirs), role in zip(ends, ("prefill", "decode"), strict=True)
    ]
    for process in started:
        process.start()
    try:
        yield [ours for ours, _ in ends]
        for process in started:
            process.join(10)
    finally:
        for process in started:
            process.kill()


def exchange(pipes: list[Connection]) -> list[Any]:
    """The next message of both processes. Raises `RuntimeError` if one has ended or does not answer."""
    found = []
    for pipe in pipes:
        if not pipe.poll(PATIENCE_S):
            raise RuntimeError(f"no answer within {PATIENCE_S} s")
        found.append(pipe.recv())
    return found


def measure(case: Case) -> dict[str, Any]:
    """The row of one case. Times are in milliseconds."""
    with processes(case) as pipes:
        for pipe, address in zip(pipes, reversed(exchange(pipes)), strict=True):
            pipe.send(address)
        exchange(pipes)
        for pipe in pipes:
            pipe.send("begin")
        (sent, transport), (received, _) = exchange(pipes)
        for pipe in pipes:
            pipe.send("end")
    took = np.sort(1e3 * (np.array(received) - np.array(sent))[WARM_UP:])
    return {
        "engine": case.engine,
        "transport": transport,
        "size": case.size,
        "server": case.server,
        "p50_ms": round(float(np.median(took)), 2),
        "p90_ms": round(float(took[int(0.9 * len(took))]), 2),
    }


def main() -> None:
    """Measure every case, print its row, and write all to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["cma", "nixl", "mooncake"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--switch-interval", type=float, default=sys.getswitchinterval(), metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about, rows = conditions(), []
    for size in arguments.sizes:
        for server in arguments.servers:
            for engine in arguments.engines:
                row = measure(Case(engine, arguments.device, server, size, arguments.switch_interval))
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json is not None:
        result = {**about, "switch_interval_s": arguments.switch_interval, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
