"""Plans of random ownerships and memory orders, compared with NumPy by moving real bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.rows import Slot
from disagg.layout.binding import bind
from disagg.layout.election import elect
from disagg.layout.ownership import EVERYTHING, Interval, Intervals, Owned, positions_to_intervals, split
from disagg.layout.placement import Placement, TensorPlacement
from disagg.layout.plan import make_plan
from disagg.layout.tables import ComponentLayout
from disagg.testing.scene import owned_positions
from disagg.testing.strategies import ownerships
from tests.support.layouts import state, table, triples


class Array:
    """A rank's share of a global array `[layer, a, b]` in slots: `[slot, *axes in some order]`, maybe padded."""

    def __init__(
        self, layout: ComponentLayout, layers: Sequence[int], *, order: tuple[int, ...], num_slots: int, pad: int
    ) -> None:
        tensor = layout.tensors[0]
        self.owned = [owned_positions(axis.owned, size=axis.size or 0) for axis in tensor.inner_axes]
        self.layers = tuple(layers)
        shape = [num_slots, *(max(1, len(each)) for each in self.owned)]
        memory = np.full([shape[0], *(shape[1 + i] + pad for i in order)], 0xA5, dtype=tensor.dtype)
        self.memory = [memory.copy() for _ in self.layers]
        inverse = [1 + order.index(i) for i in range(len(order))]
        self.views = [each.transpose(0, *inverse)[:, : shape[1], : shape[2]] for each in self.memory]
        strides = (
            dict(zip((axis.name for axis in tensor.inner_axes), self.views[0].strides[1:], strict=True)) if self.views else {}
        )
        bases = tuple(view.ctypes.data for view in self.views)
        row_stride = self.views[0].strides[0] if self.views else 0
        self.placement = Placement("c", 1, num_slots, (TensorPlacement("s", self.layers, bases, row_stride, strides),))

    def share(self, globally: np.ndarray, layer: int) -> np.ndarray:
        found: np.ndarray = globally[layer][np.ix_(*self.owned)]
        return found


@given(st.data())
def test_random_ownerships_and_memory_orders_match_numpy(data: st.DataObject) -> None:
    sizes = {"a": data.draw(st.integers(1, 8)), "b": data.draw(st.integers(1, 5))}
    layers = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    dtype = data.draw(st.sampled_from(["uint8", "uint32"]))

    def rank(*, whole: bool) -> ComponentLayout:
        axes: dict[str, tuple[int, Owned]] = {}
        for name, size in sizes.items():
            shuffled = positions_to_intervals(data.draw(st.permutations(range(size))))
            axes[name] = size, shuffled if whole else data.draw(ownerships(size=size)).within(size)
        return state("c", data.draw(st.permutations(layers)), dtype=dtype, a=axes["a"], b=axes["b"])

    ours = [rank(whole=True), *(rank(whole=False) for _ in range(data.draw(st.integers(0, 2))))]
    theirs = [rank(whole=False) for _ in range(data.draw(st.integers(1, 2)))]
    orders = st.sampled_from([(0, 1), (1, 0)])
    arrays = [
        [Array(c, c.tensors[0].layers, order=data.draw(orders), num_slots=3, pad=data.draw(st.integers(0, 1))) for c in each]
        for each in (ours, theirs)
    ]
    slots = [[data.draw(st.integers(0, 2)) for _ in each] for each in (ours, theirs)]
    width = np.dtype(dtype).itemsize
    globally = np.arange(10 * sizes["a"] * sizes["b"], dtype=np.uint64).reshape(10, sizes["a"], sizes["b"]) * 2654435761 + 1
    content = (globally % np.uint64(2 ** (8 * width) - 1)).astype(dtype)
    for array, slot in zip(arrays[0], slots[0], strict=True):
        for layer, view in zip(array.layers, array.views, strict=True):
            found = array.share(content, layer)
            view[slot, : found.shape[0], : found.shape[1]] = found
    source, destination = table(ours), table(theirs)
    election = elect(source, destination)
    for s, d in election.by_pair:
        plan = make_plan(
            election,
            source=(s, source, {"c": arrays[0][s].placement}),
            destination=(d, destination, {"c": arrays[1][d].placement}),
        )
        chosen = bind(plan.components["c"], source=Slot(slots[0][s]), destination=Slot(slots[1][d]))
        one_by_one = [
            bind(plan.components["c"], source=Slot(slots[0][s]), destination=Slot(slots[1][d]), layers=[layer])
            for layer in layers
        ]
        assert sum(each.total_nbytes for each in one_by_one) == chosen.total_nbytes
        assert {layer for layer, each in zip(layers, one_by_one, strict=True) if len(each)} == set(plan.components["c"].layers)
        for address, target, nbytes in triples(chosen):
            ctypes.memmove(target, address, nbytes)
    for array, slot in zip(arrays[1], slots[1], strict=True):
        for layer, memory, view in zip(array.layers, array.memory, array.views, strict=True):
            wanted = np.full_like(memory, 0xA5)
            shape = [len(each) for each in array.owned]
            spot = np.lib.stride_tricks.as_strided(
                wanted[slot:], shape=view[slot].shape, strides=view.strides[1:], writeable=True
            )
            spot[: shape[0], : shape[1]] = array.share(content, layer)
            assert wanted.tobytes() == memory.tobytes()


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_each_sub_block_is_sharded(source_tp: int, destination_tp: int) -> None:
    """Channels `x, B, C` of 16, 8 and 8: a rank stores its part of each, one after the other, so it owns several intervals."""

    def channels(tp: int, rank: int) -> Intervals:
        parts, before = [], 0
        for width in (16, 8, 8):
            share = split(width, tp, rank)
            parts.append(Interval(before + share.start, before + share.stop))
            before += width
        return Intervals(tuple(parts))

    tables, arrays = [], []
    for tp in (source_tp, destination_tp):
        layouts = [state("c", (4, 2), a=(32, channels(tp, rank)), b=(3, EVERYTHING)) for rank in range(tp)]
        tables.append(table(layouts))
        arrays.append([Array(each, (4, 2), order=(0, 1), num_slots=2, pad=0) for each in layouts])
    content = np.random.default_rng(0).integers(0, 255, (5, 32, 3)).astype(np.uint8)
    for array in arrays[0]:
        for layer, view in zip(array.layers, array.views, strict=True):
            view[1] = array.share(content, layer)
    election = elect(*tables)
    for s, d in election.by_pair:
        places = {"c": arrays[0][s].placement}, {"c": arrays[1][d].placement}
        plan = make_plan(election, source=(s, tables[0], places[0]), destination=(d, tables[1], places[1]))
        for address, target, nbytes in triples(bind(plan.components["c"], source=Slot(1), destination=Slot(0))):
            ctypes.memmove(target, address, nbytes)
    for array in arrays[1]:
        for layer, view in zip(array.layers, array.views, strict=True):
            assert (view[0] == array.share(content, layer)).all()
            assert (view[1] == 0xA5).all()
