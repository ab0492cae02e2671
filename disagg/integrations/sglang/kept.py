"""Requests that have ended, whose pages decode keeps for another server that continues them.

A client gives a request an id in `sampling_params.custom_params`, and asks for the hand-over with it afterwards
(`disagg_kept_request_id`). With `disagg_keep` it is kept at its end, with `disagg_move_id` if a request with
`disagg_stop_request_id` has ended it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import all_reduce_flags
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.common import kv_to_page_indices

from disagg.core.errors import DisaggError
from disagg.integrations.handoff import MAX_BEGINNINGS, HandOff, problem_of_id
from disagg.integrations.sglang.bootstrap import name_of
from disagg.integrations.sglang.facts import Facts
from disagg.integrations.sglang.manager import ENGINE, nobody
from disagg.integrations.sglang.prompts import Prompt
from disagg.integrations.sglang.rows import full_pages
from disagg.requests import Sender

logger = logging.getLogger(__name__)

KEEP, KEPT, KEPT_REQUEST_ID = "disagg_keep", "disagg_kept", "disagg_kept_request_id"
MOVE_ID, STOP_REQUEST_ID, NOT_STOPPED = "disagg_move_id", "disagg_stop_request_id", "disagg_not_stopped"
STOPPED = "disagg_stopped"
"""Marks requests that were stopped to move."""
MAX_TAKING_S = 600.0
"""How long a server may take it, once it has reserved."""
SETTLE_EVERY = 8
"""Loops of the scheduler. All ranks count the same ones."""


@dataclass(frozen=True)
class Kept:
    """`num_tokens` are those of its pages. `release` is SGLang's own of the ended request. `is_stopped`: it was stopped to
    move, and does not count against the bound.
    """

    hand_off: HandOff
    handle: Sender | None
    num_tokens: int
    since_s: float
    release: Callable[[], None]
    is_stopped: bool


class Keeper:
    """All ranks have the same requests, in the same order: SGLang's ranks schedule alike, and release them together."""

    def __init__(self, manager: Any, scheduler: Any) -> None:
        self._manager, self._scheduler, self._keep_s = manager, scheduler, manager.keep_s
        self._max_tokens = int(manager.kept_share * scheduler.token_to_kv_pool_allocator.size)
        self._max_requests = int(manager.kept_share * scheduler.req_to_token_pool.size)
        self._reason = reason_against(manager, scheduler)
        self._requests: dict[str, Kept] = {}
        self._num_loops = 0

    def __len__(self) -> int:
        return len(self._requests)

    def keep(self, request: Any, release: Callable[[], None]) -> bool:
        """Keep a request that asks for it, or was stopped to move, and has ended normally. Its `release` is called once no
        server may read its pages any more.
        """
        is_stopped = getattr(request, STOPPED, False)
        given = asked(request, MOVE_ID if is_stopped else KEEP)
        if not given or not request.finished() or isinstance(request.finished_reason, FINISH_ABORT):
            return False
        request_id = str(given)
        prompt = _answered(self._manager.host.prompt(request), request)
        reason = self._reason or problem_of_id(request_id, KEEP)
        if request_id in self._requests:
            reason = reason or f"another request is kept by the id {request_id}"
        if reason := reason or self._problem(request, prompt, is_stopped=is_stopped):
            logger.warning("request %s: it is not kept: %s", request.rid, reason)
            return False
        num_tokens = self._whole_pages(prompt.num_tokens - 1)
        if not is_stopped:
            self._make_room_within_share(num_tokens)
        offered = self._offer(request, prompt, request_id)
        self._requests[request_id] = Kept(*offered, num_tokens, time.monotonic(), release, is_stopped)
        return True

    def _problem(self, request: Any, prompt: Prompt, *, is_stopped: bool) -> str:
        num_tokens = prompt.num_tokens - 1  # the last one was drawn, and not computed
        if prompt.embeddings is not None or prompt.replaced is not None:
            return "prompts of embeddings cannot be compared with longer ones"
        if not 0 < num_tokens <= request.owned_kv_len():
            return f"expected the state of {num_tokens} tokens, found that of {request.owned_kv_len()}"
        if not is_stopped and (self._whole_pages(num_tokens) > self._max_tokens or not self._max_requests):
            return (
                f"expected at most {self._max_tokens} tokens and {self._max_requests} requests (kept_share), found {num_tokens}"
            )
        return ""

    def _whole_pages(self, num_tokens: int) -> int:
        page_size = int(self._manager.kv_args.page_size)
        return -(-num_tokens // page_size) * page_size

    def _make_room_within_share(self, num_tokens: int) -> None:
        while own := {name: kept for name, kept in self._requests.items() if not kept.is_stopped}:
            num_kept = sum(kept.num_tokens for kept in own.values())
            if num_kept + num_tokens <= self._max_tokens and len(own) < self._max_requests:
                return
            self._give_up(next(iter(own)))

    def _offer(self, request: Any, prompt: Prompt, request_id: str) -> tuple[HandOff, Sender | None]:
        """Offer a request's state to the first server that asks for it. The sender is `None` if that failed."""
        manager, scheduler, num_tokens = self._manager, self._scheduler, prompt.num_tokens - 1
        digests = [digest for _, digest in prompt.beginnings(num_tokens)]
        hand_off = HandOff(
            remote_engine_id=name_of(manager.leader),
            remote_address=manager.leader,
            remote_request_id=request_id,
            remote_num_tokens=num_tokens,
            remote_prompt=prompt.digest(num_tokens),
            remote_beginnings="".join(digests[:MAX_BEGINNINGS]),
            remote_keep_s=self._keep_s,
        )
        payload = hand_off.payload(ENGINE, first_token=int(prompt.token_ids[-1]))
        indices = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :num_tokens]
        indices = scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(indices)
        rows = full_pages(kv_to_page_indices(indices, manager.kv_args.page_size), 0, facts=manager.facts)
        handle: Sender | None = None
        try:
            handle = manager.transfers.sender(
                hand_off.request_id, peer=None, attempt=None, deadline_s=None, tag=nobody, label=str(request.rid)
            )
            handle.send(rows, tokens=(0, num_tokens), ready=manager.host.launched())
            handle.finish({}, payload=payload.encode())
        except DisaggError as error:
            logger.warning("request %s: its state cannot be handed over: %s", request.rid, error)
        return hand_off, handle

    def stop(self, request_id: str) -> str:
        """End the running request with this `disagg_move_id` after its next token, and keep it. Returns why not, if so."""
        running = [each for each in self._scheduler.running_batch.reqs if asked(each, MOVE_ID) == request_id]
        running = [each for each in running if not each.finished() and each.to_finish is None]
        if not running:
            return "no such request is being answered"
        if request_id in self._requests:
            return f"another request is kept by the id {request_id}"
        if reason := self._reason or problem_of_id(request_id, STOP_REQUEST_ID) or reason_to_stay(running[0]):
            return reason
        running[0].to_finish = FINISH_LENGTH(length=len(running[0].output_ids) + 1)
        setattr(running[0], STOPPED, True)
        return ""

    def answer(self, request_id: str) -> dict[str, Any] | None:
        """The hand-over of a request, or `None` if it is not kept."""
        kept = self._requests.get(request_id)
        return None if kept is None or kept.handle is None else kept.hand_off.params()

    def settle(self) -> None:
        """Release requests that every rank has handed over, or that nobody took in time."""
        self._num_loops += 1
        if not self._requests or self._num_loops % SETTLE_EVERY:
            return
        now, ended = time.monotonic(), []
        for kept in self._requests.values():
            handle = kept.handle
            if handle is not None and now > kept.since_s + (self._keep_s if handle.readers is None else MAX_TAKING_S):
                handle.abort(f"no server has taken it within {now - kept.since_s:.0f} s")
            ended.append(handle is None or handle.poll() is not None)
        flags = all_reduce_flags(ended, self._scheduler.attn_tp_cpu_group, torch.distributed.ReduceOp.MIN)
        for request_id, has_ended in zip(list(self._requests), flags, strict=True):
            if has_ended:
                self._requests.pop(request_id).release()

    def make_room(self, has_room: Callable[[], bool]) -> None:
        """Give up requests, the oldest first, until there is room for others."""
        while self._requests and not has_room():
            self.give_up_one()

    def give_up_one(self) -> None:
        self._give_up(next(iter(self._requests)))

    def give_up_all(self) -> None:
        self.make_room(lambda: False)

    def _give_up(self, request_id: str) -> None:
        """Release a request's pages at once: the other server discards whatever is read after `abort`."""
        kept = self._requests.pop(request_id)
        if kept.handle is not None:
            kept.handle.abort("its pages are needed")
        kept.release()


