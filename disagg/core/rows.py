"""The rows of a component's pools that a request has: pages or a slot. Immutable."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.core.errors import LayoutError

TokenRange = tuple[int, int]
"""Tokens `[start, stop)` of a request."""
MAX_TOKEN = 2**40
MAX_NAME = 256


@dataclass(frozen=True, eq=False, init=False)
class Pages:
    """Page ids in token order: `ids[0]` is the page with token `first_token` of the request.

    `first_token` may be anywhere in its page. A negative id means no page. The ids, a sequence or 1-D array, are copied and
    read-only. Raises `LayoutError` unless they are integers of -2**31 to 2**31 - 1, and for a negative `first_token`.
    """

    ids: npt.NDArray[np.int32]
    first_token: int

    def __init__(self, ids: Sequence[int | np.integer[Any]] | npt.NDArray[np.integer[Any]], first_token: int = 0) -> None:
        try:
            given = np.asarray(ids)
        except ValueError as error:  # lists of unequal lengths
            raise LayoutError(f"pages: expected one list of integer ids, found {type(ids).__name__} ({error})") from error
        if given.size == 0:
            given = given.astype(np.int32)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise LayoutError(f"pages: expected one list of integer ids, found shape {given.shape} of {given.dtype}")
        if given.dtype != np.int32 and given.size and (int(given.max()) >= 2**31 or int(given.min()) < -(2**31)):
            raise LayoutError(f"pages: expected ids of -2**31 to 2**31 - 1, found {int(given.min())} to {int(given.max())}")
        if not _is_count(first_token):
            raise LayoutError(f"pages: expected a first token of at least 0, found {first_token!r}")
        copy = given.astype(np.int32)
        copy.flags.writeable = False
        self.__dict__.update(ids=copy, first_token=int(first_token))

    @classmethod
    def of_ids(cls, ids: npt.NDArray[np.int32], first_token: int) -> Pages:
        """The pages of a read-only array that never changes. Holds the array itself."""
        made = cls.__new__(cls)
        made.__dict__.update(ids=ids, first_token=first_token)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pages) and self.first_token == other.first_token and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Slot:
    """The slot that holds a request's state. Raises `LayoutError` for an id outside 0 to 2**31 - 1."""

    id: int

    def __post_init__(self) -> None:
        if not _is_count(self.id) or self.id >= 2**31:
            raise LayoutError(f"slot: expected an id of 0 to 2**31 - 1, found {self.id!r}")
        object.__setattr__(self, "id", int(self.id))


Rows = Pages | Slot


def is_text(value: object, most: int, *, least: int = 1) -> bool:
    """Whether it is a `str` of `least` to `most` characters that UTF-8 can encode."""
    if not isinstance(value, str) or not least <= len(value) <= most:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def token_range(given: object) -> tuple[int, int] | None:
    """`given` as tokens `[start, stop)`; `None` if it is not a range, or ends after `MAX_TOKEN`."""
    try:
        start, stop = (operator.index(token) for token in given)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None
    return (start, stop) if 0 <= start <= stop <= MAX_TOKEN else None


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)
