"""Profiles of the property tests: `dev` on a person's machine, `ci` where everything is tried for longer. And what coverage is
measured of.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator

import pytest
from hypothesis import is_hypothesis_test, settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=120, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("TEST_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))

COVERING = ("core", "layout", "models", "protocol", "state")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """The pure core is covered by its own tests, and by what is written there, not by what chance tries: a traced test takes
    twice as long.
    """
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    counts = folder in COVERING and not is_hypothesis_test(getattr(item, "obj", None))
    tracers = sys.gettrace(), threading.gettrace()
    if counts or not type(tracers[0]).__module__.startswith("coverage"):  # a debugger's tracer stays, too
        return (yield)
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])
