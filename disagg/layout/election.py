"""Election of one writer for each destination byte, which several source ranks may hold. Both sides compute the same from
the layout tables, and compare its digest.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from disagg.core.errors import LayoutError
from disagg.layout.encoding import encode
from disagg.layout.ownership import Interval, Intervals, Owned, Periodic, Share, num_intervals
from disagg.layout.tables import Axis, ComponentLayout, LayoutTable, TensorLayout, agreed_components, converted

Box = tuple[Interval, ...]
"""An interval on each inner axis of a tensor, in the destination's order of axes."""
MAX_TOKEN_PERIOD = 2**20
"""Limit on the tokens after which the sources' ownership of tokens repeats."""
MAX_STEPS = 2**23
"""Limit on comparisons, about five seconds: tables come from peers. The largest layouts of real models take a quarter of
it.
"""

_Flows = dict[tuple[int, int, str, str, Box], list[int]]
"""Layers by (source, destination, component, role, box)."""
_Turns = dict[tuple[int, ...], Iterator[int]]
"""Whose turn it is to write, by group of replicas."""


class _Steps:
    def __init__(self) -> None:
        self._taken = 0

    def take(self, number: int, where: str) -> None:
        self._taken += number
        if self._taken > MAX_STEPS:
            raise LayoutError(f"{where}: the layouts have too many parts: comparing them takes more than {MAX_STEPS} steps")


class Flow(msgspec.Struct, frozen=True):
    """What one source rank writes of one tensor of one destination rank: a box, in some layers, for all tokens it owns."""

    source: int
    destination: int
    component: str
    role: str
    box: Box
    layers: tuple[int, ...]


class Election(msgspec.Struct, frozen=True, dict=True, omit_defaults=True):
    """`converted`: the roles, by component, whose numbers the destination holds in another format."""

    components: tuple[str, ...]
    flows: tuple[Flow, ...]
    converted: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256, equal for equal elections."""
        return hashlib.sha256(encode(self)).digest()

    @cached_property
    def by_pair(self) -> dict[tuple[int, int], tuple[Flow, ...]]:
        """Flows by (source group rank, destination group rank)."""
        pairs: dict[tuple[int, int], list[Flow]] = defaultdict(list)
        for flow in self.flows:
            pairs[flow.source, flow.destination].append(flow)
        return {pair: tuple(flows) for pair, flows in pairs.items()}

    def writers(self, destination: int) -> tuple[int, ...]:
        return tuple(sorted({source for source, found in self.by_pair if found == destination}))

    def readers(self, source: int) -> tuple[int, ...]:
        return tuple(sorted({destination for found, destination in self.by_pair if found == source}))


def elect(source: LayoutTable, destination: LayoutTable) -> Election:
    """Elect one writer for each destination byte. If R source ranks hold the same bytes, each writes 1/R of the (component,
    layer) pairs, give or take one. Raises `LayoutError` if the tables do not match, and for a destination byte without a
    source, with the axis, what the destination needs and what the sources own.
    """
    names = agreed_components(source, destination)
    turns: _Turns = {}
    flows: _Flows = defaultdict(list)
    steps = _Steps()
    holders = {name: _holders(source.components[name]) for name in names}
    for reader, rank in enumerate(destination.ranks):
        for name in names:
            component = rank.by_name.get(name)
            if component is not None:
                _elect_component(reader, component, holders[name], turns, flows, steps)
    roles = ((name, converted(source, destination, name)) for name in names)
    chosen = tuple(Flow(*key, tuple(layers)) for key, layers in flows.items())
    return Election(names, chosen, tuple(each for each in roles if each[1]))


class _Sources:
    """Source ranks that hold any of one tensor. Those `alike` own the same of its inner axes."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, TensorLayout]] = []
        self.alike: dict[tuple[Axis, ...], list[tuple[int, TensorLayout]]] = defaultdict(list)

    def add(self, rank: int, tensor: TensorLayout) -> None:
        self.ranks.append((rank, tensor))
        self.alike[tensor.inner_axes].append((rank, tensor))


def _holders(layouts: tuple[ComponentLayout | None, ...]) -> dict[str, _Sources]:
    found: dict[str, _Sources] = defaultdict(_Sources)
    for rank, layout in enumerate(layouts):
        for tensor in layout.tensors if layout else ():
            if tensor.num_layers:
                found[tensor.role].add(rank, tensor)
    return found


def _elect_component(
    reader: int,
    component: ComponentLayout,
    holders: Mapping[str, _Sources],
    turns: _Turns,
    flows: _Flows,
    steps: _Steps,
) -> None:
    by_layer: dict[int, list[tuple[TensorLayout, Box, list[tuple[int, ...]]]]] = defaultdict(list)
    for tensor in component.tensors:
        where = f"component {component.name!r}, tensor {tensor.role!r}, destination rank {reader}"
        sources = holders.get(tensor.role) or _Sources()
        for box, holding in _cells(tensor, sources, steps, where):
            steps.take(tensor.num_layers * (1 + len(holding)), where)
            for layer in tensor.layers:
                ranks = [(rank, held) for rank, held in holding if layer in held.layer_set]
                if not ranks:
                    raise LayoutError(_uncovered(where, tensor, box, layer, sources.ranks))
                by_layer[layer].append((tensor, box, _token_classes(ranks, f"{where}, layer {layer}")))
    for layer in sorted(by_layer):
        chosen: dict[tuple[int, ...], int] = {}
        for tensor, box, classes in by_layer[layer]:
            for candidates in classes:
                if candidates not in chosen:
                    turn = turns.setdefault(candidates, itertools.cycle(candidates))
                    chosen[candidates] = next(turn)
                flows[chosen[candidates], reader, component.name, tensor.role, box].append(layer)


