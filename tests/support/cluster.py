"""Two instances in one process, with every rank's pools checked against the independent reference."""

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
from disagg.layout.placement import Component
from disagg.protocol.peer_state import ConnectionLimits
from disagg.protocol.types import Event, Limits
from disagg.requests import Receiver, Sender
from disagg.state import declare, paged
from disagg.testing import reference
from disagg.testing.reference import Context, KVModel, KVRank, PageList

DEADLINE_S = 20.0
FAST = Limits(retry_s=0.05, max_retry_s=0.2, drain_timeout_s=0.5)
FAST_LINKS = ConnectionLimits(hello_retry_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=5.0)

TOKENS: dict[Context, Callable[[int], declare.Rule]] = {
    Context.WHOLE: lambda _: declare.all_tokens,
    Context.PAGE_BLOCKS: declare.page_blocks,
    Context.PAGES_IN_TURN: declare.pages_in_turn,
    Context.TOKENS_IN_TURN: lambda _: declare.tokens_in_turn,
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One instance: its topology sizes, its pages, its axis order, its stages (layer ids each)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    page: int = 4
    num_pages: int = 32
    axes: str = "page token kv_head dim"
    stages: tuple[tuple[int, ...], ...] | None = None
    context: Context = Context.WHOLE

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp)


@dataclass
class Rank:
    """One rank: its manager, its pools, and what the reference must know of it."""

    topology: Topology
    spec: KVRank
    pools: reference.Pools
    manager: KVManager


@dataclass
class Cluster:
    """Prefill and decode ranks, by instance rank."""

    model: KVModel
    prefill: list[Rank] = field(default_factory=list)
    decode: list[Rank] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def pages(self, rank: Rank, num_tokens: int, first_token: int = 0) -> PageList:
        """Random pages for a rank's tokens of a request."""
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
        """Move one request and check every byte of every pool; `chunks` are the token positions where sends are cut."""
        sources, sinks = self.group(self.prefill, source_group), self.group(self.decode, destination_group)
        request = new_request_id()
        listed = [self.pages(rank, num_tokens) for rank in sources]
        taken = [self.pages(rank, num_tokens, first_token) for rank in sinks]
        for rank, pages in zip(sources, listed, strict=True):
            reference.fill(self.model, rank.spec, rank.pools, pages, num_tokens=num_tokens)
        steps: list[Callable[[], list[Receiver] | list[Sender]]] = [
            lambda: [
                receive(rank, request, pages, need=(first_token, num_tokens), group=source_group)
                for rank, pages in zip(sinks, taken, strict=True)
            ],
            lambda: [
                send(rank, request, pages, num_tokens, chunks, payload) for rank, pages in zip(sources, listed, strict=True)
            ],
        ]
        handles = [handle for step in (reversed(steps) if send_first else steps) for handle in step()]
        events = [handle.wait(timeout_s=DEADLINE_S) for handle in handles]
        for rank, pages in zip(sinks, taken, strict=True):
            need = (first_token, num_tokens)
            wanted = reference.expected(self.model, rank.spec, pages, num_tokens=num_tokens, need=need)
            if all(event.ok for event in events):
                assert reference.first_difference(wanted, rank.pools) is None, rank.topology
        for rank in sinks:
            clear(rank.pools)
        return events


def clear(pools: reference.Pools) -> None:
    """Canary bytes everywhere."""
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


def ask_again_and_again(made: Cluster, *, by_events: bool) -> list[Event]:
    """How a request ends on every rank, asked for by `events` or `poll` in a loop that keeps the interpreter otherwise."""
    ranks, interval, request = (*made.decode, *made.prefill), sys.getswitchinterval(), new_request_id()
    pages, found = iter([made.pages(rank, 61) for rank in ranks]), list[Event]()
    for rank in ranks:
        rank.manager.events()
    sys.setswitchinterval(1000.0)
    try:
        handles: list[Receiver | Sender] = [receive(each, request, next(pages), need=(0, 61)) for each in made.decode]
        handles += [send(each, request, next(pages), 61) for each in made.prefill]
        deadline = time.monotonic() + DEADLINE_S
        while len(found) < len(ranks) and time.monotonic() < deadline:
            if by_events:
                found += itertools.chain.from_iterable(rank.manager.events() for rank in ranks)
            else:
                found = [event for handle in handles if (event := handle.poll()) is not None]
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == len(ranks)
    return found


def component(model: KVModel, side: Side, rank: Topology, pools: reference.Pools) -> Component:
    """The KV component over a rank's pools."""
    tensors = {layer: pair[0] if len(pair) == 1 else pair for layer, pair in pools.items()}
    return paged.gqa(
        tensors,
        axes=side.axes,
        num_kv_heads=model.num_kv_heads,
        topology=rank,
        layers_by_stage=side.stages,
        tokens=TOKENS[side.context](side.page),
    )


def start_side(model: KVModel, side: Side, name: str, *, num_layers: int, settings: dict[str, Any] | None = None) -> list[Rank]:
    """Every rank of an instance, started; `settings` go to `KVManager`."""
    ranks: list[Rank] = []
    leader = None
    for number in range(side.topology.num_ranks):
        topology = side.topology.at(number)
        layers = side.stages[topology.pp_rank] if side.stages else tuple(range(num_layers))
        spec = KVRank(
            layers=layers,
            page_size=side.page,
            num_pages=side.num_pages,
            axes=side.axes,
            tp=side.tp,
            tp_rank=topology.tp_rank,
            cp=side.cp,
            cp_rank=topology.cp_rank,
            context=side.context,
        )
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
            components=[component(model, side, topology, pools)],
            leader=leader,
            **{**defaults, **(settings or {})},
        )
        leader = leader or manager.address
        ranks.append(Rank(topology, spec, pools, manager))
    return ranks


def introduce(prefill: list[Rank], decode: list[Rank]) -> None:
    """Make two instances known to each other."""
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
    """Both instances, ready for each other; closed at the end, with no thread dead."""
    model = KVModel(num_kv_heads=num_kv_heads, dims=dict(zip("kv", dims, strict=True)), dtype=dtype)
    made = Cluster(model)
    try:
        made.prefill = start_side(model, prefill, "prefill-0", num_layers=num_layers, settings=settings)
        made.decode = start_side(model, decode, "decode-0", num_layers=num_layers, settings=settings)
        introduce(made.prefill, made.decode)
        for rank in made.prefill:
            rank.manager.wait_ready("decode-0", timeout_s=DEADLINE_S)
        for rank in made.decode:
            rank.manager.wait_ready("prefill-0", timeout_s=DEADLINE_S)
        yield made
        for rank in made.prefill + made.decode:
            assert rank.manager.health().ok, rank.manager.health().problem
    finally:
        for rank in made.prefill + made.decode:
            rank.manager.close()
