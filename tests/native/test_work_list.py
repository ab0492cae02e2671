"""Sizes, tiles and errors of work lists. `tests/backends/test_span_kernel.py` tests that kernels read them correctly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from disagg.core import _native

RUNS = np.array([[0, 0, 0, 0, 3], [4, 1, 2, 0, 2]])


def column(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def sizes(steps: int = 2, nbytes: int = 8, num_bases: int = 3, *, dense: bool = False) -> _native.SpanSizes:
    return _native.SpanSizes(column(steps), column(nbytes), column(num_bases), np.array([dense]))


def work_list(runs: npt.NDArray[np.int64] = RUNS, *, span: int = 0, bases: Any = None, **shape: Any) -> _native.WorkList:
    return _native.WorkList(sizes(**shape), [(span, bases, runs)])


def encoded(found: _native.WorkList, *, tile: int = 16, num_words: int | None = None, num_shapes: int = 1) -> _native.WorkList:
    out = np.zeros(found.num_words if num_words is None else num_words, np.uint64)
    assert found.encode(np.zeros(num_shapes, np.int64), tile, out) <= out.nbytes
    return found


@pytest.mark.parametrize(
    ("bases", "dense", "pieces", "nbytes"),
    [(None, False, 30, 240), (None, True, 12, 240), (np.array([2]), False, 10, 80), (np.zeros(0, np.int64), False, 0, 0)],
)
def test_sizes(bases: Any, dense: bool, pieces: int, nbytes: int) -> None:
    found = work_list(bases=bases, dense=dense)
    assert (found.num_pieces, found.total_nbytes) == (pieces, nbytes)


def test_each_base_starts_a_new_tile() -> None:
    found = encoded(work_list(), tile=32)  # 3 tiles for the 80 bytes of each base
    assert found.tiles(0, 240) == (0, 9)
    assert found.tiles(79, 81) == (2, 4)
    assert found.tiles(64, 65) == (2, 3)
    assert encoded(found, tile=80).tiles(80, 81) == (1, 2)


HUGE = np.array([[0, 0, 0, 0, 2**62]])
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: work_list(span=1), "no span class 1"),
    (lambda: work_list(np.array([[0, 0, 0, 0, 0]])), "at least one position"),
    (lambda: work_list(np.array([[0, 0, 0, 0, -1]])), "at least one position"),
    (lambda: work_list(HUGE, steps=4), "2\\*\\*64"),
    (lambda: work_list(HUGE, steps=1, nbytes=4), "2\\*\\*64"),
    (lambda: work_list(HUGE, steps=1, nbytes=1, num_bases=4), "2\\*\\*64"),
    (lambda: work_list(np.concatenate([HUGE] * 4), steps=1, nbytes=1), "2\\*\\*64"),
    (lambda: encoded(work_list(), num_words=3), "words, found 3"),
    (lambda: encoded(work_list(), tile=0), "expected"),
    (lambda: encoded(work_list(), num_shapes=0), "not uploaded"),
    (lambda: encoded(work_list(np.array([[0, 0, 0, 0, 2**31]]), steps=1, nbytes=1, num_bases=1)), "at most 2147483647 pieces"),
    (lambda: encoded(work_list(steps=1, nbytes=2**40, num_bases=1), tile=1), "at most 2147483647 pieces"),
    (lambda: work_list().tiles(0, 1), "expected a range"),
    (lambda: encoded(work_list()).tiles(0, 241), "expected a range"),
    (lambda: encoded(work_list()).tiles(5, 5), "expected a range"),
    (lambda: _native.SpanSizes(column(1), column(1), column(1, 2), np.ones(1, bool)), "one length"),
]


@pytest.mark.parametrize(("refused", "why"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_raise(refused: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refused()


@pytest.mark.parametrize("runs", [None, RUNS.astype(np.int32), RUNS[:, :4], RUNS.ravel()])
def test_runs_of_another_form_raise(runs: Any) -> None:
    with pytest.raises(TypeError):
        work_list(runs)
