"""SGLang's pools with parts beside K and V: every byte of a request, read with these classes' own methods on both sides."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache import index_key_cache
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from disagg import ConfigError, LayoutError, Topology
from disagg.integrations.sglang.pools import Pools, read_facts
from disagg.integrations.sglang.prompts import Prompt
from disagg.integrations.sglang.rows import full_pages, needs, state_rows
from disagg.integrations.sglang.sender import DisaggKVSender
from tests.integrations.sglang.memory import Memory, Model, Request
from tests.integrations.sglang.test_layout import copy, request
from tests.integrations.sglang.test_pools import HEADS, PAGES, RealMemory, config, drafts

WINDOW, RATIO, SLOTS, DIM = 200, 4, 8, 128
Value = tuple[str, torch.Tensor, int | None]
"""What a rank has of a request: a name, the values, and the axis of its heads, if it has only some."""


def paged(page: int, tp: int, **more: Any) -> dict[str, Any]:
    given = {"size": page * PAGES, "page_size": page, "head_num": HEADS // tp, "head_dim": DIM, "device": "cpu"}
    return {**given, **more}


def mxfp8_pool(page: int, tp: int, layers: int) -> MHATokenToKVPoolMXFP8:
    given = paged(page, tp, layer_num=layers, enable_memory_saver=False)
    return MHATokenToKVPoolMXFP8(dtype=torch.float8_e4m3fn, **given)


def mxfp8(page: int) -> Callable[[int], Pools]:
    """With a draft, whose scales SGLang's own backends leave out."""

    def build(tp: int) -> Pools:
        draft = drafts(mxfp8_pool(page, tp, 1), tp)
        return Pools(kv=mxfp8_pool(page, tp, 2), drafts=draft, config=config())

    return build


def mxfp8_windows(tp: int) -> Pools:
    """Inkling: both halves have scales of their own."""
    pool = SWAKVPool(size_swa=128 * PAGES, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1],
                     swa_head_num=2 // tp, dtype=torch.float8_e4m3fn, token_to_kv_pool_class=MHATokenToKVPoolMXFP8,
                     **paged(128, tp))  # fmt: skip
    return Pools(kv=pool, config=config(swa_num_key_value_heads=2), window=WINDOW)


def fp4_pool(layers: int) -> MLATokenToKVPoolFP4:
    return MLATokenToKVPoolFP4(size=16 * PAGES, page_size=16, dtype=torch.float4_e2m1fn_x2, kv_lora_rank=64,
                               qk_rope_head_dim=32, layer_num=layers, device="cpu", enable_memory_saver=False)  # fmt: skip


def latents_fp4(tp: int) -> Pools:
    """DeepSeek-V3 with `--kv-cache-dtype fp4_mx_block16`, and its MTP layer."""
    return Pools(kv=fp4_pool(2), drafts=drafts(fp4_pool(1), tp), config=config())


def fp8(tp: int) -> Pools:
    """`--kv-cache-dtype fp8_e5m2`, and a draft in bfloat16."""
    pools = (
        MHATokenToKVPool(dtype=dtype, layer_num=layers, v_head_dim=DIM // 2, enable_memory_saver=False, **paged(16, tp))
        for dtype, layers in ((torch.float8_e5m2, 2), (torch.bfloat16, 1))
    )
    return Pools(kv=next(pools), drafts=drafts(next(pools), tp), config=config())


def latents_fp8(_: int) -> Pools:
    """DeepSeek-V3 with `--kv-cache-dtype fp8_e4m3`."""
    pool = MLATokenToKVPool(size=16 * PAGES, page_size=16, dtype=torch.float8_e4m3fn, kv_lora_rank=64, qk_rope_head_dim=32,
                            layer_num=2, device="cpu", enable_memory_saver=False)  # fmt: skip
    return Pools(kv=pool, config=config())


def latents_packed(_: int) -> Pools:
    """DeepSeek-V3.2 in FP8: a row has a latent in FP8, its scales in float32, and the rotated part in bfloat16."""
    with get_parallel().override(attn_dcp_size=1):
        pool = DSATokenToKVPool(size=64 * PAGES, page_size=64, kv_lora_rank=512, dtype=torch.float8_e4m3fn, qk_rope_head_dim=64,
                                layer_num=2, device="cpu", index_head_dim=128, enable_memory_saver=False,
                                kv_cache_dim=512 + 4 * 4 + 2 * 64)  # fmt: skip
    assert pool.dsa_kv_cache_store_fp8
    return Pools(kv=pool, config=config())


def latents_windows(_: int) -> Pools:
    """dots3 without an index: latents in both halves."""
    given = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "page_size": 16, "device": "cpu", "enable_memory_saver": False}
    pool = SWAKVPool(size_swa=16 * PAGES, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1],
                     dtype=torch.bfloat16, token_to_kv_pool_class=MLATokenToKVPool, full_kv_pool_kwargs=given,
                     swa_kv_pool_kwargs=given, **paged(16, 1))  # fmt: skip
    return Pools(kv=pool, config=config(), window=WINDOW)


