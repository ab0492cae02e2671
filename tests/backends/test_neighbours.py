"""What counts as a proof that a process's kernels have ended. The processes are real; the driver's list is the test's.

`tests/gpu/test_nvlink_fence.py` has the same with the real driver.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from disagg.backends.nvlink import neighbours
from disagg.backends.nvlink.neighbours import Neighbours
from disagg.machine.processes import ProcessWatch

GPU = bytes(range(16))
CODE = """
from disagg.machine.processes import IdentitySocket

identity = IdentitySocket()
print(identity.name, flush=True)
input()
"""


@dataclasses.dataclass
class Driver:
    """What the driver lists on `GPU`."""

    listed: set[int] | None

    def processes(self, gpu: bytes) -> frozenset[int] | None:
        assert gpu == GPU
        return None if self.listed is None else frozenset(self.listed)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(set())
    monkeypatch.setattr(neighbours, "compute_processes", driver.processes)
    return driver


@dataclasses.dataclass
class Owner:
    """A process that the kernel attests."""

    running: subprocess.Popen[bytes]
    process: ProcessWatch

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()


@contextmanager
def owner() -> Iterator[Owner]:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        process = ProcessWatch.attest(running.stdout.readline().decode().strip())
        assert process is not None
        yield Owner(running, process)
        running.kill()
        process.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_quiet_once_the_process_has_ended_and_the_driver_does_not_list_it(driver: Driver, stack: ExitStack) -> None:
    victim, known = stack.enter_context(owner()), Neighbours()
    pid = victim.process.pid
    driver.listed = {1, pid}
    neighbour = known.meet(victim.process, GPU)
    assert neighbour is not None
    assert neighbour.is_provable
    driver.listed = {1}
    assert not neighbour.is_quiet()  # it lives
    victim.running.send_signal(signal.SIGSTOP)
    assert not neighbour.is_quiet()
    victim.kill()
    for listed in ({1, pid}, None):  # a child holds its descriptors; the driver cannot tell
        driver.listed = listed
        assert not neighbour.is_quiet()
        assert not known.is_quiet_after(victim.process)
        assert not known.are_quiet({pid})
    driver.listed = {1}
    assert neighbour.is_quiet()
    assert known.is_quiet_after(victim.process)
    assert known.are_quiet({pid})
    assert not known.are_quiet({pid, 1})
    driver.listed = {1, pid}  # a later process with the same number
    assert neighbour.is_quiet()


def test_a_process_that_the_driver_never_listed_is_never_quiet(driver: Driver, stack: ExitStack) -> None:
    """For example in a container that sees no processes of others, or with MPS or without NVML."""
    victim, known = stack.enter_context(owner()), Neighbours()
    met = []
    for listed in (set[int](), None):
        driver.listed = listed
        met.append(known.meet(victim.process, GPU))
    victim.kill()
    driver.listed = set()
    for neighbour in met:
        assert neighbour is not None
        assert not neighbour.is_provable
        assert not neighbour.is_quiet()
    assert not known.is_quiet_after(victim.process)


def test_a_process_that_the_kernel_does_not_attest_is_never_quiet(driver: Driver, stack: ExitStack) -> None:
    """Nothing here is proved quiet any more once such a process may have mapped memory."""
    victim, known = stack.enter_context(owner()), Neighbours()
    driver.listed = {victim.process.pid}
    assert known.are_quiet(set())
    assert known.meet(None, GPU) is None
    assert not known.are_quiet(set())
    assert not known.is_quiet_after(victim.process)
    true = known.meet(victim.process, GPU)
    victim.kill()
    driver.listed = set()
    assert true is not None
    assert true.is_quiet()
    assert known.is_quiet_after(victim.process)
    assert not known.are_quiet(set())


def test_a_process_is_met_once(driver: Driver, stack: ExitStack) -> None:
    victim, known = stack.enter_context(owner()), Neighbours()
    driver.listed = {victim.process.pid}
    first = known.meet(victim.process, GPU)
    assert known.meet(victim.process, GPU) is first
