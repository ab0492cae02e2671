"""LoRA adapters of mixture-of-experts layers, with one slot in each tensor. Experts are split over `ep_rank` and the
intermediate dimension over `moe_tp_rank`; over `tp_rank` it would reach beyond the tensor with `1 < ep < tp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.ownership import Intervals, split
from disagg.layout.placement import Component
from disagg.state.declare import Inner, Role, declare, whole

Ints = npt.NDArray[np.int64]


def by_expert(num_experts: int) -> Inner:
    return Inner(num_experts, lambda rank: Intervals((split(num_experts, rank.ep, rank.ep_rank),)))


def by_moe_tp(size: int) -> Inner:
    """Split over the ranks that have the same experts."""
    return Inner(size, lambda rank: Intervals((split(size, rank.moe_tp, rank.moe_tp_rank),)))


def moe_lora(
    modules: Mapping[str, Mapping[int, Any]],
    *,
    axes: Mapping[str, str],
    sizes: Mapping[str, Mapping[str, int]],
    num_experts: int,
    topology: Topology,
    name: str = "adapter",
    dtype: str | None = None,
    layers_by_stage: Sequence[Sequence[int]] | None = None,
) -> list[Component]:
    """LoRA matrices of expert modules: `modules` maps a role such as `"w13_a"` to its tensors by layer. `axes[role]` names
    the axes in memory order, from `slot`, `expert`, `intermediate` and any others; `sizes[role]` gives their global sizes.
    Layers may lack a module, so each role is a component of its own, `name.role`.
    """
    components = []
    for role, tensors in modules.items():
        inner = {axis: _inner(axis, size, num_experts) for axis, size in sizes[role].items()}
        component = f"{name}.{role}"
        roles = [Role(name=role, axes=axes[role], inner=inner, dtype=dtype, tensors=tensors)]
        components.append(declare(component, roles, rows="slot", topology=topology, layers_by_stage=layers_by_stage))
    return components


def _inner(axis: str, size: int, num_experts: int) -> Inner:
    if axis == "expert":
        if size != num_experts:
            raise ConfigError(f"axis 'expert': expected {num_experts} experts, found {size}")
        return by_expert(size)
    return by_moe_tp(size) if axis == "intermediate" else whole(size)


def load_into_slot(
    pools: Mapping[str, Mapping[int, Any]], adapter: Mapping[str, Mapping[int, Any]], *, slot: int
) -> tuple[str, ...]:
    """Write an adapter's matrices into `slot` of each pool tensor (`[slot, ...]`), and zeros for modules that it lacks,
    since the slot may hold a previous adapter's. Returns the modules that a layer lacks, as `module@layer`. Raises
    `ConfigError`, with nothing written, for a slot outside a pool and for weights of another shape.
    """
    for module, layers in pools.items():
        for layer, pool in layers.items():
            _check_fits(pool, adapter.get(module, {}).get(layer), slot, f"{module}@{layer}")
    for module, layers in pools.items():
        for layer, pool in layers.items():
            weights = adapter.get(module, {}).get(layer)
            pool[slot] = 0 if weights is None else weights
    return tuple(
        f"{module}@{layer}" for module, layers in adapter.items() for layer in layers if layer not in pools.get(module, {})
    )


def _check_fits(pool: Any, weights: Any, slot: int, what: str) -> None:
    if not 0 <= slot < pool.shape[0]:
        raise ConfigError(f"{what}: expected a slot from 0 to {pool.shape[0] - 1}, found {slot}")
    if weights is not None and tuple(weights.shape) != tuple(pool.shape[1:]):
        raise ConfigError(f"{what}: expected weights of shape {tuple(pool.shape[1:])}, found {tuple(weights.shape)}")


def virtual_expert_ids(ids: npt.ArrayLike, slots: npt.ArrayLike, *, num_experts: int) -> Ints:
    """`id + slot * num_experts`, distinct between adapters. -1 (routed elsewhere) stays -1. `ids` is `[tokens, top_k]` or
    `[tokens]`, `slots` is `[tokens]`.
    """
    chosen = np.asarray(ids, dtype=np.int64)
    offset = np.asarray(slots, dtype=np.int64).reshape(-1, *([1] * (chosen.ndim - 1))) * num_experts
    return np.where(chosen >= 0, chosen + offset, -1)


def group_by_expert(ids: npt.ArrayLike, *, num_experts: int) -> tuple[Ints, Ints]:
    """`(order, counts)`: the flat positions of `ids` sorted by expert, and their number by expert. `counts` has `num_experts
    + 1` entries, the last for ids of -1, which no expert here processes. Raises `ConfigError` for other ids.
    """
    flat = np.asarray(ids, dtype=np.int64).ravel()
    if flat.size and (flat.min() < -1 or flat.max() >= num_experts):
        raise ConfigError(f"expert ids: expected -1 to {num_experts - 1}, found {flat.min()} to {flat.max()}")
    bucket = np.where(flat < 0, num_experts, flat)
    return np.argsort(bucket, kind="stable"), np.bincount(bucket, minlength=num_experts + 1)
