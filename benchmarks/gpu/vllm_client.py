"""What clients see of vLLM servers that prefill and decode, from their request on, beside undivided servers::

    python -m benchmarks.gpu.vllm_client --gpus 2 --limit-s 540 --json docs/benchmarks/vllm-client-2xgpu.json

All servers run at the same time, prefill on the first half of the GPUs and decode on the second one, with the model of
`vllm_servers.py`. Clients ask in one of these ways, and do a proxy's work themselves:

* `undivided`: one server that does everything. Under load there are two, one on each half of the GPUs.
* `both`: this library's connector (`--backend`), both servers asked at once. `proxy`: the same by `examples/pd_proxy.py`.
* `in_turn`: the same servers, prefill asked first, as the proxies of NixlConnector do.
* `nothing`: prefill without a connector asked first, and a decode server that loads between steps without moving anything.
* `nixl`: vLLM's NixlConnector, prefill asked first.

With `--fp8` there are other servers instead, which have KV in bfloat16 or FP8, and decode has memory for `FP8_CLIENTS` of the
requests under load in bfloat16. `both` is bfloat16 on both sides, `to_fp8` FP8 on decode only, `fp8` on both; both servers are
asked at once. `kv_blocks`: the blocks of each decode server.

`rows`: milliseconds from the client's request to its first token, medians without other requests. `prefill_ms` is the time
until a prefill server has answered that is asked first, and `*_second_ms` the time to the second token. All ways take turns.
`load`: requests per second of a number of clients, each with one request at a time; quantiles of the first token, of the whole
answer and of the time between two tokens, and the longest such time. `--gpus 0` tries the program on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import secrets
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.vllm_clients import WARM_UP, Plan
from benchmarks.gpu.vllm_connectors import FP8, PREFILL
from benchmarks.gpu.vllm_load import figures, read_stream, run_clients
from benchmarks.gpu.vllm_requests import Broken, Reply, prompt_of
from benchmarks.gpu.vllm_servers import LARGE, Wanted, running, start, terminate
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import model_writer
from harness.conditions import conditions
from harness.servers import Server, completion

PATIENCE_S = 60.0
FP8_CLIENTS = 16
SMALLER = (128 << 10) * (2048 + 128) * FP8_CLIENTS
"""Bytes of KV for so many requests under load in bfloat16, of 128 KiB a token."""
FAILURES = (*Broken, aiohttp.ClientError, TimeoutError)
Ask = Callable[[aiohttp.ClientSession, Sequence[int]], Awaitable[Reply]]


@dataclass
class Ways:
    """The ways to ask, of the servers that have started. Prefill has `tp` ranks."""

    ready: Mapping[str, Server]
    backend: str
    tp: int
    max_tokens: int
    places: dict[str, Any] = field(default_factory=dict)
    turns: Iterator[int] = field(default_factory=itertools.count)

    def names(self, *, is_load: bool) -> dict[str, Ask]:
        """Each way by its name in the table, if its servers are there."""
        ours, theirs = (f"{self.backend} prefill {self.tp}", f"{self.backend} decode"), ("NixlConnector prefill 1",)
        nixl = (*theirs, "NixlConnector decode")
        undivided = ("none 0", "none 1") if is_load else ("none 0",)
        found: dict[str, tuple[tuple[str, ...], Callable[..., Awaitable[Reply]]]] = {
            "two_undivided" if is_load else "undivided": (undivided, self._undivided),
            "both": (ours, self._both),
            "to_fp8": ((ours[0], f"{self.backend} decode fp8"), self._both),
            "fp8": ((f"{self.backend} prefill {self.tp} fp8", f"{self.backend} decode fp8"), self._both),
            "in_turn": (ours, partial(self._in_turn, PREFILL)),
            "nothing": (("none 0", "floor decode"), partial(self._in_turn, None)),
            "nixl": (nixl, partial(self._in_turn, PREFILL)),
        }
        if not is_load:
            found["proxy"] = ((f"proxy {self.tp}",), self._undivided)
        return {
            name: partial(act, [self.ready[each] for each in servers])
            for name, (servers, act) in found.items()
            if all(each in self.ready for each in servers)
        }

    async def _undivided(self, servers: Sequence[Server], session: aiohttp.ClientSession, prompt: Sequence[int]) -> Reply:
        return await self._stream(servers[next(self.turns) % len(servers)], session, prompt, None, Reply())

    async def _in_turn(
        self, params: Mapping[str, Any] | None, servers: Sequence[Server], session: aiohttp.ClientSession, prompt: Sequence[int]
    ) -> Reply:
        reply = Reply()
        found = await self._prefill(servers[0], session, prompt, params)
        reply.prefill_s = time.monotonic() - reply.begun_s
        return await self._stream(servers[1], session, prompt, found, reply)

    async def _both(self, servers: Sequence[Server], session: aiohttp.ClientSession, prompt: Sequence[int]) -> Reply:
        prefill, decode = servers
        if prefill.url not in self.places:
            self.places[prefill.url] = await self._prefill(prefill, session, [0], PREFILL)
        reply, name = Reply(), secrets.token_hex(16)
        asked = asyncio.create_task(self._prefill(prefill, session, prompt, {**PREFILL, "remote_request_id": name}))
        params = {**self.places[prefill.url], "do_remote_prefill": True, "remote_request_id": name}
        try:
            await self._stream(decode, session, prompt, params, reply)
            await asked
        finally:
            asked.cancel()
        return reply

    async def _prefill(
        self, server: Server, session: aiohttp.ClientSession, prompt: Sequence[int], params: Mapping[str, Any] | None
    ) -> Any:
        body = completion(prompt, max_tokens=1, logprobs=None, kv_transfer_params=params)
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            return (await answer.json())["kv_transfer_params"]

    async def _stream(
        self, server: Server, session: aiohttp.ClientSession, prompt: Sequence[int], params: Any, reply: Reply
    ) -> Reply:
        body = completion(prompt, max_tokens=self.max_tokens, logprobs=None, stream=True)
        body |= {"kv_transfer_params": params} if params else {}
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            await read_stream(answer, reply, self.max_tokens)
        return reply


def first_tokens(ways: Mapping[str, Ask], length: int, tp: str, plan: Plan) -> dict[str, Any]:
    """A row. The ways take turns, each with prompts of its own. A way that fails is left out from then on."""
    replies: dict[str, list[Reply]] = {name: [] for name in ways}

    async def measure() -> None:
        rng, left = random.Random(length), dict(ways)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for turn in range(WARM_UP + plan.repeats):
                for name, ask in list(left.items()):
                    try:
                        reply = await ask(session, prompt_of(rng, length))
                    except FAILURES as error:
                        plan.problems.append(f"{name} {tp}: first token, {length} in: {type(error).__name__}: {error}")
                        del left[name]
                        continue
                    if turn >= WARM_UP:
                        replies[name].append(reply)
                left = dict([*list(left.items())[1:], *list(left.items())[:1]])

    asyncio.run(measure())
    row: dict[str, Any] = {"tokens": length, "tp": tp}
    for name, found in replies.items():
        if found:
            row[f"{name}_ms"] = median_ms(reply.times_s[0] for reply in found)
            row[f"{name}_second_ms"] = median_ms(reply.times_s[1] for reply in found)
        if found and name == "in_turn":
            row["prefill_ms"] = median_ms(reply.prefill_s for reply in found)
    return row


def load(name: str, ask: Ask, clients: int, plan: Plan) -> dict[str, Any]:
    """Requests of several clients at once."""
    rng, (length, _) = random.Random(9), plan.load
    prompts = [prompt_of(rng, length) for _ in range(clients * plan.per_client)]
    begun_s = time.monotonic()
    replies = run_clients(
        ask,
        prompts,
        clients=clients,
        patience_s=PATIENCE_S,
        on_failure=lambda error: plan.problems.append(f"{name}: {clients} clients: {type(error).__name__}: {error}"),
    )
    elapsed_s = time.monotonic() - begun_s
    return {f"{name}_{figure}": value for figure, value in figures(replies, elapsed_s).items()}


def median_ms(times_s: Iterator[float] | Sequence[float]) -> float:
    """In milliseconds."""
    return round(statistics.median(times_s) * 1e3, 1)


def measure_all(ready: Mapping[str, Server], backend: str, sizes: Sequence[int], plan: Plan) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete."""
    rows: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    for tp in sizes:
        alone = Ways(ready, backend, tp, max_tokens=4).names(is_load=False)
        ways = {name: ask for name, ask in alone.items() if tp == sizes[0] or name in ("both", "in_turn", "proxy")}
        for length in plan.lengths:
            if not plan.is_over(f"TP {tp}: first token, {length} tokens"):
                rows.append(first_tokens(ways, length, f"{tp} -> 1", plan))
                yield {"rows": rows, "load": loads}
    for clients in plan.clients:
        line: dict[str, Any] = {
            "clients": clients,
            "tokens": plan.load[0],
            "tokens_out": plan.load[1],
            "tp": f"{sizes[0]} -> 1",
        }
        loads.append(line)
        for name, ask in Ways(ready, backend, sizes[0], max_tokens=plan.load[1]).names(is_load=True).items():
            if not plan.is_over(f"{name}: {clients} clients"):
                line.update(load(name, ask, clients, plan))
                yield {"rows": rows, "load": loads}


