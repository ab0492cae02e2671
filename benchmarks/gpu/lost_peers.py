"""A prefill process is killed or stopped over `nvlink`: are decode's rows given back, and is nothing written to them later?

Each decode process (a worker) has one manager. One prefill process after the other connects to it, sends one request, which is
verified byte for byte, and is then lost in one of `CASES` with a second request over the same rows. Once the rows are released
they are filled with a guard byte, which must still be there when the next prefill process is ready to write them.

Destinations begin at odd addresses and the kernel has one block, so that it copies single bytes and takes a while::

    python -m benchmarks.gpu.lost_peers [--same-gpu] [--count 300] [--workers 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.fence import spread
from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.backends.cuda.driver import Gpu
from disagg.backends.nvlink.backend import BLOCKS_VARIABLE, NvlinkBackend
from disagg.core.memory import Device, RawTensor
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.types import Event
from disagg.requests import Receiver
from disagg.state import paged
from harness.conditions import conditions

LAYERS, TOKENS, HEADS, DIM = 4, 16, 8, 128
PAGE_NBYTES = TOKENS * HEADS * DIM
NUM_PAGES, POOL_PAGES = 4096, 6144
"""Pages of a request, and of decode's pools. A request has 512 MiB."""
GUARD = 255
LINKS = ConnectionLimits(hello_retry_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=2.0)
PATIENCE_S, HOLD_S = 40.0, 0.5
FIRST_PORT, PORTS_PER_WORKER = 20_000, 400
"""Each prefill process listens at a port of its own: what decode still knows of an ended one must not meet another."""
UNSENT, COPYING, STOPPED = "killed before it sent anything", "killed while it copied", "stopped while it copied, later killed"
CASES = (UNSENT, COPYING, STOPPED)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Pools:
    """K and V of each layer on one GPU, of one byte per element, `skew` bytes into their allocations."""

    def __init__(self, ordinal: int, num_pages: int, *, skew: int) -> None:
        self.gpu, self.num_pages = Gpu(ordinal), num_pages
        self.nbytes = num_pages * PAGE_NBYTES
        with self.gpu.current():
            bases = [int(self.gpu.call("cuMemAlloc", self.nbytes + 16)) + skew for _ in range(2 * LAYERS)]
        shape, strides = (num_pages, TOKENS, HEADS, DIM), (PAGE_NBYTES, HEADS * DIM, DIM, 1)
        self.tensors = [RawTensor(base, shape, strides, "uint8", Device("cuda", ordinal)) for base in bases]

    def manager(self, name: str, *, port: int = 0) -> KVManager:
        tensors = {layer: tuple(self.tensors[2 * layer : 2 * layer + 2]) for layer in range(LAYERS)}
        kv = paged.gqa(tensors, axes="page token kv_head dim", num_kv_heads=HEADS, topology=Topology())
        return KVManager(
            name=name,
            listen=f"tcp://127.0.0.1:{port}",
            topology=Topology(),
            components=[kv],
            model=ModelId("toy"),
            backend=NvlinkBackend,
            connection_limits=LINKS,
        )

    def write(self, values: Bytes) -> None:
        """Fill each page with its value."""
        content = np.repeat(values, PAGE_NBYTES)
        with self.gpu.current():
            for tensor in self.tensors:
                self.gpu.call("cuMemcpyHtoD", tensor.pointer, content.ctypes.data, self.nbytes)
            self.gpu.call("cuCtxSynchronize")

    def count(self, values: Bytes) -> int:
        """The number of bytes that have the value of their page."""
        found, total = np.empty((self.num_pages, PAGE_NBYTES), np.uint8), 0
        with self.gpu.current():
            for tensor in self.tensors:
                self.gpu.call("cuMemcpyDtoH", found.ctypes.data, tensor.pointer, self.nbytes)
                total += int(np.count_nonzero(found == values[:, None]))
        return total

    def has_changed(self, page: int) -> bool:
        """Whether any byte of the first pool's page differs from the guard."""
        found = np.empty(PAGE_NBYTES, np.uint8)
        with self.gpu.current():
            self.gpu.call("cuMemcpyDtoH", found.ctypes.data, self.tensors[0].pointer + page * PAGE_NBYTES, PAGE_NBYTES)
        return bool((found != GUARD).any())


def values_of(seed: int) -> Bytes:
    """The value of each page of a request: never the guard, and another one for the next seed."""
    return ((np.arange(NUM_PAGES) + 101 * seed) % 251).astype(np.uint8)


# -- prefill ----------------------------------------------------------------------------------------------------------


