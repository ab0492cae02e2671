"""Backend `nvlink` on two GPUs against the plain device-to-device copy, in one run::

    python scripts/gpu_bench.py --json docs/benchmarks/nvlink-2xh200.json --date 2026-11-21

Each side's pool is 64 allocations (layers) of 32 MiB. A batch goes layer by layer, and takes random slots of each on both
sides. `kernel`: the kernel alone, its batch on the GPU already, by CUDA events. `request`: wall time from `submit` to `DONE`,
polled without a pause. Medians; every (piece, direction) is verified byte for byte.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from disagg.backends._nvlink_cuda import Buffer, Gpu
from disagg.backends.base import BackendOptions, Op, TransferStatus
from disagg.backends.nvlink import DEFAULT_BLOCKS, REFUSED_WORD, THREADS, NvlinkBackend, NvlinkPeer, launch_shape
from disagg.copies import CopyBatch
from disagg.memory import Device, MemoryRegion

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
    """The peer: holds its pool until told to end."""
    pool = Pool(1)
    pipe.send((pool.backend.endpoint(), pool.layers))
    pipe.recv()
    pool.backend.close()


@dataclass
class Batch:
    """Copies of one size, and which slots of each layer they are between: source and destination, `[layer, n]` each."""

    copies: CopyBatch
    source: np.ndarray
    destination: np.ndarray


def make_batch(
    sources: list[int], destinations: list[int], *, piece: int, total: int, offsets: tuple[int, int] = (0, 0)
) -> Batch:
    """Random slots of `piece` bytes in every layer, `total` bytes in all; `offsets` shift source and destination."""
    rng = np.random.default_rng(piece)
    slots, count = LAYER_NBYTES // piece - 1, total // piece // NUM_LAYERS
    chosen = [np.stack([rng.permutation(slots)[:count] for _ in range(NUM_LAYERS)]) for _ in range(2)]
    columns = [
        (np.array(bases, np.uint64)[:, None] + (slot * piece + offset).astype(np.uint64)).ravel()
        for bases, slot, offset in zip((sources, destinations), chosen, offsets, strict=True)
    ]
    sizes = np.full(count * NUM_LAYERS, piece, np.uint64)
    return Batch(CopyBatch(columns[0], columns[1], sizes), *chosen)


class Bench:
    """One side's engine, connected to the other's."""

    def __init__(self, endpoint: bytes, remote_layers: list[int]) -> None:
        self.cupy = importlib.import_module("cupy")
        self.pool = Pool(0)
        self.gpu, self.backend = self.pool.gpu, self.pool.backend
        engine = self.backend._engine
        assert engine is not None
        self.engine = engine
        self.peer: NvlinkPeer = self.backend.connect(endpoint, epoch=1)
        self.remote_layers = remote_layers
        table = {r.address: opened for r, opened in zip(self.peer.index.regions, self._mapped(), strict=True)}
        self.mapped = [table[layer] for layer in remote_layers]
        with self.gpu.current():
            self.stream = engine.stream
            self.events = [self.gpu.call("cuEventCreate", 0) for _ in range(2)]
            self.scratch = int(self.gpu.call("cuMemAlloc", LAYER_NBYTES))
            self.buffer = Buffer(self.gpu, IN_FLIGHT // min(PIECES))

    def _mapped(self) -> list[int]:
        """Where each of the peer's regions is here."""
        starts = [r.address for r in self.peer.index.regions]
        table = np.empty(3 * len(starts), np.uint64)
        with self.gpu.current():
            self.gpu.call("cuMemcpyDtoH", table.ctypes.data, self.peer.table, table.nbytes)
        return [(start + int(delta)) % 2**64 for start, delta in zip(starts, table[2 * len(starts) :], strict=True)]

    def timed(self, work: Callable[[], None], *, repeat: int = REPEAT) -> float:
        """Seconds on the GPU: the median, after one run for warmth."""
        found = []
        with self.gpu.current():
            for _ in range(repeat + 1):
                self.gpu.call("cuEventRecord", self.events[0], self.stream)
                work()
                self.gpu.call("cuEventRecord", self.events[1], self.stream)
                self.gpu.call("cuEventSynchronize", self.events[1])
                found.append(float(self.gpu.call("cuEventElapsedTime", *self.events)) / 1e3)
        return statistics.median(found[1:])

    # -- what is measured ---------------------------------------------------------------------------------------------

    def plain(self, op: Op, total: int) -> float:
        """Seconds of the copy engine for whole layers, `total` bytes in all."""

        def copy() -> None:
            for layer in range(max(1, total // LAYER_NBYTES)):
                ends = (self.mapped[layer], self.pool.layers[layer])
                to, of = ends if op is Op.WRITE else ends[::-1]
                self.gpu.call("cuMemcpyAsync", to, of, min(total, LAYER_NBYTES), self.stream)

        return self.timed(copy)

    def kernel(self, op: Op, copies: CopyBatch, *, max_blocks: int) -> float:
        """Seconds of the kernel for a batch that is on the GPU already."""
        count = len(copies)
        _, size = self.buffer.fill(copies.source, copies.destination, copies.nbytes)
        blocks, tile = launch_shape(copies.total_nbytes, max_blocks=max_blocks)
        address, regions = self.buffer.device_address, len(self.peer.index.regions)
        refused = address + 8 * REFUSED_WORD
        arguments = (address, count, self.peer.table, regions, int(op is Op.READ), refused, tile)
        with self.gpu.current():
            self.gpu.call("cuMemcpyHtoD", address, self.buffer.host_address, size)

        def launch() -> None:
            self.gpu.call("cuMemsetD32Async", address, 0, 2, self.stream)
            self.gpu.launch(self.engine._move, self.stream, arguments, blocks=blocks, threads=THREADS)

        return self.timed(launch)

    def request(self, op: Op, copies: CopyBatch, *, repeat: int = REPEAT) -> tuple[list[float], list[float]]:
        """Seconds of `submit`, and from its begin to `DONE`, each time."""
        posted, done = [], []
        for i in range(repeat + 2):
            started = time.perf_counter()
            transfer = self.backend.submit(op, self.peer, copies)
            at = time.perf_counter()
            while transfer.poll() is TransferStatus.PENDING:
                pass
            ended = time.perf_counter()
            assert transfer.poll() is TransferStatus.DONE, transfer.error
            if i >= 2:
                posted.append(at - started)
                done.append(ended - started)
        return posted, done

    def pipelined(self, op: Op, copies: CopyBatch, *, requests: int = 32, at_once: int = 4) -> float:
        """Seconds per request, with `at_once` of them in flight."""
        pending: list[Any] = []
        started = time.perf_counter()
        for _ in range(requests):
            pending.append(self.backend.submit(op, self.peer, copies))
            while len(pending) >= at_once:
                pending = [t for t in pending if t.poll() is TransferStatus.PENDING]
        while any(t.poll() is TransferStatus.PENDING for t in pending):
            pass
        return (time.perf_counter() - started) / requests

    # -- what is right ------------------------------------------------------------------------------------------------

    def array(self, address: int) -> Any:
        memory = self.cupy.cuda.UnownedMemory(address, LAYER_NBYTES, self)
        return self.cupy.ndarray((LAYER_NBYTES,), self.cupy.uint8, self.cupy.cuda.MemoryPointer(memory, 0))

    def fill(self, op: Op) -> None:
        """Random bytes in every source layer, poison in every destination."""
        rng = self.cupy.random.default_rng(5)
        for layer, (mine, theirs) in enumerate(zip(self.pool.layers, self.mapped, strict=True)):
            source, destination = (mine, theirs) if op is Op.WRITE else (theirs, mine)
            self.array(self.scratch).view(self.cupy.uint64)[:] = rng.integers(0, 2**63, LAYER_NBYTES // 8, self.cupy.uint64)
            self._copy(source, self.scratch)
            self.array(self.scratch)[:] = POISON
            self._copy(destination, self.scratch)
            del layer

    def _copy(self, to: int, of: int) -> None:
        self.cupy.cuda.Device(0).synchronize()
        with self.gpu.current():
            self.gpu.call("cuMemcpy", to, of, LAYER_NBYTES)
            self.gpu.call("cuCtxSynchronize")

    def verify(self, op: Op, batch: Batch, *, piece: int) -> bool:
        """Every byte of every destination layer: what was copied, and poison elsewhere."""
        cupy, good = self.cupy, True
        other = self.array(int(self.gpu_scratch()))
        for layer in range(NUM_LAYERS):
            self._copy(self.scratch, self.mapped[layer])
            theirs, mine = self.array(self.scratch), self.array(self.pool.layers[layer])
            source, destination = (mine, theirs) if op is Op.WRITE else (theirs, mine)
            other[:] = POISON
            to, of = (cupy.asarray(slots[layer]) for slots in (batch.destination, batch.source))
            other.reshape(-1, piece)[to] = source.reshape(-1, piece)[of]
            good = good and bool((other == destination).all())
        return good

    def gpu_scratch(self) -> int:
        if not hasattr(self, "_other"):
            with self.gpu.current():
                self._other = int(self.gpu.call("cuMemAlloc", LAYER_NBYTES))
        return self._other

    def make(self, op: Op, *, piece: int, total: int, offsets: tuple[int, int] = (0, 0)) -> Batch:
        ends = self.pool.layers, self.remote_layers
        return make_batch(*(ends if op is Op.WRITE else ends[::-1]), piece=piece, total=total, offsets=offsets)


def measure_pieces(bench: Bench) -> list[dict[str, Any]]:
    """Every size, both ways, at several numbers of blocks, each beside its plain copy."""
    rows = []
    for op, piece in itertools.product(Op, PIECES):
        batch = bench.make(op, piece=piece, total=IN_FLIGHT)
        nbytes = batch.copies.total_nbytes
        bench.fill(op)
        bench.request(op, batch.copies, repeat=0)
        verified = bench.verify(op, batch, piece=piece)
        _, whole = bench.request(op, batch.copies, repeat=5)
        plain = [bench.plain(op, IN_FLIGHT)]
        kernels = {blocks: bench.kernel(op, batch.copies, max_blocks=blocks) for blocks in BLOCKS}
        plain.append(bench.plain(op, IN_FLIGHT))
        ceiling = IN_FLIGHT / statistics.median(plain) / 1e9
        row: dict[str, Any] = {
            "op": op.value,
            "piece": piece,
            "pieces": len(batch.copies),
            "bytes": nbytes,
            "plain_gbps": round(ceiling, 1),
            "kernel_gbps": {str(b): round(nbytes / s / 1e9, 1) for b, s in kernels.items()},
            "kernel_ratio": {str(b): round(nbytes / s / 1e9 / ceiling, 3) for b, s in kernels.items()},
            "submit_to_done_gbps": round(nbytes / statistics.median(whole) / 1e9, 1),
            "verified": verified,
        }
        rows.append(row)
        ratios = " ".join(f"{b}:{r:.3f}" for b, r in row["kernel_ratio"].items())
        print(
            f"{op.value:5} {piece:6} plain {ceiling:6.1f} ratio {ratios} full {row['submit_to_done_gbps']} {verified}",
            flush=True,
        )
    return rows


def measure_unaligned(bench: Bench) -> list[dict[str, Any]]:
    """Pieces of 4 KiB whose addresses differ modulo 16."""
    rows = []
    for offset in (8, 4, 2, 1):
        batch = bench.make(Op.WRITE, piece=4096, total=IN_FLIGHT // 4, offsets=(0, offset))
        seconds = bench.kernel(Op.WRITE, batch.copies, max_blocks=DEFAULT_BLOCKS)
        rows.append({"piece": 4096, "word": offset, "kernel_gbps": round(batch.copies.total_nbytes / seconds / 1e9, 1)})
        print(rows[-1], flush=True)
    return rows


def measure_requests(bench: Bench) -> list[dict[str, Any]]:
    """Single requests, from `submit` to `DONE`."""
    rows = []
    for total, piece in ((64 << 20, 8192), (64 << 20, 512), (1 << 30, 8192), (64 << 20, 65536)):
        batch = bench.make(Op.WRITE, piece=piece, total=total)
        nbytes = batch.copies.total_nbytes
        posted, done = bench.request(Op.WRITE, batch.copies, repeat=101)
        kernel = bench.kernel(Op.WRITE, batch.copies, max_blocks=DEFAULT_BLOCKS)
        plain = bench.plain(Op.WRITE, nbytes)
        p50, p99 = np.quantile(done, (0.5, 0.99))
        row = {
            "bytes": nbytes,
            "piece": piece,
            "pieces": len(batch.copies),
            "submit_us_p50": round(statistics.median(posted) * 1e6, 1),
            "kernel_us": round(kernel * 1e6, 1),
            "submit_to_done_us_p50": round(float(p50) * 1e6, 1),
            "submit_to_done_us_p99": round(float(p99) * 1e6, 1),
            "plain_us": round(plain * 1e6, 1),
            "ratio": round(float(p50) / plain, 3),
            "four_in_flight_us": round(bench.pipelined(Op.WRITE, batch.copies) * 1e6, 1),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def versions(gpu: Gpu) -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda_driver": str(gpu.call("cuDriverGetVersion"))}
    for package in ("cuda-bindings", "nvidia-cuda-nvrtc", "numpy", "cupy-cuda13x"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["driver"] = driver.read_text().splitlines()[0].strip()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,))
    process.start()
    bench = Bench(*pipe.recv())
    result = {
        "date": arguments.date,
        "what": "backend nvlink: random pieces between 64 layers on each of two GPUs, against plain device-to-device copies",
        "machine": {"gpu": bench.gpu.call("cuDeviceGetName", 64, bench.gpu.device).decode().strip("\0 "), "count": 2},
        "transport": bench.backend.transport,
        "default_blocks": DEFAULT_BLOCKS,
        "versions": versions(bench.gpu),
        "pieces": measure_pieces(bench),
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
