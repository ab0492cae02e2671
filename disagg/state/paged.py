"""Paged attention KV: multi-head, grouped-query and latent attention (MLA), and their block scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.memory import RawTensor, raw_tensor
from disagg.core.topology import Topology
from disagg.layout.placement import ORDERS, Component, parse_axes
from disagg.layout.tables import TOKEN
from disagg.state.declare import Role, Rule, Scale, all_tokens, by_layer, by_tp, check_size, declare, whole


def gqa_roles(num_kv_heads: int, *, dims: tuple[int, int], dtype: str | None, axes: str = ORDERS["nhd"]) -> tuple[Role, Role]:
    """K and V of `dims` elements per head and token, divided over tensor-parallel ranks by head."""
    heads = by_tp(num_kv_heads)
    return (
        Role(name="k", axes=axes, inner={"kv_head": heads, "dim": whole(dims[0])}, dtype=dtype),
        Role(name="v", axes=axes, inner={"kv_head": heads, "dim": whole(dims[1])}, dtype=dtype),
    )


def mla_roles(dim: int, *, dtype: str | None, scales: int = 0, scales_dtype: str | None = None) -> tuple[Role, ...]:
    """`dim` elements and `scales` block scales per token. Every rank owns both whole."""
    latent = Role(name="latent", axes="page token dim", inner={"dim": whole(dim)}, dtype=dtype)
    if not scales:
        return (latent,)
    return latent, Role(name="latent_scale", axes="page token dim", inner={"dim": whole(scales)}, dtype=scales_dtype)


def gqa(
    tensors: Mapping[int, Any],
    *,
    axes: str | Mapping[str, str],
    num_kv_heads: int,
    topology: Topology,
    name: str = "kv",
    dims: tuple[int, int] | None = None,
    dtype: str | None = None,
    scales: Mapping[int, Any] | None = None,
    scales_per_head: int = 1,
    scales_dtype: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    scales_by_head: bool = False,
    rounding: str | None = "nearest",
    layers_by_stage: Sequence[Sequence[int]] | None = None,
    tokens: Rule = all_tokens,
    optional: bool = False,
) -> Component:
    """K and V of multi-head or grouped-query attention, divided over tensor-parallel ranks by KV head.

    `tensors` maps each layer id of this rank to `(k, v)`, or to one tensor with both along a `kv` axis of size 2. `axes`
    names their axes in memory order, from `page kv token kv_head dim`: `"nhd"` is `"page token kv_head dim"`, `"hnd"` is
    `"page kv_head token dim"`. Where K and V differ, it maps `"k"` and `"v"` to their own. `num_kv_heads` are the model's
    total KV heads, not this rank's: rank `r` of `T` owns `[floor(r*H/T), max(start+1, floor((r+1)*H/T)))`. `scales` are
    block scales (FP8, MX), with the same axes and `scales_per_head` in place of `dim`. `dims` (of K and V, which may differ)
    and `dtype` are required only if a stage may have no layer. `k_scale`, `v_scale` and `rounding` are those of `Role`. With
    `scales_by_head` each layer has a scale for every KV head of the model.

    Raises `ConfigError`, with the layer, the axis and both values, if a tensor contradicts the declaration.
    """
    what = f"component {name!r}"
    given: object = axes
    if not isinstance(given, str) and not (isinstance(given, Mapping) and set(given) == {"k", "v"}):
        raise ConfigError(f"{what}: expected axes, or those of 'k' and of 'v', found {given!r}")
    orders = {role: axes if isinstance(axes, str) else axes[role] for role in "kv"}
    known = ("page", "kv", TOKEN, "kv_head", "dim") if isinstance(axes, str) else ("page", TOKEN, "kv_head", "dim")
    names, v_names = (parse_axes(order, known=known, what=what) for order in orders.values())
    check_size(num_kv_heads, f"{what}: num_kv_heads")
    plain = {role: " ".join(axis for axis in found if axis != "kv") for role, found in zip("kv", (names, v_names), strict=True)}
    bound = pairs(tensors, names, what=what)
    if dims is None:
        dims = _dim(bound["k"], plain["k"], what), _dim(bound["v"], plain["v"], what)
    declared = zip(gqa_roles(num_kv_heads, dims=dims, dtype=dtype), (k_scale, v_scale), strict=True)
    by = "kv_head" if scales_by_head else None
    numbers = [replace(role, scale=scale, scale_axis=by, rounding=rounding) for role, scale in declared]
    roles = [role.of(bound[role.name], axes=plain[role.name]) for role in numbers]
    if scales is not None:
        bound = pairs(scales, names, what=f"{what}, scales")
        sized = gqa_roles(num_kv_heads, dims=(scales_per_head, scales_per_head), dtype=scales_dtype)
        roles += [replace(role.of(bound[role.name], axes=plain[role.name]), name=f"{role.name}_scale") for role in sized]
    return declare(
        name, roles, rows="pages", topology=topology, layers_by_stage=layers_by_stage, tokens=tokens, optional=optional
    )


def mla(
    tensors: Mapping[int, Any],
    *,
    axes: str = "page token dim",
    dim: int,
    topology: Topology,
    name: str = "mla",
    dtype: str | None = None,
    scales: Mapping[int, Any] | None = None,
    scales_dim: int = 1,
    scales_dtype: str | None = None,
    scale: Scale = None,
    rounding: str | None = "nearest",
    layers_by_stage: Sequence[Sequence[int]] | None = None,
    tokens: Rule = all_tokens,
    optional: bool = False,
) -> Component:
    """The latent of multi-head latent attention: `dim = kv_lora + rope` elements per token, the same on every rank of a
    group.

    `tensors` maps each layer id to one tensor. `scales` are block scales, `scales_dim` per token, in tensors with the same
    axes. `scale` and `rounding`: see `Role`. Raises `ConfigError` as `gqa` does.
    """
    latent, *rest = mla_roles(dim, dtype=dtype, scales=scales_dim if scales is not None else 0, scales_dtype=scales_dtype)
    declared = [replace(latent, scale=scale, rounding=rounding), *rest]
    roles = [role.of(given, axes=axes) for role, given in zip(declared, (tensors, scales or {}), strict=False)]
    return declare(
        name, roles, rows="pages", topology=topology, layers_by_stage=layers_by_stage, tokens=tokens, optional=optional
    )


def _dim(tensors: Mapping[int, RawTensor], axes: str, what: str) -> int:
    """1 if the first layer's tensor has other axes, which `declare` then reports."""
    if not tensors:
        raise ConfigError(f"{what}: expected dims and dtype, since there are no layers, found none")
    return max(dict(zip(axes.split(), next(iter(tensors.values())).shape, strict=False)).get("dim", 1), 1)


def pairs(tensors: Mapping[int, Any], axes: Sequence[str], *, what: str) -> dict[str, dict[int, RawTensor]]:
    found = by_layer(tensors, partial(_pair, axes=axes), what=what)
    return {
        role: by_layer({layer: pair[index] for layer, pair in found.items()}, raw_tensor, what=f"{what}, tensor {role!r}")
        for index, role in enumerate("kv")
    }


def _pair(given: Any, *, axes: Sequence[str]) -> Sequence[Any]:
    if "kv" in axes:
        packed, axis = raw_tensor(given), list(axes).index("kv")
        if len(packed.shape) != len(axes) or packed.shape[axis] != 2:
            raise ConfigError(f"expected axes {' '.join(axes)!r} with 2 along 'kv', found shape {packed.shape}")
        return packed.select(axis, 0), packed.select(axis, 1)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ConfigError(f"expected (k, v), or a 'kv' axis in {' '.join(axes)!r}, found {type(given).__name__}")
    return given