def prefill(pipe: Connection, gpu: str, name: str, port: int, peer: str, address: str) -> None:
    """Send each request that is asked for, with values of its seed, until killed. Sees no GPU but its own."""
    logging.getLogger("disagg").setLevel(logging.ERROR)
    os.environ |= {BLOCKS_VARIABLE: "1", "CUDA_VISIBLE_DEVICES": gpu}
    pools = Pools(0, NUM_PAGES, skew=0)
    manager = pools.manager(name, port=port)
    pipe.send(manager.address)
    manager.add_peer(peer, address=address)
    manager.wait_ready(peer, timeout_s=PATIENCE_S)
    pipe.send("ready")
    while True:
        request, seed = pipe.recv()
        pools.write(values_of(seed))
        sender = manager.sender(request, peer=peer, deadline_s=PATIENCE_S)
        sender.finish({"kv": Pages(np.arange(NUM_PAGES, dtype=np.int32), 0)})
        pipe.send(sender.wait(timeout_s=PATIENCE_S).ok)


# -- decode -----------------------------------------------------------------------------------------------------------


@dataclass
class Loss:
    """One lost prefill process. Times are in milliseconds."""

    case: str
    noticed_ms: float
    """From the kill until the request had ended; of a stopped process from the signal that stopped it."""
    released_ms: float
    """From the kill, or from the end of the request if that came later, until the rows were released."""
    copied: float
    """Share of the lost request's bytes that had arrived when its rows were released."""
    early: bool
    """Whether rows were released while the process was stopped."""
    wrong_nbytes: int
    """Wrong bytes of the verified request, and guard bytes that were written after the release."""


