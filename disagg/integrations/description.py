"""A model's description: the fields of its `config.json` that shape a request's state, in a normal form.

Fields that do not matter are listed in `shaping`; every other field counts. Rotary embeddings, some defaults and overrides
come from the configuration that the server has loaded, since servers apply overrides differently. Peers that differ name the
words `name=value` that only one has.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disagg.core.errors import ConfigError
from disagg.integrations.shaping import DEFAULTED, IGNORED, LAYOUT, PATTERN, ROTARY
from disagg.models import from_config

MAX_VALUE = 64
MAX_WORDS = 2800
"""In a longer description nested objects are given by digests; if that is not enough, everything is."""

_KINDS = frozenset({"full_attention", "sliding_attention", "linear_attention"})
"""Layers that all leave a state."""
_ALIKE = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
"""Names of the same rotary embedding in files and servers."""
_NEUTRAL = {"moe_layer_freq": 1}
"""Values that say the same as no value."""
_OF_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_HAS_LENGTH = ("llama3", "yarn")
"""Made from `original_max_position_embeddings` if given, not from `max_position_embeddings`."""


def described(config: Mapping[str, Any], *, overridden: Mapping[str, Any], loaded: Any, text: Any) -> tuple[str, ...]:
    """`config` is the `config.json`; `overridden` are fields that the command line sets; `loaded` is the server's
    configuration, `text` that of its text model.
    """
    merged = {**config, **_overrides(config, overridden, loaded)}
    layers = _layers(merged, text)
    compared = ROTARY | LAYOUT | (PATTERN if layers is not None else frozenset())
    fields = dict(_fields(merged, loaded, texts=(loaded, text), compared=compared)) | {"layers": layers or {}}
    fields |= _changes_of_kv(merged, text)
    for found in (words(fields), words(fields, nested=False)):
        if sum(map(len, found)) <= MAX_WORDS:
            return found
    return (f"config={digest(' '.join(words(fields)))}",)


def _changes_of_kv(config: Mapping[str, Any], text: Any) -> dict[str, str]:
    """What of a checkpoint's quantization changes K, V or latents, which later weights undo. AWQ scales V only where it has as
    many heads as its output.
    """
    found = {}
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    for given in (part.get(name) for part in parts for name in ("quantization_config", "compression_config")):
        if not isinstance(given, Mapping):
            continue
        if transforms := given.get("transform_config"):
            found["transform_config"] = digest(json.dumps(transforms, sort_keys=True))
        inner = given.get("quantization")
        methods = [
            str((inner if isinstance(inner, Mapping) else given).get(name, "")) for name in ("quant_method", "quant_algo")
        ]
        num_heads = getattr(text, "num_attention_heads", None)
        is_plain = getattr(text, "num_key_value_heads", num_heads) == num_heads
        if any("awq" in method.lower() for method in methods) and (is_plain or getattr(text, "kv_lora_rank", None)):
            found["quantization"] = "awq"
    return found


def described_overrides(overridden: Mapping[str, Any], loaded: Any) -> tuple[str, ...]:
    fields = _overrides({}, overridden, loaded)
    return words({key: value for key, value in fields.items() if not is_ignored(key) and key not in ROTARY | LAYOUT})


@dataclass(frozen=True, kw_only=True)
class RopeRules:
    """What servers read differently. `long_rope`: the factors of a `longrope`. `yarn_factor`: the field from which the server
    takes how K is scaled. `dynamic_length`: the length by which the base of a `dynamic` embedding without `alpha` grows; with
    the trained one it stays `rope_theta`.
    """

    long_rope: Literal["short", "long", "by_batch"]
    yarn_factor: Literal["attention_factor", "attn_factor"] = "attention_factor"
    dynamic_length: Literal["trained", "scaled"] = "trained"


def rotary(text: Any, rules: RopeRules) -> tuple[str, ...]:
    length = getattr(text, "max_position_embeddings", None)
    found = {name: _rotary(each, length, rules) for name, each in ropes(text).items()}
    return words({"rope": found.get("", found)})


def ropes(text: Any) -> dict[str, Mapping[str, Any]]:
    """The loaded parameters of the rotary embeddings, by kind of layer, or of the only one by an empty name."""
    given = getattr(text, "rope_parameters", None)
    if given is None:  # before version 5 of transformers
        given = {"rope_theta": getattr(text, "rope_theta", None), **(getattr(text, "rope_scaling", None) or {})}
    return {name: each for name, each in given.items() if isinstance(each, Mapping)} or {"": given}


def rope_kind(given: Mapping[str, Any]) -> str:
    kind = given.get("rope_type") or given.get("type") or "default"
    return _ALIKE.get(kind, kind)


def _rotary(given: Mapping[str, Any], max_position: int | None, rules: RopeRules) -> dict[str, Any]:
    """The loaded values without defaults, and with the length from which the embedding is made."""
    kind = rope_kind(given)
    found = {name: value for name, value in given.items() if name not in ("type", "rope_type") and value is not None}
    if found.get("partial_rotary_factor") == 1:
        del found["partial_rotary_factor"]
    has_unusual_factor = kind == "yarn" and _has_unusual_factor(found)
    if kind == "yarn" and (found.get("factor") or 1) <= 1 and not has_unusual_factor:  # as SGLang names a default one
        return {name: value for name, value in found.items() if name not in _OF_YARN}
    if kind == "default":
        return found
    if kind != "linear" and not (kind in _HAS_LENGTH and "original_max_position_embeddings" in found):
        found["max_position"] = max_position
    if kind == "longrope":
        found["factors"] = rules.long_rope
    if has_unusual_factor:
        found["scaled_by"] = rules.yarn_factor
    if kind == "dynamic" and "alpha" not in found:
        found["length"] = rules.dynamic_length
    return {"type": kind, **found}


def _has_unusual_factor(yarn: dict[str, Any]) -> bool:
    """Whether K is scaled by what the embedding's file says. Takes what says the usual out of it.
    https://arxiv.org/abs/2309.00071, section 3.4.
    """
    factor, scales = yarn.get("factor") or 1.0, [yarn.get("mscale"), yarn.get("mscale_all_dim")]
    one, other = (0.1 * (each or 1.0) * math.log(factor) + 1 if factor > 1 else 1.0 for each in scales)
    usual = {"attention_factor": one / other if all(scales) else 0.1 * math.log(max(factor, 1.0)) + 1, "attn_factor": 1.0}
    for name, value in usual.items():
        if name in yarn and math.isclose(yarn[name], value, rel_tol=1e-6):
            del yarn[name]
    return any(name in yarn for name in usual)


def _overrides(config: Mapping[str, Any], overridden: Mapping[str, Any], loaded: Any) -> dict[str, Any]:
    """The server's values of the fields that the command line sets. An overridden part keeps its other fields."""
    found: dict[str, Any] = {}
    for key, given in overridden.items():
        value, section = getattr(loaded, key, None), config.get(key)
        if isinstance(given, Mapping) and hasattr(value, "to_dict"):  # a part of the model
            own = section if isinstance(section, Mapping) else {}
            found[key] = {**own, **{name: getattr(value, name, None) for name in given}}
        else:
            found[key] = value
    return found


