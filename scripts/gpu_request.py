"""Whole requests between two managers on two GPUs, from `finish` to the receiver's success, against one plain copy::

    python scripts/gpu_request.py --json docs/benchmarks/nvlink-2xh200-requests.json --date 2026-11-21
    python scripts/gpu_request.py --engines nvlink nixl mooncake --json docs/benchmarks/gpu-engines-2xh200.json

Without `--engines`: 32 layers of K and V by `nvlink`, pages of 16 tokens of 512 bytes, the same layout on both sides, so that
a piece is a page of 8 KiB. With it: 8 layers, 8 heads, from tokens-first to heads-first pages, so that a piece is one head of
one token; each engine as it packs by default, and `direct`, piece by piece, with less data. Pages are random on both sides.
A request is sent when its sender sees that it is reserved, which it asks each half a millisecond; `conditions`: some time
after that, and both sides asking `poll` again and again in place of `wait`. `contiguous`: the engine alone, 16 blocks of 32
MiB in one call. `plain`: a device-to-device copy of as many bytes. `pipelined`: 48 requests of 512 MiB, 4 at a time. `floor`:
a message there and back over ZeroMQ between the same processes. Medians; without `--engines` of each of several pairs of
managers. The last request of each case is verified byte for byte.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.backends.abilities import PreparedSpans
from disagg.backends.base import Op, TransferStatus
from disagg.backends.nvlink.backend import NvlinkBackend, NvlinkTransfer
from disagg.commands.rank.rank import versions
from disagg.core.copies import CopyBatch
from disagg.core.spans import SpanBatch
from disagg.requests import Receiver, Sender
from disagg.state import paged

NHD, HND = "page token kv_head dim", "page kv_head token dim"
ROLES = ("prefill-0", "decode-0")
PATIENCE_S = 60.0
ROUNDS = 7
"""Pairs of managers that are made one after the other for requests of one size by `nvlink`."""
IN_FLIGHT, IN_A_ROW = 4, 48
"""Requests of a quarter of the pools each (512 MiB) that are under way at a time, where they follow each other."""


@dataclass(frozen=True)
class Case:
    """Pools and requests: `layers` of K and V, `num_pages` of the pool's `pool_pages` pages of 16 tokens in a request; packed
    below so many bytes (`None`: as by default); and more requests under `CONDITIONS`.
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


def nvlink_cases() -> list[Case]:
    """67 MB and 1 GiB, several times: from one pair of managers to the next what is not the copy differs by a third."""
    small, large = (Case("nvlink", 32, 2, 128, 4096, pages, repeat) for pages, repeat in ((128, 101), (2048, 31)))
    return [replace(small, conditions=True), *[small] * (ROUNDS - 1), *[large] * ROUNDS]


