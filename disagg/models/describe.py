"""Reads a model from its config. A model that cannot be described in full is refused, with the reason."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from disagg.core.errors import ConfigError
from disagg.models import kinds as rules
from disagg.models.decoders import decoder_fields
from disagg.models.families import FAMILIES, Family
from disagg.models.fields import MAX_LAYERS, Dtypes, Fields, read_dtypes
from disagg.models.spec import ModelSpec
from disagg.state.declare import State


def from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    kv_dtype: str | None = None,
    kv_scale_block: int | None = None,
    ssm_dtype: str | None = None,
    draft_layers: bool = False,
) -> ModelSpec:
    """The model that a Hugging Face config describes.

    KV has the weights' dtype, or `kv_dtype`. With `kv_scale_block`, each head or latent has one float32 scale per block of
    that many elements, and the rotated part of a latent keeps the weights' dtype. Convolution windows have the weights'
    dtype. Temporal states have `ssm_dtype`, by default the file's, else float32 (lightning attention: the weights').
    `draft_layers` adds the layers of multi-token prediction, as optional components.

    Raises `ConfigError`, with the field's name and value, for a field that is missing or wrong and for state that is not
    supported.
    """
    fields = decoder_fields(config, name, supported=FAMILIES)
    family = FAMILIES[fields.model_type]
    fields = fields.of_family(names=family.names, defaults=family.defaults)
    listed = family.listed(fields)
    num_layers = fields.size("num_hidden_layers", default=None if listed is None else len(listed), most=MAX_LAYERS)
    if family.names.get("num_hidden_layers", "num_hidden_layers") in fields.values():  # the common name counts layers
        num_layers *= family.layers_per_block
    if num_layers % family.layers_per_block:
        raise fields.error("num_hidden_layers", f"a multiple of {family.layers_per_block}", num_layers)
    kinds = family.sharing(fields, _kinds(fields, family, listed, num_layers))
    dtypes = read_dtypes(fields, kv=kv_dtype, scale_block=kv_scale_block, ssm=ssm_dtype)
    own_sizes = family.own_sizes(fields, kinds)
    states = _states(fields, family, kinds, dtypes, own_sizes=own_sizes)
    num_steps = _num_draft_steps(fields)
    if draft_layers:
        draft = _states(fields, family, _draft_kinds(fields, family, num_steps), dtypes, first=num_layers)
        states += [replace(state, name=f"draft_{state.name}", optional=True) for state in draft]
    fields.check_all_read()
    if not states:
        raise ConfigError(
            f"model {name!r}: expected a layer with state, found only layers of kinds {', '.join(sorted(set(kinds)))}"
        )
    tied = fields.flag("tie_word_embeddings")
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        states=tuple(states),
        tied_embeddings=tied,
        layers_per_block=family.layers_per_block,
    )


def _kinds(fields: Fields, family: Family, listed: Sequence[str] | None, num_layers: int) -> Sequence[str]:
    """Raises `ConfigError` for a kind that the family lacks."""
    kinds = family.rule(fields, num_layers) if listed is None or not family.list_wins else listed
    if listed is not None and family.list_wins:
        fields.kinds_are_settled()
    if listed is not None and list(listed) != list(kinds):
        raise fields.error(fields.name_of("layer_types", "layers_block_type"), f"{reprlib.repr(list(kinds))}", listed)
    if len(kinds) != num_layers:
        raise fields.error("num_hidden_layers", f"{len(kinds)}, the number of kinds listed", num_layers)
    unknown = sorted(set(kinds) - set(family.states))
    if unknown:
        raise ConfigError(
            f"model {fields.model!r}, layer_types: a {fields.model_type!r} model supports layers of kinds "
            f"{', '.join(family.states)}, found {', '.join(map(reprlib.repr, unknown))}"
        )
    return kinds


def _num_draft_steps(fields: Fields) -> int:
    return fields.size("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", default=0, least=0, most=64)


def _draft_kinds(fields: Fields, family: Family, num_steps: int) -> Sequence[str]:
    if num_steps == 0:
        raise ConfigError(f"model {fields.model!r}: draft layers were requested, but the config describes none")
    if not family.draft:
        raise ConfigError(f"model {fields.model!r}: draft layers of a {fields.model_type!r} model are not described")
    listed = fields.items("mtp_layers_block_type", of=str)
    block = rules.letters(fields, "mtp_hybrid_override_pattern") or rules.current_names(listed or family.draft)
    unknown = sorted(set(block) - set(family.states))
    if unknown:
        raise fields.error("mtp_layers_block_type", f"kinds of {', '.join(family.states)}", unknown)
    return list(block) * num_steps


def _states(
    fields: Fields,
    family: Family,
    kinds: Sequence[str],
    dtypes: Dtypes,
    *,
    first: int = 0,
    own_sizes: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[State]:
    """One state per maker of the family, over the layers that have it. Layer ids count from `first`. Layers with values in
    `own_sizes` have a state of their own.
    """
    makers = dict.fromkeys(maker for kind in family.states for maker in family.states[kind])
    states = []
    for maker in makers:
        if not any(maker in family.states[kind] for kind in kinds):
            with contextlib.suppress(ConfigError):
                maker(fields, (), dtypes)  # marks its fields as read: no layer has this state
        groups: dict[str, list[int]] = {}
        for layer, kind in enumerate(kinds):
            if maker in family.states[kind]:
                own = (own_sizes or {}).get(layer, {})
                groups.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(layer)
        for number, layers in enumerate(groups.values(), 1):
            sized = fields.with_values((own_sizes or {}).get(layers[0], {}))
            state = maker(sized, tuple(first + layer for layer in layers), dtypes)
            states.append(state if number == 1 else replace(state, name=f"{state.name}_{number}"))
    return states
