"""Tests over RDMA devices, in the guest of `harness.rdma` (`make test-rdma`); nothing is collected elsewhere."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from harness.rdma.link import RdmaLink
from tests.support.rdma import LINK_NUMBERS, RAILS

IN_GUEST = os.environ.get("RDMA_GUEST") == "1"
collect_ignore_glob = [] if IN_GUEST else ["test_*.py"]
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.rdma_imports"])


def pytest_configure(config: pytest.Config) -> None:
    """Create the links once, before any process opens an engine."""
    if IN_GUEST and not hasattr(config, "workerinput"):
        for number in LINK_NUMBERS.values():
            RdmaLink(number, rails=RAILS).create()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, tests on the link of one engine run one after the other, and those of other files together."""
    for item in items if IN_GUEST else ():
        assert isinstance(item, pytest.Function)
        on_link = "link" in item.fixturenames
        item.add_marker(pytest.mark.xdist_group(f"link-{item.callspec.params['engine']}" if on_link else item.path.name))


@pytest.fixture
def link(engine: str, rails: int) -> Iterator[RdmaLink]:
    """A link with `rails` devices on each side; each engine has its own, since tests of both run at once."""
    link = RdmaLink(LINK_NUMBERS[engine], rails=rails)
    yield link
    link.mend()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
