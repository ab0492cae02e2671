"""Model families by `model_type`: the kinds of their layers, and the state that each kind leaves. Defaults and names are
those of transformers 5.23 (`configuration_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.models import kinds as rules
from disagg.models import sizes
from disagg.models import states as make
from disagg.models.fields import Fields
from disagg.models.kinds import (
    CHUNKED,
    COMPRESSED,
    CONV,
    FULL,
    HEAVILY_COMPRESSED,
    HYBRID,
    INDEX_REUSED,
    INDEXED,
    KV_REUSED,
    LINEAR,
    M3_SPARSE,
    MLP,
    MOE,
    REUSED,
    SLIDING,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read the config of one family.

    `states`: makers, by kind. `rule` gives the kinds if a file lists none; with `list_wins=False` it always applies and a
    list must agree. `sharing` finds layers that read another layer's state, `own_sizes` those whose sizes differ. `draft`:
    the kinds of one step of multi-token prediction. `names`: the family's own names of fields. `defaults`: of fields that
    published files leave out.
    """

    states: Mapping[str, tuple[make.StateMaker, ...]]
    rule: rules.LayerRule = rules.must_be_listed
    listed: rules.ListReader = rules.listed
    list_wins: bool = True
    sharing: rules.Sharing = rules.none_shared
    own_sizes: Callable[[Fields, Sequence[str]], sizes.OwnSizes] = sizes.none
    draft: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layers_per_block: int = 1


def _each(family: Family, *types: str) -> Mapping[str, Family]:
    return dict.fromkeys(types, family)


_KV, _KV_BY_HIDDEN = make.attention(), make.attention(dim=make.head_dim_or_hidden)
_V4_C4 = (make.v4_compressed("c4", COMPRESSED), make.v4_index, make.v4_open("c4_open", COMPRESSED, "head_dim"))
_V4_C128 = (make.v4_compressed("c128", HEAVILY_COMPRESSED), make.v4_open("c128_open", HEAVILY_COMPRESSED, "head_dim"))
_MAMBA2 = make.mamba2(make.mamba_head_dim)
_NEMOTRON_MAMBA2 = make.mamba2(lambda fields, _: fields.size("mamba_head_dim"))

_KV_OR_WINDOW = make.kv_or_window()
_KV_OR_WINDOW_BY_HIDDEN = make.kv_or_window(dim=make.head_dim_or_hidden)
_KV_OR_WINDOW_BY_HEADS = make.kv_or_window(make.kv_heads_or_all, make.head_dim_or_hidden)
_KV_OR_MAMBA2 = {FULL: (_KV_BY_HIDDEN,), LINEAR: (_MAMBA2,)}
_ZAMBA_KV, _ZAMBA2_KV = (
    make.attention(heads=heads, dim=make.zamba_head_dim) for heads in (make.kv_heads, make.kv_heads_or_all)
)
_MIMO_V = {"v_dim": lambda fields: fields.size("v_head_dim")}
_MIMO_WINDOW_V = {"v_dim": lambda fields: fields.size("swa_v_head_dim", "v_head_dim")}

