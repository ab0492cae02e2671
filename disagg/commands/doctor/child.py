"""Tasks that `disagg doctor` runs in a child process, because they may hang or crash.

Each task writes lines of JSON. `owner` and `writer` are the two ends of an engine, `byte` and `copy` those of a copy between
processes: the second of a pair reads the first one's line. `owner` and `byte` end with their standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from disagg.backends import registry as backends
from disagg.backends.base import Backend, BackendOptions, RemotePeer, TransferStatus
from disagg.backends.mooncake.launch import IPV6_SWITCH
from disagg.core.copies import CopyBatch
from disagg.core.errors import DisaggError, TransferFailed
from disagg.core.memory import MemoryRegion
from disagg.machine.processes import IdentitySocket, ProcessWatch, copy_refusal

BUFFER_NBYTES = 32 << 20
SMALL_NBYTES = 4096
SPEND_S = 0.6
"""Duration of each measurement."""
TRANSFER_S = 10.0


def _report(**found: Any) -> None:
    print(json.dumps(found), flush=True)


@contextlib.contextmanager
def _started(name: str) -> Iterator[tuple[Backend, int]]:
    """An engine, and the address of its registered buffer."""
    host = "::1" if name == "mooncake" and IPV6_SWITCH in os.environ else "127.0.0.1"
    backend = backends.load(name, BackendOptions(host=host))
    try:
        buffer = np.ones(BUFFER_NBYTES, dtype=np.uint8)
        address = int(buffer.__array_interface__["data"][0])
        backend.register([MemoryRegion(address, buffer.nbytes)])
        yield backend, address
    finally:
        backend.close()


def owner(name: str) -> None:
    """Own a buffer that a `writer` writes to."""
    with _started(name) as (backend, address):
        identity = IdentitySocket()
        _report(endpoint=backend.endpoint().hex(), address=address, process=identity.name)
        while os.read(0, 4096):
            pass


def writer(name: str) -> None:
    """Reports the transport, the speed and the latency of writes to the buffer described on standard input."""
    with _started(name) as (backend, address):
        target = json.loads(sys.stdin.readline())
        process = ProcessWatch.attest(target["process"])
        peer = backend.connect(bytes.fromhex(target["endpoint"]), epoch=1, process=process)
        there = int(target["address"])
        large = [_write(backend, peer, address, there, BUFFER_NBYTES) for _ in _rounds(SPEND_S)]
        small = [_write(backend, peer, address, there, SMALL_NBYTES) for _ in _rounds(SPEND_S)]
        _report(
            transport=backend.transport,
            gbps=BUFFER_NBYTES / statistics.median(large[1:] or large) / 1e9,
            latency_s=statistics.median(small),
        )
        backend.disconnect(peer)


def _rounds(spend_s: float) -> Iterator[None]:
    stop, rounds = time.perf_counter() + spend_s, 0
    while rounds < 3 or time.perf_counter() < stop:
        rounds += 1
        yield


def _write(backend: Backend, peer: RemotePeer, here: int, there: int, nbytes: int) -> float:
    copies = CopyBatch(*(np.array([value], dtype=np.uint64) for value in (here, there, nbytes)))
    started = time.perf_counter()
    transfer = backend.submit(peer, copies)
    while (status := transfer.poll()) is TransferStatus.PENDING:
        if time.perf_counter() - started > TRANSFER_S:
            raise TimeoutError(f"a write of {nbytes} bytes did not finish within {TRANSFER_S:g} s")
        time.sleep(20e-6)
    if status is not TransferStatus.DONE:
        raise TransferFailed(f"a write of {nbytes} bytes: {status.value}: {transfer.error}")
    took = time.perf_counter() - started
    transfer.close()
    return took


def byte(_: str) -> None:
    held = ctypes.create_string_buffer(1)
    _report(pid=os.getpid(), address=ctypes.addressof(held))
    while os.read(0, 4096):
        pass


def copy(_: str) -> None:
    """Whether this process may copy from one that is not its child."""
    source = json.loads(sys.stdin.readline())
    _report(refusal=copy_refusal(int(source["pid"]), int(source["address"])))


def libraries(names: str) -> None:
    missing = {}
    for name in names.split(","):
        try:
            ctypes.CDLL(name)
        except OSError as error:
            missing[name] = str(error)
    _report(missing=missing)


def gpus(_: str) -> None:
    """Pairs of GPUs that cannot map each other's memory."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count, able = ctypes.c_int(), ctypes.c_int()
    if status := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        _report(error=f"the CUDA driver returned status {status}")
        return
    apart = [
        pair
        for pair in itertools.permutations(range(count.value), 2)
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(able), *pair) or not able.value
    ]
    _report(count=count.value, apart=apart)


def nvlink(_: str) -> None:
    from disagg.backends.cuda.driver import load_bindings

    load_bindings()
    _report(ok=True)


TASKS: dict[str, Callable[[str], None]] = {task.__name__: task for task in (owner, writer, byte, copy, libraries, gpus, nvlink)}


def main() -> None:
    task, _, argument = sys.argv[1].partition(":")
    try:
        TASKS[task](argument)
    except (DisaggError, OSError, ValueError) as error:
        _report(error=f"{type(error).__name__}: {error}", late=isinstance(error, TimeoutError))
        sys.exit(1)


if __name__ == "__main__":
    main()
