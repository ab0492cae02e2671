"""Peers of the backend under test."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from disagg.backends.base import Backend, BackendOptions, Fence, RemotePeer, Transfer, TransferStatus
from disagg.core.memory import MemoryRegion
from disagg.machine.processes import IdentitySocket, ProcessWatch
from disagg.testing.contract.arena import REGION_NBYTES, Arena, batch

BackendFactory = Callable[[BackendOptions], Backend]
StartContext = SpawnContext | ForkServerContext
"""Not `fork`: a child would inherit the locks of engine threads."""
SPAWN: StartContext = multiprocessing.get_context("spawn")


class Target(Protocol):
    arena: Arena
    endpoint: bytes
    process: ProcessWatch | None

    def close(self) -> None:
        """Close the engine in order; raises `AssertionError` if its process does not end with status 0."""


class Address(NamedTuple):
    """Where a target finds another engine, and the identity of its process."""

    endpoint: bytes
    identity: str


class ProcessTarget:
    def __init__(
        self, factory: BackendFactory, options: BackendOptions, *, patience_s: float, context: StartContext = SPAWN
    ) -> None:
        self._patience_s = patience_s
        self._pipe, theirs = context.Pipe()
        self._child: BaseProcess = context.Process(target=_serve, args=(theirs, factory, options, REGION_NBYTES))
        self._child.start()
        theirs.close()
        if not self._pipe.poll(patience_s):
            self._child.kill()
            raise AssertionError(f"the target process sent nothing for {patience_s} s")
        fd, base, self.endpoint, self.identity = self._pipe.recv()
        self.process = ProcessWatch.attest(self.identity)
        self.arena = Arena(os.open(f"/proc/{self._child.pid}/fd/{fd}", os.O_RDWR), REGION_NBYTES, base=base)

    def signal(self, number: int) -> None:
        assert self._child.pid is not None
        os.kill(self._child.pid, number)

    def stop(self) -> None:
        """Returns once the process is frozen."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + self._patience_s
        while any(state != "T" for state in self._states()):
            assert time.monotonic() < deadline, "the target process does not stop"
            time.sleep(0.001)

    def _states(self) -> Iterator[str]:
        for stat in Path(f"/proc/{self._child.pid}/task").glob("*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                yield stat.read_text().rpartition(")")[2].split()[0]

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def connect(self, other: ProcessTarget | Address) -> None:
        """Make this target an initiator too."""
        self._ask((other.endpoint, other.identity))

    def write(self, endpoint: bytes, address: int) -> TransferStatus:
        """Post the whole first region to `address` of that peer. Returns the status right after; it is never polled again."""
        status = self._ask((endpoint, address))
        assert isinstance(status, TransferStatus)
        return status

    def begin_close(self) -> None:
        """A stopped process closes once it goes on."""
        self._pipe.send((b"", 0))

    def end_close(self) -> bytes:
        """A hash of the target's memory right after."""
        return cast(bytes, self._answer())

    def begin_fence(self, endpoint: bytes, *, patience_s: int) -> None:
        """A stopped process fences once it goes on."""
        self._pipe.send((endpoint, -patience_s))

    def end_fence(self) -> tuple[Fence, bytes]:
        """The last answer, and a hash of the target's memory right after."""
        fence, memory = cast(tuple[Fence, bytes], self._answer())
        return fence, memory

    def _ask(self, order: tuple[bytes, int | str]) -> object:
        self._pipe.send(order)
        return self._answer()

    def _answer(self) -> object:
        assert self._pipe.poll(self._patience_s), f"the target process sent nothing for {self._patience_s} s"
        answer: object = self._pipe.recv()
        return answer

    def kill(self) -> None:
        """Returns once the process has ended."""
        self._child.kill()
        self._child.join(self._patience_s)

    def close(self) -> None:
        """A stopped process goes on first. Raises as `Target.close` does."""
        killed = self._child.exitcode == -signal.SIGKILL
        if self._child.is_alive():
            self.go_on()
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self._child.join(self._patience_s)
        if self._child.is_alive():
            self._child.kill()
        if self.process is not None:
            self.process.close()
        self._pipe.close()
        os.close(self.arena.fd)
        assert killed or self._child.exitcode == 0, f"the target process ended with status {self._child.exitcode}"


class InProcessTarget:
    def __init__(self, factory: BackendFactory, options: BackendOptions) -> None:
        self.arena = Arena.create(REGION_NBYTES)
        self.backend = factory(options)
        self.backend.register(self.arena.regions)
        self.endpoint = self.backend.endpoint()
        self._identity = IdentitySocket()
        self.process = ProcessWatch.attest(self._identity.name)

    def close(self) -> None:
        self.backend.close()
        self._identity.close()
        if self.process is not None:
            self.process.close()
        os.close(self.arena.fd)


def settle(transfer: Transfer, *, patience_s: float = 60.0) -> TransferStatus:
    """Poll while `PENDING`; fails the test after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (status := transfer.poll()) is TransferStatus.PENDING:
        assert time.monotonic() < deadline, f"still pending after {patience_s} s"
        time.sleep(0.0002)
    return status


# -- what runs in the other process ------------------------------------------------------------------------------------


def _serve(pipe: Connection, factory: BackendFactory, options: BackendOptions, sizes: Sequence[int]) -> None:
    """Send where the memory is, then obey orders to connect, post, fence and close."""
    arena = Arena.create(sizes)
    arena.memory[:] = 0
    backend = factory(options)
    backend.register(arena.regions)
    identity = IdentitySocket()
    with suppress(EOFError):
        pipe.send((arena.fd, arena.base, backend.endpoint(), identity.name))
        peers = {}
        while (order := pipe.recv()) is not None:
            endpoint, address = order
            if isinstance(address, str):
                process = ProcessWatch.attest(address)
                pipe.send(peers.update({endpoint: backend.connect(endpoint, process=process, epoch=1)}))
            elif address == 0:
                backend.close()
                pipe.send(hashlib.sha256(arena.memory.data).digest())
            elif address < 0:
                pipe.send(_fence(backend, peers[endpoint], arena, patience_s=-address))
            else:
                whole = batch([arena.address(0)], [address], [arena.sizes[0]])
                pipe.send(backend.submit(peers[endpoint], whole).poll())
    backend.close()


def _fence(backend: Backend, peer: RemotePeer, arena: Arena, *, patience_s: int) -> tuple[Fence, bytes]:
    """Fence until `QUIET` or for `patience_s`. Returns the last answer, and a hash of the memory right after."""
    deadline = time.monotonic() + patience_s
    while True:
        fence, memory = backend.fence(peer, epoch=1), hashlib.sha256(arena.memory.data).digest()
        if fence is Fence.QUIET or time.monotonic() > deadline:
            return fence, memory


def initiate(
    factory: BackendFactory,
    options: BackendOptions,
    target: tuple[bytes, str],
    remote: tuple[int, int],
    orderly: bool,
) -> None:
    """An initiator process: write one piece to `remote` (address, nbytes), then close the engine if `orderly`."""
    address, nbytes = remote
    memory = np.full(nbytes, 0xA5, dtype=np.uint8)
    backend = factory(options)
    backend.register([MemoryRegion(memory.ctypes.data, nbytes)])
    endpoint, identity = target
    peer = backend.connect(endpoint, process=ProcessWatch.attest(identity), epoch=1)
    transfer = backend.submit(peer, batch([memory.ctypes.data], [address], [nbytes]))
    assert settle(transfer) is TransferStatus.DONE, transfer.error
    if orderly:
        transfer.close()
        backend.disconnect(peer)
        backend.close()
