"""How an attention layer's bytes lie in vLLM's blocks `[head slot, token, content]`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.state import sparse
from disagg.state.declare import Role, Rule, by_tp, declare, whole

Tensors = Mapping[int, torch.Tensor]

DS_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes per token of latents that FlashMLA packs with their scales."""

INDEX_KEYS = {132: (128, 4), 68: (64, 4)}
"""An index key's bytes and its scales', by the sum of both: FP8, and MXFP4."""

V4_LATENT = (576, 8)
"""Bytes of DeepSeek-V4's latent in `fp8_ds_mla`, and of its scales."""


class Format(enum.Enum):
    """PLAIN: for each head and token K, then V, or a latent. INLINE: the same with scales, in an order that depends on the
    kernels. NVFP4: K of all heads, then V, each with all values before the scales. PLANES: K of all tokens, then V, each
    token with its heads. BY_BLOCK: keys or latents of all tokens, then their scales. CONVOLVED: for each head the inputs of
    short convolutions.
    """

    PLAIN = enum.auto()
    INLINE = enum.auto()
    NVFP4 = enum.auto()
    PLANES = enum.auto()
    BY_BLOCK = enum.auto()
    CONVOLVED = enum.auto()


def is_index(spec: Any) -> bool:
    """Whether a cache holds index keys. vLLM does not mark DeepSeek-V4's."""
    if not isinstance(spec, MLAAttentionSpec):
        return False
    is_bytes = spec.dtype is torch.uint8 and spec.kv_quant_mode is KVQuantMode.NONE and spec.cache_dtype_str is None
    return spec.cache_role.value == "indexer" or (is_bytes and spec.head_size in INDEX_KEYS)


def is_windowed_latent(spec: Any) -> bool:
    """Whether a layer keeps a window of vectors that every rank has whole (DeepSeek-V4)."""
    return type(spec) is SlidingWindowMLASpec


def is_convolved(spec: Any) -> bool:
    """Whether a cache holds the last inputs of short convolutions: a window without V (Inkling)."""
    return type(spec) is SlidingWindowSpec and spec.head_size_v == 0


def has_scales(spec: Any) -> bool:
    """Whether a quantized layer may have scales beside its cache. DeepSeek-V4's formats have none."""
    return not (is_windowed_latent(spec) or (isinstance(spec, MLAAttentionSpec) and spec.model_version is not None))


def read_format(spec: AttentionSpec, what: str) -> Format:
    """Raises `ConfigError` for a format that is not described."""
    is_by_head = type(spec) in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    if not (is_by_head or type(spec) is MLAAttentionSpec or is_windowed_latent(spec)):
        raise ConfigError(f"{what}: expected full, sliding-window or chunked attention or MLA, found {spec}")
    if is_index(spec):
        found = _index_format(spec)
    elif is_windowed_latent(spec) or (isinstance(spec, MLAAttentionSpec) and spec.model_version is not None):
        found = _v4_format(spec)
    elif spec.tokens_per_state != 1:
        raise ConfigError(f"{what}: expected one state per token, found one per {spec.tokens_per_state} tokens: {spec}")
    else:
        found = _convolved_format(spec) if is_convolved(spec) else _format(spec)
    if found is None:
        raise ConfigError(f"{what}: expected a KV cache format whose bytes are described, found {spec}")
    if (found not in (Format.PLAIN, Format.NVFP4) or is_index(spec)) and current_platform.is_rocm():
        raise ConfigError(f"{what}: ROCm's kernels shuffle the bytes of packed formats, which is not described; found {spec}")
    return found


def _index_format(spec: MLAAttentionSpec) -> Format | None:
    if spec.state_content_bytes is not None or spec.num_head_slots is not None:
        return None
    if spec.dtype is torch.uint8:
        return Format.BY_BLOCK if spec.head_size in INDEX_KEYS else None
    return Format.PLAIN if spec.tokens_per_state == 1 else None


def _v4_format(spec: Any) -> Format | None:
    """DeepSeek-V4's latents, and the states of its compressors, which have no version."""
    if spec.num_head_slots is not None or (is_windowed_latent(spec) and spec.bounded_replay):
        return None
    if spec.model_version is not None and spec.cache_dtype_str == "fp8_ds_mla":
        return Format.BY_BLOCK if spec.state_content_bytes == sum(V4_LATENT) else None
    if spec.model_version is None and spec.cache_dtype_str is not None:
        return None  # a window of MLA in another model
    expected = torch.float32 if spec.model_version is None else torch.bfloat16
    is_plain_vector = spec.state_content_bytes is None and spec.kv_quant_mode is KVQuantMode.NONE and spec.dtype is expected
    return Format.PLAIN if is_plain_vector else None


def _convolved_format(spec: SlidingWindowSpec) -> Format | None:
    is_plain_vector = (
        spec.state_content_bytes is None and spec.num_head_slots is None and spec.kv_quant_mode is KVQuantMode.NONE
    )
    return Format.CONVOLVED if is_plain_vector else None


