"""What an SGLang server says of its model, and of what it computes with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from disagg.core.errors import ConfigError, LocalProtocolError
from disagg.integrations.description import RopeRules, rope_kind, ropes
from disagg.integrations.identity import Applied, Conventions, Source, model_id, read_config
from disagg.layout.agreement import ModelId

CONVENTIONS = Conventions(keys="rotated", kv_heads="checkpoint", first_position=0)

ROTARY = "RotaryEmbedding"
SCALED = {"linear", "llama3", "yarn", "dynamic", "longrope"}
UNSCALED_BACKENDS = {"TorchNativeAttnBackend", "TorchFlexAttnBackend"}
"""They write K and V as they are, and read them so."""
UNWINDOWED_BACKENDS = {"TorchFlexAttnBackend", "WaveAttnBackend"}
"""They attend to all tokens, whatever a layer's window is."""
PARTLY_WINDOWED_BACKENDS = {"FlashInferAttnBackend"}
"""They do so in some steps if the model does not name a window to the server."""
UNCAPPED_BACKENDS = {"TorchNativeAttnBackend", "TorchFlexAttnBackend", "TRTLLMHAAttnBackend"}
"""They ignore a layer's `logit_cap`."""
DIVIDING_BACKENDS = {"TritonAttnBackend", "FlashAttentionBackend", "FlashInferAttnBackend", "IntelAMXAttnBackend", "NoneType"}
"""They divide what they write by a layer's scales, and multiply what they read."""
DIVIDING_LATENTS = {"TritonAttnBackend", "NoneType"}
UNSCALED = {"RotaryEmbedding", "MRotaryEmbedding"}
"""The classes of rotary embeddings that scale nothing."""
FUSED = "fused"


def read_source(config: Any, file: str | None, *, name: str | None) -> Source:
    """The model of SGLang's `ModelConfig`. `file` is its `config.json`, if not in the model's folder. Raises `ConfigError`
    without one, unless `name` is set.
    """
    try:
        found = read_config(file or _config_file(config.model_path, config.revision))
    except (OSError, ConfigError) as error:
        if name is None:
            raise ConfigError(f"model {config.model_path!r}: expected a config.json, or DISAGG_MODEL: {error}") from error
        found = config.hf_config.to_dict()
    return Source(config=found, overridden=config.model_override_args, loaded=config.hf_config, text=config.hf_text_config)


def _config_file(path: str, revision: str | None) -> Path:
    place = Path(path)
    if place.exists():
        return (place if place.is_dir() else place.parent) / "config.json"
    from transformers.utils import cached_file

    return Path(cached_file(path, "config.json", revision=revision))


def identify(
    source: Source,
    runner: Any,
    *,
    name: str | None,
    options: Mapping[str, Any],
    from_stages: Callable[[Any], list[Any]],
    scales: Mapping[int, tuple[float, ...]],
) -> ModelId:
    """The identity of the model in `runner`. Every rank calls this; `from_stages` gathers from the pipeline stages. `options`
    are compared if set. `scales` are this stage's, if not in the layouts.
    """
    found: dict[int, int] = {}
    all_scales: dict[int, tuple[float, ...]] = {}
    given = {name: value for name, value in options.items() if value}
    kinds: set[str] = set()
    changes = {"index_keys": "rotated"} if rotates_index_keys(runner.model) else {}
    changes |= scaled_by(runner, kv_scales(runner, attention_layers(runner.model)).values())
    changes |= left_out(runner.model, source.text) | q_scaling(runner.model)
    if getattr(source.text, "rope_is_neox_style", True) is False and not getattr(runner, "use_mla_backend", False):
        # As in Mistral's own format. Other readers of it put K's elements in halves when they load the weights.
        changes["rope_pairs"] = "adjacent"
    backends = attention_backends(getattr(runner, "attn_backend", None))
    ignores_windows = backends & UNWINDOWED_BACKENDS
    partly = backends & PARTLY_WINDOWED_BACKENDS
    if partly and runner.sliding_window_size is None and windows(runner.model):
        changes["windows_of"] = ",".join(sorted(partly))
    if backends & UNCAPPED_BACKENDS and any(layer.logit_cap for layer in attention_layers(runner.model)):
        changes["logit_cap"] = "not applied"
    for stage in from_stages(({} if ignores_windows else windows(runner.model), scales, changes, rope_classes(runner.model))):
        found |= stage[0]
        all_scales |= stage[1]
        given |= stage[2]
        kinds |= stage[3]
    rope, named = read_ropes(source.text, kinds)
    applied = Applied(windows=found, kv_scales=all_scales, rope=rope, options={**given, **named})
    return model_id(source, applied, CONVENTIONS, name=name)


