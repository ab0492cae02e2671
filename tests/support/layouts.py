"""Small layouts, tables and batches of copies for tests."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.core.copies import CopyBatch
from disagg.core.topology import Topology
from disagg.layout.ownership import Owned, positions_to_intervals
from disagg.layout.tables import Axis, ComponentLayout, LayoutTable, TensorLayout, layout_table


def state(
    name: str,
    layers: Sequence[int],
    *,
    dtype: str = "uint8",
    tokens: Owned | None = None,
    role: str = "s",
    **axes: tuple[int, Owned],
) -> ComponentLayout:
    """A component of one tensor: a slot, or pages where `tokens` is given."""
    token = () if tokens is None else (Axis("token", None, tokens),)
    inner = tuple(Axis(axis, size, owned) for axis, (size, owned) in axes.items())
    tensor = TensorLayout(role, dtype, (Axis("layer", None, positions_to_intervals(layers)), *token, *inner))
    return ComponentLayout(name, "slot" if tokens is None else "pages", (tensor,))


def table(*per_component: Sequence[ComponentLayout | None], **sizes: int) -> LayoutTable:
    sizes = sizes or {"tp": len(per_component[0])}
    return layout_table(Topology(**sizes), per_component)


def triples(copies: CopyBatch) -> list[tuple[int, int, int]]:
    return list(zip(copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True))
