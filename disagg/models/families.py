"""Model families: which kinds of layers each has, and which state a layer of a kind leaves.

A family is one line of `_FAMILIES`. A model that this library cannot describe in full is an error that names what is not
supported: an unknown model type, an unknown kind of layer, or a field that means state and that the family does not read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.core.errors import ConfigError
from disagg.models import kinds as rules
from disagg.models import states as make
from disagg.models.fields import MAX_LAYERS, Dtypes, Fields, decoder_fields, read_dtypes
from disagg.models.kinds import COMPRESSED, FULL, HEAVILY_COMPRESSED, HYBRID, INDEXED, LINEAR, M3_SPARSE, MLP, MOE, SLIDING
from disagg.models.spec import ModelSpec
from disagg.state.declare import State


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How to read the config of one family of models.

    `states` are the makers of each kind's state. `rule` gives the kinds if a file lists none; with `list_wins=False` the rule
    always applies and a list must agree with it. `draft` are the kinds of one step of multi-token prediction. `defaults` are
    values of fields that published files leave out.
    """

    states: Mapping[str, tuple[make.StateMaker, ...]]
    rule: rules.LayerRule = rules.must_be_listed
    listed: rules.ListReader = rules.listed
    list_wins: bool = True
    draft: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


_KV, _KV_BY_HIDDEN = make.attention(), make.attention(by_hidden=True)
_KV_BY_HEADS = make.attention(by_hidden=True, by_heads=True)
_WINDOW, _WINDOW_BY_HIDDEN = make.attention("window"), make.attention("window", by_hidden=True)
_WINDOW_BY_HEADS = make.attention("window", by_hidden=True, by_heads=True)
_V4_C4 = (make.v4_compressed("c4", COMPRESSED), make.v4_index, make.v4_open("c4_open", COMPRESSED, "head_dim"))
_V4_C128 = (make.v4_compressed("c128", HEAVILY_COMPRESSED), make.v4_open("c128_open", HEAVILY_COMPRESSED, "head_dim"))
_MAMBA2 = make.mamba2("mamba_n_heads", "mamba_d_state", make.mamba_head_dim)
_NEMOTRON_MAMBA2 = make.mamba2("mamba_num_heads", "ssm_state_size", lambda fields, _: fields.size("mamba_head_dim"))

_KV_OR_WINDOW = {FULL: (_KV,), SLIDING: (_WINDOW,)}
_KV_OR_WINDOW_BY_HIDDEN = {FULL: (_KV_BY_HIDDEN,), SLIDING: (_WINDOW_BY_HIDDEN,)}
_KV_OR_WINDOW_BY_HEADS = {FULL: (_KV_BY_HEADS,), SLIDING: (_WINDOW_BY_HEADS,)}
_KV_OR_MAMBA2 = {FULL: (_KV_BY_HIDDEN,), LINEAR: (_MAMBA2,)}

_TIED = {"tie_word_embeddings": True}
_GEMMA2 = {**_TIED, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}

_PLAIN = _Family(states={FULL: (_KV,)}, rule=rules.every_layer(FULL))
_PLAIN_BY_HIDDEN = _Family(states={FULL: (_KV_BY_HIDDEN,)}, rule=rules.every_layer(FULL))
_PLAIN_BY_HEADS = _Family(states={FULL: (_KV_BY_HEADS,)}, rule=rules.every_layer(FULL))
_WINDOW_IF_SET = _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.window_if_set)
_UPPER_WINDOWS = _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.upper_windows)
_EXAONE = _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.exaone)
_LISTED = _Family(states=_KV_OR_WINDOW)
_LISTED_BY_HIDDEN = _Family(states=_KV_OR_WINDOW_BY_HIDDEN)
_QWEN3_NEXT = _Family(
    states={FULL: (_KV,), LINEAR: (make.gdn,)},
    rule=rules.full_every_nth(LINEAR, key="full_attention_interval", default=4),
    draft=(FULL,),
)
_MLA = _Family(states={FULL: (make.mla,)}, rule=rules.every_layer(FULL), draft=(FULL,))
_M3 = _Family(states={FULL: (_KV,), M3_SPARSE: (_KV, make.m3_index)}, rule=rules.minimax_m3)

