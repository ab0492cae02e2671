"""Kinds of state: tensors with global axes, and the positions of each axis that a rank holds, by the closed formulas of
models and servers. Independent of the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.testing.reference import Context, heads_of

# ------------------------------------------------------------------------------------------------ positions of a rank


@dataclass(frozen=True, kw_only=True)
class Place:
    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    cp: int = 1
    cp_rank: int = 0
    context: Context = Context.WHOLE


@dataclass(frozen=True)
class GlobalAxis:
    """`held` returns the positions of a rank, in memory order."""

    size: int
    held: Callable[[Place], Sequence[int]]


def replicated(size: int) -> GlobalAxis:
    return GlobalAxis(size, lambda _: range(size))


def per_head(count: int) -> GlobalAxis:
    """Heads or channels, sharded; with more ranks than heads, neighbouring ranks hold the same one."""
    return GlobalAxis(count, lambda place: heads_of(count, tp=place.tp, tp_rank=place.tp_rank))


@dataclass(frozen=True)
class Part:
    """`count` heads or groups of `width` channels in a fused axis. `grouped`: if neither the groups nor the ranks divide the
    other, every rank holds all groups.
    """

    count: int
    width: int
    grouped: bool = False

    def channels(self, place: Place) -> Iterator[int]:
        """Those of a rank, counted from the start of the part."""
        heads: Iterable[int] = heads_of(self.count, tp=place.tp, tp_rank=place.tp_rank)
        if self.grouped and self.count % place.tp and place.tp % self.count:
            heads = range(self.count)
        return (head * self.width + channel for head in heads for channel in range(self.width))


def fused(*parts: Part) -> GlobalAxis:
    """Concatenated parts, each sharded separately: a rank holds `x_r ‖ B_r ‖ C_r`."""

    def held(place: Place) -> list[int]:
        channels: list[int] = []
        start = 0
        for part in parts:
            channels += [start + channel for channel in part.channels(place)]
            start += part.count * part.width
        return channels

    return GlobalAxis(sum(part.count * part.width for part in parts), held)


def experts(count: int) -> GlobalAxis:
    """Sharded by `ep_rank = tp_rank // moe_tp_size`, with `moe_tp_size = tp // ep`."""

    def held(place: Place) -> Sequence[int]:
        moe_tp_size = place.tp // place.ep
        return heads_of(count, tp=place.ep, tp_rank=place.tp_rank // moe_tp_size)

    return GlobalAxis(count, held)


def intermediate(size: int) -> GlobalAxis:
    """The intermediate dimension of experts, sharded by `moe_tp_rank = tp_rank % moe_tp_size`."""

    def held(place: Place) -> Sequence[int]:
        moe_tp_size = place.tp // place.ep
        return heads_of(size, tp=moe_tp_size, tp_rank=place.tp_rank % moe_tp_size)

    return GlobalAxis(size, held)


# ------------------------------------------------------------------------------------------------------- models of state


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor per layer: its inner axes in the order of the global array. `granule` tokens share one entry."""

    role: str
    axes: Mapping[str, GlobalAxis]
    dtype: str = "uint16"
    granule: int = 1

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class StateModel:
    """Unsharded. Without `paged`, a request has one slot."""

    name: str
    tensors: tuple[StateTensor, ...]
    paged: bool = False


def gqa(
    *,
    num_kv_heads: int,
    dims: tuple[int, int],
    dtype: str = "uint16",
    scales: int = 0,
    scales_dtype: str = "float32",
    name: str = "kv",
) -> StateModel:
    """K and V by head, each with `scales` block scales per head and token."""
    heads = per_head(num_kv_heads)
    tensors = [
        StateTensor(role=role, axes={"kv_head": heads, "dim": replicated(dim)}, dtype=dtype)
        for role, dim in zip(("k", "v"), dims, strict=True)
    ]
    if scales:
        axes = {"kv_head": heads, "dim": replicated(scales)}
        tensors += [StateTensor(role=role, axes=axes, dtype=scales_dtype) for role in ("k_scale", "v_scale")]
    return StateModel(name=name, tensors=tuple(tensors), paged=True)


def mla(*, dim: int, dtype: str = "uint16", scales: int = 0, scales_dtype: str = "float32", name: str = "mla") -> StateModel:
    """The latent, the same on every rank, with `scales` block scales per token."""
    latent = StateTensor(role="latent", axes={"dim": replicated(dim)}, dtype=dtype)
    scale = StateTensor(role="latent_scale", axes={"dim": replicated(scales)}, dtype=scales_dtype)
    return StateModel(name=name, tensors=(latent, scale) if scales else (latent,), paged=True)


