"""Election of one writer for each destination byte, where several source ranks hold it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core.errors import LayoutError
from disagg.layout.ownership import Interval, Owned, Periodic, Share, plain_integer
from disagg.layout.tables import Axis, ComponentLayout, LayoutTable, TensorLayout, agreed_components

Ints = npt.NDArray[np.int64]
Box = tuple[Interval, ...]
"""One interval on each inner axis of a tensor, in the destination layout's order of axes."""


class Flow(msgspec.Struct, frozen=True):
    """One writer's share of one tensor of one destination rank: a box of the inner axes, in some layers, all tokens it owns."""

    source: int
    destination: int
    component: str
    role: str
    box: Box
    layers: tuple[int, ...]


class Election(msgspec.Struct, frozen=True, dict=True):
    """One writer for every destination byte, as flows between group ranks."""

    components: tuple[str, ...]
    flows: tuple[Flow, ...]

    @cached_property
    def digest(self) -> bytes:
        """Equal exactly where two elections are equal."""
        return hashlib.sha256(msgspec.msgpack.encode(self, enc_hook=plain_integer)).digest()

    @cached_property
    def by_pair(self) -> dict[tuple[int, int], tuple[Flow, ...]]:
        """Flows by (source group rank, destination group rank)."""
        pairs: dict[tuple[int, int], list[Flow]] = defaultdict(list)
        for flow in self.flows:
            pairs[flow.source, flow.destination].append(flow)
        return {pair: tuple(flows) for pair, flows in pairs.items()}

    def writers(self, destination: int) -> tuple[int, ...]:
        """Group ranks that write to `destination`."""
        return tuple(sorted({source for source, found in self.by_pair if found == destination}))

    def readers(self, source: int) -> tuple[int, ...]:
        """Group ranks that `source` writes to."""
        return tuple(sorted({destination for found, destination in self.by_pair if found == source}))


def elect(source: LayoutTable, destination: LayoutTable) -> Election:
    """The writers of every destination byte. Where R source ranks hold the same bytes, each writes 1/R of the
    (component, layer) runs, give or take one.

    Raises `LayoutError` where the tables cannot be matched, or a destination byte has no source: names the axis, what
    the sources own and what the destination needs.
    """
    names = agreed_components(source, destination)
    turns: dict[tuple[int, ...], Iterator[int]] = {}
    flows: dict[tuple[int, int, str, str, Box], list[int]] = defaultdict(list)
    holders = {name: _holders(source.components[name]) for name in names}
    for reader, rank in enumerate(destination.ranks):
        for name in names:
            component = rank.by_name.get(name)
            if component is not None:
                _elect_component(reader, component, holders[name], turns, flows)
    return Election(names, tuple(Flow(*key, tuple(layers)) for key, layers in flows.items()))


def _holders(layouts: tuple[ComponentLayout | None, ...]) -> dict[str, list[tuple[int, TensorLayout]]]:
    """By role, the source ranks that hold any of it."""
    found: dict[str, list[tuple[int, TensorLayout]]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for tensor in layout.tensors if layout else ():
            if tensor.layers:
                found[tensor.role].append((rank, tensor))
    return found


def _elect_component(
    reader: int,
    component: ComponentLayout,
    holders: Mapping[str, list[tuple[int, TensorLayout]]],
    turns: dict[tuple[int, ...], Iterator[int]],
    flows: dict[tuple[int, int, str, str, Box], list[int]],
) -> None:
    """Add the flows of one component of one destination rank."""
    by_layer: dict[int, list[tuple[TensorLayout, Box, list[tuple[int, ...]]]]] = defaultdict(list)
    for tensor in component.tensors:
        where = f"component {component.name!r}, tensor {tensor.role!r}, destination rank {reader}"
        sources = holders.get(tensor.role, [])
        for box, holding in _cells(tensor, sources):
            for layer in tensor.layers:
                ranks = [(rank, held) for rank, held in holding if layer in held.layer_set]
                if not ranks:
                    raise LayoutError(_uncovered(where, tensor, box, layer, sources))
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
    tensor: TensorLayout, sources: Sequence[tuple[int, TensorLayout]]
) -> Iterator[tuple[Box, list[tuple[int, TensorLayout]]]]:
    """The destination's inner positions, cut wherever any source's ownership begins or ends, each with its holders."""
    per_axis = []
    for axis in tensor.inner_axes:
        size = axis.size or 0
        owned = [held.axis(axis.name).owned.within(size) for _, held in sources]
        cuts = sorted({edge for parts in owned for part in parts.parts for edge in part})
        per_axis.append([piece for part in axis.owned.within(size).parts for piece in _cut(part, cuts)])
    for box in itertools.product(*per_axis):
        yield (
            box,
            [
                (rank, held)
                for rank, held in sources
                if all(_holds(held.axis(a.name), part) for a, part in zip(tensor.inner_axes, box, strict=True))
            ],
        )


