"""Registered memory as blocks of one size, for an engine that takes lists of them once and indices into these afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from disagg.backends.endpoint import RegionIndex
from disagg.core.copies import Addresses

MAX_INDEX = 2**31 - 1
"""The largest int32."""
MAX_LISTS = 64
"""More blocks than so many lists hold are not listed: no machine has them."""

Indices = npt.NDArray[np.int32]
Places = tuple[int, Indices]
"""The highest number of a list, and, 2 x copies, each copy's list and its index there."""


class Blocks:
    """The blocks of `nbytes` bytes (1 and more) that regions are cut into, each region from its start on.

    They are counted through all regions, and listed in lists of `per_list`, so that an index into a list is an int32. `rows`
    are these lists: `(address, nbytes, device number, stride, count)` for each region, N x 5, whatever the count is.
    """

    def __init__(self, index: RegionIndex, nbytes: int, *, per_list: int) -> None:
        self.nbytes = nbytes
        self._index = index
        self._per_list = per_list
        firsts, rows, num_blocks = [], list[list[tuple[int, ...]]](), 0
        for region in index.regions:
            firsts.append(num_blocks)
            stop = num_blocks + region.nbytes // nbytes
            if stop > MAX_LISTS * per_list:
                rows.clear()
                break
            while num_blocks < stop:
                nth, used = divmod(num_blocks, per_list)
                count = min(stop - num_blocks, per_list - used)
                if nth == len(rows):
                    rows.append([])
                address = region.address + (num_blocks - firsts[-1]) * nbytes
                rows[nth].append((address, nbytes, region.device.index, nbytes, count))
                num_blocks += count
        self.rows = [np.array(each, dtype=np.uint64) for each in rows]
        self._firsts = np.array(firsts, dtype=np.uint64)

    def places(self, addresses: Addresses, nbytes: Addresses) -> Places | None:
        """Which block each copy's side is; None where one of them is no block of these."""
        if not self.rows:
            return None
        return self._index.place_blocks(addresses, nbytes, block=self.nbytes, per_list=self._per_list, firsts=self._firsts)


def paired(local: Places, remote: Places) -> Iterator[tuple[int, Indices, int, Indices]]:
    """Copies by `Blocks.places` of both sides: for each pair of lists, the list and the indices on this side and the other."""
    (highest, ours), (farthest, theirs) = local, remote
    if not highest and not farthest:
        yield 0, ours[1], 0, theirs[1]
        return
    for one, other in sorted(set(zip(ours[0].tolist(), theirs[0].tolist(), strict=True))):
        chosen = (ours[0] == one) & (theirs[0] == other)
        yield one, ours[1][chosen], other, theirs[1][chosen]
