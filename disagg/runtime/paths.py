"""Which path the pieces of a transfer take, and their binding to the request's rows.

Engines pay for each piece. Large pieces, and small ones that join into long copies, go directly; others are packed into
slots. The writer sends their span classes, and the peer derives from its own rows where the bytes belong. All pieces are
packed if only the peer's own process may write its rows, or if their numbers are converted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError, RemoteProtocolError
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.spans import SpanBatch, SpanRuns
from disagg.layout.binding import BoundRows, Stream, bind_rows, check_share
from disagg.layout.plan import ComponentPlan, RowSpace, TransferPlan, first_page
from disagg.protocol.messages import Part, Written, unpack_rows
from disagg.protocol.types import StartTransfer
from disagg.runtime.streams import MakeStream, PreparedPlan, destination_stream, is_small, source_stream
from disagg.transfer.jobs import BoundTransfer, PackedStream

MIN_PIECES = 32
"""Fewer pieces are not packed: a slot costs two messages."""


class Path(enum.Enum):
    """`GATHERED`: piece by piece too, because the engine gathers them cheaply."""

    DIRECT = "direct"
    GATHERED = "gathered"
    PACKED = "packed"


def path_of(small: BoundRows, pack_below: int, gathers_from: int | None = None) -> Path:
    """Small pieces go directly if they join into runs that are long on average."""
    destination = destination_stream([("", small)])
    if destination.total >= small.num_copies() * pack_below:
        return Path.DIRECT
    if gathers_from is None or not _gathers(source_stream([("", small)]), gathers_from):
        return Path.PACKED
    # `pack_below` is for pieces that are apart on both sides; gathering makes the source's side as cheap as packing.
    return Path.GATHERED if destination.total >= destination.num_pieces * (pack_below / 2) else Path.PACKED


def bind_outgoing(
    plan: TransferPlan,
    start: StartTransfer,
    *,
    pack_below: int,
    packs: bool = True,
    direct: bool = True,
    gathers_from: int | None = None,
    make_stream: MakeStream = source_stream,
) -> BoundTransfer:
    """`packs`: the peer lends slots. Unless `direct`, everything is packed. `gathers_from` is as in `Gathering`. Raises
    `LayoutError` if rows do not fit.
    """
    posted: list[CopyBatch] = []
    parts: list[Part] = []
    packed: list[tuple[str, BoundRows]] = []
    for outgoing in _outgoing(plan, start):
        classes, may_post = enumerate(outgoing.plan.spans), direct and not outgoing.plan.converts
        small = tuple(i for i, span in classes if not may_post or is_small(outgoing.plan, span, pack_below))
        whole = outgoing.bind()
        if not packs or not small or (may_post and not whole.has_copies(MIN_PIECES)):
            posted.append(whole.copies())
            continue
        large = tuple(i for i in range(len(outgoing.plan.spans)) if i not in small)
        chosen = outgoing.bind(small) if large else whole
        # Only streams of host memory list their pieces. On a GPU listing them takes longer than packing.
        on_host = make_stream is source_stream
        if may_post and on_host and path_of(chosen, pack_below, gathers_from) is not Path.PACKED:
            posted.append(whole.copies())
            continue
        if large:
            posted.append(outgoing.bind(large).copies())
        written = outgoing.written
        packed.append((written.component, chosen))
        parts.append(Part(written.component, small, written.layers, written.start, written.stop))
    stream = make_stream(packed) if packed else None
    gathers = isinstance(stream, Stream) and not stream.converts and _gathers(stream, gathers_from)
    gathered = stream if isinstance(stream, Stream) and gathers else None
    return BoundTransfer(CopyBatch.concatenate(posted), stream, tuple(parts), gathered=gathered)


def bind_prepared(prepared: PreparedPlan, plan: TransferPlan, start: StartTransfer) -> BoundTransfer:
    """As `bind_outgoing`, in runs over span classes that the engine has."""
    parts: list[SpanRuns] = []
    for outgoing in _outgoing(plan, start):
        parts += outgoing.bind().span_runs(prepared.first[outgoing.written.component])
    return BoundTransfer(SpanBatch(prepared.spans.shapes, tuple(parts)), prepared=prepared.spans)


def bind_incoming(
    plan: TransferPlan,
    parts: tuple[Part, ...],
    rows: Mapping[str, Rows],
    need: Mapping[str, tuple[int, int]],
    *,
    make_stream: MakeStream = destination_stream,
) -> PackedStream:
    """Where a writer's packed stream belongs. Raises `RemoteProtocolError` for unexpected parts, `LayoutError` for rows
    that do not fit.
    """
    packed: list[tuple[str, BoundRows]] = []
    if len({part.component for part in parts}) < len(parts) or any(len(set(part.spans)) < len(part.spans) for part in parts):
        raise RemoteProtocolError("packed stream: expected each component, and each of its span classes, once")
    for part in parts:
        component, destination, needed = plan.components.get(part.component), rows.get(part.component), need.get(part.component)
        fits = component is not None and all(span < len(component.spans) for span in part.spans)
        if component is None or destination is None or needed is None or not fits:
            raise RemoteProtocolError(
                f"packed stream: component {part.component!r}, span classes {part.spans} are not expected"
            )
        written = Written(0, part.component, part.layers, max(part.start, needed[0]), min(part.stop, needed[1]))
        source = _assumed_rows(component.source, written, needed[1])
        bound = _Outgoing(component, written, source, destination, needed[1]).bind(part.spans)
        packed.append((part.component, bound))
    return make_stream(packed)


class _Outgoing(NamedTuple):
    plan: ComponentPlan
    written: Written
    source: Rows
    destination: Rows
    num_tokens: int

    def bind(self, spans: tuple[int, ...] | None = None) -> BoundRows:
        return bind_rows(
            self.plan,
            source=self.source,
            destination=self.destination,
            tokens=(self.written.start, self.written.stop),
            num_tokens=self.num_tokens,
            layers=self.written.layers,
            spans=spans,
        )


def reserved_rows(start: StartTransfer, component: str) -> Rows:
    """Raises `LocalProtocolError` if the receiver needs the component, and has listed no rows of it."""
    reserved = start.reserve.rows.get(component)
    if reserved is None:
        raise LocalProtocolError(f"component {component!r} is needed, but the receiver reserved no rows for it")
    return unpack_rows(reserved)


def _outgoing(plan: TransferPlan, start: StartTransfer) -> Iterator[_Outgoing]:
    for written in start.written:
        component, source = plan.components.get(written.component), start.chunk.rows.get(written.component)
        if component is None or source is None:
            continue
        reserved = reserved_rows(start, written.component)
        num_tokens = start.reserve.need[written.component][1]
        check_share(component, source, num_tokens)
        yield _Outgoing(component, written, source, reserved, num_tokens)


def _gathers(stream: Stream, gathers_from: int | None) -> bool:
    return gathers_from is not None and 0 < gathers_from * stream.num_pieces <= stream.total


def _assumed_rows(space: RowSpace, written: Written, num_tokens: int) -> Rows:
    """Only where the writer's pages end matters for the order of a stream, not their ids."""
    if space.tokens is None:
        return Slot(0)
    first = first_page(space, written.start, num_tokens)
    count = first_page(space, max(written.stop - 1, written.start), num_tokens) - first + 1
    return Pages(np.arange(count + 1, dtype=np.int32) % space.num_rows, written.start)
