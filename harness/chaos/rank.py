"""One rank of the chaos test: a process that carries out jobs and checks every byte it receives.

Reads one JSON message per line from standard input and writes one per line to standard output. Ends when its input ends.
"""

from __future__ import annotations

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
from typing import Any, cast

import msgspec
import numpy as np

from disagg.backends.abilities import Renewable
from disagg.backends.base import StagingShape
from disagg.core.errors import DisaggError
from disagg.core.leases import Lease, LeaseState
from disagg.core.rows import Pages
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.manager import KVManager
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.types import Event, Limits
from disagg.requests import Receiver, Sender
from disagg.state import paged
from disagg.testing.faults import BackendFaults, inject
from harness.chaos.jobs import Job, RankSettings
from harness.chaos.pool import NUM_KV_HEADS, PagePool

MAX_WAIT_S = 0.02
NUM_BEFORE_32_BITS = 100
"""After how many loans of slots their numbers need more than 32 bits."""
MAX_PROBLEMS = 8
"""Peers whose problems a rank reports."""
SUPERVISED = ("disagg-control-", "disagg-transfers-", "disagg-checksums-")
"""Threads that live as long as their manager. Threads of engines start and end with peers."""


@dataclass
class Holding:
    """The pages of a request, and its handle once it has started. `is_rival`: it is a second receiver of the same request."""

    job: Job
    pages: list[int]
    handle: Receiver | Sender | None = None
    is_rival: bool = False