_TIED = {"tie_word_embeddings": True}
_GEMMA2 = {**_TIED, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_GPT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
_MPT = {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"}
_GPT_NEO = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_KOSMOS = {"num_hidden_layers": "layers", "num_attention_heads": "attention_heads", "hidden_size": "embed_dim"}
_MAMBA = {"mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_expand": "expand"}
_MAMBA_HEADS = {**_MAMBA, "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups"}
_NEMOTRON = {
    "mamba_n_heads": "mamba_num_heads", "mamba_n_groups": "n_groups", "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
}  # fmt: skip
_ZAMBA2 = {"mamba_n_heads": "n_mamba_heads", "mamba_d_head": "mamba_headdim", "mamba_n_groups": "mamba_ngroups"}

_PLAIN = Family(states={FULL: (_KV,)}, rule=rules.every_layer(FULL))
_PLAIN_BY_HIDDEN = replace(_PLAIN, states={FULL: (_KV_BY_HIDDEN,)})
_PLAIN_BY_HEADS = replace(_PLAIN, states={FULL: _KV_OR_WINDOW_BY_HEADS[FULL]})
_ALL_HEADS = replace(
    _PLAIN, states={FULL: (make.attention(heads=lambda f: f.size("num_attention_heads"), dim=make.hidden_per_head),)}
)
_MULTI_QUERY = {FULL: (make.attention(heads=make.multi_query, dim=make.hidden_per_head),)}
_WINDOW_IF_SET = Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.window_if_set)
_UPPER_WINDOWS = Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.upper_windows)
_EXAONE = Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.exaone)
_LISTED = Family(states=_KV_OR_WINDOW)
_LISTED_BY_HIDDEN = Family(states=_KV_OR_WINDOW_BY_HIDDEN)
_QWEN3_NEXT = Family(
    states={FULL: (_KV,), LINEAR: (make.gdn,)},
    rule=rules.full_every_nth(LINEAR, key="full_attention_interval", default=4),
    draft=(FULL,),
)
_MLA = Family(states={FULL: (make.mla,)}, rule=rules.every_layer(FULL), draft=(FULL,))
_DSA = Family(states={INDEXED: (make.mla, make.index)}, rule=rules.every_layer(INDEXED), draft=(INDEXED,))
_SHARED_DSA = replace(
    _DSA, states={**_DSA.states, INDEX_REUSED: (make.mla,), KV_REUSED: (make.index,), REUSED: ()}, sharing=rules.index_shared
)
_M3 = Family(states={FULL: (_KV,), M3_SPARSE: (_KV, make.m3_index)}, rule=rules.minimax_m3)
_MAMBA1 = Family(
    states={LINEAR: (make.mamba1,)},
    rule=rules.every_layer(LINEAR),
    names={**_MAMBA, "mamba_d_ssm": "intermediate_size"},
    defaults=_TIED,
)
_MIMO_V2 = Family(
    states={
        FULL: (make.attention(**_MIMO_V),),
        SLIDING: (make.attention(heads=make.mimo_window_heads, dim=lambda fields: fields.size("swa_head_dim", "head_dim"),
                                 window=make.mimo_window, **_MIMO_WINDOW_V),),
    },
    rule=rules.mimo,
)  # fmt: skip
_GEMMA4 = Family(
    states={**_KV_OR_WINDOW, REUSED: ()},
    rule=rules.full_every_nth(SLIDING, default=6),
    sharing=rules.gemma4,
    own_sizes=sizes.gemma4,
    defaults={**_TIED, "global_head_dim": 512},
)

