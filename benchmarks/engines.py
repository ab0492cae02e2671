"""The cost of the transfer engines themselves, between two processes of one machine.

`python -m benchmarks.engines --json FILE` prints the tables of `docs/engines.md`. Names select tables: `submit vectors delay
pages mooncake newer`. Takes about two minutes. Times are medians; compared calls take turns; GB are 1e9 bytes.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.pair import Addresses, Pair, Row, medians_s, pair, run_tables
from disagg.backends.base import BackendOptions, Transport
from disagg.core import _native
from disagg.core.copies import CopyBatch

SHM, TCP = BackendOptions(transport=Transport.SHM), BackendOptions(transport=Transport.TCP)
MIB = 1 << 20
RNG = np.random.default_rng(0)


def _rows(addresses: Addresses, nbytes: Addresses) -> Addresses:
    return np.stack((addresses, nbytes, np.zeros_like(nbytes)), axis=1)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB" if nbytes >= 1024 else f"{nbytes} B"


class Raw:
    """NIXL's own calls for a batch, without this library."""

    def __init__(self, both: Pair, copies: CopyBatch) -> None:
        self.nixl, self.agent, self.peer = both.backend._nixl.module, both.backend._agent, both.peer
        self.ucx = [both.backend._ucx]
        self.rows = _rows(copies.source, copies.nbytes), _rows(copies.destination, copies.nbytes)
        self.handle = self.create()

    def create(self) -> int:
        local, remote = (self.nixl.nixlXferDList(self.nixl.DRAM_SEG, rows) for rows in self.rows)
        return int(self.agent.createXferReq(self.nixl.NIXL_WRITE, local, remote, self.peer.agent, "", self.ucx))

    def create_and_release(self) -> None:
        self.agent.releaseXferReq(self.create())

    def post(self) -> None:
        status = self.agent.postXferReq(self.handle)
        while status == self.nixl.NIXL_IN_PROG:
            status = self.agent.getXferStatus(self.handle)
        assert status == self.nixl.NIXL_SUCCESS


def submit_table() -> Iterator[Row]:
    """Small requests: NIXL's own calls, and the backend's `submit` until done. Microseconds."""
    for name, options in (("shm", SHM), ("tcp", TCP)):
        with pair("nixl", options, nbytes=64 * MIB) as both:
            for count in (1, 2, 8, 64):
                copies = both.pieces(4096, count, RNG)
                raw = Raw(both, copies)
                found = medians_s(
                    [raw.create_and_release, raw.post, partial(both.write, copies)],
                    rounds=15,
                    repeat=200 if count < 64 else 20,
                )
                names = ("raw_create_and_release", "raw_post", "submit")
                yield {"engine": f"nixl {name}", "copies": count, "nbytes": 4096} | dict(
                    zip(names, map(_us, found), strict=True)
                )
    with pair("mooncake", BackendOptions(), nbytes=64 * MIB) as both:
        engine, session = both.backend._engine, both.peer.queue._descriptor.session
        opcode = both.backend._opcodes.write
        for count in (1, 2, 4, 8, 64):
            copies = both.pieces(4096, count, RNG)
            columns = [column.tolist() for column in (copies.source, copies.destination, copies.nbytes)]

            def single(columns: list[list[int]] = columns, count: int = count) -> None:
                tasks = [
                    engine.batch_transfer_async(session, *(column[i : i + 1] for column in columns), opcode)
                    for i in range(count)
                ]
                for task in tasks:
                    while engine.transfer_check_status(task) == 0:
                        time.sleep(2e-5)

            found = medians_s([single, partial(both.write, copies, pause_s=2e-5)], rounds=15, repeat=20)
            yield {"engine": "mooncake tcp", "copies": count, "nbytes": 4096} | dict(
                zip(("raw_tasks", "submit"), map(_us, found), strict=True)
            )


