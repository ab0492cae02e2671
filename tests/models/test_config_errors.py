"""Configs that are wrong or not supported, and unreadable files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.models import load_model
from tests.support.configs import (
    DSA,
    FALCON,
    GEMMA4,
    GPT_OSS,
    JAMBA,
    KIMI,
    LLAMA,
    M3,
    MLA,
    MPT,
    NEMOTRON,
    QWEN3_5,
    SMALL,
    V4,
    spec_of,
    without,
)

GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 64}


class TestErrors:
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({**LLAMA, "model_type": "bert"}, "'bert' is not supported: an encoder"),
            ({**LLAMA, "model_type": "lama"}, "similar types: llama"),
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
            ({**LLAMA, "v_head_dim": 16}, "v_head_dim: expected the size of K's heads, 8"),
            ({**LLAMA, "cla_share_factor": 2}, "cla_share_factor: layers that share another's KV"),
            ({**LLAMA, "kv_sharing_modes": ["own", "reuse"] * 2}, "kv_sharing_modes"),
            ({**LLAMA, "block_configs": [{"attention": None}]}, "block_configs: layers of different sizes"),
            ({**LLAMA, "num_key_value_heads_per_layer": [4, 2, 4, 2]}, "num_key_value_heads_per_layer"),
            ({**LLAMA, "per_layer_config": {"1": {"num_key_value_heads": 2}}}, "per_layer_config: layers of different sizes"),
            ({**GEMMA4, "per_layer_config": {"3": {"num_key_value_heads": 3}}}, "num_key_value_heads: expected a divisor"),
            ({**GEMMA4, "per_layer_config": {"one": {}}}, "per_layer_config.one: expected an object under the number"),
            ({**GEMMA4, "per_layer_config": {"1": 2}}, "per_layer_config.1: expected an object under the number"),
            ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
            ({**GEMMA4, "num_kv_shared_layers": 4}, "num_kv_shared_layers: expected an integer from 0 to 3"),
            ({**LLAMA, "interleaved_sliding_window": 64}, "interleaved_sliding_window: sliding-window attention"),
            ({**LLAMA, "window_size": 64}, "window_size"),
            ({**LLAMA, "num_sink_tokens": 4}, "num_sink_tokens: sink tokens"),
            ({**LLAMA, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
            ({**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantization_config.kv_cache_scheme"),
            ({**LLAMA, "quantization_config": "fp8"}, "quantization_config: expected an object"),
            ({**without(QWEN3_5, "num_key_value_heads")}, "num_key_value_heads: expected an integer"),
            (
                {**GEMMA4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
                "num_kv_shared_layers: expected a layer of each kind",
            ),
            ({**FALCON, "mamba_n_groups": 4}, "mamba_n_groups: expected a divisor of mamba_n_heads=6"),
            ({**QWEN3_5, "linear_num_key_heads": 3}, "linear_num_value_heads: expected a multiple of linear_num_key_heads=3"),
            ({"model_type": "internvl", "llm_config": LLAMA}, "text_config: expected the decoder of a 'internvl' model"),
            ({**LLAMA, "quantization_config": {"kv_cache_quant_algo": "FP8"}}, "quantization_config.kv_cache_quant_algo"),
            ({**LLAMA, "quantization_config": {"export": {"kv_cache_group": ["*k_proj"]}}}, "export.kv_cache_group"),
            ({**LLAMA, "compression_config": {"kv_cache_scheme": {"num_bits": 8}}}, "compression_config.kv_cache_scheme"),
            ({**LLAMA, "n_kv_heads": 4}, "n_kv_heads: a KV cache of another form"),
            ({**LLAMA, "multi_query_group_num": 4}, "multi_query_group_num: another name for KV heads"),
            ({**LLAMA, "kv_sharing_map": [0, 0, 2, 2]}, "kv_sharing_map"),
            ({**LLAMA, "cross_layer_attention": True}, "cross_layer_attention: cross-attention, or KV that layers share"),
            ({**LLAMA, "shared_attention_layers": [1]}, "shared_attention_layers: layers that share another's KV"),
            ({**LLAMA, "attention_sink_size": 4}, "attention_sink_size: sink tokens"),
            ({**LLAMA, "moba_chunk_size": 4096}, "moba_chunk_size: index keys"),
            ({**LLAMA, "use_short_conv": True}, "use_short_conv: a convolution state"),
            ({**LLAMA, "mamba_config": {"d_state": 16}}, "mamba_config: a recurrent state"),
            ({**MLA, "use_mla": False}, "use_mla: expected true"),
            ({**MPT, "attn_config": {"sliding_window_size": 64}}, "attn_config.sliding_window_size"),
            ({**GEMMA2, "sliding_window_size": 32}, "sliding_window_size: expected 64, as sliding_window"),
            ({**MPT, "attn_config": {"kv_n_heads": 3}}, "num_key_value_heads: expected a divisor"),
            ({**MPT, "block_overrides": {"order": []}}, "block_overrides: layers of different sizes"),
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

    @pytest.mark.parametrize(
        ("config", "changes"),
        [
            (LLAMA, {"layer_types": ["full_attention"] * 4, "sliding_window": 128, "sliding_window_pattern": 4}),
            (LLAMA, {"cla_share_factor": 1}),
            (LLAMA, {"v_head_dim": 8}),
            (MLA, {"v_head_dim": 128}),
            (DSA, {"index_topk_freq": 1}),
            ({**without(M3, "sparse_attention_config"), "layer_types": ["full_attention"] * 4}, {"index_head_dim": 128}),
            ({**LLAMA, "model_type": "lfm2"}, {"conv_L_cache": 3}),
            (GEMMA4, {"use_bidirectional_attention": "vision"}),
            (LLAMA, {"use_cache": True, "cache_implementation": "static", "image_token_index": 7, "moe_latent_size": 64}),
            (LLAMA, {"quantization_config": {"kv_cache_quant_algo": "none", "kv_cache_group": []}}),
            ({**LLAMA, "model_type": "gpt_bigcode", "n_layer": 2, "n_head": 4, "n_embd": 8}, {"pre_allocate_kv_cache": True}),
            (LLAMA, {"ignore_index": -100}),  # of the loss, as Kimi-K3's and LLaVA's files have it
            (GEMMA2, {"sliding_window_size": 64}),  # as in published files, beside sliding_window
            ({**LLAMA, "model_type": "minimax_m2", "head_dim": 8}, {"layernorm_linear_attention_beta": 1.0}),
            (FALCON, {"ssm_multipliers": [1.0], "mamba_chunk_size": 256}),
            (GEMMA4, {"per_layer_config": {"03": {"head_dim": 32}}}),
        ],
    )
    def test_fields_that_add_no_state_are_accepted(self, config: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        assert spec_of({**config, **changes}).nbytes(1000) == spec_of(config).nbytes(1000)

    def test_a_file_that_quantizes_kv_needs_the_caller_to_name_the_type(self) -> None:
        quantized = {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
        assert spec_of(quantized, kv_dtype="float8_e4m3fn").nbytes(10) == spec_of(LLAMA).nbytes(10) // 2
        text = {"model_type": "llava", "text_config": LLAMA, "quantization_config": quantized["quantization_config"]}
        with pytest.raises(ConfigError, match=r"quantization_config\.kv_cache_scheme"):
            spec_of(text)

    @pytest.mark.parametrize("config", [[], None, "llama", 3])
    def test_config_is_not_an_object(self, config: Any) -> None:
        with pytest.raises(ConfigError, match="JSON object"):
            spec_of(config)

    def test_unreadable_files(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConfigError, match="expected a JSON file"):
            load_model(str(tmp_path))
        (tmp_path / "config.json").write_text("[" * 100_000)
        with pytest.raises(ConfigError, match="expected a JSON file"):
            load_model(str(tmp_path))
        with pytest.raises(ConfigError):
            load_model("x" * 5000)

    @pytest.mark.parametrize("name", [None, {}, Path("config.json")])
    def test_a_name_is_text(self, name: Any) -> None:
        with pytest.raises(ConfigError, match=f"model: expected a name or a path as a str, found {type(name).__name__}"):
            load_model(name)

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
