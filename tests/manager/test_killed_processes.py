"""Processes of the same host that are killed: their peers notice it by their ends, not by their silence."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from disagg.protocol.peer_state import ConnectionLimits
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.manager.test_peers import manager, until
from tests.support.cluster import DEADLINE_S

LIMITS = ConnectionLimits()
NUM_KILLS = 3
SHARE = 1 / 8
"""Of the silence limit: 1 s."""


def serve(pipe: Connection, name: str, engine: str, address: str) -> None:
    """A peer in a process of its own, until it is killed."""
    with manager(name=name, backend=engine, connection_limits=LIMITS, peers={"survivor": address}) as peer:
        pipe.send(peer.address)
        pipe.recv()


@pytest.mark.parametrize("engine", ["cma", "nixl"])
def test_a_killed_process_is_noticed_long_before_it_would_count_as_silent(engine: str) -> None:
    """The median of several: the time of one depends on what else the machine does. Chaos records them in its report."""
    if engine in ENGINES:
        require_engine(*ENGINES[engine])
    context, times = multiprocessing.get_context("spawn"), []
    with manager(name="survivor", backend=engine, connection_limits=LIMITS) as survivor, ExitStack() as stack:
        children = []
        for name in [f"peer-{number}" for number in range(NUM_KILLS)]:
            pipe, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, name, engine, survivor.address))
            child.start()
            stack.callback(child.kill)
            children.append((name, child, pipe))
        for name, _, pipe in children:
            assert pipe.poll(3 * DEADLINE_S)
            survivor.add_peer(name, address=pipe.recv())
        for name, child, _ in children:
            survivor.wait_ready(name, timeout_s=DEADLINE_S)
            began = time.monotonic()
            child.kill()
            until(lambda name=name: not survivor.health().peers[name].ready)
            times.append(time.monotonic() - began)
            assert "has ended" in survivor.health().peers[name].problem
        assert survivor.health().ok
    assert statistics.median(times) < SHARE * LIMITS.heartbeat_timeout_s, times
