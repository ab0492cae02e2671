"""Whole requests between two managers on two GPUs, from `finish` to the receiver's success, against one plain copy::

    python -m benchmarks.gpu.request --json docs/benchmarks/nvlink-2xh200-requests.json
    python -m benchmarks.gpu.request --engines nvlink nixl mooncake --json docs/benchmarks/gpu-engines-2xh200.json

Without `--engines`: 32 layers of K and V by `nvlink`, pages of 16 tokens of 512 bytes, and the same layout on both sides, so a
piece is a page of 8 KiB. With `--engines`: 8 layers, 8 heads, from NHD to HND pages, so a piece is one head of one token. Each
engine is measured as it packs by default, and `direct`, piece by piece, with less data. Pages are random on both sides.

A request is sent when its sender sees the reservation, which it polls every half millisecond. `conditions`: the sender pauses
after that, and in some both sides call `poll` in a loop instead of `wait`. `contiguous`: the engine alone, 16 blocks of 32 MiB
in one call. `plain`: a device-to-device copy of the same number of bytes. `pipelined`: 48 requests of 512 MiB, 4 in flight.
`floor`: a round trip over ZeroMQ between the same processes. All figures are medians; without `--engines`, of each of several
pairs of managers. The last request of each case is verified byte for byte.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.ranks import Case, One, Rank, ask, other_process, prefill, receive, wait_for
from disagg import new_request_id
from harness.conditions import conditions

ROUNDS = 7
"""Pairs of managers, one after the other, for requests of one size by `nvlink`."""
IN_A_ROW = 48
"""Pipelined requests of a case."""


CONDITIONS = {
    "after 1 ms": (0.001, False),
    "after 3 ms": (0.003, False),
    "after 10 ms": (0.01, False),
    "after 100 ms": (0.1, False),
    "after 3 ms, both poll": (0.003, True),
    "after 100 ms, both poll": (0.1, True),
}
"""More requests: the pause after the reservation, and whether both sides poll."""


def nvlink_cases() -> list[Case]:
    """67 MB and 1 GiB, several times: the time outside the copy varies by a third between pairs of managers."""
    small, large = (Case("nvlink", 32, 2, 128, 4096, pages, repeat) for pages, repeat in ((128, 101), (2048, 31)))
    return [replace(small, conditions=True), *[small] * (ROUNDS - 1), *[large] * ROUNDS]


def engine_cases(engines: list[str]) -> list[Case]:
    """0.5 GiB for each engine and piece size, and a direct case with little data."""
    cases = []
    for engine, dim in itertools.product(engines, (128 << i for i in range(9))):
        page = 16 * 8 * dim * 2
        cases.append(Case(engine, 8, 8, dim, (128 << 20) // page, (32 << 20) // page, 15, mixed=True))
        if engine != "nvlink":
            count = max(1, min(32 << 20, 2048 * dim * 2) // page)
            cases.append(Case(engine, 8, 8, dim, (128 << 20) // page, count, 2, mixed=True, pack_below=0))
    return cases


def measure_floor(pipe: Connection) -> float:
    """Median microseconds of a ZeroMQ round trip."""
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


def run_one(rank: Rank, pipe: Connection, one: One) -> tuple[float, list[float]]:
    """Seconds from `finish` to the receiver's success, and seconds of each stage."""
    receiver = rank.receive(one)
    pipe.send(one)
    if one.polls:  # start together with the sender
        time.sleep(one.pause_s)
    wait_for(receiver, one)
    ended = time.monotonic()
    started, *marks = receive(pipe)
    return ended - started, [b - a for a, b in itertools.pairwise([started, *marks, ended])]


def by_stage(stages: list[list[float]]) -> dict[str, Any]:
    """Median microseconds of each stage and phase, for requests whose engine recorded marks; else empty.

    Data phase: from the call of the engine until its end is seen. Control phase: the rest.
    """
    if len(stages[0]) == 1:
        return {}
    names = ("finish to submit", "submit", "submitted to done seen", "done seen to success")
    found = np.array(stages) * 1e6
    each = dict(zip(names, np.median(found, axis=0).round(1).tolist(), strict=True))
    phases = {"data": found[:, 1] + found[:, 2], "control": found[:, 0] + found[:, 3]}
    return {"stages_us_p50": each} | {f"{name}_us_p50": round(float(np.median(took)), 1) for name, took in phases.items()}


