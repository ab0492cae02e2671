"""Alignment of two lists of ids, and grouping of the runs in which both increase by one. Arguments are not changed, and
results are not views of them.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from disagg.core import _native
from disagg.core.errors import ConfigError
from disagg.core.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)
_warnings = RateLimitedLog(logger)  # a server may cut the lists of every request

Ids = npt.NDArray[np.int64]
_LARGEST_ID = np.iinfo(np.int64).max


def align_state_indices(
    source: npt.ArrayLike, destination: npt.ArrayLike, *, anchor: Literal["start", "end"] = "start"
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]:
    """New arrays `(source, destination)`, cut to the length of the shorter list, with their dtypes.

    The longer list is cut at its end, or at its start with `anchor="end"` (for windows, whose last positions match). A cut
    is logged as a warning, at a limited rate. Raises `ConfigError` unless both are 1-D lists of integers and `anchor` is
    valid.

        >>> align_state_indices([4, 5, 6], [8, 9])
        (array([4, 5]), array([8, 9]))
        >>> align_state_indices([4, 5, 6], [8, 9], anchor="end")
        (array([5, 6]), array([8, 9]))
    """
    if anchor not in ("start", "end"):
        raise ConfigError(f"anchor: expected 'start' or 'end', found {anchor!r}")
    ids = _integers(source, "source"), _integers(destination, "destination")
    size = min(len(side) for side in ids)
    if len(ids[0]) != len(ids[1]):
        _warnings.warning(
            "state indices: source has %d, destination has %d; cut to %d at the %s of the longer one",
            len(ids[0]), len(ids[1]), size, "end" if anchor == "start" else "start",
        )  # fmt: skip
    first, second = (side[:size] if anchor == "start" else side[len(side) - size :] for side in ids)
    return first.copy(), second.copy()


def group_concurrent_contiguous(source: npt.ArrayLike, destination: npt.ArrayLike) -> tuple[Ids, Ids, Ids]:
    """`(source_starts, destination_starts, lengths)`: the maximal runs in which both lists increase by one, in order.

    A pair with a negative id (no page) is in no run. If either list is empty there are no runs. Contiguous int64 and int32
    arrays are read in place. Raises `ValueError` if lengths differ, and `ConfigError` (also a `ValueError`) unless both are
    1-D lists of integers that fit int64.

        >>> group_concurrent_contiguous([4, 5, 6, 9], [0, 1, 7, 8])
        (array([4, 6, 9], dtype=int64), array([0, 7, 8], dtype=int64), array([2, 1, 1], dtype=int64))
    """
    try:  # most arrays need no conversion; checking them would take longer than the work
        return _native.group_concurrent_contiguous(source, destination)  # type: ignore[arg-type]
    except TypeError:
        return _native.group_concurrent_contiguous(_core_ids(source, "source"), _core_ids(destination, "destination"))


def _integers(values: npt.ArrayLike, name: str) -> npt.NDArray[np.integer[Any]]:
    """An empty sequence has no type and is taken as integers."""
    array = np.asarray(values)
    if array.size == 0 and not hasattr(values, "dtype"):
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise ConfigError(f"{name} indices: expected one dimension, found shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{name} indices: expected integers, found dtype {array.dtype}")
    return array


def _core_ids(values: npt.ArrayLike, name: str) -> npt.NDArray[np.int64] | npt.NDArray[np.int32]:
    """Copies only if necessary."""
    array = _integers(values, name)
    if array.dtype == np.int32:
        return np.ascontiguousarray(array, dtype=np.int32)
    if array.dtype.kind == "u" and array.size and int(array.max()) > _LARGEST_ID:
        raise ConfigError(f"{name} indices: expected ids below 2**63, found {int(array.max())}")
    return np.ascontiguousarray(array, dtype=np.int64)
