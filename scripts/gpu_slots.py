"""Where the time of a packed request between two GPUs goes, and what slots and rings of other sizes give::

    MC_INTRANODE_NVLINK=1 python scripts/gpu_slots.py --engines nixl mooncake --json docs/benchmarks/gpu-slots-2xh200.json

`rates`: the kernel that packs and unpacks, alone, for slots of 32 MiB, by number of thread blocks; `slot_us` is one slot,
from the launch until it is seen to have passed. `ways`: of the last request of 512 MiB that went alone, when each slot took
which step, in microseconds since `finish`. `staging`: whole requests and four at a time (`gpu_request.py`), by slots and
rings. Pieces are of 4 KiB. `pieces`: requests of larger ones, alone, whole and packed, and below which size they would be
packed, as was measured when the ranks were connected.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpu_request
import numpy as np
from gpu_request import Case, Rank, measure, other_process

from disagg.backends.cuda import packer as _device
from disagg.backends.cuda.packer import GpuMover
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.transfer import pool_memory as device
from disagg.transfer import staging
from disagg.transfer import worker as transfers
from disagg.transfer.jobs import Unpack
from disagg.transfer.worker import TransferWorker

SHAPES = ((64, 4), (64, 5), (64, 6), (64, 8), (32, 8), (32, 12), (96, 4))
"""MiB of a slot, and slots of a ring."""
DIM, POOL, REQUEST = 2048, 128 << 20, 32 << 20
SLOT, RUNS = 32 << 20, 11
PIECES_KIB = (256, 1024, 2048, 4096, 8192, 16384)
WAYS = (0, 1 << 40, None)
"""`pack_below` for pieces that go whole, packed, and as was measured."""

marks: list[tuple[float, str, int]] = []


def case_of(engine: str, shape: int) -> Case:
    """The case for `SHAPES[shape]`, which its number of repetitions names in both processes."""
    page = 16 * 8 * DIM * 2
    return Case(engine, 8, 8, DIM, POOL // page, REQUEST // page, RUNS + shape, mixed=True)


def patch() -> None:
    """Have ranks take the staging that a case names, and workers note what they do."""
    begin, send = Rank.__init__, Rank.send
    post, settle, unpack, end = (
        TransferWorker._post_slot,
        TransferWorker._settle_slot,
        TransferWorker.unpack,
        TransferWorker._end_unpack,
    )
    scatter, credit = transfers._scatter, staging.RemoteRing.credit
    usual = device.GPU_STAGING

    def note(what: str, offset: int) -> None:
        marks.append((time.monotonic(), what, offset >> 20))

    def staged(self: Rank, case: Case, role: int) -> None:
        nbytes, slots = SHAPES[case.repeat - RUNS]
        device.GPU_STAGING = dataclasses.replace(usual, slot_nbytes=nbytes << 20, num_slots=slots, num_rings=2)
        begin(self, case, role)

    def sent(self: Rank, request: bytes) -> Any:
        del marks[:]
        return send(self, request)

    def posted(self: TransferWorker, active: Any, slot: Any) -> Any:
        marks.append((slot.started_at, "gather", slot.filled.offset >> 20))
        note("packed", slot.filled.offset)
        return post(self, active, slot)

    def settled(self: TransferWorker, active: Any, slot: Any, transfer: Any) -> None:
        note("written", slot.filled.offset)
        settle(self, active, slot, transfer)

    def told(self: TransferWorker, slots: Iterable[Unpack]) -> None:
        for each in (found := list(slots)):
            note("told", each.offset)
        unpack(self, found)

    def scattered(each: Unpack) -> Any:
        note("scatter", each.offset)
        return scatter(each)

    def ended(self: TransferWorker, each: Unpack, *rest: Any) -> None:
        note("unpacked", each.offset)
        end(self, each, *rest)

    def credited(self: staging.RemoteRing, slot: int, sequence: int) -> bool:
        note("credit", slot << 20)
        return credit(self, slot, sequence)

    for owner, name, function in (
        (Rank, "__init__", staged),
        (Rank, "send", sent),
        (TransferWorker, "_post_slot", posted),
        (TransferWorker, "_settle_slot", settled),
        (TransferWorker, "unpack", told),
        (TransferWorker, "_end_unpack", ended),
        (transfers, "_scatter", scattered),
        (staging.RemoteRing, "credit", credited),
    ):
        setattr(owner, name, function)


def prefill(pipe: Connection, told: str) -> None:
    """As in `gpu_request`; what was noted of the last request that went alone goes to the file `told`."""
    patch()
    send = Rank.send

    def sent(self: Rank, request: bytes) -> Any:
        found = send(self, request)
        time.sleep(0.002)
        Path(told).write_text(json.dumps((found[0], marks)))
        return found

    Rank.send = sent  # type: ignore[method-assign]
    gpu_request.prefill(pipe)


def ways(told: Path) -> dict[str, list[tuple[int, str]]]:
    """By offset in MiB: microseconds since `finish`, and the step."""
    started, theirs = json.loads(told.read_text())
    found: dict[str, list[tuple[int, str]]] = {}
    for at, what, offset in sorted([*map(tuple, theirs), *(mark for mark in marks if started < mark[0] < started + 0.1)]):
        key = "credits" if what == "credit" else str(offset)
        found.setdefault(key, []).append((round((at - started) * 1e6), what))
    return found


def rates() -> list[dict[str, Any]]:
    """The kernel alone on one GPU, between a pool and slots."""
    mover, rows = GpuMover(0), []
    pool, slots = mover.allocate(1 << 30), [mover.allocate(SLOT) for _ in range(4)]
    piece, layers = DIM * 2, 8
    count, whole = (512 << 20) // (16 * piece * layers), (1 << 30) // layers // (16 * piece)
    rng, zero = np.random.default_rng(1), np.zeros(count, np.int64)
    runs = np.stack([rng.permutation(whole)[:count], zero, rng.permutation(whole)[:count], zero, zero + 16], 1)
    bases = np.array([pool + i * ((1 << 30) // layers) for i in range(layers)], np.uint64)
    shape = SpanShape(bases, bases, (16 * piece,) * 2, (piece,) * 2, (), piece, False, (whole,) * 2, (16, 16))
    shapes = mover.prepare((shape,))
    order = mover.upload(shapes, SpanBatch(shapes.shapes, (SpanRuns(0, None, runs),)))
    usual = _device.BLOCKS
    for blocks, (name, way) in itertools.product((16, 32, 64, 132), (("gather", mover.gather), ("scatter", mover.scatter))):
        _device.BLOCKS = blocks
        many = min(_seconds(lambda way=way: [way(order, i * SLOT, SLOT, slots[i % 4]) for i in range(16)]) for _ in range(3))
        one = statistics.median(_seconds(lambda way=way: [way(order, 0, SLOT, slots[0])]) for _ in range(20))
        rows.append(
            {"kernel": name, "blocks": blocks, "gbps": round(16 * SLOT / many / 1e9, 1), "slot_us": round(one * 1e6, 1)}
        )
        print(rows[-1], flush=True)
    _device.BLOCKS = usual
    mover.release(order)
    mover.close()
    return rows


def _seconds(begin: Callable[[], list[Any]]) -> float:
    started = time.perf_counter()
    for work in begin():
        while not work.query():
            pass
    return time.perf_counter() - started


def pieces(engine: str, pipe: Connection) -> list[dict[str, Any]]:
    """By size of the pieces, which are pages, alike on both sides: GB/s of requests alone, whole and packed."""
    rows = []
    for kib in PIECES_KIB:
        dim = kib * 1024 // (16 * 2 * 2)
        case = Case(engine, 8, 2, dim, POOL // (kib << 10), REQUEST // (kib << 10), RUNS)
        found = [measure(dataclasses.replace(case, pack_below=way), pipe) for way in WAYS]
        rates = dict(zip(("whole_gbps", "packed_gbps", "chosen_gbps"), (row["gbps"] for row in found), strict=True))
        verified = all(row["verified"] for row in found)
        rows.append({"engine": engine, "piece_kib": kib, **rates, "pack_below": found[2]["pack_below"], "verified": verified})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", nargs="+", choices=["nixl", "mooncake"], default=["nixl", "mooncake"])
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "date": arguments.date,
        "what": __doc__.split("\n", 1)[0],
        "rates": rates(),
        "ways": [],
        "staging": [],
        "pieces": [],
    }
    for engine in arguments.engines:
        with other_process(gpu_request.prefill) as pipe:
            result["pieces"] += pieces(engine, pipe)
    patch()
    told = Path(tempfile.mkdtemp()) / "marks.json"
    for engine in arguments.engines:
        with other_process(prefill, str(told)) as pipe:
            for number, (nbytes, slots) in enumerate(SHAPES):
                row = measure(case_of(engine, number), pipe)
                keys = ("gbps", "ratio", "pipelined_gbps", "pipelined_ratio", "contiguous_gbps", "verified")
                staged = {"engine": engine, "slot_mib": nbytes, "slots": slots}
                result["staging"].append({**staged, **{key: row[key] for key in keys}})
                result["ways"].append({**staged, "us": ways(told)})
                print(result["staging"][-1], flush=True)
    told.unlink()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
