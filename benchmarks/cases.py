"""Costs that users of other connectors have reported, before and after: `python -m benchmarks.cases --json FILE`.

*Before* is the method of inference servers' connectors, written here in a few lines over the real engine: one tuple or list
entry per token and layer, nothing joined, one request for all of it, and a poll every millisecond. *After* is this library,
from `send` to success, with real ranks as in `disagg-bench`, and every byte compared. Both take turns in one run; figures are
medians; GB are 1e9 bytes. Names select cases: `slices build pages poll queue failed post`. Takes about two minutes.
"""
# ruff: noqa: PERF401 - `before` builds lists as the connectors do

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.native import head_plan
from benchmarks.pair import Pair, Row, medians_s, pair, run_tables
from disagg.backends.base import BackendOptions, Transport
from disagg.commands.bench.driver import run
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.core.copies import Columns, CopyBatch
from disagg.core.rows import Pages
from disagg.layout.binding import Stream, bind, bind_rows

SHM, TCP = BackendOptions(transport=Transport.SHM), BackendOptions(transport=Transport.TCP)
MIB = 1 << 20
POLL_S = 1e-3
TURNS = 3
RNG = np.random.default_rng(0)


def nixl_write(both: Pair, copies: CopyBatch, *, poll_s: float = POLL_S) -> dict[str, float]:
    """Before, over NIXL: seconds to build tuples and the request, to post it, and altogether."""
    nixl, agent = both.backend._nixl.module, both.backend._agent
    began = time.perf_counter()
    sides = [
        [(address, size, 0) for address, size in zip(column.tolist(), copies.nbytes.tolist(), strict=True)]
        for column in (copies.source, copies.destination)
    ]
    local, remote = (nixl.nixlXferDList(nixl.DRAM_SEG, rows) for rows in sides)
    handle = agent.createXferReq(nixl.NIXL_WRITE, local, remote, both.peer.agent, "", [both.backend._ucx])
    built = time.perf_counter()
    status = agent.postXferReq(handle)
    posted = time.perf_counter()
    while status == nixl.NIXL_IN_PROG:
        time.sleep(poll_s)
        status = agent.getXferStatus(handle)
    assert status == nixl.NIXL_SUCCESS
    ended = time.perf_counter()
    agent.releaseXferReq(handle)
    return {"build": built - began, "post": posted - built, "all": ended - began}


def mooncake_write(both: Pair, copies: CopyBatch) -> dict[str, float]:
    """Before, over Mooncake: blocking calls of 1,000 pieces each; the case `queue` shows larger calls."""
    engine, session = both.backend._engine, both.peer.queue._descriptor.session
    began = time.perf_counter()
    for at in range(0, len(copies), 1000):
        columns = [column[at : at + 1000].tolist() for column in (copies.source, copies.destination, copies.nbytes)]
        assert engine.batch_transfer_sync_write(session, *columns) == 0
    return {"all": time.perf_counter() - began}


def library(backend: str, *, prefill: str, decode: str, tokens: int, layers: int, transport: str = "auto", **more: Any) -> Any:
    """After: a row of `disagg-bench`."""
    case = Case(
        backend=backend,
        model="llama-3-8b",
        num_layers=layers,
        tokens=tokens,
        prefill=Side.parse(prefill),
        decode=Side.parse(decode),
        transport=transport,
        ceiling=False,
        repeat=more.pop("repeat", 3),
        **more,
    )
    row = run(case, lambda _: None)
    assert row.verified, row.problem
    return row


