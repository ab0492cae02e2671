"""Kernels and container profiles without pidfds: nothing is proved about other processes, but requests are served."""

from __future__ import annotations

import errno
import os

import pytest

from disagg.backends import registry
from disagg.machine import processes
from tests.backends.conftest import require_engine
from tests.commands.conftest import ENGINES
from tests.support.cluster import Side, cluster


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_auto_serves_requests_where_the_kernel_has_no_pidfds(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older profiles refuse `pidfd_open` with either error, and Linux before 6.5 has no `SO_PEERPIDFD`."""
    require_engine(*ENGINES[engine])
    asked: list[int] = []

    def refuse(pid: int) -> int:
        asked.append(pid)
        number = errno.EPERM if len(asked) % 2 else errno.ENOSYS
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(processes, "_SO_PEERPIDFD", 9999)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(registry, "AUTO", (engine,))
    with cluster(Side(), Side(page=8), settings={"backend": "auto"}) as instances:
        for _ in range(2):
            assert all(event.ok for event in instances.transfer(20))
        for rank in (*instances.prefill, *instances.decode):
            assert rank.manager.backend.transport.startswith(f"{engine}: ")
            assert rank.manager.health().ok
    assert len(asked) >= 2
