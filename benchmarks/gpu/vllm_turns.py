"""State that goes where the next token is computed: next turns, running requests that move, and a server that is drained::

    python -m benchmarks.gpu.vllm_turns --gpus 2 --limit-s 540 --json docs/benchmarks/turns-2xgpu.json

`decode` is on the second half of the GPUs, `other`, `prefill` and `undivided` on the first one, with the model of
`vllm_servers.py`. `decode` and `undivided` have a prefix cache. `examples/pd_proxy.py` moves and drains.

`turn2`: milliseconds until the first token of a prompt with `tokens` tokens of history and some new ones, medians without other
requests. `cached_ms`: `undivided` has answered the turn before, and has it in its prefix cache. `here_ms`: `other` takes it
from `decode`, which has answered the turn before. `divided_ms`: `prefill` takes it, and hands over to `decode`.
`computed_ms`: `other` computes it. `equal`: how many answers are those of `undivided`, of `asked`. Servers compute the new
tokens in steps of other sizes, which round differently in bfloat16; `computed` shows what that alone does.

`moves`: streams with prompts of `tokens` tokens that move to a server on the other GPU and go on. `gap_ms` is the longest time
between two events, the median and the most of all streams, and `step_ms` the median time. `equal`: how many streams are those
of `undivided`, which has the prompt but its last token in its prefix cache: like `decode` it computes that token alone.

`drain`: `requests` running ones leave a server. `seconds` is the time until the proxy says that it is empty, `bytes` the state
of the requests that have moved, and `copy_seconds` how long a copy of so many bytes takes from one GPU to the other. `gap_ms`
as in `moves`.

A request counts only if the server that went on with it has computed nothing that it had from another one, by vLLM's own count;
if not, a problem says so. `--gpus 0` tries the program on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import random
import secrets
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gpu.server_options import server_options
from benchmarks.gpu.vllm_client import FAILURES, PATIENCE_S, median_ms
from benchmarks.gpu.vllm_clients import WARM_UP, TimeLimit
from benchmarks.gpu.vllm_connectors import PREFILL
from benchmarks.gpu.vllm_load import read_stream
from benchmarks.gpu.vllm_requests import Reply, prompt_of
from benchmarks.gpu.vllm_servers import Wanted, running, start, terminate
from benchmarks.gpu.vllm_tables import show
from benchmarks.gpu.vllm_weights import NUM_PRINTABLE, answer_in_ascii, model_writer
from harness.conditions import conditions
from harness.servers import Server, completion

NBYTES = 14_000_000_000
"""Of KV on each GPU: for 32 requests of 2,048 tokens and their answers, or for four of 16,384."""
NUM_COPIES, CHUNK_NBYTES = 5, 1 << 28


@dataclass
class Plan(TimeLimit):
    """What to measure. `history`: tokens of a conversation, of which `answered` are the last answer; the next prompt has `new`
    more. `moved`: tokens of prompts of requests that move. `after`: how many events a client gets before. `drained`: how many
    requests leave a server at once, the tokens of their prompts, and the most of their answers.
    """

    block: int
    chunk: int
    history: tuple[int, ...]
    answered: int
    new: int
    moved: tuple[int, ...]
    after: int
    drained: tuple[int, int, int]
    repeats: int
    streamed: int = 256
    """The tokens of an answer that moves."""

    @classmethod
    def on_gpu(cls, limit_s: float) -> Plan:
        """For the large model."""
        return cls(16, 20480, (1024, 4096, 16384), 64, 64, (1025, 4097, 16385), 32, (32, 2048, 1024), 11, limit_s=limit_s)

    @classmethod
    def on_cpu(cls, limit_s: float) -> Plan:
        """For the small model."""
        return cls(32, 1536, (256, 1024), 32, 32, (257, 1025), 8, (4, 128, 400), 2, limit_s=limit_s)


class Turns:
    """Asks the servers, in one session of a client."""

    def __init__(self, ready: Mapping[str, Server], session: aiohttp.ClientSession, plan: Plan) -> None:
        self._ready, self._session, self._plan = ready, session, plan

    async def stream(
        self,
        server: Server,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        reached: asyncio.Event | None = None,
    ) -> Reply:
        """The answer to a prompt. Sets `reached` when the client has got `after` events."""
        body = completion(prompt, max_tokens=max_tokens, logprobs=None, stream=True)
        body |= {"kv_transfer_params": params} if params else {}
        reply, events = Reply(), itertools.count(1)

        def note() -> None:
            if reached is not None and next(events) == self._plan.after:
                reached.set()

        async with self._session.post(f"{server.url}/v1/completions", json=body) as answer:
            await read_stream(answer, reply, max_tokens, on_event=note)
        return reply

    async def answer(self, server: Server, prompt: Sequence[int], *, max_tokens: int, **params: Any) -> Any:
        """The choice of an answer that is not streamed, and its `kv_transfer_params`."""
        body = completion(prompt, max_tokens=max_tokens, logprobs=None, kv_transfer_params=params)
        async with self._session.post(f"{server.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            found = await answer.json()
        return found["choices"][0], found["kv_transfer_params"]

    async def divided(self, prompt: Sequence[int], kept: Any, *, max_tokens: int) -> Reply:
        """Prefill and decode are asked at once."""
        prefill, name = self._ready["prefill"], secrets.token_hex(16)
        _, place = await self.answer(prefill, [0], max_tokens=1, **PREFILL)
        asked = {**PREFILL, "remote_request_id": name, "kept": kept}
        given = {**place, "do_remote_prefill": True, "remote_request_id": name}
        own = asyncio.create_task(self.answer(prefill, prompt, max_tokens=1, **asked))
        try:
            reply = await self.stream(self._ready["decode"], prompt, max_tokens=max_tokens, params=given)
            await own
        finally:
            own.cancel()
        return reply

    async def drain(self, server: Server, *, undo: bool = False) -> Any:
        """The proxy's report."""
        path = "/admin/undrain" if undo else "/admin/drain"
        async with self._session.post(f"{self._ready['proxy'].url}{path}", json={"server": server.url}) as answer:
            answer.raise_for_status()
            return await answer.json()

    # -- the next turn -------------------------------------------------------------------------------------------------

    async def turns(self, length: int) -> dict[str, Any]:
        """A row of `turn2`."""
        plan, rng = self._plan, random.Random(length)
        replies: dict[str, list[Reply]] = {name: [] for name in ("cached", "here", "divided", "computed")}
        equal = dict.fromkeys(("here", "divided", "computed"), 0)
        for turn in range(WARM_UP + plan.repeats):
            for name in ("here", "divided"):
                history, kept = await self._history(rng, length)
                prompt = history + random_prompt(rng, plan.new)
                undivided, other = self._ready["undivided"], self._ready["other"]
                own, _ = await self.answer(undivided, history[: -plan.answered], max_tokens=plan.answered)
                if own["token_ids"] != history[-plan.answered :]:
                    plan.problems.append(f"turn2, {length} tokens: one server has answered the turn before otherwise")
                found = {"cached": await self.stream(undivided, prompt, max_tokens=8)}
                taker = other if name == "here" else self._ready["prefill"]
                before = taker.num_moved()
                if name == "here":
                    found[name] = await self.stream(other, prompt, max_tokens=8, params={"kept": kept})
                    found["computed"] = await self.stream(other, prompt, max_tokens=8)
                else:
                    found[name] = await self.divided(prompt, kept, max_tokens=8)
                self._check_moved(taker, before, length - 1, f"{name}, {length} tokens of history")
                if turn >= WARM_UP:
                    for each, reply in found.items():
                        replies[each].append(reply)
                    for each in equal.keys() & found.keys():
                        equal[each] += found[each].tokens == found["cached"].tokens
        times = {f"{name}_ms": median_ms([reply.times_s[0] for reply in found]) for name, found in replies.items()}
        return {"tokens": length, **times, "asked": plan.repeats, "equal": equal}

    async def _history(self, rng: random.Random, length: int) -> tuple[list[int], Any]:
        """A conversation of so many tokens that `decode` has answered last, and what it keeps of it."""
        asked = random_prompt(rng, length - self._plan.answered)
        choice, params = await self.answer(self._ready["decode"], asked, max_tokens=self._plan.answered, keep=True)
        return asked + choice["token_ids"], params["kept"]

    def _check_moved(self, server: Server, before: float, expected: int, what: str) -> None:
        """Note a problem if a server has not got so many tokens from others."""
        found = server.metric_from(MOVED, before + expected, label=EXTERNAL) - before
        if found != expected:
            self._plan.problems.append(f"{what}: expected {expected} tokens from another server, found {found:.0f}")

    # -- moves ---------------------------------------------------------------------------------------------------------

    async def moves(self, length: int) -> dict[str, Any]:
        """A row of `moves`."""
        plan, rng = self._plan, random.Random(length)
        gaps_ms, steps_s, num_equal = [], [], 0
        for turn in range(WARM_UP + plan.repeats):
            prompt, both = random_prompt(rng, length), [self._ready["decode"], self._ready["other"]]
            source, target = both if turn % 2 else reversed(both)
            before, what = target.num_moved(), f"a move of {length} tokens"
            reply, report = await self._moved(source, target, prompt)
            num_tokens = report["moved"][0]["tokens"] if report["moved"] else 0
            self._check_moved(target, before, length + num_tokens - 1, what)
            self._check_report(report, 1, what)
            await self.answer(self._ready["undivided"], prompt, max_tokens=1)
            expected = await self.stream(self._ready["undivided"], prompt, max_tokens=plan.streamed)
            if turn >= WARM_UP:
                gaps_ms.append(reply.gap_ms_max)
                steps_s += [late - early for early, late in itertools.pairwise(reply.times_s)]
                num_equal += reply.tokens == expected.tokens
        return {
            "tokens": length,
            "gap_ms": round(statistics.median(gaps_ms), 1),
            "gap_max_ms": max(gaps_ms),
            "step_ms": median_ms(steps_s),
            "asked": plan.repeats,
            "equal": num_equal,
        }

    async def _moved(self, source: Server, target: Server, prompt: Sequence[int]) -> tuple[Reply, Any]:
        """An answer that begins at one server and moves to the other one, and the proxy's report."""
        reached = asyncio.Event()
        await self.drain(target)
        stream = self.stream(self._ready["proxy"], prompt, max_tokens=self._plan.streamed, reached=reached)
        answering = asyncio.create_task(stream)
        try:
            await asyncio.wait([answering, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
            await self.drain(target, undo=True)
            report = await self.drain(source)
            return await answering, report
        finally:
            answering.cancel()
            await self.drain(source, undo=True)

    def _check_report(self, report: Any, num_requests: int, what: str) -> None:
        """Note a problem if the proxy has not emptied the server by moving all requests."""
        moved, stayed = len(report["moved"]), [each["reason"] for each in report["stayed"]]
        if not report["empty"] or moved != num_requests or stayed:
            self._plan.problems.append(f"{what}: {moved} of {num_requests} requests have moved; others stayed: {stayed}")

    # -- a drain -------------------------------------------------------------------------------------------------------

    async def drains(self, token_nbytes: int) -> dict[str, Any]:
        """A row of `drain`, without the time of a copy."""
        count, length, max_tokens = self._plan.drained
        rng, source, target = random.Random(count), self._ready["decode"], self._ready["other"]
        prompts, reached = [random_prompt(rng, length) for _ in range(count)], [asyncio.Event() for _ in range(count)]
        await self.drain(target)
        answering = [
            asyncio.create_task(self.stream(self._ready["proxy"], prompt, max_tokens=max_tokens, reached=event))
            for prompt, event in zip(prompts, reached, strict=True)
        ]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(event.wait() for event in reached))
            await self.drain(target, undo=True)
            before, begun_s = target.num_moved(), time.monotonic()
            report = await self.drain(source)
            seconds = time.monotonic() - begun_s
            replies = await asyncio.gather(*answering)
        finally:
            for task in answering:
                task.cancel()
            await self.drain(source, undo=True)
        what = f"a drain of {count} requests"
        self._check_report(report, count, what)
        num_tokens = sum(length + each["tokens"] - 1 for each in report["moved"])
        self._check_moved(target, before, num_tokens, what)
        gaps_ms = [reply.gap_ms_max for reply in replies]
        return {
            "requests": len(report["moved"]),
            "tokens": length,
            "bytes": num_tokens * token_nbytes,
            "seconds": round(seconds, 4),
            "gap_ms": round(statistics.median(gaps_ms), 1),
            "gap_max_ms": max(gaps_ms),
        }


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """A prompt of printable characters, as the model's answers are."""
    return prompt_of(rng, length, num_tokens=NUM_PRINTABLE)


MOVED, EXTERNAL = "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'


def copy_seconds(nbytes: int, gpus: int) -> float:
    """The median time of a copy of so many bytes between the first two GPUs, or on the host."""
    torch = importlib.import_module("torch")
    devices = ("cuda:0", "cuda:1") if gpus > 1 else ("cuda:0", "cuda:0") if gpus else ("cpu", "cpu")
    source, target = (torch.zeros(CHUNK_NBYTES, dtype=torch.uint8, device=device) for device in devices)
    times_s = []
    for _ in range(WARM_UP + NUM_COPIES):
        wait_for(torch, devices)
        begun_s = time.monotonic()
        for begin in range(0, nbytes, CHUNK_NBYTES):
            part = slice(min(CHUNK_NBYTES, nbytes - begin))
            target[part].copy_(source[part], non_blocking=True)
        wait_for(torch, devices)
        times_s.append(time.monotonic() - begun_s)
    return round(statistics.median(times_s[WARM_UP:]), 4)


def wait_for(torch: Any, devices: Sequence[str]) -> None:
    """Wait until the GPUs have nothing to do."""
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)


