"""Staging buffers and lent slots: pools, sizes, and the writer's view of its loans."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

from disagg import ConfigError, RemoteProtocolError
from disagg.backends.base import StagingShape
from disagg.core.memory import RemoteRegion
from disagg.transfer.staging import LentSlots, Loans, SlotPool

SHAPE = StagingShape(pack_below=4096, slot_nbytes=512, window=2, num_lent=3)


@pytest.mark.parametrize(
    "wrong", [{"pack_below": -1}, {"slot_nbytes": 0}, {"window": 0}, {"num_lent": 0}, {"address_space": 0}, {"spares": -1}]
)
def test_an_invalid_staging_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="staging"):
        StagingShape(**wrong)


@pytest.mark.parametrize("shape", [StagingShape(), StagingShape(window=4, num_lent=4, spares=0)])
@pytest.mark.parametrize("count", [2, 3, 5, 8, 63, 64, 65, 1000])
def test_memory_of_another_size_is_divided_alike(shape: StagingShape, count: int) -> None:
    found = shape.within((count + 1) * shape.slot_nbytes - 1)
    assert found.nbytes == count * shape.slot_nbytes
    assert min(found.window, found.num_lent) >= 1
    usual = shape.nbytes // shape.slot_nbytes
    assert abs(found.num_lent / count - shape.num_lent / usual) <= 2 / count
    assert shape.within(shape.nbytes) == shape
    with pytest.raises(ConfigError, match=rf"staging_nbytes: expected at least {2 << 20}, two slots, found {1 << 20}"):
        shape.within(1 << 20)


def test_pools_give_each_slot_once_without_overlap() -> None:
    slots, lent = SlotPool(SHAPE), LentSlots(SHAPE)
    first, second = slots.take(), slots.take()
    assert first is not None
    assert second is not None
    assert abs(first - second) >= SHAPE.slot_nbytes
    assert slots.take() is None
    slots.give_back(first)
    assert slots.take() == first
    taken = sorted(lent.take() for _ in range(lent.num_free))
    assert len(taken) == SHAPE.num_lent
    assert lent.num_free == 0
    assert all(after - before >= SHAPE.slot_nbytes for before, after in itertools.pairwise(taken))
    region = lent.memory.region
    assert region.address <= taken[0]
    assert taken[-1] + SHAPE.slot_nbytes <= region.address + region.nbytes
    lent.give_back(taken[1])
    assert lent.take() == taken[1]


def test_slots_that_may_still_be_written_are_replaced_and_their_pages_go_back() -> None:
    shape = StagingShape(slot_nbytes=2 << 20, window=1, num_lent=1, address_space=3)
    lent = LentSlots(shape)
    seen = set()
    for left in (2, 1, 0):
        address = lent.take()
        assert address not in seen
        assert lent.memory.region.address <= address < lent.memory.region.address + lent.memory.region.nbytes
        seen.add(address)
        ctypes.memset(address, 7, shape.slot_nbytes)
        assert lent.replace(address) is (left > 0)
        assert ctypes.string_at(address, 1) == (b"\0" if left else b"\7"), "mapped still, and read as zeros if replaced"
        assert lent.num_free == (1 if left else 0)
    first, last = min(seen), max(seen)
    lent.renew(first)
    assert lent.replace(last)
    assert lent.take() == first


def test_bytes_that_arrive_in_a_replaced_slot_take_no_memory_for_long() -> None:
    shape = StagingShape(slot_nbytes=2 << 20, window=1, num_lent=3, address_space=2)
    lent = LentSlots(shape)
    first, second, third = (lent.take() for _ in range(3))
    assert lent.replace(first)
    ctypes.memset(first, 7, shape.slot_nbytes)
    assert lent.replace(second)
    assert ctypes.string_at(first, 1) == b"\0"
    assert lent.replace(third)
    lent.renew(third)
    others = [lent.take() for _ in range(3)]
    assert lent.replace(others[0])
    assert lent.take() == third
    ctypes.memset(third, 9, shape.slot_nbytes)
    lent.renew(first)
    assert lent.replace(others[1])
    assert ctypes.string_at(third, 1) == b"\t", "it is in use again"


def test_a_receiver_works_where_the_system_reserves_no_addresses(caplog: pytest.LogCaptureFixture) -> None:
    lent = LentSlots(StagingShape(slot_nbytes=1 << 20, window=1, num_lent=1, address_space=1 << 30))
    address = lent.take()
    assert not lent.replace(address)
    assert "slots of lost peers cannot be replaced" in caplog.text


def test_spare_slots_replace_slots_that_are_held_for_long() -> None:
    slots = SlotPool(SHAPE)
    held = [slots.take(), slots.take()]
    spares = []
    while slots.replace():
        spares.append(slots.take())
    assert len({*held, *spares}) == SHAPE.window + SHAPE.spares
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


REGION = (RemoteRegion(4096, 4096),)


def test_each_loan_is_used_once_whatever_is_listed_again() -> None:
    loans = Loans(512, 10, REGION, set())
    assert loans.listed(((9, 4096), (10, 4608)), 10) == (9, 10), "loans of earlier connections"
    assert loans.take() is None
    assert loans.listed(((11, 4096), (12, 4608)), 12) == ()
    assert loans.take() == (11, 4096)
    assert loans.listed(((11, 4096), (12, 4608)), 12) == ()
    assert loans.take() == (12, 4608)
    assert loans.take() is None
    loans.written(11)
    loans.written(12)
    assert loans.listed((), 12) == (), "both have arrived"
    assert loans.listed(((12, 4608),), 12) == (12,), "an overtaken list: giving it back twice does no harm"
    assert loans.take() is None
    assert loans.seen == 12


def test_what_was_given_back_is_given_back_again_if_it_is_listed() -> None:
    loans = Loans(512, 0, REGION, set())
    loans.listed(((1, 4096), (2, 4608)), 2)
    assert loans.give_back() == (1, 2)
    assert loans.give_back() == ()
    assert loans.listed(((1, 4096), (2, 4608), (3, 5120)), 3) == (1, 2)
    assert loans.take() == (3, 5120)
    loans.put_back(3, 5120)
    assert loans.take() == (3, 5120), "nothing was written"


def test_loans_of_earlier_connections_are_returned_once_their_slots_are_not_written_any_more() -> None:
    writing: set[int] = set()
    earlier = Loans(512, 0, REGION, writing)
    earlier.listed(((1, 4096), (2, 4608), (3, 5120), (4, 5632)), 4)
    written, dropped = earlier.take(), earlier.take()
    assert (written, dropped) == ((1, 4096), (2, 4608))
    assert earlier.listed(((1, 4096), (2, 4608), (3, 5120), (4, 5632)), 4) == (), "they are in use"
    earlier.close()
    assert earlier.take() is None, "a job of the ended connection"
    later = Loans(512, 10, REGION, writing)
    lost = ((1, 4096), (2, 4608), (3, 5120), (4, 5632))
    assert later.listed((*lost, (11, 6144)), 11) == (3, 4)
    earlier.written(1)
    assert later.listed(lost, 11) == (1, 3, 4)
    earlier.put_back(2, 4608)
    assert earlier.take() is None
    assert later.listed(lost, 11) == (1, 2, 3, 4)


def test_free_loans_that_are_listed_no_more_are_dropped() -> None:
    loans = Loans(512, 0, REGION, set())
    for number in range(1, 100):
        assert loans.listed(((number, 4096),), number) == ()
    assert loans.num_free == 1
    assert loans.listed((), 98) == (), "an overtaken list"
    assert loans.take() == (99, 4096)


def test_slots_are_wanted_beside_those_that_are_free() -> None:
    loans = Loans(512, 0, REGION, set())
    loans.want(3)
    assert loans.wanted == 3
    loans.listed(((1, 4096),), 1)
    assert (loans.wanted, loans.num_free) == (2, 1)
    loans.take()
    assert loans.wanted == 2
    loans.want(-2)
    assert loans.wanted == 0


def test_a_slot_outside_the_peers_regions_is_refused() -> None:
    loans = Loans(512, 0, (RemoteRegion(4096, 1023),), set())
    with pytest.raises(RemoteProtocolError, match="in no region that the peer has registered"):
        loans.listed(((1, 4096), (2, 4608)), 2)
    assert loans.take() is None


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (((2, 4608), (4, 5120)), "expected numbers up to 3, the newest, found 4"),
        (((2, 4608), (3, 4608)), "expected a slot each, found 2 and 3 both at 0x1200"),
        (((1, 4608), (2, 4608)), "expected a slot each, found 1 and 2 both at 0x1200"),
    ],
    ids=["above the newest", "an address twice", "an address twice, once of a loan that is known"],
)
def test_a_list_that_cannot_be_is_refused_and_changes_nothing(listed: tuple[tuple[int, int], ...], found: str) -> None:
    loans = Loans(512, 0, REGION, set())
    loans.listed(((1, 4096),), 1)
    with pytest.raises(RemoteProtocolError, match=found):
        loans.listed(listed, 3)
    assert (loans.seen, loans.num_free, loans.take()) == (1, 1, (1, 4096))
