"""Model descriptions: sizes in closed form, transformers' own configurations, and configs that are wrong or not supported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.models import PRESETS, ModelSpec, first_layers, from_config, load_model
from disagg.state.declare import State

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from examples.transformers_pd.architectures import ARCHITECTURES, Architecture  # noqa: E402
from examples.transformers_pd.components import ComponentSpec  # noqa: E402

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GPT_OSS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "sliding_window": 16,
}
MLA: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
}
DSA: Mapping[str, Any] = {**MLA, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
V4: Mapping[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_topk": 512,
    "index_head_dim": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_nextn_predict_layers": 1,
}
NEMOTRON: Mapping[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*ME*M",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 24,
    "conv_kernel": 4,
}
KIMI: Mapping[str, Any] = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}
QWEN3_5: Mapping[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
}
FALCON: Mapping[str, Any] = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
}
JAMBA: Mapping[str, Any] = {
    "model_type": "jamba",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_expand": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
}
M3: Mapping[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 16,
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_disable_index_value": [0, 1, 1, 1],
    },
}
SMALL = (LLAMA, GPT_OSS, MLA, DSA, V4, NEMOTRON, KIMI, QWEN3_5, FALCON, JAMBA, M3)


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def spec_of(config: Mapping[str, Any], **options: Any) -> ModelSpec:
    return from_config(config, name="m", **options)


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
            ("jamba-mini", {"kv": (4, 2 * 8 * 128 * 2), "ssm": (28, 8192 * 3 * 2 + 8192 * 16 * 4)}),
        ],
    )
    def test_presets_have_the_published_sizes(self, name: str, expected: dict[str, tuple[int, int]]) -> None:
        spec = PRESETS[name]
        assert {s.name: (len(s.layers), per_layer(s)) for s in spec.states} == expected
        assert load_model(name).nbytes(1000) == spec.nbytes(1000)

    def test_names_of_presets(self) -> None:
        hybrids = {"qwen3-next-80b", "qwen3.5-397b-a17b", "kimi-linear-48b", "nemotron-h-8b", "falcon-h1-7b", "jamba-mini"}
        others = {"llama-3-8b", "llama-3-70b", "qwen3-32b", "gpt-oss-120b", "deepseek-v3.2", "tiny"}
        assert set(PRESETS) == hybrids | others
        assert len(PRESETS) == len(hybrids | others)
        assert {name for name, spec in PRESETS.items() if any(s.rows == "slot" for s in spec.states)} == hybrids

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


# -- against transformers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf_config() -> Callable[[Architecture], dict[str, Any]]:
    """A small model's `config.json`, as transformers would write it."""
    transformers = pytest.importorskip("transformers")

    def build(architecture: Architecture) -> dict[str, Any]:
        config = transformers.AutoConfig.for_model(**architecture.config)
        return dict(json.loads(config.to_json_string(use_diff=False)))

    return build


def declared(component: ComponentSpec) -> tuple[int, int | None]:
    """Elements of one token or slot in one layer, and the first of 100 tokens that is kept."""
    elements = 0
    for tensor in component.tensors:
        count = 1
        for axis, size in zip(tensor.axes, tensor.sizes, strict=True):
            count *= 1 if axis == "token" else size
        elements += count
    return elements, component.tokens(100)[0] if component.paged else None


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "deepseek-v4"])  # see the next test
def test_transformers_configs_give_what_the_example_declares(
    name: str, hf_config: Callable[[Architecture], dict[str, Any]]
) -> None:
    """The example's own tests check its declarations against the caches of the real models."""
    architecture = ARCHITECTURES[name]
    spec = spec_of(hf_config(architecture), kv_dtype="bfloat16")
    assert spec.num_layers == architecture.num_layers
    assert {s.name: s.layers for s in spec.states} == {c.name: c.layers for c in architecture.components}
    for component in architecture.components:
        state = spec.state(component.name)
        elements, first = declared(component)
        found = 0
        for role in state.roles:
            if role.name != "scale":  # FP8 index keys have scales; those of transformers are not quantised
                count = 1
                for inner in role.inner.values():
                    count *= inner.size
                found += count
        assert found == elements
        assert (state.rows == "pages") == component.paged
        if first is not None:
            assert state.needed(100) == (first, 100)
        for tensor in component.tensors:
            if tensor.split is None:
                continue
            role = state.role(tensor.role)
            axis = role.inner[tensor.split]
            assert axis.size == sum(block.size for block in tensor.blocks)
            if tensor.role != "temporal":
                continue
            sizes = dict(zip(tensor.axes, tensor.sizes, strict=True))
            assert sorted(inner.size for inner in role.inner.values()) == sorted(sizes.values())
            assert role.dtype == (tensor.dtype or "bfloat16")


