"""GPU memory that tests read without the code under test, and engines over it in child processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.backends.base import BackendOptions, Transfer, TransferStatus
from disagg.backends.cuda.driver import Gpu
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.core.copies import CopyBatch
from disagg.core.memory import Device, MemoryRegion
from disagg.machine.processes import IdentitySocket, ProcessWatch

Bytes = npt.NDArray[np.uint8]
Piece = tuple[int, int, int, int, int]
"""`(local region, offset, remote region, offset, nbytes)`."""

GUARD = 4099
"""Bytes before and after each region, allocated but not registered."""
SIZES = ((6_000_001, 70_000), (300_000,))
"""Sizes of the regions in each allocation."""
REGION_NBYTES = tuple(size for sizes in SIZES for size in sizes)
PATIENCE_S = 60.0


class Memory:
    """Regions in several allocations of one GPU, with guard bytes around each."""

    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        self.ordinal = ordinal
        totals = [sum(sizes) + GUARD * (len(sizes) + 1) for sizes in SIZES]
        with self.gpu.current():
            self.bases = [int(self.gpu.call("cuMemAlloc", total)) for total in totals]
        self.totals = totals
        self._starts = np.cumsum([0, *totals]).tolist()

    def close(self) -> None:
        with self.gpu.current():
            for base in self.bases:
                self.gpu.free(base)
        self.gpu.release()

    @property
    def regions(self) -> list[MemoryRegion]:
        device = Device("cuda", self.ordinal)
        return [MemoryRegion(self.address(i), size, device) for i, size in enumerate(REGION_NBYTES)]

    def _place(self, region: int) -> tuple[int, int]:
        """The region's allocation, and its offset in it."""
        for allocation, sizes in enumerate(SIZES):
            if region < len(sizes):
                return allocation, GUARD * (region + 1) + sum(sizes[:region])
            region -= len(sizes)
        raise IndexError(region)

    def address(self, region: int, offset: int = 0) -> int:
        allocation, start = self._place(region)
        return self.bases[allocation] + start + offset

    def at(self, region: int) -> int:
        """The index of a region's first byte in the result of `read`."""
        allocation, start = self._place(region)
        return int(self._starts[allocation]) + start

    def read(self) -> Bytes:
        """Every byte, guards included, one allocation after the other."""
        found = np.empty(sum(self.totals), np.uint8)
        with self.gpu.current():
            for base, total, start in zip(self.bases, self.totals, self._starts, strict=False):
                self.gpu.call("cuMemcpyDtoH", found.ctypes.data + start, base, total)
        return found

    def scramble(self, seed: int) -> None:
        """Write random bytes everywhere."""
        content = np.random.default_rng(seed).integers(0, 256, sum(self.totals), dtype=np.uint8)
        with self.gpu.current():
            for base, total, start in zip(self.bases, self.totals, self._starts, strict=False):
                self.gpu.call("cuMemcpyHtoD", base, content.ctypes.data + start, total)
            self.gpu.call("cuCtxSynchronize")


def settle(transfer: Transfer) -> TransferStatus:
    deadline = time.monotonic() + PATIENCE_S
    while (status := transfer.poll()) is TransferStatus.PENDING:
        assert time.monotonic() < deadline, f"the transfer is still pending after {PATIENCE_S} s"
        time.sleep(0.0001)
    return status


def batch(source: Sequence[int], destination: Sequence[int], nbytes: Sequence[int]) -> CopyBatch:
    return CopyBatch(*(np.array(column, dtype=np.uint64) for column in (source, destination, nbytes)))


def _serve(pipe: Connection, ordinal: int, visible: str | None) -> None:
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    memory = Memory(ordinal)
    memory.scramble(2)
    backend = NvlinkBackend(BackendOptions())
    backend.register(memory.regions)
    identity = IdentitySocket()
    pipe.send((backend.endpoint(), identity.name, [memory.address(i) for i in range(len(REGION_NBYTES))]))
    with suppress(EOFError):
        while (command := pipe.recv()) is not None:
            pipe.send(_execute(memory, backend, command))
    backend.close()
    memory.close()


def _execute(memory: Memory, backend: NvlinkBackend, command: tuple[object, ...]) -> object:
    match command:
        case ("read",):
            return memory.read()
        case ("scramble", int(seed)):
            memory.scramble(seed)
            return None
        case ("fork",):
            return forked()
        case ("close",):
            backend.close()
            return backend.mapped_by
        case ("write", bytes(endpoint), int(address), int(nbytes)):
            peer = backend.connect(endpoint, epoch=1)
            status = settle(backend.submit(peer, batch([memory.address(0)], [address], [nbytes])))
            backend.disconnect(peer)
            return status, backend.transport
    raise AssertionError(command)


def own_process(stack: ExitStack) -> ProcessWatch | None:
    """This process, as the kernel attests it."""
    identity = IdentitySocket()
    stack.callback(identity.close)
    return ProcessWatch.attest(identity.name)


def forked() -> int:
    """Fork a child that keeps every descriptor and does nothing. It ends by itself after some minutes."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(10 * PATIENCE_S))
        while True:
            signal.pause()
    return pid


class Target:
    """An engine over GPU memory in a child process. `visible`: the child's CUDA_VISIBLE_DEVICES."""

    def __init__(self, ordinal: int, *, visible: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, ordinal, visible))
        self.process.start()
        theirs.close()
        self.endpoint: bytes
        self.endpoint, identity, self._addresses = self._receive()
        self.watch = ProcessWatch.attest(identity)

    def address(self, region: int, offset: int = 0) -> int:
        """An address in the child process."""
        return int(self._addresses[region]) + offset

    def read(self) -> Bytes:
        found = self.ask("read")
        assert isinstance(found, np.ndarray)
        return found

    def ask(self, *command: object) -> Any:
        self.pipe.send(command)
        return self._receive()

    def _receive(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), f"no answer from the target process within {PATIENCE_S} s"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        killed = self.process.exitcode is not None
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(PATIENCE_S)
        assert killed or self.process.exitcode == 0, self.process.exitcode
