"""The fields of a model's `config.json`: each is checked when it is read, and fields left unread are found.

A field that means state and that the model's family does not read is an error that names the field, so no state is left out
silently.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE

MAX_LAYERS = 4096
MAX_SIZE = 2**24
"""Limits against mistakes: no model comes near them, and memory would be allocated for larger values."""

_STATE_FIELDS = {
    "layer_types": "kinds of layers",
    "layers_block_type": "kinds of layers",
    "hybrid_override_pattern": "kinds of layers",
    "attn_type_list": "kinds of layers",
    "attn_layer_indices": "attention in some layers only",
    "attn_layer_period": "attention in some layers only",
    "global_attn_every_n_layers": "attention in some layers only",
    "sliding_window": "sliding-window attention",
    "sliding_window_layers": "sliding-window attention",
    "sliding_window_pattern": "sliding-window attention",
    "attention_window_size": "sliding-window attention",
    "attention_chunk_size": "chunked attention",
    "kv_lora_rank": "latent attention",
    "index_topk": "index keys",
    "index_head_dim": "index keys",
    "index_topk_freq": "index keys in some layers only",
    "index_topk_pattern": "index keys in some layers only",
    "indexer_types": "index keys in some layers only",
    "index_kpool": "pooled index keys",
    "sparse_attention_config": "index keys",
    "compress_ratios": "compressed attention",
    "compress_rates": "compressed attention",
    "linear_attn_config": "linear attention",
    "linear_num_heads": "linear attention",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "a recurrent state",
    "ssm_state_size": "a recurrent state",
    "state_size": "a recurrent state",
    "conv_L_cache": "a convolution state",
    "conv_window": "a convolution state",
    "interleaved_sliding_window": "sliding-window attention",
    "window_size": "sliding-window attention",
    "num_sink_tokens": "sink tokens",
    "layer_group_size": "attention in some layers only",
    "block_types": "kinds of layers",
    "hybrid_layer_pattern": "kinds of layers",
    "sliding_window_size": "sliding-window attention",
    "local_attention": "sliding-window attention",
    "conv1d_width": "a convolution state",
    "conv_kernel": "a convolution state",
    "conv_kernel_size": "a convolution state",
    "short_conv_kernel_size": "a convolution state",
    "mamba_d_conv": "a convolution state",
    "ple_layer_ids": "a convolution state",
    "cca_time0": "a convolution state",
    "linear_key_head_dim": "linear attention",
    "linear_head_dim": "linear attention",
    "num_kv_shared_layers": "layers that share another's KV",
    "kv_source_layers": "layers that share another's KV",
    "indexer_head_dim": "index keys",
    "kv_sharing_modes": "layers that share another's KV",
    "cla_share_factor": "layers that share another's KV",
    "block_configs": "layers of different sizes",
    "per_layer_config": "layers of different sizes",
    "num_key_value_heads_per_layer": "layers of different sizes",
    "num_global_key_value_heads": "layers of different sizes",
    "global_head_dim": "layers of different sizes",
    "swa_num_key_value_heads": "layers of different sizes",
    "swa_head_dim": "layers of different sizes",
    "swa_v_head_dim": "layers of different sizes",
    "attention_other_setting": "layers of different sizes",
    "use_bidirectional_attention": "bidirectional attention",
    "is_encoder_decoder": "an encoder",
    "encoder_layers": "an encoder",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "cross-attention",
}  # fmt: skip
"""Fields that mean state, and what they mean."""

_HARMLESS = {"cla_share_factor": 1, "index_topk_freq": 1, "use_bidirectional_attention": "vision"}
"""Values of such fields that mean no state of their own. Tokens of an image that attend to each other have ordinary KV.

