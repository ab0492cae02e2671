"""The cost of the control path: `python -m benchmarks.control --json control.json`. Takes about a minute.

One prefill and one decode rank run in two processes, over a real engine. Figures compared with bare ZeroMQ take turns with it,
between the same two processes. Message counts are those that the protocol needs: one each way per request after its rows are
reserved.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import zmq

from disagg import KVManager, ModelId, Pages, RawTensor, Topology, new_request_id
from disagg.requests import Sender
from disagg.state import paged
from harness.conditions import conditions

Samples = npt.NDArray[np.float64]
TIMEOUT_S = 120.0
SHORT_DEADLINE_S = 20.0
QUIET_S = 2e-3
PAGE, HEADS, DIM = 8, 8, 128
NUM_PAGES = 4096


@dataclass(frozen=True)
class Pool:
    """K and V of some layers; `memory` is `None` for a pool that is declared but not allocated."""

    tensors: dict[int, tuple[RawTensor, RawTensor]]
    memory: npt.NDArray[np.uint8] | None

    @classmethod
    def of(cls, *, num_layers: int, num_pages: int, page: int, heads: int, dim: int, real: bool = True) -> Pool:
        one = num_pages * page * heads * dim * 2
        memory = np.zeros(2 * num_layers * one, dtype=np.uint8) if real else None
        base = memory.ctypes.data if memory is not None else 1 << 44
        strides = (page * heads * dim, heads * dim, dim, 1)
        tensors = [
            RawTensor(base + number * one, (num_pages, page, heads, dim), strides, "bfloat16")
            for number in range(2 * num_layers)
        ]
        return cls({layer: (tensors[2 * layer], tensors[2 * layer + 1]) for layer in range(num_layers)}, memory)

    def manager(self, name: str, *, backend: str, heads: int, transport: str = "auto") -> KVManager:
        topology = Topology()
        kv = paged.gqa(self.tensors, axes="nhd", num_kv_heads=heads, topology=topology)
        return KVManager(
            name=name, topology=topology, components=[kv], model=ModelId("control"), backend=backend, transport=transport
        )


def small_pool() -> Pool:
    return Pool.of(num_layers=1, num_pages=NUM_PAGES, page=PAGE, heads=HEADS, dim=DIM)


def decode(pipe: Connection, backend: str, transport: str) -> None:
    """The decode process: reserves rows on command, echoes ZeroMQ messages, and reports its resources."""
    context = zmq.Context()
    echo = context.socket(zmq.ROUTER)
    echo.set_hwm(0)  # a full ROUTER drops messages
    port = echo.bind_to_random_port("tcp://127.0.0.1")
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    pool = small_pool()
    with pool.manager("decode", backend=backend, heads=HEADS, transport=transport) as manager:
        pipe.send((manager.address, port))
        manager.add_peer("prefill", address=pipe.recv())
        manager.wait_ready("prefill", timeout_s=TIMEOUT_S)
        pipe.send("ready")
        receivers = []
        while True:
            match pipe.recv():
                case "reserve", ids, pages, tokens, deadline_s:
                    for number, request in enumerate(ids):
                        rows = {"kv": Pages(np.asarray(pages[number % len(pages)], np.int32))}
                        need = {"kv": (0, tokens)}
                        receivers.append(manager.receiver(request, peer="prefill", rows=rows, need=need, deadline_s=deadline_s))
                    pipe.send("reserved")
                case "ended":
                    ended = [receiver.wait(timeout_s=TIMEOUT_S) for receiver in receivers]
                    receivers.clear()
                    manager.events()
                    pipe.send(all(event.ok for event in ended))
                case "resources":
                    pipe.send(resources())
                case _:
                    return


def _echo(socket: zmq.Socket[bytes]) -> None:
    while True:
        socket.send_multipart(socket.recv_multipart())


def resources() -> dict[str, int]:
    """Resources of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    descriptors = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(descriptors),
        "sockets": sum(name.startswith("socket:") for name in descriptors),
        "shared_memory_files": len(list(Path("/dev/shm").iterdir())),
        "objects": len(gc.get_objects()),
    }


