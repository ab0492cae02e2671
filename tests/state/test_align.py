"""Index alignment and run grouping against a naive reference, and the compiled core against NumPy."""

from __future__ import annotations

import logging
import threading
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core import _native
from disagg.core.errors import ConfigError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.state import align
from disagg.state.align import align_state_indices, group_concurrent_contiguous
from harness.reference_core import group_concurrent_contiguous_numpy

Run = tuple[int, int, int]
INT64_MAX = 2**63 - 1


def naive_runs(source: list[int], destination: list[int]) -> list[Run]:
    """The definition, pair by pair."""
    runs: list[Run] = []
    previous: tuple[int, int] | None = None
    for s, d in zip(source, destination, strict=True):
        if s < 0 or d < 0:
            previous = None
            continue
        if previous == (s - 1, d - 1):
            first_s, first_d, length = runs[-1]
            runs[-1] = (first_s, first_d, length + 1)
        else:
            runs.append((s, d, 1))
        previous = (s, d)
    return runs


def as_runs(columns: tuple[npt.NDArray[np.int64], ...]) -> list[Run]:
    for column in columns:
        assert column.dtype == np.int64
        assert column.ndim == 1
    return [cast(Run, run) for run in zip(*(column.tolist() for column in columns), strict=True)]


@st.composite
def pairs_of_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lists of stretches that increase by one on both sides, on one, or on neither, with sentinels in between."""
    source: list[int] = []
    destination: list[int] = []
    starts = st.integers(-3, 2**31 - 100) | st.integers(-3, 12)
    stretches = st.tuples(starts, starts, st.sampled_from([0, 1]), st.sampled_from([0, 1, 2]), st.integers(1, 70))
    for s, d, s_step, d_step, length in draw(st.lists(stretches, max_size=8)):
        source += [min(s + i * s_step, 2**31 - 1) for i in range(length)]
        destination += [min(d + i * d_step, 2**31 - 1) for i in range(length)]
    return source, destination


@given(pairs_of_lists(), st.sampled_from([np.int64, np.int32]), st.sampled_from([np.int64, np.int32]))
def test_runs_match_the_definition(lists: tuple[list[int], list[int]], s_type: type, d_type: type) -> None:
    source: npt.NDArray[Any] = np.array(lists[0], dtype=s_type)
    destination: npt.NDArray[Any] = np.array(lists[1], dtype=d_type)
    expected = naive_runs(*lists)
    assert as_runs(group_concurrent_contiguous(source, destination)) == expected
    assert as_runs(_native.group_concurrent_contiguous(source, destination)) == expected
    assert as_runs(group_concurrent_contiguous_numpy(source, destination)) == expected
    assert source.tolist() == lists[0]
    assert destination.tolist() == lists[1]


@given(st.lists(st.tuples(st.integers(-(2**63), INT64_MAX), st.integers(-(2**63), INT64_MAX))))
def test_any_int64(pairs: list[tuple[int, int]]) -> None:
    source, destination = [s for s, _ in pairs], [d for _, d in pairs]
    assert as_runs(group_concurrent_contiguous(source, destination)) == naive_runs(source, destination)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 34, 65, 1000])
def test_one_long_run(size: int) -> None:
    ids = np.arange(size)
    assert as_runs(group_concurrent_contiguous(ids + 7, ids)) == [(7, 0, size)]


@pytest.mark.parametrize(
    ("source", "destination", "runs"),
    [
        ([], [], []),
        ([], [1, 2], []),
        ([1, 2], [], []),
        ([3], [5], [(3, 5, 1)]),
        ([-1, 0, 1], [-1, 0, 1], [(0, 0, 2)]),
        ([0, 1, 2], [4, -1, 6], [(0, 4, 1), (2, 6, 1)]),
        ([-3, -2, -1], [0, 1, 2], []),
        ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
        ([5, 5, 6], [1, 2, 3], [(5, 1, 1), (5, 2, 2)]),
        ([INT64_MAX - 1, INT64_MAX, -INT64_MAX - 1], [0, 1, 2], [(INT64_MAX - 1, 0, 2)]),
    ],
)
def test_edges(source: list[int], destination: list[int], runs: list[Run]) -> None:
    assert as_runs(group_concurrent_contiguous(source, destination)) == runs
    assert as_runs(group_concurrent_contiguous_numpy(source, destination)) == runs


@pytest.mark.parametrize("group", [group_concurrent_contiguous, group_concurrent_contiguous_numpy])
def test_different_lengths_are_an_error_with_both(group: Any) -> None:
    with pytest.raises(ValueError, match=r"3 .* 2"):
        group([1, 2, 3], [1, 2])


def test_other_integer_types_gaps_and_read_only_arrays() -> None:
    wide = np.arange(20)
    wide.flags.writeable = False
    for ids in (
        wide[::2],
        wide[::2].astype(np.uint32),
        wide[::2].astype(np.int8),
        wide[::2].astype(">i8"),
        list(range(0, 20, 2)),
    ):
        starts, _, lengths = group_concurrent_contiguous(ids, np.arange(10))
        assert starts.tolist() == list(range(0, 20, 2))
        assert lengths.tolist() == [1] * 10
    assert as_runs(group_concurrent_contiguous(wide[::-1][:2], [4, 5])) == [(19, 4, 1), (18, 5, 1)]


def test_int32_arrays_with_gaps() -> None:
    sparse = np.arange(20, dtype=np.int32)[::2]
    starts, to, lengths = group_concurrent_contiguous(sparse, sparse // 2)
    assert (starts.tolist(), to.tolist(), lengths.tolist()) == (sparse.tolist(), list(range(10)), [1] * 10)
    starts, to, lengths = group_concurrent_contiguous(np.arange(40, dtype=np.int32)[::2] // 2, np.arange(5, 25))
    assert (starts.tolist(), to.tolist(), lengths.tolist()) == ([0], [5], [20])


def test_results_are_independent_arrays() -> None:
    ids = np.arange(0, 4000, 2)
    _, destinations, _ = group_concurrent_contiguous(ids, ids)
    assert destinations.tolist() == ids.tolist()
    destinations[0] = 5
    assert ids[0] == 0


@pytest.mark.parametrize("function", [group_concurrent_contiguous, align_state_indices])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2]], r"destination indices: expected one dimension, found shape \(1, 2\)"),
        (3, r"destination indices: expected one dimension, found shape \(\)"),
        ([1.0], "destination indices: expected integers, found dtype float64"),
        ([True], "destination indices: expected integers, found dtype bool"),
        (np.empty(0), "destination indices: expected integers, found dtype float64"),
    ],
)
def test_anything_but_a_list_of_integers_is_rejected(function: Any, ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        function([1], ids)


def test_ids_beyond_int64() -> None:
    with pytest.raises(ConfigError, match=str(2**63)):
        group_concurrent_contiguous(np.array([2**63], dtype=np.uint64), [1])


@given(st.lists(st.integers(-1, 99)), st.lists(st.integers(-1, 99)), st.sampled_from(["start", "end"]))
def test_alignment_cuts_the_longer_one(source: list[int], destination: list[int], anchor: Literal["start", "end"]) -> None:
    size = min(len(source), len(destination))
    arrays = np.array(source, dtype=np.int32), np.array(destination, dtype=np.int64)
    cut = align_state_indices(*arrays, anchor=anchor)
    for side, whole in enumerate((source, destination)):
        assert cut[side].tolist() == (whole[:size] if anchor == "start" else whole[len(whole) - size :])
        assert cut[side].dtype == arrays[side].dtype
        assert not np.shares_memory(cut[side], arrays[side])
        assert cut[side].flags.writeable
        assert arrays[side].tolist() == whole


def test_only_a_cut_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "_warnings", RateLimitedLog(align.logger))  # other tests may have used up what may be logged
    with caplog.at_level(logging.WARNING, logger="disagg.state.align"):
        align_state_indices([1, 2], [3, 4])
        assert not caplog.records
        align_state_indices([1, 2, 3], [3, 4])
    (record,) = caplog.records
    assert record.getMessage() == "state indices: source has 3, destination has 2; cut to 2 at the end of the longer one"


def test_cuts_of_every_request_do_not_flood_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "_warnings", RateLimitedLog(align.logger))
    for _ in range(5000):
        align_state_indices([1, 2, 3], [3, 4])
    assert 0 < len(caplog.records) < 1000


def test_a_bad_anchor() -> None:
    with pytest.raises(ConfigError, match="expected 'start' or 'end', found 'middle'"):
        align_state_indices([1], [1], anchor=cast(Any, "middle"))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_copy_batch_against_numpy(num_threads: int) -> None:
    random = np.random.default_rng(3)
    nbytes = random.integers(0, 200_000, size=64).astype(np.uint64)
    offsets = np.concatenate(([0], np.cumsum(nbytes)[:-1])).astype(np.uint64)
    source = random.integers(0, 256, size=int(nbytes.sum()), dtype=np.uint8)
    destination = np.zeros_like(source)
    order = random.permutation(len(nbytes))
    places = np.empty_like(offsets)
    places[order] = np.concatenate(([0], np.cumsum(nbytes[order])[:-1]))
    copied = _native.copy_batch(
        np.uint64(source.ctypes.data) + offsets, np.uint64(destination.ctypes.data) + places, nbytes, num_threads
    )
    assert copied == len(source)
    pieces = [source[int(o) : int(o + n)] for o, n in zip(offsets, nbytes, strict=True)]
    np.testing.assert_array_equal(destination, np.concatenate([pieces[i] for i in order]))


def test_copy_batch_rejects_wrong_arguments() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="source has 1 addresses, destination has 2, nbytes has 2"):
        _native.copy_batch(one, two, two)
    with pytest.raises(ValueError, match="expected at least 1, found -1"):
        _native.copy_batch(one, one, one, -1)
    with pytest.raises(TypeError):
        _native.copy_batch(cast(Any, one.astype(np.int64)), one, one)
    assert _native.copy_batch(one, one, one) == 0
    assert _native.copy_batch(one[:0], one[:0], one[:0], 8) == 0


def test_the_core_may_be_called_from_several_threads() -> None:
    ids = np.random.default_rng(4).permutation(50_000)
    expected = as_runs(group_concurrent_contiguous_numpy(ids, ids))
    results: list[list[Run]] = []
    threads = [
        threading.Thread(target=lambda: results.append(as_runs(group_concurrent_contiguous(ids, ids)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
