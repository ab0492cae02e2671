"""What counts as a proof that a process's kernels have ended. The processes are real; the driver's list is the test's.

`tests/gpu/test_nvlink_fence.py` has the same with the real driver.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from disagg.backends.nvlink import neighbours
from disagg.backends.nvlink.holders import hold
from disagg.backends.nvlink.neighbours import Neighbours, attest
from disagg.machine.processes import ProcessIdentity

GPU = bytes(range(16))
CODE = """
import msgspec
from disagg.backends.nvlink.holders import Mappings
from disagg.machine.processes import ProcessIdentity

mappings = Mappings()
print(mappings.address, msgspec.json.encode(ProcessIdentity.own()).decode(), flush=True)
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
    """A process with a `Mappings`."""

    running: subprocess.Popen[bytes]
    address: str
    identity: ProcessIdentity

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()


@contextmanager
def owner() -> Iterator[Owner]:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        address, identity = running.stdout.readline().split(b" ", 1)
        yield Owner(running, address.decode(), msgspec.json.decode(identity, type=ProcessIdentity))
        running.kill()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def held_by(owner: Owner, stack: ExitStack) -> socket.socket:
    connection = hold(owner.address)
    assert connection is not None
    return stack.enter_context(connection)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_quiet_once_the_process_has_ended_and_the_driver_does_not_list_it(driver: Driver, stack: ExitStack) -> None:
    victim, known = stack.enter_context(owner()), Neighbours()
    pid = victim.identity.pid
    driver.listed = {1, pid}
    neighbour = known.meet(victim.identity, GPU, held_by(victim, stack))
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
        assert not known.is_quiet_after(victim.identity)
        assert not known.are_quiet({pid})
    driver.listed = {1}
    assert neighbour.is_quiet()
    assert known.is_quiet_after(victim.identity)
    assert known.are_quiet({pid})
    assert not known.are_quiet({pid, 1})
    driver.listed = {1, pid}  # a later process with the same number
    known.close()
    assert neighbour.is_quiet()


def test_a_process_that_the_driver_never_listed_is_never_quiet(driver: Driver, stack: ExitStack) -> None:
    """For example in a container that sees no processes of others, or with MPS or without NVML."""
    victim, known = stack.enter_context(owner()), Neighbours()
    met = []
    for listed in (set[int](), None):
        driver.listed = listed
        met.append(known.meet(victim.identity, GPU, held_by(victim, stack)))
    victim.kill()
    driver.listed = set()
    for neighbour in met:
        assert neighbour is not None
        assert not neighbour.is_provable
        assert not neighbour.is_quiet()
    assert not known.is_quiet_after(victim.identity)


def test_a_process_that_the_kernel_does_not_attest_is_never_quiet(driver: Driver, stack: ExitStack) -> None:
    """Its socket cannot be reached, or belongs to another process. The proof of the true one stays."""
    victim, liar, known = stack.enter_context(owner()), stack.enter_context(owner()), Neighbours()
    driver.listed = {victim.identity.pid, liar.identity.pid}
    lies = [known.meet(victim.identity, GPU, None), known.meet(victim.identity, GPU, held_by(liar, stack))]
    assert not known.is_quiet_after(victim.identity)
    true = known.meet(victim.identity, GPU, held_by(victim, stack))
    lies.append(known.meet(victim.identity, GPU, held_by(liar, stack)))
    victim.kill()
    driver.listed = {liar.identity.pid}
    assert true is not None
    assert true.is_quiet()
    assert known.is_quiet_after(victim.identity)
    for lie in lies:
        assert lie is not None
        assert not lie.is_quiet()


def test_a_process_is_met_once(driver: Driver, stack: ExitStack) -> None:
    victim, known = stack.enter_context(owner()), Neighbours()
    driver.listed = {victim.identity.pid}
    before = num_descriptors()
    first = known.meet(victim.identity, GPU, connection := held_by(victim, stack))
    assert known.meet(victim.identity, GPU, connection) is first
    connection.close()
    assert num_descriptors() == before + 1
    known.close()
    assert num_descriptors() == before


def test_processes_of_other_machines_and_processes_never_met(driver: Driver) -> None:
    known, own = Neighbours(), ProcessIdentity.own()
    assert known.meet(msgspec.structs.replace(own, host="another/pid:[1]"), GPU, None) is None
    assert not known.is_quiet_after(own)
    assert known.are_quiet(set())
    assert not known.are_quiet({own.pid})


def test_a_kernel_without_pidfds_of_sockets(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_SO_PEERPIDFD", 9999)
    victim = stack.enter_context(owner())
    connection = held_by(victim, stack)
    watch = attest(connection, victim.identity.pid)
    assert watch is not None
    assert not watch.has_ended()
    assert attest(connection, os.getpid()) is None
    victim.kill()
    assert watch.has_ended()
    watch.close()
    watch.close()
    assert watch.has_ended()
    assert attest(connection, victim.identity.pid) is None
