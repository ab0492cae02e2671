"""Hypothesis profiles, tests whose coverage is measured, how processes start, and programs that cannot be fetched.

The profile `ci` prints how to reproduce a failure. `nightly` tries many more examples.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

from harness.debian import FetchError

# In each process that imports NumPy, a second thread would spin for 0.1 s.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# UCX would spin for 0.35 s in each process to hook memory calls, for its cache of registrations, which only RDMA has.
if not any(Path("/sys/class/infiniband").glob("*")):
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, print_blob=True)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("TEST_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))

COVERED_FOLDERS = ("core", "layout", "models", "protocol", "state")
RUN_MODELS = ("test_equal_tokens.py", "test_real_caches.py")
"""Tests of real models, where tracing would slow down the models and not this package."""


def pytest_collection_finish() -> None:
    """Keep what the imports made out of garbage collections: a test that asks for one would wait for half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, object]:
    """Skip a test that needs a program of Debian's packages where none can be fetched, and say so."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(FetchError):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {str(call.excinfo.value).splitlines()[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Trace only the pure core's own tests, and no sweeps or tests that use Hypothesis or run a model.

    A traced test takes twice as long, and the coverage of random examples varies between runs.
    """
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    is_covered = folder in COVERED_FOLDERS and item.path.name not in RUN_MODELS
    is_covered = is_covered and not is_hypothesis_test(getattr(item, "obj", None)) and not item.get_closest_marker("sweep")
    tracers = sys.gettrace(), threading.gettrace()
    if is_covered or not type(tracers[0]).__module__.startswith("coverage"):  # keep a debugger's tracer, too
        return (yield)
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])
