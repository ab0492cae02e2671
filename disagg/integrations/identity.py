"""The identity of a model, whichever engine runs it: a digest of its configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from disagg.core.errors import ConfigError
from disagg.layout.agreement import ModelId

_IGNORED = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "_commit_hash", "use_cache", "auto_map"}


def model_id(config: Path | str) -> ModelId:
    """The identity of the model with this `config.json`, or the folder that has it.

    Dtypes, token ids and versions of libraries do not count: engines change them, and state does not depend on them beyond its
    own dtypes, which peers compare apart. Raises `ConfigError` if the file cannot be read.
    """
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model configuration {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model configuration {path}: expected an object, found {type(found).__name__}")
    text = json.dumps(_kept(found), sort_keys=True, separators=(",", ":"))
    return ModelId(str(found.get("model_type", "model")), hashlib.sha256(text.encode()).hexdigest()[:32])


def _kept(value: Any) -> Any:
    """The same without keys that say nothing about state."""
    if isinstance(value, dict):
        return {k: _kept(v) for k, v in value.items() if k not in _IGNORED and not k.endswith(("_token_id", "_token_ids"))}
    return [_kept(item) for item in value] if isinstance(value, list) else value