FAMILIES: Mapping[str, Family] = {
    **_each(_PLAIN_BY_HEADS, "apertus", "arcee", "aria_text", "deepseek_ocr2_text", "diffllama",
            "flex_olmo", "granite", "granite4_vision_text", "granitemoe", "granitemoeshared", "hunyuan_v1_dense",
            "hunyuan_v1_moe", "hyperclovax", "llama", "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "phi"),
    **_each(_PLAIN_BY_HIDDEN, "bitnet", "chameleon", "emu3_text_model", "glm_ocr_text", "glm4v_moe_text", "glm4v_text", "jais2",
            "qwen3_omni_moe_text", "stablelm"),
    **_each(_PLAIN, "cosmos3_edge_text", "glm", "glm4", "helium", "hy_v3", "internlm3", "iquestcoder", "minimax_m2",
            "molmo2_text", "qwen3_vl_text", "seed_oss", "solar_open"),
    **_each(replace(_PLAIN_BY_HEADS, defaults=_TIED), "cohere", "hunyuan_vl_text"),
    **_each(replace(_PLAIN_BY_HIDDEN, defaults=_TIED), "ernie4_5_moe", "ernie4_5_vl_moe_text", "granite_docling_text",
            "qwen3_vl_moe_text"),
    **_each(replace(_PLAIN, defaults=_TIED), "ernie4_5", "paddleocr_vl_text"),
    "gemma": replace(_PLAIN, defaults={**_TIED, "head_dim": 256}),
    **_each(_ALL_HEADS, "gpt_neox", "persimmon"),
    **_each(replace(_ALL_HEADS, defaults=_TIED), "biogpt", "gpt_neox_japanese", "opt"),
    "git": _ALL_HEADS,
    "gpt_neo": replace(_ALL_HEADS, rule=rules.gpt_neo, names=_GPT_NEO, defaults=_TIED),
    **_each(replace(_ALL_HEADS, names=_KOSMOS, defaults=_TIED), "kosmos_2_5_text_model", "kosmos_2_text_model"),
    **_each(replace(_ALL_HEADS, names=_GPT), "codegen", "gptj"),
    **_each(replace(_ALL_HEADS, names=_GPT, defaults=_TIED), "ctrl", "gpt-sw3", "gpt2"),
    "bloom": replace(_ALL_HEADS, names={**_GPT, "hidden_size": "hidden_size"}, defaults=_TIED),
    "mpt": replace(_PLAIN, states={FULL: (make.attention(heads=make.mpt_heads, dim=make.hidden_per_head),)}, names=_MPT,
                   defaults=_TIED),
    "xglm": replace(_ALL_HEADS, names={**_MPT, "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads"},
                    defaults=_TIED),
    "gpt_bigcode": replace(_PLAIN, states=_MULTI_QUERY, names=_GPT, defaults=_TIED),
    "falcon": replace(_PLAIN, states={FULL: (make.attention(heads=make.falcon_heads, dim=make.hidden_per_head),)},
                      defaults=_TIED),
    "dbrx": replace(_PLAIN, states={FULL: (make.attention(heads=make.dbrx_heads, dim=make.hidden_per_head),)}, names=_MPT),
    "jetmoe": replace(_PLAIN, names={"head_dim": "kv_channels"}, defaults=_TIED),
    "glm4_moe": replace(_PLAIN_BY_HIDDEN, draft=(FULL,)),
    **_each(_WINDOW_IF_SET, "mixtral", "phi3", "phi4_multimodal", "phimoe"),
    "doge": replace(_WINDOW_IF_SET, states=_KV_OR_WINDOW_BY_HEADS),
    "voxtral_realtime_text": Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.mistral, defaults=_TIED),
    "starcoder2": replace(_WINDOW_IF_SET, defaults=_TIED),
    "ministral3": replace(_WINDOW_IF_SET, states=_KV_OR_WINDOW),
    **_each(Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.mistral), "mistral", "ministral"),
    **_each(_LISTED, "afmoe", "cwm"),
    **_each(Family(states=_KV_OR_WINDOW, rule=rules.every_layer(FULL)), "laguna", "mellum"),
    "cohere2_moe": replace(_LISTED, defaults=_TIED),
    "cohere_compass_text": Family(states=_KV_OR_WINDOW_BY_HEADS, rule=rules.every_layer(FULL), defaults=_TIED),
    "flint": Family(states=_KV_OR_WINDOW, rule=rules.by_position(lambda i, n: i < 2 or i % 4 == 1 or i == n - 1)),
    "beam": Family(states=_KV_OR_WINDOW, rule=rules.by_position(lambda i, n: i % 6 == 5 or i == n - 1)),
    "kolibri1": Family(states=_KV_OR_WINDOW, rule=rules.full_every_nth(SLIDING, default=5)),
    **_each(Family(states=_KV_OR_WINDOW, rule=rules.by_position(lambda i, n: (n - 1 - i) % 4 == 0)), "muse_glimmer_text",
            "muse_spark_text"),
    "granite_swa": replace(_LISTED_BY_HIDDEN, defaults=_TIED),
    "granitemoe_swa": _LISTED_BY_HIDDEN,
    "cohere2": Family(
        states=_KV_OR_WINDOW_BY_HEADS,
        rule=rules.full_every_nth(SLIDING, key="sliding_window_pattern", default=4),
        defaults=_TIED,
    ),
    "olmo3": Family(states=_KV_OR_WINDOW_BY_HEADS, rule=rules.full_every_nth(SLIDING, default=4)),
    **_each(_EXAONE, "exaone4", "exaone_moe"),
    **_each(Family(states=_KV_OR_WINDOW, rule=rules.gemma2, defaults=_GEMMA2), "gemma2", "vaultgemma"),
    "gemma3_text": Family(
        states=_KV_OR_WINDOW,
        rule=rules.full_every_nth(SLIDING, key="sliding_window_pattern", default=6),
        defaults=_GEMMA2,
    ),
    "gemma3n_text": replace(_GEMMA4, rule=rules.full_every_nth(SLIDING, default=5), sharing=rules.last_share,
                            own_sizes=sizes.none, defaults={**_TIED, "num_kv_shared_layers": 15}),
    **_each(_GEMMA4, "gemma4_text", "gemma4_unified_text"),
    "llama4_text": Family(
        states={FULL: (_KV,), CHUNKED: (make.attention(window=make.chunk),)},
        rule=rules.llama4,
    ),
    **_each(_MIMO_V2, "mimo_v2", "mimo_v2_flash"),
    **_each(_UPPER_WINDOWS, "qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    "qwen2_5_omni_text": replace(_UPPER_WINDOWS, defaults=_TIED),
    "dots1": Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.windows_from),
    "qwen2_moe": Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.lower_windows),
    "smollm3": Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.listed_if_windows, defaults=_TIED),
    "qwen3": Family(states=_KV_OR_WINDOW, rule=rules.upper_windows),
    "qwen3_moe": Family(states=_KV_OR_WINDOW_BY_HIDDEN, rule=rules.all_windows_or_none),
    **_each(_QWEN3_NEXT, "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    "olmo_hybrid": Family(states={FULL: _KV_OR_WINDOW_BY_HEADS[FULL], LINEAR: (make.gdn,)}, rule=rules.olmo_hybrid),
    "gpt_oss": Family(states=_KV_OR_WINDOW, rule=rules.alternating(SLIDING, FULL)),
    **_each(_MLA, "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "mistral4"),
    **_each(replace(_MLA, defaults=_TIED), "minicpm3", "youtu"),
    "longcat_flash": replace(_MLA, names={"num_hidden_layers": "num_layers"}, layers_per_block=2),
    **_each(_DSA, "axk2", "deepseek_v32"),
    "glm_moe_dsa": _SHARED_DSA,
    "hy_v4": replace(_SHARED_DSA, sharing=rules.index_every_fourth),
    "mistral_large4_text": replace(_SHARED_DSA, sharing=rules.latents_shared),
    "deepseek_v4": Family(
        states={
            SLIDING: (make.v4_window,),
            COMPRESSED: (make.v4_window, *_V4_C4, make.v4_open("index_open", COMPRESSED, "index_head_dim")),
            HEAVILY_COMPRESSED: (make.v4_window, *_V4_C128),
        },
        rule=rules.deepseek_v4,
        draft=(SLIDING,),
    ),
    "kimi_linear": Family(states={FULL: (make.mla,), LINEAR: (make.kda,)}, rule=rules.kimi, draft=(FULL,)),
    "bailing_hybrid": Family(
        states={FULL: (make.mla,), LINEAR: (make.kda,)},
        rule=rules.full_every_nth(LINEAR, key="layer_group_size", default=6),
        draft=(FULL,),
    ),
    "falcon_h1": Family(states={HYBRID: (_KV_BY_HIDDEN, _MAMBA2)}, rule=rules.every_layer(HYBRID), list_wins=False),
    "nemotron_h": Family(
        states={FULL: (_KV,), LINEAR: (_NEMOTRON_MAMBA2,), MLP: (), MOE: ()},
        listed=rules.listed_or_letters,
        draft=(FULL, MOE),
        names=_NEMOTRON,
    ),
    "granitemoehybrid": Family(states=_KV_OR_MAMBA2, rule=rules.every_layer(LINEAR)),
    "bamba": Family(states=_KV_OR_MAMBA2, rule=rules.bamba, list_wins=False),
    "jamba": Family(states={FULL: (_KV_BY_HIDDEN,), LINEAR: (make.mamba1,)}, rule=rules.jamba, list_wins=False),
    **_each(_MAMBA1, "falcon_mamba", "mamba"),
    "mamba2": Family(states={LINEAR: (_MAMBA2,)}, rule=rules.every_layer(LINEAR), names=_MAMBA_HEADS),
    "zamba": Family(states={HYBRID: (_ZAMBA_KV, make.mamba1), LINEAR: (make.mamba1,)}, rule=rules.zamba, defaults=_TIED),
    "zamba2": Family(states={HYBRID: (_ZAMBA2_KV, _MAMBA2), LINEAR: (_MAMBA2,)}, names=_ZAMBA2, defaults=_TIED),
    "lfm2": Family(states={FULL: (_KV_BY_HIDDEN,), CONV: (make.short_convolution,)}, rule=rules.lfm2, defaults=_TIED),
    "lfm2_moe": Family(states={FULL: (_KV_BY_HIDDEN,), CONV: (make.short_convolution,)}, defaults=_TIED),
    "lfm3": Family(states={**_KV_OR_WINDOW, CONV: (make.short_convolution,)}, rule=rules.lfm3, defaults=_TIED),
    "minimax": Family(states={FULL: (_KV_BY_HIDDEN,), LINEAR: (make.lightning,)}, rule=rules.alternating(FULL, LINEAR)),
    **_each(_M3, "minimax_m3_vl_text", "minimax_m3_vl"),
}  # fmt: skip
