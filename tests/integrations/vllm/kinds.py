"""The caches of models, as vLLM's own layers describe them, and where vLLM's own kernels have their bytes.

Import no module of vLLM that imports numba: engines are forked from this process, and vLLM's CPU workers, which look through
all modules, do not start beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear.base import LinearAttention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.inkling.nvidia.sconv_swa_attn import InklingConvState
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend, B12xPagedAttentionImpl
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)
from vllm.v1.worker.utils import customize_attention_spec

from tests.integrations.vllm.caches import Cells, Layer, Part

MODEL_DTYPE = torch.bfloat16


def gqa(
    layers: Iterable[int],
    heads: int,
    dim: int,
    *,
    v_dim: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    dtype: str = "auto",
) -> list[Layer]:
    """Full, sliding-window or chunked attention, with the Triton backend, which takes every format except NVFP4."""
    cls = Attention if chunk is None else ChunkedLocalAttention

    def spec(tp: int, block_size: int) -> KVCacheSpec:
        layer = SimpleNamespace(
            kv_cache_dtype=dtype,
            kv_cache_torch_dtype=_torch_dtype(dtype),
            attn_type=AttentionType.DECODER,
            attn_backend=TritonAttentionBackend,
            sliding_window=window,
            attention_chunk_size=chunk,
            num_kv_heads=max(1, heads // tp),
            head_size=dim,
            head_size_v=dim if v_dim is None else v_dim,
        )
        found = cls.get_kv_cache_spec(layer, _config(block_size, dtype))
        return customize_attention_spec(TritonAttentionBackend, found)

    cells = _inline_cells if get_kv_quant_mode(dtype).is_per_token_head else _plain_cells
    return [
        Layer(
            name=f"model.layers.{i}.self_attn.attn", spec=spec, cells=cells, heads=heads, dtype=dtype, backend="TRITON_ATTN",
            impl=lambda: triton_impl(dtype),
        )
        for i in layers
    ]  # fmt: skip


def nvfp4(layers: Iterable[int], heads: int, dim: int, *, fa2: bool = True) -> list[Layer]:
    """Attention as FlashInfer packs it: its `customize_spec`, which cannot be imported without FlashInfer. Without `fa2` its
    writer is vLLM's kernel for SM100.
    """

    def spec(tp: int, block_size: int) -> KVCacheSpec:
        own = max(1, heads // tp)
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=own,
            head_size=dim,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NVFP4,
            num_head_slots=2 * own,
            state_content_bytes=nvfp4_kv_cache_full_dim(dim),
        )

    return [
        Layer(
            name=f"model.layers.{i}.self_attn.attn", spec=spec, cells=_nvfp4_cells, heads=heads, dtype="nvfp4",
            backend="FLASHINFER", impl=lambda: SimpleNamespace(nvfp4_fa2=fa2),
        )
        for i in layers
    ]  # fmt: skip


def planes(layers: Iterable[int], heads: int, dim: int, *, dtype: str = "auto") -> list[Layer]:
    """Attention of the b12x backend."""

    def spec(tp: int, block_size: int) -> KVCacheSpec:
        plain = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=max(1, heads // tp),
            head_size=dim,
            dtype=_torch_dtype(dtype),
            kv_quant_mode=get_kv_quant_mode(dtype),
        )
        return customize_attention_spec(B12xPagedAttentionBackend, plain)

    return [
        Layer(name=f"model.layers.{i}.self_attn.attn", spec=spec, cells=_plane_cells, heads=heads, dtype=dtype, backend="B12X")
        for i in layers
    ]


def mla(layers: Iterable[int], dim: int = 576, *, dtype: str = "auto", sparse: bool = False) -> list[Layer]:
    """Latent attention; `sparse` as FlashMLA's sparse kernels have it."""

    def spec(_: int, block_size: int) -> KVCacheSpec:
        layer = SimpleNamespace(
            kv_cache_dtype=dtype,
            head_size=dim,
            sliding_window=None,
            indexer=object() if sparse else None,
            non_causal_multi_token_decode=False,
            topk_buffer_width=None,
        )
        found = MLAAttention.get_kv_cache_spec(layer, _config(block_size, dtype))
        return customize_attention_spec(FlashMLASparseBackend, found) if sparse else found

    backend = "FLASHMLA_SPARSE" if sparse else "FLASHMLA"
    return [
        Layer(name=f"model.layers.{i}.self_attn.attn", spec=spec, cells=_whole_cells, dtype=dtype, backend=backend)
        for i in layers
    ]


