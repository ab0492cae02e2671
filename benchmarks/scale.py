"""What many peers, open requests, tokens and writers at once cost one rank::

    python -m benchmarks.scale --peers 1,32,256,1024 --open 1,1000,10000 --tokens 4096,1048576 --incast 1,32 --json scale.json

One rank, the hub, receives over `cma` from ranks in other processes, several in each. Every byte of every request is compared.
CPU time is that of the hub's process, all threads. All peers live on this machine, so wall-clock times of many peers include
their work; the hub's CPU time does not.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.commands.shell.text import plain_table, show
from disagg.protocol.types import Event
from disagg.state import paged
from harness.conditions import conditions

PAGE, HEADS, DIM = 8, 8, 16
PAGES = 4096
RANKS_A_PROCESS = 16
SETTLE_S, IDLE_S = 8.0, 20.0
"""How long the hub rests before its idle CPU time is measured, and how long that takes: more than a period of renewals."""
NUM_ONE = 100
"""Requests of one page, one after the other, whose latency is measured."""
DEADLINE_S = 300.0
WRITTEN = 1 + np.arange(97, dtype=np.uint16)
"""What the pages of peers hold, in turn."""


def value_of(peer: int) -> int:
    """What every element of a peer's pages holds."""
    return int(WRITTEN[peer % len(WRITTEN)])


class Rank:
    """One rank with `num_layers` layers of `num_pages` pages. It packs nothing, so that many of them fit into memory."""

    def __init__(self, name: str, *, num_pages: int, num_layers: int = 1, value: int = 0) -> None:
        self.pools = np.full((num_layers, 2, num_pages, PAGE, HEADS, DIM), value, np.uint16)
        layers = {layer: (pool[0], pool[1]) for layer, pool in enumerate(self.pools.view(np.float16))}
        kv = paged.gqa(layers, axes="nhd", num_kv_heads=HEADS, topology=Topology())
        self.manager = KVManager(
            name=name, topology=Topology(), components=[kv], model=ModelId("scale"), backend="cma", admit="any", pack_below=0
        )


def serve(pipe: Connection, first: int, count: int, num_pages: int, num_layers: int) -> None:
    """Run `count` ranks in this process, each of which sends its pages when it is told to."""
    shared = {"num_pages": num_pages, "num_layers": num_layers}
    ranks = [Rank(f"p{number}", value=value_of(number), **shared) for number in range(first, first + count)]
    over = threading.Event()

    def drain() -> None:
        while not over.wait(0.02):
            for rank in ranks:
                rank.manager.events()

    threading.Thread(target=drain, daemon=True).start()
    pipe.send([rank.manager.address for rank in ranks])
    while (asked := pipe.recv()) is not None:
        for number, request_id, pages in asked:
            rows = {"kv": Pages(np.arange(pages) % num_pages)}
            ranks[number - first].manager.sender(request_id).finish(rows)
    over.set()
    for rank in ranks:
        rank.manager.close()


@dataclass
class Load:
    """What a part of a measurement has cost."""

    seconds: float
    cpu_s: float


