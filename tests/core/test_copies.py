"""Copy batches: columns of one length, joined if they are contiguous on both sides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.copies import CopyBatch
from harness.reference_core import coalesced

Triples = list[tuple[int, int, int]]
triples_ = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4)), max_size=15)


def batch(triples: Triples) -> CopyBatch:
    columns = np.array(triples, dtype=np.uint64).reshape(-1, 3)
    return CopyBatch(columns[:, 0], columns[:, 1], columns[:, 2])


def triples(copies: CopyBatch) -> Triples:
    return list(zip(copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True))


def pairs(copies: Triples) -> list[tuple[int, int]]:
    """The source and destination of each byte, in order."""
    return [(source + i, destination + i) for source, destination, nbytes in copies for i in range(nbytes)]


@given(triples_)
def test_coalescing_keeps_every_byte_and_joins_all_neighbours(given_triples: Triples) -> None:
    copies = batch(given_triples)
    joined = triples(coalesced(copies))
    assert pairs(joined) == pairs(given_triples)
    assert triples(copies) == given_triples
    assert copies.total_nbytes == coalesced(copies).total_nbytes == sum(n for _, _, n in given_triples)
    for (source, destination, nbytes), (next_source, next_destination, _) in itertools.pairwise(joined):
        assert (source + nbytes, destination + nbytes) != (next_source, next_destination)


def test_contiguous_runs_join_at_high_addresses_too() -> None:
    top = 2**63 + 5
    assert triples(coalesced(batch([(top, 8, 4), (top + 4, 12, 4), (top + 8, 16, 1)]))) == [(top, 8, 9)]
    assert triples(coalesced(batch([(0, 8, 4), (4, 13, 4)]))) == [(0, 8, 4), (4, 13, 4)]
    assert triples(coalesced(batch([(0, 8, 4)]))) == [(0, 8, 4)]
    assert triples(coalesced(batch([]))) == triples(CopyBatch.concatenate([])) == []


@given(st.lists(triples_, max_size=4))
def test_concatenation_keeps_order(lists: list[Triples]) -> None:
    assert triples(CopyBatch.concatenate([batch(each) for each in lists])) == [t for each in lists for t in each]


def test_a_batch_of_one_copy() -> None:
    one = CopyBatch.one(8, 64, 3)
    assert (one.source.tolist(), one.destination.tolist(), one.nbytes.tolist()) == ([8], [64], [3])


def test_columns_are_read_only_and_the_callers_arrays_writable() -> None:
    mine = np.arange(3, dtype=np.uint64)
    copies = CopyBatch(mine, mine + np.uint64(8), np.ones(3, np.uint64))
    for column in (copies.source, copies.destination, copies.nbytes):
        assert column.dtype == np.uint64
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    assert mine.flags.writeable, "the caller's own array was made read-only"


def test_columns_of_different_lengths_are_rejected() -> None:
    two, three = np.zeros(2, np.uint64), np.zeros(3, np.uint64)
    for columns in ((two, three, three), (three, two, three), (three, three, two)):
        with pytest.raises(ValueError, match="one length"):
            CopyBatch(*columns)
    with pytest.raises(ValueError, match="one length"):
        CopyBatch(*(np.zeros((2, 2), np.uint64),) * 3)
