"""Prefill takes state that another server has kept (`disagg_kept` in a request's `custom_params`) into its radix cache, where
it finds it when it schedules the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import all_reduce_flags
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, kv_to_page_indices
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from disagg.core.errors import DisaggError, RemoteProtocolError
from disagg.integrations.handoff import HandOff, Payload
from disagg.integrations.sglang.kept import KEPT, asked, reason_against
from disagg.integrations.sglang.manager import nobody
from disagg.integrations.sglang.rows import full_pages, needs
from disagg.requests import Receiver

logger = logging.getLogger(__name__)

TAKE_S = 30.0
"""How long it may take before prefill computes the tokens."""
MAX_SHARE = 0.5
"""Of prefill's tokens, for requests whose state arrives."""


@dataclass
class Taking:
    """The tokens `[start, stop)` of a request go to `indices`. The radix cache has those before, which `lock` keeps. `digest`
    is the request's of its first `common` tokens, with which the other one begins, as its hand-over says.
    """

    request: Any
    start: int
    stop: int
    common: int
    digest: str
    indices: torch.Tensor
    lock: Any
    handle: Receiver | None = None
    is_right: bool | None = None
    """Whether this rank has got what it asked for; `None` while it is under way."""

    def flags(self) -> tuple[bool, bool, bool]:
        """Whether this rank's part has ended, is right, and is written by nobody any more."""
        if self.handle is None:
            return True, False, True
        if self.is_right is None and (event := self.handle.poll()) is not None:
            self.is_right = event.ok and self._is_of_its_prompt(event.payload)
        return self.is_right is not None, bool(self.is_right), self.handle.lease.released

    def _is_of_its_prompt(self, data: bytes) -> bool:
        """Whoever gave the hand-over may have changed it: the other server says what it has sent."""
        try:
            payload = Payload.decode(data)
            payload.check(payload.digest(self.common), self.digest)
        except RemoteProtocolError as error:
            logger.warning("request %s: prefill computes it: %s", self.request.rid, error)
            return False
        return True