def engine_cases(engines: list[str]) -> list[Case]:
    """0.5 GiB for each engine and piece; directly only what ends soon."""
    cases = []
    for engine, dim in itertools.product(engines, (128 << i for i in range(9))):
        page = 16 * 8 * dim * 2
        cases.append(Case(engine, 8, 8, dim, (128 << 20) // page, (32 << 20) // page, 15, mixed=True))
        if engine != "nvlink":
            count = max(1, min(32 << 20, 2048 * dim * 2) // page)
            cases.append(Case(engine, 8, 8, dim, (128 << 20) // page, count, 2, mixed=True, pack_below=0))
    return cases


@dataclass(frozen=True)
class One:
    """A request to be sent: how long after it was seen to be reserved, and whether both sides ask again and again if it has
    ended.
    """

    request: bytes
    pause_s: float = 0.0
    polls: bool = False


CONDITIONS = {
    "after 1 ms": (0.001, False),
    "after 3 ms": (0.003, False),
    "after 10 ms": (0.01, False),
    "after 100 ms": (0.1, False),
    "after 3 ms, both poll": (0.003, True),
    "after 100 ms, both poll": (0.1, True),
}
"""Of more requests: how long they were reserved before, and whether both sides poll."""


class Timed(NvlinkBackend):
    """Notes when a request was submitted, when that had returned, and when it was seen to be done."""

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
    """One manager with pools on one GPU; `role` 0 sends, 1 receives."""

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
        """What a request holds: differs by layer, role, page of the request, and place."""
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
        """A quarter of the pool's pages, and how many tokens that is."""
        count = self.case.pool_pages // 4
        ids = np.random.default_rng(self.role).permutation(self.case.pool_pages)[number % 4 * count :][:count]
        return {"kv": Pages(ids.astype(np.int32), 0)}, count * 16

    def send_many(self, requests: tuple[bytes, ...]) -> None:
        """Hand all over at once; each goes when it is reserved."""
        senders = [self.manager.sender(request, peer=ROLES[1], deadline_s=PATIENCE_S) for request in requests]
        for number, sender in enumerate(senders):
            sender.finish(self.share(number)[0])
        for sender in senders:
            ended = sender.wait(timeout_s=PATIENCE_S)
            assert ended.ok, ended.error

    def receive_many(self, requests: tuple[bytes, ...]) -> float:
        """GB/s of all requests, `IN_FLIGHT` of them at a time, by the time from the first to the last."""
        waiting, under_way, started = list(enumerate(requests)), 0, time.monotonic()
        while waiting or under_way:
            while waiting and under_way < IN_FLIGHT:
                number, request = waiting.pop(0)
                rows, tokens = self.share(number)
                self.manager.receiver(request, peer=ROLES[0], rows=rows, need={"kv": (0, tokens)}, deadline_s=PATIENCE_S)
                under_way += 1
            if not select.select([self.manager.fileno()], [], [], PATIENCE_S)[0]:
                raise TimeoutError("no request ends")
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
        """When `finish` was called, and the engine's marks."""
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
        """Seconds of the engine alone for as many bytes as a request has, in one block of each tensor; the median."""
        backend, peer = self.manager.engine(ROLES[1], 0)
        here = [tensor.data_ptr() for pair in self.pools.values() for tensor in pair]
        nbytes = self.case.nbytes // len(here)
        copies = CopyBatch(*(np.array(c, np.uint64) for c in (here, there, [nbytes] * len(here))))
        found = []
        for _ in range(6):
            started = time.perf_counter()
            transfer = backend.submit(Op.WRITE, peer, copies)
            while transfer.poll() is TransferStatus.PENDING:
                time.sleep(0)
            found.append(time.perf_counter() - started)
            assert transfer.poll() is TransferStatus.DONE, transfer.error
            transfer.close()
        return statistics.median(found[1:])


def wait_for(handle: Receiver | Sender, one: One) -> None:
    """Returns once a request has ended well."""
    while one.polls and handle.poll() is None:
        pass
    ended = handle.wait(timeout_s=PATIENCE_S)
    assert ended.ok, ended.error


def plain_s(nbytes: int) -> float:
    """Seconds of one plain copy from GPU 0 to GPU 1; the median."""
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
    """Does what it is told to, and answers."""
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
                pipe.send(str(rank.manager.health().peers[ROLES[1]].pack_below[0]))
            case "stats" if rank is not None:
                pipe.send(asdict(rank.manager.stats))
            case "close" if rank is not None:
                rank.manager.close()
                rank = None
                pipe.send("closed")
            case None:
                return


@contextmanager
def other_process(serve: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process that does what it is told to over this pipe, until that is nothing more."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    yield pipe
    pipe.send(None)
    process.join(10)


def answer_floor(pipe: Connection) -> None:
    zmq = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        while len(frames := router.recv_multipart()) == 2 and frames[1]:
            router.send_multipart(frames)


def measure_floor(pipe: Connection) -> float:
    """Microseconds of a message there and back; the median."""
    zmq = importlib.import_module("zmq")
    pipe.send("floor")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(pipe.recv())
        found = []
        for _ in range(300):
            started = time.perf_counter()
            dealer.send(b"x" * 64)
            dealer.recv()
            found.append(time.perf_counter() - started)
            time.sleep(0.001)
        dealer.send(b"")
    return round(statistics.median(found[50:]) * 1e6, 1)


def ask(pipe: Connection, order: object) -> Any:
    pipe.send(order)
    return receive(pipe)


def receive(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("the prefill process says nothing")
    return pipe.recv()


def run_one(rank: Rank, pipe: Connection, one: One) -> tuple[float, list[float]]:
    """Seconds from `finish` to the receiver's success, and of each stage."""
    receiver = rank.receive(one)
    pipe.send(one)
    if one.polls:  # not before its sender does
        time.sleep(one.pause_s)
    wait_for(receiver, one)
    ended = time.monotonic()
    started, *marks = receive(pipe)
    return ended - started, [b - a for a, b in itertools.pairwise([started, *marks, ended])]


def by_stage(stages: list[list[float]]) -> dict[str, Any]:
    """Of requests whose engine noted its marks: the median of each stage, and of the two phases that they make up. Data: from
    the call of the engine until its end is seen. Control: what is before and after.
    """
    if len(stages[0]) == 1:
        return {}
    names = ("finish to submit", "submit", "submitted to done seen", "done seen to success")
    found = np.array(stages) * 1e6
    each = dict(zip(names, np.median(found, axis=0).round(1).tolist(), strict=True))
    phases = {"data": found[:, 1] + found[:, 2], "control": found[:, 0] + found[:, 3]}
    return {"stages_us_p50": each} | {f"{name}_us_p50": round(float(np.median(took)), 1) for name, took in phases.items()}


def measure(case: Case, pipe: Connection) -> dict[str, Any]:
    """One case's row."""
    address = ask(pipe, case)
    rank = Rank(case, 1)
    pipe.send(rank.manager.address)
    rank.introduce(address)
    transport = receive(pipe)
    plain = [ask(pipe, case.nbytes)]
    found, stages = [], []
    warm = 3 if case.repeat > 2 else 1
    before: dict[str, float] = {}
    for number in range(case.repeat + warm):
        if number == warm:
            before = ask(pipe, "stats")
        seconds, each = run_one(rank, pipe, One(new_request_id()))
        found.append(seconds)
        stages.append(each)
    after = ask(pipe, "stats")
    conditions = {}
    for name, (pause_s, polls) in CONDITIONS.items() if case.conditions else ():
        more = [run_one(rank, pipe, One(new_request_id(), pause_s, polls)) for _ in range(41)]
        p50_us, p99_us = (np.quantile([seconds for seconds, _ in more], (0.5, 0.99)) * 1e6).round(1).tolist()
        conditions[name] = {"p50_us": p50_us, "p99_us": p99_us, **by_stage([each for _, each in more])}
    rate = None
    if case.mixed and not case.direct:
        rank.manager.events()
        pipe.send(many := tuple(new_request_id() for _ in range(IN_A_ROW)))
        time.sleep(0.3)
        rate = rank.receive_many(many)
        receive(pipe)
    contiguous = ask(pipe, [t.data_ptr() for pair in rank.pools.values() for t in pair]) if case.mixed else None
    plain.append(ask(pipe, case.nbytes))
    if contiguous is not None:  # the blocks were written over what the last request had brought
        run_one(rank, pipe, One(new_request_id()))
    verified = rank.holds()
    ceiling, p50, p99 = statistics.median(plain), *np.quantile(found[warm:], (0.5, 0.99)).tolist()
    row: dict[str, Any] = {
        "backend": case.backend,
        "way": "kernel" if case.backend == "nvlink" else "direct" if case.direct else "packed",
        "bytes": case.nbytes,
        "piece": case.piece,
        "pieces": case.nbytes // case.piece,
        "finish_to_success_us_p50": round(p50 * 1e6, 1),
        "finish_to_success_us_p99": round(p99 * 1e6, 1),
        "plain_us": round(ceiling * 1e6, 1),
        "times_plain": round(p50 / ceiling, 3),
        "gbps": round(case.nbytes / p50 / 1e9, 2),
        "each_s": {k: round((after[k] - before[k]) / case.repeat, 6) for k in ("bind_s", "pack_s", "post_s", "wire_s")},
        "unpack_s": round(rank.manager.stats.unpack_s / (case.repeat + warm), 6),
        "runs": case.repeat,
        "transport": transport,
        "pack_below": ask(pipe, "threshold"),
        "verified": verified,
    }
    if contiguous is not None:
        row["contiguous_gbps"] = round(case.nbytes / contiguous / 1e9, 2)
        row["ratio"] = round(contiguous / p50, 3)
    if rate is not None:
        row["pipelined_gbps"] = round(rate, 2)
        row["pipelined_ratio"] = round(rate / row["contiguous_gbps"], 3)
    if conditions:
        row["conditions"] = conditions
    row |= by_stage(stages[warm:])
    pipe.send("close")
    rank.manager.close()
    receive(pipe)
    return row


SUMMED = ("finish_to_success_us_p50", "times_plain", "data_us_p50", "control_us_p50")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the rows of each size: the least, the median and the most of what they say."""
    found = []
    for nbytes, group in itertools.groupby(rows, key=lambda row: row["bytes"]):
        same = list(group)
        columns = {name: [row[name] for row in same] for name in SUMMED}
        each = {name: [min(column), round(statistics.median(column), 3), max(column)] for name, column in columns.items()}
        found.append({"bytes": nbytes, "rounds": len(same), "least_median_most": each})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", nargs="+", choices=["nvlink", "nixl", "mooncake"])
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse_args()
    os.environ.setdefault("MC_INTRANODE_NVLINK", "1")
    with other_process(prefill) as pipe:
        failed = measure_all(arguments, pipe)
    sys.exit(bool(failed))


def measure_all(arguments: argparse.Namespace, pipe: Connection) -> list[str]:
    """Every case, each written once it is there; what failed, after which no other was tried."""
    rows, failed = list[dict[str, Any]](), list[str]()
    floor = measure_floor(pipe)
    print(f"a message there and back: {floor} us", flush=True)
    for case in engine_cases(arguments.engines) if arguments.engines else nvlink_cases():
        try:
            rows.append(measure(case, pipe))
            print({k: v for k, v in rows[-1].items() if k not in ("bytes", "pieces", "runs")}, flush=True)
        except Exception as error:  # noqa: BLE001  (said, and the others of another engine still measured)
            failed.append(f"{case}: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
            break
        finally:
            if arguments.json:
                result = {
                    "date": arguments.date,
                    "what": __doc__.split("\n", 1)[0],
                    "floor_us": floor,
                    "versions": {name: versions(name) for name in arguments.engines or ["nvlink"]},
                    **({} if arguments.engines else {"summary": summary(rows)}),
                    "rows": rows,
                    "failed": failed,
                }
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if not arguments.engines:
        print(*summary(rows), sep="\n")
    return failed


if __name__ == "__main__":
    main()