class Decode:
    """One worker: a manager, and the rows that all of its requests use."""

    def __init__(self, ordinal: int, prefill_ordinal: int, worker: int, *, count: int = 0) -> None:
        self.name, self.prefill_gpu = f"decode-{worker}", str(prefill_ordinal)
        self.worker, self.count = worker, count
        self.pools = Pools(ordinal, POOL_PAGES, skew=1)
        self.ids = np.random.default_rng(worker).permutation(POOL_PAGES)[:NUM_PAGES]
        self.untouched = np.full(POOL_PAGES, GUARD, np.uint8)
        self.pools.write(self.untouched)
        self.manager = self.pools.manager(self.name)

    def has_been_written(self) -> bool:
        """Whether any guard byte is missing."""
        return self.pools.count(self.untouched) != 2 * LAYERS * POOL_PAGES * PAGE_NBYTES

    def wanted(self, seed: int) -> Bytes:
        """The value of every page after a request has arrived."""
        wanted = self.untouched.copy()
        wanted[self.ids] = values_of(seed)
        return wanted

    def receive(self, request: bytes, peer: str) -> Receiver:
        rows, need = {"kv": Pages(self.ids.astype(np.int32), 0)}, {"kv": (0, NUM_PAGES * TOKENS)}
        return self.manager.receiver(request, peer=peer, rows=rows, need=need, deadline_s=PATIENCE_S)

    def run(self, case: str) -> Loss:
        """Connect a prefill process, verify one request, and lose the process with the next."""
        self.count += 1
        peer, seed, total = f"prefill-{self.worker}-{self.count}", 2 * self.count, 2 * LAYERS * POOL_PAGES * PAGE_NBYTES
        with self.connected(peer) as (pid, pipe):
            wrong = total - self.pools.count(self.untouched)
            request = new_request_id()
            receiver = self.receive(request, peer)
            pipe.send((request, seed))
            event = receiver.wait(timeout_s=PATIENCE_S)
            assert event.ok, event.error
            wrong += total - self.pools.count(self.wanted(seed))
            assert _answer(pipe) is True
            self.pools.write(self.untouched)
            loss = self.lose(case, pid, pipe, peer, seed + 1)
            arrived = self.pools.count(self.wanted(seed + 1)) - 2 * LAYERS * (POOL_PAGES - NUM_PAGES) * PAGE_NBYTES
            loss.copied = round(arrived / (2 * LAYERS * NUM_PAGES * PAGE_NBYTES), 3)
            loss.wrong_nbytes = wrong
            self.pools.write(self.untouched)
            return loss

    def lose(self, case: str, pid: int, pipe: Connection, peer: str, seed: int) -> Loss:
        request = new_request_id()
        receiver, early = self.receive(request, peer), False
        if case == UNSENT:
            time.sleep(random.uniform(0, 0.05))
        else:
            pipe.send((request, seed))
            deadline = time.monotonic() + PATIENCE_S
            while not self.pools.has_changed(int(self.ids[0])):
                assert time.monotonic() < deadline, "nothing arrives"
        killed = time.monotonic()
        os.kill(pid, signal.SIGSTOP if case == STOPPED else signal.SIGKILL)
        event = receiver.wait(timeout_s=PATIENCE_S)
        noticed = ended = time.monotonic()
        assert not event.ok, "the request succeeded"
        if case == STOPPED:
            time.sleep(HOLD_S)
            early = event.lease.released
            ended = time.monotonic()
            os.kill(pid, signal.SIGKILL)
        released = _released(event)
        return Loss(case, (noticed - killed) * 1e3, (released - ended) * 1e3, 0.0, early, 0)

    @contextmanager
    def connected(self, peer: str) -> Iterator[tuple[int, Connection]]:
        """A prefill process that is ready to send; killed at the end."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        port = FIRST_PORT + self.worker * PORTS_PER_WORKER + self.count
        arguments = (theirs, self.prefill_gpu, peer, port, self.name, self.manager.address)
        process = context.Process(target=prefill, args=arguments, daemon=True)
        process.start()
        theirs.close()
        try:
            self.manager.add_peer(peer, address=_answer(pipe))
            self.manager.wait_ready(peer, timeout_s=PATIENCE_S)
            assert _answer(pipe) == "ready"
            assert process.pid is not None
            yield process.pid, pipe
        finally:
            process.kill()
            process.join()
            pipe.close()


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "no answer from the prefill process"
    return pipe.recv()


def _released(event: Event) -> float:
    """When the rows of a request were released."""
    deadline = time.monotonic() + PATIENCE_S
    while not event.lease.released:
        assert time.monotonic() < deadline, f"the rows are still {event.lease.state.value}: {event.lease.reason}"
        time.sleep(0.001)
    return time.monotonic()


# -- all of them ------------------------------------------------------------------------------------------------------


def decode(pipe: Connection, ordinals: tuple[int, int], worker: int, cases: list[str], until: float) -> None:
    """One worker: send each `Loss`, or the text of an error, and `None` at the end. After an error all of its memory is new."""
    logging.getLogger("disagg").setLevel(logging.ERROR)
    rank = Decode(*ordinals, worker)
    for case in cases:
        if time.monotonic() > until:
            break
        try:
            pipe.send(rank.run(case))
        except Exception as error:  # noqa: BLE001 (a result)
            pipe.send(f"{rank.name}, {rank.count}, {case}: {type(error).__name__}: {error}")
            rank.manager.close()
            rank = Decode(*ordinals, worker, count=rank.count)
    time.sleep(HOLD_S)
    if rank.has_been_written():
        pipe.send("bytes were written after the last release")
    pipe.send(None)
    rank.manager.close()


def lose_all(ordinals: tuple[int, int], cases: list[str], *, workers: int, seconds: float) -> tuple[list[Loss], list[str]]:
    """Run the cases in several workers. Returns the losses and the errors. `ordinals`: the GPUs of decode and of prefill."""
    context, until = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    pipes: list[Connection] = []
    processes = []
    for worker in range(min(workers, len(cases))):
        pipe, theirs = context.Pipe()
        processes.append(context.Process(target=decode, args=(theirs, ordinals, worker, cases[worker::workers], until)))
        processes[-1].start()
        theirs.close()
        pipes.append(pipe)
    losses: list[Loss] = []
    failures: list[str] = []
    while pipes:
        ready = [each for each in wait(pipes, until + PATIENCE_S - time.monotonic()) if isinstance(each, Connection)]
        if not ready:
            failures.append(f"{len(pipes)} workers did not end")
            break
        for pipe in ready:
            try:
                found = pipe.recv()
            except EOFError:
                found = None
            if found is None:
                pipes.remove(pipe)
            else:
                (losses if isinstance(found, Loss) else failures).append(found)
    for process in processes:
        process.join(PATIENCE_S if not pipes else 0)
        process.kill()
    return losses, failures


def row(case: str, same: list[Loss]) -> dict[str, Any]:
    """The result of one case."""
    return {
        "case": case,
        "peers": len(same),
        "ms from the signal until the request had ended, p50 and most": spread([each.noticed_ms for each in same]),
        "ms until the rows were released, p50 and most": spread([each.released_ms for each in same]),
        "share copied, least and most": [min(each.copied for each in same), max(each.copied for each in same)],
        "copies that were cut off": sum(0 < each.copied < 1 for each in same),
        "released while it was stopped": sum(each.early for each in same),
        "wrong bytes": sum(each.wrong_nbytes for each in same),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same-gpu", action="store_true", help="decode and prefill on GPU 0")
    parser.add_argument("--count", type=int, default=300, help="prefill processes")
    parser.add_argument("--workers", type=int, default=12, help="decode processes")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no prefill process after this time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = [case for case in CASES for _ in range(arguments.count // 3)]
    random.Random(2).shuffle(cases)
    ordinals = (0, 0) if arguments.same_gpu else (1, 0)
    about, started = conditions(), time.monotonic()
    losses, failures = lose_all(ordinals, cases, workers=arguments.workers, seconds=arguments.seconds)
    report = {
        **about,
        "what": __doc__.split("\n", 1)[0],
        "gpus": 1 if arguments.same_gpu else 2,
        "decode processes": arguments.workers,
        "heartbeat timeout, s": LINKS.heartbeat_timeout_s,
        "seconds": round(time.monotonic() - started),
        "rows": [row(case, same) for case in CASES if (same := [x for x in losses if x.case == case])],
        "failures": failures,
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(failures) or any(each.wrong_nbytes or each.early for each in losses))


if __name__ == "__main__":
    sys.exit(main())
