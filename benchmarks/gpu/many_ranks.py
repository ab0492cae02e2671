"""One rank of `many.py`: a process with a manager on a GPU of its own, which executes commands."""

from __future__ import annotations

import importlib
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, Literal

from benchmarks.gpu.ranks import PATIENCE_S
from disagg.commands.cases.instructions import Item
from disagg.commands.cases.memory import GpuMemory
from disagg.commands.cases.places import rows_of
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, items_of, rows_needed
from disagg.commands.rank.rank import RankConfig, ResidentRank
from disagg.models import load_model

MODEL = "32x8x128"
TOKENS, AT_ONCE = 4096, 4
"""Tokens of a request (512 MiB), and requests in flight between two instances."""
SIZE = 8192
"""Rows and columns of the matrices."""


@dataclass(frozen=True)
class Instance:
    """One instance: its GPUs, one for each rank, and the sides of both ends."""

    name: str
    role: Literal["prefill", "decode"]
    gpus: tuple[int, ...]
    sides: tuple[Side, Side]

    @property
    def side(self) -> Side:
        return self.sides[self.role == "decode"]

    @property
    def case(self) -> Case:
        prefill, decode = self.sides
        return Case(
            backend="nvlink", model=MODEL, tokens=TOKENS, prefill=prefill, decode=decode, requests=AT_ONCE, device="cuda"
        )

    @cached_property
    def rows(self) -> dict[str, int]:
        """Rows of each component's pool."""
        return {state.name: rows_needed(state, self.side, self.case, prefix=0) for state in load_model(MODEL).states}

    def items(self, rank: int) -> tuple[Item, ...]:
        """`AT_ONCE` requests, each with rows of its own."""
        other = self.sides[self.role == "prefill"]
        return items_of(load_model(MODEL), self.side, other, self.case, name=self.role, pools=self.rows, prefix=0)[rank]


@dataclass(frozen=True)
class Build:
    """Build the manager of a rank."""

    instance: Instance
    rank: int
    leader: str | None
    verify: Literal["off", "full"]


@dataclass(frozen=True)
class Move:
    """Serve these requests to each peer, or receive them from it, from the time `at` on."""

    requests: dict[str, tuple[bytes, ...]]
    at: float


@dataclass(frozen=True)
class Copy:
    """Copy so many bytes to each GPU, so many times, from the time `at` on."""

    nbytes: dict[int, int]
    times: int
    at: float


