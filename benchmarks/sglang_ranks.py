"""This library's transfer backend for SGLang beside SGLang's own NIXL backend: the same rank processes, requests and machine.

    $(scripts/sglang_env.sh) -m benchmarks.sglang_ranks --json docs/benchmarks/sglang-ranks.json

Each rank is a process with SGLang's classes over host memory, driven as its scheduler does, without a model
(`tests/integrations/sglang/ranks.py`). Both backends have their ranks running, and take turns. A time is from prefill's first
`send` until the last rank of decode has the request; every byte is compared. `first_ms` is the time until all ranks of prefill
know where decode wants its first request: the ranks meet meanwhile.

SGLang's backend takes all pools for a device's. NIXL is told that they are host memory; nothing else is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import nixl._api
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

from disagg import Topology
from disagg.state.declare import Block
from harness.conditions import conditions
from tests.integrations.sglang.memory import Model
from tests.integrations.sglang.pair import Pair, running
from tests.integrations.sglang.ranks import RankProcess

NUM_TOKENS, NUM_WARM = 1024, 2
KV = Model(layers=tuple(range(8)), heads=8, dims=(64, 64))  # 33.55 MB for 1,024 tokens
GDN = replace(
    KV, layers=tuple(range(8)), slot_layers=tuple(range(8, 14)), conv_blocks=(Block(8, 32), Block(8, 32), Block(8, 64)),
    temporal=(8, 64, 32),
)  # fmt: skip


class Case(NamedTuple):
    """A model and the tensor-parallel sizes of both sides."""

    model: Model
    prefill: int
    decode: int


CASES = {
    "TP 1 to 1": Case(KV, 1, 1),
    "TP 2 to 2": Case(KV, 2, 2),
    "TP 2 to 1": Case(KV, 2, 1),
    "TP 1 to 2": Case(KV, 1, 2),
    "TP 1 to 1 with GDN": Case(GDN, 1, 1),
    "TP 2 to 1 with GDN": Case(GDN, 2, 1),
    "TP 1 to 2 with GDN": Case(GDN, 1, 2),
}


class HostAgent(nixl._api.nixl_agent):  # type: ignore[misc]
    """NIXL's agent, which is given host memory in place of a device's."""

    def register_memory(self, reg_list: Any, mem_type: Any = None, *given: Any, **named: Any) -> Any:
        return super().register_memory(reg_list, _host(mem_type), *given, **named)

    def get_xfer_descs(self, descs: Any, mem_type: Any = None) -> Any:
        return super().get_xfer_descs(descs, _host(mem_type))

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, mem_type: Any = None, *given: Any, **named: Any) -> Any:
        return super().prep_xfer_dlist(agent_name, xfer_list, _host(mem_type), *given, **named)


def _host(mem_type: Any) -> Any:
    return "DRAM" if mem_type == "VRAM" else mem_type


class NixlRank(RankProcess):
    """A rank of SGLang's own backend."""

    sender, receiver = conn.NixlKVSender, conn.NixlKVReceiver

    def build(self, mode: DisaggregationMode) -> Any:
        nixl._api.nixl_agent = HostAgent
        conn.get_device = lambda: SimpleNamespace(device="cpu")
        return conn.NixlKVManager(self.kv_args(), mode, SimpleNamespace(), is_mla_backend=False)

    def kv_args(self) -> SimpleNamespace:
        """What SGLang's backend reads besides."""
        args, model, facts = super().kv_args(), self.memory.model, self.memory.facts()
        blocks = [[b.size for b in slot.blocks] if slot.role == "conv" else None for slot in facts.slots]
        has_state = bool(facts.slots)
        heads = model.heads or 0
        return SimpleNamespace(
            **{
                **vars(args),
                "kv_layer_ids": [*model.layers, *model.layers],
                "kv_head_num": heads // self.topology.tp,
                "total_kv_head_num": heads,
                "prefill_start_layer": 0,
                "prefill_end_layer": None,
                "mla_compression_ratios": None,
                "is_hybrid_mla_backend": False,
                "state_layer_ids": [[slot.layer for slot in facts.slots]] * has_state,
                "state_slice_outer_counts": [[1 for _ in facts.slots]] * has_state,
                "state_conv_shard_groups": [blocks] * has_state,
            }
        )

    def idle(self) -> dict[str, Any]:
        return {}


