"""A small pair of instances that the tests of a module share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from disagg.requests import Receiver
from disagg.testing import reference
from tests.support.cluster import DEADLINE_S, Cluster, Rank, Side, clear, cluster
from tests.support.inside import in_control_thread


@pytest.fixture(scope="module")
def instances() -> Iterator[Cluster]:
    with cluster(Side(tp=2), Side(tp=1, page=8, num_pages=16)) as pair:
        yield pair


@pytest.fixture(autouse=True)
def rows_are_free(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with instances that others share, end its receives and wait until their rows are released. Nothing is
    written any more then: fill the pools with canary bytes.
    """
    shared = request.getfixturevalue("instances") if "instances" in request.fixturenames else None
    yield
    for rank in shared.decode if isinstance(shared, Cluster) else ():
        requests, deadline = rank.manager._runtime.requests, time.monotonic() + DEADLINE_S
        for handle in requests.open_handles():
            if isinstance(handle, Receiver):
                handle.abort("the test has ended")
        while requests._held_rows._receivers and time.monotonic() < deadline:
            time.sleep(0.001)
        clear(rank.pools)
        _wait_for_control_thread(rank)


def _wait_for_control_thread(rank: Rank) -> None:
    """Wait until it has finished what it was at."""
    reached = threading.Event()
    in_control_thread(rank.manager, lambda _: reached.set())
    assert reached.wait(DEADLINE_S)


def untouched(instances: Cluster) -> bool:
    """Whether decode's pools hold canary bytes only."""
    return all((t.view(np.uint8) == reference.CANARY).all() for r in instances.decode for ts in r.pools.values() for t in ts)