def _fields(
    values: Mapping[str, Any], loaded: Any, *, texts: tuple[Any, ...], compared: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """The fields that count. `loaded` is the server's object of the same part. In `texts` the fields `compared` are left
    out, since something else compares them.
    """
    is_text = any(loaded is text for text in texts)
    left_out = compared if is_text else frozenset()
    loaded_values = {key: getattr(loaded, key) for key in DEFAULTED if is_text and hasattr(loaded, key)}
    defaults = {key: value for key, value in loaded_values.items() if _NEUTRAL.get(key) != value}
    for key, value in values.items():
        if is_ignored(key) or key in left_out or key in loaded_values:
            continue
        part = getattr(loaded, key, None)
        yield key, dict(_fields(value, part, texts=texts, compared=compared)) if isinstance(value, Mapping) else value
    yield from defaults.items()


def is_ignored(key: str) -> bool:
    """Whether a field shapes no state."""
    return key in IGNORED or key.endswith(("_token_id", "_token_ids", "_token_index", "dropout"))


def _layers(config: Mapping[str, Any], text: Any) -> dict[str, str] | None:
    """The layers of each kind of state. `None` for an unknown model, or one with other kinds of layers."""
    if not _KINDS.issuperset(getattr(text, "layer_types", None) or ()):
        return None
    try:
        states = from_config(config, name=str(config.get("model_type", "")), kv_dtype="bfloat16").states
    except ConfigError:
        return None
    return {state.name: ranges(state.layers) for state in states}


def words(fields: Mapping[str, Any], *, nested: bool = True, prefix: str = "") -> tuple[str, ...]:
    """The fields in order. Without `nested` an object is one word."""
    found: list[str] = []
    for key, value in sorted(fields.items()):
        if isinstance(value, Mapping) and nested:
            found += words(value, prefix=f"{prefix}{key}.")
        else:
            text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), default=str)
            found.append(f"{prefix}{key}={text if len(text) <= MAX_VALUE else digest(text)}".replace(" ", "_"))
    return tuple(found)


def ranges(numbers: Iterable[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def digest(text: str) -> str:
    """64 bits of SHA-256 in hexadecimal."""
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Whole numbers become integers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return [_plain(each) for each in (value if isinstance(value, Sequence) else sorted(value))]
    return int(value) if isinstance(value, float) and value.is_integer() else value
