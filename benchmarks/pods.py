"""Ranks of another host that come and go for good, each under a new name: does the other side keep its speed, memory and rows?

    python -m benchmarks.pods --engine nixl --pods 500 --ends kill,close,cut --json pods-nixl.json

Needs root: the two hosts are network namespaces, so only the network tells the rank that stays that a pod has ended. Each pod
takes part in three requests, one after the other, whose bytes are compared. Every fourth one then ends while a request
travels. `kill`: SIGKILL; `close`: in order; `cut`: its host is cut off, then it is killed, then the host is back.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale import usage
from disagg import KVManager, ModelId, Pages, Receiver, Sender, Topology
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
DEADLINE_S = 30.0
AXES = {"prefill": "nhd", "decode": "hnd"}
PREFIX = "pods: "
LOADED = {"nixl": ("nixl._api",), "mooncake": ("mooncake.engine",)}
"""What a rank loads before it is opened: most of its start, and no network is needed for it."""
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


def note_time(found: list[float]) -> None:
    found.append(time.monotonic())


def rank(name: str, engine: str, side: str, host: str) -> None:
    """Run a prefill or decode rank. The first line on standard input opens it. For each further one, `send REQUEST` or
    `want NAME ADDRESS REQUEST`, serve that request and print its outcome.
    """
    for module in LOADED.get(engine, ()):
        importlib.import_module(module)
    if not sys.stdin.readline():
        return
    value = int(name) + 1 if side == "prefill" else 0
    pools, own = manager(name, engine, host, axes=AXES[side], value=value)
    say(own.address)
    for line in sys.stdin:
        *place, request = line.split()[1:]
        handle: Sender | Receiver
        if place:
            given: dict[str, Any] = {"rows": ROWS, "need": {"kv": (0, PAGES * PAGE)}, "deadline_s": DEADLINE_S}
            handle = own.receiver(bytes.fromhex(request), peer=place[0], address=place[1], **given)
        else:
            handle = own.sender(bytes.fromhex(request), deadline_s=DEADLINE_S)
            handle.finish(ROWS)
        began, freed = time.monotonic(), list[float]()
        event = handle.wait(timeout_s=2 * DEADLINE_S)
        ended = time.monotonic()
        own.events()  # until then the manager keeps them
        event.lease.on_release(partial(note_time, freed))
        while not freed and time.monotonic() < ended + DEADLINE_S:
            time.sleep(0.001)
        resident, descriptors = usage()
        found = {
            "ok": event.ok,
            "right": bool((pools == 1 + int(place[0])).all()) if place and event.ok else None,
            "ms": round(1e3 * (ended - began), 1),
            "held, ms": round(1e3 * (freed[0] - ended), 1) if freed else None,
            "descriptors": descriptors,
            "KiB": resident,
            "quarantined": own.health().quarantined,
        }
        if place:
            pools[:] = 0
        say(json.dumps(found))
    own.close()


class Process:
    """A rank in another process, at its host."""

    def __init__(self, hosts: Hosts, host: int, name: str, engine: str, side: str) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.pods", "rank", name, engine, side, hosts.addresses[host]]
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(Place(hosts.namespaces[host]).command(command), stdin=pipe, stdout=pipe, text=True)

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def open(self) -> str:
        """Open its manager. Returns its address."""
        self.tell("open")
        return self.read()

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


def rounds(engine: str, count: int, ends: list[str], *, stays: str = "decode") -> Iterator[dict[str, Any]]:
    """What each pod has cost the rank of the other side, which `stays`."""
    goes = "decode" if stays == "prefill" else "prefill"
    with contextlib.closing(Hosts()) as hosts:
        lasting = Process(hosts, 0, str(count), engine, stays)
        addresses = {stays: lasting.open()}
        later, requests = Process(hosts, 1, "0", engine, goes), itertools.count(1)
        for number, how in zip(range(count), itertools.cycle(ends), strict=False):
            own = later
            addresses[goes] = own.open()
            by_side = {stays: lasting, goes: own}
            later = Process(hosts, 1, str(number + 1), engine, goes)
            found: list[dict[str, Any]] = []
            is_busy = number % BUSY_EVERY == BUSY_EVERY - 1
            for nth in range(TIMED + is_busy):
                request = f"{next(requests):032x}"
                by_side["decode"].tell(f"want {by_side['prefill'].name} {addresses['prefill']} {request}")
                by_side["prefill"].tell(f"send {request}")
                if nth == TIMED:
                    time.sleep(BUSY_S)
                    own.end(hosts, how)
                found.append(json.loads(lasting.read()))
                if nth < TIMED:
                    found[-1]["right"] = found[-1]["right"] if stays == "decode" else json.loads(own.read())["right"]
            if not is_busy:
                own.end(hosts, how)
            yield {"end": how, "busy": is_busy, "requests": found}
        for each in (later, lasting):
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
        "failed": sum(not each["ok"] for one in found for each in one["requests"][:TIMED]),
        "failed at the end": sum(not each["ok"] for one in found for each in one["requests"][TIMED:]),
        "rows held, most ms": None if None in held else max(held),
        "MiB more": round((settled[-1]["KiB"] - settled[0]["KiB"]) / 1024, 1),
        "descriptors more": settled[-1]["descriptors"] - settled[0]["descriptors"],
        "quarantined": requests[-1]["quarantined"],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the pods. Returns 1 if a byte was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pods", description="Let the ranks of one side come and go")
    parser.add_argument("--engine", default="nixl", help="nixl, mooncake or auto (nixl)")
    parser.add_argument("--pods", type=int, default=40, metavar="N", help="so many ranks, one after the other (40)")
    parser.add_argument("--ends", default="kill,close,cut", metavar="END,END", help="how they end, in turn (kill,close,cut)")
    parser.add_argument("--stays", choices=("prefill", "decode"), default="decode", help="the side whose rank stays (decode)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    found = list(rounds(options.engine, options.pods, options.ends.split(","), stays=options.stays))
    total = {"engine": options.engine, "ends": options.ends, "stays": options.stays, **summary(found)}
    print(json.dumps(total))
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions(), **total}, indent=2) + "\n")
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
    else:
        sys.exit(main())
