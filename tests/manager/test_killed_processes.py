"""Processes of the same host that are killed: their peers notice it by their ends, not by their silence."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np
import pytest

from disagg import Pages, new_request_id
from disagg.protocol.peer_effects import ConnectionLimits
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


def execute_another(pipe: Connection, engine: str, address: str, request: bytes) -> None:
    """A writer whose reader has reserved rows, until it executes another program."""
    with manager(name="writer", backend=engine, connection_limits=LIMITS, peers={"reader": address}) as writer:
        pipe.send(writer.address)
        sender = writer.sender(request, peer="reader")
        until(lambda: sender.needed("kv") is not None)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])


@pytest.mark.parametrize("engine", ["cma", "nixl"])
def test_rows_come_back_when_their_writer_executes_another_program(engine: str) -> None:
    """The process lives on, so that its end never comes; nothing of the program that may have written does. NIXL's sockets stay
    open in the next one.
    """
    if engine in ENGINES:
        require_engine(*ENGINES[engine])
    context, request = multiprocessing.get_context("spawn"), new_request_id()
    with manager(name="reader", backend=engine, connection_limits=LIMITS) as reader, ExitStack() as stack:
        pipe, theirs = context.Pipe()
        child = context.Process(target=execute_another, args=(theirs, engine, reader.address, request))
        child.start()
        stack.callback(child.kill)
        assert pipe.poll(3 * DEADLINE_S)
        reader.add_peer("writer", address=pipe.recv())
        receiver = reader.receiver(request, peer="writer", rows={"kv": Pages(np.array([0]))}, need={"kv": (0, 4)})
        event = receiver.wait(timeout_s=3 * DEADLINE_S)
        assert event is not None
        assert not event.ok
        until(lambda: event.lease.released)
        assert child.is_alive()


def keep_a_connection(pipe: Connection, engine: str, address: str, request: bytes) -> None:
    """A writer whose reader has reserved rows, and is connected to another service of this process, until it is killed."""
    with (
        manager(name="writer", backend=engine, connection_limits=LIMITS, peers={"reader": address}) as writer,
        socket.create_server(("127.0.0.1", 0)) as service,
    ):
        pipe.send((writer.address, service.getsockname()))
        kept = service.accept()
        sender = writer.sender(request, peer="reader")
        until(lambda: sender.needed("kv") is not None)
        pipe.send(kept[1])
        pipe.recv()


@pytest.mark.parametrize("engine", ["cma", "mooncake", "nixl"])
def test_rows_come_back_though_another_connection_to_their_dead_writer_stays_half_closed(engine: str) -> None:
    """As an HTTP client keeps one to a server, for as long as it does not use it."""
    if engine in ENGINES:
        require_engine(*ENGINES[engine])
    context, request = multiprocessing.get_context("spawn"), new_request_id()
    with manager(name="reader", backend=engine, connection_limits=LIMITS) as reader, ExitStack() as stack:
        pipe, theirs = context.Pipe()
        child = context.Process(target=keep_a_connection, args=(theirs, engine, reader.address, request))
        child.start()
        stack.callback(child.kill)
        assert pipe.poll(3 * DEADLINE_S)
        address, service = pipe.recv()
        kept = stack.enter_context(socket.create_connection(service))
        reader.add_peer("writer", address=address)
        receiver = reader.receiver(request, peer="writer", rows={"kv": Pages(np.array([0]))}, need={"kv": (0, 4)})
        assert pipe.poll(3 * DEADLINE_S)
        assert pipe.recv() == kept.getsockname()
        child.kill()
        event = receiver.wait(timeout_s=DEADLINE_S)
        assert event is not None
        assert not event.ok
        until(lambda: event.lease.released)
        assert kept.recv(1) == b"", "half closed, with nothing to read"
