"""The architectures of this example: one small entry each, in plain Python.

`config` builds a model of the family with all sizes reduced (`transformers.AutoConfig.for_model`). `components` declares the
state that the model leaves behind after a prompt. Rank processes need only this file and `components`, not the model.

`model.prefill` compares the declaration with the model's cache, so a wrong entry raises instead of moving wrong bytes.

The sizes make re-sharding interesting: fewer KV heads than ranks, head counts that ranks do not divide, odd layer counts,
stages without attention, and unequal widths where equal ones would hide a transposed axis.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .components import ComponentSpec, compressed, delta_net, gqa, index, last, lightning, mamba1, mamba2, mla, per_token


@dataclass(frozen=True)
class Architecture:
    """`config` are arguments of `AutoConfig.for_model`; `num_layers` includes layers without state."""

    config: Mapping[str, Any]
    num_layers: int
    components: tuple[ComponentSpec, ...]


# Without an end-of-sequence token every run has the given length. The wide initialisation makes tokens vary.
_COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN_HYBRID: Mapping[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_MLA: Mapping[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DEEPSEEK: Mapping[str, Any] = {
    **_MLA,
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _kinds(pattern: str, names: Mapping[str, str]) -> list[str]:
    return [names[letter] for letter in pattern]


def _layers(pattern: str, letter: str) -> tuple[int, ...]:
    return tuple(i for i, found in enumerate(pattern) if found == letter)


_LINEAR_FULL = {"L": "linear_attention", "F": "full_attention"}


def _llama() -> Architecture:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return Architecture(
        {**_COMMON, **config, "model_type": "llama", "intermediate_size": 96}, 4, (gqa(range(4), heads=4, dim=16),)
    )


def _qwen3() -> Architecture:
    config = {"num_hidden_layers": 5, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}
    return Architecture(
        {**_COMMON, **config, "model_type": "qwen3", "intermediate_size": 96}, 5, (gqa(range(5), heads=6, dim=16),)
    )


def _qwen3_next(model_type: str, pattern: str) -> Architecture:
    config = {"model_type": model_type, "num_hidden_layers": len(pattern), "layer_types": _kinds(pattern, _LINEAR_FULL)}
    components = (gqa(_layers(pattern, "F"), heads=2, dim=16), delta_net(_layers(pattern, "L"), heads=(4, 8), dims=(16, 8)))
    return Architecture({**_QWEN_HYBRID, **config}, len(pattern), components)


def _gpt_oss(pattern: str) -> Architecture:
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, {"S": "sliding_attention", "F": "full_attention"}),
        "sliding_window": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    components = (gqa(_layers(pattern, "F"), heads=8, dim=8), gqa(_layers(pattern, "S"), heads=8, dim=8, window=16))
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _deepseek_v3() -> Architecture:
    return Architecture({**_DEEPSEEK, "model_type": "deepseek_v3", "num_mtp_layers": 0}, 3, (mla(range(3), rank=32, rope=8),))


def _deepseek_v32() -> Architecture:
    config = {"model_type": "deepseek_v32", "index_topk": 16, "index_head_dim": 16, "index_n_heads": 4}
    return Architecture({**_DEEPSEEK, **config}, 3, (mla(range(3), rank=32, rope=8), index(range(3), dim=16)))


def _kimi_linear(pattern: str) -> Architecture:
    config = {
        "model_type": "kimi_linear",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, _LINEAR_FULL),
        "num_experts": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "pad_token_id": 0,
    }
    components = (mla(_layers(pattern, "F"), rank=32, rope=8), delta_net(_layers(pattern, "L"), heads=(4, 4), dims=(16, 16)))
    return Architecture({**_MLA, **config}, len(pattern), components)


def _falcon_h1() -> Architecture:
    config = {
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
    }
    return Architecture(
        {**_COMMON, **config}, 3, (gqa(range(3), heads=2, dim=8), mamba2(range(3), heads=6, dim=16, groups=1, state=24))
    )


def _nemotron_h(pattern: str) -> Architecture:
    config = {
        "model_type": "nemotron_h",
        "layers_block_type": _kinds(pattern, {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}),
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    }
    components = (
        gqa(_layers(pattern, "*"), heads=2, dim=16),
        mamba2(_layers(pattern, "M"), heads=8, dim=16, groups=4, state=24),
    )
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _granite_hybrid(pattern: str) -> Architecture:
    config = {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, _LINEAR_FULL),
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
    }
    components = (
        gqa(_layers(pattern, "F"), heads=4, dim=8),
        mamba2(_layers(pattern, "L"), heads=8, dim=16, groups=1, state=24),
    )
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _bamba(pattern: str) -> Architecture:
    config = {
        "model_type": "bamba",
        "num_hidden_layers": len(pattern),
        "attn_layer_indices": list(_layers(pattern, "F")),
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
    }
    components = (
        gqa(_layers(pattern, "F"), heads=4, dim=8),
        mamba2(_layers(pattern, "L"), heads=8, dim=16, groups=2, state=24),
    )
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _jamba() -> Architecture:
    config = {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "mamba_d_state": 12,
    }
    return Architecture({**_COMMON, **config}, 4, (gqa([1], heads=2, dim=8), mamba1([0, 2, 3], channels=128, state=12)))


def _minimax(pattern: str) -> Architecture:
    config = {
        "model_type": "minimax",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, _LINEAR_FULL),
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "block_size": 16,
    }
    components = (gqa(_layers(pattern, "F"), heads=4, dim=16), lightning(_layers(pattern, "L"), heads=8, dim=16))
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _deepseek_v4(pattern: str) -> Architecture:
    kinds = {"S": "sliding_attention", "C": "compressed_sparse_attention", "H": "heavily_compressed_attention"}
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, kinds),
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe"] * len(pattern),
        "num_attention_heads": 4,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 4,
        "hc_mult": 2,
        "sliding_window": 16,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 3,
    }
    components = (
        per_token("window", range(len(pattern)), {"latent": 16}, tokens=last(16)),
        *compressed("csa", _layers(pattern, "C"), ratio=4, dims={"indexer": 8, "compressor": 16}, overlapping=True),
        *compressed("hca", _layers(pattern, "H"), ratio=8, dims={"compressor": 16}, overlapping=False),
    )
    return Architecture({**_COMMON, **_EXPERTS, **config}, len(pattern), components)


def _minimax_m3(pattern: str) -> Architecture:
    config = {
        "model_type": "minimax_m3_vl_text",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, {"I": "minimax_m3_sparse", "F": "full_attention"}),
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    }
    components = (gqa(range(len(pattern)), heads=4, dim=16), index(_layers(pattern, "I"), dim=16))
    return Architecture({**_COMMON, **config}, len(pattern), components)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _llama(),
    "qwen3": _qwen3(),
    "qwen3-next": _qwen3_next("qwen3_next", "LLFLLF"),
    "qwen3.5-moe": _qwen3_next("qwen3_5_moe_text", "LLLFLLLF"),
    "gpt-oss": _gpt_oss("SFSF"),
    "deepseek-v3": _deepseek_v3(),
    "deepseek-v3.2": _deepseek_v32(),
    "deepseek-v4": _deepseek_v4("HCHC"),
    "kimi-linear": _kimi_linear("LLFLF"),
    "falcon-h1": _falcon_h1(),
    "nemotron-h": _nemotron_h("M-*ME*M"),
    "granite-hybrid": _granite_hybrid("LLFLF"),
    "bamba": _bamba("LFLLF"),
    "jamba": _jamba(),
    "minimax": _minimax("FLLFL"),
    "minimax-m3": _minimax_m3("FIII"),
}


def describe(name: str) -> tuple[ComponentSpec, ...]:
    """The state of architecture `name`, in global terms."""
    return ARCHITECTURES[name].components
