"""Copies by shape, for backends that compute addresses themselves. Shapes are fixed for a pair of ranks; a request only
lists span classes and token runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.copies import Addresses
from disagg.core.memory import ITEMSIZE

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpanShape:
    """One run of bytes for each pair of bases, each token run and each step of `dims`.

    Pairs are `(source, destination)`. Bases are uint64 `[bases]`, strides are in bytes, `dims` are `(count, source_stride,
    destination_stride)`, outermost first. A token run of `n` positions is one run of `n * nbytes` bytes if `dense`, else `n`
    runs of `nbytes`, `token_strides` apart. `num_rows` are the rows of the two pools, `positions` the positions in a row.
    With `formats` (dtypes of source and destination, rounding), numbers are converted with the scale of each base; `nbytes`
    are the destination's.
    """

    source_bases: Addresses
    destination_bases: Addresses
    row_strides: tuple[int, int]
    token_strides: tuple[int, int]
    dims: tuple[tuple[int, int, int], ...]
    nbytes: int
    dense: bool
    num_rows: tuple[int, int]
    positions: tuple[int, int]
    formats: tuple[str, str, str] | None = None
    scales: tuple[float, ...] = ()

    @property
    def steps(self) -> int:
        """Runs of bytes in one position, or in one token run if `dense`."""
        return math.prod(count for count, _, _ in self.dims)

    def extents(self, side: int) -> tuple[Addresses, int]:
        """The first addresses of one side (0: source), and how many bytes from each a request can reach."""
        nbytes = self.nbytes
        if self.formats is not None and side == 0:
            nbytes = nbytes // ITEMSIZE[self.formats[1]] * ITEMSIZE[self.formats[0]]
        inner = nbytes + sum((dim[0] - 1) * dim[1 + side] for dim in self.dims)
        rows, positions = self.num_rows[side] - 1, self.positions[side] - 1
        extent = rows * self.row_strides[side] + positions * self.token_strides[side] + inner
        return (self.source_bases, self.destination_bases)[side], extent


class SpanShapes(tuple[SpanShape, ...]):  # noqa: SLOT001 (it caches)
    @cached_property
    def convert(self) -> bool:
        return any(shape.formats is not None for shape in self)

    @cached_property
    def sizes(self) -> _native.SpanSizes:
        steps = np.array([shape.steps for shape in self], dtype=np.uint64)
        nbytes = np.array([shape.nbytes for shape in self], dtype=np.uint64)
        num_bases = np.array([len(shape.source_bases) for shape in self], dtype=np.uint64)
        return _native.SpanSizes(steps, nbytes, num_bases, np.array([shape.dense for shape in self], dtype=np.bool_))


class SpanRuns(msgspec.Struct, frozen=True, eq=False):
    """Span class number `span` over token runs, for the bases numbered `bases` (`None`: all).

    `runs` is int64 `[runs, 5]`: `source_row, source_offset, destination_row, destination_offset, length`, with offsets and
    lengths in positions, all inside the pools.
    """

    span: int
    bases: Ints | None
    runs: Ints


class SpanBatch:
    """A stream of bytes in order of parts, bases, runs, positions and dims. Immutable.

    Raises `ValueError` for an unknown span class, a run without positions, or 2**64 bytes and more.
    """

    __slots__ = ("core", "parts", "shapes", "total_nbytes")

    def __init__(self, shapes: Sequence[SpanShape], parts: Sequence[SpanRuns]) -> None:
        self.shapes, self.parts = shapes, tuple(parts)
        sizes = (shapes if isinstance(shapes, SpanShapes) else SpanShapes(shapes)).sizes
        self.core = _native.WorkList(sizes, [(part.span, part.bases, part.runs) for part in parts])
        self.total_nbytes = self.core.total_nbytes

    def __len__(self) -> int:
        """The number of pieces, before neighbours are joined."""
        return self.core.num_pieces
