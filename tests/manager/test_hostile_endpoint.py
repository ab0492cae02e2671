"""A peer with a valid hello names the victim's own process in its endpoint, with memory of its choice."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import pytest

from disagg import KVManager
from disagg.backends.base import BackendOptions
from disagg.backends.cma import CmaBackend, CmaDescriptor
from disagg.backends.endpoint import encode_endpoint
from disagg.core.memory import MemoryRegion
from tests.manager.test_peers import manager, until
from tests.support.cluster import DEADLINE_S


class Hostile(CmaBackend):
    """Says that it is process `pid`, and that `[address, +nbytes)` there is registered."""

    claim = (0, 0, 0)

    def endpoint(self) -> bytes:
        pid, address, nbytes = self.claim
        descriptor = msgspec.msgpack.encode(CmaDescriptor(pid))
        return encode_endpoint(self.name, descriptor, [*self.index.regions, MemoryRegion(address, nbytes)])


def serve(pipe: Connection) -> None:
    """A hostile decode instance in a process of its own."""
    Hostile.claim = pipe.recv()

    def build(options: BackendOptions) -> Hostile:
        return Hostile(options)

    with manager(name="hostile", backend=build, peers={"victim": pipe.recv()}) as hostile:
        pipe.send(hostile.address)
        pipe.recv()


@pytest.fixture
def secret() -> np.ndarray:
    """Memory of this process that was never registered."""
    return np.zeros(1 << 20, np.uint8)


def test_a_peer_that_names_this_process_gets_nothing_written(secret: np.ndarray) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,))
    child.start()
    try:
        victim: KVManager
        with manager(name="victim", backend="cma") as victim:
            pipe.send((os.getpid(), secret.ctypes.data, secret.nbytes))
            pipe.send(victim.address)
            assert pipe.poll(DEADLINE_S)
            victim.add_peer("hostile", address=pipe.recv())
            until(lambda: "passes on an endpoint that is not its own" in victim.peer("hostile").reason)
            assert victim.peer("hostile").state == "connecting"
            assert victim.health().ok
            assert not secret.any()
    finally:
        pipe.send(None)
        child.join(DEADLINE_S)
        child.kill()