def wanted(backend: str, sizes: Sequence[int], block: int, chunk: int, clients: int) -> Iterator[Wanted]:
    """The servers."""
    for tp in sizes:
        yield Wanted(f"{backend} prefill {tp}", backend, 0, block, LARGE, chunk, tp, clients)
    yield Wanted(f"{backend} decode", backend, 1, block, LARGE, chunk, 1, clients)
    for place in (0, 1):
        yield Wanted(f"none {place}", "none", place, block, LARGE, chunk, 1, clients)
    yield Wanted("floor decode", "floor", 1, block, LARGE, chunk, 1, clients)
    yield Wanted("NixlConnector prefill 1", "NixlConnector", 0, block, LARGE, chunk, 1, clients)
    yield Wanted("NixlConnector decode", "NixlConnector", 1, block, LARGE, chunk, 1, clients)


def wanted_fp8(backend: str, block: int, chunk: int, clients: int) -> Iterator[Wanted]:
    """The servers with `--fp8`."""
    for suffix, more in (("", ()), (" fp8", FP8)):
        yield Wanted(f"{backend} prefill 1{suffix}", backend, 0, block, LARGE, chunk, 1, clients, more=more)
        yield Wanted(f"{backend} decode{suffix}", backend, 1, block, SMALLER, chunk, 1, clients, more=more)