def vectors_table() -> Iterator[Row]:
    """64 MiB in random order over shared memory: UCX, vectors by one and two threads, and one block by UCX. GB/s."""
    total = 64 * MIB
    with pair("nixl", SHM, nbytes=256 * MIB) as both:
        whole = CopyBatch([both.here], [both.there], [total])  # type: ignore[arg-type]
        for nbytes in (256, 512, 1024, 4096, 8192, 16_384, 32_768, 65_536):
            copies = both.pieces(nbytes, total // nbytes, RNG)

            def vectors(num_threads: int, copies: CopyBatch = copies) -> None:
                both.backend.index.require(copies.source, copies.nbytes, side="local")
                both.peer.index.require(copies.destination, copies.nbytes, side="remote")
                error = _native.copy_between_processes(
                    both.pid, copies.source, copies.destination, copies.nbytes, write=True, num_threads=num_threads
                )
                assert error == 0, os.strerror(error)

            functions: list[Callable[[], object]] = [
                partial(both.write, copies), partial(vectors, 1), partial(vectors, 2), partial(both.write, whole),
            ]  # fmt: skip
            found = medians_s(functions, rounds=7)
            rates = [round(total / s / 1e9, 2) for s in found]
            yield {
                "pieces": _size(nbytes),
                "ucx": rates[0],
                "vectors": rates[1],
                "vectors_by_two": rates[2],
                "one_block_by_ucx": rates[3],
            }


def delay_table() -> Iterator[Row]:
    """The progress thread's delay: GB/s of writes, the time of one 4-KiB copy, and the CPU use of two idle engines."""
    for name, options in (("shm", SHM), ("tcp", TCP)):
        for delay_us in (0, 1000, 20_000):
            with pair("nixl", options, nbytes=128 * MIB, PROGRESS_DELAY_US=delay_us, SHM_PROGRESS_DELAY_US=delay_us) as both:
                batches = [both.pieces(64 * MIB, 1, RNG), both.pieces(64 << 10, 1024, RNG), both.pieces(4096, 4096, RNG)]
                times = medians_s([partial(both.write, copies, pause_s=1e-4) for copies in batches], rounds=7)
                (small,) = medians_s([partial(both.write, both.pieces(4096, 1, RNG))], rounds=15, repeat=20)
                began, here, there = time.perf_counter(), time.process_time(), both.ask("cpu")
                time.sleep(1.0)
                busy = (time.process_time() - here + both.ask("cpu") - there) / (time.perf_counter() - began)
                rates = [round(copies.total_nbytes / s / 1e9, 2) for copies, s in zip(batches, times, strict=True)]
                yield {
                    "transport": name, "delay_us": delay_us, "64 MiB": rates[0], "64 KiB": rates[1], "4 KiB": rates[2],
                    "one_4_KiB_us": _us(small), "idle_cores_of_both": round(busy, 3),
                }  # fmt: skip


def _arena(nbytes: int, *, huge: bool) -> tuple[Any, int]:
    memory = mmap.mmap(-1, nbytes + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    whole[:: mmap.PAGESIZE] = 1
    return whole, -(-whole.ctypes.data // (2 * MIB)) * 2 * MIB


def pages_table() -> Iterator[Row]:
    """`process_vm_writev` of two alternating slots into a ring, with small and huge pages; GB/s of one core."""
    for slot, ring in ((256 << 10, 2 * MIB), (MIB, 8 * MIB), (2 * MIB, 16 * MIB), (2 * MIB, 64 * MIB)):

        def one_pass(*, huge: bool, slot: int = slot, ring: int = ring) -> Callable[[], object]:
            # The operating system looks up every page of the remote process; here that is this process itself.
            sides = [_arena(2 * slot, huge=huge), _arena(ring, huge=huge)]
            sizes = np.full(ring // slot, slot, np.uint64)
            steps = np.arange(ring // slot, dtype=np.uint64)
            local = np.uint64(sides[0][1]) + steps % np.uint64(2) * np.uint64(slot)
            remote = np.uint64(sides[1][1]) + steps * np.uint64(slot)

            def run() -> None:
                assert sides  # keep them mapped
                for at in range(len(steps)):  # one call per slot, as the library posts slots
                    one = slice(at, at + 1)
                    _native.copy_between_processes(os.getpid(), local[one], remote[one], sizes[one], write=True)

            return run

        found = medians_s([one_pass(huge=False), one_pass(huge=True)], rounds=15)
        yield {
            "slot": _size(slot),
            "ring": _size(ring),
            "small_pages": round(ring / found[0] / 1e9, 1),
            "huge_pages": round(ring / found[1] / 1e9, 1),
        }


def mooncake_table() -> Iterator[Row]:
    """Pieces in random order over TCP: the engine's blocking call, 1,024 pieces at a time, and the backend. GB/s."""
    with pair("mooncake", BackendOptions(), nbytes=128 * MIB) as both:
        engine, session = both.backend._engine, both.peer.queue._descriptor.session
        for nbytes, total in ((512, MIB), (4096, 8 * MIB), (64 << 10, 64 * MIB), (64 * MIB, 64 * MIB)):
            copies = both.pieces(nbytes, total // nbytes, RNG)

            def blocking(copies: CopyBatch = copies) -> None:
                for at in range(0, len(copies), 1024):
                    columns = [c[at : at + 1024].tolist() for c in (copies.source, copies.destination, copies.nbytes)]
                    assert engine.batch_transfer_sync_write(session, *columns) == 0

            found = medians_s([blocking, partial(both.write, copies, pause_s=1e-4)], rounds=7)
            per = [round(s / len(copies) * 1e6, 1) for s in found]
            rates = [round(total / s / 1e9, 3) for s in found]
            yield {
                "pieces": _size(nbytes),
                "blocking": rates[0],
                "backend": rates[1],
                "blocking_us_a_piece": per[0],
                "backend_us_a_piece": per[1],
            }


def newer_table() -> Iterator[Row]:
    """Calls of Mooncake 0.3.14 and later over TCP, GB/s.

    Batches from lists, from arrays, by page numbers (a blocking call) and as a scatter ticket, and by the backend, which passes
    arrays. Then 6,000 pieces as one ticket, and the status of a ticket 10 s after the peer was killed.
    """
    with pair("mooncake", BackendOptions(), nbytes=128 * MIB) as both:
        engine, session = both.backend._engine, both.peer.queue._descriptor.session
        if not hasattr(engine, "submit_scatter_write"):
            yield {"skipped": "the installed version has none of these calls"}
            return
        opcode = both.backend._opcodes.write

        def ticket(copies: CopyBatch) -> Any:
            offsets = [
                (column - np.uint64(base)).tolist()
                for column, base in ((copies.source, both.here), (copies.destination, both.there))
            ]
            sides = [[both.here], [both.memory.nbytes], [both.there], [both.memory.nbytes]]
            return engine.submit_scatter_write(session, *sides, [offsets[0]], [offsets[1]], [copies.nbytes.tolist()])

        def drained(copies: CopyBatch) -> None:
            assert ticket(copies).drain(60_000).name == "COMPLETED"

        for nbytes, count in ((4096, 512), (64 << 10, 1000), (MIB, 64)):
            copies = both.pieces(nbytes, count, RNG)
            columns = [column.astype(np.int64) for column in (copies.source, copies.destination, copies.nbytes)]

            def lists(columns: Any = columns) -> None:
                batch = engine.batch_transfer_async(session, *(column.tolist() for column in columns), opcode)
                assert engine.get_batch_transfer_status([batch]) == 0

            def arrays(columns: Any = columns) -> None:
                batch = engine.batch_transfer_async_write_arrays(session, *columns)
                assert engine.get_batch_transfer_status([batch]) == 0

            pages = [
                ((column - np.uint64(base)) // np.uint64(nbytes)).astype(np.int64)
                for column, base in ((copies.source, both.here), (copies.destination, both.there))
            ]
            fields = np.array([[both.here, nbytes, both.there, nbytes, nbytes]], dtype=np.int64)

            def blocking(pages: Any = pages, fields: Any = fields) -> None:
                assert engine.batch_transfer_sync_write_pages(session, *pages, fields) == 0

            writes = partial(drained, copies), partial(both.write, copies, pause_s=1e-4)
            calls: list[Callable[[], object]] = [lists, arrays, blocking, *writes]
            found = medians_s(calls, rounds=7)
            names = ("lists", "arrays", "pages", "ticket", "backend")
            rates = [round(copies.total_nbytes / s / 1e9, 2) for s in found]
            yield {"pieces": f"{count} of {_size(nbytes)}"} | dict(zip(names, rates, strict=True))
        many = both.pieces(4096, 6000, RNG)
        (took,) = medians_s([partial(drained, many)], rounds=3)
        yield {"pieces": "6000 of 4 KiB", "ticket": round(many.total_nbytes / took / 1e9, 2)}
        os.kill(both.pid, signal.SIGSTOP)
        held = ticket(both.pieces(MIB, 64, RNG))
        time.sleep(0.5)
        os.kill(both.pid, signal.SIGKILL)
        yield {"killed": held.drain(10_000).name}


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "submit": submit_table,
    "vectors": vectors_table,
    "delay": delay_table,
    "pages": pages_table,
    "mooncake": mooncake_table,
    "newer": newer_table,
}


if __name__ == "__main__":
    run_tables(__doc__, TABLES)
