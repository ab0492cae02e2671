"""One rank of a server that uses disagg. Copy from this file.

A rank owns a shard of the pools. It declares them to disagg and builds a `KVManager` over them. For each request it passes
the rows in each pool. It does not know the layout, the page size or the ranks of the other side.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.manager import KVManager
from disagg.requests import Receiver
from disagg.state.declare import Block, Inner, Role, State, blocks_by_tp, whole

from .architectures import describe
from .components import TOKENS, TensorSpec, TokenRange
from .content import NUMPY_DTYPES, CacheContent
from .shards import Pool, Shard, Sharding, cut, stages

TIMEOUT_S = 30.0


# --- declaration of the pools -----------------------------------------------------------------------------------------


def declare(pool: Pool, *, topology: Topology, layers_by_stage: Sequence[Sequence[int]], dtype: str) -> Component:
    """The component of a pool: every axis of every tensor by name, in memory order, and each rank's share of it.

    Without such a table, use the usual kinds in `disagg.state` (`paged.gqa`, `mamba.recurrent`, ...), or let `disagg.models`
    derive them from a model's `config.json`.
    """
    spec = pool.component
    roles = [
        Role(
            name=tensor.role,
            axes=" ".join(pool.axes[tensor.role]),
            inner={
                axis: _held(tensor, axis, size) for axis, size in zip(tensor.axes, tensor.sizes, strict=True) if size != TOKENS
            },
            granule=spec.granule if "token" in tensor.axes else 1,
            dtype=str(NUMPY_DTYPES[tensor.dtype or dtype]),  # a stage may have no tensor of the component
        )
        for tensor in spec.tensors
    ]
    state = State(name=spec.name, rows="pages" if spec.paged else "slot", layers=spec.layers, roles=tuple(roles))
    tensors = {role.name: {layer: by_role[role.name] for layer, by_role in pool.tensors.items()} for role in roles}
    return state.component(tensors, topology=topology, layers_by_stage=layers_by_stage)


def _held(tensor: TensorSpec, axis: str, size: int) -> Inner:
    """Each rank's share of an axis: the whole axis, or a part of every block."""
    if axis != tensor.split:
        return whole(size)
    return blocks_by_tp(Block(block.num_units, block.unit_size, block.groups) for block in tensor.blocks)


# --- free rows ----------------------------------------------------------------------------------------------------------


class FreeList:
    """Ids of the free pages or slots of a pool, in random order.

    The lock is needed because leases return rows in a thread of the manager.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self._lock = threading.Lock()
        self._ids = list(range(num_rows))
        random.Random(seed).shuffle(self._ids)

    def take(self, count: int) -> list[int]:
        with self._lock:
            if count > len(self._ids):
                raise MemoryError(f"expected {count} free rows, found {len(self._ids)}")
            taken, self._ids = self._ids[:count], self._ids[count:]
            return taken

    def give_back(self, ids: Sequence[int]) -> None:
        with self._lock:
            self._ids.extend(ids)


# --- the rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One request of this rank: its tokens `[start, stop)` and its rows in each pool."""

    tokens: Mapping[str, TokenRange]
    rows: Mapping[str, Rows]