An `attn_type_list` of ones is attention in all layers.
"""

_SWITCHES = {"cla_share_factor": "use_cla"}
"""Flags without which such a field means nothing."""

_PATTERN_FIELDS = (
    "sliding_window", "sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers", "attention_chunk_size",
    "hybrid_layer_pattern", "layer_group_size", "attn_layer_period", "attn_layer_indices",
)  # fmt: skip
"""Fields that say which layers are of which kind, and how large a window is."""


class Fields:
    """The fields of one JSON object of a config. Reading a field checks it and marks it as read."""

    def __init__(
        self,
        model: str,
        values: Mapping[str, Any],
        *,
        model_type: str = "",
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        read: set[str] | None = None,
    ) -> None:
        self.model = model
        self.model_type = model_type
        self._values = values
        self._prefix = prefix
        self._names = names or {}
        self._read: set[str] = set() if read is None else read

    def of_family(self, *, names: Mapping[str, str], defaults: Mapping[str, Any]) -> Fields:
        """The same fields with a family's own `names` for some, and values for those that the file leaves out.

        A null in the file stays null.
        """
        values = {**{names.get(key, key): value for key, value in defaults.items()}, **self._values}
        return Fields(self.model, values, model_type=self.model_type, prefix=self._prefix, names=names)

    def with_values(self, values: Mapping[str, Any]) -> Fields:
        """The same fields with other `values` for some. Reading one here marks it as read in the original, too."""
        if not values:
            return self
        merged = {**self._values, **{self._name(key): value for key, value in values.items()}}
        return Fields(self.model, merged, model_type=self.model_type, prefix=self._prefix, names=self._names, read=self._read)

    def _name(self, key: str) -> str:
        """The name under which the family's files have a field."""
        return self._names.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the file has the field, even if it is null."""
        return self._name(key) in self._values

    def names(self) -> tuple[str, ...]:
        """The names of all fields, as the file has them."""
        return tuple(self._values)

    def error(self, key: str, expected: str, found: object) -> ConfigError:
        """An error that names the model and the field."""
        return ConfigError(
            f"model {self.model!r}, {self._prefix}{self._name(key)}: expected {expected}, found {reprlib.repr(found)}"
        )

    def raw(self, *keys: str) -> Any:
        """The value of the first of `keys` that is set; `None` if none is."""
        names = [self._name(key) for key in keys]
        self._read.update(names)
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def name_of(self, *keys: str) -> str:
        """The first of `keys` that is set, or all of them if none is. For error messages."""
        return next((key for key in keys if self._values.get(self._name(key)) is not None), " or ".join(keys))

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """The integer under the first of `keys` that is set, from `least` to `most`."""
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
        """The list of strings or integers under the first of `keys` that is set; `None` if none is."""
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(item) is not of for item in value):
            raise self.error(self.name_of(*keys), f"a list of {of.__name__}", value)
        return list(value)

    def section(self, key: str) -> Fields:
        """The fields of a nested object; empty if it is not set."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return Fields(self.model, value or {}, prefix=f"{self._prefix}{key}.")

    def dtype(self, *keys: str) -> str | None:
        """The dtype under the first of `keys` that is set, without the prefix `torch.`."""
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(self.name_of(*keys), "the name of a dtype", value)
        return _known_dtype(value.removeprefix("torch."), f"model {self.model!r}, {self._prefix}{self.name_of(*keys)}")

    def kinds_are_settled(self) -> None:
        """Mark the fields that give layers their kind as read: a list of kinds has already said it."""
        self._read.update(self._name(key) for key in _PATTERN_FIELDS)

    def _is_harmless(self, key: str, value: Any) -> bool:
        switch = _SWITCHES.get(key)
        return (
            _HARMLESS.get(key) == value
            or (key == "attn_type_list" and isinstance(value, list) and all(kind == 1 for kind in value))
            or (switch is not None and self._values.get(switch) is False)
        )

    def check_all_read(self) -> None:
        """Raise `ConfigError` if a field that means state is set and was never read."""
        for key, meaning in _STATE_FIELDS.items():
            value = self._values.get(key)
            if value and key not in self._read and not self._is_harmless(key, value):
                raise ConfigError(
                    f"model {self.model!r}, {key}: {meaning} is not supported in a {self.model_type!r} model, "
                    f"found {reprlib.repr(value)}"
                )


def _known_dtype(dtype: str, what: str) -> str:
    known = [name for name in ITEMSIZE if name != "bool" and not name.endswith("_x2")]
    if dtype not in known:
        raise ConfigError(f"{what}: expected one of {', '.join(known)}, found {dtype!r}")
    return dtype


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Element types of a model's state. `ssm` is `None` where each kind's own default applies."""

    weights: str
    kv: str
    scale_block: int | None
    ssm: str | None

    def num_scales(self, dim: int) -> int:
        """The number of block scales for `dim` elements."""
        return 0 if self.scale_block is None else -(-dim // self.scale_block)


def read_dtypes(fields: Fields, *, kv: str | None, scale_block: int | None, ssm: str | None) -> Dtypes:
    """The types that a file names; `kv` and `ssm` override them.

    Raises `ConfigError` for a type that is not known, and if the file quantizes KV and `kv` is `None`.
    """
    weights = fields.dtype("dtype", "torch_dtype") or "bfloat16"
    quantized = fields.section("quantization_config")
    scheme = quantized.raw("kv_cache_scheme")
    if scheme is not None and kv is None:
        raise quantized.error("kv_cache_scheme", "null, or a kv_dtype from the caller: KV is quantized", scheme)
    kv = weights if kv is None else _known_dtype(kv, "kv_dtype")
    if scale_block is not None and (scale_block < 1 or ITEMSIZE[kv] != 1):
        raise ConfigError(f"kv_scale_block: expected at least 1 and a kv_dtype of 8 bits, found {scale_block} and {kv}")
    in_file = fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return Dtypes(
        weights=weights, kv=kv, scale_block=scale_block, ssm=in_file if ssm is None else _known_dtype(ssm, "ssm_dtype")
    )