def measure_all(ready: Mapping[str, Server], plan: Plan, *, gpus: int, token_nbytes: int) -> Iterator[dict[str, Any]]:
    """The parts of the table, each as soon as it is complete."""
    table: dict[str, list[dict[str, Any]]] = {"turn2": [], "moves": [], "drain": []}
    wanted = [("turn2", length) for length in plan.history] + [("moves", length) for length in plan.moved] + [("drain", 0)] * 3

    async def row(part: str, length: int) -> dict[str, Any]:
        timeout, connector = aiohttp.ClientTimeout(total=PATIENCE_S), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            turns = Turns(ready, session, plan)
            if part == "drain":
                return await turns.drains(token_nbytes)
            return await (turns.turns(length) if part == "turn2" else turns.moves(length))

    for part, length in wanted:
        what = f"{part}, {length} tokens" if length else part
        if plan.is_over(what):
            continue
        try:
            found = asyncio.run(row(part, length))
        except (*FAILURES, KeyError, ValueError) as error:
            plan.problems.append(f"{what}: {type(error).__name__}: {error}")
        else:
            if part == "drain":
                found["copy_seconds"] = copy_seconds(found["bytes"], gpus)
            table[part].append(found)
        yield table


def token_nbytes_of(model: Path, *, itemsize: int) -> int:
    """Bytes of KV of one token."""
    config = json.loads((model / "config.json").read_text())
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = server_options(__doc__, gpus=2, most_gpus=8, limit_s=540.0)
    parser.add_argument("--backend", choices=("nvlink", "nixl"), help="of this library (default: nvlink, and nixl on the CPU)")
    return parser.parse_args()


