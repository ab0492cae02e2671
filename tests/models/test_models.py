"""Model descriptions: sizes in closed form, kinds of layers, dtypes and draft layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from disagg.core.errors import ConfigError
from disagg.models import PRESETS, ModelSpec, first_layers, from_config, load_model
from disagg.state.declare import State
from tests.support.configs import DSA, LLAMA, M3, MLA, NEMOTRON, QWEN3_5, V4, spec_of, without


def per_layer(state: State) -> int:
    """Bytes of one token, or of one slot, in one layer."""
    return sum(role.nbytes // role.granule for role in state.roles)


class TestSizes:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("llama-3-8b", {"kv": (32, 131072 // 32)}),
            ("llama-3-70b", {"kv": (80, 2 * 8 * 128 * 2)}),
            ("qwen3-32b", {"kv": (64, 2 * 8 * 128 * 2)}),
            ("tiny", {"kv": (4, 2 * 4 * 64 * 2)}),
            ("qwen3-next-80b", {"kv": (12, 2 * 2 * 256 * 2), "ssm": (36, 8192 * 3 * 2 + 32 * 128 * 128 * 4)}),
            ("qwen3.5-397b-a17b", {"kv": (15, 2 * 2 * 256 * 2), "ssm": (45, 12288 * 3 * 2 + 64 * 128 * 128 * 4)}),
            ("gpt-oss-120b", {"kv": (18, 2 * 8 * 64 * 2), "window": (18, 2 * 8 * 64 * 2)}),
            ("deepseek-v3.2", {"mla": (61, 576 * 2), "index": (61, 128 + 4)}),
            ("kimi-linear-48b", {"mla": (7, 576 * 2), "ssm": (20, 3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4)}),
            ("nemotron-h-8b", {"kv": (4, 2 * 8 * 128 * 2), "ssm": (24, (8192 + 2048) * 3 * 2 + 128 * 64 * 128 * 4)}),
            ("falcon-h1-7b", {"kv": (44, 2 * 2 * 128 * 2), "ssm": (44, (3072 + 512) * 3 * 2 + 24 * 128 * 256 * 4)}),
            ("llama-3.1-405b", {"kv": (126, 2 * 8 * 128 * 2)}),
            ("llama-4-scout", {"kv": (12, 2 * 8 * 128 * 2), "window": (36, 2 * 8 * 128 * 2)}),
            ("qwen3-30b-a3b", {"kv": (48, 2 * 4 * 128 * 2)}),
            ("kimi-k2", {"mla": (61, 576 * 2)}),
            ("glm-5", {"mla": (78, 576 * 2), "index": (78, 128 + 4)}),
            ("gemma-2-9b", {"kv": (21, 2 * 8 * 256 * 2), "window": (21, 2 * 8 * 256 * 2)}),
            ("gemma-3-27b", {"kv": (10, 2 * 16 * 128 * 2), "window": (52, 2 * 16 * 128 * 2)}),
            ("mimo-v2-flash", {"kv": (9, 4 * (192 + 128) * 2), "window": (39, 8 * (192 + 128) * 2)}),
            ("jamba-mini", {"kv": (4, 2 * 8 * 128 * 2), "ssm": (28, 8192 * 3 * 2 + 8192 * 16 * 4)}),
        ],
    )
    def test_presets_have_the_published_sizes(self, name: str, expected: dict[str, tuple[int, int]]) -> None:
        spec = PRESETS[name]
        assert {s.name: (len(s.layers), per_layer(s)) for s in spec.states} == expected
        assert load_model(name).nbytes(1000) == spec.nbytes(1000)

    def test_presets_with_slots(self) -> None:
        hybrids = {"qwen3-next-80b", "qwen3.5-397b-a17b", "kimi-linear-48b", "nemotron-h-8b", "falcon-h1-7b", "jamba-mini"}
        assert {name for name, spec in PRESETS.items() if any(s.rows == "slot" for s in spec.states)} == hybrids
        assert len(PRESETS) == len(set(PRESETS))

    def test_a_preset_is_made_once(self) -> None:
        assert PRESETS["tiny"] is PRESETS["tiny"]
        assert "llama-9" not in PRESETS
        with pytest.raises(KeyError):
            PRESETS["llama-9"]

    def test_bytes_of_a_request(self) -> None:
        assert PRESETS["llama-3-8b"].nbytes(1) == 131072
        assert PRESETS["deepseek-v3.2"].nbytes(10) == 10 * 61 * (576 * 2 + 132)
        oss = PRESETS["gpt-oss-120b"]
        assert oss.nbytes(1000) == 18 * 2048 * (1000 + 127)  # a window of 128 is the next token and 127 before it
        assert oss.nbytes(1000, prefix=900) == 18 * 2048 * (100 + 100)
        ssm = PRESETS["jamba-mini"].state("ssm")
        assert ssm.nbytes(1) == ssm.nbytes(10**6) == ssm.nbytes(10**6, prefix=10)  # a slot is always moved whole

    def test_layers_of_hybrids(self) -> None:
        assert PRESETS["nemotron-h-8b"].state("kv").layers == (7, 18, 29, 40)
        assert PRESETS["jamba-mini"].state("kv").layers == (4, 12, 20, 28)
        assert PRESETS["kimi-linear-48b"].state("mla").layers == (3, 7, 11, 15, 19, 23, 26)
        assert PRESETS["qwen3-next-80b"].state("kv").layers == tuple(range(3, 48, 4))
        assert PRESETS["gpt-oss-120b"].state("window").layers == tuple(range(0, 36, 2))
        falcon = PRESETS["falcon-h1-7b"]
        assert falcon.state("kv").layers == falcon.state("ssm").layers == tuple(range(44))


class TestKinds:
    def test_deepseek_v4_by_compression(self) -> None:
        states = {s.name: s for s in spec_of(V4).states}
        assert {name: s.layers for name, s in states.items()} == {
            "window": (0, 1, 2, 3),
            "c4": (1, 3),
            "index": (1, 3),
            "c4_open": (1, 3),
            "index_open": (1, 3),
            "c128": (2,),
            "c128_open": (2,),
        }
        assert per_layer(states["window"]) == 1024
        assert states["c4"].nbytes(100) == 2 * 25 * 1024
        assert states["c128"].nbytes(300) == 2 * 1024
        assert states["index"].nbytes(100) == 2 * 25 * 132
        assert (states["c4_open"].ring, states["c4_open"].window, per_layer(states["c4_open"])) == (8, 7, 4 * 512 * 4)
        assert (states["c128_open"].ring, per_layer(states["c128_open"])) == (128, 2 * 512 * 4)
        assert states["index"].packed

    def test_deepseek_v4_open_windows_cover_tokens_not_yet_compressed(self) -> None:
        """A ratio-4 entry is computed from its own four tokens and the four before them."""
        state = spec_of(V4).state("c4_open")
        for num_tokens in range(1, 40):
            closed = num_tokens - num_tokens % 4
            assert state.needed(num_tokens)[0] <= max(0, closed - 4)

    def test_windows_of_qwen_and_mistral(self) -> None:
        upper = {**LLAMA, "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}
        assert {s.name: s.layers for s in spec_of(upper).states} == {"kv": (0, 1, 2), "window": (3,)}
        assert [s.name for s in spec_of({**upper, "use_sliding_window": False}).states] == ["kv"]
        mistral = {**LLAMA, "model_type": "mistral"}
        assert spec_of({**mistral, "sliding_window": 32}).states[0].window == 31
        assert spec_of({**mistral, "sliding_window": None}).states[0].window is None
        with pytest.raises(ConfigError, match="sliding_window"):
            spec_of(mistral)

    def test_exaone_without_a_window_has_full_attention(self) -> None:
        exaone = {**LLAMA, "model_type": "exaone4", "sliding_window_pattern": 2}
        assert [s.name for s in spec_of({**exaone, "sliding_window": None}).states] == ["kv"]
        assert {s.name: s.layers for s in spec_of({**exaone, "sliding_window": 32}).states} == {"kv": (1, 3), "window": (0, 2)}

    def test_windows_of_smollm_and_qwen2_moe(self) -> None:
        used = {**LLAMA, "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}
        assert {s.name: s.layers for s in spec_of({**used, "model_type": "qwen2_moe"}).states} == {
            "kv": (1, 2, 3),
            "window": (0,),
        }
        for model_type in ("qwen2_moe", "smollm3"):
            unused = {**used, "model_type": model_type, "use_sliding_window": False}
            assert [s.name for s in spec_of(unused).states] == ["kv"]
        with pytest.raises(ConfigError, match="layer_types"):
            spec_of({**used, "model_type": "smollm3"})

    def test_windows_of_mixtral_and_olmo(self) -> None:
        assert [s.name for s in spec_of({**LLAMA, "model_type": "mixtral"}).states] == ["kv"]
        assert [s.name for s in spec_of({**LLAMA, "model_type": "mixtral", "sliding_window": 9}).states] == ["window"]
        assert spec_of({**LLAMA, "model_type": "olmo3", "sliding_window": 9}).state("kv").layers == (3,)

    def test_gemma_files_leave_out_the_defaults_of_their_class(self) -> None:
        text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
        spec = spec_of({"model_type": "gemma3", "text_config": text})
        assert {s.name: (len(s.layers), s.window) for s in spec.states} == {"kv": (5, None), "window": (29, 1023)}
        assert per_layer(spec.state("kv")) == 2 * 4 * 256 * 2
        assert spec.tied_embeddings

    @pytest.mark.parametrize(
        ("attention", "heads"),
        [
            ({"attn_type": "multihead_attention"}, 24),
            ({"attn_type": "grouped_query_attention", "kv_n_heads": 8}, 8),  # as in replit-code-v1_5-3b
            ({"attn_type": "multiquery_attention"}, 1),
        ],
    )
    def test_kv_heads_of_mpt(self, attention: Mapping[str, Any], heads: int) -> None:
        spec = spec_of({"model_type": "mpt", "n_layers": 32, "n_heads": 24, "d_model": 3072, "attn_config": attention})
        assert spec.nbytes(1) == 32 * 2 * heads * 128 * 2

    def test_a_file_may_use_the_common_name_of_a_field(self) -> None:
        own = spec_of({"model_type": "bloom", "n_layer": 70, "n_head": 112, "hidden_size": 14336})
        common = spec_of({"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112, "hidden_size": 14336})
        assert common.nbytes(1) == own.nbytes(1)

    def test_kimi_k2_is_described_as_deepseek_v3(self) -> None:
        kimi = spec_of({**MLA, "model_type": "kimi_k2"}).state("mla")
        assert (kimi.layers, per_layer(kimi)) == ((0, 1, 2), 576 * 2)

    def test_old_names_of_kinds(self) -> None:
        listed = {**LLAMA, "model_type": "minimax", "layer_types": ["attention", "mamba", "mamba", "full_attention"]}
        assert spec_of(listed).state("kv").layers == (0, 3)

    def test_nested_text_config(self) -> None:
        text = without(QWEN3_5, "model_type")
        outer = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 2}, "torch_dtype": "float16",
                 "tie_word_embeddings": True}  # fmt: skip
        spec = spec_of(outer)
        assert spec.states[0].roles[0].dtype == "float16"
        assert spec.tied_embeddings
        assert spec.nbytes(5) == spec_of({**QWEN3_5, "dtype": "torch.float16"}).nbytes(5)
        assert [s.layers for s in spec.states] == [(3,), (0, 1, 2)]

    @pytest.mark.parametrize(("kind", "num_heads"), [("llama", 32), ("mistral", 8), ("qwen2", 32)])
    def test_a_nested_config_may_leave_out_what_its_class_has(self, kind: str, num_heads: int) -> None:
        """As in the files of LLaVA 1.5, LLaVA 1.6 and Qwen2-Audio."""
        text = {"model_type": kind, "sliding_window": None}
        (state,) = spec_of({"model_type": "llava", "text_config": text}).states
        assert (state.layers, per_layer(state)) == (tuple(range(32)), 2 * num_heads * 128 * 2)
        with pytest.raises(ConfigError, match="num_hidden_layers"):
            spec_of(text)

    def test_m3_with_index_values_is_rejected(self) -> None:
        sparse = {**M3["sparse_attention_config"], "sparse_disable_index_value": [0, 1, 0, 1]}
        with pytest.raises(ConfigError, match=r"sparse_disable_index_value.*layer 2"):
            spec_of({**M3, "sparse_attention_config": sparse})


class TestDtypes:
    def test_quantised_kv_with_scales(self) -> None:
        spec = spec_of(LLAMA, kv_dtype="float8_e4m3fn", kv_scale_block=8)
        assert {r.name: (r.dtype, r.inner["dim"].size) for r in spec.states[0].roles} == {
            "k": ("float8_e4m3fn", 8),
            "v": ("float8_e4m3fn", 8),
            "k_scale": ("float32", 1),
            "v_scale": ("float32", 1),
        }
        assert per_layer(spec_of(LLAMA, kv_dtype="float8_e4m3fn").states[0]) == 2 * 4 * 8

    def test_quantised_latent(self) -> None:
        """512 FP8 elements, four float32 scales, 64 rotated elements of 16 bits: 656 bytes."""
        assert per_layer(spec_of(MLA, kv_dtype="float8_e4m3fn", kv_scale_block=128).states[0]) == 656
        assert per_layer(spec_of(MLA, kv_dtype="float8_e4m3fn").states[0]) == 576

    def test_temporal_state(self) -> None:
        def dtypes(spec: ModelSpec) -> list[str | None]:
            return [role.dtype for role in spec.state("ssm").roles]

        assert dtypes(spec_of(QWEN3_5)) == ["bfloat16", "float32"]
        assert dtypes(spec_of({**QWEN3_5, "mamba_ssm_dtype": "bfloat16", "dtype": "float16"})) == ["float16", "bfloat16"]
        assert dtypes(spec_of({**NEMOTRON, "mamba_ssm_cache_dtype": "float16"}, ssm_dtype="float32")) == ["bfloat16", "float32"]
        assert dtypes(spec_of(QWEN3_5, kv_dtype="float8_e4m3fn")) == ["bfloat16", "float32"]

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"kv_dtype": "fp8"}, "fp8"),
            ({"kv_dtype": "bool"}, "bool"),
            ({"kv_dtype": "float4_e2m1fn_x2"}, "x2"),
            ({"ssm_dtype": "half"}, "half"),
            ({"kv_scale_block": 128}, "kv_scale_block"),
            ({"kv_dtype": "float8_e4m3fn", "kv_scale_block": 0}, "kv_scale_block"),
        ],
    )
    def test_wrong_options_are_rejected(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            spec_of(LLAMA, **options)


class TestDraftLayers:
    def test_are_declared_only_on_request(self) -> None:
        assert not any(s.optional for s in spec_of(DSA).states)
        spec = spec_of(DSA, draft_layers=True)
        assert {s.name: (s.layers, s.optional) for s in spec.states} == {
            "mla": ((0, 1, 2), False),
            "index": ((0, 1, 2), False),
            "draft_mla": ((3,), True),
            "draft_index": ((3,), True),
        }
        assert spec.num_layers == 3

    def test_kinds_of_draft_layers(self) -> None:
        assert spec_of(QWEN3_5, draft_layers=True).state("draft_kv").layers == (4,)
        assert spec_of(V4, draft_layers=True).state("draft_window").window == 127
        nemotron = {**NEMOTRON, "num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}
        assert spec_of(nemotron, draft_layers=True).state("draft_kv").layers == (7, 9)

    @pytest.mark.parametrize("config", [LLAMA, without(MLA, "num_nextn_predict_layers")])
    def test_requested_but_absent(self, config: Mapping[str, Any]) -> None:
        with pytest.raises(ConfigError, match="draft layers"):
            spec_of(config, draft_layers=True)

    def test_first_layers_drops_them(self) -> None:
        spec = first_layers(spec_of(DSA, draft_layers=True), 2)
        assert {s.name: s.layers for s in spec.states} == {"mla": (0, 1), "index": (0, 1)}


PLAIN: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 2}
GEMMA4 = {"num_global_key_value_heads": 1, "head_dim": 64, "global_head_dim": 128, "sliding_window": 64}
KDA = {"kda_layers": [1], "full_attn_layers": [2], "short_conv_kernel_size": 4}
ZAMBA2 = {"n_mamba_heads": 8, "mamba_headdim": 256, "mamba_ngroups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
          "mamba_expand": 2, "layers_block_type": ["hybrid", "hybrid"]}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("model_type", "fields", "nbytes"),
    [
        ("hunyuan_vl_text", {"attention_head_dim": 128}, 4 * 128 * 2),
        ("hunyuan_vl_text", {}, 4 * 64 * 2),
        ("zamba", {**MAMBA, "attention_head_dim": 96, "layers_block_type": ["hybrid", "hybrid"]}, 4 * 96 * 2),
        ("zamba2", {**ZAMBA2, "attention_head_dim": 96}, 4 * 96 * 2),
        ("gemma4_unified_text", GEMMA4, 4 * 128 * 2),
        ("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": True}, 1 * 128 * 2),
        ("gemma4_unified_text", {**GEMMA4, "per_layer_config": None}, 4 * 64 * 2),  # no layer differs
    ],
)
def test_heads_that_a_file_names_otherwise(model_type: str, fields: Mapping[str, Any], nbytes: int) -> None:
    """Bytes of one token's keys in the last layer."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if model_type.startswith("gemma4") else {}
    found = from_config({**PLAIN, **kinds, **fields, "model_type": model_type}, name="m")
    (kv,) = (state for state in found.states if state.name == "kv")
    assert kv.roles[0].nbytes == nbytes


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("falcon_h1", MAMBA, "mamba_d_ssm: expected an integer"),
        (
            "kimi_linear",
            {"linear_attn_config": KDA, "head_dim": 72, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
            "head_dim: expected",
        ),
    ],
)
def test_sizes_that_only_the_models_own_class_knows_are_refused(model_type: str, fields: Mapping[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_config({**PLAIN, **fields, "model_type": model_type}, name="m")


@pytest.mark.parametrize(
    ("outer", "decoder"), [("fuyu", "persimmon"), ("hunyuan_vl", "hunyuan_vl_text"), ("paddleocr_vl", "paddleocr_vl_text")]
)
def test_a_file_of_a_multimodal_model_may_have_its_decoders_fields_at_the_top(outer: str, decoder: str) -> None:
    """As transformers saves some of them, with a section for images."""
    values = {**PLAIN, "head_dim": 48}
    files = ({**values, "model_type": outer, "vision_config": {"hidden_size": 7}}, {**values, "model_type": decoder})
    found, expected = (
        [(each.name, each.layers, per_layer(each)) for each in from_config(file, name="m").states] for file in files
    )
    assert found == expected


def test_a_published_file_may_leave_out_gemmas_head_dim() -> None:
    """Those of PaliGemma do."""
    text = {
        "model_type": "gemma",
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    (kv,) = from_config({"model_type": "paligemma", "text_config": text}, name="m").states
    assert per_layer(kv) == 2 * 256 * 2
