"""Small model configs for tests, as a `config.json` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.models import ModelSpec, from_config

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GPT_OSS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "sliding_window": 16,
}
MPT: Mapping[str, Any] = {"model_type": "mpt", "n_layers": 4, "n_heads": 8, "d_model": 64}
GEMMA4: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
}
MLA: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
}
DSA: Mapping[str, Any] = {**MLA, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
V4: Mapping[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_topk": 512,
    "index_head_dim": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
}
NEMOTRON: Mapping[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*ME*M",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 24,
    "conv_kernel": 4,
}
KIMI: Mapping[str, Any] = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}
QWEN3_5: Mapping[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
}
FALCON: Mapping[str, Any] = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
}
JAMBA: Mapping[str, Any] = {
    "model_type": "jamba",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_expand": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
}
M3: Mapping[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 16,
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_disable_index_value": [0, 1, 1, 1],
    },
}
SMALL = (LLAMA, GPT_OSS, GEMMA4, MLA, DSA, V4, NEMOTRON, KIMI, QWEN3_5, FALCON, JAMBA, M3)
"""All of the above."""


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def spec_of(config: Mapping[str, Any], **options: Any) -> ModelSpec:
    return from_config(config, name="m", **options)