def gdn(
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    kernel: int,
    dtypes: tuple[str, str] = ("uint16", "float32"),
    name: str = "ssm",
) -> StateModel:
    """Gated delta net: `conv` over `q ‖ k ‖ v`, `temporal` per value head."""
    channels = fused(
        Part(num_key_heads, key_head_dim), Part(num_key_heads, key_head_dim), Part(num_value_heads, value_head_dim)
    )
    return StateModel(
        name=name,
        tensors=(
            _conv("conv", channels, kernel, dtypes[0]),
            _temporal(num_value_heads, key_head_dim, value_head_dim, dtypes[1]),
        ),
    )


def kda(
    *,
    num_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    kernel: int,
    dtypes: tuple[str, str] = ("uint16", "float32"),
    separate: bool = False,
    name: str = "ssm",
) -> StateModel:
    """Kimi delta attention: `conv` over `q ‖ k ‖ v`, or three tensors if `separate`; `temporal` per head."""
    q, k, v = Part(num_heads, key_head_dim), Part(num_heads, key_head_dim), Part(num_heads, value_head_dim)
    convs = {"conv_q": fused(q), "conv_k": fused(k), "conv_v": fused(v)} if separate else {"conv": fused(q, k, v)}
    return StateModel(
        name=name,
        tensors=(
            *(_conv(role, channels, kernel, dtypes[0]) for role, channels in convs.items()),
            _temporal(num_heads, key_head_dim, value_head_dim, dtypes[1]),
        ),
    )


def mamba2(
    *,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    kernel: int,
    dtypes: tuple[str, str] = ("uint16", "float32"),
    name: str = "ssm",
) -> StateModel:
    """Mamba2: `conv` over `x ‖ B ‖ C`, `temporal` per head; every rank holds groups that cannot be sharded."""
    group = Part(num_groups, state_size, grouped=True)
    axes = {"head": per_head(num_heads), "head_dim": replicated(head_dim), "state": replicated(state_size)}
    return StateModel(
        name=name,
        tensors=(
            _conv("conv", fused(Part(num_heads, head_dim), group, group), kernel, dtypes[0]),
            StateTensor(role="temporal", axes=axes, dtype=dtypes[1]),
        ),
    )


def mamba1(
    *, inner: int, state_size: int, kernel: int, dtypes: tuple[str, str] = ("uint16", "float32"), name: str = "ssm"
) -> StateModel:
    axes = {"channel": per_head(inner), "state": replicated(state_size)}
    temporal = StateTensor(role="temporal", axes=axes, dtype=dtypes[1])
    return StateModel(name=name, tensors=(_conv("conv", per_head(inner), kernel, dtypes[0]), temporal))


def convolution(*, channels: int, kernel: int, dtype: str = "uint16", name: str = "conv") -> StateModel:
    return StateModel(name=name, tensors=(_conv("conv", per_head(channels), kernel, dtype),))


def lightning(
    *, num_heads: int, key_head_dim: int, value_head_dim: int, dtype: str = "float32", name: str = "ssm"
) -> StateModel:
    return StateModel(name=name, tensors=(_temporal(num_heads, key_head_dim, value_head_dim, dtype),))


def index_keys(*, key_nbytes: int, scale_nbytes: int = 0, granule: int = 1, name: str = "index") -> StateModel:
    """Index keys and their scales in bytes, the same on every rank; one of each for `granule` tokens."""
    sizes = {"key": key_nbytes, "scale": scale_nbytes}
    tensors = (
        StateTensor(role=role, axes={"byte": replicated(nbytes)}, dtype="uint8", granule=granule)
        for role, nbytes in sizes.items()
        if nbytes
    )
    return StateModel(name=name, tensors=tuple(tensors), paged=True)


def compressed(*, dim: int, ratio: int, dtype: str = "uint16", name: str) -> StateModel:
    """One entry of `dim` elements for `ratio` tokens, the same on every rank."""
    tensor = StateTensor(role="latent", axes={"dim": replicated(dim)}, dtype=dtype, granule=ratio)
    return StateModel(name=name, tensors=(tensor,), paged=True)


def _conv(role: str, channels: GlobalAxis, kernel: int, dtype: str) -> StateTensor:
    return StateTensor(role=role, axes={"channel": channels, "width": replicated(kernel - 1)}, dtype=dtype)


def _temporal(num_heads: int, key_dim: int, value_dim: int, dtype: str) -> StateTensor:
    axes = {"head": per_head(num_heads), "key_dim": replicated(key_dim), "value_dim": replicated(value_dim)}
    return StateTensor(role="temporal", axes=axes, dtype=dtype)
