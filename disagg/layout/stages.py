"""Pipeline stages: the layers of each, and components that each stage describes for itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.layout.tables import ComponentLayout

Layouts = tuple[ComponentLayout | None, ...]

Gather = Callable[[Any], Sequence[Any]]
"""Returns what a rank of each pipeline stage gives, in order of stages. Every stage calls it, as with
`torch.distributed.all_gather_object`.
"""


def group_layers(
    topology: Topology, own_layers: Sequence[int], layers_by_stage: Sequence[Sequence[int]] | None, *, what: str
) -> tuple[tuple[int, ...], ...]:
    """The layer ids of every pipeline stage, in memory order; without `layers_by_stage` other stages have none. Raises
    `ConfigError` for an invalid layer id, or if it lists a layer twice or contradicts this rank's own layers.
    """
    own = tuple(own_layers)
    stages = None if layers_by_stage is None else tuple(tuple(stage) for stage in layers_by_stage)
    given: Iterable[object] = itertools.chain(own, *(stages or ()))
    for layer in given:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < 2**31:
            raise ConfigError(f"{what}: expected layer ids of 0 to 2**31 - 1, found {layer!r}")
    if stages is None:
        return tuple(own if stage == topology.pp_rank else () for stage in range(topology.pp))
    if len(stages) != topology.pp:
        raise ConfigError(f"{what}: expected {topology.pp} stages in layers_by_stage, found {len(stages)}")
    for number, stage in enumerate(stages):
        if len(set(stage)) != len(stage):
            raise ConfigError(f"{what}: layers_by_stage lists a layer twice in stage {number}: {stage}")
    ids = [layer for stage in stages for layer in stage]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{what}: layers_by_stage lists a layer in two stages: {stages}")
    if stages[topology.pp_rank] != own:
        raise ConfigError(
            f"{what}: expected tensors of layers {stages[topology.pp_rank]} on stage {topology.pp_rank} by layers_by_stage, "
            f"found tensors of {own}"
        )
    return stages


def join_stages(describe: Callable[[], Sequence[Component]], *, topology: Topology, gather: Gather) -> list[Component]:
    """The components of a whole pipeline, where each stage describes its own layers only, in the same order on every rank.

    `describe` returns this rank's components, declared without `layers_by_stage`. Those of other stages have no memory
    here. Every stage calls this, with or without layers, and takes part in `gather` once. Raises what `describe` raises, and
    `ConfigError` if it failed on another stage, or if two stages describe the same layer.
    """
    try:
        own = _by_name(describe())
    except Exception as error:
        gather(f"{type(error).__name__}: {error}")  # the other stages wait for this one
        raise
    stages = gather({name: component.layouts for name, component in own.items()})
    if len(stages) != topology.pp:
        raise ConfigError(f"gather: expected what each of {topology.pp} pipeline stages gives, found {len(stages)}")
    for number, stage in enumerate(stages):
        if isinstance(stage, str):
            raise ConfigError(f"pipeline stage {number} could not describe its layers: {stage}")
    joined = []
    for name in dict.fromkeys(name for stage in stages for name in stage):
        layouts = _join(name, stages, topology)
        known = own.get(name) or Component(name, layouts, None, (), topology)
        joined.append(replace(known, layouts=layouts, joined=True))
    return joined


def _by_name(components: Sequence[Component]) -> dict[str, Component]:
    found = {component.name: component for component in components}
    if len(found) != len(components):
        raise ConfigError(f"expected each component once, found {[component.name for component in components]}")
    return found


def _join(name: str, stages: Sequence[Mapping[str, Layouts]], topology: Topology) -> Layouts:
    absent: Layouts = (None,) * topology.group_size
    given = [stage.get(name, absent) for stage in stages]
    if any(len(layouts) != topology.group_size for layouts in given):
        raise ConfigError(f"component {name!r}: expected every stage to describe {topology.group_size} ranks")
    found = tuple(given[rank.pp_rank][rank.group_rank] for rank in topology.group())
    first_ranks = found[:: topology.cp * topology.tp]  # of each stage
    layers = [layer for layout in first_ranks if layout is not None and layout.tensors for layer in layout.tensors[0].layers]
    if len(set(layers)) != len(layers):
        raise ConfigError(f"component {name!r}: expected each layer on one pipeline stage, found {sorted(layers)}")
    return found
