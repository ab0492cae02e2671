"""Span classes and requests as the kernel `move_spans` reads them (`_kernels.cu` has the layout of every word).

NumPy only: `disagg.testing.twins_gpu` reads the same words without a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.copies import Addresses
from disagg.errors import BackendError
from disagg.spans import SpanBatch, SpanShape

HEADER_WORDS, PART_WORDS = 4, 7
_HEADER, _PART = struct.Struct("=4Q"), struct.Struct("=2Q10I")
SPAN_WORDS, DIM_WORDS = 8, 3
ALL = 2**32 - 1
MAX_PIECES = 2**31 - 1
"""Pieces of one base, and tiles of one order: the kernel counts them with 32 bits."""

Translate = Callable[[Addresses, int, int], Addresses]
"""`(first addresses, nbytes from each on, side)` -> where they are on this GPU; raises `NotRegistered`."""


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """Span classes as words of 8 bytes; `at[i]`: where class `i` begins."""

    shapes: tuple[SpanShape, ...]
    words: Addresses
    at: tuple[int, ...]


def encode_shapes(shapes: Sequence[SpanShape], translate: Translate) -> ShapeTable:
    """The table of `shapes`, with every base where `translate` says it is here."""
    words: list[Addresses] = []
    at: list[int] = []
    end = 0
    for shape in shapes:
        begins, span = end, SPAN_WORDS + DIM_WORDS * len(shape.dims)
        fixed = [shape.nbytes, *shape.row_strides, *shape.token_strides, shape.dense, len(shape.dims), begins + span]
        bases = [translate(*shape.extents(side), side) for side in (0, 1)]
        words.append(np.array([*fixed, *(value for dim in shape.dims for value in dim)], dtype=np.uint64))
        words.append(np.stack(bases, axis=1).astype(np.uint64).ravel())
        at.append(begins)
        end += span + 2 * len(bases[0])
    return ShapeTable(tuple(shapes), np.concatenate([*words, np.zeros(1, np.uint64)]), tuple(at))


@dataclass(frozen=True)
class OrderPart:
    """Where a part's stream and tiles begin, for whoever cuts an order."""

    stream_begin: int
    base_nbytes: int
    num_bases: int
    first_tile: int
    base_tiles: int


@dataclass(frozen=True)
class Order:
    """What is known of an encoded order: its size in bytes, and how its stream is cut into tiles of `tile` bytes."""

    nbytes: int
    tile: int
    total: int
    parts: tuple[OrderPart, ...]

    def tiles(self, low: int, high: int) -> tuple[int, int]:
        """The tiles `[first, end)` that hold bytes `[low, high)` of the stream."""
        return self._tile(low), self._tile(high - 1) + 1

    def _tile(self, position: int) -> int:
        part = next(p for p in reversed(self.parts) if p.stream_begin <= position)
        base, inside = divmod(position - part.stream_begin, part.base_nbytes)
        return part.first_tile + base * part.base_tiles + inside // self.tile


def order_nbytes(batch: SpanBatch) -> int:
    """Room for an order, in bytes; at most."""
    runs = {id(part.runs): len(part.runs) for part in batch.parts}
    bases = sum(len(part.bases) for part in batch.parts if part.bases is not None)
    return 8 * (HEADER_WORDS + PART_WORDS * len(batch.parts)) + 32 + sum(20 * n + 8 for n in runs.values()) + 4 * bases


def encode_order(batch: SpanBatch, table: ShapeTable, *, tile: int, out: Addresses) -> Order:
    """Write `batch` into `out`, words of 8 bytes, of which `order_nbytes` says how many there must be.

    Raises `BackendError` for more pieces or tiles than the kernel counts.
    """
    small, parts = (
        out.view(np.uint32),
        [(part, sizes) for part, sizes in zip(batch.parts, batch.sizes, strict=True) if all(sizes)],
    )
    end = 4 * -(-2 * (HEADER_WORDS + PART_WORDS * len(parts)) // 4)
    placed: dict[int, tuple[int, int]] = {}
    for part, _ in parts:
        if id(part.runs) not in placed:
            placed[id(part.runs)] = end // 4, 0
            small[end : end + 4 * len(part.runs)].reshape(-1, 4)[:] = part.runs[:, :4]
            end += 4 * len(part.runs)
    for part, _ in parts:
        rows_at, prefix_at = placed[id(part.runs)]
        if not prefix_at:
            placed[id(part.runs)] = rows_at, end
            small[end] = 0
            small[end + 1 : end + 1 + len(part.runs)] = np.cumsum(part.runs[:, 4])
            end += len(part.runs) + 1
    memory = out.data
    _HEADER.pack_into(memory, 0, 0, 0, len(parts), 0)
    at, stream, tiles, known = 8 * HEADER_WORDS, 0, 0, []
    for part, (num_bases, pieces, nbytes) in parts:
        base_tiles = -(-nbytes // tile)
        if pieces > MAX_PIECES or tiles + num_bases * base_tiles > MAX_PIECES:
            raise BackendError(f"kernel: expected at most {MAX_PIECES} pieces of a layer, found {pieces}")
        rows_at, prefix_at = placed[id(part.runs)]
        bases_at = ALL
        if part.bases is not None:
            bases_at = end
            small[end : end + num_bases] = part.bases
            end += num_bases
        steps = batch.shapes[part.span].steps
        _PART.pack_into(
            memory, at, stream, nbytes,
            table.at[part.span], len(part.runs), tiles, base_tiles, pieces, steps, rows_at, prefix_at, bases_at, 0,
        )  # fmt: skip
        known.append(OrderPart(stream, nbytes, num_bases, tiles, base_tiles))
        at, stream, tiles = at + _PART.size, stream + num_bases * nbytes, tiles + num_bases * base_tiles
    return Order(4 * end, tile, stream, tuple(known))