def minimax(tp: int) -> Pools:
    """MiniMax-M3."""
    pool = MiniMaxSparseKVPool(idx_head_dim=128, dense_layer_ids=[0], sparse_layer_ids=[1, 2], dtype=torch.bfloat16,
                               disable_value_sparse_layer_ids=[1, 2], start_layer=0, end_layer=3,
                               **paged(128, tp))  # fmt: skip
    return Pools(kv=pool, config=config())


def qsa_pool(tp: int, layers: list[int], recurrent: list[int]) -> tuple[QSATokenToKVPool, Mamba2CacheParams]:
    shape = Mamba2StateShape.create(tp_world_size=tp, n_groups=4, num_heads=8, conv_kernel=4, intermediate_size=16, head_dim=2,
                                    state_size=4, conv_shard_groups=[16, 16, 16])  # fmt: skip
    dtypes = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    params = Mamba2CacheParams(shape=shape, layers=recurrent, dtype=dtypes)
    states = MambaPool(size=7, spec_state_size=0, cache_params=params, mamba_layer_ids=recurrent, device="cpu")
    if recurrent:
        convolutions = ShortConvPool(size=7, state_shape=(24, 9), layer_ids=[1, 2], dtype=torch.bfloat16, device="cpu")
        states.register_slot_state(convolutions)
        states.register_slot_state(NGramPool(size=7, context_len=2, eos_token_id=5, device="cpu"))
    pool = QSATokenToKVPool(dtype=torch.bfloat16, full_attention_layer_ids=layers, mamba_pool=states, qsa_index_kv_heads=2,
                            qsa_index_head_dim=32, qsa_compress_ratio=RATIO, qsa_token_topk=16, num_request_slots=SLOTS,
                            **paged(64, tp))  # fmt: skip
    return pool, params


def qsa(tp: int) -> Pools:
    """Qwen4-Exp with its MTP layer, and with n-gram embeddings (PLE) in two layers."""
    pool, params = qsa_pool(tp, [1, 3], [0, 2])
    draft, _ = qsa_pool(tp, [0], [])
    return Pools(
        kv=pool,
        drafts=drafts(draft, tp),
        config=config(),
        recurrent_config=SimpleNamespace(mamba2_cache_params=params, mamba_n_groups=4),
    )


BUILDS = {
    "mxfp8": mxfp8(16),
    "mxfp8, interleaved scales": mxfp8(128),
    "mxfp8 with windows": mxfp8_windows,
    "FP8": fp8,
    "latents in FP8": latents_fp8,
    "latents in FP8, packed": latents_packed,
    "latents in FP4": latents_fp4,
    "latents with windows": latents_windows,
    "minimax": minimax,
    "qsa": qsa,
}


