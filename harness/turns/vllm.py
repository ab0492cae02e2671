"""Conversations with vLLM's engines, in processes of their own without HTTP.

Decode keeps every request, and prefill is given one of those with each of its own: mostly of another turn of the same
conversation. Whichever it is, prefill must take only the beginning that both have in common.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch

from disagg import new_request_id
from harness.ports import free_ports
from harness.turns.answers import NUM_LOGPROBS, TOLERANCE, Answer
from harness.turns.conversation import Habits, Turn, Way
from harness.turns.servers import Case
from harness.vllm.engine import ENVIRONMENT, PREFILL, Engine
from harness.vllm.engine import Answer as EngineAnswer

TIMEOUT_S = 120.0
KEPT_SHARE = 0.5
REFUSED_HOLD_S = 5.0
"""The `hold_s` of servers that refuse each other: decode cannot tell prefill that it computes a request itself."""
WAYS = {
    Way.HANDED_OVER: 46,
    Way.BOTH_AT_ONCE: 10,
    Way.PLAIN: 28,
    Way.DEAD_ADDRESS: 4,
    Way.ABORTED_ON_PREFILL: 3,
    Way.NEVER_DECODED: 3,
    Way.ABORTED_WHILE_LOADING: 3,
    Way.ABORTED_WHILE_ANSWERING: 3,
}
ADAPTERS = {"a": (1, 1), "b": (2, 2), "c": (3, 4)}
"""The seeds of adapters' weights, on decode and on prefill: `c` is not the same on both."""


COMMON = {
    "dtype": "float32",
    "enable_prefix_caching": True,
    "max_model_len": 768,
    "max_num_batched_tokens": 256,
    "scheduler_reserve_full_isl": False,  # so that requests are preempted
}


@dataclass(frozen=True, kw_only=True)
class VllmCase(Case):
    """`prefill` and `decode` are vLLM's options. The undivided engine has those of decode, at TP 1 and with enough blocks."""

    model: str
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    num_blocks: tuple[int, int] = (32, 16)


CASES = {
    "llama": VllmCase(
        model="llama",
        habits=Habits(ways=WAYS, embedded=0.15),
        tolerance=TOLERANCE,
        prefill={"block_size": 32},
        decode={"block_size": 64, "tensor_parallel_size": 2},
        common={"enable_prompt_embeds": True},
    ),
    "llama-adapters": VllmCase(
        model="llama",
        habits=Habits(ways=WAYS, adapters=(None, "a", "b", "c")),
        tolerance=TOLERANCE,
        prefill={"block_size": 32},
        decode={"block_size": 64},
        common={"enable_lora": True, "max_loras": 4, "max_lora_rank": 8},
    ),
    "llama-fp8": VllmCase(
        model="llama",
        habits=Habits(ways=WAYS),
        tolerance=0.05,
        prefill={"kv_cache_dtype": "fp8_e4m3"},
        decode={"kv_cache_dtype": "fp8_e5m2"},
        is_refused=True,
    ),
    "mistral": VllmCase(
        model="mistral",
        habits=Habits(ways=WAYS),
        tolerance=TOLERANCE,
        prefill={"block_size": 64},
        decode={"block_size": 32},
        num_blocks=(24, 32),
    ),
    "gemma3": VllmCase(
        model="gemma3",
        habits=Habits(ways=WAYS),
        tolerance=TOLERANCE,
        prefill={"block_size": 32},
        decode={"block_size": 64},
        num_blocks=(80, 40),
    ),
    "falcon-h1": VllmCase(
        model="falcon-h1",
        habits=Habits(ways=WAYS, unit=64),
        tolerance=TOLERANCE,
        prefill={"block_size": 64},
        decode={"block_size": 128},
        common={"enable_prefix_caching": False},  # vLLM's Mamba2 on the CPU ends with an IndexError
    ),
    "qwen3-next": VllmCase(
        model="qwen3-next",
        habits=Habits(ways=WAYS, unit=64),
        tolerance=0.1,
        prefill={"block_size": 64},
        decode={"block_size": 128},
    ),
    "deepseek-v2": VllmCase(
        model="deepseek-v2",
        habits=Habits(ways=WAYS, unit=16),
        tolerance=TOLERANCE,
        decode={"tensor_parallel_size": 2},
        num_blocks=(128, 80),
    ),
}


