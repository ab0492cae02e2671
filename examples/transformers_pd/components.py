"""Declarations of the state that a model leaves behind after a prompt, in global terms and in plain Python.

A component names its layers, the axes and sizes of each tensor, and how tensor parallelism splits them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = 0
"""The size of the token axis in `TensorSpec.sizes`: the number of tokens that the request holds."""

TokenRange = tuple[int, int]
"""Tokens `[start, stop)` of a request."""


@dataclass(frozen=True)
class Block:
    """`num_units * unit_size` consecutive positions of the split axis; a rank holds whole units.

    Every block is split over the ranks separately (a convolution over `x | B | C` has three). Rank `r` of `T` holds units
    `[start, stop)` with `start = r * U // T` and `stop = max(start + 1, (r + 1) * U // T)`, so a block with fewer units than
    ranks is replicated. Several heads share one of `groups`: if neither their number nor the ranks' divides the other, every
    rank holds all groups.
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

    Tensor parallelism splits axis `split`, which consists of `blocks` in memory order; without it every rank holds the whole
    tensor. `dtype` is that of the state; `None`: that of the weights.
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
        """The tensor's shape with `num_rows` rows, tokens or granules of them, along its token axis."""
        return tuple(num_rows if axis == "token" else size for axis, size in zip(self.axes, self.sizes, strict=True))


def everything(num_tokens: int) -> TokenRange:
    """All tokens of the request."""
    return 0, num_tokens


@dataclass(frozen=True)
class ComponentSpec:
    """Tensors with a common index space: pages of tokens, or one slot per request. `layers` are global layer ids.

    `tokens` maps the length of a request to the tokens that are held. `granule` tokens share one row; a partial last granule
    has none.
    """

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    tokens: Callable[[int], TokenRange] = everything
    granule: int = 1

    @property
    def paged(self) -> bool:
        """Whether rows are pages of tokens; otherwise a request has one slot."""
        return any("token" in tensor.axes for tensor in self.tensors)

    def num_rows(self, tokens: TokenRange) -> int:
        """The number of granules in a range of tokens."""
        return tokens[1] // self.granule - tokens[0] // self.granule


# --- the kinds of state -------------------------------------------------------------------------------------------------


def last(window: int) -> Callable[[int], TokenRange]:
    """The `window - 1` last tokens: with the next token, a window of `window`."""
    return lambda num_tokens: (max(0, num_tokens - (window - 1)), num_tokens)


def gqa(layers: Iterable[int], *, heads: int, dim: int, window: int | None = None) -> ComponentSpec:
    """K and V `[token, kv_head, dim]`; with `window`, only the last tokens, in a separate pool."""
    split = (Block("kv_head", heads, 1),)
    axes, sizes = ("token", "kv_head", "dim"), (TOKENS, heads, dim)
    tensors = tuple(TensorSpec(role, axes, sizes, "kv_head", split) for role in ("k", "v"))
    if window is None:
        return ComponentSpec("kv", tuple(layers), tensors)
    return ComponentSpec("window", tuple(layers), tensors, last(window))


def per_token(name: str, layers: Iterable[int], dims: Mapping[str, int], **held: Any) -> ComponentSpec:
    """One vector per token and role, `[token, dim]`, of `dims[role]` elements; the same on every rank."""
    tensors = tuple(TensorSpec(role, ("token", "dim"), (TOKENS, size)) for role, size in dims.items())
    return ComponentSpec(name, tuple(layers), tensors, **held)


def mla(layers: Iterable[int], *, rank: int, rope: int) -> ComponentSpec:
    """Latent `[token, rank]` and rotated key part `[token, rope]`."""
    return per_token("mla", layers, {"latent": rank, "rope": rope})


def index(layers: Iterable[int], *, dim: int) -> ComponentSpec:
    """The index keys of sparse attention, `[token, dim]`."""
    return per_token("index", layers, {"key": dim})


def compressed(
    name: str, layers: Iterable[int], *, ratio: int, dims: Mapping[str, int], overlapping: bool
) -> tuple[ComponentSpec, ...]:
    """DeepSeek-V4's compressed past, one entry for `ratio` tokens, and the inputs of the next entry.

    The inputs are `kv` and its weight `gate` of every token since the last entry. If entries overlap, these are twice as wide,
    and the first half of the `ratio` tokens before them is needed too.
    """
    layers = tuple(layers)
    series = 2 if overlapping else 1
    projected = {f"{role}.{part}": dim for role, dim in dims.items() for part in ("kv", "gate")}
    opened = {role: series * dim for role, dim in projected.items()}
    components = [
        per_token(name, layers, dims, granule=ratio),
        per_token(f"{name}_open", layers, opened, tokens=lambda n: (n - n % ratio, n)),
    ]
    if overlapping:
        before = per_token(f"{name}_before", layers, projected, tokens=lambda n: (max(0, n - n % ratio - ratio), n - n % ratio))
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
