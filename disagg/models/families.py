"""Models as the state they leave behind: Hugging Face `config.json` files, and presets, which are such files cut short.

A family is a line of `_FAMILIES`: which kinds of layers it has, and which state a layer of a kind leaves. Field names and
the rules for fields that a file may leave out are those of transformers 5.23 (`configuration_*.py`); where its class has
only a plain number as default, the file must say it. What a model has and this library cannot describe is an error that
names it, never left out: unknown model types, unknown kinds of layers, and fields that mean state but that nobody read.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE
from disagg.state.declare import Role, State, whole
from disagg.state.mamba import gdn_roles, kda_roles, lightning_roles, mamba1_roles, mamba2_roles
from disagg.state.paged import gqa_roles, mla_roles
from disagg.state.sparse import compressed_roles, index_roles

__all__ = ["PRESETS", "ModelSpec", "State", "first_layers", "from_config", "load_model"]

MAX_LAYERS = 4096
MAX_SIZE = 2**24
"""Sizes beyond these are taken for mistakes: no model comes near, and they would be allocated."""

FULL, SLIDING, LINEAR, HYBRID = "full_attention", "sliding_attention", "linear_attention", "hybrid"
INDEXED, M3_SPARSE = "indexed_attention", "minimax_m3_sparse"
COMPRESSED, HEAVILY_COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
"""Kinds of layers, by transformers' names."""

_OLD_KINDS = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}
"""Names in files from before transformers settled on those above."""

_MEANS_STATE = {
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
    "num_kv_shared_layers": "layers that share another's KV",
    "is_encoder_decoder": "an encoder",
    "encoder_layers": "an encoder",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "cross-attention",
}  # fmt: skip
"""Fields that mean state. One that is set in a file, and that its family does not read, cannot be described."""

_WRAPPERS = ("qwen3_5", "qwen3_5_moe", "minimax_m3_vl", "mistral3", "llava", "kimi_k25")
"""Multimodal models whose decoder is their `text_config`; their other parts make embeddings and keep nothing."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its layers (draft layers, if any, have ids from `num_layers` on), and every kind of state that a request has.

    `tied_embeddings`: its head is its embedding, which the last pipeline stage needs too.
    """

    name: str
    num_layers: int
    states: tuple[State, ...]
    tied_embeddings: bool = False

    def state(self, name: str) -> State:
        """The state of that name; raises `ConfigError` where there is none."""
        for state in self.states:
            if state.name == name:
                return state
        raise ConfigError(f"model {self.name!r}: expected one of {', '.join(s.name for s in self.states)}, found {name!r}")

    def nbytes(self, num_tokens: int, *, prefix: int = 0) -> int:
        """Bytes that decode needs of a request of `num_tokens`, of which it has `prefix`; without replicas."""
        return sum(state.nbytes(num_tokens, prefix=prefix) for state in self.states)


def load_model(
    name: str,
    *,
    num_layers: int | None = None,
    kv_dtype: str | None = None,
    kv_scale_block: int | None = None,
    ssm_dtype: str | None = None,
    draft_layers: bool = False,
) -> ModelSpec:
    """A preset, or the model of a `config.json` (or of the folder that holds one); `num_layers` keeps only the first ones.

    The other arguments are those of `from_config`. Raises `ConfigError` for an unknown name, naming the presets, and for a
    config with state that cannot be described.
    """
    known = _PRESET_CONFIGS.get(name)
    config, short = (known, name) if known is not None else _read(name)
    spec = from_config(
        config,
        name=short,
        kv_dtype=kv_dtype,
        kv_scale_block=kv_scale_block,
        ssm_dtype=ssm_dtype,
        draft_layers=draft_layers,
    )
    return spec if num_layers is None else first_layers(spec, num_layers)


def _read(name: str) -> tuple[Any, str]:
    """The JSON of a file, or of a folder's `config.json`, and what to call its model."""
    try:
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {name!r} is no JSON file: {error}") from error
    if not path.is_file():
        presets = ", ".join(_PRESET_CONFIGS)
        raise ConfigError(f"model: expected one of {presets}, or the path of a config.json, found {name!r}")
    return config, path.parent.name or path.stem


