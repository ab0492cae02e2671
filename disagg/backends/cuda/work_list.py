"""Span classes and requests in the words that the kernel `move_spans` reads (`kernels.cu`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.core.copies import Addresses
from disagg.core.errors import BackendError
from disagg.core.formats import FLOATS, QUANTIZED, ROUNDINGS
from disagg.core.memory import ITEMSIZE
from disagg.core.spans import Ints, SpanBatch, SpanShape, SpanShapes

SPAN_WORDS, DIM_WORDS = 10, 3
FORMATS = FLOATS + QUANTIZED
"""Dtypes that the kernel converts, by number."""

Translate = Callable[[Addresses, int, int], Addresses]
"""`(start addresses, nbytes from each start, side)` -> the addresses as this GPU sees them; raises `NotRegistered`."""


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """Class `i` begins at word `at[i]`."""

    shapes: SpanShapes
    words: Addresses
    at: Ints


def encode_shapes(shapes: Sequence[SpanShape], translate: Translate) -> ShapeTable:
    words: list[Addresses] = []
    at: list[int] = []
    end = 0
    for shape in shapes:
        begins, span = end, SPAN_WORDS + DIM_WORDS * len(shape.dims)
        bases = [translate(*shape.extents(side), side) for side in (0, 1)]
        scales = np.array(shape.scales, np.float32).view(np.uint32).astype(np.uint64)
        bases_at = begins + span
        scales_at = bases_at + 2 * len(bases[0])
        fixed = [shape.nbytes, *shape.row_strides, *shape.token_strides, shape.dense, len(shape.dims), bases_at]
        fixed += [0 if shape.formats is None else _formats(*shape.formats), scales_at]
        words.append(np.array([*fixed, *(value for dim in shape.dims for value in dim)], dtype=np.uint64))
        words += [np.stack(bases, axis=1).astype(np.uint64).ravel(), scales]
        at.append(begins)
        end = scales_at + len(scales)
    return ShapeTable(SpanShapes(shapes), np.concatenate([*words, np.zeros(1, np.uint64)]), np.array(at, np.int64))


def _formats(source: str, destination: str, rounding: str) -> int:
    sizes = [ITEMSIZE[dtype].bit_length() - 1 for dtype in (source, destination)]
    numbers = FORMATS.index(source) << 8 | FORMATS.index(destination) << 16
    return 1 | ROUNDINGS.index(rounding) << 1 | numbers | sizes[0] << 24 | sizes[1] << 28


def work_list_nbytes(batch: SpanBatch) -> int:
    return 8 * batch.core.num_words


def encode_work_list(batch: SpanBatch, table: ShapeTable, *, tile: int, out: Addresses) -> int:
    """Write the work list into `out`, at least `work_list_nbytes(batch)` bytes; returns its bytes. `tile`: bytes per
    tile.

    Afterwards `batch.core.tiles` gives the tiles of a byte range. Raises `BackendError` for more pieces or tiles than
    the kernel can count.
    """
    try:
        return batch.core.encode(table.at, tile, out)
    except ValueError as error:
        raise BackendError(str(error)) from error
