"""Processes that have ended, and what they had sent before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from disagg.machine import processes, tcp
from disagg.machine.processes import IdentitySocket, ProcessWatch, copy_refusal, machine_identity
from disagg.machine.tcp import EngineSockets

FILL = """
for connection in connections:
    connection.setblocking(False)
    try:
        while True:
            connection.send(bytes(65536))
    except BlockingIOError:
        pass
identity = IdentitySocket()
print(identity.name, flush=True)
time.sleep(600)
"""
IMPORTS = """
import sys, time, socket
from disagg.machine.processes import IdentitySocket
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


def watch_from(lines: IO[str], stack: ExitStack) -> ProcessWatch:
    watch = ProcessWatch.attest(lines.readline().strip())
    assert watch is not None
    stack.callback(watch.close)
    return watch


def test_a_process_that_executes_another_program_has_left_but_not_ended(stack: ExitStack) -> None:
    """It keeps its number, its pidfd and its sockets, the identity socket among them. Its name may be cut in a character."""
    code = f"""{IMPORTS}
import os
open("/proc/self/comm", "wb").write("disagg-推理服务器".encode()[:15])
identity = IdentitySocket()
print(identity.name, flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", "import time; print('executed', flush=True); time.sleep(600)"])
"""
    process = stack.enter_context(
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    watch = watch_from(process.stdout, stack)
    assert not watch.has_left()
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "executed\n"
    assert watch.has_left()
    assert not watch.has_ended()
    assert not watch.is_gone(), "the new program holds the identity socket, and may hold others"


LEAVES = f"""{IMPORTS}
import os
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
listening = socket.create_server(("127.0.0.1", 0))
for each in (*connections, listening):
    each.set_inheritable(sys.argv[2] == "inherited")
connections[0].setblocking(False)
try:
    while True:
        connections[0].send(bytes(65536))
except BlockingIOError:
    pass
identity = IdentitySocket()
print(identity.name, flush=True)
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", f'''
import socket, time
connection = socket.create_connection(("127.0.0.1", {{sys.argv[1]}}))
print("executed", flush=True)
time.sleep(600)
'''])
"""


@pytest.mark.parametrize("inheritance", ["inherited", "closed"])
def test_a_program_that_executes_another_is_quiet_once_all_that_it_sent_was_read(inheritance: str, stack: ExitStack) -> None:
    """The new program holds the old connections, and the one that nobody has accepted. Its own ones go on."""
    listening = listener(stack)
    port = listening.getsockname()[1]
    unrelated = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    unrelated.bind(b"\0\xff" + os.urandom(8).hex().encode())  # names are bytes
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(port), inheritance], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    )
    stack.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    watch = watch_from(process.stdout, stack)
    their_port = int(process.stdout.readline())
    engine = EngineSockets(accepted={port}, opened={their_port})
    waiting = stack.enter_context(socket.create_connection(("127.0.0.1", their_port)))
    old = [stack.enter_context(listening.accept()[0]) for _ in range(2)]
    assert not watch.is_quiet(engine)
    waiting.send(b"nothing was shut down")
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert not watch.is_quiet(EngineSockets())
    while not watch.has_left():
        time.sleep(0.001)
    assert not watch.is_quiet(engine)
    assert process.stdout.readline() == "executed\n"
    new = stack.enter_context(listening.accept()[0])
    waiting.close()
    if inheritance == "inherited":  # the engine here connects anew to one that it does not know to be gone
        late = stack.enter_context(socket.create_connection(("127.0.0.1", their_port)))
        assert not watch.is_quiet(engine)
        assert late.recv(1) == b""
        late.close()
    for each in old:
        with suppress(ConnectionResetError):
            while each.recv(1 << 20):
                assert not watch.is_quiet(engine)
        assert not watch.is_quiet(engine)
        each.close()
    assert watch.is_quiet(engine)
    assert not watch.is_quiet(EngineSockets(opened=())), "not without the engine's ports"
    new.send(b"this connection goes on")
    new.setblocking(False)
    with pytest.raises(BlockingIOError):
        new.recv(1)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_a_dead_process_is_quiet_once_all_that_it_sent_was_read(
    family: socket.AddressFamily, host: str, stack: ExitStack
) -> None:
    """Not before its end was read and the socket closed; and what still waits to be accepted counts as well."""
    listening = listener(stack, family, host)
    process, lines = start(stack, CONNECTS, str(listening.getsockname()[1]))
    identity = watch_from(lines, stack)
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
            assert not identity.is_quiet(EngineSockets(opened=()))
        assert not identity.is_quiet()
        connection.close()
    assert identity.is_quiet()


def test_a_connection_that_this_process_made_counts_unless_told_otherwise(stack: ExitStack) -> None:
    process, lines = start(stack, ACCEPTS)
    made = stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
    identity = watch_from(lines, stack)
    listening = listener(stack)
    process.kill()
    process.wait()
    assert identity.is_quiet(EngineSockets(opened=()))
    assert not identity.is_quiet()
    while made.recv(1 << 20):
        pass
    made.close()
    assert identity.is_quiet()
    listening.close()


