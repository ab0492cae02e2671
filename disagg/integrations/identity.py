"""What two servers must agree on although they were written apart: the model's identity, and the names of components."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from disagg.core.errors import ConfigError
from disagg.layout.agreement import ModelId
from disagg.models import from_config

_IGNORED = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields that do not change the state of a request, or that the layouts already compare. So are the ids of tokens."""


def read_config(path: str | Path) -> dict[str, Any]:
    """The `config.json` at `path`, which is the file or its folder. Raises `ConfigError` if it cannot be read."""
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
    """What a server keeps in memory, as far as neither `config.json` nor a layout shows it. Each integration declares its own.

    `keys`: K before or after its rotary embedding, which has the style of the model's code in transformers. `kv_heads`: in the
    order of the checkpoint, or another. `first_position`: that of the first prompt token.
    """

    keys: Literal["rotated", "plain"]
    kv_heads: Literal["checkpoint", "other"]
    first_position: int

    def __str__(self) -> str:
        return f"keys={self.keys} kv_heads={self.kv_heads} first_position={self.first_position}"


def model_id(config: Mapping[str, Any], conventions: Conventions) -> ModelId:
    """The identity of the model with this `config.json` on a server: its type, a digest of the fields that describe it, and
    the server's conventions. Peers compare it when they meet, and name both values if they differ.

    Servers read the file from disk, because loaded configurations contain the defaults of a version of transformers. The
    digest does not cover weights: two models of the same shape have the same identity.
    """
    text = json.dumps(_described(config), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return ModelId(str(config.get("model_type", "")), f"{digest} {conventions}")


def _described(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {
            key: each for key, each in value.items() if key not in _IGNORED and not key.endswith(("_token_id", "_token_ids"))
        }
        return {key: _described(each) for key, each in kept.items()}
    return [_described(each) for each in value] if isinstance(value, list) else value


def has_windows(config: Mapping[str, Any]) -> bool:
    """Whether the model has layers with a sliding window, by its `config.json`. A server may not apply it.

    False also for a model that `disagg.models` does not know.
    """
    try:
        states = from_config(config, name=str(config.get("model_type", "")), kv_dtype="bfloat16").states
    except ConfigError:
        return False
    return any(state.window is not None for state in states)


def component_name(kind: str, layer: int | None) -> str:
    """The name of a component. `kind` is `"kv"`, `"mla"` or `"ssm"`.

    A model whose layers all keep the same kind of state for all tokens has one component (`layer` is `None`). Any other model
    has one for each layer: servers group its layers differently, and each group has page ids of its own. Which of the two it is
    follows from `config.json` (`has_windows`), so that all servers name alike, whatever they apply.
    """
    return kind if layer is None else f"{kind}.{layer}"
