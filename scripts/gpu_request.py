"""Whole requests between two managers on two GPUs, from `finish` to the receiver's success, against one plain copy::

    python scripts/gpu_request.py --json docs/benchmarks/nvlink-2xh200-requests.json --date 2026-11-21

32 layers of K and V in pages of 16 tokens, 2 heads, 128 elements of 2 bytes: pieces of 8 KiB, at random pages on both sides.
The receiver has reserved before the clock starts. The last request of each size is verified byte for byte.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.backends.base import Op, RemotePeer, TransferStatus
from disagg.backends.nvlink import NvlinkBackend, NvlinkTransfer
from disagg.copies import CopyBatch
from disagg.state import paged

NUM_LAYERS, NUM_PAGES, PAGE, HEADS, DIM = 32, 4096, 16, 2, 128
PIECE = PAGE * HEADS * DIM * 2
CASES = ((128, 101), (2048, 31))
"""Pages of a request, and how often."""
PATIENCE_S = 60.0


class Timed(NvlinkBackend):
    """Notes when the first copy of a request was submitted, and when the last was seen to be done."""

    marks: list[float]

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> NvlinkTransfer:
        started = time.monotonic()
        transfer = super().submit(op, peer, copies)
        self.marks = [started, time.monotonic(), 0.0]
        return transfer

    def advance(self, transfer: NvlinkTransfer) -> None:
        super().advance(transfer)
        if transfer.status is not TransferStatus.PENDING:
            self.marks[2] = time.monotonic()


class Rank:
    """One manager with pools on one GPU."""

    def __init__(self, name: str, device: str) -> None:
        self.torch = importlib.import_module("torch")
        shape = (NUM_PAGES, PAGE, HEADS, DIM)
        self.pools = {
            layer: tuple(self.torch.full(shape, -1, dtype=self.torch.int16, device=device) for _ in "kv")
            for layer in range(NUM_LAYERS)
        }
        self.device = device
        self.manager = KVManager(
            name=name,
            topology=Topology(),
            components=[paged.gqa(self.pools, axes="page token kv_head dim", num_kv_heads=HEADS, topology=Topology())],
            model=ModelId("bench"),
            backend=Timed,
        )

    def content(self, layer: int, role: int, num_pages: int) -> Any:
        """What a request holds: differs by layer, role, page of the request, and place."""
        place = self.torch.arange(PIECE // 2, device=self.device, dtype=self.torch.int64)
        page = self.torch.arange(num_pages, device=self.device, dtype=self.torch.int64)
        mixed = (place[None, :] * 31 + page[:, None] * 7919 + (2 * layer + role) * 104729) % 32749
        return mixed.to(self.torch.int16).reshape(num_pages, PAGE, HEADS, DIM)

    def rows(self, ids: np.ndarray) -> dict[str, Pages]:
        return {"kv": Pages(ids.astype(np.int32), 0)}


def prefill(pipe: Connection) -> None:
    """Sends what it is told to; answers with when it called `finish`."""
    rank = Rank("prefill-0", "cuda:0")
    pipe.send(rank.manager.address)
    rank.manager.add_peer("decode-0", address=pipe.recv())
    rank.manager.wait_ready("decode-0", timeout_s=PATIENCE_S)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        request, num_pages = order
        if request is None:
            pipe.send(plain_us(rank.torch, num_pages * PIECE * 2 * NUM_LAYERS))
            continue
        ids = np.random.default_rng(num_pages).permutation(NUM_PAGES)[:num_pages]
        for layer, pair in rank.pools.items():
            for role, pool in enumerate(pair):
                pool[rank.torch.from_numpy(ids).to(rank.device)] = rank.content(layer, role, num_pages)
        rank.torch.cuda.synchronize()
        sender = rank.manager.sender(request, peer="decode-0", deadline_s=PATIENCE_S)
        while sender.needed("kv") is None:
            time.sleep(0.0005)
        time.sleep(0.003)
        started = time.monotonic()
        sender.finish(rank.rows(ids))
        assert sender.wait(timeout_s=PATIENCE_S).ok
        assert isinstance(rank.manager.backend, Timed)
        pipe.send((started, *rank.manager.backend.marks, rank.manager.stats.bind_s))
    rank.manager.close()


def plain_us(torch: Any, nbytes: int) -> float:
    """One plain copy of as many bytes from GPU 0 to GPU 1; the median."""
    source, destination = (torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2))
    found = []
    for _ in range(12):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        destination.copy_(source, non_blocking=True)
        events[1].record()
        torch.cuda.synchronize(0)
        found.append(events[0].elapsed_time(events[1]) * 1e3)
    return float(statistics.median(found[2:]))


def measure(rank: Rank, pipe: Connection, num_pages: int, repeat: int) -> dict[str, Any]:
    """One size."""
    nbytes = num_pages * PIECE * 2 * NUM_LAYERS
    ids = np.random.default_rng(num_pages + 1).permutation(NUM_PAGES)[:num_pages]
    found, stages = [], []
    pipe.send((None, num_pages))
    plain = [pipe.recv()]
    for _ in range(repeat + 3):
        request = new_request_id()
        receiver = rank.manager.receiver(
            request, peer="prefill-0", rows=rank.rows(ids), need={"kv": (0, num_pages * PAGE)}, deadline_s=PATIENCE_S
        )
        pipe.send((request, num_pages))
        event = receiver.wait(timeout_s=PATIENCE_S)
        ended = time.monotonic()
        assert event.ok, event.error
        *marks, bind_s = pipe.recv()
        found.append((ended - marks[0]) * 1e6)
        stages.append([1e6 * (b - a) for a, b in itertools.pairwise([*marks, ended])] + [bind_s * 1e6])
    pipe.send((None, num_pages))
    plain.append(pipe.recv())
    there = rank.torch.from_numpy(ids).to(rank.device)
    verified = all(
        bool((pool[there] == rank.content(layer, role, num_pages)).all())
        for layer, pair in rank.pools.items()
        for role, pool in enumerate(pair)
    )
    p50, p99 = np.quantile(found[3:], (0.5, 0.99))
    middle = np.median(np.array(stages[3:])[:, :4], axis=0).round(1).tolist()
    binds = np.diff(np.array(stages)[:, 4])
    ceiling = statistics.median(plain)
    return {
        "bytes": nbytes,
        "pieces": nbytes // PIECE,
        "piece": PIECE,
        "finish_to_success_us_p50": round(float(p50), 1),
        "finish_to_success_us_p99": round(float(p99), 1),
        "plain_us": round(ceiling, 1),
        "stages_us_p50": dict(
            zip(("finish to submit", "submit", "submit to done seen", "done seen to success"), middle, strict=True)
        ),
        "bind_us_p50": round(float(np.median(binds)), 1),
        "ratio": round(float(p50) / ceiling, 3),
        "runs": repeat,
        "verified": verified,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,))
    process.start()
    rank = Rank("decode-0", "cuda:1")
    rank.manager.add_peer("prefill-0", address=pipe.recv())
    pipe.send(rank.manager.address)
    rank.manager.wait_ready("prefill-0", timeout_s=PATIENCE_S)
    assert pipe.recv() == "ready"
    rows = []
    for num_pages, repeat in CASES:
        rows.append(measure(rank, pipe, num_pages, repeat))
        print(rows[-1], flush=True)
    if arguments.json:
        result = {"date": arguments.date, "what": __doc__.split("\n", 1)[0], "torch": rank.torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    pipe.send(None)
    process.join()
    rank.manager.close()


if __name__ == "__main__":
    main()