@pytest.mark.parametrize("accepts", [False, True])
def test_what_a_dead_process_sent_counts_where_its_end_was_a_reset(accepts: bool, stack: ExitStack) -> None:
    """It had bytes to read. The connection is in no table any more, while what it has sent can still be read."""
    if accepts:
        process, lines = start(stack, ACCEPTS)
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
        other = None
    else:
        listening = listener(stack)
        process, lines = start(stack, CONNECTS, str(listening.getsockname()[1]))
        connection = stack.enter_context(listening.accept()[0])
        other = stack.enter_context(listening.accept()[0])
    identity = watch_from(lines, stack)
    connection.send(b"never read")
    process.kill()
    process.wait()
    if other is not None:
        while other.recv(1 << 20):
            pass
        other.close()
    inode = os.fstat(connection.fileno()).st_ino
    deadline = time.monotonic() + 60
    while any(row.inode == str(inode) for row in tcp.tcp_sockets()):  # until the reset has arrived
        assert time.monotonic() < deadline
        assert not identity.is_quiet()
    assert not identity.is_quiet()
    assert identity.is_quiet(EngineSockets(opened=())) == accepts
    num_read = 0
    with suppress(ConnectionResetError):
        while True:
            num_read += len(connection.recv(1 << 20))
            assert not identity.is_quiet()
    assert num_read
    assert not identity.is_quiet()
    connection.close()
    assert identity.is_quiet()


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("accepts", [False, True])
def test_only_sockets_of_the_engine_count(accepts: bool, resets: bool, stack: ExitStack) -> None:
    """`accepts`: the process has accepted what this one has opened. Bytes wait in the socket, whichever it is."""
    if accepts:
        process, lines = start(stack, ACCEPTS)
        port = int(lines.readline())
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        other = None
    else:
        listening = listener(stack)
        port = listening.getsockname()[1]
        process, lines = start(stack, CONNECTS, str(port))
        connection = stack.enter_context(listening.accept()[0])
        other = stack.enter_context(listening.accept()[0])
    identity = watch_from(lines, stack)
    if resets:
        connection.send(b"never read")
    process.kill()
    process.wait()
    if other is not None:
        while other.recv(1 << 20):
            pass
        other.close()
    inode = os.fstat(connection.fileno()).st_ino
    deadline = time.monotonic() + 60
    while resets and any(row.inode == str(inode) for row in tcp.tcp_sockets()):
        assert time.monotonic() < deadline
    engine = EngineSockets((), {port}) if accepts else EngineSockets({port}, ())
    assert not identity.is_quiet(engine)
    assert not identity.is_quiet(EngineSockets((), None))
    assert identity.is_quiet(EngineSockets({port}, ()) if accepts else EngineSockets((), {port}))
    with suppress(ConnectionResetError):
        while connection.recv(1 << 20):
            assert not identity.is_quiet(engine)
    connection.close()
    assert identity.is_quiet(engine)


def test_sockets_that_nothing_has_arrived_at_hold_up_no_proof(stack: ExitStack) -> None:
    """They never had a connection, or were refused one, or are of another kind."""
    process, lines = start(stack, f"{IMPORTS}\nconnections = []{FILL}")
    watch = watch_from(lines, stack)
    kinds = [socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_DGRAM]
    _, refused, _ = [stack.enter_context(socket.socket(socket.AF_INET, kind)) for kind in kinds]
    with pytest.raises(ConnectionRefusedError):
        refused.connect(("127.0.0.1", 1))
    for each in socket.socketpair():
        stack.enter_context(each)
    process.kill()
    process.wait()
    assert watch.is_quiet()


def test_nobody_is_attested_where_nobody_listens(stack: ExitStack) -> None:
    assert ProcessWatch.attest("no process has this name") is None
    assert ProcessWatch.attest("zero\0byte" * 100) is None
    identity = IdentitySocket()
    with pytest.raises(OSError, match="in use"):
        IdentitySocket(identity.name)
    watch = ProcessWatch.attest(identity.name)
    assert watch is not None
    assert watch.pid == os.getpid()
    assert not watch.has_ended()
    identity.close()
    assert not watch.has_ended(), "the socket is closed, the process lives"
    assert not watch.is_gone()
    watch.close()
    with pytest.raises(ValueError, match="closed"):
        watch.fileno()


def test_a_watch_tells_of_an_end_and_of_nothing_else(stack: ExitStack) -> None:
    process, lines = start(stack, ACCEPTS)
    stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
    watch = watch_from(lines, stack)
    assert watch.pid == process.pid
    process.send_signal(signal.SIGSTOP)
    assert not watch.has_ended()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert watch.has_ended()  # a zombie by now
    process.wait()
    watch.close()
    watch.close()
    assert watch.has_ended()
    assert machine_identity()


