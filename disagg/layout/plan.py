"""Plans: what one source rank writes to one destination rank, for any request. `binding.bind` adds the rows of a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.formats import QUANTIZED
from disagg.core.memory import ITEMSIZE
from disagg.layout.conversion import Conversion
from disagg.layout.election import Election, Flow
from disagg.layout.ownership import Interval, Intervals, Ints, Owned, Periodic, Share
from disagg.layout.placement import Placement
from disagg.layout.tables import ComponentLayout, LayoutTable, TensorLayout


@dataclass(frozen=True, eq=False)
class SpanClass:
    """Copies of one shape: one run of bytes for each pair of bases, each run of tokens, and each step of `dims`.

    `layers` are those of the bases: a layer may have several. The bases, uint64 `[layers]`, include the offsets of the box.
    Strides are in bytes, pairs of them `(source, destination)`. `dims` are `(count, source_stride, destination_stride)`,
    outermost first. A run of `n` tokens' positions is one run of `n * nbytes` bytes if `dense`, else `n` runs of `nbytes`,
    `token_strides` apart. With a `conversion`, `nbytes` are the destination's; the source has as many elements in its own
    dtype.
    """

    layers: Ints
    source_bases: npt.NDArray[np.uint64]
    destination_bases: npt.NDArray[np.uint64]
    row_strides: tuple[int, int]
    token_strides: tuple[int, int]
    granule: int
    dims: tuple[tuple[int, int, int], ...]
    nbytes: int
    dense: bool
    conversion: Conversion | None = None

    @property
    def formats(self) -> tuple[str, str, str] | None:
        """Source dtype, destination dtype and rounding of a conversion."""
        rule = self.conversion
        return None if rule is None else (rule.source, rule.destination, rule.rounding)

    @property
    def scales(self) -> tuple[float, ...]:
        return () if self.conversion is None else self.conversion.scales

    @cached_property
    def core(self) -> _native.Span:
        return _native.Span(
            self.layers,
            self.source_bases,
            self.destination_bases,
            row_strides=self.row_strides,
            token_strides=self.token_strides,
            dims=self.dims,
            nbytes=self.nbytes,
            dense=self.dense,
            formats=self.formats,
            scales=self.scales,
        )


@dataclass(frozen=True, eq=False)
class RowSpace:
    """How one side of a component addresses its rows. `tokens` is `None` for slots."""

    page_size: int
    num_rows: int
    tokens: Owned | None

    @cached_property
    def fixed_edges(self) -> tuple[Ints, int] | None:
        """`edges` of the tokens; `None` if they depend on the request's length."""
        return edges(self.tokens) if isinstance(self.tokens, Intervals | Periodic) else None


def row_space(layout: ComponentLayout, placement: Placement) -> RowSpace:
    return RowSpace(placement.page_size, placement.num_rows, layout.tokens)


def owned_tokens(space: RowSpace, num_tokens: int) -> Intervals | Periodic:
    assert space.tokens is not None
    return space.tokens.within(num_tokens) if isinstance(space.tokens, Share) else space.tokens


def count_tokens(space: RowSpace, token: int, num_tokens: int) -> int:
    return owned_tokens(space, num_tokens).count_below(token)


def first_page(space: RowSpace, token: int, num_tokens: int) -> int:
    """The index, among the request's pages, of the page with the first owned token at or after `token`."""
    return count_tokens(space, token, num_tokens) // space.page_size


def edges(owned: Intervals | Periodic) -> tuple[Ints, int]:
    """Where intervals start and stop, and their period (0: none)."""
    if isinstance(owned, Periodic):
        return np.array([owned.offset, owned.offset + owned.run]), owned.period
    return np.array(owned.parts, dtype=np.int64).reshape(-1), 0


@dataclass(frozen=True, eq=False)
class ComponentPlan:
    name: str
    source: RowSpace
    destination: RowSpace
    spans: tuple[SpanClass, ...]

    @cached_property
    def cores(self) -> list[_native.Span]:
        return [span.core for span in self.spans]

    @cached_property
    def converts(self) -> bool:
        """Whether numbers are converted. All of the component is packed then."""
        return any(span.conversion is not None for span in self.spans)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({int(layer) for span in self.spans for layer in span.layers}))


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """What one source rank writes to one destination rank."""

    components: dict[str, ComponentPlan]

    @cached_property
    def converted(self) -> tuple[str, ...]:
        return tuple(name for name, component in self.components.items() if component.converts)


def make_plan(
    election: Election,
    *,
    source: tuple[int, LayoutTable, Mapping[str, Placement]],
    destination: tuple[int, LayoutTable, Mapping[str, Placement]],
) -> TransferPlan:
    """Each side is its group rank, its instance's table, and its placements by component."""
    components: dict[str, ComponentPlan] = {}
    flows = election.by_pair.get((source[0], destination[0]), ())
    for name, group in itertools.groupby(sorted(flows, key=lambda f: f.component), key=lambda f: f.component):
        ours, theirs = source[1].ranks[source[0]].by_name[name], destination[1].ranks[destination[0]].by_name[name]
        our_place, their_place = source[2][name], destination[2][name]
        found = [_span(flow, ours.tensor(flow.role), theirs.tensor(flow.role), our_place, their_place) for flow in group]
        spaces = row_space(ours, our_place), row_space(theirs, their_place)
        components[name] = ComponentPlan(name, *spaces, tuple(_join_roles(found, *spaces)))
    return TransferPlan(components)


