"""Recurrent state: convolution windows and temporal states. The `*_roles` functions describe a kind, and `recurrent` binds
it to a rank's tensors, which may be views of a larger slot page. A request has one slot, which is read when it is sent: give
`Slot(id)` to `finish`. `dtypes` are those of `conv` and `temporal`. The roles' `axes` are their usual memory orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.state.declare import Block, Role, State, blocks_by_tp, by_tp, check_size, whole


def gdn_roles(
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    kernel: int,
    dtypes: tuple[str | None, str | None] = (None, None),
) -> tuple[Role, Role]:
    """Gated delta net (Qwen3-Next, Qwen3.5). `conv` has `kernel - 1` columns over `q ‖ k ‖ v`, each divided by heads.
    `temporal` is per value head.
    """
    keys, values = Block(num_key_heads, key_head_dim), Block(num_value_heads, value_head_dim)
    inner = {"head": by_tp(num_value_heads), "key_dim": whole(key_head_dim), "value_dim": whole(value_head_dim)}
    return (
        _conv((keys, keys, values), kernel, dtypes[0]),
        Role(name="temporal", axes="slot head key_dim value_dim", inner=inner, dtype=dtypes[1]),
    )


def kda_roles(
    *,
    num_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    kernel: int,
    fused: bool = True,
    dtypes: tuple[str | None, str | None] = (None, None),
) -> tuple[Role, ...]:
    """Kimi delta attention. `conv` is over `q ‖ k ‖ v`, stored `[kernel - 1, channel]`; without `fused` it is `conv_q`,
    `conv_k` and `conv_v`. `temporal` is per head.
    """
    keys, values = Block(num_heads, key_head_dim), Block(num_heads, value_head_dim)
    axes = "slot width channel"
    parts = {"conv": (keys, keys, values)} if fused else {"conv_q": (keys,), "conv_k": (keys,), "conv_v": (values,)}
    inner = {"head": by_tp(num_heads), "key_dim": whole(key_head_dim), "value_dim": whole(value_head_dim)}
    return (
        *(_conv(blocks, kernel, dtypes[0], name=name, axes=axes) for name, blocks in parts.items()),
        Role(name="temporal", axes="slot head key_dim value_dim", inner=inner, dtype=dtypes[1]),
    )


def mamba2_roles(
    *,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    kernel: int,
    dtypes: tuple[str | None, str | None] = (None, None),
) -> tuple[Role, Role]:
    """Mamba2 (Nemotron-H, Falcon-H1, Granite, Bamba). `conv` is over `x ‖ B ‖ C`: `x` divided by heads, `B` and `C` by
    groups. If neither the number of groups nor of ranks divides the other, every rank owns `B` and `C` whole. `temporal` is
    per head.
    """
    group = Block(num_groups, state_size, groups=True)
    inner = {"head": by_tp(num_heads), "head_dim": whole(head_dim), "state": whole(state_size)}
    return (
        _conv((Block(num_heads, head_dim), group, group), kernel, dtypes[0]),
        Role(name="temporal", axes="slot head head_dim state", inner=inner, dtype=dtypes[1]),
    )


def mamba1_roles(
    *, inner_size: int, state_size: int, kernel: int, dtypes: tuple[str | None, str | None] = (None, None)
) -> tuple[Role, Role]:
    """Mamba1 (Jamba): `conv` with `kernel - 1` columns and `temporal`, both divided by channel."""
    inner = {"channel": by_tp(inner_size), "state": whole(state_size)}
    return (
        _conv((Block(inner_size, 1),), kernel, dtypes[0]),
        Role(name="temporal", axes="slot channel state", inner=inner, dtype=dtypes[1]),
    )


def lightning_roles(*, num_heads: int, key_head_dim: int, value_head_dim: int, dtype: str | None = None) -> tuple[Role]:
    """Lightning attention (MiniMax): `temporal` per head, no convolution."""
    inner = {"head": by_tp(num_heads), "key_dim": whole(key_head_dim), "value_dim": whole(value_head_dim)}
    return (Role(name="temporal", axes="slot head key_dim value_dim", inner=inner, dtype=dtype),)


def convolution_roles(*, channels: int, kernel: int, dtype: str | None = None) -> tuple[Role]:
    """A gated short convolution (LFM2): `conv` has `kernel - 1` columns, divided by channel."""
    return (_conv((Block(channels, 1),), kernel, dtype),)


def recurrent(
    roles: Sequence[Role],
    tensors: Mapping[str, Mapping[int, Any]],
    *,
    topology: Topology,
    axes: Mapping[str, str] | None = None,
    name: str = "ssm",
    layers_by_stage: Sequence[Sequence[int]] | None = None,
) -> Component:
    """The component of one kind over this rank's `tensors`, by role and layer.

        ssm = recurrent(gdn_roles(...), {"conv": conv, "temporal": temporal}, topology=topology)

    Otherwise as `State.component`.
    """
    state = State(name=name, rows="slot", layers=(), roles=tuple(roles))  # the layers are those of `tensors`
    return state.component(tensors, topology=topology, axes=axes, layers_by_stage=layers_by_stage)


def _conv(
    blocks: Sequence[Block], kernel: int, dtype: str | None, *, name: str = "conv", axes: str = "slot channel width"
) -> Role:
    """The last `kernel - 1` inputs of every channel."""
    check_size(kernel, "kernel", least=2)
    return Role(name=name, axes=axes, inner={"channel": blocks_by_tp(blocks), "width": whole(kernel - 1)}, dtype=dtype)