def without_peerpidfd(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(processes, "_SO_PEERPIDFD", 9999)


def test_without_peer_pidfds_a_process_is_opened_by_its_attested_id(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """Linux before 6.5."""
    without_peerpidfd(monkeypatch)
    process, lines = start(stack, ACCEPTS)
    stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
    watch = watch_from(lines, stack)
    assert not watch.has_ended()
    process.kill()
    process.wait()
    assert watch.has_ended()


def test_an_id_that_may_be_another_process_by_now_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends between the two system calls, and its number is given away."""
    without_peerpidfd(monkeypatch)
    identity = IdentitySocket()
    real = os.pidfd_open

    def late(pid: int) -> int:
        identity.close()
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", late)
    assert ProcessWatch.attest(identity.name) is None


def test_without_pidfds_no_process_is_attested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older container profiles refuse the call. Requests then go by the network engine, and nothing is proved."""
    without_peerpidfd(monkeypatch)

    def refuse(_: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    identity = IdentitySocket()
    assert ProcessWatch.attest(identity.name) is None
    identity.close()


FORKS = """
import os, sys, time
from disagg.machine.processes import IdentitySocket
identity = IdentitySocket()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(identity.name, flush=True)
time.sleep(600)
"""


def test_a_process_is_not_gone_while_a_child_holds_what_it_held(stack: ExitStack) -> None:
    """The child of a fork holds the connections too, so their far ends have an owner."""
    command = [sys.executable, "-c", FORKS]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdin is not None
    watch = watch_from(process.stdout, stack)
    process.kill()
    process.wait()
    assert watch.has_ended()
    assert not watch.is_gone()
    assert not watch.is_quiet()
    process.stdin.close()  # the child ends
    deadline = time.monotonic() + 60
    while not watch.is_gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch.is_quiet()


EXECUTES = """
import subprocess, time
from disagg.machine.processes import IdentitySocket
identity = IdentitySocket()
identity.prune()
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(identity.name, child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_is_not_gone_while_a_program_that_it_started_holds_what_it_held(stack: ExitStack) -> None:
    """Engines' sockets are inherited by programs that are started with open descriptors."""
    process, lines = start(stack, EXECUTES)
    name, child = lines.readline().split()
    watch = ProcessWatch.attest(name)
    assert watch is not None
    stack.callback(watch.close)
    process.kill()
    process.wait()
    assert watch.has_ended()
    assert not watch.is_gone()
    os.kill(int(child), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not watch.is_gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_full_backlog_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that have ended stay in a backlog, and any process of the host may make them. Watches need none."""
    monkeypatch.setattr(processes, "_BACKLOG", 8)
    identity = IdentitySocket()
    watches = []
    while (watch := ProcessWatch.attest(identity.name)) is not None:
        watches.append(watch)
    assert 0 < len(watches) < 20
    before = num_descriptors()
    identity.prune()
    assert num_descriptors() == before
    again = ProcessWatch.attest(identity.name)
    assert again is not None
    for watch in (*watches, again):
        assert processes._is_held(watch._held)
    identity.close()
    for watch in (*watches, again):
        assert not processes._is_held(watch._held)
        assert not processes._is_held(watch._held), "the second answer is the same"
        watch.close()


def test_a_backlog_that_others_fill_again_meanwhile_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BACKLOG", 8)
    identity = IdentitySocket()
    connections: list[socket.socket] = []

    class Flooded:
        """There is always one more."""

        def accept(self) -> tuple[socket.socket, str]:
            connections.append(socket.socket(socket.AF_UNIX))
            return connections[-1], ""

    with monkeypatch.context() as patch:
        patch.setattr(identity, "_socket", Flooded())
        identity.prune()
    assert len(connections) == 8
    assert all(each.fileno() < 0 for each in connections)
    identity.close()


def test_a_socket_that_is_asked_often_is_held() -> None:
    """Nobody reads it, so it is full at some time."""
    identity = IdentitySocket()
    watch = ProcessWatch.attest(identity.name)
    assert watch is not None
    assert all(processes._is_held(watch._held) for _ in range(2000))
    identity.close()
    assert not processes._is_held(watch._held)
    watch.close()


def test_tables_that_cannot_be_read_prove_nothing(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    """`/proc` is missing or hidden, or no descriptor is left."""
    process, lines = start(stack, ACCEPTS)
    stack.enter_context(socket.create_connection(("127.0.0.1", int(lines.readline()))))
    watch = watch_from(lines, stack)
    process.kill()
    process.wait()
    monkeypatch.setattr(processes, "_PROC", Path("/nonexistent"))
    assert watch.is_gone()
    assert not watch.is_quiet()
    assert machine_identity() == ""


@pytest.mark.parametrize(
    ("host", "expected"), [("0100007F", True), ("00000000000000000000000001000000", True), ("010200C0", False)]
)
def test_addresses_of_this_host_are_told_from_others(host: str, expected: bool) -> None:
    """As `/proc/net/tcp` writes 127.0.0.1, ::1 and 192.0.2.1."""
    assert sys.byteorder == "little"
    assert processes._is_local(host) == expected


def test_a_refused_copy_between_processes_has_the_reason() -> None:
    memory = np.zeros(1, np.uint8)
    assert copy_refusal(os.getpid(), memory.ctypes.data) is None
    assert "Bad address" in str(copy_refusal(os.getpid(), 1))
    assert "no process id" in str(copy_refusal(2**40, memory.ctypes.data))
