"""Agreements are compared outside the control thread, within bounds."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from disagg import Topology
from disagg.core.errors import LayoutError
from disagg.layout.agreement import Agreement, LocalRank
from disagg.layout.ownership import interval, split
from disagg.layout.tables import LayoutTable, TopologySizes
from disagg.protocol.peer_effects import Undecided
from disagg.runtime import agreements
from disagg.runtime.agreements import MAX_COMPARING, MAX_RANKS, MAX_TABLE_NBYTES, Agreements
from tests.manager.test_peers import until
from tests.support.layouts import state, table


def local_rank(tp: int = 1) -> LocalRank:
    """A rank of 4 heads over `tp` ranks."""
    layouts = [state("c", range(2), head=(4, interval(*split(4, tp, rank)))) for rank in range(tp)]
    return LocalRank(Topology(tp=tp), (), table(layouts), {})


def decided(found: Agreements, encoded: bytes, instance: str = "p") -> Agreement:
    def ask() -> Agreement | None:
        try:
            return found.get(encoded, instance)
        except Undecided:
            return None

    until(lambda: ask() is not None)
    return found.get(encoded, instance)


def test_an_agreement_is_undecided_until_it_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found, encoded = Agreements(local_rank()), local_rank(2).table.encode()
    go_on, between = threading.Event(), Agreement.between

    def slow(local: LocalRank, given: bytes) -> Agreement:
        assert go_on.wait(60)
        return between(local, given)

    monkeypatch.setattr(Agreement, "between", slow)
    for _ in range(2):
        with pytest.raises(Undecided, match="being compared"):
            found.get(encoded, "p")
    go_on.set()
    assert decided(found, encoded).num_ranks == 2
    assert found.get(encoded, "p") is found.get(encoded, "q")


def test_a_table_that_does_not_fit_is_an_error_each_time() -> None:
    found = Agreements(local_rank())
    for _ in range(2):
        with pytest.raises(LayoutError, match="cannot be read"):
            decided(found, b"nonsense")
    with pytest.raises(LayoutError, match=f"expected at most {MAX_TABLE_NBYTES} bytes"):
        found.get(bytes(MAX_TABLE_NBYTES + 1), "p")


def test_an_instance_of_too_many_ranks_is_refused() -> None:
    """A table of a few bytes may have any number of groups, and each rank costs a connection."""
    layouts = [state("c", range(2), head=(4, interval(0, 4)))]
    many = LayoutTable(TopologySizes(dp=MAX_RANKS + 1), table(layouts).ranks)
    with pytest.raises(LayoutError, match=f"expected at most {MAX_RANKS} ranks, found {MAX_RANKS + 1}"):
        decided(Agreements(local_rank()), many.encode())


def test_an_unforeseen_error_concerns_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Agreement:
        raise RuntimeError("no room")

    found = Agreements(local_rank())
    monkeypatch.setattr(Agreement, "between", fail)
    with pytest.raises(LayoutError, match="RuntimeError: no room"):
        decided(found, b"table")


def test_tables_of_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Agreement:
        raise LayoutError("no")

    monkeypatch.setattr(Agreement, "between", fail)
    monkeypatch.setattr(agreements, "MAX_KEPT_NBYTES", 100)
    found = Agreements(local_rank())
    for number in range(20):
        with pytest.raises(LayoutError):
            decided(found, bytes([number]) * 30)
        assert sum(map(len, found._found)) <= 100


def test_a_lack_of_memory_does_not_refuse_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, encoded = Agreements(local_rank()), local_rank(2).table.encode()

    def reason() -> str:
        with pytest.raises(Undecided) as undecided:
            found.get(encoded, "p")
        return str(undecided.value)

    with monkeypatch.context() as patch:
        patch.setattr(Agreement, "between", Mock(side_effect=MemoryError))
        until(lambda: "no memory" in reason())
    assert decided(found, encoded).num_ranks == 2


def test_only_a_few_tables_are_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, started = threading.Event(), []

    def slow(_: LocalRank, given: bytes) -> Agreement:
        started.append(given)
        assert go_on.wait(60)
        raise LayoutError("compared")

    monkeypatch.setattr(Agreement, "between", slow)
    monkeypatch.setattr(agreements, "MAX_AGREEMENTS", 3)
    found = Agreements(local_rank())
    given = [bytes([number]) for number in range(MAX_COMPARING + 3)]
    for each in given:
        with pytest.raises(Undecided):
            found.get(each, "one that says hello with many tables")
    until(lambda: len(started) > 0)
    assert len(found._comparing) == 1
    for each in given[1:]:
        with pytest.raises(Undecided):
            found.get(each, f"p{each!r}")
    until(lambda: len(started) == MAX_COMPARING)
    go_on.set()
    for each in given:
        with pytest.raises(LayoutError, match="compared"):
            decided(found, each)
    assert len(found._found) <= 3 + MAX_COMPARING
