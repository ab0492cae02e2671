"""Which process is at the other end, whether it has ended, whether bytes that it sent may still arrive, and copies from it.

**Who.** A process listens on an `IdentitySocket`, and the kernel tells those who connect who listens (`SO_PEERPIDFD`, or
`SO_PEERCRED` and `pidfd_open`). Nothing that the peer claims is believed. The socket's name is bound to the identity that
the peer has proved on its control channel, so a peer cannot pass on another process's socket.

**Ended.** Only the pidfd tells that. It was taken while the process lived, so it never means a later process with the same
id. What this process cannot see has not ended.

**Left.** A program that executes another (`exec`) keeps its process and sockets, but not its threads and memory; `/proc`
then shows another stack, though not to other users. The engine's connections would stay open, so this process shuts its own
ends down.

**Quiet.** Bytes of a killed process wait in socket buffers and may be applied to memory long after. The kernel ends its
connections behind the last byte, or resets them if it had bytes to read, and an engine closes its socket at that end. So
nothing more can arrive once no socket of the engine here was reset or has a far end without an owner. A child may hold the
same connections; then it also holds the datagram socket of the `IdentitySocket`.

Only the engine's sockets count, because only they lead to memory: those accepted on a port on which the engine listens, and
those opened to a port of the peer's engine. Others may stay half closed for hours, such as an HTTP client's. Where the ports
are unknown, every socket counts. A peer that lies about its ports gains nothing: it may write to the registered memory
anyway.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from disagg.core import _native
from disagg.core.thread_log import ThreadLog
from disagg.machine.tcp import (
    ANY_SOCKET,
    CLOSE_WAIT,
    ESTABLISHED,
    LISTEN,
    SYN_RECV,
    EngineSockets,
    TcpSocket,
    duplicate,
    port_of,
    sockets_of,
    tcp_sockets,
)

logger = ThreadLog(__name__)

_PROC = Path("/proc")
_SO_PEERPIDFD = 77
"""Linux 6.5. Python's `socket` does not name it."""
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 4096
_NOT_ACCEPTED = (SYN_RECV, ESTABLISHED, CLOSE_WAIT)
_NO_OWNER = "0"
"""Not accepted yet, or closed and not finished."""
_STACK_FIELD = 25
"""In `/proc/PID/stat`, counted behind the program's name: see proc_pid_stat(5)."""
_TCP_INFO = struct.Struct("=B127xQ")
"""Of `struct tcp_info`: the state, and `tcpi_bytes_received` (Linux 4.1)."""
_SO_PEERNAME = 28
"""Unlike `getpeername`, it works after a reset."""
_FAMILY_AND_PORT = struct.Struct("!HH")
_CLOSED = 7
"""That state of a socket which is in no table."""


