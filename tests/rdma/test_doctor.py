"""`disagg doctor` and `require="rdma"` with RDMA devices that work, are missing, are down, or may not lock memory."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from disagg.backends.mooncake.backend import MooncakeBackend
from disagg.backends.nixl.backend import NixlBackend
from disagg.commands.doctor.command import doctor
from disagg.core.errors import BackendUnavailable
from disagg.machine.findings import Finding, Level, Machine
from disagg.machine.rdma import rdma
from tests.support.rdma import DEVICES, DOWN, rdma_options

LIMITED = ("setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536:65536")
"""Runs a command without the capability that lifts the limit of locked memory."""
BACKENDS = (NixlBackend, MooncakeBackend)
TIMEOUT_S = 240.0


def found(level: Level) -> list[Finding]:
    """The doctor's findings of that level about three devices, without its other topics, which take long in the guest."""
    return [finding for finding in rdma(Machine(), devices=(*DEVICES.values(), DOWN), required=True) if finding.level is level]


def refusals(*devices: str) -> Iterator[str]:
    """Why each engine does not start with these devices, or with its own if none is named."""
    for backend in BACKENDS:
        options = rdma_options(backend.name)
        with pytest.raises(BackendUnavailable) as refused:
            backend(dataclasses.replace(options, devices=devices or options.devices))
        yield str(refused.value)


def test_devices_that_work_are_found() -> None:
    ended = CliRunner().invoke(doctor, ["--no-engines", "--require", "rdma"])
    assert ended.exit_code == 0, ended.output
    for device in ("rxe0", "rxe1"):
        assert re.search(rf"ok       rdma         RDMA device {device} port 1: up.*; \d+ packets sent", ended.output)
    assert "RoCE v2 at index 0, 1 (UCX_IB_GID_INDEX, MC_GID_INDEX)" in ended.output


def test_a_missing_device_is_refused() -> None:
    for refusal in refusals("rxe9:1"):
        assert re.search(r"device 'rxe9:1' was asked for, and this machine has .*rxe0, rxe1", refusal)


@pytest.mark.parametrize("variable", ["UCX_IB_GID_INDEX", "MC_GID_INDEX"])
def test_an_index_without_a_gid_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "9")
    (finding,) = found(Level.ERROR)
    assert re.search(f"{variable}='9' is set, but on .*rxe0, rxe1.* GIDs are at index 0, 1 only", finding.cause)
    for refusal in refusals():
        assert f"{variable}='9'" in refusal


def test_a_port_that_is_down_is_refused() -> None:
    for refusal in refusals(f"{DOWN}:1"):
        assert re.search(rf"RDMA device {DOWN} port 1 is not up: state '\d: DOWN'", refusal)
    assert not found(Level.ERROR)  # the others are up
    assert any(f"RDMA device {DOWN} port 1 is not up" in finding.cause for finding in found(Level.WARNING))


def test_little_memory_that_may_be_locked_is_found_and_refused() -> None:
    code = """
from tests.rdma.test_doctor import Level, found, refusals
for line in refusals():
    print("refused:", line)
for finding in found(Level.ERROR):
    print("error:", finding.topic, finding.cause)
"""
    command = [*LIMITED, sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    *refused, error = ended.stdout.splitlines()[-3:]
    limit = "at most 64 KiB of memory may be locked (ulimit -l)"
    for line, name in zip(refused, ("nixl", "mooncake"), strict=True):
        assert line.startswith(f"refused: backend '{name}'")
        assert limit in line
    assert error == f"error: memlock {limit}"