@dataclass
class _Open:
    """The requests of a round: those to decode by turn, those to prefill, and those to decode whose client leaves."""

    decoding: dict[int, str] = field(default_factory=dict)
    prefilling: dict[str, Turn] = field(default_factory=dict)
    leaving: list[str] = field(default_factory=list)


def reset_cache(core: Any) -> bool:
    """In an engine's process: forget all prefixes. Returns whether that was possible."""
    return bool(core.scheduler.reset_prefix_cache())


def open_requests(core: Any) -> list[str]:
    """In an engine's process: the requests that it has."""
    return list(core.scheduler.requests)


class VllmServers:
    """Three engines of a case, and the parameters with which decode finds the one that prefills."""

    def __init__(self, case: VllmCase, folder: Path, stack: ExitStack) -> None:
        os.environ.update(ENVIRONMENT)  # before vLLM is imported
        import vllm  # noqa: F401  (engines are forked from this process)

        from harness.vllm.models import OPTIONS, write_adapter, write_model

        torch.set_num_threads(1)  # a process that is forked while torch has threads waits for them
        self.case = case
        model = write_model(case.model, folder / case.model)
        self._embeddings: Any = None
        if case.habits.embedded:
            self._embeddings = safetensors.numpy.load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        self._adapters = [
            {
                name: (name, number, str(write_adapter(folder / f"{name}-{side}", seed=seeds[side])))
                for number, (name, seeds) in enumerate(ADAPTERS.items(), 1)
                if name in case.habits.adapters
            }
            for side in range(2)
        ]
        common = {**COMMON, **OPTIONS.get(case.model, {}), **case.common}
        undivided = {name: value for name, value in case.decode.items() if name != "tensor_parallel_size"}
        blocks, options = (*case.num_blocks, 512), (case.prefill, case.decode, undivided)
        extra = {"kept_share": KEPT_SHARE, **({"hold_s": REFUSED_HOLD_S} if case.is_refused else {})}
        self._engines = [
            Engine(str(model), blocks=count, extra=extra, **{**common, **each})
            for count, each in zip(blocks, options, strict=True)
        ]
        self._prefill, self._decode, self._alone = self._engines
        for engine in self._engines:
            stack.callback(engine.stop)
        for engine in self._engines:
            engine.wait_ready()
        (first,) = self._prefill.generate([[1] * 50], params=PREFILL)
        self._decode.generate([[1] * 50], params=first.params, max_tokens=1)
        self._server = {name: first.params[name] for name in ("remote_engine_id", "remote_address")} if first.params else {}
        (self._dead_port,) = free_ports(1)
        self._turns: dict[str, Turn] = {}
        self._kept: list[Mapping[str, Any]] = []
        """What decode has kept, and prefill was not given yet."""
        self._preempted = self._failed_loads = 0
        self._are_both_asked = False

    def _add(self, engine: Engine, turn: Turn, params: Mapping[str, Any] | None = None, *, more: int = 0) -> str:
        """Ask an engine a turn, for `more` tokens than are wanted."""
        from vllm.lora.request import LoRARequest  # not before the engines have set their environment

        prompt = turn.prefilled if engine is self._prefill else turn.prompt
        if engine is self._decode:
            params = {**(params or {}), "keep": True}
        elif engine is self._prefill and self._kept:
            params = {**(params or {}), "kept": self._kept.pop(-1 - turn.number % min(3, len(self._kept)))}
        fields: dict[str, Any] = {}
        if prompt.is_embedded:
            fields["prompt_embeds"] = torch.from_numpy(self._embeddings[list(prompt.tokens)])
        if prompt.adapter is not None:
            fields["lora_request"] = LoRARequest(*self._adapters[engine is not self._prefill][prompt.adapter])
        req_id = engine.add(
            None if prompt.is_embedded else prompt.tokens,
            params=params,
            max_tokens=turn.max_tokens + more,
            logprobs=NUM_LOGPROBS,
            **fields,
        )
        self._turns[req_id] = turn
        return req_id

    def alone(self, turns: Sequence[Turn]) -> list[Answer]:
        asked = [self._add(self._alone, turn) for turn in turns]
        return [_answer(each) for each in self._alone.wait(asked)]

    def divided(self, turns: Sequence[Turn]) -> list[Answer | None]:
        """Prompts go to prefill in their order, and to decode as soon as prefill has answered; others go to decode at once."""
        self._preempted = self._prefill.counts["preempted"]
        self._failed_loads = self._decode.counts["failed_loads"]
        self._are_both_asked = any(turn.way is Way.BOTH_AT_ONCE for turn in turns)
        open_requests, until = _Open(), time.monotonic() + TIMEOUT_S
        for turn in turns:
            self._begin(turn, open_requests)
        prefilling, leaving = open_requests.prefilling, open_requests.leaving
        while prefilling or leaving:
            self._prefill.poll(0.002)
            self._decode.poll(0.002)
            for req_id in [each for each in prefilling if self._prefill.answers[each].finish_reason]:
                self._after_prefill(prefilling.pop(req_id), self._prefill.answers[req_id].params, open_requests)
            for req_id in [each for each in leaving if self._decode.answers[each].tokens]:
                leaving.remove(req_id)
                self._decode.abort(req_id)
            if time.monotonic() > until:
                raise TimeoutError(f"not answered within {TIMEOUT_S:g} s: {', '.join(map(str, prefilling.values()))}")
        decoding = open_requests.decoding
        found = dict(zip(decoding, self._decode.wait(decoding.values(), timeout_s=TIMEOUT_S), strict=True))
        self._kept += [each.params["kept"] for each in found.values() if each.params]
        return [_answer(found[turn.number]) if turn.number in found else None for turn in turns]

    def _begin(self, turn: Turn, open_requests: _Open) -> None:
        """Ask decode, prefill or both."""
        way, name = turn.way, {"remote_request_id": new_request_id().hex()}
        if way in (Way.PLAIN, Way.DEAD_ADDRESS, Way.BOTH_AT_ONCE):
            server = {Way.DEAD_ADDRESS: self._nobody(turn.number), Way.BOTH_AT_ONCE: self._server}.get(way)
            params = None if server is None else {"do_remote_prefill": True, **server, **name}
            open_requests.decoding[turn.number] = self._add(self._decode, turn, params)
        if way in (Way.PLAIN, Way.DEAD_ADDRESS):
            return
        # A proxy that asks in turn learns the id from prefill. One that chooses it gets nothing of a request that is preempted.
        chosen = name if way in (Way.ABORTED_ON_PREFILL, Way.BOTH_AT_ONCE) else {}
        req_id = self._add(self._prefill, turn, {**PREFILL, **chosen})
        if way is Way.ABORTED_ON_PREFILL:
            self._prefill.abort(req_id)
            self._give_up(name)  # it may have ended before
        elif way is not Way.BOTH_AT_ONCE:
            open_requests.prefilling[req_id] = turn

    def _after_prefill(self, turn: Turn, params: Mapping[str, Any] | None, open_requests: _Open) -> None:
        """Ask decode with what prefill has answered, unless the client has left."""
        if turn.way is Way.NEVER_DECODED:
            if params is not None and "remote_request_id" in params:  # of a prompt of one token nothing is handed over
                self._give_up(params)
            return
        req_id = self._add(self._decode, turn, params, more=40 if turn.way is Way.ABORTED_WHILE_ANSWERING else 0)
        if turn.way is Way.ABORTED_WHILE_LOADING:
            self._decode.abort(req_id)
        elif turn.way is Way.ABORTED_WHILE_ANSWERING:
            open_requests.leaving.append(req_id)
        else:
            open_requests.decoding[turn.number] = req_id

    def _give_up(self, params: Mapping[str, Any], engine: Engine | None = None) -> None:
        """Tell prefill, or the other engine, that nobody will ask for a request, as a proxy does."""
        (engine or self._prefill).add([0], params={"abort_request_id": params["remote_request_id"]}, max_tokens=1)

    def _nobody(self, number: int) -> dict[str, Any]:
        """Where nobody is: nobody listens at the address, it is none, or an engine of another name is there."""
        addresses = (f"tcp://127.0.0.1:{self._dead_port}", "?", self._server["remote_address"])
        return {"remote_engine_id": f"nobody-{number}", "remote_address": addresses[number % len(addresses)]}

    def problem(self, turn: Turn, answer: Answer) -> str:
        """VLLM's counts must be those of a hand-over: all prompt tokens but the last were cached or loaded. Of other prompts
        none were loaded. A request that prefill has preempted is computed by decode if both were asked at once. While some are
        asked so, both servers may be full of requests that the other has no room for; prefill then ends one, whose load fails.
        """
        assert answer.num_local is not None
        assert answer.num_external is not None
        found = f"{answer.num_local} tokens cached and {answer.num_external} loaded of {len(turn.prompt.tokens)}"
        if not self.is_handed_over(turn):
            return f"expected no token loaded, found {found}" if answer.num_external else ""
        if turn.way is Way.BOTH_AT_ONCE and self._prefill.counts["preempted"] > self._preempted:
            return ""
        has_failed = answer.num_external == 0 and self._decode.counts["failed_loads"] > self._failed_loads
        if self._are_both_asked and has_failed:
            return ""
        has_all = answer.num_local + answer.num_external == len(turn.prompt.tokens) - 1
        return "" if has_all else f"expected all but one token cached or loaded, found {found}"

    def refusal(self, _: Turn) -> str:
        return "expected an answer, since decode computes what it does not get; found none"

    def is_handed_over(self, turn: Turn) -> bool:
        """Whether decode must use the state that prefill has computed for a turn. Adapter `c` is another one on each side."""
        can = turn.way in (Way.HANDED_OVER, Way.BOTH_AT_ONCE) and not turn.is_mistaken and not self.case.is_refused
        return can and len(set(ADAPTERS.get(turn.prompt.adapter or "", (0,)))) == 1

    def end(self) -> str:
        problems = []
        for params in self._kept:
            self._give_up(params, self._decode)
        self._kept = []
        until = time.monotonic() + TIMEOUT_S
        while self._decode.num_free_blocks() < self._decode.num_blocks - 1 and time.monotonic() < until:
            self._decode.generate([[0]], max_tokens=2)  # an engine without requests frees nothing
        for name, engine in zip(("prefill", "decode", "the undivided engine"), self._engines, strict=True):
            try:
                engine.settle()
            except TimeoutError as error:
                left = "; ".join(str(self._turns.get(each)) for each in engine.run(open_requests))
                problems.append(f"{name}: {error}: {left}")
                continue
            if (kept := engine.num_blocks - 1 - engine.num_free_blocks()) > 0:  # one is vLLM's null block
                problems.append(f"{name} keeps {kept} blocks")
            elif not engine.run(reset_cache):
                problems.append(f"{name} cannot empty its cache")
        return "; ".join(problems)

    def counts(self) -> Mapping[str, float]:
        """Of decode's connector, and preemptions."""
        prefill, decode = self._prefill.counts, self._decode.counts
        loads = {name: decode[name] for name in ("loads", "failed_loads", "loaded_tokens")}
        loads |= {f"{name} on prefill": prefill[name] for name in ("loads", "failed_loads", "loaded_tokens")}
        return {**loads, "preempted on prefill": prefill["preempted"], "preempted on decode": decode["preempted"]}


def _answer(found: EngineAnswer) -> Answer:
    return Answer(found.tokens, found.logprobs, found.num_local, found.num_external)


def missing(case: VllmCase) -> str:
    """What this machine lacks for a case, empty if nothing."""
    from harness.vllm import models

    return models.missing(models.OPTIONS.get(case.model, {}).get("dtype", "float32"))


def start(case: VllmCase, folder: Path, stack: ExitStack) -> VllmServers:
    """Start the engines of a case, which are stopped with `stack`."""
    return VllmServers(case, folder, stack)
