"""The kernel attests the process of a peer, under the name that the peer has proved, and under no other."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.machine.processes import ProcessWatch
from disagg.runtime.peer_processes import PeerProcesses, socket_name

EPOCH = secrets.randbits(62)
"""Names of identity sockets count for the whole host: other tests may run at the same time."""

LISTENS = """
import sys, time
from disagg.runtime.peer_processes import PeerProcesses
processes = PeerProcesses("other", 0, int(sys.argv[1]))
print("listens", flush=True)
time.sleep(600)
"""


def test_a_process_is_found_under_its_own_name_only() -> None:
    """A peer that passes on what another process told it gets that process's memory from nobody."""
    with contextlib.closing(PeerProcesses("victim", 0, EPOCH)), contextlib.closing(PeerProcesses("me", 0, EPOCH)) as mine:
        watch = mine.attest("victim", 0, EPOCH)
        assert watch is not None
        assert watch.pid == os.getpid()
        assert mine.attest("victim", 0, EPOCH) is watch
        for other in (("hostile", 0, EPOCH), ("victim", 1, EPOCH), ("victim", 0, EPOCH + 1)):
            assert mine.attest(*other) is None


def test_nothing_of_a_clone_of_this_machine_is_attested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone has the same boot id. There, the process has the number of one that lives here, or of none. It is not asked for
    by its number: only what listens under its name, on this host, is it.
    """
    asked: list[int] = []
    monkeypatch.setattr(os, "pidfd_open", asked.append)
    monkeypatch.setattr(os, "kill", lambda pid, _: asked.append(pid))
    with contextlib.closing(PeerProcesses("me", 0, EPOCH)) as mine:
        assert mine.attest("clone", 0, EPOCH) is None
        mine.prune()
    assert asked == []


def test_processes_that_live_are_not_looked_at_for_each_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting to one more rank of this host costs the same, however many there are."""
    num_looks = 0
    is_gone = ProcessWatch.is_gone

    def count(watch: ProcessWatch) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_gone(watch)

    monkeypatch.setattr(ProcessWatch, "is_gone", count)
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(contextlib.closing(PeerProcesses("me", 0, EPOCH)))
        watches = []
        for rank in range(4):
            stack.enter_context(contextlib.closing(PeerProcesses("peer", rank, EPOCH)))
            watches.append(mine.attest("peer", rank, EPOCH))
        assert None not in watches
        assert num_looks == 0


def test_a_peer_that_names_one_epoch_after_the_other_costs_no_descriptors() -> None:
    with contextlib.closing(PeerProcesses("me", 0, EPOCH)) as mine:
        with contextlib.closing(PeerProcesses("peer", 0, 1)):
            held = mine.attest("peer", 0, 1)
        before = len([*Path("/proc/self/fd").iterdir()])
        for epoch in range(2, 20):
            with contextlib.closing(PeerProcesses("peer", 0, epoch)):
                assert mine.attest("peer", 0, epoch) is not None
        assert len([*Path("/proc/self/fd").iterdir()]) == before
        assert held is not None
        assert held.fileno() >= 0


def test_names_differ_for_all_parts_of_an_identity() -> None:
    names = {socket_name(*each) for each in (("a", 1, 2), ("a", 12, 0), ("a\x001", 2, 0), ("a", 1, 20), ("a1", 2, 0))}
    assert len(names) == 5


def test_watches_end_with_their_owner() -> None:
    mine, peer = PeerProcesses("me", 0, EPOCH), PeerProcesses("peer", 0, EPOCH)
    watch = mine.attest("peer", 0, EPOCH)
    assert watch is not None
    peer.close()
    mine.close()
    with pytest.raises(ValueError, match="closed"):
        watch.fileno()


def test_a_name_that_is_taken_is_said_and_costs_the_proof_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with contextlib.closing(PeerProcesses("me", 0, EPOCH)), contextlib.closing(PeerProcesses("me", 0, EPOCH)):
        assert "peers of this host cannot attest this process" in caplog.text


def test_an_end_of_any_process_is_reported_once() -> None:
    with contextlib.closing(PeerProcesses("me", 0, EPOCH)) as mine, contextlib.closing(PeerProcesses("here", 0, EPOCH)):
        assert mine.attest("here", 0, EPOCH) is not None
        process = subprocess.Popen([sys.executable, "-c", LISTENS, str(EPOCH)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            watch = mine.attest("other", 0, EPOCH)
            assert watch is not None
            assert not mine.have_ended()
            process.kill()
            process.wait()
        assert watch.has_ended()
        assert mine.have_ended()
        assert not mine.have_ended()
        assert mine.attest("here", 0, EPOCH) is not None
        with pytest.raises(ValueError, match="closed"):  # it was forgotten
            watch.fileno()
    assert not mine.have_ended()
