"""Which fields of a `config.json` mean state: known names, and words that give unknown names away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_FIELDS = {
    "kinds of layers": "layer_types layers_block_type hybrid_override_pattern attn_type_list block_types hybrid_layer_pattern",
    "attention in some layers only": "attn_layer_indices attn_layer_period global_attn_every_n_layers layer_group_size",
    "sliding-window attention": (
        "sliding_window sliding_window_layers sliding_window_pattern attention_window_size interleaved_sliding_window "
        "window_size sliding_window_size local_attention"
    ),
    "chunked attention": "attention_chunk_size",
    "latent attention": "kv_lora_rank",
    "index keys": "index_topk index_head_dim sparse_attention_config indexer_head_dim",
    "index keys in some layers only": "index_topk_freq index_topk_pattern indexer_types",
    "pooled index keys": "index_kpool",
    "compressed attention": "compress_ratios compress_rates",
    "linear attention": "linear_attn_config linear_num_heads linear_num_value_heads linear_key_head_dim linear_head_dim",
    "a recurrent state": "mamba_d_state ssm_state_size state_size",
    "a convolution state": (
        "conv_L_cache conv_window conv1d_width conv_kernel conv_kernel_size short_conv_kernel_size mamba_d_conv "
        "ple_layer_ids cca_time0"
    ),
    "sink tokens": "num_sink_tokens",
    "layers that share another's KV": "num_kv_shared_layers kv_source_layers kv_sharing_modes cla_share_factor",
    "layers of different sizes": (
        "block_configs block_overrides per_layer_config num_key_value_heads_per_layer num_global_key_value_heads "
        "global_head_dim swa_num_key_value_heads swa_head_dim swa_v_head_dim attention_other_setting"
    ),
    "another name for KV heads": "num_query_groups multi_query_group_num",
    "bidirectional attention": "use_bidirectional_attention",
    "an encoder": "is_encoder_decoder encoder_layers",
    "cross-attention": "add_cross_attention cross_attention_layers",
}
STATE_FIELDS: Mapping[str, str] = {field: meaning for meaning, fields in _FIELDS.items() for field in fields.split()}

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
