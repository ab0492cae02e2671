"""What each of many live peers gets on GPUs: prefill ranks on GPU 1, each a process, send to one decode rank on GPU 0::

    python -m benchmarks.gpu.peers --peers 1 8 24 --staging-mib 256 1024 --json docs/benchmarks/gpu-peers-2xh200.json

All peers are connected; then each sends one request at a time while the others have none (`in_turn`), and all send requests
back to back (`at_once`). Tokens of 8 heads of 256 bytes go from NHD to HND pages, so that everything is packed. Times are from
`finish` to the receiver's success. Every peer's bytes are compared after each of the two.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import select
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.ranks import HND, NHD, PATIENCE_S, other_process, receive
from disagg import KVManager, ModelId, Pages, Topology, new_request_id
from disagg.state import paged
from harness.conditions import conditions

LAYERS, HEADS, DIM, PAGE = 4, 8, 128, 16
IN_TURN, AT_ONCE = 7, 8
"""Requests of each peer."""


def content(peer: int, tokens: int, device: str) -> Any:
    """What a peer's tokens hold, int16 `[layer, K or V, page, token, head, dim]`."""
    torch = importlib.import_module("torch")
    shape = (LAYERS, 2, tokens // PAGE, PAGE, HEADS, DIM)
    random = torch.Generator(device).manual_seed(peer)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=random)


class Rank:
    def __init__(self, name: str, engine: str, pools: Any, *, axes: str, staging_mib: int) -> None:
        importlib.import_module("torch").cuda.synchronize(pools.device)
        layers = {layer: (pool[0], pool[1]) for layer, pool in enumerate(pools)}
        self.pools = pools
        self.manager = KVManager(
            name=name,
            topology=Topology(),
            components=[paged.gqa(layers, axes=axes, num_kv_heads=HEADS, topology=Topology())],
            model=ModelId("bench"),
            backend=engine,
            admit="any",
            staging_nbytes=staging_mib << 20,
        )


