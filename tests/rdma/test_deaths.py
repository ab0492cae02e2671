"""A rank is killed in the middle of a write over verbs: no wrong byte, and rows come back or are quarantined with a reason."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

from disagg import new_request_id
from disagg.core.leases import Lease, LeaseState
from disagg.protocol.peer_state import ConnectionLimits
from disagg.testing import reference
from disagg.testing.faults import BackendFaults, inject
from disagg.testing.reference import KVModel, PageList
from tests.support.cluster import Rank, Side, receive, send, start_side
from tests.support.rdma import MTU, assert_sent, device_names, sent_packets

PATIENCE_S = 90.0
TOKENS, NUM_LAYERS = 160, 4
MODEL = KVModel(num_kv_heads=4, dims={"k": 128, "v": 128}, dtype="uint16")
NBYTES_PER_TOKEN = NUM_LAYERS * 4 * (128 + 128) * 2
PATIENT = ConnectionLimits(hello_retry_s=0.2, heartbeat_s=1.0, heartbeat_timeout_s=20.0)
SIDES = {"prefill": Side(page=8, num_pages=64), "decode": Side(page=16, num_pages=64)}
OTHER = {"prefill": "decode", "decode": "prefill"}
ENGINES = ("mooncake", "nixl")


def start(role: str, engine: str, backend: object) -> Rank:
    settings = {
        "backend": backend,
        "require": "rdma",
        "devices": device_names(engine),
        "pack_below": 0,
        "connection_limits": PATIENT,
    }
    (rank,) = start_side(MODEL, SIDES[role], f"{role}-0", num_layers=NUM_LAYERS, settings=settings)
    return rank


def pages_of(rank: Rank, number: int) -> PageList:
    """Pages for request `number`; no two requests share one."""
    count = reference.pages_needed(rank.spec, num_tokens=TOKENS, first_token=0)
    return PageList(tuple(range(number * count, (number + 1) * count)), 0)


def begin(role: str, rank: Rank, request: bytes, number: int) -> Any:
    """Send or receive that request, by the rank's role."""
    pages = pages_of(rank, number)
    if role == "decode":
        return receive(rank, request, pages, need=(0, TOKENS), deadline_s=PATIENCE_S)
    reference.fill(MODEL, rank.spec, rank.pools, pages, num_tokens=TOKENS)
    return send(rank, request, pages, TOKENS, deadline_s=PATIENCE_S)


def serve(pipe: Connection, role: str, engine: str, kill_at: int | None) -> None:
    """A rank in a process of its own, which kills itself in the middle of its transfer `kill_at`."""
    backend = engine if kill_at is None else inject(engine, BackendFaults(kill_at=kill_at))
    rank = start(role, engine, backend)
    pipe.send(rank.manager.address)
    rank.manager.add_peer(f"{OTHER[role]}-0", address=pipe.recv())
    rank.manager.wait_ready(f"{OTHER[role]}-0", timeout_s=PATIENCE_S)
    while (order := pipe.recv()) is not None:
        pipe.send(begin(role, rank, *order).wait(timeout_s=PATIENCE_S).ok)
    rank.manager.close()


@dataclass
class Remote:
    """The rank in the other process."""

    process: BaseProcess
    pipe: Connection

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(PATIENCE_S)


@contextmanager
def pair(role: str, engine: str, kill_at: int | None) -> Iterator[tuple[Rank, Callable[[], Remote]]]:
    """A rank of this process, and a function that starts and connects a peer of it, with `role`."""
    with ExitStack() as stack:
        own = start(OTHER[role], engine, engine)
        stack.callback(own.manager.close)
        faults = iter((kill_at, None))

        def start_peer() -> Remote:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, role, engine, next(faults)))
            process.start()
            remote = Remote(process, ours)
            stack.callback(remote.end)
            address = ours.recv()
            ours.send(own.manager.address)
            own.manager.add_peer(f"{role}-0", address=address)
            return remote

        yield own, start_peer


def proved_or_quarantined(lease: Lease) -> LeaseState:
    """The state of the lease once its rows are released or quarantined."""
    deadline = time.monotonic() + PATIENCE_S
    while lease.state is LeaseState.HELD:
        assert time.monotonic() < deadline, "rows are neither released nor quarantined"
        time.sleep(0.05)
    assert lease.released or lease.reason
    return lease.state


def wrong_bytes(rank: Rank, numbers: tuple[int, ...], *, partial: int) -> int:
    """Bytes of the pools that are neither those of the requests `numbers` nor untouched; `partial` may be there in part."""
    wrong = 0
    wanted = {
        number: reference.expected(MODEL, rank.spec, pages_of(rank, number), num_tokens=TOKENS, need=(0, TOKENS))
        for number in (*numbers, partial)
    }
    for layer, tensors in rank.pools.items():
        for i, tensor in enumerate(tensors):
            found, may = tensor.view(np.uint8), wanted[partial][layer][i].view(np.uint8)
            must = np.full_like(found, reference.CANARY)
            for number in numbers:
                content = wanted[number][layer][i].view(np.uint8)
                must = np.where(content != reference.CANARY, content, must)
            wrong += int(((found != must) & ((found != may) | (may == reference.CANARY))).sum())
    return wrong


@pytest.mark.parametrize("engine", ENGINES)
def test_a_writer_that_dies_in_mid_write(engine: str) -> None:
    since = sent_packets(engine)
    with pair("prefill", engine, kill_at=2) as (own, start_peer):
        writer = start_peer()
        own.manager.wait_ready("prefill-0", timeout_s=PATIENCE_S)
        requests = [new_request_id() for _ in range(3)]
        receivers = [begin("decode", own, requests[0], 0)]
        writer.pipe.send((requests[0], 0))
        assert receivers[0].wait(timeout_s=PATIENCE_S).ok
        assert writer.pipe.recv() is True
        assert wrong_bytes(own, (0,), partial=0) == 0
        receivers.append(begin("decode", own, requests[1], 1))
        writer.pipe.send((requests[1], 1))
        event = receivers[1].wait(timeout_s=PATIENCE_S)
        assert not event.ok
        state = proved_or_quarantined(event.lease)
        writer.process.join(PATIENCE_S)
        assert writer.process.exitcode == -signal.SIGKILL
        assert wrong_bytes(own, (0,), partial=1) == 0
        start_peer().pipe.send((requests[2], 2))
        own.manager.wait_ready("prefill-0", timeout_s=PATIENCE_S)
        receivers.append(begin("decode", own, requests[2], 2))
        assert receivers[2].wait(timeout_s=PATIENCE_S).ok
        assert wrong_bytes(own, (0, 2), partial=1) == 0
        assert sum(own.manager.health().quarantined.values()) == (state is LeaseState.QUARANTINED)
    assert_sent(engine, 2 * TOKENS * NBYTES_PER_TOKEN // MTU, since=since)
