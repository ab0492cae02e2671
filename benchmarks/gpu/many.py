"""Groups of prefill and decode ranks, each on a GPU of its own, with every link between them in use at once::

    python -m benchmarks.gpu.many --json docs/benchmarks/nvlink-many.json

Takes the plans of `PLANS` that fit on the GPUs that it finds. A rank is a process with a manager over `nvlink` and pools of a
model of 32 layers, 8 KV heads of 128, pages of 16 tokens. For each plan, in one run:

* `plain`: every prefill process copies to every GPU that it writes to, one stream each, all at the same time.
* `requests`: `ROUNDS` requests in a row for each pair of instances, `AT_ONCE` in flight, all begun at the same moment. A link's
  rate is its bytes by the time until the last request of its decode rank had ended.
* `products`: bfloat16 products of matrices in a loop on every GPU, in the ranks' own processes: how many a second alone, beside
  the requests, and beside the plain copies.
* `verified`: one request of each pair of instances between managers with verify="full", over random content.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.many_ranks import AT_ONCE, MODEL, Build, Copy, Instance, Move, serve
from benchmarks.gpu.ranks import ask, receive
from disagg import new_request_id
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import planned
from disagg.models import load_model
from harness.conditions import conditions

ROUNDS = 64
"""Requests of each pair of instances."""
PRODUCT_S = 2.0
"""How long products are counted."""


@dataclass(frozen=True)
class Plan:
    """Prefill and decode instances, and which of them serve each other. Ranks take GPUs in this order."""

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    flows: tuple[tuple[int, int], ...] = ((0, 0),)
    back: bool = False
    """A second pair of instances in the opposite direction, on the same GPUs."""

    @property
    def num_gpus(self) -> int:
        return sum(Side.parse(side).num_ranks for side in (*self.prefill, *self.decode))


PLANS = (
    Plan("TP 1 to 1", ("tp=1",), ("tp=1",)),
    Plan("TP 1 to 1, and back", ("tp=1",), ("tp=1",), back=True),
    Plan("TP 2 to 2", ("tp=2",), ("tp=2,page=64",)),
    Plan("TP 2 to PP 2, all pairs", ("tp=2",), ("pp=2",)),
    Plan("TP 2 to two of TP 1", ("tp=2",), ("tp=1", "tp=1"), ((0, 0), (0, 1))),
    Plan("PP 3 to TP 1", ("pp=3,layers=11+11+10",), ("tp=1",)),
    Plan("TP 4 to 4", ("tp=4",), ("tp=4,page=64",)),
    Plan("TP 4 to PP 4, all pairs", ("tp=4",), ("pp=4",)),
    Plan("TP 4 to two of TP 2", ("tp=4",), ("tp=2", "tp=2"), ((0, 0), (0, 1))),
    Plan("TP 4 to TP 1", ("tp=4",), ("tp=1",)),
    Plan("twice TP 2 to TP 1", ("tp=2", "tp=2"), ("tp=1", "tp=1"), ((0, 0), (1, 1))),
)


class Group:
    """The ranks of every instance of a plan, as processes."""

    def __init__(self, plan: Plan, instances: Sequence[Instance], flows: Sequence[tuple[str, str]]) -> None:
        self.plan, self.instances, self.flows = plan, {each.name: each for each in instances}, flows
        self.pipes: dict[tuple[str, int], Connection] = {}

    @contextmanager
    def started(self) -> Iterator[None]:
        context = multiprocessing.get_context("spawn")
        processes = []
        for instance in self.instances.values():
            for rank, gpu in enumerate(instance.gpus):
                self.pipes[instance.name, rank], theirs = context.Pipe()
                processes.append(context.Process(target=serve, args=(theirs, gpu), daemon=True))
                processes[-1].start()
                theirs.close()
        try:
            for pipe in self.pipes.values():
                assert receive(pipe) == "ready"
            yield
        finally:
            for process in processes:
                process.kill()
                process.join()

    def ask_all(self, commands: dict[tuple[str, int], object]) -> dict[tuple[str, int], Any]:
        """The answers of these ranks, which work at the same time."""
        for rank, command in commands.items():
            self.pipes[rank].send(command)
        return {rank: receive(self.pipes[rank]) for rank in commands}

    def build(self, verify: Literal["off", "full"]) -> None:
        """Build the managers and connect them."""
        leaders = {}
        for name, instance in self.instances.items():
            leaders[name] = ask(self.pipes[name, 0], Build(instance, 0, None, verify))
            self.ask_all({(name, r): Build(instance, r, leaders[name], verify) for r in range(1, len(instance.gpus))})
        peers: dict[str, dict[str, str]] = {name: {} for name in self.instances}
        for prefill, decode in self.flows:
            peers[prefill][decode], peers[decode][prefill] = leaders[decode], leaders[prefill]
        self.ask_all({(name, rank): ("introduce", peers[name]) for name, rank in self.pipes})

    def everywhere(self, command: object) -> dict[tuple[str, int], Any]:
        return self.ask_all(dict.fromkeys(self.pipes, command))

    def links(self) -> dict[tuple[tuple[str, int], tuple[str, int]], int]:
        """The bytes of one request on each link, by prefill and decode rank."""
        about, found, spec = self.everywhere("describe"), {}, load_model(MODEL)
        for names in self.flows:
            ends = [self.instances[name] for name in names]
            ranks = [[about[end.name, rank] for rank in range(len(end.gpus))] for end in ends]
            sent, received = ([end.items(rank)[:1] for rank in range(len(end.gpus))] for end in ends)
            for (ours, theirs), nbytes in planned(spec, *ranks, sent=sent, received=received).nbytes.items():
                found[(names[0], ours), (names[1], theirs)] = nbytes
        return found

    def move(self, rounds: int) -> dict[tuple[str, int], float]:
        """Seconds until the last request of each decode rank had ended, of `rounds` requests between every two instances."""
        at = time.monotonic() + 0.5
        requests: dict[str, dict[str, tuple[bytes, ...]]] = {name: {} for name in self.instances}
        for prefill, decode in self.flows:
            named = tuple(new_request_id() for _ in range(rounds))
            requests[prefill][decode], requests[decode][prefill] = named, named
        ended = self.ask_all({(name, rank): Move(requests[name], at) for name, rank in self.pipes})
        return {rank: each - at for rank, each in ended.items() if self.instances[rank[0]].role == "decode"}

    def copy(self, times: int) -> dict[tuple[tuple[str, int], tuple[str, int]], float]:
        """Seconds of plain copies of the same bytes on every link at once."""
        links, at = self.links(), time.monotonic() + 1.5
        commands: dict[tuple[str, int], dict[int, int]] = {}
        for (source, (name, rank)), nbytes in links.items():
            commands.setdefault(source, {})[self.instances[name].gpus[rank]] = nbytes
        took = self.ask_all({source: Copy(nbytes, times, at) for source, nbytes in commands.items()})
        return {(source, to): took[source][self.instances[to[0]].gpus[to[1]]] for source, to in links}


def groups(plan: Plan) -> Group:
    """The instances of a plan on their GPUs."""
    instances: list[Instance] = []
    flows: list[tuple[str, str]] = []
    gpu = 0
    places: dict[tuple[str, int], tuple[int, ...]] = {}
    for role, sides in (("prefill", plan.prefill), ("decode", plan.decode)):
        for number, side in enumerate(sides):
            places[role, number] = tuple(range(gpu, gpu := gpu + Side.parse(side).num_ranks))
    for ours, theirs in plan.flows:
        both = Side.parse(plan.prefill[ours]), Side.parse(plan.decode[theirs])
        ends = ("prefill", ours), ("decode", theirs)
        for suffix, turned in (("", ends), ("-back", ends[::-1]))[: 1 + plan.back]:
            names = f"prefill-{ours}{suffix}", f"decode-{theirs}{suffix}"
            flows.append(names)
            for name, role, place in zip(names, ("prefill", "decode"), turned, strict=True):
                if not any(instance.name == name for instance in instances):
                    instances.append(Instance(name, role, places[place], both))  # type: ignore[arg-type]
    return Group(plan, instances, flows)


def measure(plan: Plan) -> dict[str, Any]:
    """The row of one plan."""
    group = groups(plan)
    with group.started():
        group.build("full")
        group.move(1)
        verified = sum(group.everywhere("verified").values())
        decoding = sum(len(each.gpus) for each in group.instances.values() if each.role == "decode")
        group.everywhere("close")
        group.build("off")
        links = group.links()
        group.move(AT_ONCE)
        plain, requests = [], []
        for _ in range(3):
            plain.append(group.copy(ROUNDS))
            requests.append(group.move(ROUNDS))
        rows = []
        for (source, to), nbytes in links.items():
            copies = [nbytes * ROUNDS / each[source, to] / 1e9 for each in plain]
            ours = [nbytes * ROUNDS / each[to] / 1e9 for each in requests]
            gpus = group.instances[source[0]].gpus[source[1]], group.instances[to[0]].gpus[to[1]]
            rates = statistics.median(copies), statistics.median(ours)
            row = {"from": gpus[0], "to": gpus[1], "plain_gbps": round(rates[0], 1), "gbps": round(rates[1], 1)}
            rows.append({**row, "ratio": round(rates[1] / rates[0], 3)})
        return {
            "plan": plan.name,
            "gpus": plan.num_gpus,
            "links": rows,
            "plain_gbps": round(sum(row["plain_gbps"] for row in rows), 1),
            "gbps": round(sum(row["gbps"] for row in rows), 1),
            "lowest_ratio": min(row["ratio"] for row in rows),
            "products": products(group),
            "verified": verified == decoding,
        }


def products(group: Group) -> list[dict[str, Any]]:
    """Products a second of every rank: alone, beside requests, and beside plain copies, which go on for as long."""
    group.everywhere(("products", True))
    time.sleep(1.0)
    found: dict[str, dict[tuple[str, int], float]] = {}

    def count(what: str, began: float) -> None:
        found[what] = group.everywhere(("rate", began, time.monotonic()))

    began = time.monotonic()
    time.sleep(PRODUCT_S)
    count("alone", began)
    took = max(group.move(ROUNDS).values())
    more = max(1, int(PRODUCT_S / took))
    began = time.monotonic() + 0.5
    group.move(ROUNDS * more)
    count("beside requests", began)
    took = max(group.copy(ROUNDS).values())
    began = time.monotonic() + 1.5
    group.copy(int(ROUNDS * PRODUCT_S / took))
    count("beside plain copies", began)
    group.everywhere(("products", False))
    rows = []
    for name, rank in group.pipes:
        each = {what: found[what][name, rank] for what in found}
        rows.append(
            {
                "gpu": group.instances[name].gpus[rank],
                "role": group.instances[name].role,
                "alone_per_s": round(each["alone"], 1),
                "beside_requests": round(each["beside requests"] / each["alone"], 3),
                "beside_plain_copies": round(each["beside plain copies"] / each["alone"], 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plans", nargs="+", default=[], metavar="NAME", help="default: all that fit")
    arguments = parser.parse_args()
    num_gpus = importlib.import_module("torch").cuda.device_count()
    about, rows = conditions(), []
    for plan in PLANS:
        if plan.num_gpus <= num_gpus and (plan.name in arguments.plans or not arguments.plans):
            rows.append(measure(plan))
            row = rows[-1]
            print(f"{row['plan']}: {row['gbps']} of {row['plain_gbps']} GB/s, lowest {row['lowest_ratio']}", flush=True)
            for each in (*row["links"], *row["products"]):
                print("   ", each, flush=True)
            if arguments.json:
                text = json.dumps({**about, "what": __doc__.split("\n", 1)[0], "rows": rows}, indent=1)
                arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
