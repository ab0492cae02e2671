"""The picture of `disagg-bench --plot` and `--html`."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg.commands.bench.plot import PIECES, figure_of, varied
from disagg.commands.bench.report import Row
from disagg.core.timeline import PHASES
from tests.commands.test_compare import ROW

PACED = {"arrivals": "poisson", "added_ms": {"p50": 3.0, "p99": 9.0}}


def rows(**values: list[Any]) -> list[Row]:
    """Rows that differ in these fields."""
    changes = [dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True)]
    return [msgspec.structs.replace(ROW, **change) for change in changes]


@pytest.mark.parametrize(
    ("given", "across", "others"),
    [
        (rows(tokens=[1, 2]), "tokens", []),
        (rows(requests=[8, 16], per_s=[99.0, 101.0], piece_bytes_mean=[1.0, 2.0]), "requests", []),
        (rows(tokens=[1, 1, 2], requests=[4, 8, 4], run_pages=[1, 2, 1]), "tokens", ["requests", "run_pages"]),
        (rows(run_pages=[1, 2], prefill=["tp=1", "tp=2"], model=["tiny", "small"]), "run_pages", ["model", "sides"]),
        (rows(decode=["tp=1,page=8", "tp=1,page=16"], piece_bytes_mean=[1.0, 2.0]), PIECES, []),
        (rows(decode=["tp=1,page=8", "tp=1,page=16"]), "page", []),
        (rows(decode=["tp=1,page=8", "tp=2,page=16"]), "page", ["ranks"]),
        (rows(prefill=["tp=1", "tp=2"], model=["tiny", "small"]), PIECES, ["model"]),
        ([ROW], PIECES, []),
    ],
)
def test_what_was_swept_is_on_the_x_axis_and_the_rest_makes_lines(given: list[Row], across: str, others: list[str]) -> None:
    assert varied(given) == (across, others)


def test_each_other_setting_has_a_line_of_its_own() -> None:
    left, _ = figure_of(rows(tokens=[1, 2, 1, 2], requests=[4, 4, 8, 8], ceiling_gbps=[None] * 4)).axes
    assert {str(line.get_label()): np.asarray(line.get_xdata()).tolist() for line in left.lines} == {
        "nixl, shm, requests 4, packed": [1, 2],
        "nixl, shm, requests 8, packed": [1, 2],
    }
    assert left.get_xlabel() == "tokens of a request"


@pytest.mark.parametrize("paced", [{}, PACED], ids=["together", "poisson"])
def test_the_phases_of_a_bar_add_up_to_the_time_of_the_request(paced: dict[str, Any]) -> None:
    phases = {phase: 0.001 * number for number, phase in enumerate(PHASES, 1)}
    _, right = figure_of([msgspec.structs.replace(ROW, phases=phases, seconds={"total": 9.0}, **paced)]).axes
    bars = [bar for container in right.containers for bar in container]
    assert [str(container.get_label()) for container in right.containers] == list(PHASES)
    assert [bar.get_width() for bar in bars] == pytest.approx([1e3 * seconds for seconds in phases.values()])
    assert bars[0].get_x() == 0
    for before, after in itertools.pairwise(bars):
        assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
    assert right.get_xlim()[1] < 2 * 1e3 * sum(phases.values())
    assert not right.lines
