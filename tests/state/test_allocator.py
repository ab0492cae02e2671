"""Allocation of rows: the lowest free rows first, and a freed row comes back once, after its lease."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.core.errors import ConfigError, LocalProtocolError
from disagg.core.leases import Lease, quarantine, release
from disagg.state.allocator import PoolExhausted, RowAllocator


class TestRowAllocator:
    def test_gives_the_lowest_rows_first_and_never_row_0(self) -> None:
        rows = RowAllocator(6)
        assert rows.allocate(3).tolist() == [1, 2, 3]
        rows.free([2])
        assert rows.allocate(2).tolist() == [2, 4]
        assert rows.allocate(0).tolist() == []
        assert (rows.num_free, rows.can_allocate(1), rows.can_allocate(2)) == (1, True, False)
        assert RowAllocator(2, reserved=()).allocate(2).dtype == np.int32

    def test_raises_with_too_few_free_rows(self) -> None:
        rows = RowAllocator(4)
        lease = Lease()
        rows.free(rows.allocate(2), lease=lease)
        with pytest.raises(PoolExhausted, match=r"cannot allocate 2: 1 of 4 are free, and 2 wait for their leases"):
            rows.allocate(2)
        assert rows.num_free == 1
        release(lease)
        assert rows.allocate(3).tolist() == [1, 2, 3]

    def test_a_quarantined_lease_keeps_its_rows(self) -> None:
        rows, lease = RowAllocator(4), Lease()
        rows.free(rows.allocate(3), lease=lease)
        quarantine(lease, "no proof")
        assert (rows.num_free, rows.num_leased) == (0, 3)
        release(lease)
        release(lease)
        assert (rows.num_free, rows.num_leased) == (3, 0)

    def test_a_lease_released_before_gives_rows_back_at_once(self) -> None:
        rows, lease = RowAllocator(4), Lease()
        release(lease)
        rows.free(rows.allocate(3), lease=lease)
        assert rows.num_free == 3

    @pytest.mark.parametrize(
        ("ids", "named"),
        [
            ([1, 1], "row 1 is listed twice"),
            ([1, 3], "row 3 is free"),
            ([0], "row 0 is reserved"),
            ([1, 9], "row 9: expected 0 to 4"),
            ([-1], "row -1"),
            ([2], "row 2 is already freed"),
        ],
    )
    def test_rejects_rows_that_are_not_in_use(self, ids: list[int], named: str) -> None:
        rows, lease = RowAllocator(5), Lease()
        rows.allocate(2)
        rows.free([2], lease=lease)
        with pytest.raises(LocalProtocolError, match=named):
            rows.free(ids)
        assert (rows.num_free, rows.num_leased) == (2, 1)

    @pytest.mark.parametrize(("num_rows", "reserved"), [(0, ()), (4, (4,)), (4, (-1,)), (2**31, ())])
    def test_rejects_wrong_sizes(self, num_rows: int, reserved: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="rows"):
            RowAllocator(num_rows, reserved=reserved)
        with pytest.raises(ConfigError, match="rows"):
            RowAllocator(4).allocate(-1)

    def test_threads_never_share_a_row(self) -> None:
        rows = RowAllocator(65)
        owner = np.zeros(65, dtype=np.int64)
        failures: list[str] = []

        def work(me: int) -> None:
            for round_ in range(200):
                ids = rows.allocate(4)
                owner[ids] = me
                lease = Lease()
                if (owner[ids] != me).any():
                    failures.append(f"thread {me}, round {round_}")
                rows.free(ids, lease=lease)
                release(lease)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert rows.num_free == 64


class RowMachine(RuleBasedStateMachine):
    """Compares an allocator with sets of free, used and leased rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RowAllocator(20, reserved=(0, 7))
        self.free = set(range(20)) - {0, 7}
        self.used: list[list[int]] = []
        self.leased: list[tuple[Lease, list[int]]] = []

    @rule(num_rows=st.integers(0, 22))
    def allocate(self, num_rows: int) -> None:
        if num_rows > len(self.free):
            with pytest.raises(PoolExhausted):
                self.rows.allocate(num_rows)
            return
        found = self.rows.allocate(num_rows).tolist()
        assert found == sorted(self.free)[:num_rows]
        self.free -= set(found)
        self.used.append(found)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), leased=st.booleans())
    def give(self, data: st.DataObject, leased: bool) -> None:
        ids = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        lease = Lease() if leased else None
        self.rows.free(ids, lease=lease)
        if lease is None:
            self.free |= set(ids)
        else:
            self.leased.append((lease, ids))

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), is_proved=st.booleans())
    def end(self, data: st.DataObject, is_proved: bool) -> None:
        index = data.draw(st.integers(0, len(self.leased) - 1))
        if not is_proved:
            quarantine(self.leased[index][0], "no proof")
            return
        lease, ids = self.leased.pop(index)
        release(lease)
        self.free |= set(ids)

    @precondition(lambda self: self.free or any(ids for _, ids in self.leased))
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        waiting = {row for _, ids in self.leased for row in ids}
        with pytest.raises(LocalProtocolError):
            self.rows.free([data.draw(st.sampled_from(sorted(self.free | waiting)))])

    @invariant()
    def counts_agree(self) -> None:
        assert self.rows.num_free == len(self.free)
        assert self.rows.num_leased == sum(len(ids) for _, ids in self.leased)


TestRowMachine: Callable[..., Any] = RowMachine.TestCase
