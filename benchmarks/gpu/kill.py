"""What happens to a process whose kernel writes to a peer's memory when the peer is killed, or frees the memory?

One process owns memory on GPU 1. Another process maps it, and its kernel on GPU 0 writes to it continuously. The memory is
mapped by legacy handles (cuIpcGetMemHandle) and by exported handles (cuMemExportToShareableHandle). In the reverse case the
*writer* is killed, and the owner watches when its memory stops changing. Prints one line of JSON per case::

    python -m benchmarks.gpu.kill
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from disagg.backends.cuda.driver import Gpu, num_gpus, second_gpu
from disagg.backends.cuda.queue import Queue

NBYTES = 256 << 20
PATIENCE_S = 60.0
SCRIBBLE = """
extern "C" __global__ void scribble(volatile unsigned* memory, unsigned long long words, volatile unsigned* flags,
                                    unsigned long long seed) {
  unsigned long long thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (unsigned round = 1; !flags[0] && round < 2000000000u; ++round) {
    for (unsigned long long i = thread; i < words; i += threads) memory[i] = unsigned(seed) + round;
    if (thread == 0) { flags[1] = round; __threadfence_system(); }
  }
}
"""


def _own(gpu: Gpu, kind: str, sock: socket.socket | None) -> tuple[int, bytes, Any]:
    """Allocate memory on this GPU.

    Returns its address, its legacy handle (empty for exported memory, whose file descriptor is sent over `sock`) and the
    owner's handle.
    """
    if kind == "legacy":
        address = int(gpu.call("cuMemAlloc", NBYTES))
        return address, gpu.export(address).handle, None
    driver = gpu.driver
    prop = _properties(gpu)
    handle = gpu.call("cuMemCreate", NBYTES, prop, 0)
    fd = int(gpu.call("cuMemExportToShareableHandle", handle, prop.requestedHandleTypes, 0))
    assert sock is not None
    socket.send_fds(sock, [b"fd"], [fd])
    os.close(fd)
    return _map(gpu, driver, handle), b"", handle


def _properties(gpu: Gpu) -> Any:
    driver = gpu.driver
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = gpu.ordinal
    prop.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return prop


def _map(gpu: Gpu, driver: Any, handle: Any) -> int:
    address = int(gpu.call("cuMemAddressReserve", NBYTES, 0, 0, 0))
    gpu.call("cuMemMap", address, NBYTES, 0, handle, 0)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    gpu.call("cuMemSetAccess", address, NBYTES, [access], 1)
    return address


def _import(gpu: Gpu, handle: bytes, sock: socket.socket) -> int:
    """Map the peer's memory and return its address here."""
    if handle:
        return gpu.open(handle)
    _, fds, _, _ = socket.recv_fds(sock, 16, 1)
    kind = gpu.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    imported = gpu.call("cuMemImportFromShareableHandle", fds[0], kind)
    os.close(fds[0])
    address = _map(gpu, gpu.driver, imported)
    gpu.call("cuMemRelease", imported)  # the mapping keeps the memory alive
    return address


def owner(pipe: Connection, sock: socket.socket, kind: str) -> None:
    """The process that owns memory of the second GPU; it frees or samples the memory on command."""
    gpu = Gpu(second_gpu())
    with gpu.current():
        address, handle, own = _own(gpu, kind, sock)
        pipe.send(handle)
        while (command := pipe.recv()) != "end":
            if command == "free":
                pipe.send(_free_and_reuse(gpu, kind, address, own))
            elif command == "untouched":
                pipe.send(_all(gpu, address, 0x5A))
            elif command == "sample":
                pipe.send(_sample(gpu, address))


def _free_and_reuse(gpu: Gpu, kind: str, address: int, own: Any) -> str:
    """Free the memory that the peer writes to, allocate as much again, and check whether the peer's writes reach it."""
    if kind == "legacy":
        gpu.call("cuMemFree", address)
        again = int(gpu.call("cuMemAlloc", NBYTES))
    else:
        gpu.call("cuMemUnmap", address, NBYTES)
        gpu.call("cuMemRelease", own)
        again = int(gpu.call("cuMemAlloc", NBYTES))
    gpu.call("cuMemsetD8", again, 0x5A, NBYTES)
    gpu.call("cuCtxSynchronize")
    time.sleep(0.5)
    untouched = _all(gpu, again, 0x5A)
    same = "the same address" if again == address else "another address"
    return f"no error; new memory at {same}, {'untouched' if untouched else 'OVERWRITTEN BY THE PEER'}"


def _all(gpu: Gpu, address: int, byte: int) -> bool:
    found = (ctypes.c_uint8 * NBYTES)()
    gpu.call("cuMemcpyDtoH", ctypes.addressof(found), address, NBYTES)
    return bytes(found) == bytes([byte]) * NBYTES


def _sample(gpu: Gpu, address: int) -> tuple[int, int]:
    """The newest value of a few words, and the time in nanoseconds."""
    words = (ctypes.c_uint32 * 4096)()
    gpu.call("cuMemcpyDtoH", ctypes.addressof(words), address, ctypes.sizeof(words))
    return max(words), time.monotonic_ns()