class IdentitySocket:
    """Two abstract Unix sockets of this process. Through one the kernel tells others in this network namespace who listens.
    Every child inherits the other, as it may inherit engines' sockets, so it exists until nobody holds what the process
    held.

    Raises `OSError` if another process has a socket of that name.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"disagg-process-{secrets.token_hex(16)}"
        self._held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._held.bind(_held_name(self.name))  # first: whoever listens has both
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(_BACKLOG)
            self._held.set_inheritable(True)
        except OSError:
            self.close()
            raise

    def prune(self) -> None:
        """Empty the backlog, which any process of this host can fill, and fill again meanwhile. Call it now and then. Those
        who connected have learned all.
        """
        for _ in range(_BACKLOG):
            try:
                found, _ = self._socket.accept()
            except OSError:  # none is left, or no descriptor
                return
            found.close()

    def close(self) -> None:
        self._socket.close()
        self._held.close()


def _held_name(name: str) -> str:
    return f"\0{name}-held"


class ProcessWatch:
    """An attested process. `pid` is 0 if it is not visible in this process's namespace. The watch owns its pidfd and the
    socket `held`, which is connected to the datagram socket of its identity. Thread-safe.
    """

    def __init__(self, pid: int, descriptor: int, held: socket.socket) -> None:
        self.pid = pid
        self._descriptor: int | None = descriptor
        self._held = held
        self._lock = threading.RLock()
        self._ended = self._gone = False
        self._stack = _stack_of(pid)
        self._inherited: set[tuple[str, str]] | None = None
        self._listeners: frozenset[str] = frozenset()

    @classmethod
    def attest(cls, name: str) -> ProcessWatch | None:
        """The process that listens on the identity socket `name`. `None` if it cannot be reached, or if the kernel has no
        pidfds.
        """
        held: socket.socket | None = None
        try:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as connection:
                connection.connect(f"\0{name}")
                held.connect(_held_name(name))
                pid = pid_of(connection)
                return cls(pid, _pidfd_of(connection, pid, held), held)
        except (OSError, ValueError) as error:  # also where no descriptor is left
            logger.debug("no process is attested at %r: %s", name, error)
            if held is not None:
                held.close()
            return None

    def fileno(self) -> int:
        """The pidfd, readable once the process has ended. Raises `ValueError` after `close`."""
        if self._descriptor is None:
            raise ValueError("the watch was closed")
        return self._descriptor

    def has_ended(self) -> bool:
        """Whether it is proved that all threads have ended. `close` keeps the last answer."""
        with self._lock:
            if not self._ended and self._descriptor is not None:
                self._ended = _native.is_readable(self._descriptor)
            return self._ended

    def has_left(self) -> bool:
        """Whether the process has ended, or executes another program."""
        return self.has_ended() or (self._stack is not None and _stack_of(self.pid) not in (None, self._stack))

    def is_gone(self) -> bool:
        """Whether it has ended, and no child of it holds what it held."""
        with self._lock:
            if not self._gone and self.has_ended() and self._held.fileno() >= 0:
                self._gone = not _is_held(self._held)
            return self._gone

    def is_quiet(self, sockets: EngineSockets = ANY_SOCKET) -> bool:
        """Whether it is gone, or executes another program, and nothing that it sent can arrive at `sockets` here. `False`
        where the kernel's tables cannot be read.
        """
        try:
            if self.has_ended():
                return self.is_gone() and not _has_orphans(sockets)
            return self.has_left() and self._is_cut_off(sockets) and not _has_orphans(sockets)
        except OSError as error:
            logger.warning("process %d has ended, but not whether its bytes have arrived: %s", self.pid, error)
            return False

    def _is_cut_off(self, engine: EngineSockets) -> bool:
        """Whether the engine here has closed its connections with a program that executed another one; shuts down those that
        are left. `False` if the engine's ports are unknown, since other connections must not be shut down.
        """
        with self._lock:
            if engine.accepted is None or engine.opened is None:
                return False
            sockets, own = tcp_sockets(), sockets_of("self")
            if self._inherited is None:
                held = sockets_of(self.pid)
                name = os.fsdecode(self._held.getpeername())[1:]
                if _is_held(self._held) and _unix_sockets(name).isdisjoint(held):
                    return False  # a child has the identity's socket, and may have the engine's
                self._inherited = _connected_to(sockets, held)
                self._listeners = frozenset(row.inode for row in sockets if row.state == LISTEN and row.inode in held)
            owners, is_cut = {(row.local, row.remote): row.inode for row in sockets}, True
            listening = {port_of(row.local) for row in sockets if row.inode in self._listeners}
            for row in sockets:
                was_accepted, was_opened = port_of(row.local) in engine.accepted, port_of(row.remote) in engine.opened
                waits = was_accepted and row.inode == _NO_OWNER and row.state in _NOT_ACCEPTED
                is_open = waits or (row.inode in own and (was_accepted or was_opened))
                far = owners.get((row.remote, row.local))
                is_late = was_opened and far == _NO_OWNER and port_of(row.remote) in listening  # nobody accepts there any more
                if is_open and (is_late or (row.local, row.remote) in self._inherited):
                    is_cut = False
                    if row.inode in own:
                        with contextlib.suppress(OSError), duplicate(own[row.inode]) as found:
                            found.shutdown(socket.SHUT_RDWR)
            return is_cut

    def close(self) -> None:
        with self._lock:
            self.is_gone()
            self._held.close()
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # also while the interpreter ends
            self.close()


def pid_of(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket, as the kernel attests it; 0 in another process-id namespace. At the end
    that connected, it is the one that listens, even if another has inherited its socket.
    """
    pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


def _pidfd_of(connection: socket.socket, pid: int, held: socket.socket) -> int:
    """A pidfd of the process at the other end, whose datagram socket `held` is connected to. Raises `OSError` where there is
    none.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # the process has ended
            raise
    descriptor = os.pidfd_open(pid)  # Linux before 6.5; raises for 0, a process that is not visible here
    if not _is_held(held):  # it ended before, so this may be another process with the same id
        os.close(descriptor)
        raise ProcessLookupError(f"process {pid} has ended")
    return descriptor


def _stack_of(pid: int) -> int | None:
    """Where the stack of the process's program starts; `None` if this process may not know."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()  # the kernel may cut the program's name within a character
    except OSError:
        return None
    return int(text.rpartition(b")")[2].split()[_STACK_FIELD]) or None


