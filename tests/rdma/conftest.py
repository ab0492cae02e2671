"""Tests over RDMA devices, in the guest of `harness.rdma` (`make test-rdma`); nothing is collected elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

collect_ignore_glob = [] if os.environ.get("RDMA_GUEST") == "1" else ["test_*.py"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
