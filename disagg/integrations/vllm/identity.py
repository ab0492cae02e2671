"""What a vLLM engine says of its model, and of what it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from transformers.utils import cached_file
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from disagg.core.errors import ConfigError
from disagg.integrations.identity import Applied, Conventions, Source, model_id, read_config
from disagg.integrations.vllm.formats import has_scales
from disagg.integrations.vllm.groups import Kind, read_groups
from disagg.layout.agreement import ModelId

CONVENTIONS = Conventions(keys="rotated", kv_heads="checkpoint", first_position=0)
"""vLLM's."""

PLAIN = ("auto", "float32", "float16", "bfloat16")
"""VLLM's names of KV caches that are not quantized."""

Gather = Callable[[Any], list[Any]]
"""Returns what every rank of a group gives, in order."""


def read_source(config: VllmConfig, *, name: str | None) -> Source:
    """The engine's model. Without the setting `name` it must have a `config.json`, in its folder or in the local cache.

    Raises `ConfigError` if it has none, and for overrides that only a function knows.
    """
    model = config.model_config
    overridden = model.hf_overrides
    if callable(overridden):
        if name is None:
            raise ConfigError("hf_overrides: expected a dict, or the setting 'model', found a function: it cannot be compared")
        overridden = {}
    folder = model.hf_config_path or model.model
    try:
        found = read_config(cached_file(folder, "config.json", revision=model.revision))
    except (OSError, ConfigError) as error:
        if name is None:
            raise ConfigError(f"model {folder!r}: expected a config.json, or the setting 'model': {error}") from error
        found = model.hf_config.to_dict()
    return Source(config=found, overridden=overridden, loaded=model.hf_config, text=model.hf_text_config)


def identify(
    config: VllmConfig, kv: KVCacheConfig, source: Source, *, name: str | None, from_stages: Gather, from_tp: Gather
) -> ModelId:
    """The identity of an engine's model. Every worker calls this. `from_stages` gathers from the pipeline stages, and
    `from_tp` from the tensor-parallel ranks of one.
    """
    windows: dict[int, int] = {}
    scales: dict[int, tuple[float, ...]] = {}
    for stage in from_stages((_windows(config, kv), _kv_scales(config, kv, from_tp))):
        windows |= stage[0]
        scales |= stage[1]
    applied = Applied(windows=windows, kv_scales=scales, long_rope=_long_rope(config), options=_options(config))
    return model_id(source, applied, CONVENTIONS, name=name)


def fp8_format(config: VllmConfig, layer: str) -> torch.dtype | None:
    """What the bytes of a layer's KV cache are, if they are FP8: vLLM's tensors are plain bytes."""
    dtype = str(attention_layer(config, layer).kv_cache_dtype)
    if dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return None
    return torch.float8_e5m2 if dtype == "fp8_e5m2" else current_platform.fp8_dtype()


def attention_layer(config: VllmConfig, layer: str) -> Any:
    """VLLM's own object of a layer with attention."""
    return config.compilation_config.static_forward_context[layer]


def _windows(config: VllmConfig, kv: KVCacheConfig) -> dict[int, int]:
    """The layers of this stage that attend to a window: how many tokens before the next one."""
    num_layers = config.model_config.get_total_num_hidden_layers()
    found = {}
    for group in read_groups(kv):
        by_kind = group.by_kind(num_layers)
        for layer, name in by_kind.get(Kind.WINDOW, {}).items():
            found[layer] = group.specs[name].sliding_window - 1
        if group.has_windows:  # blocks are kept, but not read
            windows = {layer: attention_layer(config, name).sliding_window for layer, name in by_kind[Kind.FULL].items()}
            found |= {layer: window - 1 for layer, window in windows.items() if window is not None}
    return found


def _kv_scales(config: VllmConfig, kv: KVCacheConfig, from_tp: Gather) -> dict[int, tuple[float, ...]]:
    """The scales of K and V of this stage's quantized layers: one each, or one for each of the model's KV heads."""
    num_layers = config.model_config.get_total_num_hidden_layers()
    own: dict[int, tuple[list[float], ...]] = {}
    heads: dict[int, int] = {}
    for group in read_groups(kv):
        for kind, layers in group.by_kind(num_layers).items():
            if kind not in (Kind.FULL, Kind.WINDOW, Kind.LATENT):
                continue
            for layer, name in layers.items():
                if has_scales(group.specs[name]) and str(attention_layer(config, name).kv_cache_dtype) not in PLAIN:
                    attention = attention_layer(config, name)
                    own[layer] = tuple(each.reshape(-1).tolist() for each in (attention._k_scale, attention._v_scale))
                    heads[layer] = group.specs[name].num_kv_heads
    ranks = from_tp(own)
    total = int(config.model_config.get_total_num_kv_heads())
    found = {}
    for layer, (k, v) in own.items():
        if len(k) == 1:
            found[layer] = (*k, *v)
        else:  # ranks next to each other may have the same heads
            chosen = ranks[:: max(1, heads[layer] * len(ranks) // total)]
            found[layer] = tuple(scale for part in (0, 1) for rank in chosen for scale in rank[layer][part])
    return found


def _long_rope(config: VllmConfig) -> Literal["short", "long"]:
    """Which factors vLLM takes for the whole life of a server, as in its `Phi3LongRoPEScaledRotaryEmbedding`."""
    text = config.model_config.hf_text_config
    parameters: Mapping[str, Any] = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    original = parameters.get("original_max_position_embeddings")
    return "long" if original is not None and config.model_config.max_model_len > original else "short"


def _options(config: VllmConfig) -> dict[str, Any]:
    """Options that change states and are set. Not every version of vLLM has all of them."""
    places = {
        "additional_config": config,
        "model_class_overrides": config.model_config,
        "target_modules": config.lora_config,
        "enable_tower_connector_lora": config.lora_config,
    }
    found = {name: getattr(place, name, None) for name, place in places.items()}
    return {name: value for name, value in found.items() if value}
