"""Two managers on two GPUs: the decode rank here, and the prefill rank in a child process that executes commands."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import select
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from disagg import KVManager, ModelId, Pages, Topology
from disagg.backends.abilities import PreparedSpans
from disagg.backends.base import TransferStatus
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.backends.nvlink.engine import NvlinkTransfer
from disagg.core.copies import CopyBatch
from disagg.core.spans import SpanBatch
from disagg.requests import Receiver, Sender
from disagg.state import paged

NHD, HND = "page token kv_head dim", "page kv_head token dim"
ROLES = ("prefill-0", "decode-0")
PATIENCE_S = 60.0
IN_FLIGHT = 4
"""Pipelined requests in flight, each of a quarter of the pools (512 MiB)."""


@dataclass(frozen=True)
class Case:
    """Pools and requests: `layers` of K and V, `pool_pages` pages of 16 tokens per pool, `num_pages` of them per request.

    `mixed`: the sides have different layouts, NHD and HND. `pack_below`: pieces below this many bytes are packed (`None`: the
    default). `conditions`: measure more requests, under `CONDITIONS`.
    """

    backend: str
    layers: int
    heads: int
    dim: int
    pool_pages: int
    num_pages: int
    repeat: int
    mixed: bool = False
    pack_below: int | None = None
    conditions: bool = False

    @property
    def piece(self) -> int:
        return self.dim * 2 * (1 if self.mixed else self.heads * 16)

    @property
    def direct(self) -> bool:
        return self.pack_below == 0

    @property
    def nbytes(self) -> int:
        return 2 * self.layers * self.num_pages * 16 * self.heads * self.dim * 2


@dataclass(frozen=True)
class One:
    """A request to send: the pause after its reservation is seen, and whether both sides busy-poll for its end."""

    request: bytes
    pause_s: float = 0.0
    polls: bool = False


class Timed(NvlinkBackend):
    """Records the start and the end of `submit_spans`, and the time at which `DONE` is seen."""

    marks: tuple[float, ...] = (0.0, 0.0, 0.0)

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> NvlinkTransfer:
        started = time.monotonic()
        transfer = super().submit_spans(prepared, batch)
        self.marks = (started, time.monotonic(), 0.0)
        return transfer

    def advance(self, transfer: NvlinkTransfer) -> None:
        super().advance(transfer)
        if transfer.status is not TransferStatus.PENDING:
            self.marks = (*self.marks[:2], time.monotonic())


class Rank:
    """One manager with pools on one GPU. Role 0 sends, role 1 receives."""

    def __init__(self, case: Case, role: int) -> None:
        self.torch = importlib.import_module("torch")
        self.case, self.role, self.device = case, role, f"cuda:{role}"
        self.axes = HND if case.mixed and role else NHD
        inner = (case.heads, 16) if self.axes == HND else (16, case.heads)
        shape = (case.pool_pages, *inner, case.dim)
        self.pools = {
            layer: tuple(self.torch.full(shape, -1, dtype=self.torch.int16, device=self.device) for _ in "kv")
            for layer in range(case.layers)
        }
        self.torch.cuda.synchronize(role)
        self.manager = KVManager(
            name=ROLES[role],
            topology=Topology(),
            components=[paged.gqa(self.pools, axes=self.axes, num_kv_heads=case.heads, topology=Topology())],
            model=ModelId("bench"),
            backend=Timed if case.backend == "nvlink" else case.backend,
            pack_below=case.pack_below,
        )
        self.ids = np.random.default_rng(case.num_pages + role).permutation(case.pool_pages)[: case.num_pages]
        self.rows = {"kv": Pages(self.ids.astype(np.int32), 0)}
        self.at = self.torch.from_numpy(self.ids).to(self.device)

    def introduce(self, address: str) -> None:
        self.manager.add_peer(ROLES[1 - self.role], address=address)
        self.manager.wait_ready(ROLES[1 - self.role], timeout_s=PATIENCE_S)

    def content(self, layer: int, role: int) -> Any:
        """The content of a request: distinct by layer, K or V, page of the request, and place."""
        case, kind = self.case, {"device": self.device, "dtype": self.torch.int64}
        place = self.torch.arange(16 * case.heads * case.dim, **kind)
        page = self.torch.arange(case.num_pages, **kind)
        mixed = (place[None, :] * 31 + page[:, None] * 7919 + (2 * layer + role) * 104729) % 32749
        found = mixed.to(self.torch.int16).reshape(case.num_pages, 16, case.heads, case.dim)
        return found.transpose(1, 2) if self.axes == HND else found

    def fill(self) -> None:
        for layer, role in itertools.product(self.pools, (0, 1)):
            self.pools[layer][role][self.at] = self.content(layer, role)
        self.torch.cuda.synchronize(self.role)

    def holds(self) -> bool:
        pairs = itertools.product(self.pools, (0, 1))
        return all(bool((self.pools[layer][role][self.at] == self.content(layer, role)).all()) for layer, role in pairs)

    def share(self, number: int) -> tuple[dict[str, Pages], int]:
        """A quarter of the pool's pages, and the number of their tokens."""
        count = self.case.pool_pages // 4
        ids = np.random.default_rng(self.role).permutation(self.case.pool_pages)[number % 4 * count :][:count]
        return {"kv": Pages(ids.astype(np.int32), 0)}, count * 16

    def send_many(self, requests: tuple[bytes, ...]) -> None:
        """Call `finish` for all requests at once; each is sent when its rows are reserved."""
        senders = [self.manager.sender(request, peer=ROLES[1], deadline_s=PATIENCE_S) for request in requests]
        for number, sender in enumerate(senders):
            sender.finish(self.share(number)[0])
        for sender in senders:
            ended = sender.wait(timeout_s=PATIENCE_S)
            assert ended.ok, ended.error

    def receive_many(self, requests: tuple[bytes, ...]) -> float:
        """GB/s of all requests together, with `IN_FLIGHT` requests at a time."""
        waiting, under_way, started = list(enumerate(requests)), 0, time.monotonic()
        while waiting or under_way:
            while waiting and under_way < IN_FLIGHT:
                number, request = waiting.pop(0)
                rows, tokens = self.share(number)
                self.manager.receiver(request, peer=ROLES[0], rows=rows, need={"kv": (0, tokens)}, deadline_s=PATIENCE_S)
                under_way += 1
            if not select.select([self.manager.fileno()], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"no request ended within {PATIENCE_S} s")
            for event in self.manager.events():
                assert event.ok, event.error
                under_way -= 1
        nbytes = self.case.nbytes * self.case.pool_pages // self.case.num_pages // 4
        return len(requests) * nbytes / (time.monotonic() - started) / 1e9

    def receive(self, one: One) -> Receiver:
        """Reserve all rows for a request."""
        need = {"kv": (0, self.case.num_pages * 16)}
        return self.manager.receiver(one.request, peer=ROLES[0], rows=self.rows, need=need, deadline_s=PATIENCE_S)

    def send(self, one: One) -> tuple[float, ...]:
        """Send a request; returns the time of `finish` and the engine's marks."""
        sender = self.manager.sender(one.request, peer=ROLES[1], deadline_s=PATIENCE_S)
        while sender.needed("kv") is None:
            time.sleep(0.0005)
        time.sleep(one.pause_s)
        started = time.monotonic()
        sender.finish(self.rows)
        wait_for(sender, one)
        marks = self.manager.backend.marks if isinstance(self.manager.backend, Timed) else ()
        return (started, *marks)

    def contiguous(self, there: list[int]) -> float:
        """Median seconds of the engine alone for a request's bytes, in one contiguous block per tensor."""
        backend, peer = self.manager.engine(ROLES[1], 0)
        here = [tensor.data_ptr() for pair in self.pools.values() for tensor in pair]
        nbytes = self.case.nbytes // len(here)
        copies = CopyBatch(*(np.array(c, np.uint64) for c in (here, there, [nbytes] * len(here))))
        found = []
        for _ in range(6):
            started = time.perf_counter()
            transfer = backend.submit(peer, copies)
            while transfer.poll() is TransferStatus.PENDING:
                time.sleep(0)
            found.append(time.perf_counter() - started)
            assert transfer.poll() is TransferStatus.DONE, transfer.error
            transfer.close()
        return statistics.median(found[1:])


