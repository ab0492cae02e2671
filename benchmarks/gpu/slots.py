"""Where the time of a packed request between two GPUs goes, and the effect of the sizes of slots and rings::

    MC_INTRANODE_NVLINK=1 python -m benchmarks.gpu.slots --engines nixl mooncake --json docs/benchmarks/gpu-slots-2xh200.json

`rates`: the packing and unpacking kernel alone, for slots of 32 MiB, by number of thread blocks; `slot_us` is the time of one
slot from the launch until its end is seen. `ways`: the time of each step of each slot, in microseconds since `finish`, for the
last of the single requests of 512 MiB. `staging`: single requests and four in flight (`request.py`), by the sizes of slots and
rings. Pieces are of 4 KiB. `pieces`: single requests of larger pieces, direct, packed, and with the default threshold.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import ranks
from benchmarks.gpu.ranks import Case, One, Rank, other_process
from benchmarks.gpu.request import measure
from disagg.backends.cuda import packer
from disagg.backends.cuda.packer import GpuMover, GpuWork, GpuWorkList
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.transfer import pool_memory, staging, unpacking
from disagg.transfer.jobs import Unpack
from disagg.transfer.packed_write import PackedWrite
from disagg.transfer.unpacking import Unpacker
from harness.conditions import conditions

SHAPES = ((64, 8), (32, 8), (16, 8), (8, 8), (8, 16), (4, 16), (4, 32))
"""MiB per slot, and slots that one writer may hold."""
DIM, POOL, REQUEST = 2048, 128 << 20, 32 << 20
SLOT, RUNS = 32 << 20, 11
PIECES_KIB = (256, 1024, 2048, 4096, 8192, 16384)
WAYS = (0, 1 << 40, None)
"""`pack_below` for direct pieces, for packed pieces, and for the default threshold."""

Move = Callable[[GpuWorkList, int, int, int], GpuWork]
marks: list[tuple[float, str, int]] = []


def case_of(engine: str, shape: int) -> Case:
    """The case for `SHAPES[shape]`. Its number of repetitions tells both processes the shape."""
    page = 16 * 8 * DIM * 2
    return Case(engine, 8, 8, DIM, POOL // page, REQUEST // page, RUNS + shape, mixed=True)


def patch() -> None:
    """Make ranks use the case's staging, and make the transfer worker record its steps."""
    begin, send = Rank.__init__, Rank.send
    post, settle = PackedWrite._post, PackedWrite._settle
    add, report, scatter = Unpacker.add, Unpacker._report, unpacking.scatter
    listed, usual = staging.Loans.listed, pool_memory.GPU_STAGING

    def note(what: str, offset: int) -> None:
        marks.append((time.monotonic(), what, offset >> 20))

    def staged(self: Rank, case: Case, role: int) -> None:
        nbytes, slots = SHAPES[case.repeat - RUNS]
        pool_memory.GPU_STAGING = dataclasses.replace(usual, slot_nbytes=nbytes << 20, window=slots, num_lent=2 * slots)
        begin(self, case, role)

    def sent(self: Rank, one: One) -> Any:
        del marks[:]
        return send(self, one)

    def posted(self: PackedWrite, write: Any) -> Any:
        marks.append((write.started_at, "gather", write.filled.offset >> 20))
        note("packed", write.filled.offset)
        return post(self, write)

    def settled(self: PackedWrite, write: Any, transfer: Any) -> None:
        note("written", write.filled.offset)
        settle(self, write, transfer)

    def added(self: Unpacker, slots: Iterable[Unpack]) -> None:
        for each in (found := list(slots)):
            note("told", each.offset)
        add(self, found)

    def scattered(each: Unpack) -> Any:
        note("scatter", each.offset)
        return scatter(each)

    def reported(self: Unpacker, each: Unpack, *rest: Any) -> None:
        note("unpacked", each.offset)
        report(self, each, *rest)

    def lent(self: staging.Loans, loans: Sequence[tuple[int, int]], newest: int) -> tuple[int, ...]:
        note("lent", len(loans) << 20)
        return listed(self, loans, newest)

    for owner, name, function in (
        (Rank, "__init__", staged),
        (Rank, "send", sent),
        (PackedWrite, "_post", posted),
        (PackedWrite, "_settle", settled),
        (Unpacker, "add", added),
        (Unpacker, "_report", reported),
        (unpacking, "scatter", scattered),
        (staging.Loans, "listed", lent),
    ):
        setattr(owner, name, function)


def prefill(pipe: Connection, path: str) -> None:
    """The prefill process of `ranks`, which writes the steps of its last single request to the file `path`."""
    patch()
    send = Rank.send

    def sent(self: Rank, one: One) -> Any:
        found = send(self, one)
        time.sleep(0.002)
        Path(path).write_text(json.dumps((found[0], marks)))
        return found

    Rank.send = sent  # type: ignore[method-assign]
    ranks.prefill(pipe)


