"""Tests over RDMA devices, in the guest of `harness.rdma` (`make test-rdma`); nothing is collected elsewhere."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from harness.rdma.link import RdmaLink
from tests.support.rdma import LINKS

IN_GUEST = os.environ.get("RDMA_GUEST") == "1"
collect_ignore_glob = [] if IN_GUEST else ["test_*.py"]
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.rdma_imports"])


def pytest_configure(config: pytest.Config) -> None:
    """Create the networks of all links before any process uses UCX, which reads routes only once."""
    if IN_GUEST and not hasattr(config, "workerinput"):
        for link in LINKS.values():
            link.create_network()


@pytest.fixture
def link(engine: str, rails: int) -> Iterator[RdmaLink]:
    """A link with `rails` devices on each side; each engine has its own, since tests of both run at once."""
    link = LINKS[engine, rails]
    link.add_devices()
    yield link
    link.mend()
    link.remove_devices()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
