"""One instance of an explanation: its first group, with pools that are laid out but not allocated."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import msgspec

from disagg.commands.cases.instructions import Item
from disagg.commands.cases.places import rows_of
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, items_of, rows_needed
from disagg.commands.explain.counting import FIRST_ADDRESS
from disagg.core.memory import ITEMSIZE
from disagg.core.rows import Rows
from disagg.core.topology import Topology
from disagg.layout.ownership import Share
from disagg.layout.placement import Component, Placement
from disagg.layout.tables import ComponentLayout, LayoutTable, layout_table
from disagg.models import ModelSpec
from disagg.models.pools import lay_out


@dataclass(frozen=True, eq=False)
class Instance:
    """`placements` and `items`: for each rank of the first group."""

    side: Side
    spec: ModelSpec
    table: LayoutTable
    placements: tuple[Mapping[str, Placement], ...]
    items: tuple[Item, ...]

    def rows(self, rank: int, name: str) -> Rows:
        return rows_of(self.spec.state(name), self.items[rank])

    def needed_nbytes(self, rank: int) -> int:
        """Computed from the rank's own layouts, without a plan."""
        needs = self.items[rank].needs
        return sum(_layout_nbytes(layout, needs[layout.name]) for layout in self.table.ranks[rank].components)


def instance_of(case: Case, role: str, *, model: str, consecutive: bool) -> Instance:
    ours = role == "prefill"
    side, peer, prefix = (case.prefill, case.decode, 0) if ours else (case.decode, case.prefill, case.prefix_hit)
    spec = side.model(model, num_layers=case.num_layers)
    pools = {state.name: rows_needed(state, side, case, prefix=prefix) for state in spec.states}
    dealt = items_of(spec, side, peer, case, name=role, pools=pools, prefix=prefix)
    shape = side.pool_shape(max(pools.values()), rows=pools)
    group = tuple(side.topology().group())
    alike: dict[Hashable, tuple[Component, ...]] = {}
    components = []
    for rank in group:  # those with the same layers and local sizes lie alike in memory
        sizes = _sizes(spec, rank)
        if sizes not in alike:
            alike[sizes] = lay_out(spec, rank, shape).components(FIRST_ADDRESS)
        components.append(alike[sizes])
    return Instance(
        side,
        spec,
        layout_table(side.topology(), [component.layouts for component in components[0]]),
        tuple({c.name: c.placement for c in found if c.placement is not None} for found in components),
        tuple(_consecutive(items[0]) if consecutive else items[0] for items in dealt[: len(group)]),
    )


def _sizes(spec: ModelSpec, rank: Topology) -> Hashable:
    """Ranks that agree in these lie alike in memory."""
    inner = (each for state in spec.states for role in state.roles for each in role.inner.values())
    return rank.pp_rank, tuple(each.local_size(rank) for each in inner)


def _consecutive(item: Item) -> Item:
    return msgspec.structs.replace(item, rows={name: tuple(range(len(rows))) for name, rows in item.rows.items()})


def _layout_nbytes(layout: ComponentLayout, need: tuple[int, int]) -> int:
    total = 0
    for tensor in layout.tensors:
        nbytes = ITEMSIZE[tensor.dtype] * len(tensor.layers)
        for axis in tensor.inner_axes:
            nbytes *= axis.owned.within(axis.size or 0).count_below(axis.size or 0)
        if tensor.token is not None:
            granule = tensor.token.granule
            start, stop = (edge // granule * granule for edge in need)
            owned = tensor.token.owned.within(need[1]) if isinstance(tensor.token.owned, Share) else tensor.token.owned
            nbytes *= (owned.count_below(stop) - owned.count_below(start)) // granule
        total += nbytes
    return total
