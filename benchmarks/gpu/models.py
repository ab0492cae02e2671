"""Whole requests of whole models by `nvlink`, and the time of each component, against one plain copy of the bytes::

    python -m benchmarks.gpu.models --json docs/benchmarks/gpu-models-2xh200.json

The prefill ranks are managers of one process with pools on GPU 0, the decode ranks of another process on GPU 1. `request`: from
the first rank's `send` to the last rank's success, in one chunk, after the receivers have reserved; median of 9. `components`:
the engine alone, from `submit_spans` to done, one component of one pair of ranks at a time. `verified`: the same request again
between managers with verify="full", which compute checksums of every byte on both sides, over random content.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.ranks import PATIENCE_S, other_process, plain_s, receive
from disagg import new_request_id
from disagg.backends.abilities import SpanWriter
from disagg.backends.base import TransferStatus
from disagg.commands.cases.memory import GpuMemory
from disagg.commands.cases.places import rows_of, streams
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, items_of, rows_needed
from disagg.commands.rank.rank import RankConfig, ResidentRank
from disagg.core.spans import SpanBatch
from disagg.layout.binding import bind_rows
from disagg.models import load_model
from disagg.protocol.types import PeerRank
from harness.conditions import conditions

ROLES = ("prefill", "decode")
CASES = [
    ("qwen3.5-397b-a17b", 4096, "tp=2,page=64", "tp=1,page=64"),
    ("qwen3.5-397b-a17b", 32768, "tp=2,page=64", "tp=1,page=64"),
    ("deepseek-v3.2", 4096, "tp=1,page=64", "tp=1,page=64"),
    ("deepseek-v3.2", 32768, "tp=1,page=64", "tp=1,page=64"),
]
REPEAT = 9


@dataclass(frozen=True)
class Work:
    """A case, and how the managers verify it."""

    model: str
    tokens: int
    sides: tuple[str, str]
    verify: Literal["off", "full"] = "off"

    @property
    def case(self) -> Case:
        prefill, decode = map(Side.parse, self.sides)
        return Case(backend="nvlink", model=self.model, tokens=self.tokens, prefill=prefill, decode=decode, device="cuda")


class Instance:
    """Every rank of one side, and the request's rows on both sides."""

    def __init__(self, work: Work, role: int) -> None:
        case, self.role, self.peer = work.case, role, ROLES[1 - role]
        self.spec, sides = load_model(work.model), (case.prefill, case.decode)
        self.items = []
        for number, side in enumerate(sides):
            pools = {state.name: rows_needed(state, side, case, prefix=0) for state in self.spec.states}
            other = sides[1 - number]
            self.items.append(items_of(self.spec, side, other, case, name=ROLES[number], pools=pools, prefix=0))
        rows = {state.name: rows_needed(state, sides[role], case, prefix=0) for state in self.spec.states}
        self.ranks: list[ResidentRank] = []
        for number in range(sides[role].num_ranks):
            leader = self.ranks[0].manager.address if self.ranks else None
            config = RankConfig(
                role=ROLES[role], name=ROLES[role], model=work.model, side=sides[role], rank=number, rows=rows, leader=leader,
                backend="nvlink", device=f"cuda:{role}", verify=work.verify,
            )  # fmt: skip
            self.ranks.append(ResidentRank(config))

    def fill(self) -> None:
        for rank in self.ranks:
            assert isinstance(rank.memory, GpuMemory)
            rank.memory._tensor.random_(0, 256)
        importlib.import_module("torch").cuda.synchronize(self.role)

    def introduce(self, address: str) -> None:
        for rank in self.ranks:
            rank.manager.add_peer(self.peer, address=address)
        for rank in self.ranks:
            rank.manager.wait_ready(self.peer, timeout_s=PATIENCE_S)

    def receive(self, request: bytes) -> list[Any]:
        handles = []
        for rank, (item,) in zip(self.ranks, self.items[1], strict=True):
            rows = {state.name: rows_of(state, item) for state in self.spec.states}
            need = {state.name: item.needs[state.name] for state in self.spec.states if state.rows == "pages"}
            handles.append(rank.manager.receiver(request, peer=self.peer, rows=rows, need=need, deadline_s=PATIENCE_S))
        return handles

    def send(self, request: bytes) -> float:
        """Send the request; returns the time of the first rank's `send`."""
        senders = [rank.manager.sender(request, peer=self.peer, deadline_s=PATIENCE_S) for rank in self.ranks]
        first = self.spec.states[0].name
        while any(sender.needed(first) is None for sender in senders):
            time.sleep(0.0005)
        time.sleep(0.003)
        chosen = [[(state, rows_of(state, item)) for state in self.spec.states] for (item,) in self.items[0]]
        started = time.monotonic()
        for sender, rows, (item,) in zip(senders, chosen, self.items[0], strict=True):
            paged = {state.name: found for state, found in rows if streams(state)}
            sender.send(paged, tokens=(0, item.tokens))
            sender.finish({state.name: found for state, found in rows if not streams(state)})
        for sender in senders:
            ended = sender.wait(timeout_s=PATIENCE_S)
            assert ended.ok, ended.error
        return started

    def components(self) -> list[dict[str, Any]]:
        """Bytes, pieces and median microseconds of the engine alone, for each pair of ranks and each component."""
        found = []
        for number, (rank, (ours,)) in enumerate(zip(self.ranks, self.items[0], strict=True)):
            for other, (theirs,) in enumerate(self.items[1]):
                remote = rank.manager._runtime.handshake.rank(PeerRank(self.peer, other))
                backend = rank.manager.backend
                assert remote is not None
                assert remote.prepared is not None
                assert isinstance(backend, SpanWriter)
                for name, plan in remote.plan.components.items():
                    state, need = self.spec.state(name), theirs.needs[name]
                    placed = bind_rows(
                        plan, source=rows_of(state, ours), destination=rows_of(state, theirs), tokens=need, num_tokens=need[1]
                    )
                    parts = placed.span_runs(remote.prepared.first[name])
                    batch = SpanBatch(remote.prepared.spans.shapes, parts)
                    seconds = []
                    for _ in range(REPEAT + 2):
                        started = time.perf_counter()
                        transfer = backend.submit_spans(remote.prepared.spans, batch)
                        while transfer.poll() is TransferStatus.PENDING:
                            pass
                        seconds.append(time.perf_counter() - started)
                        assert transfer.poll() is TransferStatus.DONE, transfer.error
                    us = round(statistics.median(seconds[2:]) * 1e6, 1)
                    pair = f"{number} to {other}"
                    found.append({"ranks": pair, "name": name, "bytes": batch.total_nbytes, "pieces": len(batch), "us": us})
        return found

    def close(self) -> None:
        for rank in self.ranks:
            rank.manager.close()


