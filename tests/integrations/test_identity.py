"""The identity of a model, and the settings of the connectors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg import ConfigError, ModelId
from disagg.integrations.description import RopeRules
from disagg.integrations.identity import (
    Applied,
    Conventions,
    Source,
    component_name,
    has_windows,
    model_id,
    read_config,
)
from disagg.integrations.options import Options
from disagg.layout.agreement import differing_words

CONVENTIONS = Conventions(keys="rotated", kv_heads="checkpoint", first_position=0)
ROPE = RopeRules(long_rope="short")
APPLIED = Applied(windows={}, rope=ROPE)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 1e4},
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "dtype": "float32",
}


class Loaded(SimpleNamespace):
    """A configuration as a server has loaded it."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def load(config: Mapping[str, Any], **more: Any) -> Loaded:
    """What a server makes of a `config.json`, with values that the file leaves out."""
    parts = {key: load(value) for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)}
    return Loaded(**{**more, **config, **parts})


def identity(
    config: Mapping[str, Any],
    *,
    overridden: Mapping[str, Any] | None = None,
    loaded: Loaded | None = None,
    applied: Applied = APPLIED,
    conventions: Conventions = CONVENTIONS,
    name: str | None = None,
) -> ModelId:
    loaded = load(config) if loaded is None else loaded
    source = Source(config=config, overridden=overridden or {}, loaded=loaded, text=getattr(loaded, "text_config", loaded))
    return model_id(source, applied, conventions, name=name)


def test_identity_covers_what_describes_the_model_and_nothing_else() -> None:
    same = {**LLAMA, "dtype": "float32", "torch_dtype": "bfloat16", "transformers_version": "5.0", "eos_token_id": [1, 2]}
    same |= {
        "quantization_config": {"bits": 4},
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.5,
        "attention_dropout": 1,
    }
    assert identity(same) == identity(dict(reversed(LLAMA.items()))) == identity(LLAMA)
    others = [
        {**LLAMA, "hidden_size": 128},
        {**LLAMA, "rope_parameters": {"rope_theta": 1e6}},
        {**LLAMA, "model_type": "qwen3"},
        {**LLAMA, "architectures": ["Other"]},
        {**LLAMA, "unheard_of": None},
    ]
    nested = {**LLAMA, "text_config": {"hidden_size": 1, "pad_token_id": 3}}
    assert len({identity(each) for each in [LLAMA, nested, *others]}) == 7
    assert identity(nested) == identity({**LLAMA, "text_config": {"hidden_size": 1}})


def test_identity_is_the_same_in_every_process() -> None:
    """Golden, so that servers of different versions of this library agree."""
    words = (
        "windows=none rope.rope_theta=10000 keys=rotated kv_heads=checkpoint first_position=0 hidden_size=64 "
        'layers.kv="0-1" model_type="llama" num_attention_heads=4 num_hidden_layers=2'
    )
    assert identity(LLAMA) == ModelId("llama", words)


def differences(one: ModelId, other: ModelId) -> tuple[str, str]:
    """What peers with these identities say."""
    return differing_words(one.revision, other.revision)


def test_rotary_embeddings_are_those_that_the_server_has_loaded() -> None:
    """Before version 5 of transformers their fields were others, and a server may ignore an override of a field."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    new = load({**LLAMA, "rope_parameters": {**yarn, "rope_theta": 1e6}}, max_position_embeddings=128)
    file = {key: value for key, value in LLAMA.items() if key != "rope_parameters"}
    old_file = {**file, "rope_theta": 1000000, "rope_scaling": {**yarn, "type": "yarn"}, "max_position_embeddings": 128}
    old = load(old_file)
    assert identity(old_file, loaded=old) == identity({**LLAMA, "rope_parameters": {}}, loaded=new)
    assert differences(identity(LLAMA), identity(LLAMA, loaded=new)) == (
        "rope.rope_theta=10000",
        'rope.factor=2 rope.original_max_position_embeddings=64 rope.rope_theta=1000000 rope.type="yarn"',
    )
    ignored = load(LLAMA, rope_theta=1e6)
    assert identity(LLAMA, overridden={"rope_theta": 1e6}, loaded=ignored) == identity(LLAMA)


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "linear", "factor": 2}, False),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64}, False),
        ({"rope_type": "yarn", "factor": 2}, True),
        ({"rope_type": "dynamic", "factor": 2}, True),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, True),
    ],
    ids=str,
)
def test_the_maximum_length_counts_where_an_embedding_is_made_from_it(rope: dict[str, Any], counts: bool) -> None:
    config = {**LLAMA, "rope_parameters": rope}
    one, other = (identity({**config, "max_position_embeddings": length}) for length in (128, 256))
    assert (one != other) is counts


def test_factors_of_a_long_rope_are_compared_where_there_is_one() -> None:
    long_rope = {**LLAMA, "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}
    by_batch = replace(APPLIED, rope=replace(ROPE, long_rope="by_batch"))
    assert identity(LLAMA) == identity(LLAMA, applied=by_batch)
    found = differences(identity(long_rope), identity(long_rope, applied=by_batch))
    assert found == ('rope.factors="short"', 'rope.factors="by_batch"')


def test_a_yarn_without_a_factor_is_no_scaling() -> None:
    """SGLang names each rotary embedding of its DeepSeek classes so, also GLM-4.7-Flash's."""

    def found(**given: Any) -> ModelId:
        config = {**LLAMA, "rope_parameters": {"rope_theta": 1e4, **given}}
        return identity(config, loaded=load(config, max_position_embeddings=128))

    plain = found(rope_type="default")
    assert found(rope_type="deepseek_yarn") == found(rope_type="yarn", factor=1.0, mscale=1.0, beta_fast=32) == plain
    assert found(rope_type="yarn", factor=2.0) != plain
    assert found(rope_type="yarn", factor=1.0, attention_factor=0.5) != plain


