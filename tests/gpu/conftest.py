"""Skips the GPU tests, with the reason, on machines without two NVIDIA GPUs."""

from __future__ import annotations

import pytest

from disagg.backends.cuda.driver import load_bindings
from disagg.core.errors import BackendUnavailable


def missing() -> str | None:
    """What this machine lacks for the tests, or `None`."""
    try:
        driver, _ = load_bindings()
    except BackendUnavailable as error:
        return str(error)
    count = int(driver.cuDeviceGetCount()[1])
    return None if count >= 2 else f"expected two NVIDIA GPUs, found {count}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
