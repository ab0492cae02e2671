"""One rank of `harness.chaos`: a process with tiny pools that does as it is told, and checks every byte it is given.

It reads one JSON object per line from standard input and writes one per line to standard output; it ends with its input.
What a page holds is a function of (request id, attempt, global coordinate), so what arrives is compared with what must have,
wherever it came from. Pages that nobody has hold a canary, which is looked at before a page is used again: whoever writes to
a page after its lease was released is found out. Of pages, the one that was released last is used first.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.backends.base import StagingShape
from disagg.core.errors import DisaggError
from disagg.core.rows import Pages
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.manager import KVManager
from disagg.protocol.messages import Verify
from disagg.protocol.peer_state import ConnectionLimits
from disagg.protocol.types import Event, Limits
from disagg.requests import Receiver, Sender
from disagg.state import paged
from disagg.testing.faults import BackendFaults, inject

NUM_LAYERS = 2
NUM_KV_HEADS = 4
DIMS = {"k": 8, "v": 6}
CANARY = 0xC0FFEE11
MAX_TOKENS = 256
TURN_S = 0.02
SUPERVISED = ("disagg-control-", "disagg-transfers-", "disagg-sums-")
"""Threads that live as long as their manager; engines have others, which come and go with peers."""

Words = npt.NDArray[np.uint32]


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank is started. `faults` are `BackendFaults`' fields."""

    name: str
    tp: int
    tp_rank: int
    page: int
    num_pages: int
    axes: str
    backend: str
    transport: str
    listen: str
    leader: str | None
    pack_below: int | None
    verify: Verify
    faults: dict[str, Any]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as one rank has it. Times in seconds from now; `chunks`: tokens where sends are cut."""

    request_id: str
    attempt: int
    direction: str
    peer: str
    tokens: int
    first: int
    deadline_s: float
    delay_s: float
    abort_s: float | None
    hold_s: float
    chunks: tuple[int, ...]


def content(job: Job, role: str, layer: int, *, heads: range, tokens: range) -> Words:
    """`[token, head, dim]`: what these coordinates of an attempt hold on every rank that has them."""
    seed = hashlib.blake2b(f"{job.request_id}#{job.attempt}".encode(), digest_size=8).digest()
    token, head, dim = np.ix_(np.arange(tokens.start, tokens.stop), np.arange(heads.start, heads.stop), np.arange(DIMS[role]))
    place = (((layer * 2 + (role == "v")) * MAX_TOKENS + token) * NUM_KV_HEADS + head) * 16 + dim
    mixed = place.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.frombuffer(seed, np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


@dataclass
class Holding:
    """Pages that a request has, and its handle once there is one."""

    job: Job
    pages: list[int]
    handle: Receiver | Sender | None = None


class Pool:
    """The rank's memory, seen as `[page, token, head, dim]` whatever its axis order, and who has which page."""

    def __init__(self, orders: RankOrders) -> None:
        self.page, self.num_pages = orders.page, orders.num_pages
        size = NUM_KV_HEADS // orders.tp
        self.heads = range(orders.tp_rank * size, (orders.tp_rank + 1) * size)
        names = orders.axes.split()
        self.tensors: dict[int, dict[str, Words]] = {}
        self._views: dict[tuple[int, str], Words] = {}
        for layer in range(NUM_LAYERS):
            self.tensors[layer] = {}
            for role, dim in DIMS.items():
                sizes = {"page": self.num_pages, "token": self.page, "kv_head": size, "dim": dim}
                tensor = self.tensors[layer][role] = np.full([sizes[name] for name in names], CANARY, dtype=np.uint32)
                self._views[layer, role] = tensor.transpose([names.index(n) for n in ("page", "token", "kv_head", "dim")])
        self.free = list(range(self.num_pages))
        self.wrong: list[str] = []

    def take(self, job: Job, *, from_token: int) -> list[int] | None:
        """Pages for a job's tokens; `None` where there are not enough."""
        count = -(-job.tokens // self.page) - from_token // self.page
        if len(self.free) < count:
            return None
        pages = [self.free.pop() for _ in range(count)]
        self.look(pages)
        return pages

    def look(self, pages: list[int]) -> None:
        """Nobody has these pages: nobody may have written to them."""
        for (layer, role), view in self._views.items():
            for page in pages:
                if (view[page] != CANARY).any():
                    self.wrong.append(f"page {page}, layer {layer}, {role}: written after its lease was released")
                    view[page] = CANARY

    def give_back(self, pages: list[int]) -> None:
        for view in self._views.values():
            view[pages] = CANARY
        self.free.extend(pages)

    def fill(self, job: Job, pages: list[int]) -> None:
        """Put an attempt's content into its pages."""
        for (layer, role), view in self._views.items():
            at = np.array(pages)[np.arange(job.tokens) // self.page], np.arange(job.tokens) % self.page
            view[at] = content(job, role, layer, heads=self.heads, tokens=range(job.tokens))

    def check(self, job: Job, pages: list[int], when: str) -> None:
        """Every byte of a successful request: what was needed is there, and what was not is untouched."""
        first = job.first // self.page * self.page
        span = len(pages) * self.page
        for (layer, role), view in self._views.items():
            found = view[pages].reshape(span, *view.shape[2:])
            expected = np.full_like(found, CANARY)
            expected[job.first - first : job.tokens - first] = content(
                job, role, layer, heads=self.heads, tokens=range(job.first, job.tokens)
            )
            if (found != expected).any():
                token = first + int((found != expected).any(axis=(1, 2)).argmax())
                self.wrong.append(
                    f"{job.request_id}#{job.attempt} {when}: layer {layer}, {role}: {int((found != expected).sum())} words "
                    f"wrong, the first of token {token} (needed: [{job.first}, {job.tokens}))"
                )


class Rank:
    """Carries out orders."""

    def __init__(self, orders: RankOrders) -> None:
        self.pool = Pool(orders)
        topology = Topology(tp=orders.tp, tp_rank=orders.tp_rank)
        pairs = {layer: (tensors["k"], tensors["v"]) for layer, tensors in self.pool.tensors.items()}
        faults = BackendFaults(**{**orders.faults, "delay_s": tuple(orders.faults.get("delay_s", (0.0, 0.05)))})
        self.manager = KVManager(
            name=orders.name,
            topology=topology,
            components=[paged.gqa(pairs, axes=orders.axes, num_kv_heads=NUM_KV_HEADS, topology=topology)],
            model=ModelId("chaos"),
            backend=inject(
                orders.backend, faults, staging=StagingShape(pack_below=4096, slot_nbytes=2000, num_slots=4, num_rings=64)
            ),
            listen=orders.listen,
            leader=orders.leader,
            transport=orders.transport,
            pack_below=orders.pack_below,
            verify=orders.verify,
            limits=Limits(retry_s=0.1, max_retry_s=1.0, drain_timeout_s=1.0),
            connection_limits=ConnectionLimits(
                hello_retry_s=0.05, max_hello_retry_s=0.5, heartbeat_s=0.3, heartbeat_timeout_s=5.0
            ),
        )
        self._held: dict[tuple[str, str, int], Holding] = {}
        self._unwanted: set[tuple[str, int]] = set()
        self._threads: set[str] = set()
        self._leased = 0
        self._released: deque[list[int]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._going = True

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), action))

    def run(self) -> None:
        """Until standard input ends, or says so."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self.manager.fileno(), select.POLLIN)
        said = b""
        while self._going:
            due = self._timers[0][0] - time.monotonic() if self._timers else TURN_S
            ready = dict(poller.poll(max(0.0, min(due, TURN_S)) * 1000))
            if 0 in ready:
                chunk = os.read(0, 1 << 16)
                if not chunk:
                    return
                *lines, said = (said + chunk).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            for event in self.manager.events():
                self._end(event)
            while self._released:
                self.pool.give_back(self._released.popleft())
                self._leased -= 1
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            for what in self.pool.wrong:
                say({"op": "wrong", "what": what})
            self.pool.wrong.clear()

    def _obey(self, order: dict[str, Any]) -> None:
        match order["op"]:
            case "peers":
                for name, address in order["peers"].items():
                    self.manager.add_peer(name, address=address)
            case "job":
                job = msgspec.convert(order["job"], Job)
                self.after(job.delay_s, lambda: self._begin(job))
            case "abort":
                self._abort(order["request_id"], order["attempt"])
            case "ask":
                self._answer()
            case "exit":
                self._going = False

    def _abort(self, request_id: str, attempt: int) -> None:
        """Now, or as soon as the request has begun."""
        holding = next((h for key, h in self._held.items() if key[1:] == (request_id, attempt)), None)
        if holding is not None and holding.handle is not None:
            holding.handle.abort("another rank has no room for it")
        self._unwanted.add((request_id, attempt))

    def _answer(self) -> None:
        health = self.manager.health()
        self.pool.look(self.pool.free)
        alive = {thread.name for thread in threading.enumerate() if thread.name.startswith(SUPERVISED)}
        self._threads |= alive
        say(
            {
                "op": "state",
                "under_way": len(self._held),
                "leased": self._leased,
                "quarantined": sum(health.quarantined.values()),
                "reasons": health.quarantined,
                "free": len(self.pool.free),
                "num_pages": self.pool.num_pages,
                "problem": health.problem,
                "ready": sorted(name for name, peer in health.peers.items() if peer.ready),
                "problems": {name: peer.problem for name, peer in health.peers.items() if not peer.ready},
                "dead_threads": sorted(self._threads - alive),
            }
        )

    def _begin(self, job: Job) -> None:
        sends = job.direction == "send"
        if (job.request_id, job.attempt) in self._unwanted:
            self._tell(job, "skipped", error="it was aborted before it began")
            return
        pages = self.pool.take(job, from_token=0 if sends else job.first)
        if pages is None:
            self._tell(job, "skipped", error="no pages")
            return
        holding = Holding(job, pages)
        self._held[job.direction, job.request_id, job.attempt] = holding
        try:
            holding.handle = self._send(holding) if sends else self._receive(holding)
        except DisaggError as error:
            del self._held[job.direction, job.request_id, job.attempt]
            self.pool.give_back(pages)
            self._tell(job, "skipped", error=str(error))
            return
        if job.abort_s is not None:
            handle = holding.handle
            self.after(job.abort_s, lambda: handle.abort("chaos"))

    def _send(self, holding: Holding) -> Sender:
        job = holding.job
        self.pool.fill(job, holding.pages)
        sender = self.manager.sender(
            bytes.fromhex(job.request_id), peer=job.peer, attempt=job.attempt, deadline_s=job.deadline_s, tag=holding
        )
        rows = {"kv": Pages(np.array(holding.pages, dtype=np.int32))}
        for start, stop in itertools.pairwise((0, *job.chunks, job.tokens)):
            sender.send(rows, tokens=(start, stop))
        sender.finish(payload=job.request_id.encode())
        return sender

    def _receive(self, holding: Holding) -> Receiver:
        job = holding.job
        return self.manager.receiver(
            bytes.fromhex(job.request_id),
            peer=job.peer,
            attempt=job.attempt,
            rows={"kv": Pages(np.array(holding.pages, dtype=np.int32), job.first)},
            need={"kv": (job.first, job.tokens)},
            deadline_s=job.deadline_s,
            tag=holding,
        )

    def _end(self, event: Event) -> None:
        holding: Holding = event.tag
        job, pages = holding.job, holding.pages
        del self._held[job.direction, job.request_id, job.attempt]
        self._leased += 1
        if event.ok and job.direction == "receive":
            self.pool.check(job, pages, "at its success")
            if event.payload != job.request_id.encode():
                self.pool.wrong.append(f"{job.request_id}#{job.attempt}: payload {event.payload!r}")
            self.after(job.hold_s, lambda: self._let_go(holding, event))
        else:
            event.lease.on_release(lambda: self._released.append(pages))
        self._tell(job, "ok" if event.ok else "failed", error=str(event.error or ""))

    def _let_go(self, holding: Holding, event: Event) -> None:
        """The server has used the pages for a while: they must still be as they were."""
        self.pool.check(holding.job, holding.pages, "some time after its success")
        event.lease.on_release(lambda: self._released.append(holding.pages))

    def _tell(self, job: Job, outcome: str, *, error: str) -> None:
        named = {"request_id": job.request_id, "attempt": job.attempt, "direction": job.direction}
        say({"op": "ended", **named, "outcome": outcome, "error": error})


def say(words: dict[str, Any]) -> None:
    """One line to whoever gave the orders."""
    os.write(1, json.dumps(words).encode() + b"\n")


def main() -> None:
    """One rank, by the orders in the first argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    orders = msgspec.json.decode(sys.argv[1], type=RankOrders)
    rank = Rank(orders)
    say({"op": "up", "address": rank.manager.address, "transport": rank.manager.backend.transport})
    rank.run()
    rank.manager.close()


if __name__ == "__main__":
    main()
