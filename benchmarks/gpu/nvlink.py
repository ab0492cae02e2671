"""Backend `nvlink` on two GPUs against the plain device-to-device copy, in one run::

    python -m benchmarks.gpu.nvlink --json docs/benchmarks/nvlink-2xh200.json

Each side's pool has 64 layers of 32 MiB, one allocation each, cut into pages of 16 tokens. The peer has twice the heads, so
every token is a separate piece (NHD, different TP). Pages are random on both sides, and only token runs go to the GPU.
`kernel`: the kernel alone, with its work list on the GPU, by CUDA events. `request`: wall time from `submit_spans` to `DONE`,
polled without a pause. `pipelined`: four requests in flight. `addresses`: the same pieces by `submit`, as columns of addresses.
All figures are medians; every (piece, direction) is verified byte for byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from disagg.backends.base import BackendOptions, Transfer, TransferStatus
from disagg.backends.cuda.buffers import Buffer, batch_nbytes
from disagg.backends.cuda.driver import Gpu
from disagg.backends.cuda.work_list import encode_work_list, work_list_nbytes
from disagg.backends.nvlink.backend import DEFAULT_BLOCKS, NvlinkBackend
from disagg.backends.nvlink.engine import THREADS, NvlinkSpans, launch_shape
from disagg.backends.nvlink.mapping import NvlinkPeer
from disagg.core.copies import CopyBatch
from disagg.core.memory import Device, MemoryRegion
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from harness.conditions import conditions

NUM_LAYERS = 64
LAYER_NBYTES = 32 << 20
PIECES = tuple(256 << i for i in range(9))
BLOCKS = (8, 16, 32, 64, 132)
IN_FLIGHT = 512 << 20
REPEAT = 9
POISON = 0xEE


class Pool:
    """Layers on one GPU, registered with an engine."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        with self.gpu.current():
            self.layers = [int(self.gpu.call("cuMemAlloc", LAYER_NBYTES)) for _ in range(NUM_LAYERS)]
        self.backend = NvlinkBackend(BackendOptions())
        self.backend.register([MemoryRegion(layer, LAYER_NBYTES, Device("cuda", ordinal)) for layer in self.layers])


def own(pipe: Connection) -> None:
    """The peer process: keeps its pool until the command to end."""
    pool = Pool(1)
    pipe.send((pool.backend.endpoint(), pool.layers))
    pipe.recv()
    pool.backend.close()


@dataclass
class Batch:
    """Copies of one size, as span classes and as addresses, and the pages that they connect in every layer."""

    spans: SpanBatch
    prepared: NvlinkSpans
    copies: CopyBatch
    source: np.ndarray
    destination: np.ndarray
    piece: int
    wide: tuple[int, int]


PAGE = 16


