"""A prefill and a decode instance of rank processes, and the requests that they are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from disagg import Topology
from harness.ports import free_ports
from tests.integrations.sglang.memory import Model, Request
from tests.integrations.sglang.ranks import HOST, Rank, RankProcess

ROOMS = itertools.count(2**62 + 7)


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, folder: Path, model: Model, prefill: Topology, decode: Topology, *, page_sizes: tuple[int, int],
                 kind: type[RankProcess], **environ: str) -> None:  # fmt: skip
        (self.port,) = free_ports(1)
        self.folder, self.model, self.page_sizes, self.kind = folder, model, page_sizes, kind
        self.environ = {"SGLANG_HOST_IP": HOST, **environ}
        self.ranks: list[Rank] = []
        self.starts = itertools.count()
        self.leaders: dict[str, str] = {}
        self.prefill, self.decode = self.start("prefill", prefill), self.start("decode", decode)

    def start(self, role: str, topology: Topology) -> list[Rank]:
        number = next(self.starts)
        ranks = [
            Rank(role, self.model, topology.at(rank), folder=self.folder / str(number), bootstrap_port=self.port,
                 page_size=self.page_sizes[role == "decode"], environ=self.environ, log=f"{role}-{rank}.log",
                 kind=self.kind)
            for rank in range(topology.num_ranks)
        ]  # fmt: skip
        self.ranks += ranks
        for rank in ranks:
            self.leaders[role] = rank.wait(ready=...)["ready"]
        return ranks

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def request(self, rank: Rank, num_tokens: int, prefix: int) -> Request:
        """The request on a rank, at scattered pages that the requests before it do not have."""
        size = self.page_sizes[rank.role == "decode"]
        random = np.random.default_rng((rank.topology.rank, rank.role == "decode"))
        order = np.roll(random.permutation(4096 // size), -rank.num_pages_given)
        rank.num_pages_given += -(-num_tokens // size)
        rank.num_given += 1
        return Request(num_tokens, order, np.roll(order, 3), rank.num_given % 8, prefix)

    def begin(self, num_tokens: int, *, room: int | None = None, prefix: int = 0, group: int = 0, decode: bool = True,
              prefill: bool = True, **options: Any) -> int:  # fmt: skip
        """Give a request to all ranks of a prefill group and to all of decode. Returns its room."""
        room = next(ROOMS) if room is None else room
        seed = room % 1000
        for rank in self.prefill if prefill else ():
            if rank.topology.dp_rank == group:
                rank.call("prefill", room, self.request(rank, num_tokens, 0), seed, **options)
        for rank in self.decode if decode else ():
            rank.call("decode", room, self.request(rank, num_tokens, prefix), seed, group=group)
        return room

    def expect(self, room: int, *, group: int = 0, status: str = "ok") -> list[dict[str, Any]]:
        """The ends of a request on all ranks, prefill first; every byte on decode is right."""
        ranks = [*(rank for rank in self.prefill if rank.topology.dp_rank == group), *self.decode]
        ends = []
        for rank in ranks:
            end = rank.wait(room=room, status=...)
            while end["status"] == "reserved":
                end = rank.wait(room=room, status=...)
            assert end["status"] == status, (rank.role, rank.topology, end, rank.tail())
            assert end["differences"] == []
            ends.append(end)
        return ends

    def check_idle(self) -> None:
        for rank in self.ranks:
            if rank.process.is_alive():
                assert rank.ask("idle") == {}, (rank.role, rank.topology)


@contextmanager
def running(folder: Path, model: Model, prefill: Topology, decode: Topology, *, page_sizes: tuple[int, int] = (16, 16),
            kind: type[RankProcess] = RankProcess, **environ: str) -> Iterator[Pair]:  # fmt: skip
    pair = Pair.__new__(Pair)
    pair.ranks = []
    try:
        pair.__init__(folder, model, prefill, decode, page_sizes=page_sizes, kind=kind, **environ)  # type: ignore[misc]
        yield pair
        pair.check_idle()
    finally:
        pair.close()
