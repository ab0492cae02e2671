"""The architectures of this example: one small entry each, in plain Python.

An entry says two things. `config` builds a model of that family with every size cut down (`transformers.AutoConfig.for_model`).
`components` declares which state the model leaves behind after a prompt, in *global* terms: which layers hold it, the named
axes and sizes of each tensor, and how tensor parallelism cuts it. A rank process needs only this file, not the model.

`model.prefill` compares the declaration with what the model really cached, so a wrong entry fails
instead of moving wrong bytes.

Numbers are chosen to make re-sharding interesting: fewer KV heads than ranks, head counts that ranks do not divide, odd layer
counts, stages without attention, unequal widths wherever equal ones would hide a transposed axis.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = 0
"""As a size in `TensorSpec.sizes`: the token axis, as long as what the request holds."""

TokenRange = tuple[int, int]
"""Tokens `[start, stop)` of a request."""


@dataclass(frozen=True)
class Block:
    """`num_units * unit_size` consecutive positions of the split axis, of which a rank holds whole units.

    Every block is split over the ranks on its own (a convolution over `x | B | C` has three). A block with fewer units than
    there are ranks is replicated: rank `r` of `T` holds units `[start, stop)` with `start = r * U // T` and
    `stop = max(start + 1, (r + 1) * U // T)`. `groups` are shared by several heads: where they neither divide by the ranks
    nor divide them, a rank holds all of them.
    """

    name: str
    num_units: int
    unit_size: int
    groups: bool = False

    @property
    def size(self) -> int:
        return self.num_units * self.unit_size


@dataclass(frozen=True)
class TensorSpec:
    """One tensor per layer, undivided: `sizes[i]` positions along `axes[i]`.

    `split` names the axis that tensor parallelism cuts into `blocks`, in memory order; without it every rank holds the whole
    tensor. `dtype` is set where the model keeps that state in it whatever the weights' dtype is; `None` follows the weights.
    """

    role: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    split: str | None = None
    blocks: tuple[Block, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        found = sum(block.size for block in self.blocks)
        expected = 0 if self.split is None else self.sizes[self.axes.index(self.split)]
        if found != expected:
            raise ValueError(f"tensor {self.role!r}: blocks add up to {found}, axis {self.split!r} has {expected}")

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """The tensor's shape when its token axis holds `num_rows`: tokens, or granules of them."""
        return tuple(num_rows if axis == "token" else size for axis, size in zip(self.axes, self.sizes, strict=True))


def everything(num_tokens: int) -> TokenRange:
    """All tokens of the request are held."""
    return 0, num_tokens


@dataclass(frozen=True)
class ComponentSpec:
    """Tensors that share one index space: pages of tokens, or one slot per request. `layers` are global layer ids.

    `tokens` says which are held after so many. `granule` tokens share one row: of a last granule that is not full there
    is none.
    """

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    tokens: Callable[[int], TokenRange] = everything
    granule: int = 1

    @property
    def paged(self) -> bool:
        """True: indexed by token. False: one slot per request."""
        return any("token" in tensor.axes for tensor in self.tensors)

    def num_rows(self, tokens: TokenRange) -> int:
        """Granules in a range of tokens."""
        return tokens[1] // self.granule - tokens[0] // self.granule


@dataclass(frozen=True)
class Architecture:
    """`config` goes to `AutoConfig.for_model`; `num_layers` counts every layer, also those without state."""

    config: Mapping[str, Any]
    num_layers: int
    components: tuple[ComponentSpec, ...]


# --- the kinds of state -------------------------------------------------------------------------------------------------


def last(window: int) -> Callable[[int], TokenRange]:
    """A window of `window` tokens, as the next token sees it: itself, and the `window - 1` before."""
    return lambda num_tokens: (max(0, num_tokens - (window - 1)), num_tokens)