class Taker:
    """All ranks have the same lists, in the same order: SGLang's ranks schedule alike."""

    def __init__(self, manager: Any, scheduler: Any) -> None:
        self._manager, self._scheduler = manager, scheduler
        self._reason = reason_against(manager, scheduler) or _reason_against(scheduler.tree_cache)
        self._pool = scheduler.token_to_kv_pool_allocator
        self._open: list[Taking] = []
        self._failed: list[Taking] = []
        """Their requests are computed; something may still be written to their pages."""

    @property
    def holds_pages(self) -> bool:
        return bool(self._open or self._failed)

    def begin(self, request: Any) -> None:
        """Take what a request says that another server has kept, beyond what the radix cache has. Raises no error: else prefill
        computes it.
        """
        given = asked(request, KEPT)
        if not given:
            return
        try:
            hand_off = HandOff.of(given if isinstance(given, dict) else None)
        except ValueError as error:  # also msgspec.ValidationError
            logger.warning("request %s: %s: %s", request.rid, KEPT, error)
            return
        if hand_off is None or not hand_off.is_kept:
            logger.warning("request %s: %s: expected the hand-over of a kept request, found %.100r", request.rid, KEPT, given)
            return
        found = None if self._reason else self._reserve(request, hand_off)
        if self._reason:
            logger.info("request %s: prefill takes nothing that was kept: %s", request.rid, self._reason)
        if found is None:
            self._decline(hand_off)
            return
        self._open.append(found)
        try:
            found.handle = self._receive(found, hand_off)
        except DisaggError as error:
            logger.warning("request %s: prefill computes it: %s", request.rid, error)

    def _reserve(self, request: Any, hand_off: HandOff) -> Taking | None:
        prompt, tree = self._manager.host.prompt(request), self._scheduler.tree_cache
        if prompt.embeddings is not None or prompt.replaced is not None:
            return None
        common = hand_off.num_common(prompt.num_tokens - 1, prompt.digest, prompt.beginnings)
        stop = common // self._pool.page_size * self._pool.page_size
        match = tree.match_prefix(MatchPrefixParams(key=_key(request, stop)))
        start, num = match.device_prefix_len, stop - match.device_prefix_len
        held = sum(len(taking.indices) for taking in (*self._open, *self._failed))
        if num <= 0 or held + num > MAX_SHARE * self._pool.size:
            return None
        lock = tree.lock(match.last_device_node)
        evict_from_tree_cache(tree, num)
        indices = self._pool.alloc(num)
        if indices is None:
            tree.unlock(lock)
            return None
        return Taking(request, start, stop, common, prompt.digest(common), indices, lock)

    def _receive(self, taking: Taking, hand_off: HandOff) -> Receiver:
        manager = self._manager
        pages = kv_to_page_indices(self._pool.translate_kv_indices_for_transfer(taking.indices), manager.kv_args.page_size)
        rows = full_pages(pages, taking.start, facts=manager.facts)
        handle: Receiver = manager.transfers.receiver(
            hand_off.request_id,
            peer=hand_off.remote_engine_id,
            address=hand_off.remote_address,
            attempt=hand_off.remote_attempt,
            rows=rows,
            need=needs(rows, num_tokens=taking.stop, prefix=taking.start, facts=manager.facts),
            ready=manager.host.launched(),
            deadline_s=TAKE_S,
            tag=nobody,
            label=taking.request.rid,
        )
        return handle

    def _decline(self, hand_off: HandOff) -> None:
        try:
            self._manager.transfers.decline(
                hand_off.request_id, peer=hand_off.remote_engine_id, address=hand_off.remote_address
            )
        except DisaggError as error:
            logger.debug("%s: %s", hand_off.remote_request_id, error)

    def settle(self) -> list[Any]:
        """Put the state that has arrived into the radix cache, and return the requests that still wait for theirs."""
        takings = [*self._open, *self._failed]
        if not takings:
            return []
        for taking in self._open:
            status = self._manager.request_status.get(taking.request.disagg_kv_sender.bootstrap_room, KVPoll.Failed)
            if taking.handle is not None and status == KVPoll.Failed:
                taking.handle.abort("the request has ended")
        group, least = self._scheduler.attn_tp_cpu_group, torch.distributed.ReduceOp.MIN
        flags = all_reduce_flags([flag for taking in takings for flag in taking.flags()], group, least)
        waiting, failed = [], []
        for number, taking in enumerate(takings):
            has_ended, is_right, is_free = flags[3 * number : 3 * number + 3]
            if not has_ended:
                waiting.append(taking)
            elif is_right:
                self._cache(taking)
            elif is_free:
                self._pool.free(taking.indices)
                self._unlock(taking)
            else:
                failed.append(taking)
                self._unlock(taking)
        self._open, self._failed = waiting, failed
        return [taking.request for taking in waiting]

    def _cache(self, taking: Taking) -> None:
        """The cache frees pages for tokens that it has got meanwhile."""
        tree, key = self._scheduler.tree_cache, _key(taking.request, taking.stop)
        before = tree.path_device_indices(tree.match_prefix(MatchPrefixParams(key=key)).last_device_node)[: taking.start]
        values = torch.cat([before, taking.indices.to(before.dtype)])
        tree.insert(InsertParams(key=key, value=values, prev_prefix_len=taking.start))
        self._unlock(taking)

    def _unlock(self, taking: Taking) -> None:
        self._scheduler.tree_cache.unlock(taking.lock)
        taking.lock = None


def withheld(original: Callable[[], Any], queue: Any) -> Any:
    """SGLang's `pop_bootstrapped` without the requests whose state still arrives."""
    waiting = {id(request) for request in queue.kv_manager.taker.settle()}
    if not waiting:
        return original()
    requests = queue.queue
    queue.queue = [request for request in requests if id(request) not in waiting]
    found = original()
    left = {id(request) for request in queue.queue} | waiting
    queue.queue = [request for request in requests if id(request) in left]
    return found


def _key(request: Any, num_tokens: int) -> RadixKey:
    return RadixKey(request.origin_input_ids[:num_tokens], request.extra_key, cache_salt=request.cache_salt)


def _reason_against(tree: Any) -> str:
    if not isinstance(tree, UnifiedRadixCache):
        return f"expected SGLang's own radix cache, found {type(tree).__name__}"
    if tree.disable:
        return "there is no radix cache"
    if tree.linker is not None or tree.cache_controller is not None:
        return "it was not tried with another place for cached pages"
    return ""