def measure(case: Case, pipe: Connection) -> dict[str, Any]:
    """The row of one case."""
    address = ask(pipe, case)
    rank = Rank(case, 1)
    pipe.send(rank.manager.address)
    rank.introduce(address)
    transport = receive(pipe)
    plain = [ask(pipe, case.nbytes)]
    seconds, stages, each_s = run_alone(rank, pipe)
    conditions = run_conditions(rank, pipe) if case.conditions else {}
    rate = run_pipelined(rank, pipe) if case.mixed and not case.direct else None
    contiguous = ask(pipe, [t.data_ptr() for pair in rank.pools.values() for t in pair]) if case.mixed else None
    plain.append(ask(pipe, case.nbytes))
    if contiguous is not None:  # the contiguous blocks have overwritten the last request's bytes
        run_one(rank, pipe, One(new_request_id()))
    verified = rank.holds()
    ceiling, p50, p99 = statistics.median(plain), *map(float, np.quantile(seconds, (0.5, 0.99)))
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
        **each_s,
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
    row |= by_stage(stages)
    pipe.send("close")
    rank.manager.close()
    receive(pipe)
    return row


def run_alone(rank: Rank, pipe: Connection) -> tuple[list[float], list[list[float]], dict[str, Any]]:
    """Requests one at a time, after a few that are not counted: seconds, stages, and mean seconds of each phase."""
    found, stages, repeat = [], [], rank.case.repeat
    warm = 3 if repeat > 2 else 1
    before: dict[str, float] = {}
    for number in range(repeat + warm):
        if number == warm:
            before = ask(pipe, "stats")
        seconds, each = run_one(rank, pipe, One(new_request_id()))
        found.append(seconds)
        stages.append(each)
    after = ask(pipe, "stats")
    phases = {
        "each_s": {k: round((after[k] - before[k]) / repeat, 6) for k in ("bind_s", "pack_s", "post_s", "wire_s")},
        "unpack_s": round(rank.manager.stats.unpack_s / (repeat + warm), 6),
    }
    return found[warm:], stages[warm:], phases


def run_conditions(rank: Rank, pipe: Connection) -> dict[str, Any]:
    """Microseconds of requests under each of `CONDITIONS`."""
    found = {}
    for name, (pause_s, polls) in CONDITIONS.items():
        more = [run_one(rank, pipe, One(new_request_id(), pause_s, polls)) for _ in range(41)]
        p50_us, p99_us = (np.quantile([seconds for seconds, _ in more], (0.5, 0.99)) * 1e6).round(1).tolist()
        found[name] = {"p50_us": p50_us, "p99_us": p99_us, **by_stage([each for _, each in more])}
    return found


def run_pipelined(rank: Rank, pipe: Connection) -> float:
    """GB/s of `IN_A_ROW` requests, several in flight."""
    rank.manager.events()
    pipe.send(many := tuple(new_request_id() for _ in range(IN_A_ROW)))
    time.sleep(0.3)
    rate = rank.receive_many(many)
    receive(pipe)
    return rate


SUMMED = ("finish_to_success_us_p50", "times_plain", "data_us_p50", "control_us_p50")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The least, median and greatest figures of the rows of each size."""
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
    arguments = parser.parse_args()
    os.environ.setdefault("MC_INTRANODE_NVLINK", "1")
    with other_process(prefill) as pipe:
        failed = measure_all(arguments, pipe)
    sys.exit(bool(failed))


def measure_all(arguments: argparse.Namespace, pipe: Connection) -> list[str]:
    """Measure cases until one fails, and write the file after each. Returns the failure, if any."""
    about, rows, failed = conditions(), list[dict[str, Any]](), list[str]()
    floor = measure_floor(pipe)
    print(f"ZeroMQ round trip: {floor} us", flush=True)
    for case in engine_cases(arguments.engines) if arguments.engines else nvlink_cases():
        try:
            rows.append(measure(case, pipe))
            print({k: v for k, v in rows[-1].items() if k not in ("bytes", "pieces", "runs")}, flush=True)
        except Exception as error:  # noqa: BLE001 (reported; the rows measured so far are kept)
            failed.append(f"{case}: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
            break
        finally:
            if arguments.json:
                result = {
                    **about,
                    "what": __doc__.split("\n", 1)[0],
                    "floor_us": floor,
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
