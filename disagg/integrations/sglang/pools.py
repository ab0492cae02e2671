"""Reads `Facts` from SGLang's pools, which are known by their classes' names. Imports no SGLang.

Other classes are refused: a wrong guess would damage requests without an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from disagg.core.errors import ConfigError
from disagg.core.formats import FLOATS, QUANTIZED
from disagg.core.memory import Device
from disagg.core.topology import Topology
from disagg.integrations.sglang.facts import (
    Buffer,
    CompressedFacts,
    DraftFacts,
    Facts,
    IndexFacts,
    LatentScaleFacts,
    PageFacts,
    ScaleFacts,
    SlotFacts,
)
from disagg.state.declare import Block, blocks_by_tp, by_tp

MXFP8 = "MHATokenToKVPoolMXFP8"
HEADS = ("MHATokenToKVPool", MXFP8)
LATENTS_FP4 = "MLATokenToKVPoolFP4"
LATENTS = ("MLATokenToKVPool", "DSATokenToKVPool", LATENTS_FP4)
WINDOWS = "SWAKVPool"
MINIMAX = "MiniMaxSparseKVPool"
QSA = "QSATokenToKVPool"
RECURRENT = ("HybridLinearKVPool", QSA)
KNOWN = (*HEADS, *LATENTS, WINDOWS, MINIMAX, *RECURRENT)


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The draft runners' pools in order. `tp` is their attention TP, `window` is in tokens."""

    pools: tuple[Any, ...]
    config: Any
    tp: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What SGLang's scheduler has. `window` is in tokens. `kv_scales` are set if SGLang divides K and V by them. `windows`,
    `by_layer` and `reuses_pages` are those of `Facts`.
    """

    kv: Any
    drafts: Drafts | None = None
    requests: Any = None
    config: Any
    recurrent_config: Any = None
    window: int | None = None
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    windows: Mapping[int, int] = field(default_factory=dict)
    by_layer: bool = False
    reuses_pages: bool = False


def read_facts(pools: Pools, topology: Topology) -> Facts:
    """Raises `ConfigError` that names the pool and field of unknown memory."""
    full, layers = _full("token_to_kv_pool", pools.kv)
    found: dict[str, Any] = {
        "device": _device(full),
        "kv": _with_scales(_pages("token_to_kv_pool", full, layers, pools.config, topology), pools.kv_scales, full),
        "index": _index(full, layers),
        "index_k": _index_k(pools.kv) if _name(pools.kv) == MINIMAX else None,
        "compressed": _compressed(pools.kv) if _name(pools.kv) == QSA else None,
        "reuses_pages": pools.reuses_pages,
    }
    if pools.drafts is not None:
        found["drafts"] = _drafts(pools.drafts, topology, model=pools.kv)
    if _name(pools.kv) == WINDOWS:
        window = _windows("swa_kv_pool", pools.kv, pools.config, topology)
        found["window_kv"] = _with_scales(window, pools.kv_scales, pools.kv.swa_kv_pool)
        found["window"] = pools.window
    elif _name(pools.kv) in HEADS:
        found |= {"windows": pools.windows, "by_layer": pools.by_layer}
    mamba = getattr(pools.kv, "mamba_pool", None) or getattr(pools.requests, "mamba_pool", None)
    if mamba is not None:
        found["slots"] = _slots(mamba, pools.recurrent_config, topology)
    return Facts(topology=topology, **found)


def has_numbers(pool: Any, scales: Mapping[int, tuple[float, float]]) -> bool:
    """Whether the scales of K and V are in the layouts. `pool` is the scheduler's. Floats divided by scales are not
    described there.
    """
    found = getattr(pool, "main_pool", getattr(pool, "full_kv_pool", pool))
    if _name(found) not in HEADS or _name(found) == MXFP8:
        return False
    return _dtype(found.dtype) in QUANTIZED or (_dtype(found.dtype) in FLOATS and _are_one(scales))


def _are_one(scales: Mapping[int, tuple[float, float]]) -> bool:
    return all(scale == 1.0 for pair in scales.values() for scale in pair)


def _with_scales(facts: PageFacts | None, scales: Mapping[int, tuple[float, float]], pool: Any) -> PageFacts | None:
    """Rounding is known only without scales: then it is torch's own cast. SGLang divides in the model's dtype, which rounds
    once more.
    """
    if facts is None or not has_numbers(pool, scales):
        return facts
    found = {layer: scales.get(layer, (1.0, 1.0)) for layer in facts.layers}
    return replace(facts, kv_scales=found, rounding=_rounding(pool.dtype, pool.device) if _are_one(found) else None)


def _rounding(dtype: Any, device: Any) -> str:
    """What torch's cast does with too large numbers depends on the device."""
    import torch

    is_bounded = bool(torch.tensor(1e6, device=device).to(dtype).float().isfinite())
    return "nearest" if is_bounded else "unbounded"