def ways(path: Path) -> dict[str, list[tuple[int, str]]]:
    """Each slot's steps by its offset in MiB: microseconds since `finish`, and the step."""
    started, theirs = json.loads(path.read_text())
    found: dict[str, list[tuple[int, str]]] = {}
    for at, what, offset in sorted([*map(tuple, theirs), *(mark for mark in marks if started < mark[0] < started + 0.1)]):
        key = "credits" if what == "credit" else str(offset)
        found.setdefault(key, []).append((round((at - started) * 1e6), what))
    return found


def rates() -> list[dict[str, Any]]:
    """The packing kernel alone on one GPU, between a pool and slots."""
    mover, rows = GpuMover(0), []
    pool, slots = mover.allocate(1 << 30), [mover.allocate(SLOT) for _ in range(4)]
    piece, layers = DIM * 2, 8
    count, whole = (512 << 20) // (16 * piece * layers), (1 << 30) // layers // (16 * piece)
    rng, zero = np.random.default_rng(1), np.zeros(count, np.int64)
    runs = np.stack([rng.permutation(whole)[:count], zero, rng.permutation(whole)[:count], zero, zero + 16], 1)
    bases = np.array([pool + i * ((1 << 30) // layers) for i in range(layers)], np.uint64)
    shape = SpanShape(bases, bases, (16 * piece,) * 2, (piece,) * 2, (), piece, False, (whole,) * 2, (16, 16))
    shapes = mover.prepare((shape,))
    work_list = mover.upload(shapes, SpanBatch(shapes.shapes, (SpanRuns(0, None, runs),)))
    usual = packer.BLOCKS
    for blocks, (name, move) in itertools.product((16, 32, 64, 132), (("gather", mover.gather), ("scatter", mover.scatter))):
        packer.BLOCKS = blocks

        def start(count: int, move: Move = move) -> list[GpuWork]:
            return [move(work_list, i * SLOT, SLOT, slots[i % 4]) for i in range(count)]

        many = min(_seconds(partial(start, 16)) for _ in range(3))
        one = statistics.median(_seconds(partial(start, 1)) for _ in range(20))
        rows.append(
            {"kernel": name, "blocks": blocks, "gbps": round(16 * SLOT / many / 1e9, 1), "slot_us": round(one * 1e6, 1)}
        )
        print(rows[-1], flush=True)
    packer.BLOCKS = usual
    mover.release(work_list)
    mover.close()
    return rows


def _seconds(begin: Callable[[], list[GpuWork]]) -> float:
    """Seconds from the start of some work until all of it is done."""
    started = time.perf_counter()
    for work in begin():
        while not work.query():
            pass
    return time.perf_counter() - started


def pieces(engine: str, pipe: Connection) -> list[dict[str, Any]]:
    """GB/s of single requests, direct and packed, by piece size. A piece is a page, the same on both sides."""
    rows = []
    for kib in PIECES_KIB:
        dim = kib * 1024 // (16 * 2 * 2)
        case = Case(engine, 8, 2, dim, POOL // (kib << 10), REQUEST // (kib << 10), RUNS)
        found = [measure(dataclasses.replace(case, pack_below=way), pipe) for way in WAYS]
        gbps = dict(zip(("whole_gbps", "packed_gbps", "chosen_gbps"), (row["gbps"] for row in found), strict=True))
        verified = all(row["verified"] for row in found)
        rows.append({"engine": engine, "piece_kib": kib, **gbps, "pack_below": found[2]["pack_below"], "verified": verified})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", nargs="+", choices=["nixl", "mooncake"], default=["nixl", "mooncake"])
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        **conditions(),
        "what": __doc__.split("\n", 1)[0],
        "rates": rates(),
        "ways": [],
        "staging": [],
        "pieces": [],
    }
    for engine in arguments.engines:
        with other_process(ranks.prefill) as pipe:
            result["pieces"] += pieces(engine, pipe)
    patch()
    path = Path(tempfile.mkdtemp()) / "marks.json"
    for engine in arguments.engines:
        with other_process(prefill, str(path)) as pipe:
            for number, (nbytes, slots) in enumerate(SHAPES):
                row = measure(case_of(engine, number), pipe)
                keys = ("gbps", "ratio", "pipelined_gbps", "pipelined_ratio", "contiguous_gbps", "verified")
                staged = {"engine": engine, "slot_mib": nbytes, "slots": slots}
                result["staging"].append({**staged, **{key: row[key] for key in keys}})
                result["ways"].append({**staged, "us": ways(path)})
                print(result["staging"][-1], flush=True)
    path.unlink()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