def in_turns(before: Callable[[], Any], after: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    found: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(TURNS):
        found[0].append(before())
        found[1].append(after())
    return found


def median(samples: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(sample[key] for sample in samples)


def slices() -> Iterator[Row]:
    """47, 48: TP 4 to 2, 4,096 tokens of 4 layers, a slice of 512 B for each token, layer, K and V.

    Before: the 32,768 slices of one sender alone on the machine. After: the 67.1 MB of all four senders, over shared memory
    by the engine `cma`.
    """
    engines = (
        ("nixl", "shm", SHM, nixl_write),
        ("nixl", "tcp", TCP, nixl_write),
        ("mooncake", "tcp", BackendOptions(), mooncake_write),
    )
    for engine, transport, options, write in engines:
        with pair(engine, options, nbytes=64 * MIB) as both:
            copies = both.pieces(512, 32_768, RNG)
            after_engine = "cma" if options is SHM else engine
            before, after = in_turns(
                partial(write, both, copies),
                partial(
                    library,
                    after_engine,
                    prefill="tp=4,page=16",
                    decode="tp=2,page=16",
                    tokens=4096,
                    layers=4,
                    transport=transport,
                ),
            )
            row: Row = {"engine": f"{engine} {transport}", "after_engine": after_engine}
            row["before_gbps"] = round(copies.total_nbytes / median(before, "all") / 1e9, 3)
            row["before_operations"] = len(copies)
            if "post" in before[0]:
                row["before_share_posting"] = round(median(before, "post") / median(before, "all"), 2)
                row["before_build_ms"] = round(median(before, "build") * 1e3, 1)
            row["after_gbps"] = round(statistics.median(each.gbps for each in after), 2)
            row["after_operations_of_a_sender"] = after[0].posts // 4
            yield row


def build() -> Iterator[Row]:
    """49: the addresses of a first request, 16,384 tokens of 36 layers, TP 4 to 8: 1,179,648 descriptors; milliseconds.

    Before: a Python tuple for each, and NIXL's list of them, for one side. After: the columns of both sides, and the stream
    that packing needs.
    """
    plan, out = head_plan(page_size=64, num_layers=36, num_pages=4096), Columns()
    rows = [Pages(RNG.permutation(4096)[:256]) for _ in range(2)]
    with pair("nixl", SHM, nbytes=MIB) as both:
        nixl = both.backend._nixl.module

        def tuples() -> None:
            descriptors = []
            for span in plan.spans:
                for base in span.source_bases.tolist():
                    for page in rows[0].ids.tolist():
                        for token in range(64):
                            descriptors.append(
                                (base + page * span.row_strides[0] + token * span.token_strides[0], span.nbytes, 0)
                            )
            assert nixl.nixlXferDList(nixl.DRAM_SEG, descriptors).descCount() == 1_179_648

        def columns() -> None:
            found = bind(plan, source=rows[0], destination=rows[1], tokens=(0, 16_384), out=out)
            assert len(found) == 1_179_648

        def stream() -> None:
            bind_rows(plan, source=rows[0], destination=rows[1], tokens=(0, 16_384)).append_to(Stream(source=True))

        found = medians_s([tuples, columns, stream], rounds=3)
    names = ("before_one_side_ms", "after_columns_of_both_ms", "after_as_a_stream_ms")
    yield dict(zip(names, [round(s * 1e3, 2) for s in found], strict=True))


def pages() -> Iterator[Row]:
    """51: equal TP, 64 MiB in 4,096 pages of 16 KiB in random order, and in one piece, over shared memory and TCP.

    After: this library, over shared memory by the engine `cma`.
    """
    for transport, options in (("shm", SHM), ("tcp", TCP)):
        with pair("nixl", options, nbytes=128 * MIB) as both:
            copies, whole = both.pieces(16_384, 4096, RNG), both.pieces(64 * MIB, 1, RNG)
            before, after = in_turns(
                lambda: (nixl_write(both, copies), nixl_write(both, whole)),  # noqa: B023
                partial(
                    library,
                    "cma" if options is SHM else "nixl",
                    prefill="tp=1,page=8",
                    decode="tp=1,page=8",
                    tokens=4096,
                    layers=4,
                    transport=transport,
                ),
            )
            rates = [copies.total_nbytes / median([each[i] for each in before], "all") / 1e9 for i in (0, 1)]
            yield {
                "transport": transport,
                "before_pages_gbps": round(rates[0], 2),
                "one_piece_gbps": round(rates[1], 2),
                "after_gbps": round(statistics.median(each.gbps for each in after), 2),
                "way": after[0].way,
            }


def poll() -> Iterator[Row]:
    """50, 52: one page of 4 layers (8 pieces of 32 KiB) over TCP; milliseconds, p50.

    Before: the engine's write alone, polled every 10 ms and every ms. After: the request from `send` to success with all its
    messages, 50 in a row.
    """
    with pair("nixl", TCP, nbytes=64 * MIB) as both:
        copies = both.pieces(32 << 10, 8, RNG)

        def many(poll_s: float) -> dict[str, float]:
            return {"all": statistics.median(nixl_write(both, copies, poll_s=poll_s)["all"] for _ in range(20))}

        before, after = in_turns(
            lambda: {"ten": many(1e-2)["all"], "one": many(1e-3)["all"]},
            partial(
                library, "nixl", prefill="tp=1", decode="tp=1", tokens=16, layers=4, transport="tcp", requests=50, repeat=1
            ),
        )
    yield {
        "before_polled_every_10_ms": round(median(before, "ten") * 1e3, 2),
        "before_polled_every_ms": round(median(before, "one") * 1e3, 2),
        "after_with_all_messages": round(statistics.median(each.latency_ms["p50"] for each in after), 2),
    }


def queue() -> Iterator[Row]:
    """58, 59: Mooncake over TCP, 6,000 pieces of 32 KiB in one call; then one piece to the same peer."""
    with pair("mooncake", BackendOptions(), nbytes=256 * MIB) as both:
        copies, one = both.pieces(32 << 10, 6000, RNG), both.pieces(4096, 1, RNG)
        began = time.perf_counter()
        both.write(copies, pause_s=1e-4)
        after = time.perf_counter() - began
        both.write(one)
        engine, session = both.backend._engine, both.peer.queue._descriptor.session
        columns = [column.tolist() for column in (copies.source, copies.destination, copies.nbytes)]
        began = time.perf_counter()
        status = engine.batch_transfer_sync_write(session, *columns)
        failed = time.perf_counter() - began
        task = engine.batch_transfer_async(session, *(column[:1] for column in columns), both.backend._opcodes.write)
        began = time.perf_counter()
        while engine.transfer_check_status(task) == 0 and time.perf_counter() - began < 8:
            time.sleep(1e-3)
        yield {
            "before_status": status,
            "before_ms": round(failed * 1e3, 1),
            "before_as_if_gbps": round(copies.total_nbytes / failed / 1e9, 2),
            "before_next_piece": {1: "arrived", 0: "not ended after 8 s"}.get(engine.transfer_check_status(task), "failed"),
            "after": "all arrived, and the next piece",
            "after_ms": round(after * 1e3, 1),
        }


def failed() -> Iterator[Row]:
    """59: 2,000 pieces of 64 KiB to a killed Mooncake peer.

    Before: the apparent rate if the caller ignores the status. After: the error that this library reports.
    """
    with pair("mooncake", BackendOptions(), nbytes=256 * MIB) as both:
        copies = both.pieces(64 << 10, 2000, RNG)
        engine, session = both.backend._engine, both.peer.queue._descriptor.session
        columns = [column.tolist() for column in (copies.source, copies.destination, copies.nbytes)]
        os.kill(both.pid, 9)
        began = time.perf_counter()
        status = engine.batch_transfer_sync_write(session, *columns)
        took = time.perf_counter() - began
        began = time.perf_counter()
        transfer = both.backend.submit(both.peer, copies)
        while not transfer.poll().settled and time.perf_counter() - began < 30:
            time.sleep(1e-3)
        yield {
            "before_status": status,
            "before_ms": round(took * 1e3, 1),
            "before_as_if_gbps": round(copies.total_nbytes / took / 1e9, 1),
            "after": transfer.poll().value,
            "after_s": round(time.perf_counter() - began, 2),
            "after_error": transfer.error,
        }


def post() -> Iterator[Row]:
    """59: the share of a 64-MiB write over shared memory spent in the call that posts it.

    After: the library posts in a thread of its own; `benchmarks.control` measures the caller's time in `send`.
    """
    with pair("nixl", SHM, nbytes=128 * MIB) as both:
        whole = both.pieces(64 * MIB, 1, RNG)
        found = [nixl_write(both, whole) for _ in range(9)]
        yield {
            "before_share_in_post": round(median(found, "post") / median(found, "all"), 3),
            "before_ms": round(median(found, "all") * 1e3, 2),
        }


CASES: dict[str, Callable[[], Iterator[Row]]] = {
    case.__name__: case for case in (slices, build, pages, poll, queue, failed, post)
}


if __name__ == "__main__":
    run_tables(__doc__, CASES)