def _name(pool: Any) -> str:
    return type(pool).__name__


def _drafts(drafts: Drafts, topology: Topology, *, model: Any) -> tuple[DraftFacts, ...]:
    """SGLang lists the first runner's index keys, if its pool is of the `model`'s kind."""
    if drafts.tp != topology.tp:
        raise ConfigError(f"draft model: expected the attention TP of the model, {topology.tp}, found {drafts.tp}")
    found = []
    for number, pool in enumerate(drafts.pools):
        what = f"draft_token_to_kv_pool of runner {number}"
        full, layers = _full(what, pool)
        is_alike = number == 0 and _name(pool) == _name(model)
        facts = DraftFacts(
            kv=_pages(what, full, layers, drafts.config, topology),
            buffers=_buffers(full) if layers else (),
            scale_buffers=_scale_buffers(full),
            index=_index(full, layers) if is_alike else None,
            compressed=_compressed(pool) if is_alike and _name(pool) == QSA else None,
        )
        if _name(pool) == WINDOWS:
            facts = replace(
                facts,
                window_kv=_windows(f"swa_kv_pool, {what}", pool, drafts.config, topology),
                window_buffers=_buffers(pool.swa_kv_pool),
                window_scale_buffers=_scale_buffers(pool.swa_kv_pool),
                window=drafts.window,
                has_full_ids=pool.swa_uses_full_indices,
            )
        found.append(facts)
    return tuple(found)


def _buffers(pool: Any) -> tuple[Buffer, ...]:
    return tuple(map(Buffer, *pool.get_contiguous_buf_infos()))


def _scale_buffers(pool: Any) -> tuple[Buffer, ...]:
    return tuple(map(Buffer, *pool.get_kv_scale_buf_infos())) if _name(pool) == MXFP8 else ()


def _windows(what: str, pool: Any, config: Any, topology: Topology) -> PageFacts | None:
    heads = _window_heads(config) if _name(pool.swa_kv_pool) in HEADS else None
    return _pages(what, pool.swa_kv_pool, _by_kind(pool, window=True), config, topology, heads=heads)


def _full(what: str, pool: Any) -> tuple[Any, tuple[int, ...]]:
    """The pool of full attention, and its layers by number in the model."""
    if _name(pool) == WINDOWS:
        if _name(pool.full_kv_pool) == "DSATokenToKVPool":
            raise ConfigError(
                f"{what}, full_kv_pool: expected no index keys, since SGLang does not hand them over, found DSATokenToKVPool"
            )
        return pool.full_kv_pool, _by_kind(pool, window=False)
    if _name(pool) in RECURRENT:
        return pool.full_kv_pool, tuple(pool.full_attention_layer_id_mapping)
    if _name(pool) == MINIMAX:
        if pool.index_kv_pool is not None:
            raise ConfigError(f"{what}, index_kv_pool: expected none, since SGLang does not hand over index values, found one")
        return pool.main_pool, tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    if _name(pool) in (*HEADS, *LATENTS):
        return pool, tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    raise ConfigError(f"{what}: expected one of {', '.join(KNOWN)}, found {_name(pool)}")


def _by_kind(pool: Any, *, window: bool) -> tuple[int, ...]:
    """One half's layers, in the order of their memory."""
    found = [(index, layer) for layer, (index, is_window) in pool.layers_mapping.items() if is_window is window]
    return tuple(layer for _, layer in sorted(found))


