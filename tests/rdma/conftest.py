"""Tests over RDMA devices, in the guest of `harness.rdma` (`make test-rdma`); nothing is collected elsewhere."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

collect_ignore_glob = [] if os.environ.get("RDMA_GUEST") == "1" else ["test_*.py"]
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.rdma_imports"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
