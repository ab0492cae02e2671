"""Which fields of a `config.json` mean state: known names, and words that give unknown names away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

STATE_FIELDS = {
    "layer_types": "kinds of layers",
    "layers_block_type": "kinds of layers",
    "hybrid_override_pattern": "kinds of layers",
    "attn_type_list": "kinds of layers",
    "attn_layer_indices": "attention in some layers only",
    "attn_layer_period": "attention in some layers only",
    "global_attn_every_n_layers": "attention in some layers only",
    "sliding_window": "sliding-window attention",
    "sliding_window_layers": "sliding-window attention",
    "sliding_window_pattern": "sliding-window attention",
    "attention_window_size": "sliding-window attention",
    "attention_chunk_size": "chunked attention",
    "kv_lora_rank": "latent attention",
    "index_topk": "index keys",
    "index_head_dim": "index keys",
    "index_topk_freq": "index keys in some layers only",
    "index_topk_pattern": "index keys in some layers only",
    "indexer_types": "index keys in some layers only",
    "index_kpool": "pooled index keys",
    "sparse_attention_config": "index keys",
    "compress_ratios": "compressed attention",
    "compress_rates": "compressed attention",
    "linear_attn_config": "linear attention",
    "linear_num_heads": "linear attention",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "a recurrent state",
    "ssm_state_size": "a recurrent state",
    "state_size": "a recurrent state",
    "conv_L_cache": "a convolution state",
    "conv_window": "a convolution state",
    "interleaved_sliding_window": "sliding-window attention",
    "window_size": "sliding-window attention",
    "num_sink_tokens": "sink tokens",
    "layer_group_size": "attention in some layers only",
    "block_types": "kinds of layers",
    "hybrid_layer_pattern": "kinds of layers",
    "sliding_window_size": "sliding-window attention",
    "local_attention": "sliding-window attention",
    "conv1d_width": "a convolution state",
    "conv_kernel": "a convolution state",
    "conv_kernel_size": "a convolution state",
    "short_conv_kernel_size": "a convolution state",
    "mamba_d_conv": "a convolution state",
    "ple_layer_ids": "a convolution state",
    "cca_time0": "a convolution state",
    "linear_key_head_dim": "linear attention",
    "linear_head_dim": "linear attention",
    "num_kv_shared_layers": "layers that share another's KV",
    "kv_source_layers": "layers that share another's KV",
    "indexer_head_dim": "index keys",
    "kv_sharing_modes": "layers that share another's KV",
    "cla_share_factor": "layers that share another's KV",
    "block_configs": "layers of different sizes",
    "block_overrides": "layers of different sizes",
    "per_layer_config": "layers of different sizes",
    "num_key_value_heads_per_layer": "layers of different sizes",
    "num_global_key_value_heads": "layers of different sizes",
    "num_query_groups": "another name for KV heads",
    "multi_query_group_num": "another name for KV heads",
    "global_head_dim": "layers of different sizes",
    "swa_num_key_value_heads": "layers of different sizes",
    "swa_head_dim": "layers of different sizes",
    "swa_v_head_dim": "layers of different sizes",
    "attention_other_setting": "layers of different sizes",
    "use_bidirectional_attention": "bidirectional attention",
    "is_encoder_decoder": "an encoder",
    "encoder_layers": "an encoder",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "cross-attention",
}  # fmt: skip

_HARMLESS = {"cla_share_factor": 1, "index_topk_freq": 1, "use_bidirectional_attention": "vision"}
"""Values that mean no state of their own. Tokens of an image that attend to each other have ordinary KV."""

_SWITCHES = {"cla_share_factor": "use_cla"}
"""Flags without which such a field means nothing."""

_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("kv", "cache"), "a KV cache of another form"),
    **dict.fromkeys(("window", "windows", "swa"), "sliding-window attention"),
    **dict.fromkeys(("sink", "sinks"), "sink tokens"),
    **dict.fromkeys(("yoco", "cla", "reuse", "reused"), "layers that share another's KV"),
    **dict.fromkeys(("latent", "latents"), "latent attention"),
    **dict.fromkeys(("index", "indexer", "nsa", "moba", "landmark"), "index keys"),
    **dict.fromkeys(("compress", "compressed", "compressor"), "compressed attention"),
    **dict.fromkeys(("conv", "conv1d", "canon", "engram"), "a convolution state"),
    **dict.fromkeys(("linear", "deltanet", "kda", "gdn", "gla"), "linear attention"),
    **dict.fromkeys(("mamba", "mamba2", "ssm", "rwkv", "recurrent", "lru", "memory", "ttt"), "a recurrent state"),
}

_PAIRS: tuple[tuple[frozenset[str], frozenset[str], str], ...] = (
    (frozenset({"cross"}), frozenset({"layer", "layers", "attn", "attention"}), "cross-attention, or KV that layers share"),
    (frozenset({"share", "shared", "sharing"}), frozenset({"layer", "layers", "attention"}), "layers that share another's KV"),
)
"""Words that mean state only beside another one."""

_OTHER_WORDS = frozenset({
    "token", "moe", "expert", "experts", "mlp", "rope", "bias", "act", "dropout", "init", "embedding", "embeddings",
    "projector", "image", "vision", "video", "audio", "adapter", "efficient", "factor", "norm", "layernorm",
})  # fmt: skip
"""Words of names about something else, such as `image_token_index` or `moe_latent_size`."""

_NO_STATE = frozenset({
    "use_cache", "cache_implementation", "use_cache_kernel", "use_cache_quantization", "pre_allocate_kv_cache",
    "for_llm_compressor", "latent_query_num", "ignore_index",
})  # fmt: skip
"""They say how the model is run or trained, or belong to parts that make embeddings."""


def unread_state(values: Mapping[str, Any], read: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Fields that are set, mean state and are not in `read`, with their meanings.

    An unknown name means state if it has a word of `_WORDS` that no read field has: a family that reads `mamba_d_state`
    knows what its other Mamba fields are for.
    """
    known = frozenset(read)
    words = frozenset(word for key in known & values.keys() for word in key.split("_"))
    for key, value in values.items():
        if not value or key in known or _is_harmless(values, key, value):
            continue
        meaning = STATE_FIELDS.get(key) or (None if key in _NO_STATE else _meaning(frozenset(key.lower().split("_")), words))
        if meaning is not None:
            yield key, meaning


def _meaning(words: frozenset[str], known: frozenset[str]) -> str | None:
    if words & _OTHER_WORDS:
        return None
    pairs = (meaning for one, other, meaning in _PAIRS if words & one and words & other and not known & one)
    return next((_WORDS[word] for word in sorted(words & _WORDS.keys() - known)), next(pairs, None))


def _is_harmless(values: Mapping[str, Any], key: str, value: Any) -> bool:
    switch = _SWITCHES.get(key)
    return (
        _HARMLESS.get(key) == value
        or (key == "attn_type_list" and isinstance(value, list) and all(kind == 1 for kind in value))
        or (switch is not None and values.get(switch) is False)
    )