def _device(pool: Any) -> Device:
    buffers = pool.k_buffer if _name(pool) in HEADS else pool.kv_buffer
    device = buffers[0].device if len(buffers) else torch.device(pool.device)
    if device.type == "cuda" and device.index is None:  # SGLang names it without its number, and has made it the current one
        device = torch.device("cuda", torch.cuda.current_device())
    return Device.parse(str(device))


def _pages(
    what: str, pool: Any, layers: tuple[int, ...], config: Any, topology: Topology, *, heads: int | None = None
) -> PageFacts | None:
    """`None` for a pool without layers, which models without attention have. `heads` are the model's KV heads, if `config`
    has others for these layers.
    """
    if not layers:
        return None
    if _name(pool) == LATENTS_FP4:
        latent, scale = pool.kv_buffer[0], pool.kv_scale_buffer[0]  # two elements per byte, a scale per 16
        found = tuple(Buffer(each.data_ptr(), each.nbytes, each[0].nbytes * pool.page_size) for each in pool.kv_scale_buffer)
        scales = LatentScaleFacts(nbytes=scale.shape[-1], buffers=found)
        return PageFacts(layers=layers, dtype=_dtype(latent.dtype), dims=(latent.shape[-1],), latent_scales=scales)
    if _name(pool) in LATENTS:
        dtype = pool.store_dtype if pool.dsa_kv_cache_store_fp8 else pool.dtype  # packed: bytes of several kinds
        return PageFacts(layers=layers, dtype=_dtype(dtype), dims=(int(pool.kv_cache_dim),))
    if _name(pool) not in HEADS:
        raise ConfigError(f"{what}: expected {', '.join((*HEADS, *LATENTS))}, found {_name(pool)}")
    if pool.kv_cache_layout != "nhd":
        raise ConfigError(f"{what}, kv_cache_layout: expected 'nhd', found {pool.kv_cache_layout!r}")
    if pool.is_quantized_kv_cache:
        raise ConfigError(f"{what}, quant_method: expected none, found {type(pool.quant_method).__name__}")
    heads = heads or config.get_total_num_kv_heads()
    local = by_tp(heads).local_size(topology)
    if pool.head_num != local:
        raise ConfigError(
            f"{what}, head_num: expected {local} of {heads} KV heads with attention TP {topology.tp}, found {pool.head_num}"
        )
    return PageFacts(
        layers=layers,
        dtype=_dtype(pool.store_dtype if _name(pool) == MXFP8 else pool.dtype),
        dims=(pool.head_dim, pool.v_head_dim),
        num_kv_heads=heads,
        scales=_scales(pool) if _name(pool) == MXFP8 else None,
    )