def gqa(layers: Iterable[int], *, heads: int, dim: int, window: int | None = None) -> ComponentSpec:
    """K and V `[token, kv_head, dim]`; with `window`, only the last tokens, in a pool of their own."""
    split = (Block("kv_head", heads, 1),)
    axes, sizes = ("token", "kv_head", "dim"), (TOKENS, heads, dim)
    tensors = tuple(TensorSpec(role, axes, sizes, "kv_head", split) for role in ("k", "v"))
    if window is None:
        return ComponentSpec("kv", tuple(layers), tensors)
    return ComponentSpec("window", tuple(layers), tensors, last(window))


def _per_token(name: str, layers: Iterable[int], dims: Mapping[str, int], **held: Any) -> ComponentSpec:
    """Vectors of `dims` elements by role, `[token, dim]`; every rank holds them whole."""
    tensors = tuple(TensorSpec(role, ("token", "dim"), (TOKENS, size)) for role, size in dims.items())
    return ComponentSpec(name, tuple(layers), tensors, **held)


def mla(layers: Iterable[int], *, rank: int, rope: int) -> ComponentSpec:
    """Latent `[token, rank]` and rotated key part `[token, rope]`."""
    return _per_token("mla", layers, {"latent": rank, "rope": rope})


def index(layers: Iterable[int], *, dim: int) -> ComponentSpec:
    """The index keys of sparse attention, `[token, dim]`."""
    return _per_token("index", layers, {"key": dim})


def compressed(
    name: str, layers: Iterable[int], *, ratio: int, dims: Mapping[str, int], overlapping: bool
) -> tuple[ComponentSpec, ...]:
    """DeepSeek-V4's past, one entry for `ratio` tokens, and what its compressors need to make the next one.

    That is what they made of every token since (`kv`, and `gate`: its weight). Where entries overlap that is twice as wide,
    and the first half of the `ratio` tokens before is needed as well.
    """
    layers = tuple(layers)
    series = 2 if overlapping else 1
    projected = {f"{role}.{part}": dim for role, dim in dims.items() for part in ("kv", "gate")}
    opened = {role: series * dim for role, dim in projected.items()}
    components = [
        _per_token(name, layers, dims, granule=ratio),
        _per_token(f"{name}_open", layers, opened, tokens=lambda n: (n - n % ratio, n)),
    ]
    if overlapping:
        before = _per_token(
            f"{name}_before", layers, projected, tokens=lambda n: (max(0, n - n % ratio - ratio), n - n % ratio)
        )
        components.append(before)
    return tuple(components)


def _recurrent(layers: Iterable[int], kernel: int, blocks: tuple[Block, ...], temporal: TensorSpec) -> ComponentSpec:
    """A convolution `[channel, kernel - 1]` over `blocks`, and a temporal state."""
    channels = sum(block.size for block in blocks)
    conv = TensorSpec("conv", ("channel", "width"), (channels, kernel - 1), "channel", blocks)
    return ComponentSpec("ssm", tuple(layers), (conv, temporal))


def _per_head(heads: int, axes: tuple[str, str], sizes: tuple[int, int], dtype: str | None = "float32") -> TensorSpec:
    """A temporal state `[head, *axes]`."""
    return TensorSpec("temporal", ("head", *axes), (heads, *sizes), "head", (Block("head", heads, 1),), dtype)


