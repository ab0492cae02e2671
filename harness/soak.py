"""Soak test: many small requests over a real engine between two processes, to find anything that grows.

Samples the resident memory, open descriptors, threads and files in `/dev/shm` of both processes, and checks the bytes of
every request. Memory grows until the list of ended requests (`Limits.max_tombstones`) is full. A run is good if nothing
grows after that::

    python -m harness.soak --backend nixl --requests 200000 --json soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disagg.commands.shell.child import ChildProcess
from disagg.core.rows import Pages
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.manager import KVManager
from disagg.protocol.types import Event, Limits
from disagg.state import paged

WINDOW = 32
PAGE = 4
TOKENS = 2 * PAGE
SAMPLES = 40
FIGURES = ("rss_mib", "fds", "threads", "shm")
MAX_GROWTH_MIB = 8.0
"""Maximum growth of resident memory over the last third of the requests. The allocator alone causes about 1 MiB."""


@dataclass(frozen=True)
class Sample:
    """One process after `requests` requests. `shm` counts this user's files in `/dev/shm`."""

    requests: int
    rss_mib: float
    fds: int
    threads: int
    shm: int


def sample(requests: int) -> Sample:
    """A sample of this process, after `requests` requests."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    shm = sum(1 for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid())
    return Sample(requests, round(resident, 2), len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), shm)


class SoakRank:
    """One of the two ranks, with pages for `WINDOW` requests."""

    def __init__(self, name: str, peer: str, *, backend: str, transport: str, tombstones: int) -> None:
        self.name, self.peer = name, peer
        self.pools = {layer: tuple(np.zeros((2 * WINDOW, PAGE, 2, 8), np.uint64) for _ in "kv") for layer in range(2)}
        kv = paged.gqa(self.pools, axes="page token kv_head dim", num_kv_heads=2, topology=Topology())
        self.manager = KVManager(
            name=name,
            topology=Topology(),
            components=[kv],
            model=ModelId("soak"),
            backend=backend,
            transport=transport,
            limits=Limits(max_tombstones=tombstones),
        )
        self.samples: list[Sample] = []
        self.failed: list[str] = []
        self.num_wrong = 0
        self.seconds = 0.0

    def run(self, total: int) -> None:
        """Send or receive `total` requests, up to `WINDOW` at a time."""
        self.manager.wait_ready(self.peer)
        poller = select.poll()
        poller.register(self.manager.fileno(), select.POLLIN)
        free, begun, ended, began = list(range(WINDOW)), 0, 0, time.monotonic()
        every = max(1, total // SAMPLES)
        while ended < total:
            while free and begun < total:
                self._begin(begun, free.pop())
                begun += 1
            poller.poll(1000)
            for event in self.manager.events():
                free.append(self._end(event))
                ended += 1
                if ended % every == 0:
                    self.samples.append(sample(ended))
        self.seconds = time.monotonic() - began

    def _begin(self, number: int, index: int) -> None:
        request_id = number.to_bytes(16, "big")
        rows = {"kv": Pages(np.array([2 * index, 2 * index + 1], dtype=np.int32))}
        if self.name == "decode":
            need = {"kv": (0, TOKENS)}
            self.manager.receiver(request_id, peer=self.peer, rows=rows, need=need, tag=(number, index))
            return
        for pair in self.pools.values():
            for tensor in pair:
                tensor[2 * index : 2 * index + 2] = number
        sender = self.manager.sender(request_id, peer=self.peer, tag=(number, index))
        sender.send(rows, tokens=(0, TOKENS))
        sender.finish()

    def _end(self, event: Event) -> int:
        number, index = event.tag
        if not event.ok:
            self.failed.append(str(event.error))
        elif self.name == "decode":
            pages = slice(2 * index, 2 * index + 2)
            self.num_wrong += any((tensor[pages] != number).any() for pair in self.pools.values() for tensor in pair)
        return int(index)

    def report(self) -> dict[str, Any]:
        health = self.manager.health()
        return {
            "name": self.name,
            "transport": self.manager.backend.transport,
            "seconds": round(self.seconds, 2),
            "failed": len(self.failed),
            "first_failure": self.failed[0] if self.failed else "",
            "wrong": self.num_wrong,
            "left": health.num_receiving + health.num_sending + sum(health.quarantined.values()),
            "samples": [asdict(sample) for sample in self.samples],
        }


def growth(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Growth of each figure over the last third: the difference of the medians of three samples at either end."""
    tail = samples[-max(6, len(samples) // 3) :]
    ends = {name: [sorted(s[name] for s in part)[1] for part in (tail[:3], tail[-3:])] for name in FIGURES}
    return {name: round(after - before, 2) for name, (before, after) in ends.items()}


def child(options: argparse.Namespace) -> None:
    """Run the decode rank. Writes its address to standard output, and its report at the end."""
    rank = SoakRank("decode", "prefill", backend=options.backend, transport=options.transport, tombstones=options.tombstones)
    sys.stdout.write(rank.manager.address + "\n")
    sys.stdout.flush()
    rank.manager.add_peer("prefill", address=sys.stdin.readline().strip())
    rank.run(options.requests)
    sys.stdout.write(json.dumps(rank.report()) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    rank.manager.close()


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both ranks and return their reports."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("backend", "transport", "requests", "tombstones")]
    rank = SoakRank("prefill", "decode", backend=options.backend, transport=options.transport, tombstones=options.tombstones)
    other = ChildProcess([sys.executable, "-m", "harness.soak", "--child", *arguments], errors=None)
    try:
        rank.manager.add_peer("decode", address=other.receive(timeout_s=60.0))
        other.send(rank.manager.address)
        rank.run(options.requests)
        return [rank.report(), json.loads(other.receive(timeout_s=600.0))]
    finally:
        rank.manager.close()
        other.end(timeout_s=60.0)


def main(arguments: list[str] | None = None) -> int:
    """Run the test. Returns 0 if nothing failed, was wrong, was left over or grew."""
    parser = argparse.ArgumentParser(prog="python -m harness.soak", description="Run many small requests and report growth")
    parser.add_argument("--backend", default="nixl", metavar="NAME", help="engine")
    parser.add_argument("--transport", default="auto", metavar="NAME", help="transport of the engine")
    parser.add_argument("--requests", type=int, default=100_000, metavar="N", help="number of requests")
    parser.add_argument("--tombstones", type=int, default=Limits().max_tombstones, metavar="N", help="Limits.max_tombstones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports to FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options)
        return 0
    reports, good = run(options), True
    for report in reports:
        grown, last = growth(report["samples"]), report["samples"][-1]
        report["grown"] = grown
        steady = grown["rss_mib"] <= MAX_GROWTH_MIB and not any(grown[name] > 0 for name in ("fds", "threads", "shm"))
        good &= steady and not report["failed"] and not report["wrong"] and not report["left"]
        changes = ", ".join(f"{grown[name]:+g}" for name in FIGURES)
        sys.stdout.write(
            f"{report['name']:<8} {options.backend} over {report['transport']}: {options.requests} requests in "
            f"{report['seconds']} s, {report['failed']} failed, {report['wrong']} wrong, {report['left']} left over; "
            f"{last['rss_mib']} MiB, {last['fds']} descriptors, {last['threads']} threads, {last['shm']} files in /dev/shm; "
            f"over the last third {changes}"
            f"{' ' + report['first_failure'] if report['failed'] else ''}\n"
        )
    if options.json:
        settings = {name: getattr(options, name) for name in ("backend", "requests", "tombstones")}
        options.json.write_text(json.dumps({**settings, "sides": reports}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