def rope_classes(model: Any) -> set[str]:
    """The names of SGLang's rotary embeddings in the model, also those of a model's own, and `FUSED` if its kernel computes
    one by itself.
    """
    found = {name for each in model.modules() if ROTARY in (name := type(each).__name__)}
    fused = (each for each in model.modules() if getattr(each, "use_fused_qk_norm_rope", False))
    return found | {FUSED for each in fused if hasattr(sys.modules[type(each).__module__], "compute_yarn_parameters")}


def read_ropes(text: Any, classes: set[str]) -> tuple[RopeRules, dict[str, Any]]:
    """How SGLang reads rotary embeddings, and what it makes of them that their parameters do not show. Some of its models
    never read a scaling. `compute_yarn_parameters` reads other fields than the rest.
    """
    changes: dict[str, Any] = {}
    given = ropes(text)
    if SCALED & {rope_kind(each) for each in given.values()} and classes and classes <= UNSCALED:
        changes["rope_scaling"] = "not read"
    fused = FUSED in classes
    for each in given.values() if fused else ():
        original, factor = each.get("original_max_position_embeddings"), each.get("factor") or 1.0
        if rope_kind(each) == "yarn" and original and factor != (found := text.max_position_embeddings / original):
            changes["fused_rope_factor"] = found
    yarn: Literal["attention_factor", "attn_factor"] = "attention_factor" if fused else "attn_factor"
    return RopeRules(long_rope="by_batch", yarn_factor=yarn, dynamic_length="scaled"), changes


def windows(model: Any) -> dict[int, int]:
    """How many tokens before the next one each layer with a window attends to. Several models of SGLang ignore
    `config.json`'s window.
    """
    found: dict[int, set[int]] = {}
    for layer in attention_layers(model):
        found.setdefault(layer.layer_id, set()).add(layer.sliding_window_size)
    return {layer: max(sizes) for layer, sizes in found.items() if min(sizes) >= 0}


def windows_read(runner: Any) -> dict[int, int]:
    """The layers of which decode reads a window only. Some backends ignore windows, and some those that the model does not name
    to the server.
    """
    ignored = attention_backends(getattr(runner, "attn_backend", None)) & UNWINDOWED_BACKENDS
    return {} if ignored or runner.sliding_window_size is None else windows(runner.model)


def left_out(model: Any, text: Any) -> dict[str, str]:
    """The fields that some of SGLang's models do not read, and those that only SGLang's read. Parts for images have no
    attention with a cache, and fields of their own.
    """
    found, cached = {}, set(attention_layers(model))
    attentions = {each for each in model.modules() if not cached.isdisjoint(each.children())}
    blocks = {each for each in model.modules() if each in attentions or not attentions.isdisjoint(each.children())}
    parts = {part for block in blocks for part in block.modules()}
    for name, part in (("attention_bias", "qkv_proj"), ("mlp_bias", "gate_up_proj")):
        layers = (getattr(each, part) for each in parts if hasattr(each, part))
        biases = [getattr(getattr(layer, "base_layer", layer), "bias", None) for layer in layers]  # adapters wrap layers
        if getattr(text, name, False) and biases and all(bias is None for bias in biases):
            found[name] = "not read"
    if any(getattr(each, "use_mup", False) for each in model.modules()):
        found["input_mult"] = "read"
    return found


