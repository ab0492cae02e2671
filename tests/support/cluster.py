"""Two instances in one process; transfers are checked against the reference implementation."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.types import Event, Limits
from disagg.requests import Receiver, Sender
from disagg.testing import reference
from disagg.testing.reference import KVModel, KVRank, PageList
from disagg.testing.scene import Side

__all__ = [
    "DEADLINE_S",
    "FAST",
    "FAST_LINKS",
    "Cluster",
    "Rank",
    "Side",
    "clear",
    "cluster",
    "introduce",
    "receive",
    "send",
    "start_side",
    "wait_by_polling",
]

DEADLINE_S = 20.0
FAST = Limits(retry_s=0.05, max_retry_s=0.2, drain_timeout_s=0.5)
FAST_LINKS = ConnectionLimits(hello_retry_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=DEADLINE_S)


@dataclass
class Rank:
    """One rank: its manager, its pools, and its description for the reference."""

    topology: Topology
    spec: KVRank
    pools: reference.Pools
    manager: KVManager


@dataclass
class Cluster:
    """A prefill and a decode instance: their ranks, in order."""

    model: KVModel
    prefill: list[Rank] = field(default_factory=list)
    decode: list[Rank] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def pages(self, rank: Rank, num_tokens: int, first_token: int = 0) -> PageList:
        """Choose random pages for a rank's tokens of a request."""
        count = reference.pages_needed(rank.spec, num_tokens=num_tokens, first_token=first_token)
        return PageList(tuple(self.rng.permutation(rank.spec.num_pages)[:count].tolist()), first_token)

    def group(self, ranks: list[Rank], group: int) -> list[Rank]:
        return [rank for rank in ranks if rank.topology.dp_rank == group]

    def transfer(
        self,
        num_tokens: int,
        *,
        first_token: int = 0,
        chunks: Sequence[int] = (),
        source_group: int = 0,
        destination_group: int = 0,
        send_first: bool = False,
        payload: bytes = b"token",
    ) -> list[Event]:
        """Move one request and check every byte of the destination's pools. Sends are cut at the tokens in `chunks`."""
        sources, destinations = self.group(self.prefill, source_group), self.group(self.decode, destination_group)
        request = new_request_id()
        source_pages = [self.pages(rank, num_tokens) for rank in sources]
        destination_pages = [self.pages(rank, num_tokens, first_token) for rank in destinations]
        for rank, pages in zip(sources, source_pages, strict=True):
            reference.fill(self.model, rank.spec, rank.pools, pages, num_tokens=num_tokens)
        steps: list[Callable[[], list[Receiver] | list[Sender]]] = [
            lambda: [
                receive(rank, request, pages, need=(first_token, num_tokens), group=source_group)
                for rank, pages in zip(destinations, destination_pages, strict=True)
            ],
            lambda: [
                send(rank, request, pages, num_tokens, chunks, payload)
                for rank, pages in zip(sources, source_pages, strict=True)
            ],
        ]
        handles = [handle for step in (reversed(steps) if send_first else steps) for handle in step()]
        events = [handle.wait(timeout_s=DEADLINE_S) for handle in handles]
        for rank, pages in zip(destinations, destination_pages, strict=True):
            need = (first_token, num_tokens)
            wanted = reference.expected(self.model, rank.spec, pages, num_tokens=num_tokens, need=need)
            if all(event.ok for event in events):
                assert reference.first_difference(wanted, rank.pools) is None, rank.topology
        for rank in destinations:
            clear(rank.pools)
        return events


def clear(pools: reference.Pools) -> None:
    """Fill the pools with canary bytes."""
    for tensors in pools.values():
        for tensor in tensors:
            tensor.view(np.uint8)[...] = reference.CANARY


def receive(rank: Rank, request: bytes, pages: PageList, *, need: tuple[int, int], group: int = 0, **more: Any) -> Receiver:
    """Reserve pages for a request from `prefill-0`."""
    rows = {"kv": Pages(np.array(pages.ids, dtype=np.int32), pages.first_token)}
    return rank.manager.receiver(
        request, peer="prefill-0", rows=rows, need={"kv": need}, group=group, **{"deadline_s": DEADLINE_S, **more}
    )