def dsa_index(layers: Iterable[int], *, key: int = 128) -> list[Layer]:
    """The indexer's keys of DeepSeek-V3.2 and GLM-5."""

    def spec(_: int, block_size: int) -> KVCacheSpec:
        cache = SimpleNamespace(block_size=block_size)
        layer = SimpleNamespace(cache_config=cache, head_dim=key + key // 128 * 4, dtype=torch.uint8)
        return DeepseekV32IndexerCache.get_kv_cache_spec(layer, None)

    return [
        Layer(name=f"model.layers.{i}.self_attn.indexer.k_cache", spec=spec, cells=_divided_cells(key), backend="INDEXER")
        for i in layers
    ]


def m3_index(layers: Iterable[int], *, dim: int = 128, dtype: torch.dtype = MODEL_DTYPE) -> list[Layer]:
    """MiniMax-M3's index keys: its class needs torchvision, so the specification is written here."""

    def spec(_: int, block_size: int) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=dim, dtype=dtype, cache_role=SparseCacheRole.INDEXER
        )

    return [
        Layer(name=f"model.layers.{i}.self_attn.index_cache", spec=spec, cells=_whole_cells, backend="INDEXER") for i in layers
    ]


def triton_impl(dtype: str) -> Any:
    """What `TritonAttentionImpl` knows when it takes a cache apart."""
    impl: Any = object.__new__(TritonAttentionImpl)
    impl._kv_quant_mode, impl.fp8_dtype = get_kv_quant_mode(dtype), torch.float8_e4m3fn
    return impl


def v4(ratios: Sequence[int], *, dtype: str = "fp8_ds_mla", window: int = 128, fp4_index: bool = False) -> list[Layer]:
    """DeepSeek-V4: a window in each layer, and with a ratio compressed latents and the states of their compressor; with ratio 4
    index keys and their compressor too.
    """
    is_packed, made = dtype == "fp8_ds_mla", list[Layer]()
    torch_dtype = torch.uint8 if is_packed else MODEL_DTYPE
    latents = _divided_cells(576) if is_packed else _whole_cells
    keys = _divided_cells(64 if fp4_index else 128)

    def add(name: str, cls: Any, cells: Any, granule: int = 1, **fields: Any) -> None:
        def spec(_: int, block_size: int) -> KVCacheSpec:
            config = _config(block_size, dtype)
            return cls.get_kv_cache_spec(SimpleNamespace(cache_config=config.cache_config, **fields), config)

        made.append(Layer(name=name, spec=spec, cells=cells, granule=granule, dtype=dtype, backend="DEEPSEEK_V4"))

    for layer, ratio in enumerate(ratios):
        prefix = f"model.layers.{layer}.attn"
        add(
            f"{prefix}.swa_cache", DeepseekV4SWACache, latents, bounded_replay=False, block_size=64, head_dim=512,
            packed_block_stride_alignment=None, dtype=torch_dtype, window_size=window, packed_bytes_per_token=584,
            packed_page_alignment=576,
        )  # fmt: skip
        if ratio == 1:
            continue
        add(
            prefix, DeepseekV4Attention, latents, ratio, compress_ratio=ratio, kv_cache_dtype=dtype, head_dim=512,
            kv_cache_torch_dtype=torch_dtype,
        )  # fmt: skip
        block_size, overlap = (4, 2) if ratio == 4 else (8, 1)
        state = {"block_size": block_size, "sliding_window": overlap * ratio, "dtype": torch.float32}
        add(f"{prefix}.compressor.state_cache", CompressorStateCache, _whole_cells, state_dim=2 * overlap * 512, **state)
        if ratio == 4:
            size = 68 if fp4_index else 132
            add(
                f"{prefix}.indexer.k_cache", DeepseekV4IndexerCache, keys, ratio, head_dim=size, dtype=torch.uint8,
                compress_ratio=ratio,
            )  # fmt: skip
            add(
                f"{prefix}.indexer.compressor.state_cache",
                CompressorStateCache,
                _whole_cells,
                state_dim=2 * overlap * 128,
                **state,
            )
    return made