def q_scaling(model: Any) -> dict[str, str]:
    """How Ministral 3 scales Q by position. VLLM reads that of a file in Mistral's own format only."""
    layer = next((each for each in model.modules() if getattr(each, "llama_4_scaling_beta", None) is not None), None)
    return {} if layer is None else {"q_scaling": f"{layer.llama_4_scaling_beta:g}@{layer.max_position_embeddings}"}


def rotates_index_keys(model: Any) -> bool:
    """Whether sparse attention's index keys are stored after a Hadamard transform, as without SGLang's fused kernels. VLLM
    never transforms them.
    """
    fused = ("use_dsa_indexer_fusion", "use_aiter_fused_fp8_writer")
    indexers = (each for each in model.modules() if hasattr(each, fused[0]))
    return any(not any(getattr(each, name) for name in fused) for each in indexers)


def kv_scales(runner: Any, layers: Iterable[Any]) -> dict[int, tuple[float, float]]:
    """By what SGLang divides each layer's K and V, which it does if the cache's dtype is not the model's. Floats that are
    all divided by 1 have none. Some attention backends read no scales.
    """
    if runner.kv_cache_dtype == runner.dtype:
        return {}
    found = {layer.layer_id: (layer.k_scale_float or 1.0, layer.v_scale_float or 1.0) for layer in layers}
    if attention_backends(getattr(runner, "attn_backend", None)) <= UNSCALED_BACKENDS:
        found = dict.fromkeys(found, (1.0, 1.0))
    has_any = runner.kv_cache_dtype.itemsize == 1 or set(found.values()) - {(1.0, 1.0)}
    return found if has_any else {}


def attention_backends(backend: Any) -> set[str]:
    """The classes of one of SGLang's attention backends, or of its parts."""
    parts = (getattr(backend, name, None) for name in ("prefill_backend", "decode_backend", "full_attn_backend", "primary"))
    found = [attention_backends(each) for each in parts if each is not None and not isinstance(each, str)]
    return set().union(*found) or {type(backend).__name__}


def scaled_by(runner: Any, scales: Iterable[tuple[float, ...]]) -> dict[str, str]:
    """Names the backends if they may not divide by scales other than 1 as vLLM and SGLang's usual ones do."""
    backends = attention_backends(getattr(runner, "attn_backend", None))
    dividing = DIVIDING_LATENTS if getattr(runner, "use_mla_backend", False) else DIVIDING_BACKENDS
    if runner.kv_cache_dtype == torch.float8_e4m3fn:  # it reads other formats with a scale of 1
        dividing = dividing | {"TRTLLMHAAttnBackend"}
    if backends <= dividing or all(set(each) == {1.0} for each in scales):
        return {}
    return {"kv_scaled_by": ",".join(sorted(backends))}


def check_scales(runner: Any, layers: Iterable[Any], expected: Mapping[int, tuple[float, float]]) -> None:
    """Raise `LocalProtocolError` if new weights have brought other scales than the layouts have."""
    found = kv_scales(runner, layers)
    if found != expected:
        layer = min(layer for layer in found.keys() | expected.keys() if found.get(layer) != expected.get(layer))
        raise LocalProtocolError(
            f"scales of K and V: expected {expected.get(layer)} in layer {layer}, as at the server's start, "
            f"found {found.get(layer)}, which came with new weights: restart the server"
        )


def attention_layers(model: Any) -> Iterator[Any]:
    """The layers of a loaded model that have a KV cache."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    for layer in model.modules():
        if isinstance(layer, RadixAttention) and layer.attn_type is not AttentionType.ENCODER_ONLY:
            yield layer
