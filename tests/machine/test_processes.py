"""Processes that have ended, and what they had sent before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO

import msgspec
import numpy as np
import pytest

from disagg.machine.processes import ProcessIdentity, ProcessWatch, copy_refusal

FILL = """
for connection in connections:
    connection.setblocking(False)
    try:
        while True:
            connection.send(bytes(65536))
    except BlockingIOError:
        pass
print(msgspec.json.encode(ProcessIdentity.own()).decode(), flush=True)
time.sleep(600)
"""
IMPORTS = """
import sys, time, socket, msgspec
from disagg.machine.processes import ProcessIdentity
"""
CONNECTS = f"""{IMPORTS}
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
{FILL}"""
ACCEPTS = f"""{IMPORTS}
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
connections = [listening.accept()[0]]
{FILL}"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(stack: ExitStack, family: socket.AddressFamily = socket.AF_INET, host: str = "127.0.0.1") -> socket.socket:
    found = stack.enter_context(socket.socket(family))
    if family == socket.AF_INET6:
        found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    found.bind((host, 0))
    found.listen()
    return found


def start(stack: ExitStack, code: str, *arguments: str) -> tuple[subprocess.Popen[str], IO[str]]:
    process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout


def identity_from(lines: IO[str]) -> ProcessIdentity:
    return msgspec.json.decode(lines.readline(), type=ProcessIdentity)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_a_dead_process_is_quiet_once_all_that_it_sent_was_read(
    family: socket.AddressFamily, host: str, stack: ExitStack
) -> None:
    """Not before its end was read and the socket closed; and what still waits to be accepted counts as well."""
    listening = listener(stack, family, host)
    process, lines = start(stack, CONNECTS, str(listening.getsockname()[1]))
    identity = identity_from(lines)
    accepted = stack.enter_context(listening.accept()[0])
    assert not identity.has_ended()
    assert not identity.is_quiet()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity.has_ended()  # a zombie by now
    process.wait()
    assert identity.has_ended()
    for first in (True, False):
        connection = accepted if first else stack.enter_context(listening.accept()[0])
        while connection.recv(1 << 20):
            assert not identity.is_quiet()
            assert not identity.is_quiet(by_accepted=True)
        assert not identity.is_quiet()
        connection.close()
    assert identity.is_quiet()


def test_a_connection_that_this_process_made_counts_unless_told_otherwise(stack: ExitStack) -> None:
    process, lines = start(stack, ACCEPTS)
    made = stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
    identity = identity_from(lines)
    listening = listener(stack)
    process.kill()
    process.wait()
    assert identity.is_quiet(by_accepted=True)
    assert not identity.is_quiet()
    while made.recv(1 << 20):
        pass
    made.close()
    assert identity.is_quiet()
    listening.close()


def test_a_process_that_cannot_be_seen_from_here_has_not_provably_ended() -> None:
    own = ProcessIdentity.own()
    assert own.pid == os.getpid()
    assert not own.has_ended()
    gone = msgspec.structs.replace(own, started=own.started + 1)
    assert gone.has_ended()
    assert not msgspec.structs.replace(gone, host="another").has_ended()
    assert not msgspec.structs.replace(gone, network="another").is_quiet()
    assert not msgspec.structs.replace(gone, pid=0).has_ended()
    assert not msgspec.structs.replace(gone, pid=-1).has_ended()


def test_a_watch_tells_of_an_end_and_of_nothing_else(stack: ExitStack) -> None:
    process, lines = start(stack, ACCEPTS)
    stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
    identity = identity_from(lines)
    own, watch = ProcessWatch(ProcessIdentity.own()), ProcessWatch(identity)
    elsewhere = ProcessWatch(msgspec.structs.replace(identity, host="another/pid:[1]"))
    another = ProcessWatch(msgspec.structs.replace(identity, started=identity.started + 1))
    assert not any(each.has_ended() for each in (own, watch, elsewhere))
    assert another.has_ended(), "another process has that id now"
    process.kill()
    process.wait()
    assert watch.has_ended()
    assert ProcessWatch(identity).has_ended()
    assert not elsewhere.has_ended()
    assert not own.has_ended()
    for each in (own, watch, watch):
        each.close()
    assert watch.has_ended()
    assert identity.machine == ProcessIdentity.own().machine != "another"


def test_a_refused_copy_between_processes_has_the_reason() -> None:
    memory = np.zeros(1, np.uint8)
    assert copy_refusal(os.getpid(), memory.ctypes.data) is None
    assert "Bad address" in str(copy_refusal(os.getpid(), 1))
    assert "no process id" in str(copy_refusal(2**40, memory.ctypes.data))