class Hub:
    """The rank that receives, and the processes of its peers."""

    def __init__(
        self, stack: ExitStack, num_peers: int, *, num_pages: int = PAGES, peer_pages: int = 64, layers: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[tuple[int, Connection]] = []
        for first in range(0, num_peers, RANKS_A_PROCESS):
            ours, theirs = context.Pipe()
            given = theirs, first, min(RANKS_A_PROCESS, num_peers - first), peer_pages, layers
            process = context.Process(target=serve, args=given)
            process.start()
            stack.callback(process.join, 60)
            stack.callback(ours.send, None)
            self._pipes.append((first, ours))
        addresses = [address for _, pipe in self._pipes for address in pipe.recv()]
        self.num_peers, self.num_wrong = num_peers, 0
        self._peer_pages = peer_pages
        self.rank = Rank("hub", num_pages=num_pages, num_layers=layers)
        stack.callback(self.rank.manager.close)
        self._free = list(range(num_pages))
        self.before = usage()
        with measured() as self.connecting:
            for number, address in enumerate(addresses):
                self.rank.manager.add_peer(f"p{number}", address=address)
            for number in range(num_peers):
                self.rank.manager.wait_ready(f"p{number}", timeout_s=DEADLINE_S)
        self.after = usage()

    def open(self, peer: int, pages: int) -> bytes:
        """Reserve pages for a request of a peer."""
        request_id, rows = new_request_id(), [self._free.pop() for _ in range(pages)]
        given = {"kv": Pages(np.array(rows, dtype=np.int32))}
        need = {"kv": (0, pages * PAGE)}
        self.rank.manager.receiver(request_id, peer=f"p{peer}", rows=given, need=need, tag=(peer, rows), deadline_s=DEADLINE_S)
        return request_id

    def send(self, requests: Sequence[tuple[int, bytes, int]]) -> None:
        """Tell the peers to send: each request by its peer, id and pages."""
        for first, pipe in self._pipes:
            own = [each for each in requests if first <= each[0] < first + RANKS_A_PROCESS]
            if own:
                pipe.send(own)

    def take(self, count: int) -> list[Event]:
        """Wait for that many requests."""
        until, found = time.monotonic() + DEADLINE_S, list[Event]()
        while len(found) < count:
            found += self.rank.manager.events()
            if time.monotonic() > until:
                raise TimeoutError(f"{count - len(found)} requests are left")
            time.sleep(0.0002)
        return found

    def check(self, events: Sequence[Event]) -> None:
        """Compare the bytes of requests, and give their pages back."""
        for event in events:
            peer, rows = event.tag
            for row in rows:
                self.num_wrong += not event.ok or not (self.rank.pools[:, :, row] == value_of(peer)).all()
                self.rank.pools[:, :, row] = 0
            event.lease.on_release(functools.partial(self._free.extend, rows))

    def run(self, peers: Sequence[int], pages: int = 1) -> Load:
        """Requests of these peers at once. Bytes are compared afterwards."""
        with measured() as load:
            asked = [(peer, self.open(peer, pages), pages) for peer in peers]
            self.send(asked)
            events = self.take(len(asked))
        self.check(events)
        return load

    def latency_ms(self) -> tuple[float, float]:
        """Median and 99% of requests of one page of all peers in turn, one after the other."""
        times = sorted(self.run([number % self.num_peers]).seconds * 1e3 for number in range(NUM_ONE))
        return round(statistics.median(times), 2), round(times[int(0.99 * len(times))], 2)


def usage() -> tuple[int, int]:
    """Resident KiB and descriptors of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 10
    return resident, len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def measured() -> Iterator[Load]:
    """Wall-clock and CPU time of a block."""
    load, began, cpu = Load(0.0, 0.0), time.monotonic(), time.process_time()
    yield load
    load.seconds, load.cpu_s = time.monotonic() - began, time.process_time() - cpu


# -- the measurements --------------------------------------------------------------------------------------------------


def peers(count: int) -> dict[str, Any]:
    """All peers are connected; nothing is in flight."""
    with ExitStack() as stack:
        hub = Hub(stack, count)
        time.sleep(SETTLE_S)
        with measured() as idle:
            time.sleep(IDLE_S)
        hub.run(range(count))
        p50, p99 = hub.latency_ms()
        grown = [(after - before) / count for after, before in zip(hub.after, hub.before, strict=True)]
        return {
            "peers": count,
            "ready, s": round(hub.connecting.seconds, 2),
            "CPU to connect, ms a peer": round(1e3 * hub.connecting.cpu_s / count, 2),
            "idle CPU, us/s a peer": round(1e6 * idle.cpu_s / idle.seconds / count),
            "descriptors a peer": round(grown[1], 1),
            "KiB a peer": round(grown[0]),
            "one page, ms": p50,
            "p99": p99,
            "wrong": hub.num_wrong,
        }


def open_requests(count: int) -> dict[str, Any]:
    """Requests that wait for their sender."""
    with ExitStack() as stack:
        hub = Hub(stack, 1, num_pages=count + 8)
        hub.run([0])
        before = usage()[0]
        with measured() as opening:
            waiting = [(0, hub.open(0, 1), 1) for _ in range(count)]
        time.sleep(2)
        grown = usage()[0] - before
        with measured() as idle:
            time.sleep(5)
        p50, p99 = hub.latency_ms()
        with measured() as serving:
            hub.send(waiting)
            events = hub.take(count)
        hub.check(events)
        return {
            "open": count,
            "KiB each": round(grown / count, 1),
            "open one, us": round(1e6 * opening.seconds / count),
            "idle, cores": round(idle.cpu_s / idle.seconds, 3),
            "one more page, ms": p50,
            "p99": p99,
            "serve one, us": round(1e6 * serving.seconds / count),
            "wrong": hub.num_wrong,
        }


def tokens(count: int) -> dict[str, Any]:
    """One request of that many tokens."""
    pages = count // PAGE
    with ExitStack() as stack:
        hub = Hub(stack, 1, num_pages=pages, peer_pages=pages)
        loads = [hub.run([0], pages) for _ in range(5)]
        nbytes = hub.rank.pools.nbytes
        return {"tokens": count, **_speed(loads, nbytes), "wrong": hub.num_wrong}


def incast(count: int) -> dict[str, Any]:
    """That many writers send 4 MiB each to one rank at once."""
    pages = 1024
    with ExitStack() as stack:
        hub = Hub(stack, count, num_pages=count * pages, peer_pages=pages)
        hub.run(range(count), pages)
        loads = [hub.run(range(count), pages) for _ in range(5)]
        return {"writers": count, **_speed(loads, hub.rank.pools.nbytes), "wrong": hub.num_wrong}


def _speed(loads: Sequence[Load], nbytes: int) -> dict[str, float]:
    """The median of runs that move so many bytes each."""
    seconds = statistics.median(load.seconds for load in loads)
    return {"MB": round(nbytes / 1e6, 1), "ms": round(1e3 * seconds, 1), "GB/s": round(nbytes / seconds / 1e9, 2)}


MEASUREMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "peers": (peers, "1,32,256"),
    "open": (open_requests, "1,1000,10000"),
    "tokens": (tokens, "4096,65536,1048576"),
    "incast": (incast, "1,32"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the measurements that are asked for. Returns 1 if a byte was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="Measure what peers and requests cost")
    for name, (measure, usual) in MEASUREMENTS.items():
        parser.add_argument(f"--{name}", metavar="N,N", nargs="?", const=usual, help=f"{measure.__doc__} ({usual})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: dict[str, Any] = {"conditions": conditions(), "load": os.getloadavg()[0]}
    for name, (measure, _) in MEASUREMENTS.items():
        counts = getattr(options, name)
        rows = [measure(int(count)) for count in counts.split(",")] if counts else []
        if rows:
            found[name] = rows
            columns = list(rows[0])
            show(plain_table(columns, [[str(value) for value in row.values()] for row in rows], right=columns), Console())
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["wrong"] for name in MEASUREMENTS for row in found.get(name, ())))


if __name__ == "__main__":
    sys.exit(main())