def make_runs(piece: int, total: int, wide: tuple[int, int]) -> np.ndarray:
    """Whole pages in random order on both sides, `total` bytes over all layers."""
    rng = np.random.default_rng(piece)
    count = total // (NUM_LAYERS * PAGE * piece)
    rows = [rng.permutation(LAYER_NBYTES // (PAGE * piece * w))[:count] for w in wide]
    zero = np.zeros(count, np.int64)
    return np.stack([rows[0], zero, rows[1], zero, zero + PAGE], axis=1)


def shape_of(sources: list[int], destinations: list[int], piece: int, wide: tuple[int, int]) -> SpanShape:
    """One piece of `piece` bytes per token; tokens are `wide` pieces apart, and the last of them is copied."""
    bases = [np.array(b, np.uint64) + np.uint64((w - 1) * piece) for b, w in zip((sources, destinations), wide, strict=True)]
    strides = (wide[0] * piece, wide[1] * piece)
    return SpanShape(
        source_bases=bases[0],
        destination_bases=bases[1],
        row_strides=(PAGE * strides[0], PAGE * strides[1]),
        token_strides=strides,
        dims=(),
        nbytes=piece,
        dense=False,
        num_rows=(LAYER_NBYTES // (PAGE * strides[0]), LAYER_NBYTES // (PAGE * strides[1])),
        positions=(PAGE, PAGE),
    )


def columns_of(shape: SpanShape, runs: np.ndarray) -> CopyBatch:
    """The same copies as columns of addresses."""
    tokens = np.arange(PAGE, dtype=np.uint64)
    columns = []
    for side, bases in enumerate((shape.source_bases, shape.destination_bases)):
        rows = runs[:, 2 * side].astype(np.uint64) * np.uint64(shape.row_strides[side])
        columns.append((bases[:, None, None] + rows[:, None] + tokens * np.uint64(shape.token_strides[side])).ravel())
    source, destination = columns
    return CopyBatch(source, destination, np.full(len(source), shape.nbytes, np.uint64))


class Bench:
    """This process's engine, connected to the peer's."""

    def __init__(self, endpoint: bytes, remote_layers: list[int]) -> None:
        self.cupy = importlib.import_module("cupy")
        self.pool = Pool(0)
        self.gpu, self.backend = self.pool.gpu, self.pool.backend
        engine = self.backend._engine
        assert engine is not None
        self.engine = engine
        self.peer: NvlinkPeer = self.backend.connect(endpoint, epoch=1)
        self.remote_layers = remote_layers
        table = {r.address: int(d) for r, d in zip(self.peer.index.regions, self.peer.deltas, strict=True)}
        self.mapped = [(layer + table[layer]) % 2**64 for layer in remote_layers]
        with self.gpu.current():
            self.stream = engine.queue.stream
            self.events = [self.gpu.call("cuEventCreate", 0) for _ in range(2)]
            self.scratch = int(self.gpu.call("cuMemAlloc", LAYER_NBYTES))
            self.buffer = Buffer(self.gpu, batch_nbytes(IN_FLIGHT // min(PIECES)))

    def timed(self, work: Callable[[], None], *, repeat: int = REPEAT) -> float:
        """Median seconds on the GPU, after one warm-up run."""
        found = []
        with self.gpu.current():
            for _ in range(repeat + 1):
                self.gpu.call("cuEventRecord", self.events[0], self.stream)
                work()
                self.gpu.call("cuEventRecord", self.events[1], self.stream)
                self.gpu.call("cuEventSynchronize", self.events[1])
                found.append(float(self.gpu.call("cuEventElapsedTime", *self.events)) / 1e3)
        return statistics.median(found[1:])

    # -- measurements ------------------------------------------------------------------------------------------------

    def plain(self, total: int) -> float:
        """Seconds of the copy engine for whole layers, `total` bytes altogether."""

        def copy() -> None:
            for layer in range(max(1, total // LAYER_NBYTES)):
                to, of = self.mapped[layer], self.pool.layers[layer]
                self.gpu.call("cuMemcpyAsync", to, of, min(total, LAYER_NBYTES), self.stream)

        return self.timed(copy)

    def kernel(self, batch: Batch, *, max_blocks: int) -> float:
        """Seconds of the kernel for a work list that is on the GPU already."""
        blocks, tile = launch_shape(batch.spans.total_nbytes, max_blocks=max_blocks)
        assert work_list_nbytes(batch.spans) <= self.buffer.nbytes
        nbytes = encode_work_list(batch.spans, batch.prepared.table, tile=tile, out=self.buffer.words)
        address, total = self.buffer.device_address, batch.spans.total_nbytes
        tiles = batch.spans.core.tiles(0, total)
        arguments = (address, address, 0, batch.prepared.address, *tiles, tile, 0, total, 0, 0)
        with self.gpu.current():
            self.gpu.call("cuMemcpyHtoD", address, self.buffer.host_address, nbytes)

        def launch() -> None:
            self.engine.queue.launch(self.engine._kernels["move_spans"], arguments, blocks=blocks, threads=THREADS)

        return self.timed(launch)

    def request(self, submit: Callable[[], Transfer], *, repeat: int = REPEAT) -> tuple[list[float], list[float]]:
        """Seconds of each `submit`, and from its start to `DONE`."""
        posted, done = [], []
        for i in range(repeat + 2):
            started = time.perf_counter()
            transfer = submit()
            at = time.perf_counter()
            while transfer.poll() is TransferStatus.PENDING:
                pass
            ended = time.perf_counter()
            assert transfer.poll() is TransferStatus.DONE, transfer.error
            if i >= 2:
                posted.append(at - started)
                done.append(ended - started)
        return posted, done

    def pipelined(self, submit: Callable[[], Transfer], *, requests: int = 24, at_once: int = 4) -> float:
        """Seconds per request with `at_once` requests in flight."""
        pending: list[Transfer] = []
        started = time.perf_counter()
        for _ in range(requests):
            pending.append(submit())
            while len(pending) >= at_once:
                pending = [t for t in pending if t.poll() is TransferStatus.PENDING]
        while any(t.poll() is TransferStatus.PENDING for t in pending):
            pass
        return (time.perf_counter() - started) / requests

    def spans(self, batch: Batch) -> Callable[[], Transfer]:
        return lambda: self.backend.submit_spans(batch.prepared, batch.spans)

    # -- verification ------------------------------------------------------------------------------------------------

    def array(self, address: int) -> Any:
        memory = self.cupy.cuda.UnownedMemory(address, LAYER_NBYTES, self)
        return self.cupy.ndarray((LAYER_NBYTES,), self.cupy.uint8, self.cupy.cuda.MemoryPointer(memory, 0))

    def fill(self) -> None:
        """Write random bytes to every source layer, and poison to every destination layer."""
        rng = self.cupy.random.default_rng(5)
        for source, destination in zip(self.pool.layers, self.mapped, strict=True):
            self.array(self.scratch).view(self.cupy.uint64)[:] = rng.integers(0, 2**63, LAYER_NBYTES // 8, self.cupy.uint64)
            self._copy(source, self.scratch)
            self.array(self.scratch)[:] = POISON
            self._copy(destination, self.scratch)

    def _copy(self, to: int, of: int) -> None:
        self.cupy.cuda.Device(0).synchronize()
        with self.gpu.current():
            self.gpu.call("cuMemcpy", to, of, LAYER_NBYTES)
            self.gpu.call("cuCtxSynchronize")

    def verify(self, batch: Batch) -> bool:
        """Whether every destination layer holds the copied pieces and poison elsewhere."""
        cupy, good = self.cupy, True
        other = self.array(int(self.gpu_scratch()))
        to, of = (cupy.asarray(rows) for rows in (batch.destination, batch.source))
        shapes = [(-1, PAGE, w, batch.piece) for w in batch.wide]
        for layer in range(NUM_LAYERS):
            self._copy(self.scratch, self.mapped[layer])
            destination, source = self.array(self.scratch), self.array(self.pool.layers[layer])
            other[:] = POISON
            other.reshape(shapes[1])[to, :, -1] = source.reshape(shapes[0])[of, :, -1]
            good = good and bool((other == destination).all())
        return good

    def gpu_scratch(self) -> int:
        if not hasattr(self, "_other"):
            with self.gpu.current():
                self._other = int(self.gpu.call("cuMemAlloc", LAYER_NBYTES))
        return self._other

    def make(self, *, piece: int, total: int, offsets: tuple[int, int] = (0, 0), wide: tuple[int, int] = (1, 2)) -> Batch:
        ends = [layer + offsets[0] for layer in self.pool.layers], [layer + offsets[1] for layer in self.remote_layers]
        runs = make_runs(piece, total, (wide[0] + (offsets[0] > 0), wide[1] + (offsets[1] > 0)))
        shape = shape_of(*ends, piece, wide)
        shape = dataclasses.replace(shape, num_rows=(shape.num_rows[0] - 1, shape.num_rows[1] - 1)) if any(offsets) else shape
        prepared = self.backend.prepare_spans(self.peer, (shape,))
        spans = SpanBatch(prepared.shapes, (SpanRuns(0, None, runs),))
        return Batch(spans, prepared, columns_of(shape, runs), runs[:, 0], runs[:, 2], piece, wide)


def measure_pieces(bench: Bench, pieces: Sequence[int]) -> list[dict[str, Any]]:
    """Every piece size, at several numbers of blocks, each next to its plain copy."""
    rows = []
    for piece in pieces:
        batch = bench.make(piece=piece, total=IN_FLIGHT)
        nbytes = batch.copies.total_nbytes
        bench.fill()
        bench.request(bench.spans(batch), repeat=0)
        verified = bench.verify(batch)
        plain = [bench.plain(IN_FLIGHT)]
        posted, whole = bench.request(bench.spans(batch))
        pipelined = bench.pipelined(bench.spans(batch))
        kernels = {blocks: bench.kernel(batch, max_blocks=blocks) for blocks in BLOCKS}
        plain.append(bench.plain(IN_FLIGHT))
        _, addresses = bench.request(lambda batch=batch: bench.backend.submit(bench.peer, batch.copies), repeat=3)  # type: ignore[misc]
        ceiling = IN_FLIGHT / statistics.median(plain) / 1e9

        def ratio(seconds: float, nbytes: int = nbytes, ceiling: float = ceiling) -> float:
            return round(nbytes / seconds / 1e9 / ceiling, 3)

        row: dict[str, Any] = {
            "op": "write",
            "piece": piece,
            "pieces": len(batch.copies),
            "bytes": nbytes,
            "plain_gbps": round(ceiling, 1),
            "kernel_ratio": {str(b): ratio(s) for b, s in kernels.items()},
            "request_ratio": ratio(statistics.median(whole)),
            "submit_us": round(statistics.median(posted) * 1e6, 1),
            "pipelined_ratio": ratio(pipelined),
            "addresses_ratio": ratio(statistics.median(addresses)),
            "verified": verified,
        }
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("bytes", "pieces")}, flush=True)
    return rows


def measure_unaligned(bench: Bench) -> list[dict[str, Any]]:
    """Pieces of 4 KiB whose source and destination differ modulo 16."""
    rows = []
    for offset in (8, 4, 2, 1):
        batch = bench.make(piece=4096, total=IN_FLIGHT // 4, offsets=(0, offset))
        seconds = bench.kernel(batch, max_blocks=DEFAULT_BLOCKS)
        rows.append({"piece": 4096, "word": offset, "kernel_gbps": round(batch.copies.total_nbytes / seconds / 1e9, 1)})
        print(rows[-1], flush=True)
    return rows


def measure_requests(bench: Bench) -> list[dict[str, Any]]:
    """Single requests, from `submit_spans` to `DONE`."""
    rows = []
    for total, piece in ((64 << 20, 8192), (64 << 20, 512), (1 << 30, 8192), (64 << 20, 65536)):
        batch = bench.make(piece=piece, total=total, wide=(1, 1) if total > IN_FLIGHT else (1, 2))
        nbytes = batch.copies.total_nbytes
        plain = [bench.plain(nbytes)]
        posted, done = bench.request(bench.spans(batch), repeat=101)
        kernel = bench.kernel(batch, max_blocks=DEFAULT_BLOCKS)
        ceiling = statistics.median([*plain, bench.plain(nbytes)])
        p50, p99 = np.quantile(done, (0.5, 0.99))
        row = {
            "bytes": nbytes,
            "piece": piece,
            "submit_us_p50": round(statistics.median(posted) * 1e6, 1),
            "done_us_p50": round(float(p50) * 1e6, 1),
            "done_us_p99": round(float(p99) * 1e6, 1),
            "kernel_us": round(kernel * 1e6, 1),
            "plain_us": round(ceiling * 1e6, 1),
            "done_to_plain": round(float(p50) / ceiling, 3),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", type=int, nargs="+", default=PIECES, help="bytes")
    arguments, about = parser.parse_args(), conditions()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,))
    process.start()
    theirs.close()
    bench = Bench(*pipe.recv())
    result = {
        **about,
        "what": "backend nvlink: random pieces between 64 layers on each of two GPUs, against plain device-to-device copies",
        "transport": bench.backend.transport,
        "default_blocks": DEFAULT_BLOCKS,
        "pieces": measure_pieces(bench, arguments.pieces),
        "unaligned": measure_unaligned(bench),
        "requests": measure_requests(bench),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    pipe.send(None)
    process.join()
    bench.backend.close()


if __name__ == "__main__":
    main()