def first_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The same model, cut off after `num_layers`, without draft layers."""
    if not 0 < num_layers <= spec.num_layers:
        raise ConfigError(f"layers: model {spec.name!r} has {spec.num_layers}, found {num_layers}")
    states = tuple(replace(s, layers=tuple(layer for layer in s.layers if layer < num_layers)) for s in spec.states)
    return replace(spec, num_layers=num_layers, states=tuple(state for state in states if state.layers))


def from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    kv_dtype: str | None = None,
    kv_scale_block: int | None = None,
    ssm_dtype: str | None = None,
    draft_layers: bool = False,
) -> ModelSpec:
    """The model of a Hugging Face config.

    KV is in the weights' dtype or `kv_dtype`; with `kv_scale_block`, each head's or latent's elements have a float32 scale
    per block of so many (a latent's rotated part then stays in the weights' dtype). Convolution windows are in the weights'
    dtype, temporal states in `ssm_dtype`: by default as the file says, else float32, as servers keep them (lightning
    attention: the weights' dtype). `draft_layers` adds those of multi-token prediction, as optional components.

    Raises `ConfigError` for a field that is missing or wrong, with its name and value, and for what cannot be described.
    """
    fields = _text_fields(config, name)
    family = _FAMILIES[fields.model_type]
    listed = family.listed(fields)
    num_layers = fields.size("num_hidden_layers", default=None if listed is None else len(listed), most=MAX_LAYERS)
    kinds = _kinds(fields, family, listed, num_layers)
    dtypes = _dtypes(fields, kv_dtype, kv_scale_block, ssm_dtype)
    states = _states(fields, family, kinds, dtypes, first=0)
    num_steps = _num_draft_steps(fields)
    if draft_layers:
        draft = _states(fields, family, _draft_kinds(fields, family, num_steps), dtypes, first=num_layers)
        states += [replace(state, name=f"draft_{state.name}", optional=True) for state in draft]
    fields.expect_all_described()
    if not states:
        raise ConfigError(f"model {name!r}: none of its layers has state, of kinds {', '.join(sorted(set(kinds)))}")
    tied = fields.flag("tie_word_embeddings")
    return ModelSpec(name=name, num_layers=num_layers, states=tuple(states), tied_embeddings=tied)


# -- reading a file ----------------------------------------------------------------------------------------------------


class _Fields:
    """A config's fields: each is checked when it is read, and who reads what is remembered."""

    def __init__(self, model: str, values: Mapping[str, Any], *, model_type: str = "", prefix: str = "") -> None:
        self.model = model
        self.model_type = model_type
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the file has the field at all, be it null."""
        return key in self._values

    def wrong(self, key: str, expected: str, found: object) -> ConfigError:
        return ConfigError(f"model {self.model!r}, {self._prefix}{key}: expected {expected}, found {reprlib.repr(found)}")

    def raw(self, *keys: str) -> Any:
        """The first of `keys` that is set; `None` where none is."""
        self._read.update(keys)
        return next((self._values[key] for key in keys if self._values.get(key) is not None), None)

    def name_of(self, *keys: str) -> str:
        """The one of `keys` that is set, all where none is: what to call it in an error."""
        return next((key for key in keys if self._values.get(key) is not None), " or ".join(keys))

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer under the first of `keys` that is set, from `least` to `most`."""
        value = self.raw(*keys)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(self.name_of(*keys), f"an integer from {least} to {most}", value)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return default if value is None else value

    def items(self, *keys: str, of: type) -> list[Any] | None:
        """A list of strings or of integers; `None` where it is not set."""
        value = self.raw(*keys)
        if value is None:
            return None
        wrong = not isinstance(value, list | tuple) or any(type(item) is not of for item in value)
        if wrong:
            raise self.wrong(self.name_of(*keys), f"a list of {of.__name__}", value)
        return list(value)

    def section(self, key: str) -> _Fields:
        """The fields of a nested object; none where it is not set."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return _Fields(self.model, value or {}, prefix=f"{self._prefix}{key}.")

    def dtype(self, *keys: str) -> str | None:
        value = self.raw(*keys)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(self.name_of(*keys), "the name of a dtype", value)
        return _known_dtype(value.removeprefix("torch."), f"model {self.model!r}, {self._prefix}{self.name_of(*keys)}")

    def expect_all_described(self) -> None:
        """Raise `ConfigError` for a field that means state and that nobody read."""
        for key, meaning in _MEANS_STATE.items():
            value = self._values.get(key)
            if value and key not in self._read:
                raise ConfigError(
                    f"model {self.model!r}, {key}: {meaning} cannot be described in a {self.model_type!r} model, "
                    f"found {reprlib.repr(value)}"
                )


def _known_dtype(dtype: str, what: str) -> str:
    if dtype not in ITEMSIZE or dtype == "bool" or dtype.endswith("_x2"):
        names = ", ".join(name for name in ITEMSIZE if name != "bool" and not name.endswith("_x2"))
        raise ConfigError(f"{what}: expected one of {names}, found {dtype!r}")
    return dtype


def _text_fields(config: Mapping[str, Any], name: str) -> _Fields:
    """The fields of a model's decoder, which may be nested in those of a multimodal model."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"model {name!r}: expected a JSON object, found {type(config).__name__}")
    kind = config.get("model_type")
    text = config.get("text_config")
    values = config
    if kind in _WRAPPERS and text is not None:
        _Fields(name, config, model_type=str(kind)).expect_all_described()
        if not isinstance(text, Mapping):
            raise ConfigError(f"model {name!r}, text_config: expected an object, found {reprlib.repr(text)}")
        values = {**text, **{key: config[key] for key in ("dtype", "torch_dtype") if text.get(key) is None and key in config}}
        if config.get("tie_word_embeddings") is not None and not text.get("tie_word_embeddings"):
            values["tie_word_embeddings"] = config["tie_word_embeddings"]
        kind = text.get("model_type", kind)
    elif text is not None:
        raise ConfigError(
            f"model {name!r}: model_type {kind!r} with a text_config cannot be described; known are {', '.join(_WRAPPERS)}"
        )
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"model {name!r}: model_type {reprlib.repr(kind)} cannot be described; known are {known}")
    return _Fields(name, values, model_type=kind)


