"""Requests that have ended, whose pages decode keeps for another server that continues them. A client gives a request an id in
`sampling_params.custom_params` (`disagg_keep`), and asks for the hand-over with it afterwards (`disagg_kept_request_id`).
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
from disagg.integrations.handoff import MAX_BEGINNINGS, HandOff, Payload, problem_of_id
from disagg.integrations.sglang.bootstrap import name_of
from disagg.integrations.sglang.facts import Facts
from disagg.integrations.sglang.manager import ENGINE, nobody
from disagg.integrations.sglang.prompts import Prompt
from disagg.integrations.sglang.rows import full_pages
from disagg.requests import Sender

logger = logging.getLogger(__name__)

KEEP, KEPT, KEPT_REQUEST_ID = "disagg_keep", "disagg_kept", "disagg_kept_request_id"
MAX_TAKING_S = 600.0
"""How long a server may take it, once it has reserved."""
SETTLE_EVERY = 8
"""Loops of the scheduler. All ranks count the same ones."""


@dataclass(frozen=True)
class Kept:
    """`release` is SGLang's own of the ended request."""

    hand_off: HandOff
    handle: Sender
    num_tokens: int
    since_s: float
    release: Callable[[], None]


class Keeper:
    """All ranks have the same requests, in the same order: SGLang's ranks schedule alike, and release them together."""

    def __init__(self, manager: Any, scheduler: Any, *, keep_s: float, kept_share: float) -> None:
        self._manager, self._scheduler, self._keep_s = manager, scheduler, keep_s
        pool = scheduler.token_to_kv_pool_allocator
        self._max_tokens = int(kept_share * pool.size)
        self._max_requests = int(kept_share * scheduler.req_to_token_pool.size)
        self._reason = reason_against(manager, scheduler)
        self._requests: dict[str, Kept] = {}
        self._num_loops = 0

    def __len__(self) -> int:
        return len(self._requests)

    def keep(self, request: Any, release: Callable[[], None]) -> bool:
        """Keep a request that asks for it, and has ended normally. Its `release` is called once no server may read its pages
        any more.
        """
        given = asked(request, KEEP)
        if not given or isinstance(request.finished_reason, FINISH_ABORT):
            return False
        request_id = str(given)
        prompt = _answered(self._manager.host.prompt(request), request)
        num_tokens = prompt.num_tokens - 1  # the last one was drawn, and not computed
        reason = self._reason or problem_of_id(request_id, KEEP) or self._problem(request, prompt, num_tokens)
        if not reason:
            try:
                self._requests[request_id] = self._offer(request, prompt, request_id, release)
                return True
            except DisaggError as error:
                reason = str(error)
        logger.warning("request %s: it is not kept: %s", request.rid, reason)
        return False

    def _problem(self, request: Any, prompt: Prompt, num_tokens: int) -> str:
        if prompt.embeddings is not None or prompt.replaced is not None:
            return "prompts of embeddings cannot be compared with longer ones"
        if not 0 < num_tokens <= request.owned_kv_len():
            return f"expected the state of {num_tokens} tokens, found that of {request.owned_kv_len()}"
        if num_tokens > self._max_tokens or not self._max_requests:
            return (
                f"expected at most {self._max_tokens} tokens and {self._max_requests} requests (kept_share), found {num_tokens}"
            )
        return ""

    def _offer(self, request: Any, prompt: Prompt, request_id: str, release: Callable[[], None]) -> Kept:
        manager, scheduler, num_tokens = self._manager, self._scheduler, prompt.num_tokens - 1
        if request_id in self._requests:
            self._give_up(request_id)
        while sum(kept.num_tokens for kept in self._requests.values()) + num_tokens > self._max_tokens or (
            len(self._requests) >= self._max_requests
        ):
            self._give_up(next(iter(self._requests)))
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
        payload = Payload(
            engine=ENGINE,
            num_tokens=num_tokens,
            first_token=int(prompt.token_ids[-1]),
            prompt=hand_off.remote_prompt,
            whole_prompt=hand_off.remote_prompt,
            beginnings=bytes.fromhex(hand_off.remote_beginnings),
        )
        indices = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :num_tokens]
        pages = kv_to_page_indices(
            scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(indices), manager.kv_args.page_size
        )
        handle = manager.transfers.sender(hand_off.request_id, peer=None, deadline_s=None, tag=nobody, label=request.rid)
        handle.send(full_pages(pages, 0, facts=manager.facts), tokens=(0, num_tokens), ready=manager.host.launched())
        handle.finish({}, payload=payload.encode())
        return Kept(hand_off, handle, num_tokens, time.monotonic(), release)

    def answer(self, request: Any) -> dict[str, Any] | None:
        """What is told of a request that another one asks for: its hand-over, or `None` if it is not kept."""
        kept = self._requests.get(str(asked(request, KEPT_REQUEST_ID)))
        return None if kept is None else kept.hand_off.params()

    def settle(self) -> None:
        """Release requests that every rank has handed over, or that nobody took in time."""
        self._num_loops += 1
        if not self._requests or self._num_loops % SETTLE_EVERY:
            return
        now = time.monotonic()
        for kept in self._requests.values():
            if now > kept.since_s + (self._keep_s if kept.handle.readers is None else MAX_TAKING_S):
                kept.handle.abort(f"no server has taken it within {now - kept.since_s:.0f} s")
        ended = [kept.handle.poll() is not None for kept in self._requests.values()]
        flags = all_reduce_flags(ended, self._scheduler.attn_tp_cpu_group, torch.distributed.ReduceOp.MIN)
        for request_id, has_ended in zip(list(self._requests), flags, strict=True):
            if has_ended:
                self._requests.pop(request_id).release()

    def make_room(self, has_room: Callable[[], bool]) -> None:
        """Give up requests, the oldest first, until there is room for others."""
        while self._requests and not has_room():
            self._give_up(next(iter(self._requests)))

    def give_up_all(self) -> None:
        self.make_room(lambda: False)

    def _give_up(self, request_id: str) -> None:
        """Nobody takes what is read after the call of `abort`."""
        kept = self._requests.pop(request_id)
        kept.handle.abort("its pages are needed")
        kept.release()