def prefill(pipe: Connection) -> None:
    """The prefill process: executes commands and answers them."""
    instance: Instance | None = None
    while True:
        match pipe.recv():
            case Work() as work:
                instance = Instance(work, 0)
                instance.fill()
                pipe.send(instance.ranks[0].manager.address)
                instance.introduce(pipe.recv())
                pipe.send("ready")
            case bytes(request) if instance is not None:
                pipe.send(instance.send(request))
            case "components" if instance is not None:
                pipe.send(instance.components())
            case int(nbytes):
                pipe.send(plain_s(nbytes))
            case "close" if instance is not None:
                instance.close()
                instance = None
                pipe.send("closed")
            case None:
                return


def requests(work: Work, pipe: Connection, *, repeat: int) -> tuple[list[float], list[dict[str, Any]], int]:
    """Seconds of each of `repeat` requests, the times of the components, and the number of verified requests."""
    with ExitStack() as stack:
        pipe.send(work)
        instance = Instance(work, 1)
        stack.callback(instance.close)
        address = receive(pipe)
        pipe.send(instance.ranks[0].manager.address)
        instance.introduce(address)
        assert receive(pipe) == "ready"
        seconds = []
        for _ in range(repeat):
            handles = instance.receive(request := new_request_id())
            pipe.send(request)
            events = [handle.wait(timeout_s=PATIENCE_S) for handle in handles]
            ended = time.monotonic()
            assert all(event.ok for event in events), [event.error for event in events]
            seconds.append(ended - receive(pipe))
        parts = []
        if work.verify == "off":
            pipe.send("components")
            parts = receive(pipe)
        verified = sum(rank.manager.stats.verified - rank.manager.stats.mismatches for rank in instance.ranks)
        pipe.send("close")
    receive(pipe)
    return seconds, parts, verified


def measure(work: Work, pipe: Connection) -> dict[str, Any]:
    """The row of one model and length."""
    seconds, parts, _ = requests(work, pipe, repeat=REPEAT + 2)
    checked = Work(work.model, work.tokens, work.sides, verify="full")
    _, _, verified = requests(checked, pipe, repeat=1)
    nbytes = sum(part["bytes"] for part in parts)
    pipe.send(nbytes)
    plain, p50 = receive(pipe), statistics.median(seconds[2:])
    return {
        "model": work.model,
        "tokens": work.tokens,
        "prefill": work.sides[0],
        "decode": work.sides[1],
        "bytes": nbytes,
        "request_us_p50": round(p50 * 1e6, 1),
        "plain_us": round(plain * 1e6, 1),
        "times_plain": round(p50 / plain, 3),
        "components_us": round(sum(part["us"] for part in parts), 1),
        "components": parts,
        "verified": verified == Side.parse(work.sides[1]).num_ranks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about, rows = conditions(), []
    with other_process(prefill) as pipe:
        for model, tokens, *sides in CASES:
            rows.append(measure(Work(model, tokens, (sides[0], sides[1])), pipe))
            print(rows[-1], flush=True)
            if arguments.json:
                what = {**about, "what": __doc__.split("\n", 1)[0]}
                arguments.json.write_text(json.dumps({**what, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