def wait_for(handle: Receiver | Sender, one: One) -> None:
    """Wait until a request has succeeded."""
    while one.polls and handle.poll() is None:
        pass
    ended = handle.wait(timeout_s=PATIENCE_S)
    assert ended.ok, ended.error


def plain_s(nbytes: int) -> float:
    """Median seconds of one plain copy from GPU 0 to GPU 1."""
    torch = importlib.import_module("torch")
    source, destination = (torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2))
    found = []
    for _ in range(12):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        destination.copy_(source, non_blocking=True)
        events[1].record()
        torch.cuda.synchronize(0)
        found.append(events[0].elapsed_time(events[1]) / 1e3)
    return float(statistics.median(found[2:]))


def prefill(pipe: Connection) -> None:
    """The prefill process: executes commands and answers them."""
    rank: Rank | None = None
    while True:
        match pipe.recv():
            case Case() as case:
                rank = Rank(case, 0)
                pipe.send(rank.manager.address)
                rank.introduce(pipe.recv())
                rank.fill()
                pipe.send(rank.manager.backend.transport)
            case One() as one if rank is not None:
                pipe.send(rank.send(one))
            case tuple(many) if rank is not None:
                rank.send_many(many)
                pipe.send("sent")
            case list(there) if rank is not None:
                pipe.send(rank.contiguous(there))
            case int(nbytes):
                pipe.send(plain_s(nbytes))
            case "floor":
                answer_floor(pipe)
            case "threshold" if rank is not None:
                pipe.send(str(rank.manager.health().pack_below))
            case "stats" if rank is not None:
                pipe.send(msgspec.structs.asdict(rank.manager.stats))
            case "close" if rank is not None:
                rank.manager.close()
                rank = None
                pipe.send("closed")
            case None:
                return


@contextmanager
def other_process(serve: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Start a process that runs `serve` on the other end of the returned pipe, and stop it afterwards."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    yield pipe
    pipe.send(None)
    process.join(10)


def answer_floor(pipe: Connection) -> None:
    """Echo messages over ZeroMQ until an empty one."""
    zmq = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        while len(frames := router.recv_multipart()) == 2 and frames[1]:
            router.send_multipart(frames)


def ask(pipe: Connection, command: object) -> Any:
    pipe.send(command)
    return receive(pipe)


def receive(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"no answer from the prefill process within {PATIENCE_S} s")
    return pipe.recv()
