"""Batches of copies, which a bound plan hands to a backend."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.core import _native

Addresses = npt.NDArray[np.uint64]
Columns = _native.Columns


def _column(values: npt.ArrayLike) -> Addresses:
    column = np.ascontiguousarray(values, dtype=np.uint64).view()
    column.flags.writeable = False
    return column


@dataclass(frozen=True, eq=False)
class CopyBatch:
    """Copies of `nbytes[i]` bytes from `source[i]` to `destination[i]`: three read-only `uint64` columns of one length.
    Destinations do not overlap, so the copies may be made in any order.
    """

    source: Addresses
    destination: Addresses
    nbytes: Addresses

    def __post_init__(self) -> None:
        for name in ("source", "destination", "nbytes"):
            object.__setattr__(self, name, _column(getattr(self, name)))
        if not self.source.shape == self.destination.shape == self.nbytes.shape or self.source.ndim != 1:
            raise ValueError(
                "copy batch: expected three columns of one length, found "
                f"{self.source.shape}, {self.destination.shape}, {self.nbytes.shape}"
            )

    @classmethod
    def of_columns(cls, source: Addresses, destination: Addresses, nbytes: Addresses) -> CopyBatch:
        """A batch of columns from the compiled core, which need no check."""
        made = cls.__new__(cls)
        made.__dict__.update(source=source, destination=destination, nbytes=nbytes)
        return made

    @classmethod
    def one(cls, source: int, destination: int, nbytes: int) -> CopyBatch:
        return cls(*(np.array([value], dtype=np.uint64) for value in (source, destination, nbytes)))

    def __len__(self) -> int:
        return len(self.nbytes)

    @functools.cached_property
    def total_nbytes(self) -> int:
        return _native.total_nbytes(self.nbytes)

    @classmethod
    def concatenate(cls, batches: list[CopyBatch]) -> CopyBatch:
        if len(batches) == 1:
            return batches[0]
        if not batches:
            return cls(*(np.empty(0, dtype=np.uint64) for _ in range(3)))
        return cls(
            np.concatenate([b.source for b in batches]),
            np.concatenate([b.destination for b in batches]),
            np.concatenate([b.nbytes for b in batches]),
        )