def _scales(pool: Any) -> ScaleFacts:
    """MXFP8: a byte for 32 elements of a head. With pages of 128 tokens those of a page and head are interleaved."""
    granule = pool.page_size if pool.mxfp8_sf_interleaved else 1
    dims = (pool.head_dim, pool.v_head_dim)
    return ScaleFacts(granule=granule, nbytes=tuple(granule * dim // pool.MXFP8_SCALE_BLOCK_SIZE for dim in dims))


def _index_k(pool: Any) -> PageFacts | None:
    keys = pool.index_k_pool
    if keys is None:
        return None
    if _name(keys) != "MHATokenToKOnlyPool" or keys.head_num != 1:
        raise ConfigError(f"index_k_pool: expected MHATokenToKOnlyPool of 1 head, found {_name(keys)} of {keys.head_num}")
    return PageFacts(layers=tuple(pool.index_k_layer_id_mapping), dtype=_dtype(keys.dtype), dims=(keys.head_dim,))


def _compressed(pool: Any) -> CompressedFacts | None:
    layers = tuple(pool.full_attention_layer_id_mapping)
    if not layers:
        return None
    return CompressedFacts(
        layers=layers,
        dim=pool.qsa_index_kv_heads * pool.qsa_index_head_dim,
        ratio=pool.qsa_compress_ratio,
        dtype=_dtype(pool.qsa_compressed_dtype),
        ring_dtype=_dtype(pool.index_state_dtype),
    )


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _window_heads(config: Any) -> int:
    text = config.hf_text_config
    other = getattr(text, "attention_other_setting", None)
    if other is not None:
        return int(other["num_attention_groups"])
    return int(getattr(text, "swa_num_key_value_heads", None) or config.get_total_num_kv_heads())


def _index(pool: Any, layers: tuple[int, ...]) -> IndexFacts | None:
    if _name(pool) != "DSATokenToKVPool":
        return None
    from sglang.srt.mem_cache import index_key_cache

    if index_key_cache._use_aiter_preshuffle:
        raise ConfigError("token_to_kv_pool: expected index keys token by token, found tiles of 16 tokens, as aiter has them")
    own = tuple(layer for layer, skipped in zip(layers, pool.skip_topk_layers, strict=True) if not skipped)
    tail = pool.index_kpool + pool.tail_extra_slots if pool.kpool_use_compress else 0
    return IndexFacts(layers=own, key_dim=pool.index_head_dim, tokens_per_key=pool.index_kpool, tail=tail)


def _slots(mamba: Any, config: Any, topology: Topology) -> tuple[SlotFacts, ...]:
    """In the order of `KVArgs`, each with its axes in the order of memory. SGLang lists Qwen4-Exp's PLE state with them,
    whose n-gram context is of no layer.
    """
    found = []
    for role, tensor, axis, layer in mamba._iter_transfer_state_entries():
        what = f"mamba_pool, {role} of layer {layer}"
        shape, strides = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
        axes = _slot_axes(role, len(shape), axis, grouped=mamba.conv_shard_groups is not None)
        blocks: tuple[Block, ...] = ()
        if axis is not None:
            blocks = _conv_blocks(config, what) if role == "conv" else (Block(shape[axis] * topology.tp, 1),)
            local = blocks_by_tp(blocks).local_size(topology)
            if local != shape[axis]:
                raise ConfigError(
                    f"{what}, axis {axes[axis]}: expected {local} with attention TP {topology.tp}, found {shape[axis]}"
                )
        order = sorted(range(len(shape)), key=lambda i: (-strides[i], i))
        if [strides[i] for i in order] != [math.prod(shape[j] for j in order[at + 1 :]) for at in range(len(order))]:
            raise ConfigError(f"{what}: expected a slot without gaps, found strides {strides} of shape {shape}")
        found.append(
            SlotFacts(
                role=role,
                layer=0 if role == "ple_ngram" else layer,
                axes=tuple(axes[i] for i in order),
                shape=tuple(shape[i] for i in order),
                dtype=_dtype(tensor.dtype),
                sharded=None if axis is None else axes[axis],
                blocks=blocks,
                component=role if role.startswith("ple_") else "ssm",
            )
        )
    return tuple(found)


def _slot_axes(role: str, num_axes: int, sharded: int | None, *, grouped: bool) -> tuple[str, ...]:
    """SGLang's order is `channel width`, in Kimi's models `width channel`."""
    if role == "conv" and num_axes == 2:
        return ("channel", "width") if sharded == 0 else ("width", "channel")
    if num_axes == 3:
        return ("head", "value_dim", "key_dim") if grouped else ("head", "head_dim", "state")
    return tuple(f"axis{i}" for i in range(num_axes))


def _conv_blocks(config: Any, what: str) -> tuple[Block, ...]:
    """The blocks of a convolution's channels in the whole model."""
    shape = config.mamba2_cache_params.shape if config is not None else None
    if shape is None:
        raise ConfigError(f"{what}: expected a configuration of recurrent layers, found none")
    sizes = getattr(shape, "conv_shard_groups", None)
    if sizes is not None:
        return tuple(Block(size, 1) for size in sizes)
    if not hasattr(shape, "conv_dim"):
        raise ConfigError(
            f"{what}, conv_shard_groups: expected the blocks of its channels, found {type(shape).__name__} without"
        )
    if shape.conv_dim == shape.intermediate_size:
        return (Block(shape.intermediate_size, 1),)
    groups = next((getattr(config, name) for name in ("mamba_n_groups", "n_groups") if hasattr(config, name)), None)
    if groups is None or shape.intermediate_size != shape.num_heads * shape.head_dim:
        raise ConfigError(f"{what}, conv_shard_groups: expected the blocks of {shape.conv_dim} channels, found none")
    shared = Block(int(groups), shape.state_size, groups=True)
    return (Block(shape.num_heads, shape.head_dim), shared, shared)