def _cells(
    tensor: TensorLayout, sources: _Sources, steps: _Steps, where: str
) -> Iterator[tuple[Box, list[tuple[int, TensorLayout]]]]:
    """The destination's boxes, cut at every boundary of a source's ownership, each with the sources that hold it."""
    per_axis, num_parts = [], 1
    for axis in tensor.inner_axes:
        size = axis.size or 0
        alike = [members[0][1].axis(axis.name).owned for members in sources.alike.values()]
        steps.take(sum(num_intervals(each, size) for each in (axis.owned, *alike)), where)
        owned = [(members[0][1].axis(axis.name).owned.within(size), len(members)) for members in sources.alike.values()]
        cuts = sorted({edge for parts, _ in owned for part in parts.parts for edge in part})
        mine = axis.owned.within(size).parts
        steps.take(len(mine) * len(cuts), where)
        per_axis.append([piece for part in mine for piece in _cut(part, cuts)])
        num_parts += sum(len(parts.parts) * count for parts, count in owned)
    steps.take(math.prod(map(len, per_axis)) * num_parts, where)
    for box in itertools.product(*per_axis):
        holding = [
            source
            for members in sources.alike.values()
            if all(_holds(members[0][1].axis(a.name), part) for a, part in zip(tensor.inner_axes, box, strict=True))
            for source in members
        ]
        yield box, sorted(holding, key=operator.itemgetter(0))


def _cut(part: Interval, cuts: Sequence[int]) -> Iterator[Interval]:
    edges = [part.start, *(cut for cut in cuts if part.start < cut < part.stop), part.stop]
    return itertools.starmap(Interval, itertools.pairwise(edges))


def _holds(axis: Axis, part: Interval) -> bool:
    return any(own.start <= part.start and part.stop <= own.stop for own in axis.owned.within(axis.size or 0).parts)


def _token_classes(ranks: list[tuple[int, TensorLayout]], where: str) -> list[tuple[int, ...]]:
    """Ranks by the tokens they own: those of a group are replicas, and the groups partition the tokens."""
    classes: dict[Owned | None, list[int]] = defaultdict(list)
    for rank, held in ranks:
        classes[held.token.owned if held.token else None].append(rank)
    if None not in classes:
        _check_tokens([owned for owned in classes if owned is not None], where)
    return [tuple(members) for members in classes.values()]


def _check_tokens(owned: Sequence[Owned], where: str) -> None:
    # Lists of any length are not kept for the next table.
    if any(isinstance(each, Intervals) for each in owned) or not _is_partition(tuple(owned)):
        found = ", ".join(map(str, owned))
        raise LayoutError(f"{where}, axis 'token': expected sources that own each token once, found {found:.300}")


@functools.lru_cache(maxsize=1024)
def _is_partition(owned: tuple[Periodic | Share, ...]) -> bool:
    periodic = [each for each in owned if isinstance(each, Periodic)]
    shares = [each for each in owned if isinstance(each, Share)]
    if len(periodic) == len(owned):
        period = math.lcm(*(each.period for each in periodic))
        if period > MAX_TOKEN_PERIOD:
            raise LayoutError(f"axis 'token': expected ownership that repeats within {MAX_TOKEN_PERIOD} tokens, found {period}")
        offset = max(each.offset for each in periodic)
        if offset > MAX_TOKEN_PERIOD:
            return False
        if len(owned) * (offset + period) > MAX_STEPS:
            raise LayoutError(f"axis 'token': {len(owned)} ranks whose ownership repeats after {period} tokens are too many")
        tokens = np.arange(offset + period, dtype=np.int64)
        times = sum((each.locate(tokens) >= 0).astype(np.int64) for each in periodic)
        return bool((np.asarray(times) == 1).all())
    cuts = {(each.parts, each.granule) for each in shares}
    is_one_cut = len(shares) == len(owned) and len(cuts) == 1 and shares[0].parts == len(shares)
    return is_one_cut and len({each.index for each in shares}) == len(shares)


def _uncovered(where: str, tensor: TensorLayout, box: Box, layer: int, sources: Sequence[tuple[int, TensorLayout]]) -> str:
    needs = ", ".join(f"{axis.name!r} {part}" for axis, part in zip(tensor.inner_axes, box, strict=True))
    owned = "; ".join(
        ", ".join(f"{axis.name!r} {axis.owned}" for axis in held.inner_axes) + f" (source rank {rank})"
        for rank, held in sources
    )
    return f"{where}, layer {layer}: destination needs {needs}, but no source holds it; sources own {owned}"
