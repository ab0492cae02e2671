"""Models by name: presets, shapes, and models in Hugging Face's cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from disagg.core.errors import ConfigError
from disagg.models import load_model
from tests.support.configs import GPT_OSS, LLAMA


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, which `HF_HUB_CACHE` names."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def store(cache: Path, hub_id: str, revisions: Mapping[str, Mapping[str, Any]], *, main: str | None) -> None:
    """Revisions of a model, as Hugging Face's tools store them."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    for revision, config in revisions.items():
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(dict(config)))
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(f"{main}\n")


def test_a_cached_model_has_its_main_revision(cache: Path) -> None:
    store(cache, "org/Some-Model", {"a1": LLAMA, "b2": GPT_OSS}, main="b2")
    found = load_model("org/Some-Model")
    assert (found.name, [state.name for state in found.states]) == ("org/Some-Model", ["kv", "window"])


def test_a_cached_model_without_its_main_revision_has_any(cache: Path) -> None:
    store(cache, "org/model", {"a1": LLAMA}, main="c3")
    assert [state.name for state in load_model("org/model").states] == ["kv"]


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_the_cache_is_where_the_tools_put_it(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}[variable]
    store(tmp_path / below, "org/model", {"a1": LLAMA}, main="a1")
    assert load_model("org/model").num_layers == 4


def test_a_folder_wins_over_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(cache, "org/model", {"a1": GPT_OSS}, main="a1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text(json.dumps(dict(LLAMA)))
    found = load_model("org/model")
    assert (found.name, [state.name for state in found.states]) == ("model", ["kv"])


def test_a_shape_is_a_model_of_plain_attention() -> None:
    assert load_model("32x8x128").nbytes(1) == load_model("llama-3-8b").nbytes(1)
    assert load_model("32x8x128", num_layers=2, kv_dtype="float8_e4m3fn").nbytes(1) == 2 * 2 * 8 * 128
    with pytest.raises(ConfigError, match="heads: expected an integer from 1"):
        load_model("32x0x128")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama-3-8b", "similar names: llama-3-8b"),
        ("DeepSeek-V3.2", "similar names: deepseek-v3.2, deepseek-v3"),
        ("org/some-modle", "similar names: org/Some-Model"),
        ("?", "presets: llama-3-8b, "),
    ],
)
def test_an_unknown_name_gives_similar_ones(cache: Path, name: str, hint: str) -> None:
    store(cache, "org/Some-Model", {"a1": LLAMA}, main="a1")
    with pytest.raises(ConfigError) as raised:
        load_model(name)
    assert f"found {name!r}; {hint}" in str(raised.value)