def asked(request: Any, name: str) -> Any:
    """What a request says to this backend."""
    given = request.sampling_params.custom_params
    return given.get(name) if isinstance(given, dict) else None


def tell(request: Any, keeper: Keeper) -> bool:
    """End a request that only tells the keeper something, or asks it, with the answer in its `meta_info`. Returns whether it is
    one.
    """
    stopped, wanted = asked(request, STOP_REQUEST_ID), asked(request, KEPT_REQUEST_ID)
    if not (stopped or wanted):
        return False
    found = {NOT_STOPPED: [keeper.stop(str(stopped))]} if stopped else {KEPT: [keeper.answer(str(wanted))]}
    request.output_ids.append(0)  # SGLang gives such information with a token only
    request.finished_reason, request.customized_info = FINISH_LENGTH(length=1), found
    return True


def reason_to_stay(request: Any) -> str:
    """Why another server cannot go on with a running request, if so."""
    params = request.sampling_params
    problems = {
        "penalties, which count the answer's tokens only": (
            params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        ),
        "a grammar": request.grammar is not None,
        "a custom logit processor": request.custom_logit_processor,
        "images or other items": request.multimodal_inputs is not None,
        "embeddings": request.input_embeds is not None or request.positional_embed_overrides is not None,
        "hidden states, experts or top-k indices of all tokens": (
            request.return_hidden_states or request.return_routed_experts or request.return_indexer_topk
        ),
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    return f"it has {found[0]}" if found else ""


def has_room(queue: Any) -> bool:
    """Whether decode's queue, which has just been looked through, holds nobody up for want of pages or rows."""
    waiting = next((each.req for each in queue.queue if each.waiting_for_input), None)
    if waiting is None:
        return True
    running = sum(len(each.origin_input_ids) + len(each.output_ids) for each in queue.scheduler.running_batch.reqs)
    pages = queue._required_alloc_tokens(fill_len=queue._pre_alloc_fill_len(waiting), prefix_len=0)
    needed = queue._required_admission_tokens(waiting, pages, 0, running)
    budget = queue._allocatable_token_budgets(retractable_tokens=running, count_retracted=True)
    return bool(needed <= budget and queue.req_to_token_pool.available_size() > 0)


def _answered(prompt: Prompt, request: Any) -> Prompt:
    """The prompt with the answer's tokens."""
    return replace(prompt, token_ids=[*request.origin_input_ids, *request.output_ids_through_stop])


def reason_against(manager: Any, scheduler: Any) -> str:
    """Why this server keeps nothing, and takes nothing that another one kept, if so: such states and options were not tried."""
    facts: Facts = manager.facts
    options = scheduler.server_args
    problems = {
        "a draft model": scheduler.draft_worker is not None or bool(facts.drafts),
        "several pipeline stages": manager.pp_size > 1,
        "context parallelism": manager.attn_cp_size > 1,
        "data parallelism": manager.attn_dp_size > 1 or manager.system_dp_size > 1,
        "no paged keys and values": facts.kv is None,
        "latents": facts.kv is not None and facts.kv.num_kv_heads is None,
        "windows": bool(facts.windows),
        "FP8": facts.kv is not None and facts.kv.dtype.startswith("float8"),
        "other state than keys and values of full attention": bool(
            facts.window_kv or facts.slots or facts.index or facts.index_k or facts.compressed
        ),
        "block scales": facts.kv is not None and bool(facts.kv.scales or facts.kv.latent_scales),
        "a hierarchical cache": scheduler.enable_hierarchical_cache or scheduler.enable_decode_hicache,
        "--disaggregation-decode-enable-offload-kvcache": options.disaggregation_decode_enable_offload_kvcache,
        "--strip-thinking-cache": options.strip_thinking_cache,
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    return f"it was not tried with {found[0]}" if found else ""