def serve(pipe: Connection, peer: int, engine: str, tokens: int, staging_mib: int) -> None:
    """A prefill rank. Sends the requests it is told, one after the other, and answers with the time of each `finish`."""
    rank = Rank(f"p{peer}", engine, content(peer, tokens, "cuda:1"), axes=NHD, staging_mib=staging_mib)
    pipe.send(rank.manager.address)
    rows = {"kv": Pages(np.arange(tokens // PAGE, dtype=np.int32))}
    while (requests := pipe.recv()) is not None:
        finished = []
        for request in requests:
            sender = rank.manager.sender(request, deadline_s=PATIENCE_S)
            while sender.needed("kv") is None:
                time.sleep(0.0002)
            finished.append(time.monotonic())
            sender.finish(rows)
            assert (ended := sender.wait(timeout_s=PATIENCE_S)).ok, ended.error
            rank.manager.events()
        pipe.send(finished)
    rank.manager.close()


class Hub:
    """The decode rank. Peer number `i` fills the `i`-th part of its pools."""

    def __init__(self, engine: str, tokens: int, staging_mib: int, pipes: list[Connection]) -> None:
        torch = importlib.import_module("torch")
        self.tokens, self.pipes = tokens, pipes
        self.pages = tokens // PAGE
        shape = (LAYERS, 2, self.pages * len(pipes), HEADS, PAGE, DIM)
        pools = torch.zeros(shape, dtype=torch.int16, device="cuda:0")
        self.rank = Rank("hub", engine, pools, axes=HND, staging_mib=staging_mib)
        for peer, pipe in enumerate(pipes):
            self.rank.manager.add_peer(f"p{peer}", address=receive(pipe))
        for peer in range(len(pipes)):
            self.rank.manager.wait_ready(f"p{peer}", timeout_s=PATIENCE_S)

    @property
    def nbytes(self) -> int:
        return self.tokens * LAYERS * 2 * HEADS * DIM * 2

    def reserve(self, peer: int, request: bytes) -> Any:
        rows = {"kv": Pages(np.arange(peer * self.pages, (peer + 1) * self.pages, dtype=np.int32))}
        need = {"kv": (0, self.tokens)}
        return self.rank.manager.receiver(request, peer=f"p{peer}", rows=rows, need=need, deadline_s=PATIENCE_S)

    def holds(self) -> bool:
        """Whether all peers' bytes are there. Zeroes them."""
        found = True
        for peer in range(len(self.pipes)):
            part = self.rank.pools[:, :, peer * self.pages : (peer + 1) * self.pages]
            found &= bool((part.transpose(3, 4) == content(peer, self.tokens, "cuda:1").to("cuda:0")).all())
            part.zero_()
        importlib.import_module("torch").cuda.synchronize(0)
        return found

    def in_turn(self) -> list[float]:
        """Each peer's median milliseconds."""
        took: list[list[float]] = [[] for _ in self.pipes]
        for number in range(IN_TURN + 1):
            for peer, pipe in enumerate(self.pipes):
                request = new_request_id()
                receiver = self.reserve(peer, request)
                pipe.send([request])
                assert (ended := receiver.wait(timeout_s=PATIENCE_S)).ok, ended.error
                stopped = time.monotonic()
                self.rank.manager.events()
                (finished,) = receive(pipe)
                if number > 0:
                    took[peer].append((stopped - finished) * 1e3)
        return [round(statistics.median(each), 3) for each in took]

    def at_once(self) -> list[float]:
        """Each peer's GB/s, from the first `finish` of all to its last success."""
        names = [[new_request_id() for _ in range(AT_ONCE)] for _ in self.pipes]
        for pipe, requests in zip(self.pipes, names, strict=True):
            pipe.send(requests)
        left, stopped = [AT_ONCE] * len(self.pipes), [0.0] * len(self.pipes)
        for peer, requests in enumerate(names):
            self.reserve(peer, requests[0])
        while any(left):
            if not select.select([self.rank.manager.fileno()], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"no request ended within {PATIENCE_S} s")
            for event in self.rank.manager.events():
                assert event.ok, event.error
                peer = int(event.peer.removeprefix("p"))
                left[peer] -= 1
                stopped[peer] = time.monotonic()
                if left[peer]:
                    self.reserve(peer, names[peer][AT_ONCE - left[peer]])
        started = min(receive(pipe)[0] for pipe in self.pipes)
        return [round(AT_ONCE * self.nbytes / (stop - started) / 1e9, 3) for stop in stopped]


def measure(engine: str, num_peers: int, tokens: int, staging_mib: int) -> dict[str, Any]:
    with ExitStack() as stack:
        pipes = [stack.enter_context(other_process(serve, peer, engine, tokens, staging_mib)) for peer in range(num_peers)]
        hub = Hub(engine, tokens, staging_mib, pipes)
        stack.callback(hub.rank.manager.close)
        turns, correct = hub.in_turn(), hub.holds()
        rates = hub.at_once()
        correct &= hub.holds()
        return {
            "engine": engine,
            "peers": num_peers,
            "bytes": hub.nbytes,
            "staging_mib": staging_mib,
            "in_turn_ms": {"fastest": min(turns), "median": statistics.median(turns), "slowest": max(turns)},
            "slowest_to_fastest": round(max(turns) / min(turns), 2),
            "at_once_gbps": {"all": round(min(rates) * num_peers, 2), "least": min(rates), "most": max(rates)},
            "transport": hub.rank.manager.backend.transport,
            "verified": correct,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", type=int, default=[1, 8, 24])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 16384])
    parser.add_argument("--staging-mib", nargs="+", type=int, default=[256])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=["nixl"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = {**conditions(), "what": (__doc__ or "").split("\n", 1)[0], "rows": []}
    cases = itertools.product(arguments.engines, arguments.peers, arguments.tokens, arguments.staging_mib)
    for case in list(cases) * arguments.rounds:
        result["rows"].append(measure(*case))
        print(result["rows"][-1], flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