class Rank:
    """One rank of the side `role` (`prefill` or `decode`) that serves one model."""

    def __init__(
        self, *, role: str, name: str, sharding: Sharding, rank: int, dtype: str, backend: str, leader: str | None
    ) -> None:
        self._topology = sharding.topology(rank)
        self._pools = {
            component.name: Pool.allocate(name, component, sharding=sharding, topology=self._topology, dtype=dtype)
            for component in describe(name)
        }
        self._free = {
            pool.component.name: FreeList(sharding.num_pages if pool.component.paged else sharding.num_slots, seed=rank)
            for pool in self._pools.values()
        }
        self._receivers: dict[bytes, tuple[Receiver, Request]] = {}
        self._manager = KVManager(
            name=role,
            topology=self._topology,
            components=[
                declare(pool, topology=self._topology, layers_by_stage=stages(name, pool.component, sharding.pp), dtype=dtype)
                for pool in self._pools.values()
            ],
            model=ModelId(name, revision=dtype),
            backend=backend,
            leader=leader,
        )

    def address(self) -> str:
        """The address of this rank. Peers need only that of rank 0, the leader."""
        return self._manager.address

    def connect(self, peer: str, address: str) -> None:
        """Connect to the other side, and wait until all its ranks have agreed on the plan."""
        self._manager.add_peer(peer, address=address)
        self._manager.wait_ready(peer, timeout_s=TIMEOUT_S)

    def send(self, request_id: bytes, *, content: CacheContent, first_token: int) -> int:
        """Prefill: compute a request's state in two chunks and send each when it is computed. Returns the bytes moved."""
        request = self._begin(content.num_tokens)
        shard = cut(content, self._topology)  # in place of the model: the state that this rank would compute
        before = self._manager.stats.nbytes
        sender = self._manager.sender(request_id, peer="decode", deadline_s=TIMEOUT_S)
        streamed = {name: rows for name, rows in request.rows.items() if self._pools[name].streams}
        half = content.num_tokens // 2
        for start, stop in ((0, half), (half, content.num_tokens)):
            for name, rows in streamed.items():
                self._pools[name].write(rows, shard[name], (start, stop))
            rows_of_chunk = {name: self._pools[name].rows_from(rows, start) for name, rows in streamed.items()}
            sender.send(rows_of_chunk, tokens=(start, stop))
        final = {name: rows for name, rows in request.rows.items() if name not in streamed}
        for name, rows in final.items():
            self._pools[name].write(rows, shard[name], request.tokens[name])
        sender.finish(final, payload=first_token.to_bytes(4, "little"))
        event = sender.wait(timeout_s=TIMEOUT_S)
        event.lease.on_release(lambda: self._give_back(request))  # free once no transfer can touch the pages
        if event.error is not None:
            raise event.error
        return self._manager.stats.nbytes - before

    def reserve(self, request_id: bytes, num_tokens: int) -> None:
        """Decode: allocate rows for a request and reserve them. Returns at once."""
        request = self._begin(num_tokens)
        need = {name: tokens for name, tokens in request.tokens.items() if self._pools[name].component.paged}
        receiver = self._manager.receiver(request_id, peer="prefill", rows=request.rows, need=need, deadline_s=TIMEOUT_S)
        self._receivers[request_id] = receiver, request

    def arrived(self, request_id: bytes) -> int:
        """Wait until all state of a request is in this rank's pools; return its first token. Servers use `manager.events()`."""
        receiver, _ = self._receivers[request_id]
        event = receiver.wait(timeout_s=TIMEOUT_S)
        if event.error is not None:
            raise event.error
        return int.from_bytes(event.payload, "little")

    def read(self, request_id: bytes) -> Shard:
        """A copy of the received state."""
        _, request = self._receivers[request_id]
        return {name: self._pools[name].read(rows, request.tokens[name]) for name, rows in request.rows.items()}

    def corrupt(self, request_id: bytes, component: str) -> None:
        """Flip one bit of the received state, the same one on all ranks that hold it. A second call restores it."""
        _, request = self._receivers[request_id]
        rows, tokens = request.rows[component], request.tokens[component]
        self._pools[component].flip_bit(rows, tokens, topology=self._topology)

    def end(self, request_id: bytes) -> None:
        """End a request. Raises `RuntimeError` if a byte outside its rows was written."""
        receiver, request = self._receivers.pop(request_id)
        for name, rows in request.rows.items():
            self._pools[name].wipe(rows, request.tokens[name])
            if not self._pools[name].is_blank():
                raise RuntimeError(f"component {name!r}: expected no bytes outside the request's rows, found some")
        receiver.wait().lease.on_release(lambda: self._give_back(request))

    def close(self) -> None:
        self._manager.close()

    def _begin(self, num_tokens: int) -> Request:
        """Allocate rows for a request: pages for the tokens that each component holds, or one slot."""
        tokens = {name: pool.component.tokens(num_tokens) for name, pool in self._pools.items()}
        rows: dict[str, Rows] = {}
        for name, (start, stop) in tokens.items():
            pool = self._pools[name]
            if pool.component.paged:
                count = -(-stop // pool.page_size) - start // pool.page_size
                rows[name] = Pages(np.array(self._free[name].take(count), np.int32), first_token=start)
            else:
                rows[name] = Slot(self._free[name].take(1)[0])
        return Request(tokens, rows)

    def _give_back(self, request: Request) -> None:
        for name, rows in request.rows.items():
            self._free[name].give_back([rows.id] if isinstance(rows, Slot) else rows.ids.tolist())
