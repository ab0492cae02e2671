"""What every benchmark writes beside its figures."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pair import Row, run_tables
from harness.conditions import conditions


def test_conditions_name_the_machine_and_the_versions() -> None:
    found = conditions()
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["machine"]["kernel"] == platform.release()
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["numpy"] == np.__version__
    assert "cibuildwheel" not in found["versions"]


def test_a_benchmark_writes_them_beside_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def squares() -> Iterator[Row]:
        """Squares."""
        for number in range(2):
            yield {"number": number, "square": number**2}

    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", str(file)])
    run_tables("", {"squares": squares})
    found = json.loads(file.read_text())
    assert set(found) == {*conditions(), "tables"}
    assert found["tables"] == {"squares": [{"number": 0, "square": 0}, {"number": 1, "square": 1}]}
