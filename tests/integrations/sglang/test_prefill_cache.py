"""SGLang's radix cache: prefill frees no pages that decode may still read, and decode searches none for replaced embeddings."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams

from disagg.integrations.sglang import plugin

PAGE, PAGES = 16, 32
TOKENS = array("q", range(70))


class Prefill:
    """What a scheduler's sending needs of it: pools, the radix cache, and senders that note the pages of each request."""

    def __init__(self, *, is_eagle: bool, disable: bool = False) -> None:
        plugin.register()
        HookRegistry.apply_hooks()
        pool = MHATokenToKVPool(size=PAGE * PAGES, page_size=PAGE, dtype=torch.float32, head_num=1, head_dim=8, layer_num=1,
                                device="cpu", enable_memory_saver=False)  # fmt: skip
        self.req_to_token_pool = ReqToTokenPool(4, 128, "cpu", enable_memory_saver=False)
        self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
            PAGE * PAGES, PAGE, torch.float32, "cpu", pool, need_sort=False
        )
        self.tree_cache = UnifiedRadixCache(
            CacheInitParams(
                disable,
                self.req_to_token_pool,
                self.token_to_kv_pool_allocator,
                PAGE,
                is_eagle=is_eagle,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.enable_staging = False
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(
            kv_manager=SimpleNamespace(kv_args=SimpleNamespace(state_types=[]), pp_size=1),
            transfer_backend=TransferBackend("disagg"),
        )
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=lambda _: None)
        self.disagg_prefill_pending_chunk_rids: set[str] = set()
        self.sent: dict[str, list[int]] = {}

    def request(self, name: str) -> Req:
        """A request that matches nothing, with all its pages."""
        request = Req(name, "", TOKENS, SamplingParams())
        request.full_untruncated_fill_ids = TOKENS
        self.req_to_token_pool.alloc([request])
        slots = self.token_to_kv_pool_allocator.alloc(-(-len(TOKENS) // PAGE) * PAGE)
        self.req_to_token_pool.write((request.kv.req_pool_idx, slice(0, len(TOKENS))), slots[: len(TOKENS)].to(torch.int32))
        request.kv.kv_allocated_len = len(TOKENS)
        pages = self.sent[name] = []

        def send(indices: Any, *_: Any, **_named: Any) -> None:
            pages.extend(indices.tolist())

        request.disagg_kv_sender = SimpleNamespace(
            get_max_transfer_tokens=lambda: None, should_send_kv_chunk=lambda num, last: num or last, send=send
        )
        return request

    def compute(self, request: Req, stop: int) -> None:
        """A chunk, which SGLang caches before it is sent."""
        request.extend_end = stop
        checkpoint_kv_cache(request, self.tree_cache)

    def send(self, request: Req, **given: Any) -> None:
        is_last = request.extend_end == len(TOKENS)
        SchedulerDisaggregationPrefillMixin._send_kv_chunk(self, request, last_chunk=is_last, **given)
        self.check()

    def check(self) -> None:
        """No page that was sent is free."""
        free = set(self.token_to_kv_pool_allocator.get_all_free_pages().tolist())
        assert not {name: pages for name, pages in self.sent.items() if free.intersection(pages)}


@pytest.mark.parametrize("is_eagle", [False, True])
def test_pages_that_were_sent_are_not_freed_as_duplicates(is_eagle: bool) -> None:
    """Two requests with the same prompt, in turns, both without a cached prefix."""
    prefill = Prefill(is_eagle=is_eagle)
    first, second = prefill.request("first"), prefill.request("second")
    for request, stop in ((first, 32), (second, 64), (first, 64), (second, 70), (first, 70)):
        prefill.compute(request, stop)
        prefill.check()
        prefill.send(request)
    for request in (first, second):
        row = prefill.req_to_token_pool.req_to_token[request.kv.req_pool_idx, : len(TOKENS) : PAGE] // PAGE
        assert prefill.sent[request.rid] == row.tolist()  # every page once
    assert prefill.sent["first"][:4] == prefill.sent["second"][:4]


def test_a_chunk_is_sent_after_the_next_one_was_cached() -> None:
    """With SGLang's overlap of steps."""
    prefill = Prefill(is_eagle=True)
    first, second = prefill.request("first"), prefill.request("second")
    prefill.compute(first, 32)
    prefill.send(first, end_idx=32)
    prefill.compute(second, 64)
    prefill.compute(first, 64)
    prefill.send(first, end_idx=32)
    assert len(prefill.sent["first"]) == 2


@pytest.mark.parametrize("option", ["--disable-radix-cache", "skip_radix_cache_insert"])
def test_whole_chunks_are_sent_where_nothing_is_cached(option: str) -> None:
    prefill = Prefill(is_eagle=True, disable=option == "--disable-radix-cache")
    request = prefill.request("first")
    request.skip_radix_cache_insert = option == "skip_radix_cache_insert"
    prefill.compute(request, 32)
    prefill.send(request)
    assert len(prefill.sent["first"]) == 2


@pytest.mark.parametrize("has_replaced", [False, True])
def test_decode_takes_nothing_from_its_cache_for_replaced_embeddings(has_replaced: bool) -> None:
    """The cache has the state of the token ids. Prefill does the same in SGLang's own code."""
    cached = Prefill(is_eagle=False)
    request = cached.request("first")
    cached.compute(request, 64)
    queue = object.__new__(DecodePreallocQueue)
    queue.tree_cache, queue.transfer_backend = cached.tree_cache, TransferBackend("disagg")
    queue.scheduler = SimpleNamespace(enable_decode_hicache=False)
    queue._uses_swa_tail_prealloc = lambda: False
    replaced = PositionalEmbeds(torch.ones(1, 4), [3]) if has_replaced else None
    second = Req("second", "", TOKENS, SamplingParams(), positional_embed_overrides=replaced)
    found = queue._match_prefix_and_lock(second)
    assert found.l1_prefix_len == (0 if has_replaced else 64)
    assert second.origin_input_ids is TOKENS
