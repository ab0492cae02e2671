"""A peer with a valid hello names the victim's own process, or its own engine, in its endpoint, with memory of its choice."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg import KVManager, ModelId, Pages, Topology
from disagg.backends import registry
from disagg.backends.auto import AutoBackend, AutoDescriptor
from disagg.backends.base import Backend, BackendOptions
from disagg.backends.cma import CmaBackend, CmaDescriptor
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.testing import reference
from disagg.testing.reference import KVRank
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.manager.test_peers import MODEL, manager, until
from tests.support.cluster import DEADLINE_S, Side

ADDRESS, NBYTES = 0x6A00_0000_0000, 1 << 20
"""Memory of the victim that was never registered, and of the hostile process, which registers it there."""
_MAP_FIXED_NOREPLACE = 0x100000
REQUEST = b"from the victim."
NUM_PAGES = 4
REFUSED_S = 3.0
"""Deadline of a request that cannot succeed."""


def map_memory() -> np.ndarray:
    """`NBYTES` zeros at `ADDRESS`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    assert libc.mmap(ADDRESS, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == ADDRESS
    return np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(ADDRESS))


@pytest.fixture
def secret() -> Iterator[np.ndarray]:
    memory = map_memory()
    yield memory
    ctypes.CDLL(None).munmap(ctypes.c_void_p(ADDRESS), ctypes.c_size_t(NBYTES))


class Hostile(CmaBackend):
    """Says that it is process `pid`."""

    pid = 0

    def endpoint(self) -> bytes:
        return encode_endpoint(self.name, msgspec.msgpack.encode(CmaDescriptor(self.pid)), self.index.regions)


class PassesOn(AutoBackend):
    """Passes on the endpoint of the victim's own engine, with the victim's memory and this process's as its own."""

    victims = b""

    def endpoint(self) -> bytes:
        endpoints = msgspec.msgpack.decode(decode_endpoint(self.name, self.victims)[0], type=AutoDescriptor).endpoints
        name = self.engines[-1]
        descriptor, regions = decode_endpoint(name, endpoints[name])
        claimed = encode_endpoint(name, descriptor, [*regions, *self._regions])
        return encode_endpoint(self.name, msgspec.msgpack.encode(AutoDescriptor({name: claimed})), self._regions)


def serve(pipe: Connection) -> None:
    """A hostile decode instance in a process of its own. It reserves rows for a request of the victim and sends its end."""
    engine, passes_on = pipe.recv()
    Hostile.pid, address, PassesOn.victims = pipe.recv()

    def build(options: BackendOptions) -> Backend:
        if engine == "cma":
            return Hostile(options)
        network = registry.load(engine, options)
        return PassesOn([network]) if passes_on else AutoBackend([Hostile(options), network])

    memory, spec = map_memory(), KVRank(layers=(0,), page_size=4, num_pages=NUM_PAGES, tp=1, tp_rank=0)
    pools, used = reference.allocate(MODEL, spec), 0
    for layer, tensors in pools.items():
        placed: list[Any] = []
        for tensor in tensors:
            placed.append(memory[used : used + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
            used += tensor.nbytes
        pools[layer] = tuple(placed)
    kv, peers = Side().component(MODEL, Topology(), pools), {"victim": address}
    with KVManager(name="hostile", topology=None, model=ModelId("m"), components=[kv], backend=build, peers=peers) as hostile:
        pipe.send(hostile.address)
        rows = {"kv": Pages(np.arange(NUM_PAGES, dtype=np.int32))}
        deadline_s = REFUSED_S if passes_on or engine == "cma" else DEADLINE_S
        receiver = hostile.receiver(REQUEST, peer="victim", rows=rows, need={"kv": (0, 4 * NUM_PAGES)}, deadline_s=deadline_s)
        pipe.send(str(receiver.wait(timeout_s=2 * DEADLINE_S).error or ""))
        pipe.recv()


@contextmanager
def hostile(victim: KVManager, engine: str, *, passes_on: bool) -> Iterator[Connection]:
    """The hostile instance, and the pipe that has the end of its request."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,))
    child.start()
    try:
        pipe.send((engine, passes_on))
        pipe.send((os.getpid(), victim.address, victim.backend.endpoint()))
        assert pipe.poll(DEADLINE_S)
        victim.add_peer("hostile", address=pipe.recv())
        yield pipe
    finally:
        pipe.send(None)
        child.join(DEADLINE_S)
        child.kill()


def test_a_peer_that_names_this_process_gets_nothing_written(secret: np.ndarray) -> None:
    with manager(name="victim", backend="cma") as victim, hostile(victim, "cma", passes_on=False):
        until(lambda: "passes on an endpoint that is not its own" in victim.peer("hostile").reason)
        assert victim.peer("hostile").state == "connecting"
        assert victim.health().ok
        assert not secret.any()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_by_auto_such_a_peer_is_written_to_in_its_own_process_only(
    engine: str, secret: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network engine reaches the hostile process, whose memory has the same address there."""
    require_engine(*ENGINES[engine])
    monkeypatch.setattr(registry, "AUTO", (engine,))
    with manager(name="victim", backend="auto") as victim, hostile(victim, engine, passes_on=False) as pipe:
        sender = victim.sender(REQUEST, peer="hostile", deadline_s=DEADLINE_S)
        sender.finish({"kv": Pages(np.arange(NUM_PAGES, dtype=np.int32))})
        assert sender.wait(timeout_s=2 * DEADLINE_S).error is None
        assert pipe.recv() == ""
        assert not secret.any()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_by_auto_a_peer_that_passes_on_this_engine_gets_nothing_written(
    engine: str, secret: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_engine(*ENGINES[engine])
    monkeypatch.setattr(registry, "AUTO", (engine,))
    with manager(name="victim", backend="auto") as victim, hostile(victim, engine, passes_on=True) as pipe:
        sender = victim.sender(REQUEST, peer="hostile", deadline_s=REFUSED_S)
        sender.finish({"kv": Pages(np.arange(NUM_PAGES, dtype=np.int32))})
        assert sender.wait(timeout_s=DEADLINE_S).error is not None
        reasons = victim.peer("hostile").reason + pipe.recv()
        assert {"nixl": "is this engine itself", "mooncake": "the engine reports a failed piece"}[engine] in reasons
        assert victim.health().ok
        assert not secret.any()
