"""vLLM's EngineCore in a process of its own, driven by commands: a server without HTTP, as cheap as a test needs.

The process is forked, so vLLM is imported once for all engines. The parent must not start threads that hold locks before.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every engine binds its threads to the same cores
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What engines on a small machine need. Set it before vLLM is imported."""

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""The `kv_transfer_params` that a proxy sends to prefill."""


@dataclass
class Answer:
    """What an engine has generated for one request. `num_external` is vLLM's own count of tokens that it has not computed.
    `drafts` are the tokens that speculation has proposed, by step.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    params: dict[str, Any] | None = None
    num_external: int = 0
    num_local: int = 0
    first_token_s: float | None = None
    drafts: list[list[int]] = field(default_factory=list)


class Engine:
    """An engine with a connector. `options` are vLLM's arguments, `extra` those of the connector, and `transfer` further fields
    of vLLM's `KVTransferConfig`.

    `counts` are those of the connector's statistics so far, by name, and of `preempted` requests and `accepted` drafts.
    `failed_at` are the times at which vLLM got to know of failed loads, as `time.monotonic()` has them.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        model: str,
        *,
        extra: Mapping[str, Any] | None = None,
        connector: str = "DisaggConnector",
        transfer: Mapping[str, Any] | None = None,
        blocks: int = 256,
        **options: Any,
    ) -> None:
        os.environ.update(ENVIRONMENT)
        given = {"kv_connector": connector, "kv_connector_extra_config": dict(extra or {}), **(transfer or {})}
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(theirs, model, given, blocks, options))
        self._process.start()
        theirs.close()
        self.num_blocks = blocks
        self.answers: dict[str, Answer] = {}
        self.counts: Counter[str] = Counter()
        self.failed_at: list[float] = []
        self._begun: dict[str, float] = {}
        self.is_ready = False

    def wait_ready(self) -> Engine:
        """Wait until the engine has started. Raises `RuntimeError` with its reason if it cannot."""
        if not self.is_ready:
            kind, text = self._pipe.recv()
            if kind != "ready":
                raise RuntimeError(text)
            self.is_ready = True
        return self

    def __enter__(self) -> Engine:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def add(
        self,
        prompt: Sequence[int] | None,
        *,
        params: Mapping[str, Any] | None = None,
        max_tokens: int = 8,
        logprobs: int = 1,
        stop: Sequence[int] = (),
        sampling: Mapping[str, Any] | None = None,
        hold_at: int = 0,
        name: str = "",
        **fields: Any,
    ) -> str:
        """Start a request, and return its id, which may be given as `name`. It ends with the first of the tokens `stop`.
        `sampling` are further sampling parameters, and `fields` those of vLLM's `EngineCoreRequest`, such as `cache_salt`.
        Once it has `hold_at` tokens, the engine takes no step until another request comes.
        """
        req_id = name or f"request-{next(self._numbers)}"
        self.answers[req_id] = Answer()
        self._begun[req_id] = time.monotonic()
        ids, given = None if prompt is None else list(prompt), None if params is None else dict(params)
        self._pipe.send(("add", req_id, ids, given, (max_tokens, logprobs, tuple(stop), dict(sampling or {})), hold_at, fields))
        return req_id

    def abort(self, req_id: str) -> None:
        """End a request, as a server does whose client has gone."""
        self._pipe.send(("abort", req_id))

    def wait(self, req_ids: Iterable[str], *, timeout_s: float = 120.0) -> list[Answer]:
        """The complete answers. Raises `TimeoutError`, and `EOFError` if the engine has died."""
        wanted, until = list(req_ids), time.monotonic() + timeout_s
        while any(self.answers[req_id].finish_reason is None for req_id in wanted):
            self.poll(until - time.monotonic())
            if time.monotonic() > until:
                raise TimeoutError(
                    f"not ended within {timeout_s:g} s: {[r for r in wanted if not self.answers[r].finish_reason]}"
                )
        return [self.answers[req_id] for req_id in wanted]

    def poll(self, timeout_s: float) -> None:
        """Read what the engine has to say, for at most `timeout_s` seconds."""
        if not self._pipe.poll(max(0.0, timeout_s)):
            return
        self._take(self._pipe.recv())

    def _take(self, told: tuple[Any, ...]) -> None:
        kind, *values = told
        if kind == "failed":
            raise RuntimeError(values[0])
        if kind == "output":
            req_id, tokens, logprobs, finish_reason, params, counts = values
            answer = self.answers[req_id]
            if tokens and answer.first_token_s is None:
                answer.first_token_s = time.monotonic() - self._begun[req_id]
            answer.tokens += tokens
            answer.logprobs += logprobs
            answer.finish_reason, answer.params = finish_reason, params or answer.params
            if counts is not None:
                answer.num_local, answer.num_external = counts
        elif kind == "drafts":
            req_id, tokens = values
            self.answers[req_id].drafts.append(tokens)
        elif kind == "counts":
            at_s, found = values
            self.counts.update(found)
            self.failed_at += [at_s] * found.get("failed_loads", 0)

    def generate(self, prompts: Iterable[Sequence[int] | None], **options: Any) -> list[Answer]:
        """The answers to prompts that are asked at once."""
        return self.wait([self.add(prompt, **options) for prompt in prompts])

    def num_free_blocks(self) -> int:
        """Blocks that no request has. One of `num_blocks` is vLLM's null block, which is never free."""
        return int(self._ask("free"))

    def settle(self, *, timeout_s: float = 30.0) -> None:
        """Wait until the engine has no request, also none whose blocks another server may still read or write.

        Raises `TimeoutError`.
        """
        until = time.monotonic() + timeout_s
        while self._ask("busy"):
            if time.monotonic() > until:
                raise TimeoutError(f"the engine has requests after {timeout_s:g} s")
            time.sleep(0.05)

    def _ask(self, command: str, *values: Any) -> Any:
        self._pipe.send((command, *values))
        while True:
            told = self._pipe.recv()
            if told[0] == command:
                return told[1]
            self._take(told)

    def run(self, function: Callable[[Any], Any]) -> Any:
        """What a function of a module returns for vLLM's EngineCore, in its process: without parallelism also the worker's."""
        return self._ask("run", function)

    def cpu_s(self) -> float:
        """Seconds of CPU that the engine's processes have used."""
        ticks = 0
        for pid in [*_children(self.pid), self.pid]:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
                ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the engine."""
        for pid in [*_children(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End the engine's processes with SIGKILL."""
        self.signal(signal.SIGKILL)
        self._process.join()

    def stop(self) -> None:
        """Stop the engine."""
        with contextlib.suppress(OSError):
            self._pipe.send(("stop",))
        self._process.join(20)
        if self._process.is_alive():
            self.kill()