def _cut(part: Interval, cuts: Sequence[int]) -> Iterator[Interval]:
    edges = [part.start, *(cut for cut in cuts if part.start < cut < part.stop), part.stop]
    return itertools.starmap(Interval, itertools.pairwise(edges))


def _holds(axis: Axis, part: Interval) -> bool:
    return any(own.start <= part.start and part.stop <= own.stop for own in axis.owned.within(axis.size or 0).parts)


def _token_classes(ranks: list[tuple[int, TensorLayout]], where: str) -> list[tuple[int, ...]]:
    """Holders grouped by the tokens they own: ranks of one group are replicas; the groups share out the tokens."""
    classes: dict[Owned | None, list[int]] = defaultdict(list)
    for rank, held in ranks:
        classes[held.token.owned if held.token else None].append(rank)
    if None not in classes:
        _check_tokens([owned for owned in classes if owned is not None], where)
    return [tuple(members) for members in classes.values()]


def _check_tokens(owned: Sequence[Owned], where: str) -> None:
    """That the sources' token ownerships are a partition of every request's tokens; raises `LayoutError` otherwise."""
    if not _is_partition(tuple(owned)):
        raise LayoutError(f"{where}, axis 'token': sources own {', '.join(map(str, owned))}, which is not each token once")


@functools.lru_cache(maxsize=1024)
def _is_partition(owned: tuple[Owned, ...]) -> bool:
    """Whether every token of a request of any length is owned exactly once."""
    periodic = [each for each in owned if isinstance(each, Periodic)]
    shares = [each for each in owned if isinstance(each, Share)]
    if len(periodic) == len(owned):
        turn = math.lcm(*(each.period for each in periodic))
        if turn > MAX_TOKEN_PERIOD:
            raise LayoutError(f"axis 'token': ownership repeats only after {turn} tokens, expected {MAX_TOKEN_PERIOD} at most")
        settled = max(each.offset for each in periodic)
        if settled > MAX_TOKEN_PERIOD:
            return False
        tokens = np.arange(settled + turn, dtype=np.int64)
        times = sum((each.locate(tokens) >= 0).astype(np.int64) for each in periodic)
        return bool((np.asarray(times) == 1).all())
    cuts = {(each.parts, each.granule) for each in shares}
    return len(shares) == len(owned) and len(cuts) == 1 and sorted(s.index for s in shares) == list(range(shares[0].parts))


MAX_TOKEN_PERIOD = 2**20


def _uncovered(where: str, tensor: TensorLayout, box: Box, layer: int, sources: Sequence[tuple[int, TensorLayout]]) -> str:
    """The message for a box that no source holds in `layer`."""
    needs = ", ".join(f"{axis.name!r} {part}" for axis, part in zip(tensor.inner_axes, box, strict=True))
    owned = "; ".join(
        ", ".join(f"{axis.name!r} {axis.owned}" for axis in held.inner_axes) + f" (source rank {rank})"
        for rank, held in sources
    )
    return f"{where}, layer {layer}: destination needs {needs} and no source holds it; sources own {owned}"
