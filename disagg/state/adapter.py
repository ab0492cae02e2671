"""LoRA adapters of mixture-of-experts layers, with one slot in each tensor. Experts are split over `ep_rank` and the
intermediate dimension over `moe_tp_rank`; over `tp_rank` it would reach beyond the tensor with `1 < ep < tp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.ownership import Intervals, split
from disagg.layout.placement import Component
from disagg.state.declare import Inner, Role, declare, whole


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
    Layers may lack a module, so each role is a component of its own, `name.role`. Raises `ConfigError` for another number of
    experts, and as `declare` does.
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