def send(
    rank: Rank,
    request: bytes,
    pages: PageList,
    num_tokens: int,
    chunks: Sequence[int] = (),
    payload: bytes = b"token",
    **more: Any,
) -> Sender:
    """Send a request to `decode-0`, cut at `chunks`."""
    sender = rank.manager.sender(request, peer="decode-0", **{"deadline_s": DEADLINE_S, **more})
    edges = [0, *chunks, num_tokens]
    rows = {"kv": Pages(np.array(pages.ids, dtype=np.int32), pages.first_token)}
    for start, stop in itertools.pairwise(edges):
        sender.send(rows, tokens=(start, stop))
    sender.finish(payload=payload)
    return sender


def wait_by_polling(instances: Cluster, *, by_events: bool) -> list[Event]:
    """Move one request, and return its end on every rank.

    Calls `events` or `poll` in a loop while Python switches threads only where one releases the GIL.
    """
    ranks, interval, request = (*instances.decode, *instances.prefill), sys.getswitchinterval(), new_request_id()
    pages, found = iter([instances.pages(rank, 61) for rank in ranks]), list[Event]()
    for rank in ranks:
        rank.manager.events()
    sys.setswitchinterval(1000.0)
    try:
        handles: list[Receiver | Sender] = [receive(rank, request, next(pages), need=(0, 61)) for rank in instances.decode]
        handles += [send(rank, request, next(pages), 61) for rank in instances.prefill]
        deadline = time.monotonic() + DEADLINE_S
        while len(found) < len(ranks) and time.monotonic() < deadline:
            if by_events:
                events = itertools.chain.from_iterable(rank.manager.events() for rank in ranks)
                found += [event for event in events if event.key.request_id == request]
            else:
                found = [event for handle in handles if (event := handle.poll()) is not None]
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == len(ranks)
    return found


def start_side(model: KVModel, side: Side, name: str, *, num_layers: int, settings: dict[str, Any] | None = None) -> list[Rank]:
    """Start every rank of an instance. `settings` are arguments of `KVManager`."""
    ranks: list[Rank] = []
    leader = None
    for number in range(side.topology.num_ranks):
        topology = side.topology.at(number)
        spec = side.rank(topology, num_layers=num_layers)
        pools = reference.allocate(model, spec)
        defaults: dict[str, Any] = {
            "model": ModelId("toy"),
            "backend": "local",
            "limits": FAST,
            "connection_limits": FAST_LINKS,
        }
        manager = KVManager(
            name=name,
            topology=topology,
            components=[side.component(model, topology, pools)],
            leader=leader,
            **{**defaults, **(settings or {})},
        )
        leader = leader or manager.address
        ranks.append(Rank(topology, spec, pools, manager))
    return ranks


def introduce(prefill: list[Rank], decode: list[Rank]) -> None:
    """Give each instance the address of the other."""
    for rank in prefill:
        rank.manager.add_peer("decode-0", address=decode[0].manager.address)
    for rank in decode:
        rank.manager.add_peer("prefill-0", address=prefill[0].manager.address)


@contextmanager
def cluster(
    prefill: Side,
    decode: Side,
    *,
    num_kv_heads: int = 4,
    dims: tuple[int, int] = (8, 6),
    num_layers: int = 3,
    dtype: str = "uint16",
    settings: dict[str, Any] | None = None,
) -> Iterator[Cluster]:
    """Start two connected instances. At the end, check their health and close them."""
    model = KVModel(num_kv_heads=num_kv_heads, dims=dict(zip("kv", dims, strict=True)), dtype=dtype)
    instances = Cluster(model)
    try:
        instances.prefill = start_side(model, prefill, "prefill-0", num_layers=num_layers, settings=settings)
        instances.decode = start_side(model, decode, "decode-0", num_layers=num_layers, settings=settings)
        introduce(instances.prefill, instances.decode)
        for rank in instances.prefill:
            rank.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        for rank in instances.decode:
            rank.manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        yield instances
        for rank in instances.prefill + instances.decode:
            assert rank.manager.health().ok, rank.manager.health().problem
    finally:
        for rank in instances.prefill + instances.decode:
            rank.manager.close()
