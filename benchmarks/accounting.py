"""The cost of metrics, request log lines and verification, in CPU time per request and per MB::

    python -m benchmarks.accounting --pairs 21 --json docs/benchmarks/accounting.json

One process runs two managers over the `local` engine, so all CPU time belongs to this library and its copies. Each setting is
measured in pairs with the plain setting, in random order. The figure is the median over the pairs of the difference in CPU time
(`time.process_time`, all threads of both ranks), with the quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import statistics
import sys
import time
import timeit
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.commands.shell.text import plain_table, show
from disagg.core.rows import Rows
from disagg.core.timeline import Moments
from disagg.machine.processes import IdentitySocket, ProcessWatch
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Event, PeerRank, RequestKey, SendMessage, StartTransfer
from disagg.requests import Receiver, Sender
from disagg.runtime.accounting import RequestRecord, as_line
from disagg.runtime.metrics import Metrics
from disagg.state import paged
from harness.conditions import conditions

PAGE = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "metrics": {"metrics_port": 0},
    "request lines": {"log": logging.INFO},
    "metrics and lines": {"metrics_port": 0, "log": logging.INFO},
    "verify=full": {"verify": "full"},
}
PROTOCOL_PAGES = Pages(np.arange(4, dtype=np.int32))
here, there = Sessions(), Sessions()
AT_ONCE = 8
"""Requests under way at a time; each has pages of its own."""
SIZES = {"small": 2, "large": 512}
"""Pages of a request: 16 KiB each on every rank."""


class Nowhere(logging.Handler):
    """Formats a log line and drops it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


@dataclass
class Pair:
    """Two connected ranks."""

    prefill: KVManager
    decode: KVManager
    log: int
    num_pages: int
    pools: list[Any]

    def run(self, requests: int) -> float:
        """CPU seconds of `requests` requests, `AT_ONCE` at a time."""
        logging.getLogger("disagg.requests").setLevel(self.log)
        ids = np.random.default_rng(1).permutation(AT_ONCE * self.num_pages).astype(np.int32)
        shares = [{"kv": Pages(part)} for part in np.split(ids, AT_ONCE)]
        tokens = self.num_pages * PAGE
        began = time.process_time()
        for _ in range(0, requests, AT_ONCE):
            handles: list[Receiver | Sender] = []
            for rows in shares:
                request = new_request_id()
                handles.append(self.decode.receiver(request, peer="prefill", rows=rows, need={"kv": (0, tokens)}))
                sender = self.prefill.sender(request, peer="decode")
                sender.send(rows, tokens=(0, tokens))
                sender.finish()
                handles.append(sender)
            for handle in handles:
                event = handle.wait(timeout_s=60)
                if not event.ok:
                    raise SystemExit(f"a request failed: {event.error}")
        return time.process_time() - began


def make(stack: ExitStack, settings: dict[str, Any], num_pages: int) -> Pair:
    """Both ranks with the given settings."""
    more = {name: value for name, value in settings.items() if name != "log"}
    managers, pools = {}, []
    for name in ("prefill", "decode"):
        tensors = {layer: tuple(np.ones((AT_ONCE * num_pages, PAGE, 2, 64), np.uint16) for _ in "kv") for layer in range(2)}
        pools.append(tensors)
        kv = paged.gqa(tensors, axes="page token kv_head dim", num_kv_heads=2, topology=Topology())
        managers[name] = stack.enter_context(
            KVManager(name=name, topology=Topology(), components=[kv], model=ModelId("m"), backend="local", **more)
        )
    managers["prefill"].add_peer("decode", address=managers["decode"].address)
    managers["decode"].add_peer("prefill", address=managers["prefill"].address)
    managers["prefill"].wait_ready("decode")
    managers["decode"].wait_ready("prefill")
    return Pair(managers["prefill"], managers["decode"], settings.get("log", logging.WARNING), num_pages, pools)


def measure(name: str, size: str, *, pairs: int, requests: int, rng: random.Random) -> dict[str, Any]:
    """The row of one setting: its differences to the plain setting."""
    num_pages = SIZES[size]
    differences, plain_cpu = [], []
    with ExitStack() as stack:
        chosen = {which: make(stack, SETTINGS[which], num_pages) for which in ("plain", name)}
        for pair in chosen.values():
            pair.run(requests)
        for _ in range(pairs):
            order = list(chosen)
            rng.shuffle(order)
            spent = {which: chosen[which].run(requests) for which in order}
            differences.append(spent[name] - spent["plain"])
            plain_cpu.append(spent["plain"])
    nbytes = num_pages * PAGE * 2 * 64 * 2 * 2 * 2
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "setting": name,
        "size": size,
        "bytes_per_request": nbytes,
        "requests": requests,
        "pairs": pairs,
        "plain_us_per_request": round(statistics.median(plain_cpu) / requests * 1e6, 1),
        "added_us_per_request": [round(value / requests * 1e6, 1) for value in (low, median, high)],
        "added_us_per_mb": [round(value / requests / (nbytes / 1e6) * 1e6, 1) for value in (low, median, high)],
    }


