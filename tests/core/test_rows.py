"""Rows of a request: immutable, and checked when constructed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Slot, token_range

ids_ = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(ids_, st.integers(0, 2**40), st.sampled_from([np.int32, np.int64]))
def test_pages_keep_a_read_only_copy(ids: list[int], first_token: int, dtype: Any) -> None:
    given_ids = np.array(ids, dtype=dtype)
    pages = Pages(given_ids, first_token)
    assert pages.ids.dtype == np.int32
    assert pages.ids.tolist() == ids
    assert given_ids.flags.writeable
    given_ids[:] = 7
    assert pages.ids.tolist() == ids
    with pytest.raises(ValueError, match="read-only"):
        pages.ids[:] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        pages.first_token = 3  # type: ignore[misc]


def test_pages_compare_by_value_and_are_not_hashable() -> None:
    assert Pages(np.array([1, 2], np.int32), 4) == Pages(np.array([1, 2], np.int32), 4)
    assert Pages(np.array([1, 2], np.int32), 4) != Pages(np.array([1, 2], np.int32), 5)
    assert Pages(np.array([1, 2], np.int32)) != Pages(np.array([1, 3], np.int32))
    assert Pages(np.array([1, 2], np.int32)) != Slot(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Pages(np.array([1], np.int32)))


def test_pages_from_a_plain_or_empty_list() -> None:
    assert Pages([3, 4]).ids.tolist() == [3, 4]
    assert len(Pages([]).ids) == 0
    assert Pages(np.array([2**31 - 1], np.uint64)).ids.tolist() == [2**31 - 1]
    with pytest.raises(LayoutError, match="pages: expected one list of integer ids, found list"):
        Pages([[1, 2], [3]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros((2, 2), np.int32),
        np.zeros((0, 2), np.int32),
        np.int32(4),
        np.array([1.0]),
        np.array([True]),
        None,
        ["a"],
        np.array([2**31]),
        np.array([-(2**31) - 1]),
        np.array([2**63], np.uint64),
        [2**70],
    ],
    ids=repr,
)
def test_anything_but_a_list_of_ids_is_rejected(ids: Any) -> None:
    with pytest.raises(LayoutError, match="pages: expected"):
        Pages(ids)


@pytest.mark.parametrize("first_token", [-1, 1.5, "0", None])
def test_an_invalid_first_token_is_rejected(first_token: Any) -> None:
    with pytest.raises(LayoutError, match="first token"):
        Pages(np.array([1], np.int32), first_token)


@pytest.mark.parametrize("slot", [-1, 2**31, True, 1.5, "3", None])
def test_an_invalid_slot_is_rejected(slot: Any) -> None:
    with pytest.raises(LayoutError, match="slot"):
        Slot(slot)


def test_slots_compare_by_value() -> None:
    assert Slot(3) == Slot(3) != Slot(4)
    assert Slot(0).id == 0


@pytest.mark.parametrize("given", [None, 3, (1,), (1, 2, 3), ("0", 1), (0.0, 1), (2, 1), (-1, 1), (0, 2**40 + 1)])
def test_invalid_ranges_of_tokens(given: object) -> None:
    assert token_range(given) is None


def test_a_range_of_tokens_becomes_python_integers() -> None:
    found = token_range(np.array([3, 2**40]))
    assert found == (3, 2**40)
    assert found is not None
    assert [type(token) for token in found] == [int, int]
