"""What two vLLM engines must agree on: a pair that differs is refused by name, and decode computes every request itself."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import vllm.config
from vllm.distributed.kv_transfer import get_kv_transfer_group

from disagg.integrations.shaping import VLLM, names
from disagg.integrations.vllm.identity import (
    Scales,
    _kv_scales,
    _options,
    _q_scaling,
    _tunes_temperature,
    attention_layer,
    head_counts,
    tensor_scales,
)
from tests.integrations.vllm.caches import Server
from tests.integrations.vllm.conftest import Start
from tests.integrations.vllm.kinds import gqa
from tests.integrations.vllm.requests import check_equal, hand_over, num_external, prompts

LENGTHS = (33, 64, 65, 200)
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def refusals(_: object) -> str:
    """In an engine's process: why its peers refuse it, or it them."""
    manager = get_kv_transfer_group().worker._manager
    return "; ".join(peer.problem for peer in manager.health().peers.values())


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "reason"),
    [
        pytest.param(
            "llama",
            {"kv_cache_dtype": "fp8_e5m2"},
            {"kv_cache_dtype": "fp8_e4m3"},
            ("tensor 'k': ", "float8_e4m3fn", "float8_e5m2", "numbers would be quantized twice"),
            id="two formats of FP8",
        ),
        pytest.param(
            "llama",
            {},
            {"hf_overrides": ROPE},
            ("model revision: ", "'rope.rope_theta=10000' at ", "'rope.rope_theta=500' at "),
            id="rotary embeddings of the command line",
        ),
        pytest.param(
            "mistral",
            {"hf_overrides": {"sliding_window": 96}},
            {"hf_overrides": {"sliding_window": 48}},
            ("model revision: ", "'windows=95@0-3' at ", "'windows=47@0-3' at "),
            id="windows",
        ),
        pytest.param(
            "llama4",
            {"override_generation_config": {"attn_temperature_tuning": True}},
            {"hf_overrides": {"attention_chunk_size": 64}, "block_size": 32},
            ("model revision: ", "'attention_chunk_size=128", "attn_temperature_tuning=true", "'attention_chunk_size=64"),
            id="chunks and the temperature of attention",
        ),
        pytest.param(
            "llama",
            {"model_impl": "transformers"},
            {},
            ("model revision: ", """'model_impl="transformers"'"""),
            id="another implementation",
        ),
    ],
)
def test_a_pair_that_differs_is_refused_by_name(
    start: Start, name: str, prefill: dict[str, Any], decode: dict[str, Any], reason: tuple[str, ...]
) -> None:
    """The answers are those of decode alone."""
    prefiller, decoder = start(name, **prefill), start(name, **decode)
    prefiller.wait_ready(), decoder.wait_ready()
    asked = prompts(LENGTHS, seed=61)
    expected = decoder.generate(asked, max_tokens=8)
    found = hand_over(prefiller, decoder, asked, max_tokens=8)
    assert num_external(found) == [0] * len(LENGTHS)
    check_equal(expected, found)
    assert decoder.counts["failed_loads"] == len(LENGTHS)
    said = f"{decoder.run(refusals)}; {prefiller.run(refusals)}"
    assert all(part in said for part in reason), said


