"""Layers whose sizes differ from those of the whole model: values that replace a config's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.models.fields import Fields
from disagg.models.kinds import FULL

OwnSizes = Mapping[int, Mapping[str, Any]]


def none(_: Fields, __: Sequence[str]) -> OwnSizes:
    return {}


def gemma4(fields: Fields, kinds: Sequence[str]) -> OwnSizes:
    """Gemma 4: layers that attend to all tokens have `global_head_dim`, and with `attention_k_eq_v` their own KV heads."""
    dim = fields.size("global_head_dim")
    heads = fields.raw("num_global_key_value_heads")
    fields.raw("per_layer_config")
    if fields.has("per_layer_config"):  # also a null: then no layer differs
        return _listed(fields)
    same = fields.flag("attention_k_eq_v")
    own = {"head_dim": dim, **({"num_key_value_heads": heads} if same and heads is not None else {})}
    return {layer: own for layer, kind in enumerate(kinds) if kind == FULL}


def _listed(fields: Fields) -> OwnSizes:
    section = fields.section("per_layer_config")
    values: dict[int, Mapping[str, Any]] = {}
    for key, value in section.values().items():
        if not key.isdecimal() or not isinstance(value, Mapping):
            raise section.error(key, "an object under the number of a layer", value)
        values[int(key)] = value
    return values