class Products:
    """Products of matrices in a loop, on a stream of their own."""

    def __init__(self, ordinal: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = f"cuda:{ordinal}"
        self._stop = threading.Event()
        self._times: list[float] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def rate(self, began: float, ended: float) -> float:
        """Products a second between two times."""
        within = [at for at in list(self._times) if began <= at <= ended]
        return (len(within) - 1) / (within[-1] - within[0]) if len(within) > 2 else 0.0

    def _run(self) -> None:
        torch = self._torch
        torch.cuda.set_device(self._device)
        left, right = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        found = torch.empty_like(left)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            events: list[Any] = []
            while not self._stop.is_set():
                torch.mm(left, right, out=found)
                event = torch.cuda.Event(blocking=True)
                event.record()
                events.append(event)
                if len(events) > 24:  # what the GPU goes on with while this thread waits for the interpreter
                    events.pop(0).synchronize()
                    self._times.append(time.monotonic())


class Rank:
    """One rank's process: executes commands."""

    def __init__(self, gpu: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._gpu = gpu
        self._torch.cuda.set_device(gpu)
        self._rank: ResidentRank | None = None
        self._items: tuple[Item, ...] = ()
        self._products = Products(gpu)

    def answer(self, command: object) -> Any:
        """The answer to a command."""
        match command:
            case Build():
                return self._build(command)
            case Move():
                return self._send(command) if self._role == "prefill" else self._receive(command)
            case Copy():
                return self._copy(command)
            case ("introduce", dict(peers)):
                return self._introduce(peers)
            case ("products", bool(on)):
                return self._products.start() if on else self._products.stop()
            case ("rate", float(began), float(ended)):
                return self._products.rate(began, ended)
            case "describe":
                return self.resident.describe()
            case "verified":
                return self.resident.manager.stats.verified - self.resident.manager.stats.mismatches
            case "close":
                self.resident.manager.close()
                self._rank = None
        return None

    @property
    def resident(self) -> ResidentRank:
        assert self._rank is not None, "build comes first"
        return self._rank

    @property
    def _role(self) -> str:
        return self.resident.config.role

    def _build(self, build: Build) -> str:
        about = build.instance
        config = RankConfig(
            role=about.role, name=about.name, model=MODEL, side=about.side, rank=build.rank, rows=about.rows,
            leader=build.leader, backend="nvlink", device=f"cuda:{self._gpu}", verify=build.verify,
        )  # fmt: skip
        self._rank, self._items = ResidentRank(config), about.items(build.rank)
        if build.verify == "full":
            assert isinstance(self._rank.memory, GpuMemory)
            self._rank.memory._tensor.random_(0, 256)
            self._torch.cuda.synchronize(self._gpu)
        return self._rank.manager.address

    def _introduce(self, peers: dict[str, str]) -> None:
        for name, address in peers.items():
            self.resident.manager.add_peer(name, address=address)
        for name in peers:
            self.resident.manager.wait_ready(name, timeout_s=PATIENCE_S)

    def _rows(self, number: int) -> tuple[dict[str, Any], Item]:
        item = self._items[number % AT_ONCE]
        return {state.name: rows_of(state, item) for state in self.resident.model.states}, item

    def _send(self, move: Move) -> float:
        """Offer every request; each is sent once it is reserved. Returns the time of the last end."""
        manager = self.resident.manager
        senders = []
        for peer, requests in move.requests.items():
            for number, request in enumerate(requests):
                sender = manager.sender(request, peer=peer, deadline_s=PATIENCE_S)
                sender.finish(self._rows(number)[0])
                senders.append(sender)
        for sender in senders:
            ended = sender.wait(timeout_s=PATIENCE_S)
            assert ended.ok, ended.error
        return time.monotonic()

    def _receive(self, move: Move) -> float:
        """Receive every request, `AT_ONCE` at a time. Returns the time of the last end."""
        ((peer, requests),) = move.requests.items()
        manager = self.resident.manager
        time.sleep(max(0.0, move.at - time.monotonic()))
        under_way: list[Any] = []
        for number, request in enumerate(requests):
            if len(under_way) == AT_ONCE:
                self._finish(under_way.pop(0))
            rows, item = self._rows(number)
            need = {state.name: item.needs[state.name] for state in self.resident.model.states}
            under_way.append(manager.receiver(request, peer=peer, rows=rows, need=need, deadline_s=PATIENCE_S))
        for receiver in under_way:
            self._finish(receiver)
        return time.monotonic()

    def _finish(self, receiver: Any) -> None:
        ended = receiver.wait(timeout_s=PATIENCE_S)
        assert ended.ok, ended.error

    def _copy(self, copy: Copy) -> dict[int, float]:
        """Plain copies to every target at once, one stream each. Returns the seconds of each."""
        torch, begin, streams = self._torch, {}, {}
        for target, nbytes in copy.nbytes.items():
            source = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{self._gpu}")
            begin[target] = source, torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{target}")
            streams[target] = torch.cuda.Stream(self._gpu)
            begin[target][1].copy_(source)
        torch.cuda.synchronize(self._gpu)
        time.sleep(max(0.0, copy.at - time.monotonic()))
        events = {}
        for target, stream in streams.items():
            events[target] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            with torch.cuda.stream(stream):
                events[target][0].record()
                for _ in range(copy.times):
                    begin[target][1].copy_(begin[target][0], non_blocking=True)
                events[target][1].record()
        torch.cuda.synchronize(self._gpu)
        return {target: pair[0].elapsed_time(pair[1]) / 1e3 for target, pair in events.items()}


def serve(pipe: Connection, gpu: int) -> None:
    """A rank's process."""
    rank = Rank(gpu)
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        pipe.send(rank.answer(command))