class Rank:
    """A manager, its page pool, and the requests in progress."""

    def __init__(self, settings: RankSettings) -> None:
        self.pool = PagePool(settings)
        self._settings = settings
        self._poller = select.poll()
        self._poller.register(0, select.POLLIN)
        self.manager = self._open(settings.listen)
        self._held: dict[tuple[str, str, int], Holding] = {}
        self._unwanted: set[tuple[str, int]] = set()
        self._threads: set[str] = set()
        self._leases: dict[Lease, Holding] = {}
        self._released: deque[Lease] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._running = True
        self._max_wait_s = MAX_WAIT_S * settings.slow

    def _open(self, listen: str) -> KVManager:
        """A manager of the pool."""
        settings, slow = self._settings, self._settings.slow
        topology = Topology(tp=settings.tp, tp_rank=settings.tp_rank)
        pairs = {layer: (tensors["k"], tensors["v"]) for layer, tensors in self.pool.tensors.items()}
        faults = BackendFaults(**{**settings.faults, "delay_s": tuple(settings.faults.get("delay_s", (0.0, 0.05)))})
        manager = KVManager(
            name=settings.name,
            topology=topology,
            components=[paged.gqa(pairs, axes=settings.axes, num_kv_heads=NUM_KV_HEADS, topology=topology)],
            model=ModelId("chaos"),
            backend=inject(
                settings.backend, faults, staging=StagingShape(pack_below=4096, slot_nbytes=2000, window=4, num_lent=64)
            ),
            listen=listen,
            insecure=settings.off_loopback,
            trusted_network=settings.off_loopback,
            leader=settings.leader,
            transport=settings.transport,
            devices=settings.devices,
            pack_below=settings.pack_below,
            verify=settings.verify,
            limits=Limits(retry_s=0.1 * slow, max_retry_s=slow, drain_timeout_s=slow),
            connection_limits=ConnectionLimits(
                hello_retry_s=0.05 * slow,
                max_hello_retry_s=0.5 * slow,
                heartbeat_s=0.3 * slow,
                heartbeat_timeout_s=settings.silence_s,
            ),
        )
        lender = manager._runtime.sessions.lender
        lender._numbers = itertools.count(next(lender._numbers) + (1 << 32) - NUM_BEFORE_32_BITS)
        self._poller.register(manager.fileno(), select.POLLIN)
        write({"op": "up", "address": manager.address, "transport": manager.backend.transport})
        return manager

    def _reopen(self) -> None:
        """Close the manager, as a server does that goes on, and open another one at its address."""
        self._poller.unregister(self.manager.fileno())
        address = self.manager.address
        self.manager.close()
        self._take_events()
        self._threads.clear()
        self.manager = self._open(address)

    def _renew(self) -> None:
        runtime = self.manager._runtime
        runtime.command(lambda now: runtime.connections.renew(cast(Renewable, runtime.backend), now))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` after that time."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), action))

    def run(self) -> None:
        """Carry out messages until standard input ends, or an `exit` message arrives."""
        buffered = b""
        while self._running:
            due = self._timers[0][0] - time.monotonic() if self._timers else self._max_wait_s
            ready = dict(self._poller.poll(max(0.0, min(due, self._max_wait_s)) * 1000))
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    self._on_message(json.loads(line))
            self._take_events()
            while self._released:
                released = self._leases.pop(self._released.popleft())
                self.pool.give_back(released.job, released.pages)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            for what in self.pool.wrong:
                write({"op": "wrong", "what": what})
            self.pool.wrong.clear()

    def _take_events(self) -> None:
        for event in self.manager.events():
            (self._end_rival if event.tag.is_rival else self._end)(event)

    def _on_message(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "peers":
                for name, address in message["peers"].items():
                    self.manager.add_peer(name, address=address)
            case "forget":
                self.manager.remove_peer(message["peer"])
            case "reopen":
                self._reopen()
            case "renew":
                self._renew()
            case "execute":
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)"])
            case "job":
                job = msgspec.convert(message["job"], Job)
                self.after(job.delay_s, lambda: self._begin(job))
            case "abort":
                self._abort(message["request_id"], message["attempt"])
            case "rival":
                rival = msgspec.convert(message["job"], Job)
                self.after(rival.delay_s, lambda: self._begin_rival(rival))
            case "ask":
                self._report_state(asked_at=message["at"])
            case "exit":
                self._running = False

    def _abort(self, request_id: str, attempt: int) -> None:
        """Abort a request now, or skip it when its job starts."""
        holding = next((h for key, h in self._held.items() if key[1:] == (request_id, attempt)), None)
        if holding is not None and holding.handle is not None:
            holding.handle.abort("another rank has no room for it")
        self._unwanted.add((request_id, attempt))

    def _report_state(self, *, asked_at: float) -> None:
        health = self.manager.health()
        self.pool.check_canary(self.pool.free)
        alive = {thread.name for thread in threading.enumerate() if thread.name.startswith(SUPERVISED)}
        self._threads |= alive
        problems = ((name, peer.problem) for name, peer in health.peers.items() if not peer.ready)
        write(
            {
                "op": "state",
                "asked_at": asked_at,
                "under_way": len(self._held),
                "leased": len(self._leases),
                "quarantined": sum(health.quarantined.values()),
                "reasons": health.quarantined,
                "free": len(self.pool.free),
                "quarantined_pages": sum(
                    len(each.pages) for lease, each in self._leases.items() if self._is_quarantined(lease)
                ),
                "num_pages": self.pool.num_pages,
                "problem": health.problem,
                "ready": sorted(name for name, peer in health.peers.items() if peer.ready),
                "problems": dict(itertools.islice(problems, MAX_PROBLEMS)),
                "num_peers": len(health.peers),
                "losses": self.manager._runtime.connections.num_losses.total(),
                "cpu_s": time.process_time(),
                "dead_threads": sorted(self._threads - alive),
            }
        )

    def _is_quarantined(self, lease: Lease) -> bool:
        """Whether rows are quarantined; notes those that are without a reason."""
        state, reason = lease.status
        if state is LeaseState.QUARANTINED and not reason:
            self.pool.wrong.append("rows are quarantined without a reason")
        return state is LeaseState.QUARANTINED

    def _begin(self, job: Job) -> None:
        sends = job.direction == "send"
        if (job.request_id, job.attempt) in self._unwanted:
            self._report_end(job, "skipped", error="it was aborted before it began")
            return
        pages = self.pool.take(job, from_token=0 if sends else job.first)
        if pages is None:
            self._report_end(job, "skipped", error="no pages")
            return
        holding = Holding(job, pages)
        self._held[job.direction, job.request_id, job.attempt] = holding
        try:
            holding.handle = self._send(holding) if sends else self._receive(holding)
        except DisaggError as error:
            del self._held[job.direction, job.request_id, job.attempt]
            self.pool.give_back(job, pages)
            self._report_end(job, "skipped", error=str(error))
            return
        if job.abort_s is not None:
            handle = holding.handle
            self.after(job.abort_s, lambda: handle.abort("chaos"))

    def _begin_rival(self, job: Job) -> None:
        """Open a second receiver for a request, with pages of its own. It must be refused, at once or later."""
        first = self._held.get(("receive", job.request_id, job.attempt))
        pages = None if first is None else self.pool.take(job, from_token=job.first)
        if pages is None:
            return
        try:
            self._receive(Holding(job, pages, is_rival=True))
        except DisaggError as error:
            self.pool.give_back(job, pages)
            write({"op": "refused", "error": str(error)})

    def _end_rival(self, event: Event) -> None:
        """A second receiver was not refused at once. It must have failed."""
        holding: Holding = event.tag
        self._leases[event.lease] = holding
        event.lease.on_release(lambda: self._released.append(event.lease))
        if event.ok:
            self.pool.wrong.append(f"{holding.job.request_id}#{holding.job.attempt}: received a second time")
        else:
            write({"op": "refused", "error": str(event.error or "")})

    def _send(self, holding: Holding) -> Sender:
        job = holding.job
        self.pool.fill(job, holding.pages)
        sender = self.manager.sender(
            bytes.fromhex(job.request_id), peer=job.peer, attempt=job.attempt, deadline_s=job.deadline_s, tag=holding
        )
        rows = {"kv": Pages(np.array(holding.pages, dtype=np.int32))}
        pieces = list(itertools.pairwise((0, *job.chunks, job.tokens)))
        for number in job.order:
            sender.send(rows, tokens=pieces[number])
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
        """Check a received request, report its end, and reuse its pages once they are released."""
        holding: Holding = event.tag
        job, pages = holding.job, holding.pages
        del self._held[job.direction, job.request_id, job.attempt]
        self._leases[event.lease] = holding
        if event.ok and job.direction == "receive":
            self.pool.check(job, pages, "at its success")
            if event.payload != job.request_id.encode():
                self.pool.wrong.append(f"{job.request_id}#{job.attempt}: payload {event.payload!r}")
            self.after(job.hold_s, lambda: self._release(holding, event))
        else:
            event.lease.on_release(lambda: self._released.append(event.lease))
        self._report_end(job, "ok" if event.ok else "failed", error=str(event.error or ""))

    def _release(self, holding: Holding, event: Event) -> None:
        """Check received pages again after the server used them, then release them."""
        self.pool.check(holding.job, holding.pages, "some time after its success")
        event.lease.on_release(lambda: self._released.append(event.lease))

    def _report_end(self, job: Job, outcome: str, *, error: str) -> None:
        named = {"request_id": job.request_id, "attempt": job.attempt, "direction": job.direction}
        write({"op": "ended", **named, "outcome": outcome, "error": error})


def write(message: dict[str, Any]) -> None:
    """Write one message to standard output."""
    os.write(1, json.dumps(message).encode() + b"\n")


def run_rank(settings: RankSettings) -> None:
    """Run one rank until its standard input ends, or an `exit` message arrives."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rank = Rank(settings)
    rank.run()
    rank.manager.close()