# -- dtypes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Dtypes:
    """`ssm` is `None` where a kind's own default holds."""

    weights: str
    kv: str
    scale_block: int | None
    ssm: str | None

    def scales(self, dim: int) -> int:
        """Block scales of `dim` elements."""
        return 0 if self.scale_block is None else -(-dim // self.scale_block)


def _dtypes(fields: _Fields, kv_dtype: str | None, scale_block: int | None, ssm_dtype: str | None) -> _Dtypes:
    weights = fields.dtype("dtype", "torch_dtype") or "bfloat16"
    kv = weights if kv_dtype is None else _known_dtype(kv_dtype, "kv_dtype")
    if scale_block is not None and (scale_block < 1 or ITEMSIZE[kv] != 1):
        raise ConfigError(f"kv_scale_block: expected at least 1 and a kv_dtype of 8 bits, found {scale_block} and {kv}")
    stated = fields.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    ssm = stated if ssm_dtype is None else _known_dtype(ssm_dtype, "ssm_dtype")
    return _Dtypes(weights=weights, kv=kv, scale_block=scale_block, ssm=ssm)


# -- the state of a kind of layers -------------------------------------------------------------------------------------

_Maker = Callable[[_Fields, tuple[int, ...], _Dtypes], State]
_Kinds = Callable[[_Fields, int], Sequence[str]]


def _num_kv_heads(fields: _Fields) -> int:
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}", kv_heads)
    return kv_heads


def _head_dim(fields: _Fields, *, by_hidden: bool) -> int:
    """Elements per head; `by_hidden`: a file may leave it to `hidden_size / num_attention_heads`."""
    if not by_hidden or fields.raw("head_dim") is not None:
        return fields.size("head_dim", "attention_head_dim")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads={heads}", hidden)
    return hidden // heads


