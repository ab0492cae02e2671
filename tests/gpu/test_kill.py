"""Nobody's death, and nobody's `free`, costs a survivor its context: what `scripts/gpu_kill.py` prints, held."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_kill.py"


def load() -> ModuleType:
    """The script as a module that child processes can import too."""
    import sys

    spec = importlib.util.spec_from_file_location("gpu_kill", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_kill"] = module
    if str(SCRIPT.parent) not in sys.path:
        sys.path.append(str(SCRIPT.parent))
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["legacy", "exported"])
def test_the_owner_is_killed(kind: str) -> None:
    outcome: dict[str, Any] = load().run("owner killed", kind)
    assert outcome["kernel went on writing"] is True
    assert outcome["writing kernel"] == outcome["context afterwards"] == outcome["unmapping"] == "works"


@pytest.mark.parametrize("kind", ["legacy", "exported"])
def test_the_owner_frees_and_allocates_again(kind: str) -> None:
    outcome: dict[str, Any] = load().run("owner frees", kind)
    assert outcome["owner"].startswith("no error")
    assert outcome["owner"].endswith("untouched")
    assert outcome["writing kernel"] == outcome["context afterwards"] == "works"


@pytest.mark.parametrize("kind", ["legacy", "exported"])
def test_the_writer_is_killed(kind: str) -> None:
    outcome: dict[str, Any] = load().run("writer killed", kind)
    assert outcome["owner's context"] == "works"