def main() -> None:
    """Start the servers, measure, and write the table."""
    given = parse()
    signal.signal(signal.SIGTERM, terminate)
    backend = given.backend or ("nvlink" if given.gpus else "nixl")
    plan = Plan.on_gpu(given.limit_s) if given.gpus else Plan.on_cpu(given.limit_s)
    table = {**conditions(), "gpus": given.gpus, "backend": backend}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = model_writer(given.gpus)("llama", Path(folder))
        answer_in_ascii(model)
        print(f"the model is written after {plan.elapsed_s():.0f} s", flush=True)
        chosen = [
            Wanted("decode", backend, 1, plan.block, NBYTES, plan.chunk, clients=64, is_cached=True),
            Wanted("other", backend, 0, plan.block, NBYTES, plan.chunk, clients=64),
            Wanted("prefill", backend, 0, plan.block, NBYTES, plan.chunk),
            Wanted("undivided", "undivided", 0, plan.block, NBYTES, plan.chunk),
        ]
        starts = {one.name: partial(start, one, model, given.gpus) for one in chosen}
        ready = stack.enter_context(running(starts, plan.problems, patience_s=given.start_s, logs=given.logs))
        if len(ready) == len(chosen):
            proxy = Server.proxy(ready["prefill"], ready["decode"], "--decode", ready["other"].url, "--move")
            ready["proxy"] = stack.enter_context(proxy).wait_ready()
            nbytes = token_nbytes_of(model, itemsize=2 if given.gpus else 4)
            for part in measure_all(ready, plan, gpus=given.gpus, token_nbytes=nbytes):
                table.update(part)
                given.json.write_text(json.dumps({**table, "problems": Counter(plan.problems)}, indent=1) + "\n")
            if given.logs is not None:
                given.logs.mkdir(parents=True, exist_ok=True)
                (given.logs / "proxy.log").write_text(proxy.log(length=200_000))
    show(table, plan.problems, elapsed_s=plan.elapsed_s())


if __name__ == "__main__":
    main()
