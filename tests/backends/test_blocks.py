"""Memory as lists of blocks: against counting them one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.backends.blocks import MAX_INDEX, MAX_LISTS, Blocks, paired
from disagg.backends.endpoint import RegionIndex
from disagg.core import _native
from disagg.core.memory import Device, MemoryRegion, RemoteRegion

REGIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60), st.integers(0, 1)), max_size=6)
"""Of each: the gap before it, its length, its device."""


def _regions(rows: list[tuple[int, int, int]]) -> list[MemoryRegion]:
    found, at = [], 0x1000
    for gap, nbytes, device in rows:
        found.append(MemoryRegion(at + gap, nbytes, Device("cuda", device)))
        at += gap + nbytes
    return found


def _every_block(regions: list[MemoryRegion], nbytes: int) -> list[tuple[int, int]]:
    """Address and device of each block, in order."""
    return [(r.address + i * nbytes, r.device.index) for r in regions for i in range(r.nbytes // nbytes)]


@given(REGIONS, st.integers(1, 70), st.integers(1, 20), st.data())
def test_a_place_in_a_list_is_the_block_that_was_asked_for(
    rows: list[tuple[int, int, int]], nbytes: int, per_list: int, data: st.DataObject
) -> None:
    regions = _regions(rows)
    expected = _every_block(regions, nbytes)[: MAX_LISTS * per_list]
    blocks = Blocks(RegionIndex(regions), nbytes, per_list=per_list)
    listed = [
        [(address + i * stride, device) for address, size, device, stride, count in table.tolist() for i in range(count)]
        for table in blocks.rows
    ]
    if len(_every_block(regions, nbytes)) > MAX_LISTS * per_list:
        assert not listed
        assert blocks.places(*np.ones((2, 1), np.uint64)) is None
        return
    assert list(itertools.chain.from_iterable(listed)) == expected
    assert all(len(each) == per_list for each in listed[:-1])
    assert all(0 < len(each) <= per_list for each in listed)

    known = [address for address, _ in expected]
    anywhere = st.tuples(st.integers(0x1000, 0x1200), st.sampled_from((nbytes, nbytes + 1, 0, 2**64 - 1)))
    block = st.tuples(st.sampled_from(known), st.just(nbytes)) if known else anywhere
    copies = data.draw(st.one_of(st.lists(block), st.lists(st.one_of(block, block, block, anywhere))))
    addresses, sizes = (np.array([each[i] for each in copies], dtype=np.uint64) for i in (0, 1))
    found = blocks.places(addresses, sizes)
    if not listed or not all(size == nbytes and address in known for address, size in copies):
        assert found is None
        return
    assert found is not None
    highest, (lists, indices) = found
    assert highest == max(lists, default=0)
    assert [listed[one][index][0] for one, index in zip(lists, indices, strict=True)] == addresses.tolist()


def test_memory_beyond_an_int32_is_split() -> None:
    """As of a million pages of 64 tokens, 128 tensors: nothing is counted out."""
    pool = RemoteRegion(1 << 40, 128 * 64 * 10**6 * 512, Device("cuda", 3))
    blocks = Blocks(RegionIndex([pool]), 512, per_list=MAX_INDEX)
    assert [int(table[:, 4].sum()) for table in blocks.rows] == [MAX_INDEX] * 3 + [128 * 64 * 10**6 - 3 * MAX_INDEX]
    numbers = np.array([0, MAX_INDEX - 1, MAX_INDEX, 128 * 64 * 10**6 - 1], dtype=np.uint64)
    found = blocks.places(np.uint64(1 << 40) + numbers * np.uint64(512), np.full(4, 512, np.uint64))
    assert found is not None
    assert found[0] == 3
    assert found[1].tolist() == [[0, 0, 1, 3], [0, MAX_INDEX - 1, 0, 128 * 64 * 10**6 - 1 - 3 * MAX_INDEX]]
    nowhere = Blocks(RegionIndex([RemoteRegion(1, 2**62, Device("cpu", 0))]), 1, per_list=MAX_INDEX)
    assert not nowhere.rows


def test_each_pair_of_lists_is_a_request() -> None:
    def places(lists: list[int], indices: list[int]) -> tuple[int, np.ndarray]:
        return max(lists), np.array([lists, indices], dtype=np.int32)

    one = [(a, x.tolist(), b, y.tolist()) for a, x, b, y in paired(places([0, 0], [5, 6]), places([0, 0], [7, 8]))]
    assert one == [(0, [5, 6], 0, [7, 8])]
    several = paired(places([0, 1, 0, 1], [1, 2, 3, 4]), places([2, 2, 0, 2], [5, 6, 7, 8]))
    found = [(a, x.tolist(), b, y.tolist()) for a, x, b, y in several]
    assert found == [(0, [3], 0, [7]), (0, [1], 2, [5]), (1, [2, 4], 2, [6, 8])]


def test_the_core_refuses_what_it_cannot_count() -> None:
    one, two = np.ones(1, np.uint64), np.ones(2, np.uint64)
    narrow, wide = np.empty(1, np.int32), np.empty(2, np.int32)
    regions = _native.Regions(one, one * np.uint64(9), one)
    assert regions.place_blocks(one, one, 1, 1, one, narrow, narrow) == 1
    for arguments in (
        (one, two, 1, 1, one, narrow, narrow),
        (two, one, 1, 1, one, narrow, narrow),
        (one, one, 1, 1, two, narrow, narrow),
        (one, one, 1, 1, one, wide, narrow),
        (one, one, 1, 1, one, narrow, wide),
        (one, one, 0, 1, one, narrow, narrow),
        (one, one, 1, 0, one, narrow, narrow),
        (one, one, 1, 2**31, one, narrow, narrow),
        (one, one, 1, 1, np.full(1, 2**31, np.uint64), narrow, narrow),
        (one, one, 1, 1, np.full(1, 2**31 - 1, np.uint64), narrow, narrow),
    ):
        with pytest.raises(ValueError, match=r"one length|expected a size|more lists"):
            regions.place_blocks(*arguments)
    far = _native.Regions(one, np.full(1, 2**63, np.uint64), one)
    with pytest.raises(ValueError, match="more lists"):
        far.place_blocks(one, one, 1, 1, one, narrow, narrow)