BACKENDS: dict[str, type[RankProcess]] = {"disagg": RankProcess, "nixl": NixlRank}


def request_ms(pair: Pair) -> tuple[float, float]:
    """One request in milliseconds: from prefill's first `send` to its end, and from the beginning until decode has reserved."""
    begun_s = time.monotonic()
    room = pair.begin(NUM_TOKENS, held=True)
    reserved_s = max(rank.wait(room=room, status="reserved")["reserved_s"] for rank in pair.prefill)
    for rank in pair.prefill:
        rank.call("go", room)
    ends = pair.expect(room)
    sent_s = min(end["sent_s"] for end in ends if end["sent_s"])
    ended_s = max(end["ended_s"] for end in ends[len(pair.prefill) :])
    return (ended_s - sent_s) * 1e3, (reserved_s - begun_s) * 1e3


def measure(case: Case, folder: Path, *, num_requests: int) -> dict[str, dict[str, list[float]]]:
    """The times of both backends, by name."""
    found: dict[str, dict[str, list[float]]] = {name: {"request_ms": [], "first_ms": []} for name in BACKENDS}
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(
                running(folder / name, case.model, Topology(tp=case.prefill), Topology(tp=case.decode), kind=kind)
            )
            for name, kind in BACKENDS.items()
        }
        for name, pair in pairs.items():
            found[name]["first_ms"].append(request_ms(pair)[1])
        for number in range(NUM_WARM + num_requests):
            for name, pair in pairs.items():
                took_ms, _ = request_ms(pair)
                if number >= NUM_WARM:
                    found[name]["request_ms"].append(took_ms)
    return found


def nbytes(model: Model) -> int:
    """The bytes of one request."""
    tokens = len(model.layers) * sum(model.dims) * (model.heads or 1) * NUM_TOKENS
    heads, rows, columns = model.temporal
    slots = len(model.slot_layers) * (3 * sum(block.size for block in model.conv_blocks) + heads * rows * columns)
    return 4 * (tokens + slots)


def rows(names: list[str], *, num_rounds: int, num_requests: int) -> list[dict[str, Any]]:
    """One row for each case: medians of all rounds, and the load of the machine when it ended."""
    times: dict[str, list[dict[str, dict[str, list[float]]]]] = {name: [] for name in names}
    loads: dict[str, float] = {}
    for number in range(num_rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(measure(CASES[name], Path(folder), num_requests=num_requests))
            loads[name] = round(os.getloadavg()[0], 1)
            print(number, name, {key: round(statistics.median(each["request_ms"]), 2) for key, each in times[name][-1].items()},
                  flush=True)  # fmt: skip
    found = []
    for name in names:
        row: dict[str, Any] = {"case": name, "nbytes": nbytes(CASES[name].model)}
        for backend in BACKENDS:
            for key in ("request_ms", "first_ms"):
                values = [value for each in times[name] for value in each[backend][key]]
                row[f"{backend}_{key}"] = round(statistics.median(values), 2)
            row[f"{backend}_rounds_ms"] = [round(statistics.median(each[backend]["request_ms"]), 2) for each in times[name]]
        row["load"] = loads[name]
        row["times_faster"] = round(row["nixl_request_ms"] / row["disagg_request_ms"], 1)
        found.append(row)
    return found


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="how often each case is run")
    parser.add_argument("--requests", type=int, default=10, metavar="N", help="requests of each backend in a round")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    given, about = parser.parse_args(), conditions()
    found = rows(given.cases or list(CASES), num_rounds=given.rounds, num_requests=given.requests)
    for row in found:
        print(json.dumps(row))
    if given.json is not None:
        given.json.write_text(json.dumps({**about, "requests": given.rounds * given.requests, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
