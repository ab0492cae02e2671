"""The fields of a model's `config.json`, checked when they are read. A field that means state and that the family does not
read is an error that names it, so no state is left out silently.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE
from disagg.models.meaning import unread_state

MAX_LAYERS = 4096
MAX_SIZE = 2**24
"""Limits against mistakes: memory would be allocated for larger values."""

_PATTERN_FIELDS = (
    "sliding_window", "sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers", "attention_chunk_size",
    "hybrid_layer_pattern", "layer_group_size", "attn_layer_period", "attn_layer_indices",
)  # fmt: skip
"""Which layers are of which kind, and how large a window is."""


class Fields:
    """One JSON object of a config. Reading a field checks it and marks it as read."""

    def __init__(
        self,
        model: str,
        values: Mapping[str, Any],
        *,
        model_type: str = "",
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        read: set[str] | None = None,
        sections: dict[str, Fields] | None = None,
    ) -> None:
        self.model = model
        self.model_type = model_type
        self._values = values
        self._prefix = prefix
        self._names = names or {}
        self._read: set[str] = set() if read is None else read
        self._sections: dict[str, Fields] = {} if sections is None else sections

    def of_family(self, *, names: Mapping[str, str], defaults: Mapping[str, Any]) -> Fields:
        """A family's own `names` for some fields, and values for those that the file leaves out. A file may also use the
        common name of a field. A null in the file stays null.
        """
        used = {key: own for key, own in names.items() if own in self._values or key not in self._values}
        values = {**{used.get(key, key): value for key, value in defaults.items()}, **self._values}
        return Fields(self.model, values, model_type=self.model_type, prefix=self._prefix, names=used)

    def with_values(self, values: Mapping[str, Any]) -> Fields:
        """Other `values` for some fields. Reading one here marks it as read in the original, too."""
        if not values:
            return self
        merged = {**self._values, **{self._name(key): value for key, value in values.items()}}
        return Fields(
            self.model,
            merged,
            model_type=self.model_type,
            prefix=self._prefix,
            names=self._names,
            read=self._read,
            sections=self._sections,
        )

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    def has(self, key: str) -> bool:
        return self._name(key) in self._values

    def values(self) -> Mapping[str, Any]:
        """Names are those of the file. Nothing counts as read."""
        return self._values

    def error(self, key: str, expected: str, found: object) -> ConfigError:
        return ConfigError(
            f"model {self.model!r}, {self._prefix}{self._name(key)}: expected {expected}, found {reprlib.repr(found)}"
        )

    def raw(self, *keys: str) -> Any:
        names = [self._name(key) for key in keys]
        self._read.update(names)
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def name_of(self, *keys: str) -> str:
        """The first of `keys` that is set, or all of them."""
        return next((key for key in keys if self._values.get(self._name(key)) is not None), " or ".join(keys))

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self.raw(*keys)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(self.name_of(*keys), f"an integer from {least} to {most}", value)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return default if value is None else value

    def items(self, *keys: str, of: type) -> list[Any] | None:
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(item) is not of for item in value):
            raise self.error(self.name_of(*keys), f"a list of {of.__name__}", value)
        return list(value)

    def section(self, key: str) -> Fields:
        """Empty if it is not set."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        if key not in self._sections:
            self._sections[key] = Fields(self.model, value or {}, model_type=self.model_type, prefix=f"{self._prefix}{key}.")
        return self._sections[key]

    def dtype(self, *keys: str) -> str | None:
        """The name of a dtype, without the prefix `torch.`."""
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(self.name_of(*keys), "the name of a dtype", value)
        return _known_dtype(value.removeprefix("torch."), f"model {self.model!r}, {self._prefix}{self.name_of(*keys)}")

    def kinds_are_settled(self) -> None:
        """A list of kinds makes the fields that give layers their kind irrelevant: mark them as read."""
        self._read.update(self._name(key) for key in _PATTERN_FIELDS)

    def check_all_read(self) -> None:
        """Raises `ConfigError` if a field that means state is set and was never read."""
        for key, meaning in unread_state(self._values, self._read):
            raise ConfigError(
                f"model {self.model!r}, {self._prefix}{key}: {meaning} is not supported in a {self.model_type!r} model, "
                f"found {reprlib.repr(self._values[key])}"
            )
        for section in self._sections.values():
            section.check_all_read()


def _known_dtype(dtype: str, what: str) -> str:
    known = [name for name in ITEMSIZE if name != "bool" and not name.endswith("_x2")]
    if dtype not in known:
        raise ConfigError(f"{what}: expected one of {', '.join(known)}, found {dtype!r}")
    return dtype


def _kv_quantization(values: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    """The first field that says how KV is quantized; each quantizer has its own names."""
    for key, value in values.items():
        if "kv_cache" in str(key) and value and not isinstance(value, bool) and str(value).lower() != "none":
            return f"{path}.{key}", value
        if isinstance(value, Mapping) and (found := _kv_quantization(value, f"{path}.{key}")):
            return found
    return None


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """`ssm` is `None` where each kind's own default applies."""

    weights: str
    kv: str
    scale_block: int | None
    ssm: str | None

    def num_scales(self, dim: int) -> int:
        return 0 if self.scale_block is None else -(-dim // self.scale_block)


def read_dtypes(fields: Fields, *, kv: str | None, scale_block: int | None, ssm: str | None) -> Dtypes:
    """The types that a file names; `kv` and `ssm` override them. Raises `ConfigError` for an unknown type, and if the file
    quantizes KV and `kv` is `None`.
    """
    weights = fields.dtype("dtype", "torch_dtype") or "bfloat16"
    for key in ("quantization_config", "compression_config"):
        values = fields.raw(key) or {}
        if not isinstance(values, Mapping):
            raise fields.error(key, "an object", values)
        quantized = None if kv is not None else _kv_quantization(values, key)
        if quantized is not None:
            raise fields.error(quantized[0], "null, or a kv_dtype from the caller: KV is quantized", quantized[1])
    kv = weights if kv is None else _known_dtype(kv, "kv_dtype")
    if scale_block is not None and (scale_block < 1 or ITEMSIZE[kv] != 1):
        raise ConfigError(f"kv_scale_block: expected at least 1 and a kv_dtype of 8 bits, found {scale_block} and {kv}")
    in_file = fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return Dtypes(
        weights=weights, kv=kv, scale_block=scale_block, ssm=in_file if ssm is None else _known_dtype(ssm, "ssm_dtype")
    )
