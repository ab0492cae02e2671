"""Staging buffers and rings: pools, sizes, and the writer's view of a peer's ring."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from disagg import ConfigError, RemoteProtocolError
from disagg.backends.base import StagingShape
from disagg.core.memory import RemoteRegion
from disagg.core.rings import NUM_USES, Ring
from disagg.transfer.staging import RemoteRing, RingPool, SlotPool

SHAPE = StagingShape(pack_below=4096, slot_nbytes=512, num_slots=2, num_rings=2)


@pytest.mark.parametrize("wrong", [{"pack_below": -1}, {"slot_nbytes": 0}, {"num_slots": 0}, {"num_rings": 0}])
def test_an_invalid_staging_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="staging"):
        StagingShape(**wrong)


def test_pools_give_each_slot_and_ring_once_without_overlap() -> None:
    slots, rings = SlotPool(SHAPE), RingPool(SHAPE)
    first, second = slots.take(), slots.take()
    assert first is not None
    assert second is not None
    assert abs(first - second) >= SHAPE.slot_nbytes
    assert slots.take() is None
    slots.give_back(first)
    assert slots.take() == first
    one, two = rings.take(), rings.take()
    assert one is not None
    assert two is not None
    assert rings.take() is None
    addresses = sorted(ring.slot(n) for ring in (one, two) for n in range(SHAPE.num_slots))
    assert all(after - before >= SHAPE.slot_nbytes for before, after in itertools.pairwise(addresses))
    assert addresses[0] >= rings.memory.region.address
    assert addresses[-1] + SHAPE.slot_nbytes <= rings.memory.region.address + rings.memory.region.nbytes


def test_rings_after_the_whole_rings_are_smaller_and_the_largest_free_ring_is_taken() -> None:
    shape = StagingShape(slot_nbytes=512, num_slots=8, num_rings=8, whole_rings=2)
    assert shape.ring_slots() == (8, 8, 4, 4, 2, 2, 1, 1)
    rings = RingPool(shape)
    assert rings.memory.region.nbytes >= 512 * 30
    all_rings = [rings.take() for _ in range(8)]
    assert [ring.num_slots for ring in all_rings if ring is not None] == [8, 8, 4, 4, 2, 2, 1, 1]
    addresses = sorted(ring.slot(n) for ring in all_rings if ring is not None for n in range(ring.num_slots))
    assert all(after - before >= 512 for before, after in itertools.pairwise(addresses))
    for ring in (all_rings[4], all_rings[2], all_rings[6]):
        assert ring is not None
        rings.give_back(ring)
    assert rings.take() == all_rings[2]


def test_spare_slots_replace_slots_that_are_held_for_long() -> None:
    slots = SlotPool(SHAPE)
    held = [slots.take(), slots.take()]
    spares = []
    while slots.replace():
        spares.append(slots.take())
    assert len({*held, *spares}) == SHAPE.num_slots + SHAPE.spares
    assert all(
        slots.memory.region.address <= spare < slots.memory.region.address + slots.memory.region.nbytes
        for spare in spares
        if spare
    )
    for address in held:
        assert address is not None
        slots.give_back(address, replaced=True)
    assert slots.take() is None, "a replaced slot becomes a spare when it is given back"
    assert slots.replace()
    assert slots.take() == held[1]


def test_only_the_credit_of_its_latest_use_frees_a_remote_slot() -> None:
    ring = RemoteRing(Ring(4096, 512, 1), (RemoteRegion(4096, 512),))
    use = ring.take()
    assert use == (0, 1)
    assert ring.take() is None
    assert not ring.credit(0, 7)
    assert not ring.credit(5, 1)
    assert ring.credit(0, 1)
    assert not ring.credit(0, 1), "a duplicate credit frees no slot"
    assert ring.take() == (0, 2)
    assert not ring.credit(0, 1), "an old credit does not free a newer use"


def test_uses_of_a_ring_are_numbered_on_after_the_last_number() -> None:
    first = 3 * NUM_USES
    ring = RemoteRing(Ring(4096, 512, 2), (RemoteRegion(4096, 1024),), first=first)
    ring._sequence = first + NUM_USES - 2
    taken = [ring.take() for _ in range(2)]
    assert taken == [(0, first + NUM_USES - 1), (1, first)]
    assert all(ring.credit(*use) for use in taken if use is not None)
    assert ring.take() == (0, first + 1)


def test_a_ring_outside_the_peers_regions_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="in no region that the peer has registered"):
        RemoteRing(Ring(4096, 512, 2), (RemoteRegion(4096, 1023),))
