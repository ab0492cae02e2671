"""The import of the compiled module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import disagg.core

ROOT = Path(__file__).parents[2]


def test_a_tree_without_the_compiled_module_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(disagg.core, "_native")
    monkeypatch.setitem(sys.modules, "disagg.core._native", None)
    with pytest.raises(
        ImportError, match=f"imported from {ROOT}, which has no compiled module.* start Python in another folder"
    ):
        importlib.reload(disagg.core)
