"""The identity of a model, and the settings of the connectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg import ConfigError, ModelId
from disagg.integrations.identity import Conventions, component_name, has_windows, model_id, read_config
from disagg.integrations.options import Options, ServerConfig

CONVENTIONS = Conventions(keys="rotated", kv_heads="checkpoint", first_position=0)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 1e4},
}


def identity(config: dict[str, Any]) -> ModelId:
    return model_id(config, CONVENTIONS)


def test_identity_covers_what_describes_the_model_and_nothing_else() -> None:
    same = {**LLAMA, "dtype": "float32", "torch_dtype": "bfloat16", "transformers_version": "5.0", "eos_token_id": [1, 2]}
    assert identity(same) == identity(dict(reversed(LLAMA.items()))) == identity(LLAMA)
    others = [
        {**LLAMA, "hidden_size": 128},
        {**LLAMA, "rope_parameters": {"rope_theta": 1e6}},
        {**LLAMA, "model_type": "qwen3"},
    ]
    nested = {**LLAMA, "text_config": {"hidden_size": 1, "pad_token_id": 3}}
    assert len({identity(each) for each in [LLAMA, nested, *others]}) == 5
    assert identity(nested) == identity({**LLAMA, "text_config": {"hidden_size": 1}})


def test_identity_is_the_same_in_every_process() -> None:
    """Golden, so that servers of different versions of this library agree."""
    digest = "7e2f111f0105ee5527598c41942eac7f"
    assert identity(LLAMA) == ModelId("llama", f"{digest} keys=rotated kv_heads=checkpoint first_position=0")


def test_servers_with_other_conventions_refuse_each_other() -> None:
    """The identities differ, and peers that differ in it name both (`tests/manager/test_peers.py`)."""
    others: list[dict[str, Any]] = [{"keys": "plain"}, {"kv_heads": "other"}, {"first_position": 1}]
    found = [model_id(LLAMA, replace(CONVENTIONS, **each)).revision for each in others]
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
    gemma: dict[str, Any] = {"model_type": "gemma3_text", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
    gemma["num_attention_heads"] = 4
    gemma |= {"hidden_size": 32, "sliding_window": 64, "sliding_window_pattern": 2, "dtype": "float32"}
    assert has_windows(gemma)
    assert not has_windows({**gemma, "sliding_window_pattern": 1})
    assert not has_windows({"model_type": "unheard-of", "sliding_window": 64})


def test_component_names() -> None:
    assert (component_name("kv", None), component_name("ssm", 3)) == ("kv", "ssm.3")


def test_settings_of_one_rank() -> None:
    options = Options.read({"listen": "tcp://0.0.0.0:7000", "advertise": "tcp://10.0.0.1:7000", "hold_s": 5}, engine_id="a")
    assert (options.name, options.hold_s) == ("a", 5.0)
    assert options.listen_on(rank=0, dp_rank=2) == "tcp://*:7002"
    assert options.listen_on(rank=1, dp_rank=2) == "tcp://*:0"
    assert Options.read({}, engine_id="a").listen_on(rank=0, dp_rank=1) == "tcp://127.0.0.1:0"
    assert Options.read({"listen": "tcp://[::1]:80"}, engine_id="a").listen_on(rank=0, dp_rank=0) == "tcp://[::1]:80"


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


@pytest.mark.parametrize("wrong", [{"hold_s": 0}, {"load_timeout_s": "soon"}, {"no_such_key": 1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Options.read(wrong, engine_id="a")


@pytest.mark.parametrize("key", ["discover", "announce"])
def test_discovery_is_refused_by_every_server(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "etcd://127.0.0.1:2379/disagg"
    with pytest.raises(ConfigError, match=f"key '{key}': expected none, .*{where}"):
        ServerConfig.load(environ={f"DISAGG_{key.upper()}": where}, name="a")
    monkeypatch.setenv(f"DISAGG_{key.upper()}", where)
    with pytest.raises(ConfigError, match=f"key '{key}': expected none"):
        Options.read({}, engine_id="a")


def test_importing_the_library_imports_no_server() -> None:
    code = "import sys, disagg, disagg.integrations.options; sys.exit(any(name in sys.modules for name in ('vllm', 'torch')))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