def protocol(number: int) -> None:
    """One request through the protocol sessions of both sides, without I/O."""
    prefill, decode, key = PeerRank("prefill", 0), PeerRank("decode", 0), RequestKey(number.to_bytes(16, "big"), 0)
    rows: dict[str, Rows] = {"kv": PROTOCOL_PAGES}
    there.receives.open(
        key,
        peer="prefill",
        nonce=number,
        source_group=0,
        rows=rows,
        need={"kv": (0, 64)},
        expected={0: {"kv": (tuple(range(32)), (0, 64))}},
        now=0.0,
        deadline=60.0,
    )
    session = here.sends.open(key, peer="decode", expected=frozenset({0}), peer_group_size=1, now=0.0, deadline=60.0)
    here.sends.send(session, Chunk(0, rows, (0, 64), None), 0.0)
    here.sends.finish(session, b"", 0.0)
    ended = 0
    while there.effects or here.effects:
        for sessions, sender, other in ((there, decode, here), (here, prefill, there)):
            while sessions.effects:
                match sessions.effects.popleft():
                    case SendMessage(_, message):
                        other.on_message(sender, message, 0.0)
                    case StartTransfer(ticket):
                        sessions.sends.settled(ticket, now=0.0)
                    case Event(ok=True):
                        ended += 1
    if ended != 2:
        raise SystemExit(f"expected the request to succeed on both sides, found {ended} successes")


def parts() -> None:
    """Print the cost of each step done once per request and rank: best of seven."""
    lines = []
    numbers = itertools.count(1)
    identity = IdentitySocket()
    own = ProcessWatch.attest(identity.name)
    assert own is not None
    for what, call, number in (
        ("protocol, both ranks", lambda: protocol(next(numbers)), 2_000),
        ("fence, alive", own.is_quiet, 200),
    ):
        best = min(timeit.repeat(call, number=number, repeat=7)) / number
        lines.append((what, f"{best * 1e6:.2f}"))
    metrics = Metrics()
    count = partial(metrics.count, direction="send", peer="decode", cause="", nbytes=1, seconds=0.1)
    timeline = Moments().timeline()
    texts = {
        "rank": "a/0",
        "request_id": "00" * 16,
        "label": "",
        "direction": "send",
        "peer": "b",
        "outcome": "ok",
        "cause": "",
        "lease": "held",
    }

    def record() -> RequestRecord:
        return RequestRecord(attempt=0, nbytes=1, pieces=2, timeline=timeline, error="", **texts)

    made = record()
    for what, run in (("count", count), ("record", record), ("line", lambda: as_line(made.values))):
        best = min(timeit.repeat(run, number=20_000, repeat=7)) / 20_000
        lines.append((what, f"{best * 1e6:.2f}"))
    show(plain_table(("step", "us"), lines, right=("us",)), Console())


def main() -> int:
    """Measure all settings and print a table."""
    parser = argparse.ArgumentParser(description="The cost of metrics, request log lines and verification")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", action="store_true", help="only the steps done once per request and rank")
    options = parser.parse_args()
    if options.parts:
        parts()
        return 0
    logger = logging.getLogger("disagg.requests")
    logger.addHandler(Nowhere())
    logger.propagate = False
    about, rng, results = conditions(), random.Random(options.seed), []
    columns, lines = ("setting", "bytes", "plain us", "added us (quartiles)", "added us/MB"), list[tuple[str, ...]]()
    for size, requests in (("small", 400), ("large", 48)):
        for name in list(SETTINGS)[1:]:
            found = measure(name, size, pairs=options.pairs, requests=requests, rng=rng)
            results.append(found)
            added, per_mb = ("/".join(f"{v:.1f}" for v in found[f"added_us_per_{w}"]) for w in ("request", "mb"))
            lines.append((name, str(found["bytes_per_request"]), str(found["plain_us_per_request"]), added, per_mb))
    show(plain_table(columns, lines, right=columns[1:]), Console())
    if options.json:
        options.json.write_text(json.dumps({**about, "seed": options.seed, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
