"""Published models: each `config.json` cut down to the fields that determine the state. `tiny` is for experiments.

Checked field by field against public copies of the published files: deepseek-v3, falcon-h1-7b, jamba-mini (1.5),
kimi-linear-48b, mimo-v2-flash, minimax-m2, qwen3-next-80b; and nemotron-h-8b in part, its head and state sizes against
Megatron-Bridge's description. Against its repository's inference configuration: deepseek-v3.2 (its draft layer: against
deepseek_v3's default). All others against model cards and transformers' defaults only (the draft layer of qwen3.5-397b-a17b:
from smaller models of the family).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _gqa(model_type: str, num_layers: int, heads: int, kv_heads: int, dim: int, **more: Any) -> Mapping[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        **more,
    }


def _mla(model_type: str, num_layers: int, **more: Any) -> Mapping[str, Any]:
    return {"model_type": model_type, "num_hidden_layers": num_layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **more}


_INDEX = {"index_topk": 2048, "index_head_dim": 128}
_GDN = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}  # fmt: skip
_NO_WINDOW = {"sliding_window": None}
_KDA_LAYERS = [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]
_NEMOTRON_LAYERS = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    # Meta
    "llama-3-8b": _gqa("llama", 32, 32, 8, 128),
    "llama-3-70b": _gqa("llama", 80, 64, 8, 128),
    "llama-3.1-405b": _gqa("llama", 126, 128, 8, 128),
    "llama-3.2-1b": _gqa("llama", 16, 32, 8, 64, tie_word_embeddings=True),
    "llama-3.2-3b": _gqa("llama", 28, 24, 8, 128, tie_word_embeddings=True),
    "llama-4-scout": _gqa("llama4_text", 48, 40, 8, 128, attention_chunk_size=8192),
    "llama-4-maverick": _gqa("llama4_text", 48, 40, 8, 128, attention_chunk_size=8192),
    # Qwen
    "qwen2.5-7b": _gqa("qwen2", 28, 28, 4, 128),
    "qwen2.5-72b": _gqa("qwen2", 80, 64, 8, 128),
    "qwen3-8b": _gqa("qwen3", 36, 32, 8, 128),
    "qwen3-14b": _gqa("qwen3", 40, 40, 8, 128),
    "qwen3-32b": _gqa("qwen3", 64, 64, 8, 128),
    "qwen3-30b-a3b": _gqa("qwen3_moe", 48, 32, 4, 128),
    "qwen3-235b-a22b": _gqa("qwen3_moe", 94, 64, 4, 128),
    "qwen3-next-80b": _gqa("qwen3_next", 48, 16, 2, 256, **_GDN, linear_num_value_heads=32),
    "qwen3.5-397b-a17b": _gqa("qwen3_5_moe_text", 60, 32, 2, 256, **_GDN, linear_num_value_heads=64, mtp_num_hidden_layers=1),
    # OpenAI
    "gpt-oss-20b": _gqa("gpt_oss", 24, 64, 8, 64, sliding_window=128),
    "gpt-oss-120b": _gqa("gpt_oss", 36, 64, 8, 64, sliding_window=128),
    # DeepSeek, Moonshot
    "deepseek-v3": _mla("deepseek_v3", 61, num_nextn_predict_layers=1),
    "deepseek-r1": _mla("deepseek_v3", 61, num_nextn_predict_layers=1),
    "deepseek-v3.2": _mla("deepseek_v32", 61, **_INDEX, num_nextn_predict_layers=1),
    "kimi-k2": _mla("kimi_k2", 61),
    "kimi-linear-48b": _mla(
        "kimi_linear",
        27,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": _KDA_LAYERS,
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    ),
    # Z.ai
    "glm-4.5": _gqa("glm4_moe", 92, 96, 8, 128, num_nextn_predict_layers=1),
    "glm-4.5-air": _gqa("glm4_moe", 46, 96, 8, 128, num_nextn_predict_layers=1),
    "glm-5": _mla("glm_moe_dsa", 78, **_INDEX, num_nextn_predict_layers=1),
    # Mistral AI
    "mistral-7b": _gqa("mistral", 32, 32, 8, 128, **_NO_WINDOW),
    "mistral-small-24b": _gqa("mistral", 40, 32, 8, 128, **_NO_WINDOW),
    "mixtral-8x7b": _gqa("mixtral", 32, 32, 8, 128, **_NO_WINDOW),
    "mixtral-8x22b": _gqa("mixtral", 56, 48, 8, 128, **_NO_WINDOW),
    "ministral-3-8b": _gqa("ministral3", 34, 32, 8, 128, **_NO_WINDOW),
    # Google
    "gemma-2-9b": _gqa("gemma2", 42, 16, 8, 256, sliding_window=4096),
    "gemma-2-27b": _gqa("gemma2", 46, 32, 16, 128, sliding_window=4096),
    "gemma-3-4b": _gqa("gemma3_text", 34, 8, 4, 256, sliding_window=1024),
    "gemma-3-12b": _gqa("gemma3_text", 48, 16, 8, 256, sliding_window=1024),
    "gemma-3-27b": _gqa("gemma3_text", 62, 32, 16, 128, sliding_window=1024),
    # Others
    "phi-4": _gqa("phi3", 40, 40, 10, 128, **_NO_WINDOW),
    "minimax-m2": _gqa("minimax_m2", 62, 48, 8, 128, attn_type_list=[1] * 62),
    "mimo-v2-flash": _gqa(
        "mimo_v2_flash",
        48,
        64,
        4,
        192,
        v_head_dim=128,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        sliding_window=128,
        sliding_window_size=128,
        attention_chunk_size=128,
        hybrid_layer_pattern=[int(layer % 6 != 5 and layer != 0) for layer in range(48)],
    ),
    "seed-oss-36b": _gqa("seed_oss", 64, 80, 8, 128),
    "exaone-4-32b": _gqa("exaone4", 64, 40, 8, 128, sliding_window=4096, sliding_window_pattern=4),
    "granite-3-8b": _gqa("granite", 40, 32, 8, 128),
    "nemotron-h-8b": _gqa(
        "nemotron_h",
        52,
        32,
        8,
        128,
        hybrid_override_pattern=_NEMOTRON_LAYERS,
        mamba_num_heads=128,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
    ),
    "falcon-h1-7b": _gqa(
        "falcon_h1",
        44,
        12,
        2,
        128,
        mamba_d_ssm=3072,
        mamba_n_heads=24,
        mamba_d_head=128,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_conv=4,
    ),
    "jamba-mini": _gqa(
        "jamba",
        32,
        32,
        8,
        128,
        hidden_size=4096,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_expand=2,
        mamba_d_state=16,
        mamba_d_conv=4,
    ),
    "tiny": _gqa("llama", 4, 8, 4, 64),
}