def _attention(name: str = "kv", *, by_hidden: bool = False) -> _Maker:
    """K and V by head; as `window`, of the `sliding_window - 1` tokens before the next, which attends to itself too."""

    def make(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
        heads, dim = _num_kv_heads(fields), _head_dim(fields, by_hidden=by_hidden)
        roles: tuple[Role, ...] = gqa_roles(heads, dims=(dim, dim), dtype=dtypes.kv)
        if dtypes.scale_block is not None:
            scales = gqa_roles(heads, dims=(dtypes.scales(dim), dtypes.scales(dim)), dtype="float32")
            roles += tuple(replace(role, name=f"{role.name}_scale") for role in scales)
        window = fields.size("sliding_window") - 1 if name == "window" else None
        return State(name=name, rows="pages", layers=layers, roles=roles, window=window)

    return make


def _latent_roles(dim: int, rope: int, dtypes: _Dtypes) -> tuple[Role, ...]:
    """A latent of `dim` and a rotated part of `rope` elements per token: in one tensor, or apart where blocks have scales."""
    if dtypes.scale_block is None:
        return mla_roles(dim + rope, dtype=dtypes.kv)
    rotated = replace(mla_roles(rope, dtype=dtypes.weights)[0], name="rope")
    return (*mla_roles(dim, dtype=dtypes.kv, scales=dtypes.scales(dim), scales_dtype="float32"), rotated)


def _mla(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    roles = _latent_roles(fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim"), dtypes)
    return State(name="mla", rows="pages", layers=layers, roles=roles)


def _index(fields: _Fields, layers: tuple[int, ...], _: _Dtypes, *, ratio: int = 1) -> State:
    """FP8 index keys with a float32 scale per 128 elements, keys then scales in one page, as servers keep them."""
    fields.size("index_topk")
    dim = fields.size("index_head_dim")
    roles = index_roles(key_nbytes=dim, scale_nbytes=4 * -(-dim // 128), tokens_per_key=ratio)
    return State(name="index", rows="pages", layers=layers, roles=roles, packed=True)


def _m3_index(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    """MiniMax-M3's index keys: one vector per token in the weights' dtype, and no index values."""
    sparse = fields.section("sparse_attention_config")
    dim = sparse.size("sparse_index_dim", default=fields.raw("index_head_dim"))
    without_values = sparse.items("sparse_disable_index_value", of=int)
    for layer in layers if without_values is not None else ():
        if layer >= len(without_values or ()) or not (without_values or ())[layer]:
            raise sparse.wrong("sparse_disable_index_value", f"1 for layer {layer}: index values", without_values)
    key = Role(name="key", axes="page token dim", inner={"dim": whole(dim)}, dtype=dtypes.weights)
    return State(name="index", rows="pages", layers=layers, roles=(key,))


def _recurrent(layers: tuple[int, ...], roles: tuple[Role, ...]) -> State:
    return State(name="ssm", rows="slot", layers=layers, roles=roles)


def _gdn(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    roles = gdn_roles(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_value_heads=fields.size("linear_num_value_heads"),
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        kernel=fields.size("linear_conv_kernel_dim", least=2),
        dtypes=(dtypes.weights, dtypes.ssm or "float32"),
    )
    return _recurrent(layers, roles)


def _kda(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    linear = fields.section("linear_attn_config")
    dim = linear.size("head_dim", default=fields.raw("linear_head_dim"))
    roles = kda_roles(
        num_heads=linear.size("num_heads", default=fields.raw("linear_num_heads")),
        key_head_dim=dim,
        value_head_dim=dim,
        kernel=linear.size("short_conv_kernel_size", default=fields.raw("linear_conv_kernel_dim"), least=2),
        dtypes=(dtypes.weights, dtypes.ssm or "float32"),
    )
    return _recurrent(layers, roles)


def _mamba2(heads_key: str, state_key: str, head_dim: Callable[[_Fields, int], int]) -> _Maker:
    """Mamba2 by a family's own names."""

    def make(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
        heads = fields.size(heads_key)
        roles = mamba2_roles(
            num_heads=heads,
            head_dim=head_dim(fields, heads),
            num_groups=fields.size("n_groups", "mamba_n_groups"),
            state_size=fields.size(state_key),
            kernel=fields.size("conv_kernel", "mamba_d_conv", least=2),
            dtypes=(dtypes.weights, dtypes.ssm or "float32"),
        )
        return _recurrent(layers, roles)

    return make


def _mamba_head_dim(fields: _Fields, heads: int) -> int:
    """Heads must fill the inner size, which is `mamba_d_ssm`, or else `mamba_expand` hidden sizes."""
    inner = _inner_size(fields) if fields.raw("mamba_d_ssm") is None else fields.size("mamba_d_ssm")
    stated = fields.raw("mamba_d_head")
    dim = inner // heads if stated in (None, "auto") else fields.size("mamba_d_head")
    if heads * dim != inner:
        raise fields.wrong("mamba_d_head", f"inner size {inner} over mamba_n_heads={heads}", stated)
    return dim


def _inner_size(fields: _Fields) -> int:
    return fields.size("mamba_expand") * fields.size("hidden_size")


def _mamba1(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    roles = mamba1_roles(
        inner_size=_inner_size(fields),
        state_size=fields.size("mamba_d_state"),
        kernel=fields.size("mamba_d_conv", least=2),
        dtypes=(dtypes.weights, dtypes.ssm or "float32"),
    )
    return _recurrent(layers, roles)


def _lightning(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    heads, dim = fields.size("num_attention_heads"), _head_dim(fields, by_hidden=True)
    roles = lightning_roles(num_heads=heads, key_head_dim=dim, value_head_dim=dim, dtype=dtypes.ssm or dtypes.weights)
    return _recurrent(layers, roles)


# DeepSeek-V4: every layer has a window of one latent per token (K is V), and by kind a compressed past. What its
# compressors have not closed yet is an open ring per request. Groups: transformers' modeling_deepseek_v4; rings of the
# projection and its score in float32, twice as wide and as long where windows overlap: SGLang's compress state pool.


def _v4_roles(fields: _Fields, dtypes: _Dtypes, *, ratio: int = 1) -> tuple[Role, ...]:
    dim = fields.size("head_dim", least=2)
    rope = None if fields.raw("qk_rope_head_dim") is None else fields.size("qk_rope_head_dim", most=dim - 1)
    if dtypes.scale_block is None:
        return compressed_roles(dim, ratio=ratio, dtype=dtypes.kv)
    if rope is None:
        raise fields.wrong("qk_rope_head_dim", "what stays in the weights' dtype where KV has block scales", None)
    return tuple(replace(role, granule=ratio) for role in _latent_roles(dim - rope, rope, dtypes))


def _v4_window(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    window = fields.size("sliding_window") - 1
    return State(name="window", rows="pages", layers=layers, roles=_v4_roles(fields, dtypes), window=window)


def _v4_ratio(fields: _Fields, kind: str) -> int:
    rates = fields.section("compress_rates")
    old, default = {COMPRESSED: ("compress_rate_csa", 4), HEAVILY_COMPRESSED: ("compress_rate_hca", 128)}[kind]
    stated = fields.raw(old)
    return rates.size(kind, default=default, least=2) if stated is None else fields.size(old, least=2)


def _v4_compressed(name: str, kind: str) -> _Maker:
    def make(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
        roles = _v4_roles(fields, dtypes, ratio=_v4_ratio(fields, kind))
        return State(name=name, rows="pages", layers=layers, roles=roles)

    return make


def _v4_index(fields: _Fields, layers: tuple[int, ...], dtypes: _Dtypes) -> State:
    return _index(fields, layers, dtypes, ratio=_v4_ratio(fields, COMPRESSED))


def _v4_open(name: str, kind: str, dim_key: str) -> _Maker:
    """The open part of a compressor: of the last window, and of the one before it where windows overlap."""

    def make(fields: _Fields, layers: tuple[int, ...], _: _Dtypes) -> State:
        overlap = 2 if kind == COMPRESSED else 1
        ring = overlap * _v4_ratio(fields, kind)
        inner = {"dim": whole(2 * overlap * fields.size(dim_key))}
        role = Role(name="kv_score", axes="page token dim", inner=inner, dtype="float32")
        return State(name=name, rows="pages", layers=layers, roles=(role,), window=ring - 1, ring=ring)

    return make


# -- which layer is of which kind --------------------------------------------------------------------------------------


def _all(kind: str) -> _Kinds:
    return lambda _, num_layers: [kind] * num_layers


def _interval(fields: _Fields, num_layers: int) -> Sequence[str]:
    every = fields.size("full_attention_interval", default=4)
    return [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]


def _in_turn(first: str, second: str) -> _Kinds:
    return lambda _, num_layers: [second if layer % 2 else first for layer in range(num_layers)]


def _window_or_full(fields: _Fields, num_layers: int) -> Sequence[str]:
    """Mistral: all layers have the window, or none. Its class takes a file without the field for a window of 4096, other
    readers for none: so the field must be there.
    """
    if not fields.has("sliding_window"):
        raise fields.wrong("sliding_window", "a number of tokens, or null", None)
    return [FULL if fields.raw("sliding_window") is None else SLIDING] * num_layers


def _upper_windows(fields: _Fields, num_layers: int) -> Sequence[str]:
    """Qwen2, Qwen3: with `use_sliding_window`, the layers from `max_window_layers` on have the window."""
    if not _windows_used(fields):
        return [FULL] * num_layers
    first = fields.size("max_window_layers", least=0, most=MAX_LAYERS)
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def _windows_used(fields: _Fields) -> bool:
    return fields.raw("sliding_window") is not None and fields.flag("use_sliding_window")


def _all_windows_or_none(fields: _Fields, num_layers: int) -> Sequence[str]:
    return [SLIDING if _windows_used(fields) else FULL] * num_layers


def _kimi(fields: _Fields, num_layers: int) -> Sequence[str]:
    """The file lists layers from 1 on; each must be in one list."""
    linear = fields.section("linear_attn_config")
    full, kda = linear.items("full_attn_layers", of=int), linear.items("kda_layers", of=int)
    if full is None or kda is None or sorted(full + kda) != list(range(1, num_layers + 1)):
        raise linear.wrong("kda_layers", f"with full_attn_layers each of 1 to {num_layers} once", (full, kda))
    return [FULL if layer in set(full) else LINEAR for layer in range(1, num_layers + 1)]


def _bamba(fields: _Fields, num_layers: int) -> Sequence[str]:
    chosen = fields.items("attn_layer_indices", of=int) or []
    if any(not 0 <= layer < num_layers for layer in chosen):
        raise fields.wrong("attn_layer_indices", f"layers 0 to {num_layers - 1}", chosen)
    return [FULL if layer in chosen else LINEAR for layer in range(num_layers)]


def _jamba(fields: _Fields, num_layers: int) -> Sequence[str]:
    period = fields.size("attn_layer_period", most=MAX_LAYERS)
    offset = fields.size("attn_layer_offset", least=0, most=period - 1)
    return [FULL if layer % period == offset else LINEAR for layer in range(num_layers)]


def _m3(fields: _Fields, num_layers: int) -> Sequence[str]:
    sparse = fields.section("sparse_attention_config")
    chosen = sparse.items("sparse_attention_freq", of=int) or [0] * num_layers
    if any(chosen) and not sparse.flag("use_sparse_attention", default=True):
        raise sparse.wrong("sparse_attention_freq", "no sparse layers with use_sparse_attention=false", chosen)
    return [M3_SPARSE if sparse_layer else FULL for sparse_layer in chosen]


def _v4(fields: _Fields, num_layers: int) -> Sequence[str]:
    """By each layer's ratio, of which files list draft layers' too; else by transformers' default order."""
    ratios = fields.items("compress_ratios", of=int)
    if ratios is None:
        inner = [COMPRESSED if layer % 2 else HEAVILY_COMPRESSED for layer in range(max(num_layers - 2, 0))]
        return [HEAVILY_COMPRESSED] * min(num_layers, 2) + inner
    kinds = {0: SLIDING, 4: COMPRESSED, 128: HEAVILY_COMPRESSED}
    if any(ratio not in kinds for ratio in ratios) or len(ratios) < num_layers:
        raise fields.wrong("compress_ratios", f"0, 4 or 128 for each of {num_layers} layers", ratios)
    return [kinds[ratio] for ratio in ratios[:num_layers]]


def _listed(fields: _Fields) -> list[str] | None:
    """The kinds that a file lists."""
    kinds = fields.items("layer_types", "layers_block_type", of=str)
    return None if kinds is None else [_OLD_KINDS.get(kind, kind) for kind in kinds]


_NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _nemotron_listed(fields: _Fields) -> list[str] | None:
    return _listed(fields) or _letters(fields, "hybrid_override_pattern")


def _letters(fields: _Fields, key: str) -> list[str] | None:
    pattern = fields.raw(key)
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_NEMOTRON_LETTERS):
        raise fields.wrong(key, f"letters of {''.join(_NEMOTRON_LETTERS)}", pattern)
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _must_list(fields: _Fields, _: int) -> Sequence[str]:
    raise fields.wrong("layer_types", "a list of kinds of layers", None)


def _kinds(fields: _Fields, family: _Family, listed: Sequence[str] | None, num_layers: int) -> Sequence[str]:
    """The kind of every layer: as listed, else by the family's rule; raises `ConfigError` for kinds that it does not have."""
    kinds = family.kinds(fields, num_layers) if listed is None or not family.list_wins else listed
    if listed is not None and list(listed) != list(kinds):
        raise fields.wrong(fields.name_of("layer_types", "layers_block_type"), f"{reprlib.repr(list(kinds))}", listed)
    if len(kinds) != num_layers:
        raise fields.wrong("num_hidden_layers", f"{len(kinds)}, as many as kinds of layers are listed", num_layers)
    unknown = sorted(set(kinds) - set(family.states))
    if unknown:
        raise ConfigError(
            f"model {fields.model!r}, layer_types: layers of kind {', '.join(map(reprlib.repr, unknown))} cannot be described "
            f"in a {fields.model_type!r} model; known are {', '.join(family.states)}"
        )
    return kinds


def _num_draft_steps(fields: _Fields) -> int:
    return fields.size("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", default=0, least=0, most=64)


def _draft_kinds(fields: _Fields, family: _Family, num_steps: int) -> Sequence[str]:
    """The kinds of the draft layers, in the order of their ids."""
    if num_steps == 0 or not family.draft:
        raise ConfigError(f"model {fields.model!r}: draft layers are asked for, and its config describes none")
    listed = fields.items("mtp_layers_block_type", of=str)
    block = _letters(fields, "mtp_hybrid_override_pattern") or [_OLD_KINDS.get(kind, kind) for kind in listed or family.draft]
    unknown = sorted(set(block) - set(family.states))
    if unknown:
        raise fields.wrong("mtp_layers_block_type", f"kinds of {', '.join(family.states)}", unknown)
    return list(block) * num_steps


def _states(fields: _Fields, family: _Family, kinds: Sequence[str], dtypes: _Dtypes, *, first: int) -> list[State]:
    """One state per maker of the family, over the layers that have it; ids count from `first`."""
    makers = dict.fromkeys(maker for kind in family.states for maker in family.states[kind])
    states = []
    for maker in makers:
        layers = tuple(first + i for i, kind in enumerate(kinds) if maker in family.states[kind])
        if layers:
            states.append(maker(fields, layers, dtypes))
    return states


# -- families ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Family:
    """`states`: what a layer of each kind leaves. `kinds`: the rule where a file lists none; with `list_wins` false the rule
    holds, and a list must agree. `draft`: the kinds of one step of multi-token prediction.
    """

    states: Mapping[str, tuple[_Maker, ...]]
    kinds: _Kinds = _must_list
    listed: Callable[[_Fields], list[str] | None] = _listed
    list_wins: bool = True
    draft: tuple[str, ...] = ()


_KV, _KV_BY_HIDDEN = _attention(), _attention(by_hidden=True)
_WINDOW, _WINDOW_BY_HIDDEN = _attention("window"), _attention("window", by_hidden=True)
_V4_WINDOW = (_v4_window,)
_V4_C4 = (_v4_compressed("c4", COMPRESSED), _v4_index, _v4_open("c4_open", COMPRESSED, "head_dim"))
_V4_C128 = (_v4_compressed("c128", HEAVILY_COMPRESSED), _v4_open("c128_open", HEAVILY_COMPRESSED, "head_dim"))

_LLAMA = _Family(states={FULL: (_KV_BY_HIDDEN,)}, kinds=_all(FULL))
_QWEN3 = {FULL: (_KV,), SLIDING: (_WINDOW,)}
_QWEN3_NEXT = _Family(states={FULL: (_KV,), LINEAR: (_gdn,)}, kinds=_interval, draft=(FULL,))
_MLA = _Family(states={FULL: (_mla,)}, kinds=_all(FULL), draft=(FULL,))
_MAMBA2 = _mamba2("mamba_n_heads", "mamba_d_state", _mamba_head_dim)
_NEMOTRON_MAMBA2 = _mamba2("mamba_num_heads", "ssm_state_size", lambda fields, _: fields.size("mamba_head_dim"))
_MAMBA2_OR_KV = {FULL: (_KV_BY_HIDDEN,), LINEAR: (_MAMBA2,)}
_M3 = _Family(states={FULL: (_KV,), M3_SPARSE: (_KV, _m3_index)}, kinds=_m3)

_FAMILIES: Mapping[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _Family(states={FULL: (_KV_BY_HIDDEN,), SLIDING: (_WINDOW_BY_HIDDEN,)}, kinds=_window_or_full),
    "qwen2": _Family(states={FULL: (_KV_BY_HIDDEN,), SLIDING: (_WINDOW_BY_HIDDEN,)}, kinds=_upper_windows),
    "qwen3": _Family(states=_QWEN3, kinds=_upper_windows),
    "qwen3_moe": _Family(states={FULL: (_KV_BY_HIDDEN,), SLIDING: (_WINDOW_BY_HIDDEN,)}, kinds=_all_windows_or_none),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_NEXT),
    "gpt_oss": _Family(states=_QWEN3, kinds=_in_turn(SLIDING, FULL)),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _Family(states={INDEXED: (_mla, _index)}, kinds=_all(INDEXED), draft=(INDEXED,)),
    "deepseek_v4": _Family(
        states={
            SLIDING: _V4_WINDOW,
            COMPRESSED: (*_V4_WINDOW, *_V4_C4, _v4_open("index_open", COMPRESSED, "index_head_dim")),
            HEAVILY_COMPRESSED: (*_V4_WINDOW, *_V4_C128),
        },
        kinds=_v4,
        draft=(SLIDING,),
    ),
    "kimi_linear": _Family(states={FULL: (_mla,), LINEAR: (_kda,)}, kinds=_kimi, draft=(FULL,)),
    "falcon_h1": _Family(states={HYBRID: (_KV_BY_HIDDEN, _MAMBA2)}, kinds=_all(HYBRID), list_wins=False),
    "nemotron_h": _Family(
        states={FULL: (_KV,), LINEAR: (_NEMOTRON_MAMBA2,), "mlp": (), "moe": ()}, listed=_nemotron_listed, draft=(FULL, "moe")
    ),
    "granitemoehybrid": _Family(states=_MAMBA2_OR_KV, kinds=_all(LINEAR)),
    "bamba": _Family(states=_MAMBA2_OR_KV, kinds=_bamba, list_wins=False),
    "jamba": _Family(states={FULL: (_KV_BY_HIDDEN,), LINEAR: (_mamba1,)}, kinds=_jamba, list_wins=False),
    "minimax": _Family(states={FULL: (_KV_BY_HIDDEN,), LINEAR: (_lightning,)}, kinds=_in_turn(FULL, LINEAR)),
    "minimax_m3_vl_text": _M3,
    "minimax_m3_vl": _M3,
}  # fmt: skip


# -- presets -----------------------------------------------------------------------------------------------------------

_QWEN_NEXT: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}

# Only what decides the state. Compared field by field with public copies of the published files: kimi-linear-48b,
# falcon-h1-7b, jamba-mini (1.5); nemotron-h-8b in part, its head and state sizes with Megatron-Bridge's description. The
# others could be compared with model cards and transformers' defaults only: llama-3-8b, llama-3-70b, qwen3-32b,
# qwen3-next-80b, qwen3.5-397b-a17b (that it has one draft layer: from smaller models of its family), gpt-oss-120b; and
# deepseek-v3.2 with its repository's inference configuration, its draft layer with deepseek_v3's default.
_PRESET_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-next-80b": {
        **_QWEN_NEXT,
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "qwen3.5-397b-a17b": {
        **_QWEN_NEXT,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "mtp_num_hidden_layers": 1,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "num_nextn_predict_layers": 1,
    },
    "kimi-linear-48b": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
    "jamba-mini": {
        "model_type": "jamba",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "tiny": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}

PRESETS: Mapping[str, ModelSpec] = {name: from_config(config, name=name) for name, config in _PRESET_CONFIGS.items()}
"""Models by name, with the sizes of their published `config.json`; `tiny` is for trying things out."""
