"""What servers must agree on: the model's identity, and the names of components."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from disagg.core.errors import ConfigError
from disagg.integrations.description import RopeRules, described, described_overrides, digest, ranges, rotary, words
from disagg.layout.agreement import ModelId
from disagg.models import from_config


def read_config(path: str | Path) -> dict[str, Any]:
    """`path` is the `config.json` or its folder. Raises `ConfigError`."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: expected a config.json, found {str(file)!r}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model: expected a JSON object in {str(file)!r}, found {type(found).__name__}")
    return found


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What neither a server's configuration nor a layout shows. `keys`: K before or after its rotary embedding, in the style
    of transformers. `kv_heads`: whether in the checkpoint's order. `first_position`: the first prompt token's.
    """

    keys: Literal["rotated", "plain"]
    kv_heads: Literal["checkpoint", "other"]
    first_position: int

    def __str__(self) -> str:
        return f"keys={self.keys} kv_heads={self.kv_heads} first_position={self.first_position}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """`config` is the model's `config.json`, or what the server has made of a model without one. `overridden` are the fields
    that the command line sets; `loaded` is the server's configuration, `text` that of its text model.
    """

    config: Mapping[str, Any]
    overridden: Mapping[str, Any]
    loaded: Any
    text: Any


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a server's layers compute with. `windows`: how many tokens before the next one a layer attends to. `kv_scales`:
    by what quantized K and V are multiplied. `options`: those that change states, if set.
    """

    windows: Mapping[int, int]
    kv_scales: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    rope: RopeRules
    options: Mapping[str, Any] = field(default_factory=dict)

    def words(self) -> tuple[str, ...]:
        by_size: dict[int, list[int]] = {}
        for layer, size in self.windows.items():
            by_size.setdefault(size, []).append(layer)
        windows = ";".join(f"{size}@{ranges(by_size[size])}" for size in sorted(by_size)) or "none"
        found = [f"windows={windows}", *words(self.options)]
        if self.kv_scales:
            scales = {layer: [f"{scale:.6g}" for scale in each] for layer, each in sorted(self.kv_scales.items())}
            is_one = all(scale == "1" for each in scales.values() for scale in each)
            found.append(f"kv_scales={1 if is_one else digest(json.dumps(scales))}")
        return tuple(found)


def model_id(source: Source, applied: Applied, conventions: Conventions, *, name: str | None) -> ModelId:
    """The identity of a server's model. The setting `model` (`name`) replaces its type and `config.json`. Overrides and what
    the server computes with are always compared, weights never.
    """
    if name is None:
        name = str(source.config.get("model_type", ""))
        description = described(source.config, overridden=source.overridden, loaded=source.loaded, text=source.text)
    else:
        description = described_overrides(source.overridden, source.loaded)
    positions = rotary(source.text, applied.rope)
    return ModelId(name, " ".join((*applied.words(), *positions, str(conventions), *description)))


def has_windows(config: Mapping[str, Any]) -> bool:
    """Whether layers have a sliding window by `config.json`, even if the server does not apply it. False for an unknown
    model.
    """
    try:
        states = from_config(config, name=str(config.get("model_type", "")), kv_dtype="bfloat16").states
    except ConfigError:
        return False
    return any(state.window is not None for state in states)


def component_name(kind: str, layer: int | None) -> str:
    """A model whose layers all keep the same state for all tokens has one component (`layer` is `None`). Others have one per
    layer, since servers group layers differently. Either follows from `config.json`, so all servers use the same names.
    """
    return kind if layer is None else f"{kind}.{layer}"