def kv_blocks(ready: Mapping[str, Server]) -> dict[str, int]:
    """How many blocks vLLM has on each decode server."""
    pattern = r'^vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"'
    found = {name: re.search(pattern, each.metrics(), re.MULTILINE) for name, each in ready.items() if "decode" in name}
    return {name: int(match[1]) for name, match in found.items() if match}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = server_options(__doc__, gpus=2, most_gpus=8, limit_s=540.0)
    parser.add_argument("--backend", choices=("nvlink", "nixl"), help="of this library (default: nvlink, and nixl on the CPU)")
    parser.add_argument("--prefill-tp", nargs="+", type=int, choices=(1, 2, 4), default=[1])
    parser.add_argument("--fp8", action="store_true", help="servers with KV in bfloat16 and in FP8")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="servers to leave out, such as floor")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="the most requests at once")
    return parser.parse_args()


def main() -> None:
    """Start the servers, measure, and write the table."""
    given = parse()
    signal.signal(signal.SIGTERM, terminate)
    backend, sizes = given.backend or ("nvlink" if given.gpus else "nixl"), tuple(given.prefill_tp)
    plan = Plan.on_gpu(given.limit_s, clients=given.clients) if given.gpus else Plan.on_cpu(given.limit_s)
    table = {**conditions(), "gpus": given.gpus, "backend": backend}
    table["load_before"] = table.pop("load")  # of the machine; `load` is that of the servers
    with tempfile.TemporaryDirectory() as folder:
        model = model_writer(given.gpus)("llama", Path(folder))
        print(f"the model is written after {plan.elapsed_s():.0f} s", flush=True)
        chunk = 20480 if given.gpus else 1536
        others = wanted_fp8(backend, plan.block, chunk, given.clients)
        chosen = others if given.fp8 else wanted(backend, sizes, plan.block, chunk, given.clients)
        starts = {
            one.name: partial(start, one, model, given.gpus)
            for one in chosen
            if not any(one.name.startswith(name) for name in given.without)
        }
        with running(starts, plan.problems, patience_s=given.start_s, logs=given.logs) as ready:
            for tp in sizes:
                prefill, decode = ready.get(f"{backend} prefill {tp}"), ready.get(f"{backend} decode")
                if prefill is not None and decode is not None and not given.fp8:
                    ready[f"proxy {tp}"] = Server.proxy(prefill, decode).wait_ready()
            table["kv_blocks"] = kv_blocks(ready)
            try:
                for part in measure_all(ready, backend, sizes, plan):
                    table.update(part)
                    given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
            finally:
                for tp in sizes:
                    if f"proxy {tp}" in ready:
                        ready[f"proxy {tp}"].stop()
    shown = {**table, "rows": [without_second(row) for row in table.get("rows", ())]}
    show(shown, plan.problems, elapsed_s=plan.elapsed_s())


def without_second(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the printed table, which has less columns than the file."""
    return {name: value for name, value in row.items() if not name.endswith("second_ms")}


if __name__ == "__main__":
    main()