def _join_roles(spans: Iterable[SpanClass], source: RowSpace, destination: RowSpace) -> list[SpanClass]:
    """Join neighbours whose bytes lie side by side in both memories, as K and V of a page may."""
    found: list[SpanClass] = []
    for span in sorted(spans, key=lambda each: int(each.source_bases[0])):
        joined = _joined(found[-1], span, source, destination) if found else None
        if joined is None:
            found.append(span)
        else:
            found[-1] = joined
    return found


def _joined(one: SpanClass, other: SpanClass, source: RowSpace, destination: RowSpace) -> SpanClass | None:
    """One span class with another dim, if that makes longer runs of bytes, be it of whole pages only."""
    if one.conversion is not None or _shape(one) != _shape(other) or not np.array_equal(one.layers, other.layers):
        return None
    steps = [np.unique((b - a).view(np.int64)) for a, b in zip(_bases(one), _bases(other), strict=True)]
    ours, theirs = (int(step[0]) if len(step) == 1 else 0 for step in steps)
    if min(ours, theirs) <= 0:
        return None
    dims, (_, nbytes) = _fold([*one.dims, (2, ours, theirs)], (one.nbytes, one.nbytes))
    pages = {space.page_size // one.granule * one.nbytes for space in (source, destination)}
    if len(dims) > len(one.dims) and not (one.dense and len(dims) == 1 and pages == {ours} == {theirs}):
        return None
    return replace(one, dims=dims, nbytes=nbytes, dense=one.token_strides == (nbytes, nbytes))


def _shape(span: SpanClass) -> tuple[object, ...]:
    return span.row_strides, span.token_strides, span.granule, span.dims, span.nbytes, span.dense, span.conversion


def _bases(span: SpanClass) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    return span.source_bases, span.destination_bases


def _span(
    flow: Flow, source: TensorLayout, destination: TensorLayout, source_place: Placement, destination_place: Placement
) -> SpanClass:
    ours, theirs = source_place.tensor(flow.role), destination_place.tensor(flow.role)
    box = {axis.name: part for axis, part in zip(destination.inner_axes, flow.box, strict=True)}
    conversion, by = _conversion(flow, source, destination, box)
    boxes = [box] if by is None else [{**box, by: Interval(each, each + 1)} for each in range(*box[by])]
    axes = [(part.stop - part.start, ours.strides[name], theirs.strides[name]) for name, part in boxes[0].items()]
    dims, nbytes = _fold(axes, (ITEMSIZE[source.dtype], ITEMSIZE[destination.dtype]))
    token = destination.token
    strides = (ours.strides[token.name], theirs.strides[token.name]) if token else (0, 0)
    return SpanClass(
        layers=np.repeat(np.array(flow.layers, dtype=np.int64), len(boxes)),
        source_bases=_in_each(boxes, lambda each: ours.addresses(flow.layers, ours.box_offset(source, each))),
        destination_bases=_in_each(boxes, lambda each: theirs.addresses(flow.layers, theirs.box_offset(destination, each))),
        row_strides=(ours.row_stride, theirs.row_stride),
        token_strides=strides,
        granule=token.granule if token else 1,
        dims=dims,
        nbytes=nbytes[1],
        dense=strides == nbytes,
        conversion=conversion,
    )


def _in_each(
    boxes: Sequence[Mapping[str, Interval]], bases: Callable[[Mapping[str, Interval]], npt.NDArray[np.uint64]]
) -> npt.NDArray[np.uint64]:
    return np.stack([bases(box) for box in boxes], axis=1).reshape(-1)


def _conversion(
    flow: Flow, source: TensorLayout, destination: TensorLayout, box: Mapping[str, Interval]
) -> tuple[Conversion | None, str | None]:
    """How numbers are converted, and the axis whose positions have scales of their own; `None` if not, or if none has."""
    if source.dtype == destination.dtype or source.numbers is None or destination.numbers is None:
        return None, None
    quantized = source if source.dtype in QUANTIZED else destination
    assert quantized.numbers is not None
    by = quantized.numbers.axis
    positions = range(1) if by is None else range(*box[by])
    scales = tuple(quantized.scales[place] for place in itertools.product(flow.layers, positions))
    rounding = destination.numbers.rounding or "nearest"  # into a format of 16 or 32 bits
    return Conversion(source.dtype, destination.dtype, rounding, scales), by


def _fold(
    axes: Iterable[tuple[int, int, int]], nbytes: tuple[int, int]
) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, int]]:
    """The dims and the run length in bytes, on either side, that cover `axes` in the longest runs of elements of `nbytes`.
    Innermost first, an axis joins the run if its strides on both sides equal the run's length, or the dim that it continues
    on both sides.
    """
    dims: list[tuple[int, int, int]] = []
    for count, ours, theirs in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: (axis[2], axis[1])):
        if not dims and (ours, theirs) == nbytes:
            nbytes = nbytes[0] * count, nbytes[1] * count
        elif dims and (ours, theirs) == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            dims[-1] = (dims[-1][0] * count, dims[-1][1], dims[-1][2])
        else:
            dims.append((count, ours, theirs))
    return tuple(reversed(dims)), nbytes