@pytest.mark.parametrize(
    ("by_transformers", "given", "expected"),
    [
        (False, {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}}, ""),
        (True, {"rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}}, "0.1@16384"),
        (True, {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "0.1@None"),  # such a model fails at its first step
        (True, {"rope_parameters": {"rope_type": "default"}}, ""),
        (False, {"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 16384}}, "0.1@16384"),
        (False, {}, ""),
    ],
)
def test_the_scaling_of_q_is_the_one_that_vllm_reads(by_transformers: bool, given: dict[str, Any], expected: str) -> None:
    """Its own Ministral 3 ignores what the usual format has."""
    model: Any = SimpleNamespace(hf_text_config=SimpleNamespace(**given), using_transformers_backend=lambda: by_transformers)
    assert _q_scaling(model) == expected


K2 = "K2HorizonForCausalLM"


@pytest.mark.parametrize(("name", "quantization"), [(K2, "fp8"), (K2, None), ("LlamaForCausalLM", "fp8")])
def test_quantization_counts_where_it_orders_channels(name: str, quantization: str | None) -> None:
    """VLLM permutes what K2 Horizon's projections make of K when it loads them, unless they are quantized."""
    model = SimpleNamespace(
        architectures=[name],
        quantization=quantization,
        hf_text_config=SimpleNamespace(model_type="any"),
        using_transformers_backend=lambda: False,
    )
    found = _options(cast(Any, SimpleNamespace(model_config=model, lora_config=None)))
    assert found == ({"k_channels": "fp8"} if quantization and name == K2 else {})


@pytest.mark.parametrize(
    ("max_model_len", "given", "is_tuned"),
    [(32768, {}, False), (32769, {}, True), (65536, {"attn_temperature_tuning": False}, False), (8, {"top_k": 1}, False)],
)
def test_the_temperature_of_llama_4_is_the_one_that_vllm_uses(
    max_model_len: int, given: dict[str, Any], is_tuned: bool
) -> None:
    """Its multimodal class leaves the loaded configuration as it was."""
    model: Any = SimpleNamespace(
        hf_text_config=SimpleNamespace(model_type="llama4_text", attn_temperature_tuning=True),
        try_get_generation_config=dict,
        override_generation_config=given,
        max_model_len=max_model_len,
    )
    assert _tunes_temperature(model) is is_tuned
    model.hf_text_config.model_type = "llama"
    assert not _tunes_temperature(model)


def test_files_that_say_the_same_in_other_words(start: Start, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Decode's `config.json` has the older names of rotary embeddings, leaves defaults out, and was quantized by someone."""
    folder = model("llama")
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert rope == {"rope_theta": 10000.0, "rope_type": "default"}
    for key in ("attention_bias", "mlp_bias", "head_dim", "initializer_range", "pretraining_tp"):
        assert config.pop(key) is not None
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 1e4, "rope_scaling": None, "num_mtp_layers": 0}))
    prefill, decode = start("llama"), start(str(tmp_path))
    prefill.wait_ready(), decode.wait_ready()
    asked = prompts(LENGTHS, seed=62)
    expected = decode.generate(asked, max_tokens=8)
    found = hand_over(prefill, decode, asked, max_tokens=8)
    assert num_external(found) == [length - 1 for length in LENGTHS]
    check_equal(expected, found)


def test_numbers_of_kv_heads_of_a_configuration() -> None:
    blocks = [{"attention": {"n_heads_in_group": group, "no_op": group is None}} for group in (32, None, 8)]
    nas = {"num_attention_heads": 64, "num_key_value_heads": None, "block_configs": blocks}
    assert head_counts(nas) == {2, 8}
    assert head_counts({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 4}}) == {4}
    assert head_counts({"num_attention_heads": 8, "num_attention_groups": [2, 4]}) == {2, 4}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_scales_of_each_head_are_compared_by_the_heads_of_the_model(tp: int) -> None:
    """Whatever heads a rank has, also if that is one. Nobody converts with such scales."""
    layers, num_heads = gqa(range(2), 4, 64, dtype="fp8"), 4
    scales = torch.tensor([0.5, 0.25, 2.0, 4.0])
    server = Server(layers, model={"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": num_heads}, tp=tp)
    by_head = SimpleNamespace(quant_config=SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"}))
    owns: list[Any] = []

    def note(own: Any) -> list[Any]:
        owns.append(own)
        return [own] * tp

    for number, rank in enumerate(server.ranks):
        own = scales[number * num_heads // tp :][: max(1, num_heads // tp)]
        for name in server.layers:
            attention = attention_layer(rank.config, name)
            attention.quant_method, attention._k_scale, attention._v_scale = by_head, own, 8 * own
            assert tensor_scales(rank.config, name) is None
        _kv_scales(rank.config, server.groups, 2, num_heads, note)
    found = _kv_scales(server.ranks[0].config, server.groups, 2, num_heads, lambda _: owns)
    assert found == dict.fromkeys(range(2), (0.5, 0.25, 2.0, 4.0, 4.0, 2.0, 16.0, 32.0))


NEWER = {
    *("watchdog_config", "simple_cpu_offload_num_blocks", "trtllm_ragged_backend", "indexer_tp_shard_min_rows"),
    *("minimax_m3_indexer_cp", "xpress_topc", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
    *("draft_lm_head_quantization", "disable_lookahead_block_hashes"),
} if vllm.__version_tuple__ < (0, 33) else set()  # fmt: skip
"""Options in the table that this version of vLLM does not have yet."""


def test_new_scales_of_each_head_are_noticed_if_the_largest_stays() -> None:
    """VLLM's numbers are the largest. A reload sets new ones, also of the same scales, and copies into the same tensors."""
    method = SimpleNamespace(quant_config=SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"}))
    by_head, plain = (
        SimpleNamespace(quant_method=given, kv_cache_dtype="fp8", _k_scale=torch.ones(2), _v_scale=torch.ones(2))
        for given in (method, None)
    )

    def load(layer: SimpleNamespace, k: list[float]) -> None:
        layer._k_scale.data.copy_(torch.tensor(k))
        layer._k_scale_float, layer._v_scale_float = layer._k_scale.max().item(), layer._v_scale.max().item()

    load(by_head, [1, 0.5])
    load(plain, [1, 1])
    layers = {"a": by_head, "b": plain}
    scales = Scales(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)))
    load(by_head, [1, 0.5])
    assert not scales.have_changed()
    load(by_head, [1, 0.25])
    assert scales.have_changed()
    load(by_head, [4, 3])
    assert scales.have_changed()
    load(by_head, [1, 0.5])
    assert not scales.have_changed()
    load(plain, [1, 1])
    assert not scales.have_changed()
    plain._v_scale_float = 0.5
    assert scales.have_changed()
    plain._v_scale_float = 1.0
    layers["c"] = SimpleNamespace(**vars(plain) | {"kv_cache_dtype": "bfloat16"})
    assert not scales.have_changed(), "its cache has no scales"
    del layers["b"]
    assert scales.have_changed()


@pytest.mark.parametrize("name", VLLM)
def test_every_option_is_in_the_table(name: str) -> None:
    """A new option of vLLM must get a row: it is compared, refused, or does not matter."""
    listed = Counter(names(VLLM[name]))
    options = {field.name for field in dataclasses.fields(getattr(vllm.config, name))}
    assert options - listed.keys() == set(), "in no row"
    assert listed.keys() - options <= NEWER, "unknown to vLLM"
    assert max(listed.values()) == 1
