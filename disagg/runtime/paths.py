"""Which path the pieces of a transfer take, and their binding to rows."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping

import numpy as np

from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError
from disagg.core.rows import Pages, Rows, Slot
from disagg.layout.binding import BoundRows, Stream, bind_rows
from disagg.layout.plan import ComponentPlan, RowSpace, SpanClass, TransferPlan, first_page
from disagg.protocol.messages import Part, Written, unpack_rows
from disagg.protocol.types import StartTransfer
from disagg.runtime.streams import AtSource, StreamOf, destination_stream, source_stream
from disagg.transfer.jobs import BoundTransfer, PackedStream

MIN_PIECES = 32
"""Fewer pieces than this go one by one: a slot costs two messages."""


def is_small(plan: ComponentPlan, span: SpanClass, pack_below: int) -> bool:
    """Whether the pieces of a span class are below the threshold; runs of tokens end with the shorter page."""
    if not span.dense:
        return span.nbytes < pack_below
    return span.nbytes * (min(plan.source.page_size, plan.destination.page_size) // span.granule) < pack_below


class Way(enum.Enum):
    """How bytes go: piece by piece; piece by piece because the engine collects them; packed at the source and written where
    they belong; or packed into the peer's ring.
    """

    DIRECT = "direct"
    COLLECTED = "collected"
    SOURCE = "source"
    RING = "packed"


def way_of(small: BoundRows, pack_below: int, gathers_from: int | None = None) -> Way:
    """How small pieces of a request go: directly where neighbours joined are long on the average; packed at the source where
    they lie together at their destination alone, unless the engine collects pieces of that length.
    """
    destination = destination_stream([("", small)])
    if destination.total >= small.num_copies() * pack_below:
        return Way.DIRECT
    collected = gathers_from is not None and _collects(source_stream([("", small)]), gathers_from)
    # The threshold is for pieces that lie apart on both sides; of collected ones the source's side costs no more than packing.
    if destination.total < destination.num_pieces * (pack_below / 2 if collected else pack_below):
        return Way.RING
    return Way.COLLECTED if collected else Way.SOURCE


def bind_outgoing(
    plan: TransferPlan,
    start: StartTransfer,
    *,
    pack_below: int,
    has_ring: bool = True,
    gathers_from: int | None = None,
    stream_of: StreamOf = source_stream,
) -> BoundTransfer:
    """Every copy of a transfer, by the way it goes; `gathers_from` as of `Gathering`. Raises `LayoutError` where rows do not
    fit.
    """
    direct: list[CopyBatch] = []
    parts: list[Part] = []
    packed: list[tuple[str, BoundRows]] = []
    gathered: list[tuple[str, BoundRows]] = []
    for written in start.written:
        component = plan.components.get(written.component)
        source = start.chunk.rows.get(written.component)
        if component is None or source is None:
            continue
        reserved = start.reserve.rows.get(written.component)
        if reserved is None:
            raise LocalProtocolError(f"component {written.component!r} is needed, but the receiver reserved no rows for it")
        placed = functools.partial(
            _place, component, written, source, unpack_rows(reserved), start.reserve.need[written.component][1]
        )
        small = tuple(i for i, span in enumerate(component.spans) if is_small(component, span, pack_below))
        whole = placed()
        if not small or not whole.has_copies(MIN_PIECES):
            direct.append(whole.copies())
            continue
        large = tuple(i for i in range(len(component.spans)) if i not in small)
        chosen = placed(small) if large else whole
        # Only streams of host memory say where their bytes lie; elsewhere looking at every piece takes longer than packing.
        way = way_of(chosen, pack_below, gathers_from) if stream_of is source_stream else Way.RING
        if way in (Way.DIRECT, Way.COLLECTED) or (way is Way.RING and not has_ring):
            direct.append(whole.copies())
            continue
        if large:
            direct.append(placed(large).copies())
        if way is Way.SOURCE:
            gathered.append((written.component, chosen))
        else:
            packed.append((written.component, chosen))
            parts.append(Part(written.component, small, written.layers, written.start, written.stop))
    stream = stream_of(packed) if packed else None
    return BoundTransfer(
        CopyBatch.concatenate(direct),
        stream,
        tuple(parts),
        source=AtSource.of(gathered) if gathered else None,
        listed=stream if isinstance(stream, Stream) and _collects(stream, gathers_from) else None,
    )


def _collects(stream: Stream, gathers_from: int | None) -> bool:
    """Whether the engine is to take a stream's pieces from where they lie."""
    return gathers_from is not None and 0 < gathers_from * stream.num_pieces <= stream.total


def bind_incoming(
    plan: TransferPlan,
    parts: tuple[Part, ...],
    rows: Mapping[str, Rows],
    need: Mapping[str, tuple[int, int]],
    *,
    stream_of: StreamOf = destination_stream,
) -> PackedStream:
    """Where a writer's packed stream belongs, by this side's rows. Raises `LayoutError` for parts that do not fit."""
    packed: list[tuple[str, BoundRows]] = []
    for part in parts:
        component, destination, needed = plan.components.get(part.component), rows.get(part.component), need.get(part.component)
        fits = component is not None and all(span < len(component.spans) for span in part.spans)
        if component is None or destination is None or needed is None or not fits:
            raise LocalProtocolError(f"packed stream: component {part.component!r}, span classes {part.spans} are not expected")
        written = Written(0, part.component, part.layers, max(part.start, needed[0]), min(part.stop, needed[1]))
        source = _any_rows(component.source, written, needed[1])
        packed.append((part.component, _place(component, written, source, destination, needed[1], part.spans)))
    return stream_of(packed)


def _place(
    component: ComponentPlan,
    written: Written,
    source: Rows,
    destination: Rows,
    num_tokens: int,
    spans: tuple[int, ...] | None = None,
) -> BoundRows:
    return bind_rows(
        component,
        source=source,
        destination=destination,
        tokens=(written.start, written.stop),
        num_tokens=num_tokens,
        layers=written.layers,
        spans=spans,
    )


def _any_rows(space: RowSpace, written: Written, num_tokens: int) -> Rows:
    """Rows as the writer may have them: their ids do not matter for the order, only where pages end."""
    if space.tokens is None:
        return Slot(0)
    first = first_page(space, written.start, num_tokens)
    count = first_page(space, max(written.stop - 1, written.start), num_tokens) - first + 1
    return Pages(np.arange(count + 1, dtype=np.int32) % space.num_rows, written.start)