def asked(request: Any, name: str) -> Any:
    """What a request says to this backend."""
    given = request.sampling_params.custom_params
    return given.get(name) if isinstance(given, dict) else None


def told(request: Any, answer: dict[str, Any] | None) -> None:
    """End a request with an answer in its `meta_info`, as `disagg_kept`."""
    request.output_ids.append(int(request.origin_input_ids[0]))  # SGLang gives such information with a token only
    request.finished_reason = FINISH_LENGTH(length=1)
    request.customized_info = {KEPT: [answer]}


def has_room(queue: Any) -> bool:
    """Whether decode has pages and rows for the requests that wait for them, without evicting what it keeps."""
    scheduler = queue.scheduler
    waiting = [each.req for each in queue.queue if each.waiting_for_input]
    if queue.retracted_queue:
        return False
    pool = scheduler.token_to_kv_pool_allocator
    steps = queue.num_reserved_decode_tokens * (len(waiting) + len(scheduler.running_batch.reqs))
    needed = sum(len(each.origin_input_ids) + pool.page_size for each in waiting) + steps
    free = pool.available_size() + scheduler.tree_cache.evictable_size()
    return not waiting or (free >= needed and scheduler.req_to_token_pool.available_size() >= len(waiting))


def _answered(prompt: Prompt, request: Any) -> Prompt:
    """The prompt with the answer's tokens."""
    return replace(prompt, token_ids=[*request.origin_input_ids, *request.output_ids_through_stop])


def reason_against(manager: Any, scheduler: Any) -> str:
    """Why this server keeps nothing, and takes nothing that another one kept, if so: such states and options were not tried."""
    facts: Facts = manager.facts
    problems = {
        "a draft model": scheduler.draft_worker is not None or bool(facts.drafts),
        "several pipeline stages": manager.pp_size > 1,
        "context parallelism": manager.attn_cp_size > 1,
        "data parallelism": manager.attn_dp_size > 1 or manager.system_dp_size > 1,
        "no paged keys and values": facts.kv is None,
        "windows of which only the last tokens have arrived": bool(facts.windows) and not facts.reuses_pages,
        "other state than keys and values of full attention": bool(
            facts.window_kv or facts.slots or facts.index or facts.index_k or facts.compressed
        ),
        "block scales": facts.kv is not None and bool(facts.kv.scales or facts.kv.latent_scales),
        "a hierarchical cache": scheduler.enable_hierarchical_cache or scheduler.enable_decode_hicache,
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    return f"it was not tried with {found[0]}" if found else ""
