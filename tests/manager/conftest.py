"""A small pair of instances that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from disagg.testing import reference
from tests.support.cluster import Cluster, Side, cluster


@pytest.fixture(scope="module")
def instances() -> Iterator[Cluster]:
    with cluster(Side(tp=2), Side(tp=1, page=8, num_pages=16)) as pair:
        yield pair


def untouched(instances: Cluster) -> bool:
    """Whether decode's pools hold canary bytes only."""
    return all((t.view(np.uint8) == reference.CANARY).all() for r in instances.decode for ts in r.pools.values() for t in ts)
