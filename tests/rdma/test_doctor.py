"""`disagg doctor` and `require="rdma"` with RDMA devices that work, are missing, are down, or may not lock memory."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from disagg.backends.base import Backend
from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.backends.nixl.backend import NixlBackend
from disagg.core.errors import BackendUnavailable
from tests.support.rdma import rdma_options

DOCTOR = (sys.executable, "-m", "disagg.commands", "doctor", "--no-engines", "--require", "rdma")
LIMITED = ("setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536:65536")
BACKENDS = (NixlBackend, MooncakeBackend)
TIMEOUT_S = 240.0


def doctor(*prefix: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, *DOCTOR]
    return subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def start(backend: type[NixlBackend] | type[MooncakeBackend], *devices: str) -> Backend:
    return backend(dataclasses.replace(rdma_options(backend.name), devices=devices))


@pytest.fixture
def device_down() -> Iterator[str]:
    """An RDMA device whose network device is down."""
    number = os.getpid()
    commands = (
        f"ip link add e{number} type dummy",
        f"rdma link add rxe{number} type rxe netdev e{number}",
        f"ip link set e{number} down",
    )
    for command in commands:
        subprocess.run(command.split(), check=True)
    yield f"rxe{number}"
    for command in (f"rdma link delete rxe{number}", f"ip link delete e{number}"):
        subprocess.run(command.split(), check=True)


def test_devices_that_work_are_found() -> None:
    ended = doctor()
    assert ended.returncode == 0, ended.stdout
    for device in ("rxe0", "rxe1"):
        assert f"ok       rdma         RDMA device {device} port 1: up" in ended.stdout
    assert "RoCE v2 at index 0, 1 (UCX_IB_GID_INDEX, MC_GID_INDEX)" in ended.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_device_is_refused(backend: type[NixlBackend] | type[MooncakeBackend]) -> None:
    with pytest.raises(BackendUnavailable, match=r"device 'rxe9:1' was asked for, and this machine has .*rxe0, rxe1"):
        start(backend, "rxe9:1")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_without_a_gid_is_refused(
    backend: type[NixlBackend] | type[MooncakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "UCX_IB_GID_INDEX" if backend is NixlBackend else "MC_GID_INDEX"
    ended = doctor(**{variable: "9"})
    assert ended.returncode == 1
    assert re.search(f"{variable}='9' is set, but on .*rxe0, rxe1.* GIDs are at index 0, 1 only", ended.stdout)
    monkeypatch.setenv(variable, "9")
    with pytest.raises(BackendUnavailable, match=f"{variable}='9'"):
        backend(rdma_options(backend.name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_port_that_is_down_is_refused(backend: type[NixlBackend] | type[MooncakeBackend], device_down: str) -> None:
    with pytest.raises(BackendUnavailable, match=rf"RDMA device {device_down} port 1 is not up: state '\d: DOWN'"):
        start(backend, f"{device_down}:1")
    ended = doctor()
    assert ended.returncode == 0  # the others are up
    assert f"warning  rdma         RDMA device {device_down} port 1 is not up" in ended.stdout


def test_little_memory_that_may_be_locked_is_found() -> None:
    ended = doctor(*LIMITED)
    assert ended.returncode == 1
    assert "at most 64 KiB of memory may be locked (ulimit -l)" in ended.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_little_memory_that_may_be_locked_is_refused(backend: type[NixlBackend] | type[MooncakeBackend]) -> None:
    """In a process without the capability that lifts the limit."""
    code = f"""
from {backend.__module__} import {backend.__name__}
from tests.support.rdma import rdma_options
{backend.__name__}(rdma_options({backend.name!r}))
"""
    command = [*LIMITED, sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert "BackendUnavailable" in ended.stderr
    assert "at most 64 KiB of memory may be locked" in ended.stderr