def writer(pipe: Connection, sock: socket.socket, handle: bytes) -> None:
    """The process that maps the peer's memory on GPU 0 and writes to it until commanded to stop; then it tests its context."""
    gpu = Gpu(0)
    with gpu.current():
        target = _import(gpu, handle, sock)
        shared = int(gpu.call("cuMemHostAlloc", 4096, 0))
        flags = (ctypes.c_uint32 * 2).from_address(shared)
        flags[0] = flags[1] = 0
        _module, kernels = gpu.compile(SCRIBBLE, ["scribble"])
        queue, event = Queue(gpu), gpu.event()
        queue.launch(kernels["scribble"], [target, NBYTES // 4, shared, 0], blocks=64, threads=512, done=event)
        while flags[1] < 3:
            time.sleep(0.001)
        pipe.send(flags[1])
        while (command := pipe.recv()) != "end":
            if command == "rounds":
                pipe.send(int(flags[1]))
            elif command == "finish":
                pipe.send(_finish(gpu, flags, event, kernels["scribble"], queue))
            elif command == "unmap" and handle:
                pipe.send(_try(lambda: gpu.close(target)))
            elif command == "unmap":
                pipe.send(_try(lambda: gpu.call("cuMemUnmap", target, NBYTES)))


def _finish(gpu: Gpu, flags: Any, event: int, kernel: int, queue: Queue) -> dict[str, str]:
    """End the writing kernel; then try the calls that a lost context refuses."""
    flags[0] = 1
    deadline = time.monotonic() + PATIENCE_S

    def wait() -> None:
        while not queue.is_past(event):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the kernel did not end within {PATIENCE_S} s")
            time.sleep(0.001)

    def local() -> None:
        memory = int(gpu.call("cuMemAlloc", 1 << 20))
        queue.launch(kernel, [memory, 1 << 18, int(ctypes.addressof(flags)), 0], blocks=4, threads=64)
        gpu.call("cuStreamSynchronize", queue.stream)
        gpu.call("cuMemsetD8", memory, 1, 1 << 20)
        gpu.call("cuCtxSynchronize")
        gpu.call("cuMemFree", memory)

    return {"writing kernel": _try(wait), "context afterwards": _try(local)}


def _try(step: Any) -> str:
    """`works`, or the error that a call raises."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 (the error is the outcome)
        return f"{type(error).__name__}: {error}"
    return "works"


@dataclass
class _Pair:
    """A running owner and a running writer."""

    owner: Any
    writer: Any
    to_owner: Connection
    to_writer: Connection

    def ask(self, pipe: Connection, command: str) -> Any:
        pipe.send(command)
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError(f"no answer to {command!r} within {PATIENCE_S} s")
        return pipe.recv()

    def close(self) -> None:
        for process, pipe in ((self.writer, self.to_writer), (self.owner, self.to_owner)):
            with contextlib.suppress(OSError):
                pipe.send("end")
            process.join(10)
            if process.is_alive():
                process.kill()
            pipe.close()


def start(kind: str) -> _Pair:
    context = multiprocessing.get_context("spawn")
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    to_owner, owner_end = context.Pipe()
    to_writer, writer_end = context.Pipe()
    own = context.Process(target=owner, args=(owner_end, ends[0], kind))
    own.start()
    handle = _receive(to_owner)
    write = context.Process(target=writer, args=(writer_end, ends[1], handle))
    write.start()
    _receive(to_writer)
    for end in (*ends, owner_end, writer_end):
        end.close()
    return _Pair(own, write, to_owner, to_writer)


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"no answer from a child process within {PATIENCE_S} s")
    return pipe.recv()


def used_mib(gpu: int) -> int | None:
    """Memory in use on a GPU by all processes, in MiB; `None` without NVML."""
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used) >> 20
    except Exception:  # noqa: BLE001 (NVML is optional here)
        return None


def owner_killed(kind: str) -> dict[str, Any]:
    """The owner is killed by SIGKILL while the writer's kernel writes."""
    pair = start(kind)
    try:
        pair.owner.kill()
        pair.owner.join()
        before = pair.ask(pair.to_writer, "rounds")
        time.sleep(0.5)
        goes_on = pair.ask(pair.to_writer, "rounds") > before
        held = used_mib(1)
        outcome = {"kernel went on writing": goes_on, **pair.ask(pair.to_writer, "finish")}
        outcome["unmapping"] = pair.ask(pair.to_writer, "unmap")
        return {**outcome, "MiB on the owner's GPU: held, then after unmapping": [held, used_mib(1)]}
    finally:
        pair.close()


def owner_frees(kind: str) -> dict[str, Any]:
    """The owner frees the memory and allocates again while the writer's kernel writes."""
    pair = start(kind)
    try:
        freed = pair.ask(pair.to_owner, "free")
        before = pair.ask(pair.to_writer, "rounds")
        time.sleep(0.3)
        goes_on = pair.ask(pair.to_writer, "rounds") > before
        return {"owner": freed, "kernel went on writing": goes_on, **pair.ask(pair.to_writer, "finish")}
    finally:
        pair.close()


def writer_killed(kind: str) -> dict[str, Any]:
    """The writer is killed by SIGKILL while its kernel runs: does the memory still change after the process has ended?"""
    pair = start(kind)
    try:
        pid = pair.writer.pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ended = time.monotonic_ns()
        samples = [pair.ask(pair.to_owner, "sample") for _ in range(200)]
        last = samples[-1][0]
        changing = [at for value, at in samples if value != last]
        late = (max(changing) - ended) / 1e6 if changing else 0.0
        return {"changes seen after the process ended, ms": round(late, 3), "owner's context": "works"}
    finally:
        pair.close()


CASES = {"owner killed": owner_killed, "owner frees": owner_frees, "writer killed": writer_killed}
KINDS = ("legacy", "exported")


def run(case: str, kind: str) -> dict[str, Any]:
    """The outcome of one case by observation, or `{"error": ...}` if a process failed."""
    try:
        return CASES[case](kind)
    except Exception as error:  # noqa: BLE001 (a failed process is an outcome)
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> int:
    if num_gpus() < 2:
        print("expected two NVIDIA GPUs with access to each other's memory")
        return 2
    for case in CASES:
        for kind in KINDS:
            print(json.dumps({"case": case, "handles": kind, **run(case, kind)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
