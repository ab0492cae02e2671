"""The speed of the machine without an engine: a copy in memory, and the system mechanism below a transport."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from disagg.commands.cases.instructions import Block
from disagg.core.errors import ConfigError, TransferFailed

Bytes = npt.NDArray[np.uint8]

MAX_VECTORS_NBYTES = 1 << 30
CHUNK_NBYTES = 1 << 20


def memcpy_gbps(arena: Bytes, nbytes: int) -> float:
    nbytes = min(nbytes, arena.nbytes)
    target = np.ones(nbytes, dtype=np.uint8)
    began = time.perf_counter()
    np.copyto(target, arena[:nbytes])
    return nbytes / (time.perf_counter() - began) / 1e9


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def write_into(pid: int, source: int, block: Block) -> None:
    """`process_vm_writev` without the GIL. Raises `TransferFailed`."""
    write = ctypes.CDLL(None, use_errno=True).process_vm_writev
    write.restype = ctypes.c_ssize_t
    done = 0
    while done < block.nbytes:
        size = min(block.nbytes - done, MAX_VECTORS_NBYTES)
        here, there = _Vector(source + block.source_offset + done, size), _Vector(block.destination + done, size)
        one = ctypes.c_ulong(1)
        found = write(pid, ctypes.byref(here), one, ctypes.byref(there), one, ctypes.c_ulong(0))
        if found <= 0:
            raise TransferFailed(f"process_vm_writev to process {pid}: {os.strerror(ctypes.get_errno())}")
        done += found


class Sink:
    """Receives blocks from plain sockets, with one connection and one thread per block."""

    def __init__(self, host: str, blocks: Sequence[tuple[int, int]], *, base: int, arena: Bytes, timeout_s: float) -> None:
        for address, nbytes in blocks:
            if not base <= address <= base + arena.nbytes - nbytes:
                raise ConfigError(f"block [{address:#x}, +{nbytes}): outside the arena of {arena.nbytes} bytes")
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.settimeout(timeout_s)
        self.port = int(self._listener.getsockname()[1])
        places = [arena[address - base : address - base + nbytes].data for address, nbytes in blocks]
        self._thread = threading.Thread(target=self._accept, args=(places,), name="disagg-bench-sink", daemon=True)
        self._thread.start()

    def _accept(self, places: list[memoryview]) -> None:
        takers = []
        with self._listener:
            for _ in places:
                connection, _ = self._listener.accept()
                takers.append(threading.Thread(target=self._take, args=(connection, places), daemon=True))
                takers[-1].start()
        for taker in takers:
            taker.join()

    @staticmethod
    def _take(connection: socket.socket, places: list[memoryview]) -> None:
        with connection:
            place = places[int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")]
            done = 0
            while done < len(place):
                count = connection.recv_into(place[done : done + CHUNK_NBYTES])
                if not count:
                    return
                done += count
            connection.sendall(b"\1")


def pour(address: tuple[str, int], number: int, content: memoryview, timeout_s: float) -> None:
    with socket.create_connection(address, timeout=timeout_s) as connection:
        connection.sendall(number.to_bytes(8, "little"))
        connection.sendall(content)
        if connection.recv(1) != b"\1":
            raise TransferFailed(f"plain socket to {address[0]}:{address[1]}: the connection ended before all bytes arrived")