def test_deepseek_v4_covers_the_layers_that_transformers_caches(
    hf_config: Callable[[Architecture], dict[str, Any]],
) -> None:
    """The states differ: servers keep compressed entries and open rings in separate pools, transformers in one cache."""
    architecture = ARCHITECTURES["deepseek-v4"]
    spec = from_config(hf_config(architecture), name="deepseek-v4")
    cached = {layer for component in architecture.components for layer in component.layers}
    assert {layer for state in spec.states for layer in state.layers} == cached


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if any(c.name == "ssm" for c in a.components)])
def test_blocks_of_convolutions_are_split_as_the_example_splits_them(
    name: str, hf_config: Callable[[Architecture], dict[str, Any]]
) -> None:
    architecture = ARCHITECTURES[name]
    ssm = next(c for c in architecture.components if c.name == "ssm")
    conv = next((t for t in ssm.tensors if t.role == "conv"), None)
    if conv is None:
        return
    role = spec_of(hf_config(architecture)).state("ssm").role("conv")
    for rank in range(2):
        owned: list[int] = []
        start = 0
        for block in conv.blocks:
            first = rank * block.num_units // 2
            last = max(first + 1, (rank + 1) * block.num_units // 2)
            owned += range(start + first * block.unit_size, start + last * block.unit_size)
            start += block.size
        found = role.inner["channel"].owned(Topology(tp=2, tp_rank=rank)).within(start)
        assert np.flatnonzero(found.locate(np.arange(start)) >= 0).tolist() == sorted(set(owned))


# -- kinds, options ----------------------------------------------------------------------------------------------------


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


# -- errors ------------------------------------------------------------------------------------------------------------


class TestErrors:
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({**LLAMA, "model_type": "gpt2"}, "gpt2"),
            (without(LLAMA, "model_type"), "model_type None"),
            ({**LLAMA, "model_type": ["llama"]}, "llama"),
            ({**LLAMA, "model_type": "t5", "text_config": dict(LLAMA)}, "t5"),
            ({**LLAMA, "text_config": dict(LLAMA)}, "text_config"),
            ({**LLAMA, "attention_chunk_size": 8192}, "attention_chunk_size: chunked attention"),
            ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder: an encoder"),
            ({**LLAMA, "cross_attention_layers": [1]}, "cross_attention_layers: cross-attention"),
            ({**LLAMA, "add_cross_attention": True}, "add_cross_attention"),
            ({**LLAMA, "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
            ({**LLAMA, "sliding_window": 128}, "sliding_window: sliding-window attention"),
            ({**LLAMA, "mamba_d_state": 16}, "mamba_d_state: a recurrent state"),
            ({**MLA, "index_topk": 2048}, "index_topk: index keys"),
            ({**DSA, "index_topk_freq": 4}, "index_topk_freq"),
            ({**LLAMA, "layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
            ({**GPT_OSS, "layer_types": ["sliding_attention", "linear_attention"] * 2}, "linear_attention"),
            ({**NEMOTRON, "hybrid_override_pattern": "M-*X"}, "hybrid_override_pattern"),
            (without(NEMOTRON, "hybrid_override_pattern"), "num_hidden_layers"),
            ({**NEMOTRON, "num_hidden_layers": 8}, "num_hidden_layers: expected 7"),
            ({**LLAMA, "layer_types": ["full_attention"] * 3}, "num_hidden_layers"),
            ({**JAMBA, "layers_block_type": ["attention"] * 4}, "layers_block_type"),
            ({**V4, "compress_ratios": [0, 4, 16, 4]}, "compress_ratios"),
            ({**V4, "compress_ratios": [0, 4]}, "compress_ratios"),
            ({**KIMI, "linear_attn_config": {**KIMI["linear_attn_config"], "kda_layers": [1, 1]}}, "linear_attn_config"),
            ({**KIMI, "linear_attn_config": None}, "linear_attn_config"),
            ({**KIMI, "linear_attn_config": [1]}, "linear_attn_config: expected an object"),
            ({**FALCON, "mamba_d_head": 17}, "mamba_d_head"),
            ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
            ({**LLAMA, "hidden_size": 65}, "hidden_size: expected a multiple"),
            ({**LLAMA, "dtype": "auto"}, "dtype"),
            ({**LLAMA, "dtype": 16}, "dtype"),
            ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
            ({"model_type": "nemotron_h", "hybrid_override_pattern": "-E-"}, "expected a layer with state"),
            ({"model_type": "qwen3_5", "text_config": "text"}, "text_config"),
        ],
    )
    def test_name_the_field_and_the_model(self, config: Mapping[str, Any], named: str) -> None:
        with pytest.raises(ConfigError) as raised:
            spec_of(config)
        assert named in str(raised.value)
        assert "'m'" in str(raised.value)

    @pytest.mark.parametrize("config", [[], None, "llama", 3])
    def test_config_is_not_an_object(self, config: Any) -> None:
        with pytest.raises(ConfigError, match="JSON object"):
            spec_of(config)

    def test_unknown_names_and_unreadable_files(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="llama-3-8b"):
            load_model("llama-9")
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="expected a JSON file"):
            load_model(str(tmp_path))
        (tmp_path / "config.json").write_text("[" * 100_000)
        with pytest.raises(ConfigError, match="expected a JSON file"):
            load_model(str(tmp_path))
        with pytest.raises(ConfigError):
            load_model("x" * 5000)

    def test_a_file_and_its_folder_give_the_same_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(dict(LLAMA)))
        assert load_model(str(tmp_path)).nbytes(7) == load_model(str(tmp_path / "config.json")).nbytes(7)
        assert load_model(str(tmp_path), num_layers=1).num_layers == 1
        with pytest.raises(ConfigError, match="layers"):
            load_model(str(tmp_path), num_layers=5)

    @pytest.mark.parametrize("config", SMALL, ids=lambda c: str(c["model_type"]))
    @pytest.mark.parametrize("wrong", [None, -1, 0, 1.5, "4", True, 2**40, [], {}, float("nan")], ids=repr)
    def test_every_number_is_checked(self, config: Mapping[str, Any], wrong: object) -> None:
        """The error for a wrong number names its field. Some fields may be absent, and some may be 0."""
        may_be_absent = {"num_key_value_heads", "num_nextn_predict_layers", "mtp_num_hidden_layers", "mamba_d_head"}
        may_be_absent |= {"deepseek_v4": {"qk_rope_head_dim"}, "falcon_h1": {"head_dim"}}.get(config["model_type"], set())
        may_be_zero = {"attn_layer_offset", "num_nextn_predict_layers", "mtp_num_hidden_layers"}
        for key, value in config.items():
            if not isinstance(value, int) or (wrong is None and key in may_be_absent) or (wrong == 0 and key in may_be_zero):
                continue
            with pytest.raises(ConfigError) as raised:
                spec_of({**config, key: wrong})
            assert key in str(raised.value) or (key, wrong) == ("mamba_d_ssm", None)

    @given(
        config=st.sampled_from(SMALL),
        changes=st.dictionaries(
            st.sampled_from(sorted({key for config in SMALL for key in config})),
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.text(max_size=8)
            | st.lists(st.sampled_from(["full_attention", "linear_attention", 0, 4, 128, None]), max_size=6)
            | st.dictionaries(st.sampled_from(["head_dim", "kda_layers"]), st.integers(), max_size=2),
            max_size=4,
        ),
        dropped=st.sets(st.integers(0, 20), max_size=3),
        draft=st.booleans(),
    )
    def test_hostile_configs_give_a_model_or_a_config_error(
        self, config: Mapping[str, Any], changes: dict[str, Any], dropped: set[int], draft: bool
    ) -> None:
        hostile = {key: value for i, (key, value) in enumerate({**config, **changes}.items()) if i not in dropped}
        try:
            spec = spec_of(hostile, draft_layers=draft)
        except ConfigError:
            return
        assert spec.states
        assert all(0 <= layer < spec.num_layers or state.optional for state in spec.states for layer in state.layers)
        assert spec.nbytes(100) > 0 or spec.nbytes(10_000) > 0 or all(s.window == 0 for s in spec.states)