def test_loaded_defaults_of_other_parts_than_the_text_do_not_count() -> None:
    """VLLM's class of Kimi-K2.5's vision part has a default that SGLang's lacks."""
    file = {"model_type": "kimi_k25", "text_config": LLAMA, "vision_config": {"depth": 2}}
    loaded = [load({**file, "text_config": {**LLAMA, "hidden_act": "silu"}}) for _ in range(2)]
    loaded[0].vision_config.hidden_act = "gelu"
    with_default, without = (identity(file, loaded=each) for each in loaded)
    assert with_default == without
    assert 'text_config.hidden_act="silu"' in without.revision.split()


def test_that_every_layer_has_experts_is_no_difference() -> None:
    """SGLang's GLM-4.7-Flash sets what other configurations leave out."""
    said, unsaid, other = (
        identity(LLAMA, loaded=load(LLAMA, **more)) for more in ({"moe_layer_freq": 1}, {}, {"moe_layer_freq": 2})
    )
    assert said == unsaid != other


def test_by_what_each_server_scales_a_yarns_keys_is_compared() -> None:
    """VLLM takes `attention_factor`, SGLang multiplies the usual factor by `attn_factor`."""

    def words(**given: float) -> tuple[ModelId, ModelId]:
        rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, **given}
        config = {**LLAMA, "rope_parameters": rope}
        return identity(config), identity(config, applied=replace(APPLIED, rope=replace(ROPE, yarn_factor="attn_factor")))

    usual = words()
    assert usual[0] == usual[1]
    assert words(attention_factor=0.1 * math.log(8.0) + 1) == words(attn_factor=1.0) == usual
    read = 'rope.scaled_by="attention_factor"', 'rope.scaled_by="attn_factor"'
    assert differences(*words(attention_factor=1.0)) == differences(*words(attn_factor=0.5)) == read
    assert len({words(attention_factor=each) for each in (0.5, 1.0, 2.0)} | {usual}) == 4
    by_quotient = {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert words(attention_factor=1.0, **by_quotient) == words(**by_quotient)
    assert differences(*words(attention_factor=0.1 * math.log(8.0) + 1, **by_quotient)) == read


def test_with_what_each_server_compares_the_length_of_a_dynamic_embedding_is_compared() -> None:
    """VLLM with the trained length, so its base stays; SGLang with the scaled one."""
    scaled = replace(APPLIED, rope=replace(ROPE, dynamic_length="scaled"))

    def words(**given: Any) -> tuple[ModelId, ModelId]:
        config = {**LLAMA, "rope_parameters": given}
        return identity(config), identity(config, applied=scaled)

    assert differences(*words(rope_type="dynamic", factor=6.0)) == ('rope.length="trained"', 'rope.length="scaled"')
    for given in ({"rope_type": "dynamic", "alpha": 1000.0}, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}):
        one, other = words(**given)
        assert one == other


GROUPED, PLAIN = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4}
R2: dict[str, Any] = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"r2": {}}}}


