"""Soak: very many small requests over a real engine between two processes, and whether anything grows.

Both processes are looked at as they go: resident memory, open descriptors, threads, files in `/dev/shm`. Every request's
bytes are checked. What has ended is remembered for a while (`Limits.max_tombstones`), so memory grows until that is full; a
run is good when from then on nothing does::

    python -m harness.soak --backend nixl --requests 200000 --json soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
"""Of resident memory over the last third of the requests; the allocator's own moods are about one."""


@dataclass(frozen=True)
class Sample:
    """One process after some number of requests. `shm` counts this user's files in `/dev/shm`."""

    requests: int
    rss_mib: float
    fds: int
    threads: int
    shm: int


def look(requests: int) -> Sample:
    """This process now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    shm = sum(1 for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid())
    return Sample(requests, round(resident, 2), len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), shm)


class Side:
    """One rank with `WINDOW` times the pages of a request."""

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
        self.wrong = 0
        self.seconds = 0.0

    def run(self, total: int) -> None:
        """Send or receive that many requests, `WINDOW` at a time."""
        self.manager.wait_ready(self.peer)
        poller = select.poll()
        poller.register(self.manager.fileno(), select.POLLIN)
        places, begun, ended, began = list(range(WINDOW)), 0, 0, time.monotonic()
        every = max(1, total // SAMPLES)
        while ended < total:
            while places and begun < total:
                self._begin(begun, places.pop())
                begun += 1
            poller.poll(1000)
            for event in self.manager.events():
                places.append(self._end(event))
                ended += 1
                if ended % every == 0:
                    self.samples.append(look(ended))
        self.seconds = time.monotonic() - began

    def _begin(self, number: int, place: int) -> None:
        request_id = number.to_bytes(16, "big")
        rows = {"kv": Pages(np.array([2 * place, 2 * place + 1], dtype=np.int32))}
        if self.name == "decode":
            need = {"kv": (0, TOKENS)}
            self.manager.receiver(request_id, peer=self.peer, rows=rows, need=need, tag=(number, place))
            return
        for pair in self.pools.values():
            for tensor in pair:
                tensor[2 * place : 2 * place + 2] = number
        sender = self.manager.sender(request_id, peer=self.peer, tag=(number, place))
        sender.send(rows, tokens=(0, TOKENS))
        sender.finish()

    def _end(self, event: Event) -> int:
        number, place = event.tag
        if not event.ok:
            self.failed.append(str(event.error))
        elif self.name == "decode":
            pages = slice(2 * place, 2 * place + 2)
            self.wrong += any((tensor[pages] != number).any() for pair in self.pools.values() for tensor in pair)
        return int(place)

    def report(self) -> dict[str, Any]:
        health = self.manager.health()
        return {
            "name": self.name,
            "transport": self.manager.backend.transport,
            "seconds": round(self.seconds, 2),
            "failed": len(self.failed),
            "first_failure": self.failed[0] if self.failed else "",
            "wrong": self.wrong,
            "left": health.num_receiving + health.num_sending + sum(health.quarantined.values()),
            "samples": [asdict(sample) for sample in self.samples],
        }


def growth(samples: list[dict[str, Any]]) -> dict[str, float]:
    """How much each figure has grown over the last third, by its median at either end (three samples each)."""
    tail = samples[-max(6, len(samples) // 3) :]
    ends = {name: [sorted(s[name] for s in part)[1] for part in (tail[:3], tail[-3:])] for name in FIGURES}
    return {name: round(after - before, 2) for name, (before, after) in ends.items()}


def child(options: argparse.Namespace) -> None:
    """The decode side: its address to standard output, its report when it is done."""
    side = Side("decode", "prefill", backend=options.backend, transport=options.transport, tombstones=options.tombstones)
    sys.stdout.write(side.manager.address + "\n")
    sys.stdout.flush()
    side.manager.add_peer("prefill", address=sys.stdin.readline().strip())
    side.run(options.requests)
    sys.stdout.write(json.dumps(side.report()) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    side.manager.close()


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both sides' reports."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("backend", "transport", "requests", "tombstones")]
    side = Side("prefill", "decode", backend=options.backend, transport=options.transport, tombstones=options.tombstones)
    other = subprocess.Popen(
        [sys.executable, "-m", "harness.soak", "--child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        side.manager.add_peer("decode", address=other.stdout.readline().strip())
        other.stdin.write(side.manager.address + "\n")
        other.stdin.flush()
        side.run(options.requests)
        reports = [side.report(), json.loads(other.stdout.readline())]
        with suppress(OSError):
            other.stdin.write("\n")
            other.stdin.flush()
        other.wait(60)
    finally:
        side.manager.close()
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    return reports


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status is 0 if nothing failed, was wrong, was left over or grew."""
    parser = argparse.ArgumentParser(prog="python -m harness.soak", description="Very many small requests")
    parser.add_argument("--backend", default="nixl", metavar="NAME")
    parser.add_argument("--transport", default="auto", metavar="NAME")
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    parser.add_argument("--tombstones", type=int, default=Limits().max_tombstones, metavar="N", help="Limits.max_tombstones")
    parser.add_argument("--json", type=Path, metavar="FILE")
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
