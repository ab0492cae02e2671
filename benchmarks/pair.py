"""Two processes with one engine each, for the other benchmarks: this process writes to the memory of its child."""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.backends import registry
from disagg.backends.base import Backend, BackendOptions, TransferStatus
from disagg.backends.nixl import backend as nixl
from disagg.core.copies import CopyBatch
from disagg.core.memory import MemoryRegion
from disagg.machine.processes import IdentitySocket, ProcessWatch
from harness.conditions import conditions

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]
Row = dict[str, object]
PATIENCE_S = 120.0


def make(engine: str, options: BackendOptions, settings: Mapping[str, object]) -> Backend:
    """Create an engine. `settings` replace constants of the `nixl` backend's module."""
    for name, value in settings.items():
        setattr(nixl, name, value)
    return registry.load(engine, options)


def _serve(pipe: Connection, engine: str, options: BackendOptions, nbytes: int, settings: Mapping[str, object]) -> None:
    memory = np.ones(nbytes, dtype=np.uint8)
    backend = make(engine, options, settings)
    backend.register([MemoryRegion(memory.ctypes.data, nbytes)])
    identity = IdentitySocket()
    pipe.send((backend.endpoint(), memory.ctypes.data, identity.name))
    while (command := pipe.recv()) != "close":
        pipe.send({"cpu": time.process_time(), "sum": int(memory.view(np.uint64).sum())}[command])
    backend.close()


@dataclass
class Pair:
    """This side of a connected pair. `here` and `there`: the addresses of the registered memory on each side."""

    backend: Any
    peer: Any
    memory: Bytes
    here: int
    there: int
    pid: int
    pipe: Connection

    def ask(self, what: str) -> Any:
        """Ask the child for its CPU time ("cpu") or for the sum of its memory's words ("sum")."""
        self.pipe.send(what)
        return self.pipe.recv()

    def pieces(self, nbytes: int, count: int, rng: np.random.Generator) -> CopyBatch:
        """`count` pieces of `nbytes` in random order on both sides."""
        room = self.memory.nbytes // nbytes
        sides = [
            np.uint64(base) + rng.permutation(room)[:count].astype(np.uint64) * np.uint64(nbytes)
            for base in (self.here, self.there)
        ]
        return CopyBatch(sides[0], sides[1], np.full(count, nbytes, dtype=np.uint64))

    def write(self, copies: CopyBatch, *, pause_s: float = 0.0) -> None:
        """Write until done, with a sleep of `pause_s` between polls."""
        transfer = self.backend.submit(self.peer, copies)
        while transfer.poll() is TransferStatus.PENDING:
            time.sleep(pause_s)
        if transfer.poll() is not TransferStatus.DONE:
            raise RuntimeError(f"the transfer ended as {transfer.poll().value}: {transfer.error}")
        transfer.close()


@contextmanager
def pair(engine: str, options: BackendOptions, *, nbytes: int, **settings: object) -> Iterator[Pair]:
    """Connect the engines of both processes. `settings`: see `make`; they are restored afterwards."""
    before = {name: getattr(nixl, name) for name in settings}
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, engine, options, nbytes, settings))
    process.start()
    theirs.close()
    try:
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError(f"no answer from the child process within {PATIENCE_S} s")
        endpoint, there, identity = pipe.recv()
        memory = np.ones(nbytes, dtype=np.uint8)
        backend = make(engine, options, settings)
        try:
            backend.register([MemoryRegion(memory.ctypes.data, nbytes)])
            peer = backend.connect(endpoint, epoch=1, process=ProcessWatch.attest(identity))
            assert process.pid is not None
            yield Pair(backend, peer, memory, memory.ctypes.data, there, process.pid, pipe)
            backend.disconnect(peer)
        finally:
            backend.close()
        with suppress(BrokenPipeError):  # a benchmark may have killed the child
            pipe.send("close")
        process.join(PATIENCE_S)
    finally:
        process.kill()
        for name, value in before.items():
            setattr(nixl, name, value)


def medians_s(functions: Sequence[Callable[[], object]], *, rounds: int, repeat: int = 1) -> list[float]:
    """The median time of one call of each function. The functions take turns, `repeat` calls at a time."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            started = time.perf_counter()
            for _ in range(repeat):
                function()
            found.append((time.perf_counter() - started) / repeat)
    return [sorted(found)[rounds // 2] for found in times]


def run_tables(about: str | None, tables: Mapping[str, Callable[[], Iterator[Row]]]) -> None:
    """The command line of a benchmark: measure the named tables, or all, print them, and write them to `--json`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="NAME", help=f"tables to measure: {', '.join(tables)}; default: all")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(tables):
        parser.error(f"expected names among {', '.join(tables)}, found {', '.join(sorted(unknown))}")
    about_run, found = conditions(), dict[str, list[Row]]()
    for name in arguments.tables or tables:
        print(f"\n{name}: {inspect.cleandoc(tables[name].__doc__ or '')}")
        found[name] = []
        for row in tables[name]():
            found[name].append(row)
            print("  " + "   ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**about_run, "tables": found}, indent=1) + "\n")
