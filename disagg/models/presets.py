"""Models by name: presets, `config.json` files, models in the local Hugging Face cache, and bare shapes."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from disagg.core.errors import ConfigError
from disagg.models.describe import from_config
from disagg.models.published import PUBLISHED
from disagg.models.spec import ModelSpec, first_layers


class _Presets(Mapping[str, ModelSpec]):
    def __getitem__(self, name: str) -> ModelSpec:
        return _preset(name)

    def __iter__(self) -> Iterator[str]:
        return iter(PUBLISHED)

    def __len__(self) -> int:
        return len(PUBLISHED)


@functools.cache
def _preset(name: str) -> ModelSpec:
    return from_config(PUBLISHED[name], name=name)


PRESETS: Mapping[str, ModelSpec] = _Presets()
"""Preset models by name, with the sizes of their published `config.json`."""


def load_model(
    name: str,
    *,
    num_layers: int | None = None,
    kv_dtype: str | None = None,
    kv_scale_block: int | None = None,
    ssm_dtype: str | None = None,
    draft_layers: bool = False,
) -> ModelSpec:
    """A model by name: a preset, a path, a model in the local cache, or a shape.

    A path is that of a `config.json` or of a folder with one. An id such as `Qwen/Qwen3-8B` is looked up in Hugging Face's
    cache (`HF_HUB_CACHE`, `HF_HOME`); nothing is downloaded. A shape is `32x8x128`: layers, KV heads of the whole model and
    elements per head, in bfloat16.

    `num_layers` keeps only the first layers. The other arguments are those of `from_config`. Raises `ConfigError`, with
    similar names, for an unknown name, and as `from_config` does.
    """
    config, short = _find(name)
    spec = from_config(
        config,
        name=short,
        kv_dtype=kv_dtype,
        kv_scale_block=kv_scale_block,
        ssm_dtype=ssm_dtype,
        draft_layers=draft_layers,
    )
    return spec if num_layers is None else first_layers(spec, num_layers)


_SHAPE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", re.ASCII)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def _find(name: str) -> tuple[Any, str]:
    if not isinstance(name, str):
        raise ConfigError(f"model: expected a name or a path as a str, found {type(name).__name__}")
    if name in PUBLISHED:
        return PUBLISHED[name], name
    shape = _SHAPE.fullmatch(name)
    if shape is not None:
        num_layers, heads, dim = map(int, shape.groups())
        fields = {"num_hidden_layers": num_layers, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": dim}
        return {"model_type": "llama", **fields}, name
    try:
        path = _path(Path(name))
        if path is None and _HUB_ID.fullmatch(name):
            path = _in_cache(name)
        config = None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: expected a JSON file, found {name!r}: {error}") from error
    if path is None:
        raise _unknown(name)
    return config, name if _HUB_ID.fullmatch(name) and not Path(name).exists() else path.parent.name or path.stem


def _path(path: Path) -> Path | None:
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


def _cache() -> Path:
    given = os.environ.get
    home = Path(given("HF_HOME") or Path(given("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.path.expanduser(given("HF_HUB_CACHE") or home / "hub"))  # noqa: PTH111  (a user without a home has no cache)


def _in_cache(hub_id: str) -> Path | None:
    """The `config.json` of a cached model, at its main revision if that is cached."""
    folder = _cache() / f"models--{hub_id.replace('/', '--')}"
    main = folder / "refs" / "main"
    revisions = [folder / "snapshots" / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    found = (_path(revision) for revision in (*revisions, *sorted((folder / "snapshots").glob("*"))) if revision.is_dir())
    return next((path for path in found if path is not None), None)


def _unknown(name: str) -> ConfigError:
    cached = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in _cache().glob("models--*--*")]
    lowered = {known.lower(): known for known in (*PUBLISHED, *cached)}
    similar = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)]
    hint = f"similar names: {', '.join(similar)}" if similar else f"presets: {', '.join(PUBLISHED)}"
    return ConfigError(
        f"model: expected a preset, the path of a config.json, a model in {_cache()} or a shape such as 32x8x128, "
        f"found {name!r}; {hint}"
    )