@pytest.mark.parametrize(
    ("model", "quantization", "expected"),
    [
        (PLAIN, {"quant_method": "gptq"}, ""),
        (PLAIN, {"quant_method": "compressed-tensors"}, ""),
        (GROUPED, AWQ, ""),
        (PLAIN, AWQ, 'quantization="awq"'),
        (GROUPED | {"kv_lora_rank": 8}, AWQ, 'quantization="awq"'),
        (PLAIN, {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4_AWQ"}}, 'quantization="awq"'),
        (GROUPED, R2, 'transform_config="#'),
    ],
    ids=str,
)
def test_quantized_weights_count_if_they_change_keys_or_values(
    model: dict[str, Any], quantization: dict[str, Any], expected: str
) -> None:
    """Rotations and scales of V are undone in the next layer, which the other server's does not do."""
    config = {**LLAMA, **model}
    plain, quantized = identity(config), identity({**config, "quantization_config": quantization})
    assert (plain == quantized) is (not expected)
    if expected:
        before, after = differences(plain, quantized)
        assert before == ""
        assert after.startswith(expected)
        assert expected in identity({**config, "text_config": {"quantization_config": quantization}}).revision


def test_the_kinds_of_layers_have_one_form() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = {**{key: value for key, value in GEMMA.items() if key != "sliding_window_pattern"}, "layer_types": kinds}
    assert identity(GEMMA) == identity(listed)
    other = {**GEMMA, "sliding_window_pattern": 4}
    assert differences(identity(GEMMA), identity(other)) == (
        'layers.kv="1,3" layers.window="0,2"',
        'layers.kv="3" layers.window="0-2"',
    )
    unknown = {**GEMMA, "model_type": "unheard-of"}
    assert identity(unknown) != identity({**unknown, "sliding_window_pattern": 4})


def test_a_default_may_be_left_out() -> None:
    loaded = load(LLAMA, attention_bias=False, rms_norm_eps=1e-5)
    assert identity({**LLAMA, "attention_bias": False}, loaded=loaded) == identity(LLAMA, loaded=loaded)
    assert identity({**LLAMA, "attention_bias": True}) != identity(LLAMA, loaded=loaded)


def test_what_the_command_line_sets_is_named_with_both_values() -> None:
    set_there = identity(LLAMA, overridden={"hidden_size": 64}, loaded=load(LLAMA))
    assert set_there == identity(LLAMA)
    vision = {**LLAMA, "vision_config": {"depth": 2, "dim": 3}}
    override = {"vision_config": {"depth": 4}, "hidden_size": 32}
    loaded = load({**vision, "hidden_size": 32, "vision_config": {"depth": 4, "dim": 3}})
    found = identity(vision, overridden=override, loaded=loaded)
    assert differences(identity(vision), found) == (
        "hidden_size=64 vision_config.depth=2",
        "hidden_size=32 vision_config.depth=4",
    )


def test_windows_and_scales_are_named_by_layer() -> None:
    windowed = replace(APPLIED, windows={0: 63, 1: 63, 2: 63, 5: 63, 3: 127})
    assert differences(identity(LLAMA), identity(LLAMA, applied=windowed)) == ("windows=none", "windows=63@0-2,5;127@3")
    ones = replace(APPLIED, kv_scales={0: (1.0, 1.0)})
    others = replace(APPLIED, kv_scales={0: (1.0, 0.5)})
    assert differences(identity(LLAMA), identity(LLAMA, applied=ones)) == ("", "kv_scales=1")
    assert differences(identity(LLAMA, applied=ones), identity(LLAMA, applied=others))[0] == "kv_scales=1"


def test_the_setting_replaces_the_description_and_nothing_else() -> None:
    """Two checkpoints whose files differ, for example one of them in another format."""
    one = identity(LLAMA, name="mine")
    assert one == identity({"model_type": "gguf", "rms_norm_eps": 1}, loaded=load(LLAMA), name="mine")
    assert one.name == "mine"
    windowed = replace(APPLIED, windows={0: 63})
    set_there = identity(LLAMA, overridden={"hidden_size": 1}, loaded=load({**LLAMA, "hidden_size": 1}), name="mine")
    for each, word in ((identity(LLAMA, applied=windowed, name="mine"), "windows=63@0"), (set_there, "hidden_size=1")):
        assert differences(one, each)[1] == word


@pytest.mark.parametrize(("num_fields", "num_words"), [(10, 70), (200, 16), (3000, 6)])
def test_a_long_description_fits_a_message(num_fields: int, num_words: int) -> None:
    """Objects in it are given by their digests, then all of it."""
    parts = {f"part{number}": {f"field{i}": i for i in range(num_fields)} for number in range(6)}
    many = {f"field{i}": i for i in range(num_fields)} if num_fields == 3000 else {}
    found = identity({**LLAMA, **parts, **many})
    assert len(found.revision.split()) == num_words
    changed = {**parts, "part3": {**parts["part3"], "field7": -1}}
    assert found != identity({**LLAMA, **changed, **many})


def test_servers_with_other_conventions_refuse_each_other() -> None:
    """The identities differ, and peers that differ in it name both (`tests/manager/test_peers.py`)."""
    others: list[dict[str, Any]] = [{"keys": "plain"}, {"kv_heads": "other"}, {"first_position": 1}]
    found = [identity(LLAMA, conventions=replace(CONVENTIONS, **each)).revision for each in others]
    for each, revision in zip(others, found, strict=True):
        assert all(f"{name}={value}" in revision for name, value in each.items())
    assert len({identity(LLAMA).revision, *found}) == 4


def test_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_config(file) == read_config(tmp_path) == LLAMA
    for text in ("[1]", "no JSON"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            read_config(tmp_path)
    with pytest.raises(ConfigError, match="expected a config"):
        read_config(tmp_path / "missing")


def test_which_models_have_windows() -> None:
    assert has_windows(GEMMA)
    assert not has_windows({**GEMMA, "sliding_window_pattern": 1})
    assert not has_windows({"model_type": "unheard-of", "sliding_window": 64})


def test_component_names() -> None:
    assert (component_name("kv", None), component_name("ssm", 3)) == ("kv", "ssm.3")


def test_settings_of_one_rank() -> None:
    options = Options.read({"listen": "tcp://0.0.0.0:7000", "advertise": "tcp://10.0.0.1:7000", "hold_s": 5}, engine_id="a")
    assert (options.name, options.hold_s) == ("a", 5.0)
    assert options.listen_on(rank=0, dp_rank=2) == "tcp://0.0.0.0:7002"
    assert options.listen_on(rank=1, dp_rank=2) == "tcp://0.0.0.0:0"
    assert Options.read({}, engine_id="a").listen_on(rank=0, dp_rank=1) == "tcp://127.0.0.1:0"
    for leader, dp_rank, port in ((None, 0, 7000), (None, 2, 7002), ("tcp://10.0.0.1:7000", 2, 0)):
        settings = options.rank_settings(listen="tcp://*:0", leader=leader, dp_rank=dp_rank)
        assert settings["advertise"] == f"tcp://10.0.0.1:{port}"
    assert Options.read({}, engine_id="a").rank_settings(listen="tcp://127.0.0.1:0", leader=None)["advertise"] is None
    for listen in ("tcp://[::1]:80", "tcp://[::]:80"):  # a wildcard takes the connections of its family
        given = {"listen": listen, "advertise": "tcp://[fd00::5]:80"}
        assert Options.read(given, engine_id="a").listen_on(rank=0, dp_rank=0) == listen


def test_servers_with_keys_admit_trusted_keys_only(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f'public = "{"a" * 40}"\nsecret = "{"b" * 40}"\n')
    trusted = "c" * 40
    options = Options.read({"keys": str(tmp_path / "own.toml"), "trusted_keys": [trusted]}, engine_id="a")
    settings = options.rank_settings(listen="tcp://10.0.0.1:1", leader=None)
    assert (settings["admit"], list(settings["peer_keys"].values())) == ("keys", [trusted])
    assert Options.read({}, engine_id="a").rank_settings(listen="tcp://127.0.0.1:1", leader=None)["admit"] == "any"


def test_only_rank_0_serves_metrics() -> None:
    options = Options.read({"metrics_port": 9400}, engine_id="a")
    assert options.rank_settings(listen="tcp://127.0.0.1:0", leader=None)["metrics_port"] == 9400
    assert options.rank_settings(listen="tcp://127.0.0.1:0", leader="tcp://127.0.0.1:1")["metrics_port"] is None
    assert options.rank_settings(listen="tcp://127.0.0.1:0", leader=None, dp_rank=2)["metrics_port"] == 9402


@pytest.mark.parametrize(
    "wrong",
    [
        {"hold_s": 0},
        {"load_timeout_s": "soon"},
        {"no_such_key": 1},
        {"keys": "own.toml"},
        {"trusted_keys": ["c" * 40]},
        {"peer_keys": {"b": "c" * 40}, "peers": {"b": "tcp://127.0.0.1:1"}},
        {"admit": "known"},
        {"leader": "tcp://127.0.0.1:1"},
        {"name": "x"},
        {"peers": {"b": "tcp://127.0.0.1:1"}},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Options.read(wrong, engine_id="a")


def test_an_ignored_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_ADMIT", "known")
    with pytest.raises(ConfigError, match="'admit': expected none"):
        Options.read({}, engine_id="a")


def test_importing_the_library_imports_no_server() -> None:
    code = "import sys, disagg, disagg.integrations.options; sys.exit(any(name in sys.modules for name in ('vllm', 'torch')))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