_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(
        ("apertus", "arcee", "aria_text", "flex_olmo", "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense",
         "hunyuan_v1_moe", "hyperclovax", "llama", "nemotron", "olmo", "olmo2", "olmoe", "phi"),
        _PLAIN_BY_HEADS,
    ),
    **dict.fromkeys(("bitnet", "glm4v_moe_text", "glm4v_text", "jais2", "stablelm"), _PLAIN_BY_HIDDEN),
    **dict.fromkeys(
        ("glm", "glm4", "helium", "internlm3", "iquestcoder", "minimax_m2", "qwen3_vl_text", "seed_oss", "solar_open"), _PLAIN
    ),
    "cohere": replace(_PLAIN_BY_HEADS, defaults=_TIED),
    **dict.fromkeys(("ernie4_5_moe", "qwen3_vl_moe_text"), replace(_PLAIN_BY_HIDDEN, defaults=_TIED)),
    **dict.fromkeys(("ernie4_5", "gemma"), replace(_PLAIN, defaults=_TIED)),
    "glm4_moe": replace(_PLAIN_BY_HIDDEN, draft=(FULL,)),
    **dict.fromkeys(("mixtral", "phi3", "phimoe"), _WINDOW_IF_SET),
    "starcoder2": replace(_WINDOW_IF_SET, defaults=_TIED),
    "ministral3": replace(_WINDOW_IF_SET, states=_KV_OR_WINDOW),
    **dict.fromkeys(("mistral", "ministral"), _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.mistral)),
    **dict.fromkeys(("afmoe", "cwm"), _LISTED),
    "cohere2_moe": replace(_LISTED, defaults=_TIED),
    "granite_swa": replace(_LISTED_BY_HIDDEN, defaults=_TIED),
    "granitemoe_swa": _LISTED_BY_HIDDEN,
    "cohere2": _Family(
        states=_KV_OR_WINDOW_BY_HEADS,
        rule=rules.full_every_nth(SLIDING, key="sliding_window_pattern", default=4),
        defaults=_TIED,
    ),
    "olmo3": _Family(states=_KV_OR_WINDOW_BY_HEADS, rule=rules.full_every_nth(SLIDING, default=4)),
    **dict.fromkeys(("exaone4", "exaone_moe"), _EXAONE),
    **dict.fromkeys(("gemma2", "vaultgemma"),
        _Family(states=_KV_OR_WINDOW, rule=rules.alternating(SLIDING, FULL), defaults=_GEMMA2)),
    "gemma3_text": _Family(
        states=_KV_OR_WINDOW,
        rule=rules.full_every_nth(SLIDING, key="sliding_window_pattern", default=6),
        defaults=_GEMMA2,
    ),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _UPPER_WINDOWS),
    "qwen2_moe": _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.lower_windows),
    "smollm3": _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.listed_if_windows, defaults=_TIED),
    "qwen3": _Family(states=_KV_OR_WINDOW, rule=rules.upper_windows),
    "qwen3_moe": _Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.all_windows_or_none),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_NEXT),
    "gpt_oss": _Family(states=_KV_OR_WINDOW, rule=rules.alternating(SLIDING, FULL)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), _MLA),
    "youtu": replace(_MLA, defaults=_TIED),
    "deepseek_v32": _Family(states={INDEXED: (make.mla, make.index)}, rule=rules.every_layer(INDEXED), draft=(INDEXED,)),
    "deepseek_v4": _Family(
        states={
            SLIDING: (make.v4_window,),
            COMPRESSED: (make.v4_window, *_V4_C4, make.v4_open("index_open", COMPRESSED, "index_head_dim")),
            HEAVILY_COMPRESSED: (make.v4_window, *_V4_C128),
        },
        rule=rules.deepseek_v4,
        draft=(SLIDING,),
    ),
    "kimi_linear": _Family(states={FULL: (make.mla,), LINEAR: (make.kda,)}, rule=rules.kimi, draft=(FULL,)),
    "falcon_h1": _Family(states={HYBRID: (_KV_BY_HIDDEN, _MAMBA2)}, rule=rules.every_layer(HYBRID), list_wins=False),
    "nemotron_h": _Family(
        states={FULL: (_KV,), LINEAR: (_NEMOTRON_MAMBA2,), MLP: (), MOE: ()}, listed=rules.listed_or_letters, draft=(FULL, MOE)
    ),
    "granitemoehybrid": _Family(states=_KV_OR_MAMBA2, rule=rules.every_layer(LINEAR)),
    "bamba": _Family(states=_KV_OR_MAMBA2, rule=rules.bamba, list_wins=False),
    "jamba": _Family(states={FULL: (_KV_BY_HIDDEN,), LINEAR: (make.mamba1,)}, rule=rules.jamba, list_wins=False),
    "minimax": _Family(states={FULL: (_KV_BY_HIDDEN,), LINEAR: (make.lightning,)}, rule=rules.alternating(FULL, LINEAR)),
    "minimax_m3_vl_text": _M3,
    "minimax_m3_vl": _M3,
}  # fmt: skip
"""Families by `model_type`."""


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

    KV has the weights' dtype, or `kv_dtype`. With `kv_scale_block`, each head or latent has one float32 scale per block of that
    many elements, and the rotated part of a latent keeps the weights' dtype. Convolution windows have the weights' dtype.
    Temporal states have `ssm_dtype`, by default the file's, else float32, as in servers (lightning attention: the weights'
    dtype). `draft_layers` adds the layers of multi-token prediction, as optional components.

    Raises `ConfigError`, with the field's name and value, for a field that is missing or wrong and for state that is not
    supported.
    """
    fields = decoder_fields(config, name, supported=_FAMILIES)
    family = _FAMILIES[fields.model_type]
    fields = fields.with_defaults(family.defaults)
    listed = family.listed(fields)
    num_layers = fields.size("num_hidden_layers", default=None if listed is None else len(listed), most=MAX_LAYERS)
    kinds = _kinds(fields, family, listed, num_layers)
    dtypes = read_dtypes(fields, kv=kv_dtype, scale_block=kv_scale_block, ssm=ssm_dtype)
    states = _states(fields, family, kinds, dtypes, first=0)
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
    return ModelSpec(name=name, num_layers=num_layers, states=tuple(states), tied_embeddings=tied)


def _kinds(fields: Fields, family: _Family, listed: Sequence[str] | None, num_layers: int) -> Sequence[str]:
    """The kind of every layer: as listed, else by the family's rule. Raises `ConfigError` for a kind the family lacks."""
    kinds = family.rule(fields, num_layers) if listed is None or not family.list_wins else listed
    if listed is not None and family.list_wins:
        fields.windows_are_settled()
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


def _draft_kinds(fields: Fields, family: _Family, num_steps: int) -> Sequence[str]:
    """The kinds of the draft layers, in order of their ids."""
    if num_steps == 0 or not family.draft:
        raise ConfigError(f"model {fields.model!r}: draft layers were requested, but the config describes none")
    listed = fields.items("mtp_layers_block_type", of=str)
    block = rules.letters(fields, "mtp_hybrid_override_pattern") or rules.current_names(listed or family.draft)
    unknown = sorted(set(block) - set(family.states))
    if unknown:
        raise fields.error("mtp_layers_block_type", f"kinds of {', '.join(family.states)}", unknown)
    return list(block) * num_steps


def _states(fields: Fields, family: _Family, kinds: Sequence[str], dtypes: Dtypes, *, first: int) -> list[State]:
    """One state per maker of the family, over the layers that have it. Layer ids count from `first`."""
    makers = dict.fromkeys(maker for kind in family.states for maker in family.states[kind])
    states = []
    for maker in makers:
        layers = tuple(first + i for i, kind in enumerate(kinds) if maker in family.states[kind])
        if layers:
            states.append(maker(fields, layers, dtypes))
    return states