def convolved(layers: Iterable[int], heads: int, head_dim: int, hidden: int, *, kernel: int = 4) -> list[Layer]:
    """Inkling's four short convolutions of a layer, as `InklingConvState.__init__` sizes them."""
    size = 1 << (2 * head_dim + 2 * hidden // heads - 1).bit_length()

    def spec(tp: int, _: int) -> KVCacheSpec:
        layer = SimpleNamespace(
            block_size=kernel, num_kv_heads=heads // tp, head_size=size, _dtype=MODEL_DTYPE, sliding_window=kernel
        )
        return InklingConvState.get_kv_cache_spec(layer, None)

    return [
        Layer(name=f"model.layers.{i}.conv_state", spec=spec, cells=_whole_cells, heads=heads, backend="INKLING_SCONV_SWA")
        for i in layers
    ]


def states(layers: Iterable[int], cls: Any, shapes: Callable[[int], Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype],
           parts: Mapping[str, tuple[tuple[int, ...], Part]]) -> list[Layer]:  # fmt: skip
    """Recurrent states of a class of vLLM's layers, which has the shapes of a rank, given the number of ranks."""

    def spec(tp: int, block_size: int) -> KVCacheSpec:
        cache = SimpleNamespace(
            mamba_block_size=block_size, mamba_page_size_padded=None, mamba_cache_mode="none", use_replayssm=False
        )
        layer = SimpleNamespace(
            get_state_shape=lambda: shapes(tp),
            get_state_dtype=lambda: tuple(dtypes),
            mamba_type=cls.mamba_type.fget(None),
            is_kv_cache_tp_replicated=False,
        )
        return MambaBase.get_kv_cache_spec(layer, SimpleNamespace(cache_config=cache, num_speculative_tokens=0))

    def cells(view: torch.Tensor, found: Any) -> Cells:
        layer = SimpleNamespace(get_state_shape=lambda: found.shapes, get_state_dtype=lambda: found.dtypes)
        MambaBase.bind_kv_cache(layer, view)
        return dict(zip(parts, layer.kv_cache, strict=True))

    return [Layer(name=f"model.layers.{i}.linear_attn", spec=spec, cells=cells, parts=parts) for i in layers]


def kda(layers: Iterable[int], heads: int, dim: int, *, kernel: int = 4) -> list[Layer]:
    """Kimi delta attention: a convolution over Q, K and V, each divided by head, and a state per head."""
    own = heads * dim

    def channels(rank: int, ranks: int) -> tuple[Any, ...]:
        part = np.arange(own).reshape(ranks, -1)[rank]
        return slice(None), np.concatenate([part, own + part, 2 * own + part])

    return states(
        layers,
        GatedDeltaNetAttention,
        lambda tp: MambaStateShapeCalculator.kda_state_shape(tp, heads, dim, conv_kernel_size=kernel),
        (MODEL_DTYPE, torch.float32),
        {"conv": ((kernel - 1, 3 * own), channels), "temporal": ((heads, dim, dim), _by_head(heads))},
    )


def gdn(layers: Iterable[int], key_heads: int, value_heads: int, dim: int, *, kernel: int = 4) -> list[Layer]:
    """Gated delta nets."""
    sizes = key_heads * dim, key_heads * dim, value_heads * dim
    starts = np.cumsum((0, *sizes))

    def channels(rank: int, ranks: int) -> tuple[Any, ...]:
        parts = [start + np.arange(size).reshape(ranks, -1)[rank] for start, size in zip(starts, sizes, strict=False)]
        return slice(None), np.concatenate(parts)

    return states(
        layers,
        GatedDeltaNetAttention,
        lambda tp: MambaStateShapeCalculator.gated_delta_net_state_shape(tp, key_heads, value_heads, dim, dim, kernel),
        (MODEL_DTYPE, torch.float32),
        {"conv": ((kernel - 1, sum(sizes)), channels), "temporal": ((value_heads, dim, dim), _by_head(value_heads))},
    )


def linear(layers: Iterable[int], heads: int, dim: int) -> list[Layer]:
    """Linear attention (Ring-2.6)."""
    return states(
        layers,
        LinearAttention,
        lambda tp: MambaStateShapeCalculator.linear_attention_state_shape(heads, tp, dim),
        (torch.float32,),
        {"linear": ((heads, dim, dim), _by_head(heads))},
    )


def short_convolution(layers: Iterable[int], channels: int, *, kernel: int = 3) -> list[Layer]:
    """LFM2's gated short convolution."""

    def part(rank: int, ranks: int) -> tuple[Any, ...]:
        return slice(None), slice(rank * channels // ranks, (rank + 1) * channels // ranks)

    return states(
        layers,
        ShortConv,
        lambda tp: MambaStateShapeCalculator.short_conv_state_shape(tp, channels, kernel),
        (MODEL_DTYPE,),
        {"conv": ((kernel - 1, channels), part)},
    )


def _by_head(heads: int) -> Part:
    return lambda rank, ranks: (slice(rank * heads // ranks, (rank + 1) * heads // ranks),)


def _torch_dtype(name: str) -> torch.dtype:
    return MODEL_DTYPE if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]


def _config(block_size: int, dtype: str) -> Any:
    """What the layers read of vLLM's configuration."""
    cache = SimpleNamespace(block_size=block_size, skip_page_size_padded=None, cache_dtype=dtype)
    return SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=MODEL_DTYPE, quantization=None))


# -- where the kernels have the bytes: `[page, position, head, byte]` --------------------------------------------------


def _whole_cells(view: torch.Tensor, _: Any) -> Cells:
    return {"content": view.view(torch.uint8).permute(0, 2, 1, 3)}


def _plain_cells(view: torch.Tensor, spec: Any) -> Cells:
    """As `FlashAttentionImpl.forward` and `TritonAttentionImpl.forward` split the content of a head and token."""
    k, v = view.transpose(1, 2).split([spec.head_size, spec.head_size_v], dim=-1)
    return {"k": k.view(torch.uint8), "v": v.view(torch.uint8)}


def _inline_cells(view: torch.Tensor, spec: Any) -> Cells:
    """As `TritonAttentionImpl` takes values and scales out of the content."""
    impl = triton_impl(spec.kv_quant_mode.name.lower())
    before = view.clone()
    k, v = impl._pth_key_value_caches(view)  # which also sets every scale to 1
    view.copy_(before)
    scales = {"k_scale": impl._k_scale_cache, "v_scale": impl._v_scale_cache}
    size = spec.head_size // (2 if spec.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD else 1)
    values = {"k": k[..., :size].view(torch.uint8), "v": v[..., :size].view(torch.uint8)}
    return values | {name: scale.unsqueeze(-1).view(torch.uint8) for name, scale in scales.items()}


def _nvfp4_cells(view: torch.Tensor, spec: Any) -> Cells:
    """As FlashInfer's `_nvfp4_kv_views` divides a block: each side's values, then its scales."""
    num_blocks, slots, tokens, content = view.shape
    heads = slots // 2
    by_head = view.stride()[1:] == (tokens * content, content, 1)
    dims = (heads, tokens) if by_head else (tokens, heads)
    found = {}
    for number, side in enumerate("kv"):
        at = view.storage_offset() + number * heads * tokens * content
        half = view.as_strided((num_blocks, *dims, content), (view.stride(0), dims[1] * content, content, 1), at)
        for name, part in zip((side, f"{side}_scale"), nvfp4_split_data_scale(half), strict=True):
            found[name] = (part.transpose(1, 2) if by_head else part).view(torch.uint8)
    return found


def _plane_cells(view: torch.Tensor, spec: Any) -> Cells:
    impl: Any = object.__new__(B12xPagedAttentionImpl)
    impl.num_kv_heads, impl.head_size, impl.kv_cache_dtype, impl.kv_torch_dtype = (
        spec.num_kv_heads,
        spec.head_size,
        "",
        view.dtype,
    )
    k, v = impl._kv_cache_views(view)
    return {"k": k.view(torch.uint8), "v": v.view(torch.uint8)}


def _divided_cells(key: int) -> Callable[[torch.Tensor, Any], Cells]:
    """As `indexer_k_quant_and_cache` and DeepSeek-V4's kernels divide a block: keys of all tokens, then their scales."""

    def cells(view: torch.Tensor, _: Any) -> Cells:
        num_blocks, _slots, tokens, content = view.shape
        block = view.as_strided((num_blocks, tokens * content), (view.stride(0), 1), view.storage_offset())
        keys, scales = block[:, : tokens * key], block[:, tokens * key :]
        return {"key": keys.unflatten(1, (tokens, 1, key)), "scale": scales.unflatten(1, (tokens, 1, -1))}

    return cells


def model(kind: str, num_layers: int, **fields: Any) -> Mapping[str, Any]:
    """The fields of a `config.json` that the connector reads."""
    return {"model_type": kind, "num_hidden_layers": num_layers, **fields}
