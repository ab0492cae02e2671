"""A rank of this process and its peer in another one, on the two RDMA devices of a link."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from disagg import Pages, new_request_id
from disagg.backends.base import StagingShape
from disagg.core.leases import Lease, LeaseState
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.requests import Sender
from disagg.testing import reference
from disagg.testing.faults import BackendFaults, inject
from disagg.testing.reference import KVModel, PageList
from harness.rdma.link import RdmaLink
from tests.support.cluster import Rank, Side, receive, send, start_side
from tests.support.rdma import MTU

PATIENCE_S = 90.0
TOKENS, NUM_LAYERS = 160, 4
HALF = TOKENS // 2
ATTEMPTS = 3
"""Of a server to send a request to a peer that was restarted."""
PACKED_BELOW = 1 << 20
"""Above all pieces."""
MODEL = KVModel(num_kv_heads=4, dims={"k": 128, "v": 128}, dtype="uint16")
NBYTES_PER_TOKEN = NUM_LAYERS * 4 * (128 + 128) * 2
PATIENT = ConnectionLimits(hello_retry_s=0.2, heartbeat_s=1.0, heartbeat_timeout_s=20.0)
SIDES = {"prefill": Side(page=8, num_pages=80), "decode": Side(page=16, num_pages=64)}
OTHER = {"prefill": "decode", "decode": "prefill"}


def start(role: str, engine: str, devices: Sequence[str], backend: object, *, pack_below: int = 0) -> Rank:
    """A rank whose engine uses these RDMA devices. UCX's names of devices have a port."""
    settings = {
        "backend": backend,
        "require": "rdma",
        "devices": [f"{name}:1" if engine == "nixl" else name for name in devices],
        "pack_below": pack_below,
        "connection_limits": PATIENT,
    }
    (rank,) = start_side(MODEL, SIDES[role], f"{role}-0", num_layers=NUM_LAYERS, settings=settings)
    return rank


def names(link: RdmaLink, side: int) -> list[str]:
    return [device.name for device in link.side(side)]


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


def send_first_half(own: Rank, link: RdmaLink, pipe: Connection, *, deadline_s: float = PATIENCE_S) -> Sender:
    """Send the first half of request 0, also to the reader at the other end of `pipe`; its bytes have landed."""
    request, pages = new_request_id(), pages_of(own, 0)
    reference.fill(MODEL, own.spec, own.pools, pages, num_tokens=TOKENS)
    pipe.send((request, 0))
    before = link.sent_packets
    sender: Sender = own.manager.sender(request, peer="decode-0", deadline_s=deadline_s)
    sender.send({"kv": Pages(np.array(pages.ids, dtype=np.int32))}, tokens=(0, HALF))
    wait_until(lambda: link.sent_packets - before >= HALF * NBYTES_PER_TOKEN // MTU)
    return sender


def send_second_half(own: Rank, sender: Sender) -> None:
    """Send the rest of request 0."""
    sender.send({"kv": Pages(np.array(pages_of(own, 0).ids, dtype=np.int32))}, tokens=(HALF, TOKENS))
    sender.finish()


def check_next_request(own: Rank, pipe: Connection) -> None:
    """Send requests, as a server would, until one succeeds: every byte of it must be right."""
    failures = []
    for number in range(1, ATTEMPTS + 1):
        request = new_request_id()
        pipe.send((request, number))
        sent = begin("prefill", own, request, number).wait(timeout_s=PATIENCE_S)
        received, num_wrong = pipe.recv()
        if sent.ok and received:
            assert num_wrong == 0
            return
        failures.append(str(sent.error))
    raise AssertionError(f"no request succeeded: {failures}")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def serve(pipe: Connection, role: str, engine: str, devices: Sequence[str], kill_at: int | None, pack_below: int = 0) -> None:
    """A rank in a process of its own, which kills itself in the middle of its transfer `kill_at`.

    For each request it answers whether that succeeded, and how many bytes are wrong after that; request 0 may be there in part.
    """
    backend = engine if kill_at is None else inject(engine, BackendFaults(kill_at=kill_at))
    rank = start(role, engine, devices, backend, pack_below=pack_below)
    pipe.send(rank.manager.address)
    rank.manager.add_peer(f"{OTHER[role]}-0", address=pipe.recv())
    rank.manager.wait_ready(f"{OTHER[role]}-0", timeout_s=PATIENCE_S)
    while (order := pipe.recv()) is not None:
        ok = begin(role, rank, *order).wait(timeout_s=PATIENCE_S).ok
        pipe.send((ok, wrong_bytes(rank, order[1:], partial=0) if ok and role == "decode" else 0))
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
def pair(
    role: str, engine: str, link: RdmaLink, *, kill_at: int | None = None, slots: StagingShape | None = None
) -> Iterator[tuple[Rank, Callable[[], Remote]]]:
    """A rank of this process, and a function that starts and connects a peer of it, with `role`, whenever it is called.

    The first peer kills itself in its transfer `kill_at`. With `slots` all pieces are packed, into these of the rank.
    """
    pack_below = PACKED_BELOW if slots is not None else 0
    with ExitStack() as stack:
        backend = inject(engine, BackendFaults(), staging=slots)
        own = start(OTHER[role], engine, names(link, 0), backend, pack_below=pack_below)
        stack.callback(own.manager.close)
        faults = itertools.chain((kill_at,), itertools.repeat(None))

        def start_peer() -> Remote:
            context = multiprocessing.get_context("forkserver")
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, role, engine, names(link, 1), next(faults), pack_below))
            process.start()
            theirs.close()
            remote = Remote(process, ours)
            stack.callback(remote.end)
            address = ours.recv()
            ours.send(own.manager.address)
            own.manager.add_peer(f"{role}-0", address=address)
            own.manager.wait_ready(f"{role}-0", timeout_s=PATIENCE_S)
            return remote

        yield own, start_peer


def proved_or_quarantined(lease: Lease) -> LeaseState:
    """The state of the lease once its rows are released or quarantined."""
    deadline = time.monotonic() + PATIENCE_S
    while lease.state is LeaseState.HELD:
        assert time.monotonic() < deadline, "rows are neither released nor quarantined"
        time.sleep(0.05)
    state, reason = lease.status
    assert (state is LeaseState.QUARANTINED) == bool(reason)
    return state


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