def _format(spec: AttentionSpec) -> Format | None:
    mode, nbytes, slots = spec.kv_quant_mode, spec.state_content_bytes, spec.num_head_slots
    sizes, itemsize = (spec.head_size, spec.head_size_v), spec.dtype.itemsize
    if mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) and nbytes is None and slots is None:
        is_packed = mode is KVQuantMode.NONE and spec.dtype in (torch.uint8, torch.int8)
        has_v = bool(spec.head_size_v) is not isinstance(spec, MLAAttentionSpec)
        return Format.PLAIN if has_v and not is_packed else None
    if isinstance(spec, MLAAttentionSpec) and slots is None and spec.cache_dtype_str in DS_MLA:
        is_packed = nbytes == DS_MLA[spec.cache_dtype_str] and spec.model_version is None
        return Format.INLINE if is_packed else None
    if mode.is_per_token_head and slots is None and not isinstance(spec, MLAAttentionSpec):
        per_byte = 2 if mode is KVQuantMode.INT4_PER_TOKEN_HEAD else 1
        scales = 2 * torch.float32.itemsize
        return Format.INLINE if nbytes == sum(size // per_byte * itemsize for size in sizes) + scales else None
    if sizes[0] != sizes[1]:
        return None
    if mode.is_nvfp4:
        is_packed = slots == 2 * spec.num_kv_heads and nbytes == sizes[0] // 2 + sizes[0] // 16
        return Format.NVFP4 if is_packed else None
    if mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) and slots == 2:
        return Format.PLANES if nbytes == spec.num_kv_heads * sizes[0] * itemsize else None
    return None


def convolved_component(
    name: str, tensors: Tensors, spec: SlidingWindowSpec, *, topology: Topology, optional: bool
) -> Component:
    """The inputs are divided by head. vLLM never gives two ranks the same head."""
    inner = {"kv_head": by_tp(spec.num_kv_heads * topology.tp), "dim": whole(spec.head_size)}
    roles = [Role(name="inputs", axes="hnd", inner=inner).of(tensors)]
    return declare(name, roles, rows="pages", topology=topology, optional=optional)


def shared_component(
    name: str, role: str, tensors: Tensors, spec: Any, *, topology: Topology, tokens: Rule, optional: bool
) -> Component:
    """Latents, index keys or states of compressors, which every rank has whole. With inline scales `role` gets the format's
    name.
    """
    found, granule = read_format(spec, name), int(spec.tokens_per_state)
    if found is Format.BY_BLOCK:
        data_nbytes, scale_nbytes = INDEX_KEYS[spec.head_size] if is_index(spec) else V4_LATENT
        return sparse.index_keys(
            {layer: _block_bytes(tensor, name) for layer, tensor in tensors.items()},
            page_size=next(iter(tensors.values())).shape[2] * granule,
            topology=topology,
            key_nbytes=data_nbytes,
            scale_nbytes=scale_nbytes,
            tokens_per_key=granule,
            name=name,
            tokens=tokens,
            optional=optional,
        )
    vectors = {layer: tensor.squeeze(1) for layer, tensor in tensors.items()}
    size = spec.head_size
    if found is Format.INLINE:
        vectors = {layer: vector.view(torch.uint8) for layer, vector in vectors.items()}
        role, size = f"{role}_{spec.cache_dtype_str}", spec.state_content_bytes
    made = Role(name=role, axes="page token dim", inner={"dim": whole(size)}, granule=granule)
    return declare(name, [made.of(vectors)], rows="pages", topology=topology, tokens=tokens, optional=optional)


def packed_component(
    name: str,
    tensors: Tensors,
    spec: AttentionSpec,
    *,
    cache_dtype: str,
    num_kv_heads: int,
    topology: Topology,
    tokens: Rule,
    optional: bool,
) -> Component:
    """K and V with scales. `cache_dtype` names the roles, since several formats have the same sizes."""
    nbytes = {layer: tensor.view(torch.uint8) for layer, tensor in tensors.items()}
    heads = by_tp(num_kv_heads)
    if read_format(spec, name) is Format.INLINE:
        inner = {"kv_head": heads, "dim": whole(spec.state_content_bytes)}
        roles = [Role(name=f"kv_{cache_dtype}", axes="hnd", inner=inner).of(nbytes)]
    else:
        parts = {layer: _nvfp4_parts(tensor, spec, name) for layer, tensor in nbytes.items()}
        sizes = {"": spec.head_size // 2, "_scale": spec.head_size // 16}
        roles = [
            Role(name=f"{side}_{cache_dtype}{part}", axes="hnd", inner={"kv_head": heads, "dim": whole(size)}).of(
                {layer: found[side, part] for layer, found in parts.items()}
            )
            for side in "kv"
            for part, size in sizes.items()
        ]
    return declare(name, roles, rows="pages", topology=topology, tokens=tokens, optional=optional)


def plane_views(tensor: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `Format.PLANES`, as `[block, token, head, dim]`."""
    planes = tensor.unflatten(-1, (spec.num_kv_heads, spec.head_size))
    return planes[:, 0], planes[:, 1]


def _block_bytes(tensor: torch.Tensor, name: str) -> torch.Tensor:
    num_blocks, slots, tokens, content = tensor.shape
    if slots != 1 or tensor.stride()[2:] != (content, 1):
        found = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise ConfigError(f"component {name!r}: expected blocks without gaps between tokens, found {found}")
    return tensor.as_strided((num_blocks, tokens * content), (tensor.stride(0), 1), tensor.storage_offset())


def _nvfp4_parts(tensor: torch.Tensor, spec: AttentionSpec, name: str) -> dict[tuple[str, str], torch.Tensor]:
    """Values and scales of K and V, as `[block, head, token, dim]`. In memory heads or tokens may be outermost."""
    num_blocks, slots, tokens, content = tensor.shape
    heads, strides = slots // 2, tensor.stride()
    by_head = strides[1:] == (tokens * content, content, 1)
    if not by_head and strides[1:] != (content, slots * content, 1):
        raise ConfigError(f"component {name!r}: expected blocks without gaps, found strides {strides} of {tuple(tensor.shape)}")
    parts, start = {}, tensor.storage_offset()
    for side in "kv":
        for part, size in (("", spec.head_size // 2), ("_scale", spec.head_size // 16)):
            steps = (tokens * size, size) if by_head else (size, heads * size)
            parts[side, part] = tensor.as_strided((num_blocks, heads, tokens, size), (strides[0], *steps, 1), start)
            start += heads * tokens * size
    return parts
