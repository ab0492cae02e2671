"""What a vLLM engine says of its model, and of what it computes with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.utils import cached_file
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from disagg.core.errors import ConfigError
from disagg.core.formats import QUANTIZED
from disagg.core.topology import Topology
from disagg.integrations.description import RopeRules, described, digest, rotary, words
from disagg.integrations.identity import Applied, Conventions, Source, model_id, read_config
from disagg.integrations.vllm.formats import has_scales
from disagg.integrations.vllm.groups import Group, Kind
from disagg.layout.agreement import ModelId

logger = logging.getLogger(__name__)

CONVENTIONS = Conventions(keys="rotated", kv_heads="checkpoint", first_position=0)

PLAIN = ("auto", "float32", "float16", "bfloat16")

BY_HEAD = (Kind.FULL, Kind.WINDOW, Kind.CHUNK)
"""Layers with a K and a V for each head."""

Gather = Callable[[Any], list[Any]]
"""Returns what every rank of a group gives, in order."""


def read_source(config: VllmConfig, *, name: str | None) -> Source:
    """Raises `ConfigError` for overrides by a function, and without a `config.json`, unless the setting `name` is given."""
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
    config: VllmConfig, groups: Sequence[Group], source: Source, *, name: str | None, from_stages: Gather, from_tp: Gather
) -> ModelId:
    """The model's identity, without draft layers. Every worker calls this. `from_stages` gathers from the pipeline stages,
    `from_tp` from a stage's tensor-parallel ranks.
    """
    model = config.model_config
    num_layers, num_kv_heads = model.get_total_num_hidden_layers(), int(model.get_total_num_kv_heads())
    windows: dict[int, int] = {}
    scales: dict[int, tuple[float, ...]] = {}
    own = _windows(config, groups, num_layers), _kv_scales(config, groups, num_layers, num_kv_heads, from_tp)
    for stage in from_stages(own):
        windows |= stage[0]
        scales |= stage[1]
    applied = Applied(windows=windows, kv_scales=scales, rope=_rope(model), options=_options(config))
    return model_id(source, applied, CONVENTIONS, name=name)


def identify_draft(config: VllmConfig, groups: Sequence[Group], topology: Topology, *, from_tp: Gather) -> str:
    """A digest of what draft layers' KV is made with. Every worker of their stage calls this."""
    speculation = config.speculative_config
    model = speculation.draft_model_config
    options = {name: getattr(speculation, name) for name in ("method", "parallel_drafting", "use_heterogeneous_vocab")}
    layers = {
        f"layer.{layer}.{kind.value}": _layer(config, kind, group.specs[name], name, topology)
        for group in groups
        for kind, found in group.by_kind(None).items()
        for layer, name in found.items()
    }
    applied = Applied(
        windows=_windows(config, groups, None),
        kv_scales=_kv_scales(config, groups, None, int(model.get_total_num_kv_heads()), from_tp),
        rope=_rope(model),
        options={name: value for name, value in options.items() if value},
    )
    loaded, text = model.hf_config, model.hf_text_config
    found = (
        *applied.words(),
        *words(layers),
        *rotary(text, applied.rope),
        *described(_draft_config(model), overridden={}, loaded=loaded, text=text),
    )
    chosen = digest(" ".join(found)).removeprefix("#")
    if topology.tp_rank == 0:
        logger.info("draft layers are handed over between servers with the same draft: %s: %s", chosen, " ".join(found))
    return chosen


def _draft_config(model: ModelConfig) -> dict[str, Any]:
    try:
        return read_config(cached_file(model.model, "config.json", revision=model.revision))
    except (OSError, ConfigError):
        return model.hf_config.to_dict()  # type: ignore[no-any-return]


def _layer(config: VllmConfig, kind: Kind, spec: Any, name: str, topology: Topology) -> str:
    """What servers must agree on of a draft layer's cache. A difference is no reason to refuse the pair."""
    heads = draft_heads(config, spec, topology) if kind in BY_HEAD else spec.num_kv_heads * topology.tp
    format_ = [spec.dtype, spec.kv_quant_mode.name, spec.tokens_per_state]
    if kind in (*BY_HEAD, Kind.LATENT) and spec.dtype.itemsize == 1 and has_scales(spec):
        format_.append(fp8_format(config, name) or attention_layer(config, name).kv_cache_dtype)
    sizes = f"{spec.head_size}+{spec.head_size_v}"
    return ":".join(map(str, (1 if isinstance(spec, MLAAttentionSpec) else heads, sizes, *format_)))


