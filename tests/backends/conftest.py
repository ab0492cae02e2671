"""Engines may be missing on a machine: a skip that says so, or a failure where they are required."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def require_engine(module: str, package: str) -> ModuleType:
    """`module`, imported; without it the test module is skipped, or fails with TEST_REQUIRE_ENGINES=1."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        reason = f"{module} cannot be imported (pip install {package}): {error}"
        if os.environ.get("TEST_REQUIRE_ENGINES") == "1":
            pytest.fail(f"TEST_REQUIRE_ENGINES=1, but {reason}", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
