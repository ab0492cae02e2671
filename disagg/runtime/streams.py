"""A plan's span classes for whoever computes addresses itself: engines, and the kernels that pack and unpack on a GPU.

What is fixed goes there when a rank is connected; a request is then token runs only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from disagg.backends.abilities import PreparedSpans, SpanWriter
from disagg.backends.base import Backend, Op, RemotePeer
from disagg.core.copies import CopyBatch
from disagg.core.errors import LocalProtocolError
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.layout.binding import BoundRows, Stream, bind_rows, span_shapes
from disagg.layout.plan import TransferPlan
from disagg.protocol.messages import unpack_rows
from disagg.protocol.types import StartTransfer
from disagg.transfer.jobs import BoundTransfer, PackedStream
from disagg.transfer.pool_memory import PoolMemory


@dataclass(frozen=True)
class PreparedPlan:
    """A plan's span classes at the engine; `first`: the number of each component's first."""

    spans: PreparedSpans
    first: Mapping[str, int]


def _shapes(plan: TransferPlan) -> tuple[list[SpanShape], dict[str, int]]:
    """Every component's span classes, and the number of each component's first."""
    shapes: list[SpanShape] = []
    first = {}
    for name, component in plan.components.items():
        first[name] = len(shapes)
        shapes += span_shapes(component)
    return shapes, first


def prepare(backend: Backend, peer: RemotePeer, plan: TransferPlan) -> PreparedPlan | None:
    """Give a plan's span classes to the engine, where it takes them; raises as `SpanWriter.prepare_spans` does."""
    if not isinstance(backend, SpanWriter):
        return None
    shapes, first = _shapes(plan)
    spans = backend.prepare_spans(Op.WRITE, peer, shapes)
    return PreparedPlan(spans, first) if spans is not None else None


def bind_prepared(prepared: PreparedPlan, plan: TransferPlan, start: StartTransfer) -> BoundTransfer:
    """Every copy of a transfer. Raises `LayoutError` where rows do not fit."""
    parts: list[SpanRuns] = []
    for written in start.written:
        component, source = plan.components.get(written.component), start.chunk.rows.get(written.component)
        if component is None or source is None:
            continue
        reserved = start.reserve.rows.get(written.component)
        if reserved is None:
            raise LocalProtocolError(f"component {written.component!r} is needed, but the receiver reserved no rows for it")
        placed = bind_rows(
            component,
            source=source,
            destination=unpack_rows(reserved),
            tokens=(written.start, written.stop),
            num_tokens=start.reserve.need[written.component][1],
            layers=written.layers,
        )
        parts += placed.span_runs(prepared.first[written.component])
    return BoundTransfer(SpanBatch(prepared.spans.shapes, tuple(parts)), prepared=prepared.spans)


# -- packed streams --------------------------------------------------------------------------------------------------

StreamOf = Callable[[Sequence[tuple[str, BoundRows]]], PackedStream]
"""Makes the stream of some components' copies, by name and in order, of one side of one plan."""


def source_stream(placed: Sequence[tuple[str, BoundRows]]) -> Stream:
    """A stream to be packed from host memory."""
    return _host_stream(placed, source=True)


def destination_stream(placed: Sequence[tuple[str, BoundRows]]) -> Stream:
    """A stream to be unpacked into host memory."""
    return _host_stream(placed, source=False)


def _host_stream(placed: Sequence[tuple[str, BoundRows]], *, source: bool) -> Stream:
    stream = Stream(source=source)
    for _, copies in placed:
        copies.append_to(stream)
    return stream


@dataclass(frozen=True)
class AtSource:
    """Copies that are gathered from host memory in the order in which they lie in the peer's, and written there as they are.

    Both streams are of the same copies, so that a byte has the same place in both.
    """

    source: Stream
    destination: Stream

    @classmethod
    def of(cls, placed: Sequence[tuple[str, BoundRows]]) -> AtSource:
        """The copies of some components, in order."""
        return cls(source_stream(placed), destination_stream(placed))

    @property
    def total(self) -> int:
        return self.source.total

    def gather(self, offset: int, nbytes: int, staging_address: int) -> None:
        """Pack the bytes `[offset, offset + nbytes)` into a slot."""
        self.source.gather(offset, nbytes, staging_address)

    def copies(self, offset: int, nbytes: int, staging_address: int) -> CopyBatch:
        """From the slot to where these bytes belong; one for each run of them that lies together there."""
        return CopyBatch.of_columns(*self.destination.copies(offset, nbytes, staging_address))


def stream_maker(memory: PoolMemory | None, plan: TransferPlan, *, source: bool) -> StreamOf:
    """How streams of a plan are made where this side's pools are; `None`: none will be, or on the host."""
    shapes, first = _shapes(plan)
    packer = memory.packer(shapes) if memory is not None else None
    if packer is None:
        return source_stream if source else destination_stream

    def on_gpu(placed: Sequence[tuple[str, BoundRows]]) -> PackedStream:
        parts = [part for name, copies in placed for part in copies.span_runs(first[name])]
        return packer.stream(SpanBatch(packer.shapes, tuple(parts)))

    return on_gpu
