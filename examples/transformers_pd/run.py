"""Prefill in one set of processes, decode in another, on real model code, through disagg and a real transfer engine.

    python examples/transformers_pd/run.py [--backend nixl|mooncake|all] [--architectures llama qwen3 ...]

Each architecture runs undivided, and as prefill and decode on ranks that divide it differently. The exit status is 0 if
greedy tokens and logits of both runs are equal bit for bit, and if every flipped bit of the state changes the logits.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

if not __package__:  # started as a script: its folder is the package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "transformers_pd"

from disagg.manager import new_request_id

from . import workers
from .architectures import ARCHITECTURES, describe
from .content import CacheContent, Generation
from .driver import Driver
from .rank import Rank
from .shards import Sharding
from .workers import Worker, WorkerFailed, gather

DTYPE = "bfloat16"
PROMPT = tuple(random.Random(6).choices(range(256), k=53))
NUM_NEW_TOKENS = 24
BACKENDS = ("nixl", "mooncake")


@dataclass(frozen=True)
class Pair:
    """How the two sides divide a model."""

    prefill: Sharding
    decode: Sharding


def _pair(prefill: tuple[int, int], decode: tuple[int, int]) -> Pair:
    """Two sides with these (TP, PP) sizes, and different page sizes, pools and axis orders."""
    return Pair(
        Sharding(tp=prefill[0], pp=prefill[1], page_size=4, num_pages=48, order="nhd"),
        Sharding(tp=decode[0], pp=decode[1], page_size=16, num_pages=20, order="hnd"),
    )


PAIRS: Mapping[str, Pair] = {
    "llama": _pair((2, 1), (3, 1)),  # 4 KV heads on three ranks: 1, 1 and 2
    "qwen3": _pair((3, 1), (2, 2)),  # 5 layers in two unequal stages
    "qwen3-next": _pair((2, 1), (4, 1)),  # 2 KV heads on four ranks: replicas; the recurrent layers have 4 and 8
    "qwen3.5-moe": _pair((2, 2), (4, 1)),
    "gpt-oss": _pair((2, 2), (3, 1)),
    "deepseek-v3": _pair((2, 1), (1, 3)),  # latents are the same on both prefill ranks
    "deepseek-v3.2": _pair((2, 2), (3, 1)),
    "deepseek-v4": _pair((2, 2), (1, 4)),  # every decode stage has a different mixture of layers
    "kimi-linear": _pair((2, 2), (4, 1)),  # the first stage has no latent layer
    "falcon-h1": _pair((2, 1), (3, 1)),  # one Mamba group, on every rank
    "nemotron-h": _pair((2, 2), (3, 1)),  # 8 heads and 4 groups on three ranks: each has all groups
    "granite-hybrid": _pair((2, 1), (2, 2)),  # the first decode stage has no attention layer
    "bamba": _pair((2, 1), (4, 1)),  # two Mamba groups on four ranks
    "jamba": _pair((2, 2), (4, 1)),  # the second stage has no attention layer
    "minimax": _pair((2, 2), (3, 1)),
    "minimax-m3": _pair((2, 1), (1, 4)),  # the first decode stage has no index keys
}
SHOWN = ("llama", "qwen3", "qwen3-next", "gpt-oss")
"""The default architectures."""


@dataclass(frozen=True)
class Prompted:
    """The state to move and the expected result; the same for every engine."""

    name: str
    first_token: int
    content: CacheContent
    expected: Generation


@dataclass(frozen=True)
class Outcome:
    """The result of one divided run. `corrupted` has the result with one bit flipped, by component."""

    nbytes: int
    expected: Generation
    found: Generation
    corrupted: Mapping[str, Generation]

    @property
    def tokens_equal(self) -> bool:
        return self.found.tokens == self.expected.tokens

    @property
    def logits_equal(self) -> bool:
        return self.found.logits.tobytes() == self.expected.logits.tobytes()

    @property
    def undetected(self) -> list[str]:
        """Components in which a wrong bit changes nothing, so that equal results prove nothing."""
        return [name for name, run in self.corrupted.items() if run.logits.tobytes() == self.expected.logits.tobytes()]

    @property
    def ok(self) -> bool:
        return self.tokens_equal and self.logits_equal and not self.undetected

    def __str__(self) -> str:
        verdict = {True: "equal", False: "DIFFER"}
        shown = " ".join(map(str, self.found.tokens[:6]))
        control = (
            f"NOT DETECTED in {', '.join(self.undetected)}" if self.undetected else f"detected in {', '.join(self.corrupted)}"
        )
        return (
            f"{self.nbytes:,} bytes, {len(self.found.tokens)} tokens {verdict[self.tokens_equal]} ({shown} ...), "
            f"logits {verdict[self.logits_equal]}, one flipped bit {control}"
        )


def start_ranks(crew: Mapping[str, Worker], name: str, *, pair: Pair, backend: str) -> tuple[list[Worker], list[Worker]]:
    """Start the ranks of both sides and connect them."""
    shardings = {"prefill": pair.prefill, "decode": pair.decode}
    ranks = {role: [crew[f"{role} rank {rank}"] for rank in range(sharding.num_ranks)] for role, sharding in shardings.items()}
    leaders: dict[str, str | None] = dict.fromkeys(shardings)
    for chosen in (slice(0, 1), slice(1, None)):  # rank 0 first: the others need their leader's address
        for role, sharding in shardings.items():
            for worker in ranks[role][chosen]:
                settings = {"role": role, "name": name, "sharding": sharding, "dtype": DTYPE, "backend": backend}
                worker.build(Rank, **settings, rank=ranks[role].index(worker), leader=leaders[role])
        gather([worker for role in shardings for worker in ranks[role][chosen]])
        leaders = {role: call_all(ranks[role][:1], "address")[0] for role in shardings}
    for role, peer in (("prefill", "decode"), ("decode", "prefill")):
        for worker in ranks[role]:
            worker.call("connect", peer, leaders[peer])
    gather([*ranks["prefill"], *ranks["decode"]])
    return ranks["prefill"], ranks["decode"]


def call_all(ranks: Sequence[Worker], method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Make the same call on all ranks at the same time, and return the results."""
    for worker in ranks:
        worker.call(method, *args, **kwargs)
    return gather(ranks)


