"""When is a dead peer quiet? Writers are killed while their kernels write, and backend `nvlink` fences them.

The owner has memory on one GPU. Writers, several at a time, map it through the backend, each with a stripe of its own, and run
a kernel that writes to the whole stripe for ever. Each writer is killed in one of `CASES`. Once the fence is `QUIET` the owner
writes a guard pattern to the stripe and compares every word for `WATCH_S`::

    python -m benchmarks.gpu.fence [--same-gpu] [--scale 1.0] [--workers 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import queue
import random
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.kill import SCRIBBLE
from disagg.backends.base import BackendOptions, Fence, RemotePeer
from disagg.backends.cuda.driver import Gpu
from disagg.backends.cuda.queue import Queue
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.backends.nvlink.mapping import NvlinkPeer
from disagg.core.memory import Device, MemoryRegion
from disagg.machine.processes import IdentitySocket, ProcessWatch
from harness.conditions import conditions

WORKER_NBYTES = 8 << 20
WATCH_S, HOLD_S, PATIENCE_S = 0.12, 0.3, 120.0
SAMPLE_S = 0.03
"""How long the memory is sampled after the end of a process, before it is fenced."""
KILLED, STOPPED = "killed", "stopped, later killed"
EXECUTED = "killed, with a child by fork and exec"
BEFORE, AFTER = "killed, with a child forked before it connected", "killed, with a child forked after it connected"
CASES = {KILLED: 160, STOPPED: 60, EXECUTED: 20, BEFORE: 30, AFTER: 30}


# -- the writer -------------------------------------------------------------------------------------------------------


def writer(pipe: Connection, ordinal: int, case: str, endpoint: bytes, target: int) -> None:
    """Map the owner's memory, start a kernel that writes to the stripe at `target` for ever, and wait to be killed."""
    gpu = Gpu(ordinal)
    with gpu.current():
        own = int(gpu.call("cuMemAlloc", 2 << 20))
        _module, kernels = gpu.compile(SCRIBBLE, ["scribble"])
        flags = (ctypes.c_uint32 * 2).from_address(int(gpu.call("cuMemHostAlloc", 4096, 0)))
        flags[0] = flags[1] = 0
        work = Queue(gpu)
    backend = NvlinkBackend(BackendOptions())
    backend.register([MemoryRegion(own, 2 << 20, Device("cuda", ordinal))])
    identity = IdentitySocket()
    child = _forked() if case == BEFORE else 0
    peer = backend.connect(endpoint, epoch=1)
    if case == AFTER:
        child = _forked()
    if case == EXECUTED:
        child = subprocess.Popen(["sleep", str(int(PATIENCE_S))]).pid
    mapped = (target + int(peer.deltas[0])) % 2**64
    work.launch(kernels["scribble"], [mapped, WORKER_NBYTES // 4, ctypes.addressof(flags), 0], blocks=32, threads=512)
    while flags[1] < 3:
        time.sleep(0.001)
    pipe.send((backend.endpoint(), identity.name, child))
    pipe.recv()


def _forked() -> int:
    """Fork a child that keeps every descriptor and does nothing."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(PATIENCE_S))
        while True:
            signal.pause()
    return pid


# -- the owner --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result for one writer. Times are in milliseconds after the signal that ended the last process with its context."""

    case: str
    early: int = 0
    """Answers `QUIET` while the writer, or a process with its descriptors, was alive."""
    checks: int = 0
    """Answers in that time."""
    went_on: bool | None = None
    """Whether its kernel went on writing while it was stopped, or after it had ended."""
    changed_after_end: bool | None = None
    """Whether the memory changed after the pidfd of the killed process had become readable."""
    ended_ms: float = 0.0
    quiet_ms: float = 0.0
    guards: int = 0
    """Comparisons of the whole stripe with the guard pattern."""
    wrong_words: int = 0


class Owner:
    """The process whose memory the writers map."""

    def __init__(self, ordinal: int, writers: int, workers: int) -> None:
        self.gpu, self.writers = Gpu(ordinal), writers
        with self.gpu.current():
            self.base = int(self.gpu.call("cuMemAlloc", workers * WORKER_NBYTES))
        self.backend = NvlinkBackend(BackendOptions())
        self.backend.register([MemoryRegion(self.base, workers * WORKER_NBYTES, Device("cuda", ordinal))])
        self.endpoint = self.backend.endpoint()

    def read(self, worker: int, nbytes: int = WORKER_NBYTES) -> np.ndarray[Any, np.dtype[np.uint32]]:
        found = np.empty(nbytes // 4, np.uint32)
        with self.gpu.current():
            self.gpu.call("cuMemcpyDtoH", found.ctypes.data, self.base + worker * WORKER_NBYTES, nbytes)
        return found

    def changes(self, worker: int, *, within_s: float) -> bool:
        """Whether a kernel writes to the stripe, as far as it shows within a time. Kernels on one GPU take turns."""
        before, deadline = self.read(worker, 16 << 10), time.monotonic() + within_s
        while time.monotonic() < deadline:
            if (self.read(worker, 16 << 10) != before).any():
                return True
            time.sleep(0.001)
        return False

    def guard(self, worker: int, outcome: Outcome) -> None:
        """Write a pattern to the stripe, and count words that differ from it for `WATCH_S`."""
        pattern = random.getrandbits(32) | 0x80000000  # a writer's values are small
        with self.gpu.current():
            self.gpu.call("cuMemsetD32", self.base + worker * WORKER_NBYTES, pattern, WORKER_NBYTES // 4)
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline or not outcome.guards:
            outcome.wrong_words += int(np.count_nonzero(self.read(worker) != pattern))
            outcome.guards += 1
            time.sleep(0.005)

    def run(self, worker: int, case: str) -> Outcome:
        """Start a writer, end it, fence it, and watch its stripe."""
        with self.writing(worker, case) as (process, peer, child):
            pid = process.pid
            assert pid is not None
            outcome = Outcome(case)
            assert self.changes(worker, within_s=PATIENCE_S), "the kernel does not write"
            if case == STOPPED:
                os.kill(pid, signal.SIGSTOP)
                self.hold(worker, peer, outcome)
            self.backend.disconnect(peer)
            killed = self.kill(pid, worker, outcome)
            if case in (BEFORE, AFTER):
                self.hold(worker, peer, outcome)
                killed = time.monotonic()
                os.kill(child, signal.SIGKILL)
            while self.backend.fence(peer, epoch=1) is not Fence.QUIET:
                assert time.monotonic() < killed + PATIENCE_S, f"{case}: not quiet after {PATIENCE_S} s"
                time.sleep(0.0005)
            outcome.quiet_ms = (time.monotonic() - killed) * 1e3
            self.guard(worker, outcome)
            return outcome

    def kill(self, pid: int, worker: int, outcome: Outcome) -> float:
        """Kill a process and wait for its end. Returns the time of the signal."""
        pidfd, killed = os.pidfd_open(pid), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], PATIENCE_S)[0], "the process does not end"
        outcome.ended_ms = (time.monotonic() - killed) * 1e3
        os.close(pidfd)
        outcome.changed_after_end = self.changes(worker, within_s=SAMPLE_S)
        return killed

    def hold(self, worker: int, peer: RemotePeer, outcome: Outcome) -> None:
        """Fence for a while, in which the writer's context is alive."""
        deadline = time.monotonic() + HOLD_S
        while time.monotonic() < deadline:
            outcome.early += self.backend.fence(peer, epoch=1) is Fence.QUIET
            outcome.checks += 1
            time.sleep(0.01)
        outcome.went_on = self.changes(worker, within_s=1.0)

    @contextmanager
    def writing(self, worker: int, case: str) -> Iterator[tuple[BaseProcess, NvlinkPeer, int]]:
        """A writer whose kernel writes to the stripe, and the id of its child."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        arguments = (theirs, self.writers, case, self.endpoint, self.base + worker * WORKER_NBYTES)
        process = context.Process(target=writer, args=arguments, daemon=True)
        process.start()
        theirs.close()
        child = 0
        try:
            assert pipe.poll(PATIENCE_S), "the writer does not start"
            endpoint, identity, child = pipe.recv()
            peer = self.backend.connect(endpoint, process=ProcessWatch.attest(identity), epoch=1)
            yield process, peer, child
        finally:
            process.kill()
            if child:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.join()
            pipe.close()


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """Outcomes of all workers, which stop at a time, or after too many failures."""

    until: float
    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def work(self, owner: Owner, worker: int, cases: queue.SimpleQueue[str]) -> None:
        """One worker: run cases until none is left."""
        while len(self.failures) < 10 and time.monotonic() < self.until:
            try:
                case = cases.get_nowait()
            except queue.Empty:
                return
            try:
                self.outcomes.append(owner.run(worker, case))
            except Exception as error:  # noqa: BLE001 (a result)
                self.failures.append(f"{case}: {type(error).__name__}: {error}")

    def rows(self) -> list[dict[str, Any]]:
        return [_row(case, same) for case in CASES if (same := [each for each in self.outcomes if each.case == case])]


def _row(case: str, same: list[Outcome]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, "writers": len(same)}
    if case in (STOPPED, BEFORE, AFTER):
        row |= {
            "context alive: fences, QUIET": [sum(each.checks for each in same), sum(each.early for each in same)],
            "context alive: kernel went on writing": sum(bool(each.went_on) for each in same),
        }
    return row | {
        "memory changed after the process had ended": sum(bool(each.changed_after_end) for each in same),
        "ms from kill to pidfd, p50 and most": spread([each.ended_ms for each in same]),
        "ms from the last kill to QUIET, p50 and most": spread([each.quiet_ms for each in same]),
        "comparisons after QUIET": sum(each.guards for each in same),
        "wrong words after QUIET": sum(each.wrong_words for each in same),
    }


def spread(values: list[float]) -> list[float]:
    """Median and greatest value."""
    return [round(statistics.median(values), 1), round(max(values), 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same-gpu", action="store_true", help="owner and writers on GPU 0")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the writers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=10, help="writers at a time")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no writer after this time")
    arguments = parser.parse_args()
    order = [case for case, count in CASES.items() for _ in range(max(1, round(count * arguments.scale)))]
    random.Random(1).shuffle(order)
    cases: queue.SimpleQueue[str] = queue.SimpleQueue()
    for case in order:
        cases.put(case)
    about, started = conditions(), time.monotonic()
    owner = Owner(0 if arguments.same_gpu else 1, 0, arguments.workers)
    results = Results(started + arguments.seconds)
    workers = [threading.Thread(target=results.work, args=(owner, worker, cases)) for worker in range(arguments.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    owner.backend.close()
    report = {
        **about,
        "what": __doc__.split("\n", 1)[0],
        "gpus": 1 if arguments.same_gpu else 2,
        "writers at a time": arguments.workers,
        "seconds": round(time.monotonic() - started),
        "rows": results.rows(),
        "failures": results.failures,
        "quiet when closed": owner.backend.is_quiet_when_closed(),
        "mapped by, when closed": list(owner.backend.mapped_by),
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = any(each.wrong_words or each.early for each in results.outcomes)
    return int(bool(results.failures) or wrong)


if __name__ == "__main__":
    sys.exit(main())
