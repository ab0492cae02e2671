"""The connector in vLLM's scheduler, step by step and without workers: which blocks are kept, found by others, and free."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from disagg import new_request_id
from disagg.core.rows import Slot
from disagg.integrations.handoff import Payload
from disagg.integrations.vllm import scheduler, worker
from disagg.integrations.vllm.groups import Kind, read_groups
from disagg.integrations.vllm.kept import Keeper
from disagg.integrations.vllm.layout import Cache
from disagg.integrations.vllm.metadata import Chunk, Finish, Load, RankAddress, StepMetadata, WorkerReport
from disagg.integrations.vllm.metrics import TransferStats
from disagg.integrations.vllm.prompts import Prompts
from disagg.integrations.vllm.queue import Queue
from disagg.integrations.vllm.scheduler import SchedulerHalf
from disagg.integrations.vllm.transfers import Receive, TransferResults
from disagg.integrations.vllm.worker import WorkerHalf, _frees_early

BLOCK = 32
NUMBERS = itertools.count()
PREFILL = {"do_remote_decode": True}
HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=50)


def recurrent(**more: Any) -> MambaSpec:
    """States as vLLM keeps them beside a prefix cache: of the tokens up to the end of some blocks, and of the newest token."""
    return MambaSpec(block_size=BLOCK, shapes=((4,), (4,)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align", **more)


class Memory:
    """What the workers have written to each block: by position a digest of the tokens up to there. A state has one position."""

    def __init__(self, caches: KVCacheConfig) -> None:
        self.caches = [Cache(group, cast("Any", None), 1) for group in read_groups(caches)]
        self.written: dict[int, dict[int, int]] = {}

    def write(self, cache: Cache, blocks: Sequence[int], tokens: Sequence[int], start: int, stop: int) -> None:
        """Write the tokens `[start, stop)`, or the state of them all."""
        found = digests(tokens)
        rows = cache.rows(blocks)
        if isinstance(rows, Slot):
            self.written[rows.id] = {stop: found[stop]}
            return
        for at in range(start, stop):
            if (page := rows.ids[at // BLOCK]) >= 0:
                self.written.setdefault(int(page), {})[at] = found[at + 1]

    def load(self, load: Load, tokens: Sequence[int], *, fails: bool) -> None:
        """Receive what a request needs; half of it, and of no state, if that fails."""
        for cache, (start, stop) in zip(self.caches, load.needs, strict=True):
            if not fails:
                self.write(cache, load.blocks[cache.group.index], tokens, start, stop)
            elif cache.group.kind is not Kind.STATE:
                self.write(cache, load.blocks[cache.group.index], tokens, start, (start + stop) // 2)

    def has(self, cache: Cache, blocks: Sequence[int], tokens: Sequence[int], start: int, stop: int) -> bool:
        """Whether the tokens `[start, stop)` are in these blocks, or the state of them all in the last one."""
        found = digests(tokens)
        if cache.group.kind is Kind.STATE:
            return self.written.get(blocks[-(-stop // BLOCK) - 1]) == {stop: found[stop]}
        return all(self.written.get(blocks[at // BLOCK], {}).get(at) == found[at + 1] for at in range(start, stop))

    def compute(self, request: Request, blocks: Sequence[Sequence[int]], count: int) -> None:
        """Compute the last `count` tokens that are scheduled of a request, of those before."""
        stop, tokens = request.num_computed_tokens, request.all_token_ids
        for cache, own in zip(self.caches, blocks, strict=True):
            start, group = stop - count, cache.group
            first = 0 if group.window is None else max(0, start - group.window + 1)
            assert start == 0 or self.has(cache, own, tokens, first, start), (group.kind, start)
            if group.kind is Kind.STATE:
                self.written[own[-(-stop // BLOCK) - 1]] = {stop: digests(tokens)[stop]}
            else:
                self.write(cache, own, tokens, start, stop)

    def check_sent(self, part: Chunk | Finish, tokens: Sequence[int], stop: int, *, window_page: int) -> None:
        """What the workers read of a part that is sent is whole: the tokens of a chunk, and at the end the windows and the
        states that decode needs after the first `stop` tokens.
        """
        found, start = digests(tokens), part.start if isinstance(part, Chunk) else 0
        for cache in self.caches:
            if cache.group.is_incremental is not isinstance(part, Chunk):
                continue
            rows = cache.rows(part.blocks[cache.group.index], start=start)
            if isinstance(rows, Slot):
                assert self.written.get(rows.id) == {stop: found[stop]}, stop
                continue
            first = start if isinstance(part, Chunk) else cache.group.needed(0, stop, window_page=window_page)[0]
            for at in range(first, stop):
                page = int(rows.ids[(at - rows.first_token) // BLOCK])
                assert self.written.get(page, {}).get(at) == found[at + 1], (cache.group.kind, at, stop)

    def check_found(self, request: Request, blocks: Sequence[Sequence[Any]]) -> None:
        """What other requests would find of the blocks of a request is whole."""
        for cache, own in zip(self.caches, blocks, strict=True):
            ids = [block.block_id for block in own]
            for index, block in enumerate(own):
                if block.block_hash is not None and not block.is_null:
                    stop = block.block_hash_num_tokens
                    assert self.has(cache, ids, request.all_token_ids, index * BLOCK, stop), (cache.group.kind, index, stop)


def digests(tokens: Sequence[int]) -> list[int]:
    """Of each beginning of some tokens."""
    return list(itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=0))


def prompt(num_tokens: int, text: int = 0) -> list[int]:
    """The beginning of a text."""
    return [(text * 31 + at) % 251 for at in range(num_tokens)]


@dataclass
class Server:
    """VLLM's scheduler with the connector. Its workers compute what a step has, and do of transfers what they are told."""

    scheduler: Scheduler
    caches: KVCacheConfig

    def __post_init__(self) -> None:
        self.memory = Memory(self.caches)
        self.loading: dict[str, tuple[Load, list[int]]] = {}
        self.unloadable: set[str] = set()
        address = RankAddress(engine_id="here", address="tcp://127.0.0.1:1", public_key=None, is_alone=True)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): address})
        self.num_blocks = self.num_free

    @property
    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        num_tokens: int,
        params: Mapping[str, Any],
        *,
        max_tokens: int = 2,
        text: int = 0,
        name: str = "",
        embeddings: torch.Tensor | None = None,
    ) -> Request:
        request = Request(
            request_id=name or f"request-{next(NUMBERS)}",
            prompt_token_ids=prompt(num_tokens, text),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            prompt_embeds=embeddings,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, **done: Any) -> tuple[StepMetadata, dict[str, int], list[Any]]:
        """Run one step, after which the workers report what is `done`. Returns the metadata that they got, the number of tokens
        computed of each request, and the outputs.
        """
        for name in set(done.get("finished_recving", ())) - self.unloadable:
            self.memory.load(*self.loading.pop(name), fails=name in done.get("failed_recving", ()))
        planned = self.scheduler.schedule()
        names = list(planned.num_scheduled_tokens)
        known = {name: self.scheduler.requests[name].num_tokens for name in names}
        for name in names:
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
            self.memory.compute(self.scheduler.requests[name], blocks, planned.num_scheduled_tokens[name])
        for name, request in self.scheduler.requests.items():
            self.memory.check_found(request, self.scheduler.kv_cache_manager.get_blocks(name).blocks)
        computed = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[
                [7] if self.scheduler.requests[name].num_computed_tokens >= known[name] else [] for name in names
            ],
            kv_connector_output=KVConnectorOutput(**done) if done else None,
        )
        outputs = self.scheduler.update_from_output(planned, computed)
        told = planned.kv_connector_metadata
        assert isinstance(told, StepMetadata)
        self.unloadable |= set(told.unloadable)
        self.loading |= {each.req_id: (each, list(self.scheduler.requests[each.req_id].all_token_ids)) for each in told.loads}
        return told, planned.num_scheduled_tokens, [each for found in outputs.values() for each in found.outputs]

    def run(self, request: Request, *, fails: bool = False) -> int:
        """Run steps until a request has ended, and its load before. Returns how many of its tokens vLLM has found."""
        loaded, num_found = set[str](), 0
        while not request.is_finished():
            told, _, outputs = self.step(finished_recving=loaded, failed_recving=loaded if fails else set())
            loaded = {load.req_id for load in told.loads}
            num_found += sum(each.prefill_stats.num_local_cached_tokens for each in outputs if each.prefill_stats)
        return num_found

    def num_found(self) -> int:
        """How many blocks another request would find by their contents."""
        return sum(block.block_hash is not None for block in self.scheduler.kv_cache_manager.block_pool.blocks)

    def check_empty(self) -> None:
        self.step()
        assert not self.scheduler.requests
        assert self.num_free == self.num_blocks