class Prefill:
    """The prefill rank, which measures."""

    def __init__(self, manager: KVManager, pipe: Connection, echo: zmq.Socket[bytes]) -> None:
        self.manager, self.pipe, self.echo = manager, pipe, echo

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command if len(command) > 1 else command[0])
        return self.pipe.recv()

    def reserved(self, count: int, pages: list[list[int]], tokens: int, *, deadline_s: float = TIMEOUT_S) -> list[Sender]:
        """Senders whose rows the decode rank has reserved."""
        ids = [new_request_id() for _ in range(count)]
        self.ask("reserve", ids, pages, tokens, deadline_s)
        senders = [self.manager.sender(request, peer="decode", deadline_s=deadline_s) for request in ids]
        while any(sender.needed("kv") is None for sender in senders):
            time.sleep(1e-3)
        time.sleep(QUIET_S)
        return senders

    def end(self, senders: list[Sender]) -> None:
        events = [sender.wait(timeout_s=TIMEOUT_S) for sender in senders]
        self.manager.events()
        assert all(event.ok for event in events), next(event.error for event in events if not event.ok)
        assert self.ask("ended")

    def yield_to_waiter(self, rounds: int) -> dict[str, Any]:
        """From `finish` of a page to success here, by `wait` and by polling, beside a bare ZeroMQ round trip.

        Before each, all threads have slept for `QUIET_S`.
        """
        ours: dict[bool, list[float]] = {False: [], True: []}
        bare = []
        message = bytes(100)
        for number in range(rounds):
            for polls, found in ours.items():
                (sender,) = senders = self.reserved(1, [[number % NUM_PAGES]], PAGE)
                rows = {"kv": Pages(np.array([number % NUM_PAGES], np.int32))}
                began = time.perf_counter()
                sender.finish(rows)
                while polls and sender.poll() is None:
                    pass
                sender.wait(timeout_s=TIMEOUT_S)
                found.append(time.perf_counter() - began)
                self.end(senders)
                time.sleep(QUIET_S)
            began = time.perf_counter()
            self.echo.send(message)
            self.echo.recv()
            bare.append(time.perf_counter() - began)
        waited, polled, zeromq = (percentiles(np.array(each)) for each in (ours[False], ours[True], bare))
        times = waited["p50"] / zeromq["p50"]
        return {"us": waited, "polled_us": polled, "zeromq_us": zeromq, "times_zeromq_p50": times}

    def many(self, count: int, rounds: int) -> dict[str, Any]:
        """`count` requests of one page at once: messages per second, beside bare ZeroMQ messages."""
        rates, bare, latencies = [], [], []
        for _ in range(rounds):
            senders = self.reserved(count, [[number] for number in range(count)], PAGE)
            rows = [{"kv": Pages(np.array([number], np.int32))} for number in range(count)]
            began = time.perf_counter()
            sent = np.zeros(count)
            ended = np.zeros(count)
            places = {sender.request_id: number for number, sender in enumerate(senders)}
            for number, sender in enumerate(senders):
                sent[number] = time.perf_counter()
                sender.finish(rows[number])
            left = count
            while left:
                events = self.manager.events()
                now = time.perf_counter()
                for event in events:
                    ended[places[event.key.request_id]] = now
                left -= len(events)
                if not events:
                    time.sleep(50e-6)
            rates.append(2 * count / (ended.max() - began))
            latencies.append(ended - sent)
            self.end(senders)
            began = time.perf_counter()
            for _ in range(count):
                self.echo.send(bytes(100))
            for _ in range(count):
                self.echo.recv()
            bare.append(2 * count / (time.perf_counter() - began))
        found = percentiles(np.concatenate(latencies))
        ours, theirs = float(np.median(rates)), float(np.median(bare))
        return {
            "requests": count,
            "messages_per_s": ours,
            "zeromq_messages_per_s": theirs,
            "share_of_zeromq": ours / theirs,
            "latency_us": found,
            "p99_over_p50": found["p99"] / found["p50"],
        }

    def caller_loop(self, requests: int, rounds: int) -> dict[str, Any]:
        """The slowdown of a pure Python loop during transfers, in all and without its waits for a core."""
        order = np.random.default_rng(0).permutation(NUM_PAGES).astype(np.int32)
        alone, busy = [], []
        for _ in range(rounds):
            alone.append(_loop(lambda: False, 0.3))
            shares = np.split(order, requests)
            senders = self.reserved(requests, [share[::-1].tolist() for share in shares], NUM_PAGES // requests * PAGE)
            for sender, share in zip(senders, shares, strict=True):
                sender.finish({"kv": Pages(share)})
            busy.append(_loop(lambda: all(sender.poll() for sender in senders), 30.0))  # noqa: B023
            self.end(senders)
        (rate, on_core), (rate_busy, on_core_busy) = (np.median(found, axis=0).tolist() for found in (alone, busy))
        return {
            "requests": requests,
            "bytes": NUM_PAGES * PAGE * HEADS * DIM * 4,
            "pieces_of": PAGE * HEADS * DIM * 2,
            "iterations_per_s": rate,
            "iterations_per_s_meanwhile": rate_busy,
            "lost": 1 - rate_busy / rate,
            "lost_but_for_waiting_for_a_core": 1 - on_core_busy / on_core,
        }

    def growth(self, requests: int) -> dict[str, Any]:
        """The resources of both processes after many requests minus those after some.

        Each time after the deadlines of the requests, because sessions keep ended requests until then. A tombstone of each
        attempt stays, up to a limit.
        """
        before = self._held_after(2000)
        after = self._held_after(requests)
        sides = zip(("prefill", "decode"), before, after, strict=True)
        return {"requests": requests, **{name: {k: b[k] - a[k] for k in a} for name, a, b in sides}}

    def _held_after(self, requests: int) -> tuple[dict[str, int], dict[str, int]]:
        for _ in range(requests // 500):
            self._batch(500)
        time.sleep(SHORT_DEADLINE_S + 1)
        self._batch(1)
        return resources(), self.ask("resources")

    def _batch(self, count: int) -> None:
        pages = [[number] for number in range(count)]
        senders = self.reserved(count, pages, PAGE, deadline_s=SHORT_DEADLINE_S)
        for number, sender in enumerate(senders):
            sender.finish({"kv": Pages(np.array([number], np.int32))})
        self.end(senders)


def _loop(ended: Callable[[], Any], most_s: float) -> tuple[float, float]:
    """Iterations per second of a pure Python loop, and per second in which it did not wait for a core."""
    began, waited, count = time.perf_counter(), _run_delay_s(), 0
    while not ended() and time.perf_counter() - began < most_s:
        for _ in range(20_000):
            count += 1
    wall = time.perf_counter() - began
    return count / wall, count / (wall - (_run_delay_s() - waited))


def _run_delay_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def percentiles(samples: Samples) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(samples, p)) * 1e6 for p in (50, 99)}