class Rank(RealMemory):
    """One rank's pools. `Model` describes what the scheduler's lists need, and not the memory."""

    def __init__(self, topology: Topology, pools: Pools) -> None:
        self.pools = pools
        first: Any = pools.drafts.pools if pools.drafts is not None else (None,)
        self.draft: Any = first[0]
        Memory.__init__(self, Model(window=WINDOW, tokens_per_key=RATIO), topology,
                        page_size=pools.kv.page_size, num_pages=PAGES + 1, num_slots=SLOTS)  # fmt: skip

    def randomize(self, seed: int) -> None:
        """Random bytes in all of the pools' memory. All ranks have the same latents."""
        is_alike = isinstance(getattr(self.pools.kv, "full_kv_pool", self.pools.kv), MLATokenToKVPool)
        random = np.random.default_rng((seed, 0 if is_alike else self.topology.tp_rank))
        args = self.kv_args()
        buffers = list(zip(args.kv_data_ptrs, args.kv_data_lens, strict=True))
        for pointers, lengths in zip(args.state_data_ptrs, args.state_data_lens, strict=True):
            buffers += zip(pointers, lengths, strict=True)
        facts = self.facts()
        for draft in facts.drafts:
            buffers += [(each.pointer, each.nbytes) for each in draft.scale_buffers]
        for pages in (facts.kv, *(draft.kv for draft in facts.drafts)):
            if pages is not None and pages.latent_scales is not None:
                buffers += [(each.pointer, each.nbytes) for each in pages.latent_scales.buffers]
        for pointer, nbytes in buffers:
            ctypes.memmove(pointer, random.bytes(nbytes), nbytes)

    def take_replicas(self, other: Rank) -> None:
        """Copy what every rank of a group has."""
        theirs, args = other.kv_args(), self.kv_args()
        for number, kind in enumerate(args.state_types):
            is_alike = kind.value in ("minimax_index_k", "qsa_pending", "qsa_compressed")
            lists = args.state_data_ptrs[number], theirs.state_data_ptrs[number], args.state_data_lens[number]
            for buffer, (to, at, nbytes) in enumerate(zip(*lists, strict=True)):
                if is_alike or (kind.value == "mamba" and args.state_dim_per_tensor[number][buffer] == 0):
                    ctypes.memmove(to, at, nbytes)

    def slots(self, pages: Any, start: int, stop: int) -> torch.Tensor:
        """Where SGLang has these tokens."""
        tokens = np.arange(start, stop)
        return torch.from_numpy(pages[tokens // self.page_size] * self.page_size + tokens % self.page_size)

    def values(self, request: Request) -> Iterator[Value]:
        """What decode needs of the request, as SGLang reads it."""
        kv, n = self.pools.kv, request.num_tokens
        at = self.slots(request.pages, request.prefix, n)
        window = self.slots(request.window_pages, max(request.prefix, n - WINDOW), n)
        named = [("kv", getattr(kv, "full_kv_pool", getattr(kv, "main_pool", kv)), at)]
        named += [("window", pool, window) for pool in (getattr(kv, "swa_kv_pool", None),) if pool is not None]
        named += [("draft", getattr(self.draft, "full_kv_pool", self.draft), at)] * (self.draft is not None)
        for name, pool, where in named:
            for layer in range(pool.layer_num):
                if isinstance(pool, MLATokenToKVPoolFP4):
                    yield f"{name} latent {layer}", pool.get_key_buffer(layer)[where], None
                    continue
                if isinstance(pool, MLATokenToKVPool):
                    yield f"{name} latent {layer}", pool.kv_buffer[layer][where], None
                    continue
                yield f"{name} k {layer}", pool.k_buffer[layer][where], 1
                yield f"{name} v {layer}", pool.v_buffer[layer][where], 1
                if isinstance(pool, MHATokenToKVPoolMXFP8):
                    for role, scales in zip("kv", pool._read_scales(layer, where), strict=True):
                        yield f"{name} {role} scales {layer}", scales, 1
        if isinstance(kv, MiniMaxSparseKVPool):
            for layer in kv.sparse_layer_id_mapping:
                yield f"index key {layer}", kv.get_index_k_buffer(layer)[at], None
        for sibling in getattr(getattr(kv, "mamba_pool", None), "_slot_siblings", ()):
            for role, state, _, layer in sibling.iter_transfer_state_entries():
                yield f"{role} {layer}", state[[request.slot]], None
        for name, pool in (("model", kv), ("draft", self.draft)):
            if isinstance(pool, QSATokenToKVPool):
                ring = request.slot * RATIO + torch.arange(RATIO)
                groups = at[: len(at) // RATIO * RATIO : RATIO] // RATIO
                for layer in pool.full_attention_layer_id_mapping:
                    yield f"{name} compressed {layer}", pool.get_qsa_compressed_k_buffer(layer)[groups], None
                    yield f"{name} pending {layer}", pool.get_qsa_key_state_buffer(layer)[ring], None
                yield f"{name} positions", pool.get_qsa_rope_position_buffer(ring), None


def whole(ranks: list[Rank], requests: list[Request]) -> dict[str, list[torch.Tensor]]:
    """The undivided values in bytes, from all ranks; or those of each rank, if each has all."""
    found: dict[str, list[torch.Tensor]] = {}
    axes: dict[str, int | None] = {}
    for rank, each in zip(ranks, requests, strict=True):
        for name, value, axis in rank.values(each):
            found.setdefault(name, []).append(value.contiguous().view(torch.uint8))
            axes[name] = axis
    return found | {name: [torch.cat(found[name], dim=axis)] for name, axis in axes.items() if axis is not None}


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
@pytest.mark.parametrize("name", BUILDS)
def test_every_byte_between_real_pools(name: str, tp: tuple[int, int]) -> None:
    sides = [[Rank(Topology(tp=size, tp_rank=rank), BUILDS[name](size)) for rank in range(size)] for size in tp]
    page = sides[0][0].page_size
    for num_tokens, prefix in ((page * 3 + 5, 0), (page * 4, page), (page * 2 - 2, page)):
        at, to = ([request(m, num_tokens, seed=number, prefix=prefix) for m in side] for number, side in enumerate(sides))
        for number, side in enumerate(sides):
            for memory in side:
                memory.randomize(num_tokens + number)
            for memory in side[1:]:
                memory.take_replicas(side[0])
        right, before = whole(sides[0], at), whole(sides[1], to)
        copy(sides[0], sides[1], at, to)
        found = whole(sides[1], to)
        assert set(right) == set(found)
        for what, values in found.items():
            assert not torch.equal(before[what][0], right[what][0]), what
            for value in values:
                assert torch.equal(value, right[what][0]), (what, num_tokens, prefix)


def test_latents_in_fp4_are_not_taken_for_others() -> None:
    """Of a server with another format: the handshake compares the tensors of a component."""
    other = latents_fp4(1)
    plain = MLATokenToKVPool(size=16 * PAGES, page_size=16, dtype=torch.uint8, kv_lora_rank=16, qk_rope_head_dim=32,
                             layer_num=2, device="cpu", enable_memory_saver=False)  # fmt: skip
    ranks = [Rank(Topology(), each) for each in (Pools(kv=plain, config=config()), replace(other, drafts=None))]
    at = [request(each, 40, seed=1) for each in ranks]
    with pytest.raises(LayoutError, match="latent_scale"):
        copy(ranks[:1], ranks[1:], at[:1], at[1:])


def test_other_pages_of_interleaved_scales_are_refused() -> None:
    """A page of 128 tokens has its scales in another order."""
    ranks = [Rank(Topology(), BUILDS[name](1)) for name in ("mxfp8", "mxfp8, interleaved scales")]
    at = [request(each, 100, seed=1) for each in ranks]
    with pytest.raises(
        LayoutError, match=r"component 'draft_scales', tensor 'k_scale', axis .*: (global size|granule): .* at the peer"
    ):
        copy(ranks[:1], ranks[1:], at[:1], at[1:])


@pytest.mark.parametrize("num_tokens", [117, 128, 300])
def test_decode_needs_whole_blocks_of_interleaved_scales_for_any_prompt(num_tokens: int) -> None:
    """Prefill takes none of it for a longer prompt."""
    rank = Rank(Topology(), BUILDS["mxfp8, interleaved scales"](1))
    facts, own = rank.facts(), request(rank, num_tokens, seed=1)
    kinds, page_size = rank.kv_args().state_types, rank.page_size
    rows = full_pages(rank.kv_list(own, 0, num_tokens), 0, facts=facts)
    rows |= state_rows(kinds, rank.state_lists(own), num_tokens=num_tokens, page_size=page_size, facts=facts)
    need = needs(rows, num_tokens=num_tokens, prefix=0, facts=facts)
    assert need["kv_scales"][1] == -(-num_tokens // 128) * 128
    statuses: list[Any] = []
    sender: Any = object.__new__(DisaggKVSender)
    sender.bootstrap_room, sender.prompt = 5, Prompt(token_ids=range(num_tokens))
    sender.handle = SimpleNamespace(readers=("decode",), is_declined=False, needed=need.get)
    sender.kv_mgr = SimpleNamespace(
        components=tuple(need),
        waiting={5: sender},
        facts=facts,
        kv_args=SimpleNamespace(page_size=rank.page_size),
        req_to_decode_prefix_len={},
        update_status=lambda _, status: statuses.append(status),
    )
    sender.look()
    assert statuses == [KVPoll.WaitingForInput]


def test_index_keys_beside_windows_are_refused() -> None:
    """dots3 with an index: SGLang hands over the pages of windows only."""
    given: dict[str, Any] = {"page_size": 64, "device": "cpu", "enable_memory_saver": False, "qk_rope_head_dim": 32}
    given["kv_lora_rank"] = 64
    with get_parallel().override(attn_dcp_size=1):
        pool = SWAKVPool(size_swa=64 * PAGES, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1],
                         dtype=torch.bfloat16, full_kv_pool_class=DSATokenToKVPool, swa_kv_pool_class=MLATokenToKVPool,
                         full_kv_pool_kwargs={**given, "index_head_dim": 128, "kv_cache_dim": 96},
                         swa_kv_pool_kwargs=given, **paged(64, 1))  # fmt: skip
    with pytest.raises(ConfigError, match=r"token_to_kv_pool, full_kv_pool: expected no index keys, .* found DSATokenToKVPool"):
        read_facts(Pools(kv=pool, config=config(), window=WINDOW), Topology())


def test_index_keys_in_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of a prompt may be filled in part, and its tokens do not lie one behind the other."""
    pools = latents_packed(1)
    assert read_facts(pools, Topology()).index is not None
    monkeypatch.setattr(index_key_cache, "_use_aiter_preshuffle", True)
    with pytest.raises(ConfigError, match="expected index keys token by token"):
        read_facts(pools, Topology())


def test_index_values_are_refused() -> None:
    """SGLang itself hands over only keys."""
    pools = minimax(1)
    pools.kv.index_kv_pool = pools.kv.main_pool
    with pytest.raises(ConfigError, match="index_kv_pool: expected none"):
        read_facts(pools, Topology())
