"""SGLang's own pools and `setup_state_kv_args`: what is read from them, and every byte of a request between two such ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.configs.inkling import InklingConvCacheParams, InklingConvStateShape
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from disagg import ConfigError, Topology
from disagg.integrations.sglang.facts import Facts
from disagg.integrations.sglang.host import check_windows
from disagg.integrations.sglang.pools import Drafts, Pools, _device, read_facts
from tests.integrations.sglang.memory import Memory, Model
from tests.integrations.sglang.test_layout import GDN, KDA, MAMBA, MAMBA2, copy, request

HEADS, PAGE, PAGES = 4, 16, 12
FLOATS = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)


def config(heads: int = HEADS, **text: Any) -> SimpleNamespace:
    """The parts of SGLang's `ModelConfig` that are read."""
    return SimpleNamespace(hf_text_config=SimpleNamespace(**text), get_total_num_kv_heads=lambda: heads)


def paged_args(tp: int, page: int = PAGE) -> dict[str, Any]:
    return {"page_size": page, "dtype": torch.float32, "head_num": HEADS // tp, "head_dim": 8, "device": "cpu"}


class RealMemory(Memory):
    """The same requests and expectations over the buffers of SGLang's pools, with its own `KVArgs`."""

    def __init__(self, model: Model, topology: Topology, pools: Pools, *, page_size: int = PAGE) -> None:
        self.pools = pools
        super().__init__(model, topology, page_size=page_size, num_pages=PAGES + 1)
        full = getattr(pools.kv, "full_kv_pool", pools.kv)
        self._take("kv", model.layers, full)
        if model.window_layers:
            self._take("window", model.window_layers, pools.kv.swa_kv_pool)
        first: Any = pools.drafts.pools if pools.drafts is not None else (None,)
        self.draft: Any = first[0]
        if self.draft is not None:
            self._take("draft", model.draft_layers, getattr(self.draft, "full_kv_pool", self.draft))
        if model.draft_window_layers:
            self._take("draft_window", model.draft_window_layers, self.draft.swa_kv_pool)
        for role, tensor, _, layer in pools.kv.mamba_pool._iter_transfer_state_entries() if model.slot_layers else ():
            self.buffers["ssm", layer, role] = tensor.numpy()
        for index, layers, pool in (("index", model.index_layers, full), ("draft_index", model.draft_index_layers, self.draft)):
            for layer in layers:
                self.buffers[index, layer, "page"] = pool.index_k_with_scale_buffer[layer].numpy()
                for role, ring in zip(
                    ("key", "score"), pool.get_compress_tail_buffers(layer) if model.tail else (), strict=False
                ):
                    self.buffers[f"{index}_tail", layer, role] = ring.view(torch.uint8).numpy()

    def _take(self, component: str, layers: tuple[int, ...], pool: Any) -> None:
        for number, layer in enumerate(layers):
            if hasattr(pool, "kv_buffer"):
                self.buffers[component, layer, "latent"] = pool.kv_buffer[number].numpy()[:, 0]
            else:
                self.buffers[component, layer, "k"] = pool.k_buffer[number].numpy()
                self.buffers[component, layer, "v"] = pool.v_buffer[number].numpy()

    def facts(self, pp_rank: int | None = None) -> Facts:
        assert pp_rank in (None, 0)
        return read_facts(self.pools, self.topology)

    def kv_args(self, **changes: Any) -> Any:
        args: Any = KVArgs()
        args.page_size = self.page_size
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = self.pools.kv.get_contiguous_buf_infos()
        if self.draft is not None:
            pointers, lengths, rows = self.draft.get_contiguous_buf_infos()
            args.kv_data_ptrs, args.kv_data_lens = args.kv_data_ptrs + pointers, args.kv_data_lens + lengths
            args.kv_item_lens, args.num_draft_entries = args.kv_item_lens + rows, len(rows)
        setup_state_kv_args(args, self.pools.kv, self.draft, total_kv_layers=8)
        return args


def head_pool(tp: int, layers: int = 3, *, heads: int = HEADS, v_head_dim: int = 4) -> MHATokenToKVPool:
    given = {**paged_args(tp), "head_num": max(1, heads // tp)}
    return MHATokenToKVPool(size=PAGE * PAGES, layer_num=layers, v_head_dim=v_head_dim, enable_memory_saver=False, **given)


def latent_pool(layers: int = 3, page: int = PAGE) -> MLATokenToKVPool:
    return MLATokenToKVPool(size=page * PAGES, page_size=page, dtype=torch.float32, kv_lora_rank=16, qk_rope_head_dim=8,
                            layer_num=layers, device="cpu", enable_memory_saver=False)  # fmt: skip


def window_pool(tp: int, full: list[int], sliding: list[int], *, heads: int) -> SWAKVPool:
    return SWAKVPool(size=PAGE * PAGES, size_swa=PAGE * PAGES, swa_attention_layer_ids=sliding, full_attention_layer_ids=full,
                     swa_head_num=max(1, heads // tp), **paged_args(tp))  # fmt: skip


def drafts(pool: Any, tp: int, heads: int = HEADS, *, window: int | None = None, **text: Any) -> Drafts:
    return Drafts(pools=(pool,), config=config(heads, **text), tp=tp, window=window)


def heads(tp: int) -> tuple[Model, Pools]:
    pools = Pools(kv=head_pool(tp), drafts=drafts(head_pool(tp, 1), tp), config=config())
    return Model(dims=(8, 4), draft_layers=(0,), draft_dims=(8, 4)), pools


def few_draft_heads(tp: int) -> tuple[Model, Pools]:
    draft = drafts(head_pool(tp, 1, heads=1, v_head_dim=8), tp, heads=1)
    model = Model(dims=(8, 4), draft_layers=(0,), draft_heads=1)
    return model, Pools(kv=head_pool(tp), drafts=draft, config=config())


def latents(tp: int) -> tuple[Model, Pools]:
    return Model(heads=None, dims=(24,)), Pools(kv=latent_pool(), config=config())


def latents_with_draft(tp: int) -> tuple[Model, Pools]:
    """DeepSeek-V3 with its MTP layer."""
    model, pools = latents(tp)
    model = replace(model, draft_layers=(0,), draft_heads=None, draft_dims=(24,))
    return model, replace(pools, drafts=drafts(latent_pool(1), tp, heads=64))


def latents_with_head_draft(tp: int) -> tuple[Model, Pools]:
    """Kimi K2 with an EAGLE3 draft: the model's configuration names as many KV heads as the latents are expanded to."""
    draft = drafts(head_pool(tp, 1, heads=2), tp, heads=2)
    model = Model(heads=None, dims=(24,), draft_layers=(0,), draft_heads=2, draft_dims=(8, 4))
    return model, Pools(kv=latent_pool(), drafts=draft, config=config(64))


def heads_with_latent_draft(tp: int) -> tuple[Model, Pools]:
    model = Model(dims=(8, 4), draft_layers=(0,), draft_heads=None, draft_dims=(24,))
    return model, Pools(kv=head_pool(tp), drafts=drafts(latent_pool(1), tp, heads=64), config=config())


def window(tp: int) -> tuple[Model, Pools]:
    pool = window_pool(tp, [1], [0, 2], heads=2)
    model = Model(layers=(1,), dims=(8, 8), window_layers=(0, 2), window_heads=2)
    return model, Pools(kv=pool, config=config(swa_num_key_value_heads=2), window=model.window)


def window_draft(tp: int) -> tuple[Model, Pools]:
    """The sliding layers of a draft, which SGLang's own backends do not move."""
    model, pools = window(tp)
    draft = drafts(window_pool(tp, [0], [1], heads=1), tp, window=model.window, swa_num_key_value_heads=1)
    return replace(model, draft_layers=(0,), draft_window_layers=(1,)), replace(pools, drafts=draft)


def hybrid(model: Model, tp: int, params: Any, settings: Any, **own: Any) -> tuple[Model, Pools]:
    mamba = MambaPool(size=7, spec_state_size=0, cache_params=params, mamba_layer_ids=list(model.slot_layers), device="cpu")
    pool = HybridLinearKVPool(
        size=PAGE * PAGES, full_attention_layer_ids=list(model.layers), mamba_pool=mamba, **paged_args(tp), **own
    )
    return replace(model, heads=None if own else HEADS), Pools(kv=pool, config=config(), recurrent_config=settings)


def recurrent(model: Model, tp: int, *, groups: int, **shape: Any) -> tuple[Model, Pools]:
    made = Mamba2StateShape.create(tp_world_size=tp, n_groups=groups, num_heads=8, conv_kernel=4, **shape)
    params = Mamba2CacheParams(shape=made, layers=list(model.slot_layers), dtype=FLOATS)
    return hybrid(model, tp, params, SimpleNamespace(mamba2_cache_params=params, mamba_n_groups=groups))


def gdn(tp: int) -> tuple[Model, Pools]:
    return recurrent(GDN, tp, groups=4, intermediate_size=16, head_dim=2, state_size=4, conv_shard_groups=[16, 16, 16])


def mamba2(tp: int) -> tuple[Model, Pools]:
    return recurrent(MAMBA2, tp, groups=1, intermediate_size=32, head_dim=4, state_size=6)


def mamba(tp: int) -> tuple[Model, Pools]:
    """A model without attention: SGLang gives its pool one head, and no layer."""
    shape = Mamba2StateShape.create_full_rank(tp_world_size=tp, intermediate_size=16, state_size=4, conv_kernel=4)
    params = Mamba2CacheParams(shape=shape, layers=list(MAMBA.slot_layers), dtype=FLOATS)
    pools = MambaPool(size=7, spec_state_size=0, cache_params=params, mamba_layer_ids=list(MAMBA.slot_layers), device="cpu")
    pool = HybridLinearKVPool(
        size=PAGE * PAGES, full_attention_layer_ids=[], mamba_pool=pools, **{**paged_args(1), "head_num": 1}
    )
    settings = SimpleNamespace(mamba2_cache_params=params)
    return MAMBA, Pools(kv=pool, config=SimpleNamespace(get_total_num_kv_heads=lambda: 0), recurrent_config=settings)


def kda(tp: int) -> tuple[Model, Pools]:
    """Kimi-Linear: the other layers have latents."""
    shape = KimiLinearStateShape.create(tp_world_size=tp, num_heads=8, head_dim=4, conv_kernel_size=4)
    params = KimiLinearCacheParams(shape=shape, layers=list(KDA.slot_layers), dtype=FLOATS)
    blocks = tuple(replace(block, units=8, width=4) for block in KDA.conv_blocks)
    model = replace(KDA, conv_blocks=blocks, temporal=(8, 4, 4), dims=(24,))
    latents = {"use_mla": True, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    return hybrid(model, tp, params, SimpleNamespace(mamba2_cache_params=params), **latents)


def index_pool(layers: int, skipped: list[bool], *, pooled: bool) -> DSATokenToKVPool:
    """`pooled`: one key for 4 tokens, so that a page has as many keys as SGLang's kernels expect."""
    own = {"index_kpool": 4, "index_kpool_compress": True, "tail_extra_slots": 2, "max_running_requests": 7} if pooled else {}
    size = 256 if pooled else 64
    with get_parallel().override(attn_dcp_size=1):
        return DSATokenToKVPool(size=size * PAGES, page_size=size, kv_lora_rank=16, dtype=torch.float32, qk_rope_head_dim=8,
                                layer_num=layers, device="cpu", index_head_dim=128, enable_memory_saver=False,
                                kv_cache_dim=24, skip_topk_layers=skipped, **own)  # fmt: skip


INDEX = Model(heads=None, dims=(24,), index_layers=(0, 2))
DRAFT_INDEX = replace(INDEX, draft_layers=(0,), draft_heads=None, draft_dims=(24,), draft_index_layers=(0,))


def index(tp: int) -> tuple[Model, Pools]:
    return INDEX, Pools(kv=index_pool(3, [False, True, False], pooled=False), config=config())


def index_with_draft(tp: int) -> tuple[Model, Pools]:
    """GLM-5 with its MTP layer."""
    draft = drafts(index_pool(1, [False], pooled=False), tp)
    return DRAFT_INDEX, Pools(kv=index_pool(3, [False, True, False], pooled=False), drafts=draft, config=config())


def pooled_index_with_draft(tp: int) -> tuple[Model, Pools]:
    draft = drafts(index_pool(1, [False], pooled=True), tp)
    pools = Pools(kv=index_pool(3, [False, True, False], pooled=True), drafts=draft, config=config())
    return replace(DRAFT_INDEX, tokens_per_key=4, tail=6), pools


def index_with_latent_draft(tp: int) -> tuple[Model, Pools]:
    model, pools = index(tp)
    draft = drafts(latent_pool(1, page=64), tp)
    return replace(model, draft_layers=(0,), draft_heads=None, draft_dims=(24,)), replace(pools, drafts=draft)


MODELS = (
    heads, few_draft_heads, latents, latents_with_draft, latents_with_head_draft, heads_with_latent_draft, window, window_draft,
    gdn, mamba, mamba2, kda, index, index_with_draft, pooled_index_with_draft, index_with_latent_draft,
)  # fmt: skip


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
@pytest.mark.parametrize("build", MODELS)
def test_every_byte_between_real_pools(build: Any, tp: tuple[int, int]) -> None:
    sides = []
    for size in tp:
        made = [build(size) for _ in range(size)]
        sides.append(
            [
                RealMemory(model, Topology(tp=size, tp_rank=rank), pools, page_size=pools.kv.page_size)
                for rank, (model, pools) in enumerate(made)
            ]
        )
    for num_tokens, prefix in ((117, 0), (150, 64)):
        at, to = ([request(m, num_tokens, seed=number, prefix=prefix) for m in side] for number, side in enumerate(sides))
        for memory, each in zip(sides[0], at, strict=True):
            memory.fill(each, seed=num_tokens)
        assert all(memory.differences(each, seed=num_tokens) for memory, each in zip(sides[1], to, strict=True))
        copy(sides[0], sides[1], at, to)
        for memory, each in zip(sides[1], to, strict=True):
            assert memory.differences(each, seed=num_tokens) == []


def test_pools_that_are_not_known_are_refused() -> None:
    rank = Topology(tp=2)
    _, pools = heads(2)
    with pytest.raises(ConfigError, match="head_num: expected 4 of 4 KV heads with attention TP 1, found 2"):
        read_facts(pools, Topology())
    pools.kv.kv_cache_layout = "vectorized_5d"
    with pytest.raises(ConfigError, match="token_to_kv_pool, kv_cache_layout: expected 'nhd', found 'vectorized_5d'"):
        read_facts(pools, rank)
    _, pools = heads(2)
    assert pools.drafts is not None
    with pytest.raises(ConfigError, match="draft model: expected the attention TP of the model, 2, found 1"):
        read_facts(replace(pools, drafts=replace(pools.drafts, tp=1)), rank)
    unknown = object.__new__(MHATokenToKVPoolFP4)
    with pytest.raises(ConfigError, match="found MHATokenToKVPoolFP4"):
        read_facts(Pools(kv=unknown, config=config()), rank)
    _, pools = mamba2(2)
    del pools.recurrent_config.mamba_n_groups
    with pytest.raises(ConfigError, match="mamba_pool, conv of layer 0, conv_shard_groups: expected the blocks of 56 channels"):
        read_facts(pools, rank)


def test_convolutions_without_their_sizes_are_refused() -> None:
    """Inkling has six of them in a layer, and SGLang does not say how their channels are divided."""
    shape = InklingConvStateShape(conv=[(3, 16)] * 6, temporal=(0, 0, 0))
    params = InklingConvCacheParams(shape=shape, layers=[0, 1])
    _, pools = window(1)
    states = MambaPool(size=7, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 1], device="cpu")
    pools = replace(
        pools,
        requests=SimpleNamespace(mamba_pool=states),
        recurrent_config=SimpleNamespace(mamba2_cache_params=params),
    )
    reason = "mamba_pool, conv of layer 0, conv_shard_groups: expected the blocks of its channels, found InklingConvStateShape"
    with pytest.raises(ConfigError, match=reason):
        read_facts(pools, Topology())


def test_windows_that_would_be_cached_without_having_arrived_are_refused() -> None:
    """SGLang's tree takes whole pages. A shorter prompt of the same tokens gets them in place of its own."""
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(is_hybrid_swa=True))
    with pytest.raises(ConfigError, match="expected no --disaggregation-decode-enable-radix-cache with"):
        check_windows(scheduler)
    scheduler.tp_worker.is_hybrid_swa = False
    check_windows(scheduler)


def test_a_rank_without_attention_has_its_memory_on_the_gpu_that_sglang_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's pools name a GPU without its number."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    pool = type("MHATokenToKVPool", (), {"k_buffer": [], "device": "cuda"})()
    assert str(_device(pool)) == "cuda:3"
    assert str(_device(type("MHATokenToKVPool", (), {"k_buffer": [torch.zeros(1)], "device": "cuda"})())) == "cpu"


def test_what_is_read_is_what_sglang_says() -> None:
    _, pools = gdn(2)
    facts = read_facts(pools, Topology(tp=2))
    assert facts.kv is not None
    assert facts.kv.layers == (1, 3)
    dims = [slot.shape[slot.axes.index(slot.sharded)] for slot in facts.slots if slot.sharded]
    assert dims == pools.kv.mamba_pool.get_state_dim_per_tensor()
    assert [slot.layer for slot in facts.slots] == pools.kv.mamba_pool.get_state_layer_ids()
    assert np.prod(facts.slots[0].shape) * 4 == pools.kv.mamba_pool.get_contiguous_buf_infos()[2][0]
