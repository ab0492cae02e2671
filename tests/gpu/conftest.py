"""These tests need two NVIDIA GPUs that reach each other's memory; elsewhere they are skipped, and say so."""

from __future__ import annotations

import pytest

from disagg.backends.cuda.driver import load_bindings
from disagg.core.errors import BackendUnavailable


def missing() -> str | None:
    """What this machine lacks."""
    try:
        driver, _ = load_bindings()
    except BackendUnavailable as error:
        return str(error)
    count = int(driver.cuDeviceGetCount()[1])
    return None if count >= 2 else f"two NVIDIA GPUs are needed, this machine has {count}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
