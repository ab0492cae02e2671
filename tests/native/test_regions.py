"""Which regions contain ranges of memory: the compiled core matches the reference, and the index reports ranges outside."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.backends.endpoint import RegionIndex
from disagg.core import _native
from disagg.core.errors import NotRegistered
from disagg.core.memory import Device, MemoryRegion
from harness.reference_core import locate_numpy

Addresses = npt.NDArray[np.uint64]
Row = tuple[int, int, int]

TOP = 2**64 - 1
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(0, 9)), max_size=8)
"""The gap before each region, its length and its device."""


def regions_of(rows: list[Row], base: int) -> tuple[Addresses, Addresses, Addresses]:
    starts = base + np.cumsum([gap for gap, _, _ in rows] + [0]) + np.cumsum([0] + [length for _, length, _ in rows])
    lengths = np.array([length for _, length, _ in rows], dtype=np.uint64)
    firsts = starts[: len(rows)].astype(np.uint64)
    return firsts, firsts + lengths, np.array([device for _, _, device in rows], dtype=np.uint64)


@given(ROWS, st.sampled_from((0, 1, 2**40, 2**63 - 200)), st.data())
def test_location_matches_the_reference(rows: list[Row], base: int, data: st.DataObject) -> None:
    starts, stops, devices = regions_of(rows, base)
    size = st.one_of(st.integers(1, 60), st.sampled_from((2**63, TOP)))
    address = st.one_of(st.integers(max(base - 5, 0), base + 300), st.sampled_from((0, 2**63, TOP)))
    inside = st.sampled_from(list(zip(starts.tolist(), stops.tolist(), strict=True))).flatmap(
        lambda region: st.integers(region[0], region[1] - 1).flatmap(
            lambda first: st.tuples(st.just(first), st.integers(1, region[1] - first))
        )
    )
    anywhere = st.tuples(address, size)
    ranges = data.draw(st.lists(st.one_of(inside, inside, inside, anywhere) if rows else anywhere, max_size=30))
    addresses, nbytes = (np.array([each[i] for each in ranges], dtype=np.uint64) for i in (0, 1))

    where, first = locate_numpy(starts, stops, addresses, nbytes)
    found = np.full(len(ranges), -7, dtype=np.int64)
    described = np.full((len(ranges), 3), 7, dtype=np.uint64)
    core = _native.Regions(starts, stops, devices)
    assert core.locate(addresses, nbytes, found) == first
    assert core.describe(addresses, nbytes, described) == first
    assert core.count_held(addresses, nbytes) == first
    assert (found[:first] == where[:first]).all()
    assert (found[first:] == -7).all()
    assert (described[:first] == np.stack((addresses, nbytes, devices[where] if rows else addresses), axis=1)[:first]).all()
    assert (described[first:] == 7).all()


def test_an_empty_range_is_inside_at_the_edges_of_a_region() -> None:
    starts, stops, devices = (np.array([value], dtype=np.uint64) for value in (100, 110, 0))
    core, found = _native.Regions(starts, stops, devices), np.empty(1, dtype=np.int64)
    held = [core.locate(np.array([at], np.uint64), np.zeros(1, np.uint64), found) for at in (99, 100, 110, 111)]
    assert held == [0, 1, 1, 0]


def test_many_ranges_are_located_without_the_gil() -> None:
    starts, stops, devices = regions_of([(1, 50, 3)] * 100, 1000)
    addresses = np.random.default_rng(0).permutation(np.repeat(starts, 100))
    nbytes = np.full(len(addresses), 50, dtype=np.uint64)
    found = np.empty(len(addresses), dtype=np.int64)
    assert _native.Regions(starts, stops, devices).locate(addresses, nbytes, found) == len(addresses)
    assert (starts[found] == addresses).all()


def test_columns_of_other_lengths_and_types_raise() -> None:
    one, two = np.ones(1, dtype=np.uint64), np.ones(2, dtype=np.uint64)
    place, row = np.empty(1, dtype=np.int64), np.empty((1, 3), dtype=np.uint64)
    for columns in itertools.product((one, two), repeat=3):
        if len({len(column) for column in columns}) > 1:
            with pytest.raises(ValueError, match="one length"):
                _native.Regions(*columns).locate(one, one, place)
    regions = _native.Regions(one, two[:1], one)
    for addresses, nbytes in ((one, two), (two, one), (two, two)):
        with pytest.raises(ValueError, match="one length"):
            regions.locate(addresses, nbytes, place)
        with pytest.raises(ValueError, match="one length"):
            regions.describe(addresses, nbytes, row)
        if len(addresses) != len(nbytes):
            with pytest.raises(ValueError, match="one length"):
                regions.count_held(addresses, nbytes)
    with pytest.raises(TypeError):
        regions.locate(one, one, row)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        regions.describe(one, one, one)


def test_the_error_names_the_first_copy_outside_all_regions() -> None:
    index = RegionIndex([MemoryRegion(0x2000, 0x100, Device("cuda", 3)), MemoryRegion(0x1000, 0x100, Device("cuda", 1))])
    assert index.kind == "cuda"
    addresses, nbytes = (np.array(column, dtype=np.uint64) for column in ([0x2010, 0x1000, 0x10F0], [16, 256, 17]))
    assert index.describe(addresses[:2], nbytes[:2], side="local").tolist() == [[0x2010, 16, 3], [0x1000, 256, 1]]
    message = r"local copy 2 of 3: \[0x10f0, \+17\) is in none of the 2 registered regions"
    for look in (index.check, index.describe):
        with pytest.raises(NotRegistered, match=message):
            look(addresses, nbytes, side="local")
    mixed = RegionIndex([MemoryRegion(0x2000, 0x100), MemoryRegion(0x1000, 0x100, Device("cuda", 1))])
    assert mixed.kind is None
    assert RegionIndex([]).kind is None
