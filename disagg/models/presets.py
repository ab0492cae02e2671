"""Models by name: presets, and `config.json` files.

A preset is a published `config.json` cut down to the fields that determine the state. `tiny` is for experiments.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from disagg.core.errors import ConfigError
from disagg.models.describe import from_config
from disagg.models.spec import ModelSpec, first_layers

_QWEN_NEXT: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}

# Only the fields that determine the state.
# Checked field by field against public copies of the published files: kimi-linear-48b, falcon-h1-7b, jamba-mini (1.5); and
# nemotron-h-8b in part, its head and state sizes against Megatron-Bridge's description.
# Checked against model cards and transformers' defaults only: llama-3-8b, llama-3-70b, qwen3-32b, qwen3-next-80b,
# qwen3.5-397b-a17b (its one draft layer: from smaller models of the family), gpt-oss-120b.
# Checked against its repository's inference configuration: deepseek-v3.2 (its draft layer: against deepseek_v3's default).
_PRESET_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-next-80b": {
        **_QWEN_NEXT,
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "qwen3.5-397b-a17b": {
        **_QWEN_NEXT,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "mtp_num_hidden_layers": 1,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
    "jamba-mini": {
        "model_type": "jamba",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "tiny": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


class _Presets(Mapping[str, ModelSpec]):
    """The presets as models. Each is made when it is first looked up."""

    def __getitem__(self, name: str) -> ModelSpec:
        return _preset(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PRESET_CONFIGS)

    def __len__(self) -> int:
        return len(_PRESET_CONFIGS)


@functools.cache
def _preset(name: str) -> ModelSpec:
    return from_config(_PRESET_CONFIGS[name], name=name)


PRESETS: Mapping[str, ModelSpec] = _Presets()
"""Preset models by name, with the sizes of their published `config.json`."""


def load_model(
    name: str,
    *,
    num_layers: int | None = None,
    kv_dtype: str | None = None,
    kv_scale_block: int | None = None,
    ssm_dtype: str | None = None,
    draft_layers: bool = False,
) -> ModelSpec:
    """The preset `name`, or the model of the `config.json` (or folder with one) at that path.

    `num_layers` keeps only the first layers. The other arguments are those of `from_config`. Raises `ConfigError`, listing the
    presets, for an unknown name, and as `from_config` does.
    """
    known = _PRESET_CONFIGS.get(name)
    config, short = (known, name) if known is not None else _read(name)
    spec = from_config(
        config,
        name=short,
        kv_dtype=kv_dtype,
        kv_scale_block=kv_scale_block,
        ssm_dtype=ssm_dtype,
        draft_layers=draft_layers,
    )
    return spec if num_layers is None else first_layers(spec, num_layers)


def _read(name: str) -> tuple[Any, str]:
    """The JSON of a file or of a folder's `config.json`, and a name for the model."""
    try:
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: expected a JSON file, found {name!r}: {error}") from error
    if not path.is_file():
        presets = ", ".join(_PRESET_CONFIGS)
        raise ConfigError(f"model: expected one of {presets}, or the path of a config.json, found {name!r}")
    return config, path.parent.name or path.stem
