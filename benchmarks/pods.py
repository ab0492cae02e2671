"""Prefill ranks of another host that come and go for good, each under a new name: does decode keep its speed, memory and rows?

    python -m benchmarks.pods --engine nixl --pods 500 --ends kill,close,cut --json pods-nixl.json

Needs root: the two hosts are network namespaces, so nothing but the network tells decode that a pod has ended. Each pod sends
three requests, one after the other, whose bytes are compared. Every fourth one then ends while a request travels. `kill`:
SIGKILL; `close`: in order; `cut`: its host is cut off, then it is killed, then the host is back.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology
from disagg.state import paged
from harness.chaos.places import Hosts, Place
from harness.conditions import conditions

LAYERS, PAGES, PAGE, HEADS, DIM = 8, 64, 16, 8, 64
ROWS = {"kv": Pages(np.arange(PAGES))}
TIMED = 3
BUSY_EVERY = 4
BUSY_S = 0.005
"""How long a request has travelled when its pod ends."""
CUT_S = 1.5
PREFIX = "pods: "
COMPARED = 10
"""The first and the last so many pods are compared, and memory from this one on."""


def manager(name: str, engine: str, host: str, *, axes: str, value: int) -> tuple[np.ndarray, KVManager]:
    """A rank, and its pools `[layer, k or v, page, ...]`."""
    shape = (PAGE, HEADS, DIM) if axes == "nhd" else (HEADS, PAGE, DIM)
    pools = np.full((LAYERS, 2, PAGES, *shape), value, np.uint16)
    layers = {number: (pool[0], pool[1]) for number, pool in enumerate(pools.view(np.float16))}
    kv = paged.gqa(layers, axes=axes, num_kv_heads=HEADS, topology=Topology())
    given: dict[str, Any] = {"insecure": True, "trusted_network": True, "admit": "any", "listen": f"tcp://{host}:0"}
    return pools, KVManager(name=name, topology=Topology(), components=[kv], model=ModelId("pods"), backend=engine, **given)


def say(line: str) -> None:
    print(PREFIX + line, flush=True)


def pod(name: str, engine: str, host: str) -> None:
    """A rank that sends all its pages for each request id that it reads."""
    _, own = manager(name, engine, host, axes="nhd", value=1 + int(name))
    say(own.address)
    for line in sys.stdin:
        own.sender(bytes.fromhex(line)).finish(ROWS)
    own.close()


def note_time(found: list[float]) -> None:
    found.append(time.monotonic())


def hub(engine: str, host: str) -> None:
    """The rank that receives. It reads `name address request`, and writes what has become of the request."""
    pools, own = manager("hub", engine, host, axes="hnd", value=0)
    say(own.address)
    for line in sys.stdin:
        name, address, request = line.split()
        began, freed = time.monotonic(), list[float]()
        receiver = own.receiver(
            bytes.fromhex(request), peer=name, address=address, rows=ROWS, need={"kv": (0, PAGES * PAGE)}, deadline_s=30.0
        )
        say("opened")
        event = receiver.wait(timeout_s=60.0)
        ended = time.monotonic()
        event.lease.on_release(partial(note_time, freed))
        while not freed and time.monotonic() < ended + 20.0:
            time.sleep(0.001)
        is_right = bool((pools == 1 + int(name)).all()) if event.ok else None
        pools[:] = 0
        health = own.health()
        found = {
            "ms": round(1e3 * (ended - began), 1),
            "right": is_right,
            "held, ms": round(1e3 * (freed[0] - ended), 1) if freed else None,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "KiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10,
            "quarantined": health.quarantined,
            "peers": len(health.peers),
        }
        say(json.dumps(found))
    own.close()


class Process:
    """A rank in another process, at its host."""

    def __init__(self, hosts: Hosts, host: int, kind: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.pods", kind, *arguments, hosts.addresses[host]]
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(Place(hosts.namespaces[host]).command(command), stdin=pipe, stdout=pipe, text=True)
        self.address = ""

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def read(self) -> str:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(PREFIX):  # UCX writes there too
                return line.removeprefix(PREFIX).strip()
        raise RuntimeError(f"process {self.popen.pid} has ended")

    def end(self, hosts: Hosts, how: str) -> None:
        if how == "cut":
            hosts.cut(silently=False)
        if how != "close":
            self.popen.kill()
        with contextlib.suppress(BrokenPipeError):
            self.popen.communicate(timeout=60)
        if how == "cut":
            time.sleep(CUT_S)
            hosts.mend()


def rounds(engine: str, count: int, ends: list[str]) -> Iterator[dict[str, Any]]:
    """What each pod has cost."""
    with contextlib.closing(Hosts()) as hosts:
        decode = Process(hosts, 0, "hub", engine)
        decode.read()
        later = Process(hosts, 1, "pod", "0", engine)
        for number, how in zip(range(count), itertools.cycle(ends), strict=False):
            name, own, request = str(number), later, itertools.count(number * 10)
            address = own.read()
            if how != "cut":  # another one starts meanwhile
                later = Process(hosts, 1, "pod", str(number + 1), engine)

            def ask(name: str = name, own: Process = own, address: str = address, request: Iterator[int] = request) -> None:
                request_id = f"{next(request) + 1:032x}"
                decode.tell(f"{name} {address} {request_id}")
                assert decode.read() == "opened"
                own.tell(request_id)

            found: list[dict[str, Any]] = []
            for _ in range(TIMED):
                ask()
                found.append(json.loads(decode.read()))
            is_busy = number % BUSY_EVERY == BUSY_EVERY - 1
            if is_busy:
                ask()
                time.sleep(BUSY_S)
            own.end(hosts, how)
            if how == "cut":
                later = Process(hosts, 1, "pod", str(number + 1), engine)
            if is_busy:
                found.append(json.loads(decode.read()))
            yield {"end": how, "busy": is_busy, "requests": found}
        for each in (later, decode):
            each.end(hosts, "close")


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One row about all pods."""
    requests = [each for one in found for each in one["requests"]]
    timed = [statistics.median(each["ms"] for each in one["requests"][1:TIMED]) for one in found]
    settled = [one["requests"][0] for one in found[COMPARED:]] or [requests[-1]]
    held = [each["held, ms"] for each in requests]
    return {
        "pods": len(found),
        "first ten, ms": round(statistics.median(timed[:COMPARED]), 1),
        "last ten, ms": round(statistics.median(timed[-COMPARED:]), 1),
        "wrong": sum(each["right"] is False for each in requests),
        "failed": sum(each["right"] is None for one in found for each in one["requests"][:TIMED]),
        "failed at the end": sum(each["right"] is None for one in found for each in one["requests"][TIMED:]),
        "rows held, most ms": None if None in held else max(held),
        "MiB more": round((settled[-1]["KiB"] - settled[0]["KiB"]) / 1024, 1),
        "descriptors more": settled[-1]["descriptors"] - settled[0]["descriptors"],
        "quarantined": requests[-1]["quarantined"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the pods. Returns 1 if a byte was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pods", description="Let prefill ranks come and go")
    parser.add_argument("--engine", default="nixl", help="nixl, mooncake or auto (nixl)")
    parser.add_argument("--pods", type=int, default=40, metavar="N", help="so many ranks, one after the other (40)")
    parser.add_argument("--ends", default="kill,close,cut", metavar="END,END", help="how they end, in turn (kill,close,cut)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    found = list(rounds(options.engine, options.pods, options.ends.split(",")))
    total = {"engine": options.engine, "ends": options.ends, **summary(found)}
    print(json.dumps(total))
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions(), **total}, indent=2) + "\n")
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pod"]:
        pod(*sys.argv[2:])
    elif sys.argv[1:2] == ["hub"]:
        hub(*sys.argv[2:])
    else:
        sys.exit(main())
