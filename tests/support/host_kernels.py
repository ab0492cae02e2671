"""GPU engines and packers in host memory: the reference implementation replaces the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg.backends.base import RemotePeer, Transfer
from disagg.backends.cuda.work_list import ShapeTable, encode_shapes, encode_work_list, work_list_nbytes
from disagg.backends.local import LocalBackend
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendError
from disagg.core.spans import SpanBatch, SpanShape
from disagg.testing.reference_numbers import FORMATS, convert
from harness.reference_kernels import Piece, SpanLaunch, span_pieces
from tests.support.cluster import Side

TILE = 256
HND = "page kv_head token dim"
SIDES = [
    (Side(tp=2), Side(tp=1, page=16)),
    (Side(tp=1, axes=HND), Side(tp=4, page=8)),
    (Side(tp=2, stages=((0,), (1, 2))), Side(tp=2, axes=HND)),
]


@dataclass(frozen=True, eq=False)
class HostSpans:
    """Span classes, and optionally a work list over them, as words in host memory."""

    table: ShapeTable
    words: Any = None
    work_list: _native.WorkList | None = None
    peer: RemotePeer | None = None

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.table.shapes

    @classmethod
    def of(cls, shapes: Sequence[SpanShape], peer: RemotePeer | None = None) -> HostSpans:
        return cls(encode_shapes(shapes, lambda addresses, _nbytes, _side: addresses), peer=peer)

    def upload(self, batch: SpanBatch) -> HostSpans:
        words = np.zeros(work_list_nbytes(batch) // 8 + 1, np.uint64)
        encode_work_list(batch, self.table, tile=TILE, out=words)
        return HostSpans(self.table, words, batch.core, self.peer)

    def pieces(self, low: int, high: int, **linear: int) -> list[Piece]:
        assert self.work_list is not None
        launch = SpanLaunch(self.words, self.table.words, *self.work_list.tiles(low, high), TILE, low, high, **linear)
        return [piece for piece in span_pieces(launch) if piece.nbytes]


def move(pieces: Sequence[Piece]) -> None:
    """Copy and convert pieces, as the kernel does."""
    for piece in pieces:
        rule = piece.conversion
        if rule is None:
            ctypes.memmove(piece.destination, piece.source, piece.nbytes)
            continue
        source, destination = FORMATS[rule.source].dtype, FORMATS[rule.destination].dtype
        count = -(-(rule.head + piece.nbytes) // np.dtype(destination).itemsize)
        stored = np.frombuffer(ctypes.string_at(piece.source, count * np.dtype(source).itemsize), source)
        found = convert(stored, rule.source, rule.destination, scale=rule.scale, rounding=rule.rounding).tobytes()
        ctypes.memmove(piece.destination, found[rule.head : rule.head + piece.nbytes], piece.nbytes)


class FailedCopies:
    """A kernel that fails."""

    completion: None = None

    def query(self) -> bool:
        raise BackendError("the GPU has fallen off the bus")


@dataclass
class DelayedCopies:
    """Copies that the second call of `query` makes."""

    pieces: Sequence[Piece]
    asked: int = 0
    completion: None = None

    def query(self) -> bool:
        self.asked += 1
        if self.asked == 2:
            move(self.pieces)
            HostMover.moved += sum(piece.nbytes for piece in self.pieces)
        return self.asked > 1


class HostMover:
    """`GpuMover` in host memory."""

    moved = held = 0

    def prepare(self, shapes: Sequence[SpanShape]) -> HostSpans:
        return HostSpans.of(shapes)

    def upload(self, shapes: HostSpans, batch: SpanBatch) -> HostSpans:
        HostMover.held += 1
        return shapes.upload(batch)

    def gather(self, work_list: HostSpans, offset: int, nbytes: int, address: int) -> DelayedCopies:
        return DelayedCopies(work_list.pieces(offset, offset + nbytes, linear_destination=address))

    def scatter(self, work_list: HostSpans, offset: int, nbytes: int, address: int) -> DelayedCopies:
        return DelayedCopies(work_list.pieces(offset, offset + nbytes, linear_source=address))

    def release(self, work_list: HostSpans) -> None:
        HostMover.held -= 1


class Spans(LocalBackend):
    """A backend that accepts span classes and rejects addresses."""

    posted = 0

    def prepare_spans(self, peer: RemotePeer, shapes: Sequence[SpanShape]) -> HostSpans:
        return HostSpans.of(shapes, peer)

    def submit_spans(self, prepared: HostSpans, batch: SpanBatch) -> Transfer:
        assert batch.shapes is prepared.shapes
        assert prepared.peer is not None
        Spans.posted += 1
        pieces = prepared.upload(batch).pieces(0, batch.total_nbytes) if len(batch) else []
        move([piece for piece in pieces if piece.conversion is not None])
        rows = [(piece.source, piece.destination, piece.nbytes) for piece in pieces if piece.conversion is None]
        return super().submit(prepared.peer, CopyBatch(*np.array(rows, np.uint64).reshape(-1, 3).T))

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Any:
        raise AssertionError("addresses were computed on the host")
