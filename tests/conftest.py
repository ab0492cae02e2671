"""Profiles of the property tests: `dev` on a person's machine, `ci` where everything is tried for longer. And what coverage is
measured of.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import is_hypothesis_test, settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=120, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("TEST_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))

COVERING = ("core", "session", "state")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The pure core is covered by its own tests, and by what is written there, not by what chance tries: a traced test takes
    twice as long.
    """
    folders = [config.rootpath / "tests" / name for name in COVERING]
    for item in items:
        own = any(item.path.is_relative_to(folder) for folder in folders)
        if not own or is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.no_cover)