Start = Callable[..., Server]


@pytest.fixture
def server(model: Callable[[str], Path]) -> Start:
    """Makes a scheduler with so many blocks. A step computes at most `budget` tokens."""
    init_none_hash(sha256)

    def make(
        num_blocks: int = 64,
        policy: str = "recompute",
        specs: Sequence[KVCacheSpec] = (FULL,),
        budget: int | None = None,
        role: str = "kv_both",
    ) -> Server:
        config = EngineArgs(
            model=str(model("llama")),
            dtype="float32",
            block_size=BLOCK,
            max_model_len=1536,
            enable_prefix_caching=True,
            async_scheduling=False,
            skip_tokenizer_init=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="DisaggConnector",
                kv_connector_module_path="disagg.integrations.vllm",
                kv_role=role,
                kv_load_failure_policy=policy,
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        caches = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"model.layers.{layer}.attn"], spec) for layer, spec in enumerate(specs)],
        )
        made = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        if budget is not None:
            made.max_num_scheduled_tokens = budget
        made.num_lookahead_tokens = max(group.num_scratch for group in read_groups(caches))
        return Server(made, caches)

    return make


def handed_over(window_page: int = 1) -> dict[str, Any]:
    """The parameters of a request that another server prefills."""
    where = {"remote_engine_id": "there", "remote_address": "tcp://127.0.0.1:2", "remote_window_page": window_page}
    return {"do_remote_prefill": True, **where, "remote_request_id": new_request_id().hex()}