def large_send(rounds: int) -> dict[str, Any]:
    """The caller's time in `send` of 4,096 pages of 64 layers, as int32 ids, over the `local` backend."""
    make = partial(Pool.of, num_layers=64, num_pages=4096, page=1, heads=1, dim=8)
    pools = make(), make()
    times = []
    with _pair(pools, heads=1) as (prefill, receiving):
        for _ in range(rounds):
            request = new_request_id()
            ids = np.random.default_rng(0).permutation(4096).astype(np.int32)
            receiver = receiving.receiver(request, peer="prefill", rows={"kv": Pages(ids)}, need={"kv": (0, 4096)})
            sender = prefill.sender(request, peer="decode")
            began = time.perf_counter()
            sender.send({"kv": Pages(ids)}, tokens=(0, 4096))
            times.append(time.perf_counter() - began)
            sender.finish()
            for handle in (sender, receiver):
                event = handle.wait(timeout_s=TIMEOUT_S)
                assert event.ok, event.error
    return {"pages": 4096, "layers": 64, "caller_us": percentiles(np.array(times))}


def set_up(rounds: int) -> dict[str, Any]:
    """From the first constructor until both sides are ready, for declared pools of a thousand and a million pages."""
    found: dict[str, Any] = {"layers": 64}
    for num_pages in (1_000, 1_000_000):
        times = []
        for _ in range(rounds):
            make = partial(Pool.of, num_layers=64, num_pages=num_pages, page=PAGE, heads=HEADS, dim=DIM, real=False)
            pools = make(), make()
            began = time.perf_counter()
            with _pair(pools, heads=HEADS):
                times.append(time.perf_counter() - began)
        found[f"{num_pages} pages"] = {"both_sides_ms": float(np.median(times)) * 1e3}
    return found


@contextmanager
def _pair(pools: tuple[Pool, Pool], *, heads: int) -> Iterator[tuple[KVManager, KVManager]]:
    with (
        pools[0].manager("prefill", backend="local", heads=heads) as prefill,
        pools[1].manager("decode", backend="local", heads=heads) as receiving,
    ):
        prefill.add_peer("decode", address=receiving.address)
        receiving.add_peer("prefill", address=prefill.address)
        prefill.wait_ready("decode", timeout_s=TIMEOUT_S)
        receiving.wait_ready("prefill", timeout_s=TIMEOUT_S)
        yield prefill, receiving


def between_processes(backend: str, transport: str, rounds: int, requests: int) -> dict[str, Any]:
    """Every figure that needs two processes."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=decode, args=(theirs, backend, transport), daemon=True)
    process.start()
    address, port = ours.recv()
    context = zmq.Context()
    echo = context.socket(zmq.DEALER)
    echo.set_hwm(0)
    echo.connect(f"tcp://127.0.0.1:{port}")
    pool = small_pool()
    try:
        with pool.manager("prefill", backend=backend, heads=HEADS, transport=transport) as manager:
            manager.add_peer("decode", address=address)
            ours.send(manager.address)
            manager.wait_ready("decode", timeout_s=TIMEOUT_S)
            assert ours.recv() == "ready"
            prefill = Prefill(manager, ours, echo)
            prefill.yield_to_waiter(20)
            found = {
                "yield_to_waiter": prefill.yield_to_waiter(rounds),
                "concurrent": prefill.many(1000, max(3, rounds // 50)),
                "caller_loop": prefill.caller_loop(16, 7),
                "growth": prefill.growth(requests),
            }
            ours.send("exit")
            return found
    finally:
        process.join(10)
        process.kill()
        echo.close(0)
        context.term()


@click.command(context_settings={"show_default": True})
@click.option("--backend", default="nixl", help="Engine.")
@click.option("--transport", default="auto", help="Transport of the engine.")
@click.option("--rounds", type=click.IntRange(1), default=300, help="Rounds of figures in microseconds.")
@click.option("--requests", type=click.IntRange(500), default=10_000, help="Requests after which resources are compared.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to this file.")
def main(*, backend: str, transport: str, rounds: int, requests: int, json_file: Path | None) -> None:
    """Measure the control path."""
    found = {
        **conditions(),
        "backend": backend,
        "send": large_send(max(20, rounds // 10)),
        "set_up": set_up(5),
        **between_processes(backend, transport, rounds, requests),
    }
    text = json.dumps(found, indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    main()