def draft_heads(config: VllmConfig, spec: Any, topology: Topology) -> int:
    """The KV heads of a draft layer over all ranks. If its configuration gives several numbers, each rank's heads count as
    its own. Raises `ConfigError` if the ranks do not divide them.
    """
    speculation = config.speculative_config
    model = speculation.draft_model_config
    total = int(model.get_total_num_kv_heads())
    if spec.num_kv_heads == max(1, total // topology.tp) and head_counts(model.hf_text_config.to_dict()) <= {total}:
        return total
    if (found := speculation.draft_parallel_config.tensor_parallel_size) != topology.tp:
        raise ConfigError(f"draft_tensor_parallel_size: expected {topology.tp}, that of the server, found {found}")
    return int(spec.num_kv_heads) * topology.tp


def head_counts(config: object, num_attention_heads: int = 0) -> set[int]:
    """All numbers of KV heads in a configuration. Nemotron-NAS gives query heads per KV head, by block."""
    if isinstance(config, list):
        return set().union(*(head_counts(each, num_attention_heads) for each in config))
    if not isinstance(config, dict):
        return set()
    num_attention_heads = config.get("num_attention_heads") or num_attention_heads
    found = set()
    for name, value in config.items():
        if any(part in str(name) for part in ("key_value_head", "kv_head", "attention_group")):
            found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
        elif name == "n_heads_in_group" and value:
            found.add(num_attention_heads // value)
        else:
            found |= head_counts(value, num_attention_heads)
    return found


def fp8_format(config: VllmConfig, layer: str) -> torch.dtype | None:
    """The format of an FP8 cache, which vLLM's tensors do not show."""
    dtype = str(attention_layer(config, layer).kv_cache_dtype)
    if dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return None
    return torch.float8_e5m2 if dtype == "fp8_e5m2" else current_platform.fp8_dtype()


def tensor_scales(config: VllmConfig, layer: str) -> tuple[float, float] | None:
    """The scales of K and V that peers may hold in another format: one each for FP8, or 1 if not quantized. `fnuz` formats
    are not converted.
    """
    attention = attention_layer(config, layer)
    if str(attention.kv_cache_dtype) in PLAIN:
        return 1.0, 1.0
    is_known = str(fp8_format(config, layer)).removeprefix("torch.") in QUANTIZED
    if not is_known or _has_scales_by_head(attention):
        return None
    return attention._k_scale.item(), attention._v_scale.item()


class Scales:
    """The scales of K and V that a server's layers had when this was made."""

    def __init__(self, config: VllmConfig) -> None:
        self._layers = config.compilation_config.static_forward_context
        self._found = {name: _Found.of(self._layers[name]) for name in self._names()}

    def have_changed(self) -> bool:
        """New weights may bring others. Waits for a GPU only after layers with scales by head have got new ones."""
        if self._names() != self._found.keys():
            return True
        for name, known in self._found.items():
            attention = self._layers[name]
            if known.is_of(attention):
                continue
            if not known.equals(found := _Found.of(attention)):
                return True
            self._found[name] = found
        return False

    def _names(self) -> set[str]:
        return {
            name
            for name, each in self._layers.items()
            if hasattr(each, "_k_scale_float") and str(each.kv_cache_dtype) not in PLAIN  # which has none, whatever they are
        }


class _Found(NamedTuple):
    """A layer's scales: vLLM's numbers, and a copy of those by head, of which the numbers are the largest."""

    numbers: tuple[float, float]
    by_head: torch.Tensor | None

    @classmethod
    def of(cls, attention: Any) -> _Found:
        by_head = torch.stack((attention._k_scale, attention._v_scale)) if _has_scales_by_head(attention) else None
        return cls((attention._k_scale_float, attention._v_scale_float), by_head)

    def is_of(self, attention: Any) -> bool:
        """Whether nothing was loaded since: that sets new numbers, but copies into the same tensors."""
        return self.numbers[0] is attention._k_scale_float and self.numbers[1] is attention._v_scale_float

    def equals(self, other: _Found) -> bool:
        if self.numbers != other.numbers or (self.by_head is None) != (other.by_head is None):
            return False
        return self.by_head is None or other.by_head is None or torch.equal(self.by_head, other.by_head)


def _has_scales_by_head(attention: Any) -> bool:
    """The checkpoint decides, since a rank may have a single head."""
    method = getattr(attention, "quant_method", None)
    scheme = getattr(method and method.quant_config, "kv_cache_scheme", None) or {}
    return bool(scheme.get("strategy") == "attn_head")


def attention_layer(config: VllmConfig, layer: str) -> Any:
    return config.compilation_config.static_forward_context[layer]


def _windows(config: VllmConfig, groups: Sequence[Group], num_layers: int | None) -> dict[int, int]:
    """How many tokens before the next one each layer with a window attends to."""
    found = {}
    for group in groups:
        by_kind = group.by_kind(num_layers)
        for layer, name in by_kind.get(Kind.WINDOW, {}).items():
            found[layer] = group.specs[name].sliding_window - 1
        if group.has_windows:  # blocks are kept, but not read
            windows = {layer: attention_layer(config, name).sliding_window for layer, name in by_kind[Kind.FULL].items()}
            found |= {layer: window - 1 for layer, window in windows.items() if window is not None}
    return found


def _kv_scales(
    config: VllmConfig, groups: Sequence[Group], num_layers: int | None, num_kv_heads: int, from_tp: Gather
) -> dict[int, tuple[float, ...]]:
    """The scales of K and V of quantized layers: one each, or one per KV head of the model. The target's `tensor_scales` are
    in the layouts instead.
    """
    own: dict[int, tuple[list[float], ...]] = {}
    heads: dict[int, int] = {}  # this rank's, of layers with scales by head
    for group in groups:
        for kind, layers in group.by_kind(num_layers).items():
            if kind not in (*BY_HEAD, Kind.LATENT):
                continue
            for layer, name in layers.items():
                if not has_scales(group.specs[name]):
                    continue
                is_in_layout = num_layers is not None and kind is not Kind.LATENT and tensor_scales(config, name) is not None
                is_quantized = str(attention_layer(config, name).kv_cache_dtype) not in PLAIN
                if is_quantized and not is_in_layout:
                    attention = attention_layer(config, name)
                    own[layer] = tuple(each.reshape(-1).tolist() for each in (attention._k_scale, attention._v_scale))
                    if _has_scales_by_head(attention):
                        heads[layer] = group.specs[name].num_kv_heads
    ranks = from_tp(own)
    found = {}
    for layer, (k, v) in own.items():
        if layer not in heads:
            found[layer] = (*k, *v)
        else:  # neighbours may have the same heads
            chosen = ranks[:: max(1, heads[layer] * len(ranks) // num_kv_heads)]
            found[layer] = tuple(scale for part in (0, 1) for rank in chosen for scale in rank[layer][part])
    return found


def _rope(model: ModelConfig) -> RopeRules:
    """`longrope` is as in vLLM's `Phi3LongRoPEScaledRotaryEmbedding`, or as in transformers."""
    text = model.hf_text_config
    parameters: Mapping[str, Any] = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if model.using_transformers_backend():
        return RopeRules(long_rope="by_batch")
    return RopeRules(long_rope="long" if original is not None and model.max_model_len > original else "short")


def _tunes_temperature(model: ModelConfig) -> bool:
    """Whether Llama 4 scales Q by position, as vLLM's `Llama4ForCausalLM` decides. It keeps that in a config of its own."""
    if model.hf_text_config.model_type != "llama4_text":
        return False
    given = {**model.try_get_generation_config(), **model.override_generation_config}
    return bool(given.get("attn_temperature_tuning", model.max_model_len > 32768))


def _q_scaling(model: ModelConfig) -> str:
    """How Ministral 3 scales Q by position: as vLLM's parser of Mistral's own format, or transformers, read it."""
    found = getattr(model.hf_text_config, "llama_4_scaling", None)
    if model.using_transformers_backend():
        found = getattr(model.hf_text_config, "rope_parameters", None)
    beta = (found or {}).get("beta", (found or {}).get("llama_4_scaling_beta"))
    return "" if beta is None else f"{beta:g}@{(found or {}).get('original_max_position_embeddings')}"


def _options(config: VllmConfig) -> dict[str, Any]:
    """Options that change states, if set. Not every vLLM has all of them."""
    places = {
        "additional_config": config,
        "model_class_overrides": config.model_config,
        "target_modules": config.lora_config,
        "enable_tower_connector_lora": config.lora_config,
        "attention_chunk_size": config.model_config,  # SGLang does not give it: such a pair was not run
    }
    found = {name: getattr(place, name, None) for name, place in places.items()}
    model = config.model_config
    found["attn_temperature_tuning"] = _tunes_temperature(model)
    found["q_scaling"] = _q_scaling(model)
    if "K2HorizonForCausalLM" in (model.architectures or ()) and model.quantization:
        found["k_channels"] = model.quantization  # it orders those of projections that are not quantized otherwise
    if model.using_transformers_backend() and (model.use_mla or str(model.model_impl) == "transformers"):
        found["model_impl"] = "transformers"  # orders the rotated part of a latent otherwise; its weights may be permuted
    return {name: value for name, value in found.items() if value}
