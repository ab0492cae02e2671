"""Packed streams and prepared span classes of the plans between two ranks.

A stream is one side's bytes of a request in an order that both sides derive from the plan: span classes, layers, tokens in
order, cut where a page of either side ends. Engines and kernels that compute addresses get the span classes when a rank is
connected, and runs of tokens for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from disagg.backends.abilities import PreparedSpans, SpanWriter
from disagg.backends.base import Backend, RemotePeer
from disagg.core.spans import SpanBatch, SpanShape
from disagg.layout.binding import BoundRows, Stream, span_shapes
from disagg.layout.plan import ComponentPlan, SpanClass, TransferPlan
from disagg.transfer.jobs import PackedStream
from disagg.transfer.pool_memory import PoolMemory

MakeStream = Callable[[Sequence[tuple[str, BoundRows]]], PackedStream]
"""Makes the stream of some components' bound rows, by name and in order."""


@dataclass(frozen=True)
class PreparedPlan:
    """`first` is the number of each component's first span class."""

    spans: PreparedSpans
    first: Mapping[str, int]


def is_small(plan: ComponentPlan, span: SpanClass, pack_below: int) -> bool:
    """Runs of tokens end with the shorter page. Converted numbers always travel packed."""
    if plan.converts:
        return True
    if not span.dense:
        return span.nbytes < pack_below
    return span.nbytes * (min(plan.source.page_size, plan.destination.page_size) // span.granule) < pack_below


def has_small(plan: TransferPlan, pack_below: int) -> bool:
    return any(is_small(component, span, pack_below) for component in plan.components.values() for span in component.spans)


def prepare(backend: Backend, peer: RemotePeer, plan: TransferPlan) -> PreparedPlan | None:
    """`None` if the engine takes no span classes."""
    if not isinstance(backend, SpanWriter):
        return None
    shapes, first = _shapes(plan)
    spans = backend.prepare_spans(peer, shapes)
    return PreparedPlan(spans, first) if spans is not None else None


def source_stream(bound: Sequence[tuple[str, BoundRows]]) -> Stream:
    return _host_stream(bound, source=True)


def destination_stream(bound: Sequence[tuple[str, BoundRows]]) -> Stream:
    return _host_stream(bound, source=False)


def stream_maker(memory: PoolMemory | None, plan: TransferPlan, *, source: bool) -> MakeStream:
    """Makes streams of a plan for pools in `memory`; `None`: in host memory."""
    shapes, first = _shapes(plan)
    packer = memory.packer(shapes) if memory is not None else None
    if packer is None:
        return source_stream if source else destination_stream

    def on_gpu(bound: Sequence[tuple[str, BoundRows]]) -> PackedStream:
        parts = [part for name, rows in bound for part in rows.span_runs(first[name])]
        return packer.stream(SpanBatch(packer.shapes, tuple(parts)))

    return on_gpu


def _host_stream(bound: Sequence[tuple[str, BoundRows]], *, source: bool) -> Stream:
    stream = Stream(source=source)
    for _, rows in bound:
        rows.append_to(stream)
    return stream


def _shapes(plan: TransferPlan) -> tuple[list[SpanShape], dict[str, int]]:
    """Every component's span classes, and the number of its first."""
    shapes: list[SpanShape] = []
    first = {}
    for name, component in plan.components.items():
        first[name] = len(shapes)
        shapes += span_shapes(component)
    return shapes, first