def prompt(crew: Mapping[str, Worker], name: str) -> Prompted:
    """Run prefill and the undivided run in the prefill driver."""
    driver = crew["prefill driver"]
    driver.call("prefill", name, PROMPT)
    driver.call("undivided", name, PROMPT, num_new_tokens=NUM_NEW_TOKENS)
    (first_token, content), expected = gather([driver])[0], gather([driver])[0]
    return Prompted(name, first_token, content, expected)


def move_and_decode(crew: Mapping[str, Worker], given: Prompted, *, pair: Pair, backend: str) -> Outcome:
    """Move the state from prefill ranks to decode ranks with an engine, and decode in the decode driver.

    Then decode again for each component, with one bit of it flipped.
    """
    prefill, decode = start_ranks(crew, given.name, pair=pair, backend=backend)
    request_id = new_request_id()
    num_tokens = given.content.num_tokens
    call_all(decode, "reserve", request_id, num_tokens)
    sent = call_all(prefill, "send", request_id, content=given.content, first_token=given.first_token)
    (first_token,) = set(call_all(decode, "arrived", request_id))  # every decode rank received the same
    task = {"sharding": pair.decode, "num_tokens": num_tokens, "first_token": first_token, "num_new_tokens": NUM_NEW_TOKENS}

    def decode_received() -> Generation:
        """Decode from the state in the decode ranks' pools."""
        shards = call_all(decode, "read", request_id)
        (result,) = call_all([crew["decode driver"]], "decode", given.name, shards=shards, **task)
        return cast("Generation", result)

    found, corrupted = decode_received(), {}
    for component in describe(given.name):
        call_all(decode, "corrupt", request_id, component.name)
        corrupted[component.name] = decode_received()
        call_all(decode, "corrupt", request_id, component.name)
    call_all(decode, "end", request_id)
    return Outcome(sum(sent), given.expected, found, corrupted)


def run(names: Sequence[str], backends: Sequence[str]) -> bool:
    """Run every architecture over every engine, and print one line each. Returns whether all results were right."""
    pairs = {name: PAIRS[name] for name in names}
    processes = ["prefill driver", "decode driver"]
    processes += [f"prefill rank {i}" for i in range(max(pair.prefill.num_ranks for pair in pairs.values()))]
    processes += [f"decode rank {i}" for i in range(max(pair.decode.num_ranks for pair in pairs.values()))]
    ok = True
    with workers.start(processes) as crew:
        drivers = [crew["prefill driver"], crew["decode driver"]]
        for driver in drivers:
            driver.build(Driver, dtype=DTYPE)
        gather(drivers)
        for name, pair in pairs.items():
            given = prompt(crew, name)
            for backend in backends:
                outcome = move_and_decode(crew, given, pair=pair, backend=backend)
                ok = ok and outcome.ok
                print(f"{name:14} {backend:8} {pair.prefill} -> {pair.decode}: {outcome}", flush=True)
    return ok


def main() -> int:
    """Return the exit status: 0 if all runs are equal, 1 if not, 2 if a process failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[*BACKENDS, "all"], default="all", help="engine; default: all")
    parser.add_argument(
        "--architectures", nargs="+", choices=ARCHITECTURES, default=SHOWN, metavar="NAME", help=", ".join(ARCHITECTURES)
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        ok = run(arguments.architectures, BACKENDS if arguments.backend == "all" else (arguments.backend,))
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'all equal' if ok else 'NOT ALL EQUAL'}, {time.monotonic() - began:.1f} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
