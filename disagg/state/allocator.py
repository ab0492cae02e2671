"""Allocation of rows. Each is free, in use, waiting for a lease, or reserved."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError
from disagg.core.leases import Lease

Ids = npt.NDArray[np.int32]


class PoolExhausted(DisaggError):
    """Too few rows are free. None was allocated."""


_FREE, _USED, _LEASED, _RESERVED = range(4)
_STATES = ("free", "in use", "already freed and waiting for its lease", "reserved")


class RowAllocator:
    """Allocates the rows (pages, slots or rings) of a pool. Thread-safe. `reserved` rows are never allocated: common servers
    use row 0 as a dummy or null page. Rows freed with a lease become free when it is released, because a transfer may touch
    them until then.
    """

    def __init__(self, num_rows: int, *, reserved: Iterable[int] = (0,)) -> None:
        kept = sorted(set(reserved))
        if not 0 < num_rows < 2**31 or any(not 0 <= row < num_rows for row in kept):
            raise ConfigError(
                f"rows: expected 1 to 2**31 - 1 rows, and reserved ids among them, found {num_rows} rows and ids {kept}"
            )
        self._lock = threading.Lock()
        self._states = np.full(num_rows, _FREE, dtype=np.uint8)
        self._states[kept] = _RESERVED
        self._num_free = num_rows - len(kept)
        self._num_leased = 0

    @property
    def num_rows(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_leased(self) -> int:
        """Rows that were freed with a lease that is not yet released."""
        return self._num_leased

    def can_allocate(self, num_rows: int) -> bool:
        return num_rows <= self._num_free

    def allocate(self, num_rows: int) -> Ids:
        """The lowest free rows, ascending. Raises `PoolExhausted` if too few are free."""
        if num_rows < 0:
            raise ConfigError(f"rows: expected a number of at least 0, found {num_rows!r}")
        with self._lock:
            if num_rows > self._num_free:
                raise PoolExhausted(
                    f"rows: cannot allocate {num_rows}: {self._num_free} of {self.num_rows} are free, and "
                    f"{self._num_leased} wait for their leases"
                )
            ids = np.flatnonzero(self._states == _FREE)[:num_rows].astype(np.int32)
            self._states[ids] = _USED
            self._num_free -= num_rows
        return ids

    def free(self, ids: npt.ArrayLike, *, lease: Lease | None = None) -> None:
        """Free rows, at once or when `lease` is released. Raises `LocalProtocolError`, with none freed, for a row that is
        not in use.
        """
        rows = np.asarray(ids, dtype=np.int64).ravel()
        with self._lock:
            self._check_used(rows)
            self._states[rows] = _LEASED
            self._num_leased += len(rows)
        if lease is None:
            self._give_back(rows)
        else:
            lease.on_release(lambda: self._give_back(rows))

    def _check_used(self, rows: npt.NDArray[np.int64]) -> None:
        outside = rows[(rows < 0) | (rows >= self.num_rows)]
        if len(outside):
            raise LocalProtocolError(f"row {outside[0]}: expected 0 to {self.num_rows - 1}; nothing was freed")
        wrong = rows[self._states[rows] != _USED]
        if len(wrong):
            raise LocalProtocolError(f"row {wrong[0]} is {_STATES[self._states[wrong[0]]]}; nothing was freed")
        unique, counts = np.unique(rows, return_counts=True)
        if len(unique) != len(rows):
            raise LocalProtocolError(f"row {unique[counts > 1][0]} is listed twice; nothing was freed")

    def _give_back(self, rows: npt.NDArray[np.int64]) -> None:
        with self._lock:
            self._states[rows] = _FREE
            self._num_leased -= len(rows)
            self._num_free += len(rows)
