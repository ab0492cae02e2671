"""The TCP sockets of this process, and how soon they notice that a link is back.

TCP doubles its wait after each retransmission. Since 6.15 Linux lets a socket limit that wait. It counts attempts, though,
and would then end the connection after 14 s, so a limit in seconds replaces the count. On older kernels nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

_PROC = Path("/proc")
SYN_RECV, ESTABLISHED, CLOSE_WAIT, LISTEN = "03", "01", "08", "0A"
TCP_RTO_MAX_MS = 44
"""Linux 6.15. Python's `socket` does not name it."""
LONGEST_WAIT_S = 1
"""Between two retransmissions; the shortest that Linux accepts."""
SLOW_S, MAX_PAUSE_S = 0.5, 5.0
SILENCE_S = 900
"""How long bytes may stay unacknowledged, or a stopped peer not take them, until a connection ends: about as long as by
default. Rows whose write was under way stay quarantined then.
"""


MAX_PORTS = 64
Ports = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=65535)], ...], msgspec.Meta(max_length=MAX_PORTS)]
"""The ports of an engine, as a peer tells them."""


class TcpSocket(NamedTuple):
    local: str
    remote: str
    state: str
    inode: str


class EngineSockets(NamedTuple):
    """The TCP sockets here by which an engine's bytes may arrive: those accepted on the ports `accepted`, and those opened
    to the ports `opened`. `None`: any port.
    """

    accepted: Collection[int] | None = None
    opened: Collection[int] | None = None


ANY_SOCKET = EngineSockets()


def sockets_of(process: int | str) -> dict[str, int]:
    """Descriptors by inode. Raises `OSError` if this process may not know."""
    found = dict[str, int]()
    for entry in (_PROC / str(process) / "fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found[target[8:-1]] = int(entry.name)
    return found


def tcp_sockets() -> list[TcpSocket]:
    """The TCP sockets of this network namespace."""
    return [row for name in ("tcp", "tcp6") for row in _table(_PROC / "self" / "net" / name)]


def _table(path: Path) -> Iterator[TcpSocket]:
    if not path.exists():
        return
    for line in path.read_text().splitlines()[1:]:
        fields = line.split()
        yield TcpSocket(_plain(fields[1]), _plain(fields[2]), fields[3], fields[9])


def _plain(address: str) -> str:
    """Make an IPv4-mapped IPv6 address, as a dual-stack socket has it, IPv4."""
    host, _, port = address.rpartition(":")
    mapped = "0000000000000000FFFF0000"
    return f"{host.removeprefix(mapped)}:{port}" if len(host) == 32 and host.startswith(mapped) else address


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def listening_sockets() -> dict[int, int]:
    """Inodes by descriptor."""
    own = sockets_of("self")
    return {own[row.inode]: int(row.inode) for row in tcp_sockets() if row.state == LISTEN and row.inode in own}


@contextlib.contextmanager
def new_listeners() -> Iterator[dict[int, int]]:
    """After the block, what it yields holds the sockets on which this process has begun to listen, as `listening_sockets`.
    They and what they accept retransmit soon.
    """
    found = dict[int, int]()
    before = listening_sockets()
    yield found
    found.update({fd: inode for fd, inode in listening_sockets().items() if before.get(fd) != inode})
    for descriptor in found:
        retransmit_soon(descriptor)


def duplicate(descriptor: int) -> socket.socket:
    """The socket of a descriptor, under another one. Raises `OSError` if it is closed, or no socket."""
    other = os.dup(descriptor)
    try:
        return socket.socket(fileno=other)
    except OSError:
        os.close(other)
        raise


@functools.cache
def _getsockopt() -> Callable[..., int]:
    """The C library's function, without a release of the GIL."""
    found: Callable[..., int] = ctypes.PyDLL(None).getsockopt
    return found


_INFO_NBYTES, _RECEIVED_AT = 136, 128
"""Of `struct tcp_info`: up to `tcpi_bytes_received` (Linux 4.1), and where that is."""


def num_received(descriptor: int) -> int | None:
    """How many bytes a TCP socket has received; `None` for another descriptor."""
    info, nbytes = (ctypes.c_uint64 * (_INFO_NBYTES // 8))(), ctypes.c_uint32(_INFO_NBYTES)
    failed = _getsockopt()(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(nbytes))
    return None if failed else info[_RECEIVED_AT // 8]


def complete(ports: Collection[int]) -> Collection[int] | None:
    """The result of `ports_of`, or `None` if it may have left some out."""
    return ports if 0 < len(ports) < MAX_PORTS else None


def ports_of(listeners: Collection[int]) -> tuple[int, ...]:
    """The ports on which sockets listen, at most `MAX_PORTS`. Closed sockets are left out."""
    found = set[int]()
    for descriptor in listeners:
        with contextlib.suppress(OSError, IndexError), duplicate(descriptor) as listener:
            found.add(listener.getsockname()[1])
    return tuple(sorted(found)[:MAX_PORTS])


def retransmit_soon(descriptor: int) -> None:
    """On a TCP socket and those that it accepts, retransmit at least every `LONGEST_WAIT_S`. Other descriptors are left
    alone.
    """
    with contextlib.suppress(OSError), duplicate(descriptor) as found:
        found.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_WAIT_S * 1000)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


@functools.cache
def can_retransmit_soon() -> bool:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_WAIT_S * 1000)
    except OSError as error:
        return error.errno != errno.ENOPROTOOPT
    return True


class EngineConnections:
    """The connections that an engine opens to its peers' ports when it needs them. Any thread may use it."""

    def __init__(self) -> None:
        self._ports: set[int] = set()
        self._not_before = 0.0
        self._lock = threading.Lock()
        self._num_connecting = 0

    def add(self, ports: Collection[int]) -> None:
        self._ports.update(ports)

    @contextlib.contextmanager
    def connecting(self, ports: Collection[int]) -> Iterator[None]:
        """The engine connects to a peer at these ports within the block. The last block to end looks for what all have
        opened.
        """
        with self._lock:
            self._num_connecting += 1
            self._ports.update(ports)
        try:
            yield
        finally:
            with self._lock:
                self._num_connecting -= 1
                is_last = not self._num_connecting
            if is_last:
                self.retransmit_soon()

    def note_progress(self, moved_at: float) -> None:
        """Bytes of an open transfer last moved at `moved_at`. If that is long ago, the link may be cut."""
        now = time.monotonic()
        if now - moved_at >= SLOW_S and now >= self._not_before:
            self.retransmit_soon()

    def retransmit_soon(self) -> None:
        """Apply `retransmit_soon` to all. The table may be long: calls for slow transfers take at most 5% of the time.
        One that took long may have stood still.
        """
        if not can_retransmit_soon():
            self._not_before = math.inf
            return
        began = time.monotonic()
        self._not_before = began + SLOW_S
        with contextlib.suppress(OSError):
            own = sockets_of("self")
            for row in tcp_sockets():
                if row.inode in own and port_of(row.remote) in self._ports:
                    retransmit_soon(own[row.inode])
        self._not_before = max(self._not_before, began + min(20 * (time.monotonic() - began), MAX_PAUSE_S))