def _is_held(connected: socket.socket) -> bool:
    """Whether any process holds the datagram socket at the other end. Nobody reads the empty datagrams; the kernel bounds
    their number.
    """
    try:
        connected.send(b"")
    except (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError):
        return False
    except OSError as error:  # full: it is held. `ENOTCONN`: it was refused before
        return error.errno != errno.ENOTCONN
    return True


def copy_refusal(pid: int, address: int) -> str | None:
    """Why this process may not copy from another's memory; `None` if it may. Reads one byte."""
    if not 0 < pid < 2**31:
        return f"{pid} is no process id here"
    byte = np.zeros(1, np.uint8)
    columns = (np.array([value], np.uint64) for value in (byte.ctypes.data, address, 1))
    error = _native.copy_between_processes(pid, *columns, write=False)
    return f"process_vm_readv: {os.strerror(error)}" if error else None


def machine_identity() -> str:
    """Equal for processes of one machine since its last start, in any namespace; clones may share it. Empty if unreadable."""
    with contextlib.suppress(OSError):
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    return ""


def _unix_sockets(name: str) -> set[str]:
    rows = (line.split() for line in (_PROC / "self" / "net" / "unix").read_bytes().splitlines()[1:])  # names may be any bytes
    return {row[6].decode() for row in rows if row[7:] == [os.fsencode(f"@{name}")]}


def _connected_to(sockets: Iterable[TcpSocket], held: Collection[str]) -> set[tuple[str, str]]:
    """Both addresses of each connection whose far end is among the sockets `held`, or waits to be accepted by one of them."""
    rows = {(row.local, row.remote): row.inode for row in sockets}
    listening = {port_of(row.local) for row in sockets if row.state == LISTEN and row.inode in held}
    found = set()
    for row in sockets:
        far = rows.get((row.remote, row.local))
        if far in held or (far == _NO_OWNER and port_of(row.remote) in listening):
            found.add((row.local, row.remote))
    return found


def _has_orphans(engine: EngineSockets) -> bool:
    """Whether bytes may wait in a TCP connection of this process whose far end, on this host, has no owner any more.

    A far end on another host cannot be of a process that is proved to have ended here.
    """
    sockets = tcp_sockets()
    own = sockets_of("self")  # read after the tables: a socket accepted in between has no owner in them
    owners = {(row.local, row.remote): row.inode for row in sockets}
    ports = engine.accepted
    if ports is None:
        ports = {port_of(row.local) for row in sockets if row.state == LISTEN and row.inode in own}
    is_local = functools.cache(_is_local)
    for row in sockets:
        if row.inode == _NO_OWNER and row.state in _NOT_ACCEPTED and port_of(row.local) in ports:
            return True  # the engine has not accepted it yet
        counts = port_of(row.local) in ports or engine.opened is None or port_of(row.remote) in engine.opened
        if row.inode not in own or row.state == LISTEN or not counts:
            continue
        far = owners.get((row.remote, row.local))
        if far == _NO_OWNER or (far is None and is_local(row.remote.rpartition(":")[0])):
            return True
    listed = {row.inode for row in sockets}
    resets = filter(None, (_reset_after_bytes(fd) for inode, fd in own.items() if inode not in listed))
    return any(local in ports or engine.opened is None or remote in engine.opened for local, remote in resets)


def _reset_after_bytes(descriptor: int) -> tuple[int, int] | None:
    """The local and the remote port of a TCP socket that was reset after it had received bytes.

    A process that ends with unread bytes resets its connections. Their other ends leave the kernel's tables at once, even
    with bytes to read.
    """
    try:
        found = duplicate(descriptor)
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ENOTSOCK):  # closed meanwhile
            return None
        raise
    with found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return None
        try:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # not TCP
            return None
        state, num_received = _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\xff"))  # an old kernel does not say: it counts
        if state != _CLOSED or not num_received:
            return None
        _, remote = _FAMILY_AND_PORT.unpack(found.getsockopt(socket.SOL_SOCKET, _SO_PEERNAME, _FAMILY_AND_PORT.size))
        return found.getsockname()[1], remote


def _is_local(host: str) -> bool:
    """Whether an IP address, as the kernel's tables have it, is this host's."""
    packed = b"".join(int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((socket.inet_ntop(family, packed), 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