@pytest.mark.parametrize("num_tokens", [2, 20, 64, 80])
@pytest.mark.parametrize("leaves", [False, True], ids=["decode takes it", "its client leaves"])
def test_prefill_keeps_blocks_until_they_are_sent(server: Start, num_tokens: int, leaves: bool) -> None:
    """The second time vLLM finds some of them in its cache. It ignores an abort of a request that has finished."""
    prefill = server()
    for _ in range(2):
        request = prefill.add(num_tokens, PREFILL, max_tokens=5)
        told, _, (output,) = prefill.step()
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert output.kv_transfer_params["remote_num_tokens"] == num_tokens - 1
        (chunk,), (finish,) = told.chunks, told.finishes
        assert (chunk.start, chunk.stop) == (0, num_tokens - 1)
        num_kept = -(-num_tokens // BLOCK)
        assert [len(blocks) for blocks in finish.blocks] == [num_kept]
        assert chunk.blocks[0] == finish.blocks[0][: -(-(num_tokens - 1) // BLOCK)]
        if leaves:
            prefill.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
        prefill.step()
        assert prefill.num_free == prefill.num_blocks - num_kept
        prefill.step(finished_sending={request.request_id})
        prefill.check_empty()


@pytest.mark.parametrize("num_tokens", [2, 33, 64, 80])
def test_blocks_are_found_once_they_are_loaded(server: Start, num_tokens: int) -> None:
    """Decode computes the last prompt token, whether or not it fills a block."""
    decode = server()
    request = decode.add(num_tokens, handed_over())
    told, computed, outputs = decode.step()
    (load,) = told.loads
    assert (load.req_id, load.start, load.stop) == (request.request_id, 0, num_tokens - 1)
    assert not computed
    assert not outputs
    for _ in range(3):
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert decode.num_free == decode.num_blocks - -(-(num_tokens - 1) // BLOCK)
        assert decode.num_found() == 0
        told, computed, _ = decode.step()
        assert (told.loads, computed) == ([], {})
    decode.step(finished_recving={request.request_id})
    _, computed, _ = decode.step()
    assert computed == {request.request_id: 1}
    assert decode.num_found() == num_tokens // BLOCK
    decode.step()
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    decode.check_empty()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
def test_a_server_computes_what_has_its_own_name(server: Start, address: str, caplog: pytest.LogCaptureFixture) -> None:
    """It kept the request itself, has restarted since, or another server has its name, which it says."""
    decode = server()
    decode.add(80, handed_over() | {"remote_engine_id": "here", "remote_address": address})
    told, *_ = decode.step()
    assert (len(told.loads), len(told.given_up)) == (0, 1)
    assert ("give each server an engine_id of its own" in caplog.text) is address.endswith(":2")


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_nothing_is_found_of_a_load_that_failed(server: Start, policy: str) -> None:
    decode = server(policy=policy)
    request = decode.add(80, handed_over())
    decode.step()
    decode.step(finished_recving={request.request_id}, failed_recving={request.request_id})
    assert decode.num_found() == 0
    if policy == "fail":
        assert request.status == RequestStatus.FINISHED_ERROR
        decode.check_empty()
        return
    told, computed, _ = decode.step()
    assert not told.loads
    assert computed == {request.request_id: 80}
    decode.step()
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    decode.check_empty()


def test_blocks_of_a_load_are_kept_when_its_client_leaves(server: Start) -> None:
    """Prefill may write them until the workers report the end of the load."""
    decode = server()
    request = decode.add(80, handed_over())
    decode.step()
    decode.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    told, *_ = decode.step()
    assert told.aborts == [request.request_id]
    decode.step()
    assert decode.num_free == decode.num_blocks - 3
    decode.step(finished_recving={request.request_id})
    decode.check_empty()


def test_a_request_is_computed_although_its_transfer_was_aborted_and_may_still_be_written(server: Start) -> None:
    """A proxy asks decode again with the same hand-over. The workers report the first load once its lease is released."""
    decode = server()
    params = handed_over()
    first = decode.add(80, dict(params))
    decode.step()
    decode.scheduler.finish_requests([first.request_id], RequestStatus.FINISHED_ABORTED)
    second = decode.add(80, dict(params))
    told, computed, _ = decode.step()
    assert (told.aborts, told.loads, computed) == ([first.request_id], [], {second.request_id: 80})
    decode.run(second)
    decode.step(finished_recving={first.request_id})
    decode.check_empty()


def test_a_request_is_loaded_from_a_server_that_was_restarted(server: Start) -> None:
    """A proxy asks decode again with what prefill has answered: the id of the transfer is that of the first time."""
    decode = server()
    old = handed_over()
    new = {**old, "remote_engine_id": "there-again", "remote_address": "tcp://127.0.0.1:3"}
    first = decode.add(80, dict(old))
    decode.step()
    decode.scheduler.finish_requests([first.request_id], RequestStatus.FINISHED_ABORTED)
    second = decode.add(80, dict(new))
    told, *_ = decode.step()
    assert [(load.req_id, load.hand_off.remote_engine_id) for load in told.loads] == [(second.request_id, "there-again")]
    decode.step(finished_recving={first.request_id, second.request_id})
    decode.run(second)
    decode.check_empty()


@pytest.mark.parametrize("name", ["{}_cmpl-a-0-0123abcd", "cmpl-a-{}-0123abcd"], ids=["answer", "prompt"])
def test_only_the_first_answer_and_the_first_prompt_take_a_hand_over(server: Start, name: str) -> None:
    """The others may come to another replica, which must neither load nor decline it."""
    decode, given = server(), handed_over()
    later = decode.add(80, dict(given), name=name.format(1))
    told, *_ = decode.step()
    assert (told.loads, told.declines) == ([], [])
    decode.run(later)
    first = decode.add(80, dict(given), text=1, name=name.format(0))
    told, *_ = decode.step()
    assert [load.req_id for load in told.loads] == [first.request_id]
    decode.step(finished_recving={first.request_id})
    decode.run(first)
    decode.check_empty()


@pytest.mark.parametrize(("specs", "num_loads"), [((FULL,), 1), ((FULL, WINDOW), 0)])
def test_embeddings_are_loaded_of_plain_models_only(server: Start, specs: Sequence[KVCacheSpec], num_loads: int) -> None:
    """A server with windows prefills them for itself, so there is nothing that a policy could let fail."""
    decode = server(policy="fail", specs=specs)
    request = decode.add(80, handed_over(), embeddings=torch.zeros(80, 256))
    told, *_ = decode.step()
    assert (len(told.loads), len(told.declines)) == (num_loads, 1 - num_loads)
    if told.loads:
        decode.step(finished_recving={request.request_id})
    decode.run(request)
    decode.check_empty()


def test_a_later_prompt_does_not_end_the_hand_over_of_the_first(server: Start) -> None:
    """Both have the id that the proxy has chosen. Nothing is handed over of a prompt of one token."""
    prefill, params = server(), {**PREFILL, "transfer_id": "chosen"}
    first = prefill.add(80, params, max_tokens=1, name="cmpl-a-0-0123abcd")
    told, _, (output,) = prefill.step()
    assert len(told.finishes) == 1
    assert output.kv_transfer_params["remote_num_tokens"] == 79
    for num_tokens in (1, 40):
        later = prefill.add(num_tokens, params, max_tokens=1, text=1, name="cmpl-a-1-0123abcd")
        told, *_ = prefill.step()
        assert later.is_finished()
        assert (told.given_up, told.openings, told.aborts) == ([], [], [])
    prefill.step(finished_sending={first.request_id})
    prefill.check_empty()


@pytest.mark.parametrize(("role", "num_tokens"), [("kv_both", 1), ("kv_producer", 1), ("kv_consumer", 5)])
def test_the_answer_that_nothing_is_handed_over(
    server: Start, role: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill ends before it has read an adapter; decode is no prefill, whatever a proxy sends it."""
    monkeypatch.setattr(Prompts, "is_known", lambda *_: False)
    prefill = server(role=role)
    request, answers = prefill.add(80, PREFILL, max_tokens=5), []
    while not request.is_finished():
        answers += prefill.step()[2]
    assert request.num_output_tokens == num_tokens
    assert answers[-1].kv_transfer_params == {"do_remote_prefill": False, "do_remote_decode": False}
    prefill.check_empty()


def test_of_two_hand_overs_in_a_request_one_is_loaded(server: Start) -> None:
    """Its blocks come back, although the load has failed and may still write them for a while."""
    decode = server()
    request = decode.add(80, {**handed_over(), "kept": {**handed_over(), "remote_num_tokens": 40, "remote_keep_s": 9.0}})
    decode.step()
    held = WorkerReport(leases=Counter([request.request_id]))
    loaded = {request.request_id}
    decode.step(finished_recving=loaded, failed_recving=loaded, kv_connector_worker_meta=held)
    decode.run(request)
    decode.step(kv_connector_worker_meta=WorkerReport(leases=Counter({request.request_id: -1})))
    decode.check_empty()


def test_blocks_that_a_window_has_left_do_not_count_as_kept(server: Start) -> None:
    """Twelve of the full group and two of the window: 14, of at most 16."""
    keeper = server(num_blocks=64, specs=(FULL, WINDOW))
    request = keeper.add(384, {"keep": True}, max_tokens=1)
    _, _, (output,) = keeper.step()
    assert request.is_finished()
    assert output.kv_transfer_params["kept"]["remote_num_tokens"] == 384


def test_loads_wait_for_room(server: Start) -> None:
    """Seven blocks are free, and each of five requests needs three for its load and a fourth for its answer."""
    decode = server(num_blocks=8)
    waiting = [decode.add(90, handed_over(), max_tokens=8, text=number) for number in range(5)]
    begun: list[str] = []
    loading: set[str] = set()
    for _ in range(100):
        told, *_ = decode.step(finished_recving=loading)
        loading = {load.req_id for load in told.loads}
        begun += sorted(loading)
        if all(request.is_finished() for request in waiting):
            break
    assert begun == [request.request_id for request in waiting]
    assert all(request.num_output_tokens == 8 for request in waiting)
    decode.check_empty()


@pytest.mark.parametrize("pause", list(PauseState), ids=lambda pause: pause.name)
def test_vllm_steps_while_a_request_is_kept(server: Start, pause: PauseState) -> None:
    """Otherwise an idle or paused server would never free the blocks of one whose time has passed."""
    decode = server()
    assert not decode.scheduler.has_requests()
    request = decode.add(80, {"keep": True})
    decode.step()
    _, _, (output,) = decode.step()
    assert output.kv_transfer_params["kept"]["remote_num_tokens"] == 81
    decode.scheduler.set_pause_state(pause)
    for _ in range(2):
        decode.step()
        assert decode.scheduler.has_requests()
        assert decode.num_free == decode.num_blocks - 3
    decode.step(kv_connector_worker_meta=WorkerReport(ended=Counter([request.request_id])))
    assert not decode.scheduler.has_requests()
    decode.check_empty()


class Fault(Exception):
    """What must not end a step."""


def fail(*_: object, **__: object) -> Any:
    raise Fault


def test_a_step_has_what_the_hooks_have_noted_whatever_fails_in_it(
    server: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Making room, renewing, or one request of two that are computed. Decode is told that it does not get that one."""
    both = server()
    loading = both.add(80, handed_over())
    broken, whole = (both.add(40, PREFILL, text=number) for number in (1, 2))
    digest = Prompts.digest

    def fail_of_one(self: Prompts, request: Request, num_tokens: int) -> str:
        return fail() if request is broken else digest(self, request, num_tokens)

    monkeypatch.setattr(Keeper, "make_room", lambda *_, num_requests=None: num_requests and fail())
    monkeypatch.setattr(Queue, "take_due", fail)
    monkeypatch.setattr(Prompts, "digest", fail_of_one)
    told, computed, outputs = both.step()
    assert told.openings
    assert computed.keys() == {broken.request_id, whole.request_id}
    assert [load.req_id for load in told.loads] == [loading.request_id]
    assert [finish.req_id for finish in told.finishes] == [whole.request_id]
    assert [output.kv_transfer_params["do_remote_prefill"] for output in outputs] == [False, True]
    for cost in (
        "no kept request makes room",
        "are not renewed in this step",
        f"request {broken.request_id}: it is not handed",
    ):
        assert cost in caplog.text
    told, *_ = both.step()
    assert told.aborts == [broken.request_id]
    assert len(told.given_up) == 1
    assert told.held == [whole.request_id]
    both.step(finished_recving={loading.request_id}, finished_sending={whole.request_id})
    both.step()
    both.step()
    both.check_empty()


def test_blocks_are_held_whatever_fails_when_a_request_ends(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode may already have all that it gets of a request, and copies may read its blocks."""
    prefill = server()
    request = prefill.add(80, PREFILL)
    monkeypatch.setattr(SchedulerHalf, "_unresolved", fail)
    prefill.step()
    told, *_ = prefill.step()
    assert told.held == [request.request_id]
    assert prefill.num_free == prefill.num_blocks - 3
    prefill.step(finished_sending={request.request_id})
    prefill.check_empty()


def test_an_aborted_load_is_ended_whatever_fails_then(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = server()
    request = decode.add(80, handed_over())
    decode.step()
    monkeypatch.setattr(SchedulerHalf, "_unresolved", fail)
    decode.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    told, *_ = decode.step()
    assert told.aborts == [request.request_id]
    decode.step(finished_recving={request.request_id})


def test_a_load_that_cannot_be_begun_fails_at_once(server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its request would wait for a load that no worker has begun."""
    decode = server()
    request = decode.add(80, handed_over())
    with monkeypatch.context() as broken:
        broken.setattr(Prompts, "digest", fail)
        told, *_ = decode.step()
    assert (told.unloadable, told.loads) == ([request.request_id], [])
    assert [each.remote_request_id for each in told.declines] == [request.kv_transfer_params["remote_request_id"]]
    decode.step(finished_recving={request.request_id}, failed_recving={request.request_id})
    assert decode.run(request) == 0
    decode.check_empty()


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "windows"])
def test_fewer_tokens_than_were_offered_are_not_loaded(
    server: Start, specs: Sequence[KVCacheSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM may take fewer of the tokens that a connector has, for instance whole blocks only."""
    decode = server(specs=specs)
    offer = decode.scheduler.connector.get_num_new_matched_tokens

    def cut(request: Request, num_computed: int) -> tuple[int, bool]:
        count, between_steps = offer(request, num_computed)
        return count - count % BLOCK, between_steps

    monkeypatch.setattr(decode.scheduler.connector, "get_num_new_matched_tokens", cut)
    request = decode.add(80, handed_over())
    told, *_ = decode.step()
    assert (told.unloadable, told.loads) == ([request.request_id], [])
    assert "expected to load 79 tokens, found that vLLM takes 64" in caplog.text
    decode.step(finished_recving={request.request_id}, failed_recving={request.request_id})
    decode.run(request)
    decode.check_empty()


MIXES: dict[str, tuple[KVCacheSpec, ...]] = {
    "windows": (FULL, WINDOW),
    "states": (FULL, recurrent()),
    "states and drafts": (FULL, recurrent(num_speculative_blocks=2)),
    "windows and states": (FULL, WINDOW, recurrent()),
}
LENGTHS = (2, 32, 33, 64, 65, 97, 161, 200)
NEAR_BORDERS = (2, 32, 33, 34, 64, 65, 66, 97, 161, 200)


@pytest.mark.parametrize("window_page", [1, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_what_is_found_after_a_load_is_whole(server: Start, mix: str, window_page: int) -> None:
    """After loads that have failed in part as well, and by requests that share a part of the prompt, some of which are handed
    over. vLLM then computes with the blocks it found and the ones it loaded.
    """
    decode = server(num_blocks=512, specs=MIXES[mix])
    num_found = 0
    for text, length in enumerate(LENGTHS):
        decode.run(decode.add(length, handed_over(window_page), max_tokens=40, text=text), fails=True)
        decode.scheduler.kv_cache_manager.reset_prefix_cache()
        decode.run(decode.add(length, handed_over(window_page), max_tokens=40, text=text))
        for more in (length // 2 + 1, length, length + 50):
            for params in ({}, handed_over(window_page)):
                num_found += decode.run(decode.add(more, params, max_tokens=40, text=text))
    assert num_found > 0
    decode.check_empty()


@pytest.mark.parametrize("first_token", [False, True], ids=["", "first token"])
@pytest.mark.parametrize("budget", [20, 50, 512], ids="{} tokens a step".format)
@pytest.mark.parametrize("mix", MIXES)
def test_what_is_sent_is_of_the_tokens_that_the_handover_says(server: Start, mix: str, budget: int, first_token: bool) -> None:
    """When the workers read it, and for as long as they may: another request is computed meanwhile. The second time vLLM finds
    a part of the prompt in its cache.
    """
    prefill = server(num_blocks=48, specs=MIXES[mix], budget=budget)
    num_found = 0
    for text, length in enumerate(NEAR_BORDERS):
        tokens, num_sent = prompt(length, text), length if first_token else length - 1
        for _ in range(2):
            request = prefill.add(length, {**PREFILL, "first_token": first_token}, max_tokens=5, text=text)
            finishes: list[Finish] = []
            answers: list[Any] = []
            chunks: list[Chunk] = []
            while not (finishes and answers):
                told, _, outputs = prefill.step()
                for chunk in told.chunks:
                    prefill.memory.check_sent(chunk, tokens, chunk.stop, window_page=BLOCK)
                chunks, finishes, answers = chunks + told.chunks, finishes + told.finishes, answers + outputs
            (finish,), (answer,) = finishes, answers
            borders = [0, *(chunk.stop for chunk in chunks)]
            assert [chunk.start for chunk in chunks] == borders[:-1]
            assert borders[-1] == num_sent
            assert Payload.decode(finish.payload).num_tokens == answer.kv_transfer_params["remote_num_tokens"] == num_sent
            page = answer.kv_transfer_params["remote_window_page"]
            num_found += answer.prefill_stats.num_local_cached_tokens
            prefill.memory.check_sent(finish, tokens, num_sent, window_page=page)
            prefill.run(prefill.add(200, {}, max_tokens=40, text=100 + text))
            prefill.memory.check_sent(finish, tokens, num_sent, window_page=page)
            for chunk in chunks:
                prefill.memory.check_sent(chunk, tokens, chunk.stop, window_page=page)
            prefill.step(finished_sending={request.request_id})
    assert num_found > 0
    prefill.check_empty()


@pytest.mark.parametrize(("is_async", "num_stages"), [(True, 1), (False, 2), (False, 1)])
def test_servers_that_give_blocks_away_before_a_step_has_written_them(is_async: bool, num_stages: int) -> None:
    """Loads wait for that step on a server that only produces, which may load the next turn."""
    config: Any = SimpleNamespace(
        speculative_config=None,
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        kv_transfer_config=KVTransferConfig(kv_connector="DisaggConnector", kv_role="kv_both"),
    )
    assert not _frees_early(config)
    config.kv_transfer_config.kv_role = "kv_producer"
    assert _frees_early(config) is (is_async or num_stages > 1)
    config.kv_transfer_config.kv_role = "kv_consumer"
    assert not _frees_early(config)
    config.speculative_config = SimpleNamespace(method="eagle")  # this runner reports a step before the draft model has run
    assert _frees_early(config) is (is_async or num_stages > 1)
    config.use_v2_model_runner = False
    assert not _frees_early(config)


@pytest.mark.parametrize("is_asked_at_once", [False, True])
def test_a_preempted_request_is_ended_in_the_step_that_takes_its_blocks(server: Start, is_asked_at_once: bool) -> None:
    """It may be computed much later. Until then decode would wait for it, and its rows would count as being read."""
    prefill = server(budget=32)
    chosen = {"remote_request_id": new_request_id().hex()} if is_asked_at_once else {}
    request = prefill.add(80, {**PREFILL, **chosen}, max_tokens=1)
    prefill.step()
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    told, *_ = prefill.step()
    assert (told.aborts, len(told.given_up)) == (([], 1) if is_asked_at_once else ([request.request_id], 0))
    chunks = list(told.chunks)
    while not request.is_finished():
        told, *_ = prefill.step()
        chunks += told.chunks
    assert [(each.attempt, each.start) for each in chunks] == ([] if is_asked_at_once else [(1, 0), (1, 32), (1, 64)])


@pytest.mark.parametrize(("readers", "is_ended"), [(None, True), (frozenset(), True), (frozenset({0}), False)])
def test_a_request_that_is_being_taken_is_not_ended_as_one_that_nobody_takes(
    readers: frozenset[int] | None, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, aborted = 100.0, list[str]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now))
    half: Any = object.__new__(WorkerHalf)
    half._options = SimpleNamespace(hold_s=60.0, max_hold_s=600.0, keep_s=120.0)
    handle = SimpleNamespace(readers=readers, wanted_at=None, abort=aborted.append)
    half._sends = {"name": SimpleNamespace(finished_s=now, handle=handle, is_kept=False)}
    for now in (159.0, 161.0):
        half._end_late_sends()
        assert bool(aborted) is (is_ended and now > 160)
    now = 701.0
    half._end_late_sends()
    assert len(aborted) == 1


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_worker_that_stood_still_does_not_take_that_for_being_blocked(
    stands_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decode has sent meanwhile was not read yet."""
    now, ended = 100.0, list[str]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now))
    half: Any = object.__new__(WorkerHalf)
    half._blocked_since_s, half._looked_s = float("inf"), now
    held = SimpleNamespace(finished_s=now, lease=None, handle=SimpleNamespace(readers=None, abort=ended.append))
    wanted = SimpleNamespace(finished_s=None, lease=None, handle=SimpleNamespace(readers=("d",)))
    half._sends = {"held": held, "wanted": wanted}
    half._end_blocking_send(idle=True)
    for _ in range(1 if stands_still else 60):
        now += 6.0 if stands_still else 0.1
        half._end_blocking_send(idle=True)
    assert len(ended) == (0 if stands_still else 1)


def test_a_load_that_the_server_has_aborted_counts_as_none() -> None:
    """Its client has left."""
    half: Any = object.__new__(WorkerHalf)
    half._stats, half._results, half._sends = TransferStats(), TransferResults(), {}
    half._receives = {name: Receive(name, 3, 3, "") for name in ("aborted", "failed")}
    half._abort("aborted")
    for receive in list(half._receives.values()):
        half._end_receive(receive, ok=False)
    assert (half._stats.data["loads"], half._stats.data["failed_loads"]) == (1, 1)
    assert half._results.failed_recving == {"aborted", "failed"}


def ended(server: Server, request: Request) -> tuple[list[Finish], dict[str, Any]]:
    """Run a request to its end. Returns what is sent to decode, and its parameters."""
    finishes, answers = list[Finish](), list[Any]()
    while not answers or answers[-1].finish_reason is None:
        told, _, outputs = server.step()
        finishes += told.finishes
        answers += [each for each in outputs if each.request_id == request.request_id]
    told, *_ = server.step()
    return finishes + told.finishes, answers[-1].kv_transfer_params


def loads_100_in_part(server: Server, params: Mapping[str, Any], num_tokens: int) -> Request:
    """A request that has loaded 100 tokens of a server with windows from any multiple of 16 on, so nothing before token 51."""
    kept = {**handed_over(16), "remote_num_tokens": 100, "remote_keep_s": 9.0}
    request = server.add(num_tokens, {**params, "kept": kept})
    told, *_ = server.step()
    (load,) = told.loads
    assert load.needs[1] == (51, 100)
    server.step(finished_recving={request.request_id})
    return request


@pytest.mark.parametrize("num_tokens", [101, 120, 160])
def test_another_server_takes_no_part_of_a_windows_block_that_was_not_loaded(server: Start, num_tokens: int) -> None:
    """Otherwise it would treat the block as complete, and compute another request from leftover data."""
    keeps = server(specs=(FULL, WINDOW))
    request = loads_100_in_part(keeps, {"keep": True}, num_tokens)
    (finish,), params = ended(keeps, request)
    kept, tokens = params["kept"], list(request.all_token_ids)
    page = kept["remote_window_page"]
    assert page == (1 if num_tokens == 101 else BLOCK)  # later the window is past that block
    keeps.memory.check_sent(finish, tokens, kept["remote_num_tokens"], window_page=page)


@pytest.mark.parametrize("num_tokens", [108, 160])
@pytest.mark.parametrize("is_asked_at_once", [False, True])
def test_prefill_hands_over_no_part_of_a_windows_block_that_it_has_not_loaded(
    server: Start, num_tokens: int, is_asked_at_once: bool
) -> None:
    """A decode server that is asked at once was told the page before: so prefill computes what would be sent in part."""
    prefill = server(specs=(FULL, WINDOW))
    chosen = {"remote_request_id": new_request_id().hex()} if is_asked_at_once else {}
    if is_asked_at_once and num_tokens == 108:
        kept = {**handed_over(16), "remote_num_tokens": 100, "remote_keep_s": 9.0}
        request = prefill.add(num_tokens, {**PREFILL, **chosen, "kept": kept})
        planned = prefill.scheduler.schedule().kv_connector_metadata
        assert isinstance(planned, StepMetadata)
        assert (planned.loads, len(planned.declines)) == ([], 1)
        return
    request = loads_100_in_part(prefill, {**PREFILL, **chosen}, num_tokens)
    (finish,), params = ended(prefill, request)
    page = params["remote_window_page"]
    assert page == (1 if num_tokens == 108 else BLOCK)
    prefill.memory.check_sent(finish, prompt(num_tokens), num_tokens - 1, window_page=page)


def test_blocks_that_another_connector_reports_invalid_are_not_handed_over(server: Start) -> None:
    """It computes them again, in the step after the one in which the workers were told to send them."""
    prefill = server()
    address = RankAddress(engine_id="here", address="tcp://127.0.0.1:1", public_key=None, is_alone=False)
    prefill.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): address})
    request = prefill.add(80, PREFILL, max_tokens=1)
    planned = prefill.scheduler.schedule()
    told = planned.kv_connector_metadata
    assert isinstance(told, StepMetadata)
    assert ([(chunk.start, chunk.stop) for chunk in told.chunks], told.finishes) == ([(0, 79)], [])
    blocks = prefill.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    planned.num_scheduled_tokens[request.request_id] = planned.total_num_scheduled_tokens = 48  # 32 were loaded before
    request.num_in_flight_tokens = 48
    report = KVConnectorOutput(invalid_block_ids={blocks[0]})
    names = [request.request_id]
    computed = ModelRunnerOutput(names, {names[0]: 0}, sampled_token_ids=[[7]], kv_connector_output=report)
    prefill.scheduler.update_from_output(planned, computed)
    assert request.num_computed_tokens == 0
    told, _, (output,) = prefill.step()
    assert (told.chunks, told.finishes) == ([], [])
    assert output.kv_transfer_params == {"do_remote_prefill": False, "do_remote_decode": False}
    told, *_ = prefill.step()
    assert (len(told.given_up), told.aborts) == (1, names)
    prefill.check_empty()


def test_blocks_of_a_failed_load_come_back_although_another_connector_then_loads(server: Start) -> None:
    """The first of a `MultiConnector` that has tokens loads them, and both hear of its end."""
    decode = server()
    request = decode.add(80, handed_over())
    name, connector, asked = request.request_id, decode.scheduler.connector, list[int]()
    decode.step()
    ask, place = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def first_with_tokens(request: Request, num_computed: int) -> tuple[int | None, bool]:
        asked.append(num_computed)
        return ask(request, num_computed) if len(asked) > 1 else (64 - num_computed, True)

    connector.get_num_new_matched_tokens = first_with_tokens
    connector.update_state_after_alloc = lambda request, blocks, _: place(request, blocks, 0)
    decode.loading.pop(name)
    decode.unloadable.add(name)
    held = WorkerReport(leases=Counter([name]))
    decode.step(finished_recving={name}, failed_recving={name}, kv_connector_worker_meta=held)
    decode.step()
    for cache, own in zip(decode.memory.caches, decode.scheduler.kv_cache_manager.get_block_ids(name), strict=True):
        decode.memory.write(cache, own, request.all_token_ids, 0, 64)
    decode.step(finished_recving={name})
    decode.run(request)
    decode.step(kv_connector_worker_meta=WorkerReport(leases=Counter({name: -1})))
    decode.check_empty()


@pytest.mark.parametrize(("num_more", "is_stopped"), [(1, False), (2, True)])
def test_an_answer_that_ends_at_the_longest_length_does_not_move(server: Start, num_more: int, is_stopped: bool) -> None:
    """Another server of the same length has no room for more."""
    decode, move_id = server(num_blocks=128), new_request_id().hex()
    request = decode.add(1500, {"move_id": move_id}, max_tokens=100)
    while request.num_tokens < 1536 - num_more:
        decode.step()
    stop, answers = decode.add(1, {"stop_request_id": move_id}, max_tokens=1, text=3), list[Any]()
    while not (request.is_finished() and stop.is_finished()):
        answers += decode.step()[2]
    (told,) = [each.kv_transfer_params for each in answers if each.request_id == stop.request_id]
    assert ("stopped" in told, "kept" in told) == (is_stopped, is_stopped)


@pytest.mark.parametrize(("num_blocks", "lengths"), [(13, (97, 97)), (15, (130, 66))])
@pytest.mark.parametrize("num_failed", [1, 2])
def test_a_failed_load_that_does_not_fit_holds_up_no_other(
    server: Start, num_blocks: int, lengths: tuple[int, int], num_failed: int
) -> None:
    """Computing takes blocks before the window, too, which a load leaves out. The other request holds them."""
    decode = server(num_blocks, specs=(FULL, WINDOW), budget=64)
    requests = [decode.add(length, handed_over(), text=text) for text, length in enumerate(lengths)]
    names = [request.request_id for request in requests]
    assert [load.req_id for load in decode.step()[0].loads] == names
    decode.step(finished_recving=set(names), failed_recving=set(names[:num_failed]))
    for _ in range(20):
        decode.step()
    assert all(request.is_finished() for request in requests)
    decode.check_empty()


def test_a_failed_load_whose_blocks_are_held_holds_up_no_other(server: Start) -> None:
    decode = server(12, budget=64)
    request = decode.add(200, handed_over())
    name = request.request_id
    decode.step()
    held = WorkerReport(leases=Counter([name]))
    decode.step(finished_recving={name}, failed_recving={name}, kv_connector_worker_meta=held)
    decode.run(decode.add(20, {}, text=1))
    assert request.status == RequestStatus.WAITING
    decode.step(kv_connector_worker_meta=WorkerReport(leases=Counter({name: -1})))
    decode.run(request)
    decode.check_empty()


def test_kept_requests_make_room_for_what_a_load_has_left(server: Start) -> None:
    """Of a request that was loaded in part vLLM asks no more, and it may need more blocks than are free."""
    decode = server(16)
    part = {**handed_over(), "remote_num_tokens": 64, "remote_keep_s": 9.0}
    request = decode.add(416, {"kept": part})
    (load,) = decode.step()[0].loads
    assert (load.start, load.stop) == (0, 64)
    small = decode.add(80, {"keep": True}, text=1)
    while not small.is_finished():
        decode.step()
    decode.step(finished_recving={request.request_id})
    told = [decode.step()[0] for _ in range(3)]
    assert sum(len(each.given_up) for each in told) == 1
    decode.step(kv_connector_worker_meta=WorkerReport(ended=Counter([small.request_id])))
    decode.run(request)
    decode.check_empty()


@pytest.mark.parametrize("leaves", [False, True])
def test_vllm_steps_while_blocks_of_a_failed_load_are_held(
    leaves: bool, server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an idle server never hears that they are free, and can neither pause nor reset its cache. Nor may it step for
    ever, also if the client has left.
    """
    decode = server(policy="fail")
    name = decode.add(80, handed_over()).request_id
    decode.step()
    if leaves:
        decode.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
    held = WorkerReport(leases=Counter([name]))
    decode.step(finished_recving={name}, failed_recving={name}, kv_connector_worker_meta=held)
    decode.step()
    assert not decode.scheduler.requests
    assert decode.scheduler.has_requests()
    later_s = time.monotonic() + scheduler.HELD_S
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: later_s)
        assert not decode.scheduler.has_requests()  # it may be for good
    decode.step(kv_connector_worker_meta=WorkerReport(leases=Counter({name: -1})))
    assert not decode.scheduler.has_requests()
    decode.check_empty()


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "not loaded"])
def test_a_client_that_leaves_is_no_refusal(server: Start, loaded: bool) -> None:
    """The frontend then sends the request's parameters once more, without its prompt and as they came."""
    decode, params = server(), handed_over()
    if loaded:
        request = decode.add(80, dict(params))
        decode.run(request)
        params["remote_prompt"] = Prompts(decode.scheduler.vllm_config).digest(request, 79)
    else:
        params["remote_prompt"] = "0" * 32
    stand_in = Request(
        request_id="stand-in",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        abort_immediately=True,
    )
    decode.scheduler.add_request(stand_in)
    decode.scheduler.finish_requests(["stand-in"], RequestStatus.FINISHED_ABORTED)
    assert decode.scheduler.connector.scheduler.take_stats().data["refused_hand_overs"] == 0
    told, _, _ = decode.step()
    assert len(told.declines) == (0 if loaded else 1)
    decode.check_empty()


@pytest.mark.parametrize("wrong", ["text", ["a", "b"], 7, 1.5])
def test_parameters_of_another_type_end_no_server(server: Start, wrong: Any) -> None:
    """A client can send them as `vllm_xargs`."""
    decode = server()
    decode.run(decode.add(40, wrong))
    decode.check_empty()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("leaves", [False, True], ids=["its client waits", "its client leaves"])
def test_nothing_is_kept_of_a_failed_load(server: Start, policy: str, leaves: bool) -> None:
    decode = server(policy=policy)
    request = decode.add(80, handed_over())
    decode.step()
    if leaves:
        decode.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    decode.step(finished_recving={request.request_id}, failed_recving={request.request_id})
    decode.run(request)
    decode.check_empty()
    assert decode.scheduler.connector._scheduler._failed == {}