def delta_net(layers: Iterable[int], *, heads: tuple[int, int], dims: tuple[int, int], kernel: int = 4) -> ComponentSpec:
    """Gated or Kimi delta net; `heads` and `dims` are (key, value). Conv `q | k | v`, temporal `[head, key_dim, value_dim]`."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    blocks = (Block("q", key_heads, key_dim), Block("k", key_heads, key_dim), Block("v", value_heads, value_dim))
    return _recurrent(layers, kernel, blocks, _per_head(value_heads, ("key_dim", "value_dim"), dims))


def mamba2(layers: Iterable[int], *, heads: int, dim: int, groups: int, state: int, kernel: int = 4) -> ComponentSpec:
    """Conv `x | B | C`, temporal `[head, dim, state]`."""
    blocks = (Block("x", heads, dim), Block("B", groups, state, groups=True), Block("C", groups, state, groups=True))
    return _recurrent(layers, kernel, blocks, _per_head(heads, ("dim", "state"), (dim, state)))


def mamba1(layers: Iterable[int], *, channels: int, state: int, kernel: int = 4) -> ComponentSpec:
    """Conv `x`, temporal `[channel, state]`."""
    blocks = (Block("x", channels, 1),)
    temporal = TensorSpec("temporal", ("channel", "state"), (channels, state), "channel", blocks, "float32")
    return _recurrent(layers, kernel, blocks, temporal)


def lightning(layers: Iterable[int], *, heads: int, dim: int) -> ComponentSpec:
    """MiniMax's linear attention: no convolution, temporal `[head, key_dim, value_dim]` in the weights' dtype."""
    return ComponentSpec("ssm", tuple(layers), (_per_head(heads, ("key_dim", "value_dim"), (dim, dim), dtype=None),))


# --- the table ----------------------------------------------------------------------------------------------------------

# No end-of-sequence token: every run has the length that was asked for. The wide initialisation makes tokens vary.
_COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN_HYBRID: Mapping[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_MLA: Mapping[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DEEPSEEK: Mapping[str, Any] = {
    **_MLA,
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _kinds(pattern: str, names: Mapping[str, str]) -> list[str]:
    return [names[letter] for letter in pattern]


def _layers(pattern: str, letter: str) -> tuple[int, ...]:
    return tuple(i for i, found in enumerate(pattern) if found == letter)


_LINEAR_FULL = {"L": "linear_attention", "F": "full_attention"}


def _llama() -> Architecture:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return Architecture(
        {**_COMMON, **config, "model_type": "llama", "intermediate_size": 96}, 4, (gqa(range(4), heads=4, dim=16),)
    )


def _qwen3() -> Architecture:
    config = {"num_hidden_layers": 5, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}
    return Architecture(
        {**_COMMON, **config, "model_type": "qwen3", "intermediate_size": 96}, 5, (gqa(range(5), heads=6, dim=16),)
    )


def _qwen3_next(model_type: str, pattern: str) -> Architecture:
    config = {"model_type": model_type, "num_hidden_layers": len(pattern), "layer_types": _kinds(pattern, _LINEAR_FULL)}
    components = (gqa(_layers(pattern, "F"), heads=2, dim=16), delta_net(_layers(pattern, "L"), heads=(4, 8), dims=(16, 8)))
    return Architecture({**_QWEN_HYBRID, **config}, len(pattern), components)


def _gpt_oss(pattern: str) -> Architecture:
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, {"S": "sliding_attention", "F": "full_attention"}),
        "sliding_window": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    components = (gqa(_layers(pattern, "F"), heads=8, dim=8), gqa(_layers(pattern, "S"), heads=8, dim=8, window=16))
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _deepseek_v3() -> Architecture:
    return Architecture({**_DEEPSEEK, "model_type": "deepseek_v3", "num_mtp_layers": 0}, 3, (mla(range(3), rank=32, rope=8),))


def _deepseek_v32() -> Architecture:
    config = {"model_type": "deepseek_v32", "index_topk": 16, "index_head_dim": 16, "index_n_heads": 4}
    return Architecture({**_DEEPSEEK, **config}, 3, (mla(range(3), rank=32, rope=8), index(range(3), dim=16)))


def _kimi_linear(pattern: str) -> Architecture:
    config = {
        "model_type": "kimi_linear",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, _LINEAR_FULL),
        "num_experts": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "pad_token_id": 0,
    }
    components = (mla(_layers(pattern, "F"), rank=32, rope=8), delta_net(_layers(pattern, "L"), heads=(4, 4), dims=(16, 16)))
    return Architecture({**_MLA, **config}, len(pattern), components)


def _falcon_h1() -> Architecture:
    config = {
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
    }
    return Architecture(
        {**_COMMON, **config}, 3, (gqa(range(3), heads=2, dim=8), mamba2(range(3), heads=6, dim=16, groups=1, state=24))
    )


def _nemotron_h(pattern: str) -> Architecture:
    config = {
        "model_type": "nemotron_h",
        "layers_block_type": _kinds(pattern, {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}),
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    }
    components = (
        gqa(_layers(pattern, "*"), heads=2, dim=16),
        mamba2(_layers(pattern, "M"), heads=8, dim=16, groups=4, state=24),
    )
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _granite_hybrid(pattern: str) -> Architecture:
    config = {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, _LINEAR_FULL),
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
    }
    components = (
        gqa(_layers(pattern, "F"), heads=4, dim=8),
        mamba2(_layers(pattern, "L"), heads=8, dim=16, groups=1, state=24),
    )
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _bamba(pattern: str) -> Architecture:
    config = {
        "model_type": "bamba",
        "num_hidden_layers": len(pattern),
        "attn_layer_indices": list(_layers(pattern, "F")),
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
    }
    components = (
        gqa(_layers(pattern, "F"), heads=4, dim=8),
        mamba2(_layers(pattern, "L"), heads=8, dim=16, groups=2, state=24),
    )
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _jamba() -> Architecture:
    config = {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "mamba_d_state": 12,
    }
    return Architecture({**_COMMON, **config}, 4, (gqa([1], heads=2, dim=8), mamba1([0, 2, 3], channels=128, state=12)))


def _minimax(pattern: str) -> Architecture:
    config = {
        "model_type": "minimax",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, _LINEAR_FULL),
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "block_size": 16,
    }
    components = (gqa(_layers(pattern, "F"), heads=4, dim=16), lightning(_layers(pattern, "L"), heads=8, dim=16))
    return Architecture({**_COMMON, **config}, len(pattern), components)


def _deepseek_v4(pattern: str) -> Architecture:
    kinds = {"S": "sliding_attention", "C": "compressed_sparse_attention", "H": "heavily_compressed_attention"}
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, kinds),
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe"] * len(pattern),
        "num_attention_heads": 4,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 4,
        "hc_mult": 2,
        "sliding_window": 16,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 3,
    }
    components = (
        _per_token("window", range(len(pattern)), {"latent": 16}, tokens=last(16)),
        *compressed("csa", _layers(pattern, "C"), ratio=4, dims={"indexer": 8, "compressor": 16}, overlapping=True),
        *compressed("hca", _layers(pattern, "H"), ratio=8, dims={"compressor": 16}, overlapping=False),
    )
    return Architecture({**_COMMON, **_EXPERTS, **config}, len(pattern), components)


def _minimax_m3(pattern: str) -> Architecture:
    config = {
        "model_type": "minimax_m3_vl_text",
        "num_hidden_layers": len(pattern),
        "layer_types": _kinds(pattern, {"I": "minimax_m3_sparse", "F": "full_attention"}),
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    }
    components = (gqa(range(len(pattern)), heads=4, dim=16), index(_layers(pattern, "I"), dim=16))
    return Architecture({**_COMMON, **config}, len(pattern), components)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _llama(),
    "qwen3": _qwen3(),
    "qwen3-next": _qwen3_next("qwen3_next", "LLFLLF"),
    "qwen3.5-moe": _qwen3_next("qwen3_5_moe_text", "LLLFLLLF"),
    "gpt-oss": _gpt_oss("SFSF"),
    "deepseek-v3": _deepseek_v3(),
    "deepseek-v3.2": _deepseek_v32(),
    "deepseek-v4": _deepseek_v4("HCHC"),
    "kimi-linear": _kimi_linear("LLFLF"),
    "falcon-h1": _falcon_h1(),
    "nemotron-h": _nemotron_h("M-*ME*M"),
    "granite-hybrid": _granite_hybrid("LLFLF"),
    "bamba": _bamba("LFLLF"),
    "jamba": _jamba(),
    "minimax": _minimax("FLLFL"),
    "minimax-m3": _minimax_m3("FIII"),
}


def describe(name: str) -> tuple[ComponentSpec, ...]:
    """The state that architecture `name` leaves behind, in global terms."""
    return ARCHITECTURES[name].components