def _children(pid: int) -> list[int]:
    """The ids of all processes that `pid` has started, and of theirs."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
            own = [int(child) for child in file.read().split()]
    except OSError:
        return []
    return [each for child in own for each in (*_children(child), child)]


def _serve(pipe: Connection, model: str, transfer: Mapping[str, Any], blocks: int, options: Mapping[str, Any]) -> None:
    """The engine's process."""
    os.setpgid(0, 0)
    try:
        core = _start(model, transfer, blocks, options)
    except BaseException as error:  # noqa: BLE001  (the parent reports it)
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)
    pipe.send(("ready", None))
    try:
        for output in _run(core, pipe):
            pipe.send(output)
    except BaseException:  # noqa: BLE001  (the parent reports it)
        pipe.send(("failed", traceback.format_exc()))
    core.shutdown()
    os._exit(0)


def _start(model: str, connector: Mapping[str, Any], blocks: int, options: Mapping[str, Any]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    module = "disagg.integrations.vllm" if connector["kv_connector"] == "DisaggConnector" else None
    common = {"kv_connector_module_path": module, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer = KVTransferConfig(**{**common, **connector})
    given = {"max_model_len": 1536, "max_num_batched_tokens": 512, "enable_prefix_caching": False, **options}
    config = EngineArgs(
        model=model,
        enforce_eager=bool(given.pop("enforce_eager", True)),
        skip_tokenizer_init=True,
        num_gpu_blocks_override=blocks,
        gpu_memory_utilization=0.05,
        kv_transfer_config=transfer,
        **given,
    ).create_engine_config()
    os.environ.update(ENVIRONMENT)  # vLLM has replaced some
    if config.parallel_config.world_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"
    core = EngineCore(config, Executor.get_class(config), log_stats=True)
    if config.parallel_config.pipeline_parallel_size > 1:
        core.model_executor.collective_rpc(_make_intermediate_tensors)
    return core


def _make_intermediate_tensors(worker: Any) -> None:
    """What a pipeline stage gets from the one before. On the CPU vLLM makes them in a warm-up, which takes a compiled model."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _run(core: Any, pipe: Connection) -> Iterator[tuple[Any, ...]]:
    """Steps the engine while it has requests, and yields what the parent should know."""
    held_at: dict[str, int] = {}
    is_held = False
    while True:
        while pipe.poll(0 if not is_held and (core.scheduler.has_requests() or core.batch_queue) else None):
            command, *told = pipe.recv()
            if command == "stop":
                return
            if command == "add":
                req_id, prompt, params, sampling, hold_at, fields = told
                core.add_request(_request(core, req_id, prompt, params, sampling, fields))
                held_at |= {req_id: hold_at} if hold_at else {}
                is_held = False
            elif command == "abort":
                core.abort_requests(told)
            elif command == "free":
                yield command, core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            elif command == "busy":
                yield command, bool(core.scheduler.requests)
            elif command == "run":
                yield command, told[0](core)
            if is_held or not (core.scheduler.has_requests() or core.batch_queue):
                continue
            break
        for each in _step(core):
            if each[0] == "output" and each[1] in held_at:
                held_at[each[1]] -= len(each[2])
                if held_at[each[1]] <= 0:
                    del held_at[each[1]]
                    is_held = True
            yield each


def _step(core: Any) -> Iterator[tuple[Any, ...]]:
    """One step of the engine."""
    outputs, executed = core.step_fn()
    core.post_step(executed)  # gives the drafts to the scheduler
    for each in (outputs or {}).values():
        speculation = each.scheduler_stats and each.scheduler_stats.spec_decoding_stats
        if speculation:
            yield "counts", time.monotonic(), {"accepted": speculation.num_accepted_tokens}
        for output in each.outputs:
            yield _told(output)
            preempted = sum(event.type.name == "PREEMPTED" for event in output.events or ())
            if preempted:
                yield "counts", time.monotonic(), {"preempted": preempted}
        found = None if each.scheduler_stats is None else each.scheduler_stats.kv_connector_stats
        found = found and found.get("DisaggConnector", found)  # inside MultiConnector by connector
        if found:
            yield "counts", time.monotonic(), {name: count for name, count in found.items() if isinstance(count, int)}
    for request in core.scheduler.running:
        if request.spec_token_ids:
            yield "drafts", request.request_id, list(request.spec_token_ids)


def _request(
    core: Any,
    req_id: str,
    prompt: list[int] | None,
    params: dict[str, Any] | None,
    given: tuple[int, int, tuple[int, ...], dict[str, Any]],
    fields: Mapping[str, Any],
) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    max_tokens, logprobs, stop, others = given
    own = {} if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(
        max_tokens=1 if params and params.get("do_remote_decode") else max_tokens,
        ignore_eos=True,
        stop_token_ids=list(stop),
        logprobs=logprobs,
        **{"temperature": 0.0, **others, "extra_args": own | others.get("extra_args", {}) or None},
    )
    request = EngineCoreRequest(
        request_id=req_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        data_parallel_rank=None,
        **{"lora_request": None, "cache_salt": None, **fields},
    )
    return core.preprocess_add_request(request)[0]


def _told(output: Any) -> tuple[Any, ...]:
    logprobs: list[dict[int, float]] = []
    if output.new_logprobs is not None:
        ids, values = output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs
        logprobs = [
            {int(token): float(value) for token, value in zip(row_ids, row, strict=True)}
            for row_ids, row in zip(ids, values, strict=True)
        ]
    stats = output.prefill_stats
    counts = None if stats is None else (stats.num_local_cached_tokens, stats.num_external_cached_tokens)
    reason = None if output.finish_reason is None else str(output.finish_reason)
    return "output", output.request_id, list(output.new_token_ids), logprobs, reason, output.kv_transfer_params, counts
