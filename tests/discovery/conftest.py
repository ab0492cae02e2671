"""Servers that peers are found in, and instances that are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from disagg import KVManager, ModelId, Topology
from disagg.protocol.peer_state import ConnectionLimits
from disagg.state import paged
from harness.services import Etcd, etcd_server

SHORT = ConnectionLimits(hello_retry_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=10.0)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with etcd_server() as server:
        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., KVManager]]:
    """Start managers, which the test's end closes."""
    with ExitStack() as opened:

        def instance(name: str, **settings: Any) -> KVManager:
            cache = np.zeros((2, 4, 4, 2, 8), np.float16)
            topology = Topology()
            kv = paged.gqa({0: (cache[0], cache[1])}, axes="nhd", num_kv_heads=2, topology=topology)
            return opened.enter_context(
                KVManager(
                    name=name, components=[kv], model=ModelId("toy"), backend="local", connection_limits=SHORT, **settings
                )
            )

        yield instance
