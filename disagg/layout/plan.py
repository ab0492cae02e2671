"""Which bytes go from which rank to which, computed once per pair of instances, and bound to rows per request.

`elect` names one writer for every destination byte, over the whole layout tables of both instances, so that both sides
compute the same and compare `Election.digest`. `make_plan` projects it on one pair of ranks. `bind` gives addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.memory import ITEMSIZE
from disagg.layout.election import Election, Flow, Ints
from disagg.layout.ownership import Intervals, Owned, Periodic, Share, overlap
from disagg.layout.placement import Placement, TensorPlacement
from disagg.layout.tables import ComponentLayout, LayoutTable, TensorLayout


@dataclass(frozen=True, eq=False)
class SpanClass:
    """Copies of one shape: for each base pair, each run of tokens, and each step of `dims`, one run of bytes.

    `source_bases` and `destination_bases`, uint64 `[layers]`, include the offsets of the box. `dims` are
    `(count, source_stride, destination_stride)` in bytes, outermost first. A token run of `n` positions is one run of
    `n * nbytes` where `dense`, else `n` runs of `nbytes`, `token_strides` apart.
    """

    role: str
    layers: Ints
    source_bases: npt.NDArray[np.uint64]
    destination_bases: npt.NDArray[np.uint64]
    row_strides: tuple[int, int]
    token_strides: tuple[int, int]
    granule: int
    dims: tuple[tuple[int, int, int], ...]
    nbytes: int
    dense: bool

    @cached_property
    def core(self) -> _native.Span:
        """The same for the compiled core."""
        return _native.Span(
            self.layers,
            self.source_bases,
            self.destination_bases,
            row_strides=self.row_strides,
            token_strides=self.token_strides,
            dims=self.dims,
            nbytes=self.nbytes,
            dense=self.dense,
        )


@dataclass(frozen=True, eq=False)
class RowSpace:
    """How one side of a component addresses its rows: page size and count, and the tokens it owns (`None` for slots)."""

    page_size: int
    num_rows: int
    tokens: Owned | None

    @cached_property
    def fixed_edges(self) -> tuple[Ints, int] | None:
        """The tokens that it owns of every request, for the compiled core; `None` where that depends on its length."""
        return edges(self.tokens) if isinstance(self.tokens, Intervals | Periodic) else None


@dataclass(frozen=True, eq=False)
class ComponentPlan:
    """What one source rank writes of one component to one destination rank."""

    name: str
    source: RowSpace
    destination: RowSpace
    spans: tuple[SpanClass, ...]

    @cached_property
    def cores(self) -> list[_native.Span]:
        """The span classes, for the compiled core."""
        return [span.core for span in self.spans]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layer ids that this pair moves anything of."""
        return tuple(sorted({int(layer) for span in self.spans for layer in span.layers}))


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """What one source rank writes to one destination rank, for every component of which it writes anything."""

    components: dict[str, ComponentPlan]


def make_plan(
    election: Election,
    *,
    source: tuple[int, LayoutTable, Mapping[str, Placement]],
    destination: tuple[int, LayoutTable, Mapping[str, Placement]],
) -> TransferPlan:
    """The plan of one pair of ranks; each side is its group rank, its instance's table, and its placements by component."""
    components: dict[str, ComponentPlan] = {}
    flows = election.by_pair.get((source[0], destination[0]), ())
    for name, group in itertools.groupby(sorted(flows, key=lambda f: f.component), key=lambda f: f.component):
        ours, theirs = source[1].ranks[source[0]].by_name[name], destination[1].ranks[destination[0]].by_name[name]
        placed, target = source[2][name], destination[2][name]
        spans = tuple(_span(flow, ours.tensor(flow.role), theirs.tensor(flow.role), placed, target) for flow in group)
        components[name] = ComponentPlan(name, row_space(ours, placed), row_space(theirs, target), spans)
    return TransferPlan(components)


def _span(
    flow: Flow, source: TensorLayout, destination: TensorLayout, source_place: Placement, destination_place: Placement
) -> SpanClass:
    """The shape of one flow in both memories."""
    ours, theirs = source_place.tensor(flow.role), destination_place.tensor(flow.role)
    offsets = [0, 0]
    axes: list[tuple[int, int, int]] = []
    for axis, part in zip(destination.inner_axes, flow.box, strict=True):
        size = axis.size or 0
        for side, (layout, place) in enumerate(((source, ours), (destination, theirs))):
            (piece,) = overlap(layout.axis(axis.name).owned, Intervals((part,)), size=size)
            offsets[side] += piece.source_offset * place.strides[axis.name]
        axes.append((part.stop - part.start, ours.strides[axis.name], theirs.strides[axis.name]))
    dims, nbytes = _fold(axes, ITEMSIZE[destination.dtype])
    token = destination.token
    strides = (ours.strides[token.name], theirs.strides[token.name]) if token else (0, 0)
    layers = np.array(flow.layers, dtype=np.int64)
    return SpanClass(
        role=flow.role,
        layers=layers,
        source_bases=_bases(ours, layers, offsets[0]),
        destination_bases=_bases(theirs, layers, offsets[1]),
        row_strides=(ours.row_stride, theirs.row_stride),
        token_strides=strides,
        granule=token.granule if token else 1,
        dims=dims,
        nbytes=nbytes,
        dense=strides == (nbytes, nbytes),
    )


def _bases(place: TensorPlacement, layers: Ints, offset: int) -> npt.NDArray[np.uint64]:
    by_layer = dict(zip(place.layers, place.bases, strict=True))
    return np.array([by_layer[int(layer)] + offset for layer in layers], dtype=np.uint64)


def _fold(axes: Iterable[tuple[int, int, int]], itemsize: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """`(count, source stride, destination stride)` per axis as the longest runs of bytes: remaining dims and run length.

    Innermost first, an axis whose strides on both sides are the run so far joins the run; neighbouring dims join where
    the outer one continues the inner one on both sides.
    """
    nbytes = itemsize
    dims: list[tuple[int, int, int]] = []
    for count, ours, theirs in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: (axis[2], axis[1])):
        if not dims and ours == theirs == nbytes:
            nbytes *= count
        elif dims and (ours, theirs) == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            dims[-1] = (dims[-1][0] * count, dims[-1][1], dims[-1][2])
        else:
            dims.append((count, ours, theirs))
    return tuple(reversed(dims)), nbytes


def row_space(layout: ComponentLayout, placement: Placement) -> RowSpace:
    """How a rank addresses its rows of a component."""
    return RowSpace(placement.page_size, placement.num_rows, layout.tokens)


def first_page(space: RowSpace, token: int, num_tokens: int) -> int:
    """The number, among a rank's pages of a request, of the page with its first token at or after `token`."""
    return count_tokens(space, token, num_tokens) // space.page_size


def count_tokens(space: RowSpace, token: int, num_tokens: int) -> int:
    """How many tokens below `token` a rank holds, of a request of `num_tokens`."""
    return owned_tokens(space, num_tokens).count_below(token)


def edges(owned: Intervals | Periodic) -> tuple[Ints, int]:
    """What a side owns, for the compiled core: where intervals start and stop, and their period."""
    if isinstance(owned, Periodic):
        return np.array([owned.offset, owned.offset + owned.run]), owned.period
    return np.array(owned.parts, dtype=np.int64).reshape(-1), 0


def owned_tokens(space: RowSpace, num_tokens: int) -> Intervals | Periodic:
    """The tokens that a side owns of a request of `num_tokens`."""
    assert space.tokens is not None
    return space.tokens.within(num_tokens) if isinstance(space.tokens, Share) else space.tokens
