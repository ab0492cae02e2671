"""Whether a process of this host has ended, whether bytes that it sent over TCP may still arrive, and CMA between processes.

The bytes that a killed process had sent wait in socket buffers, its own and the receiver's, and are applied to memory long
after the process has ended. The kernel ends each of its connections behind the last byte, and an engine closes its socket
once it has read that end. So nothing of a dead process can arrive any more once no socket of this process has a far end
without an owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from disagg.core import _native

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19
"""Fields of `/proc/PID/stat` after the command's name."""
_SYN_RECV, _ESTABLISHED, _CLOSE_WAIT, _LISTEN = "03", "01", "08", "0A"
"""States of a socket in `/proc/net/tcp`."""
_NOT_ACCEPTED = (_SYN_RECV, _ESTABLISHED, _CLOSE_WAIT)
_NO_OWNER = "0"
"""The inode of a socket that no process owns: not accepted yet, or closed and not finished."""


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    inode: str


class ProcessIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process. `host` is equal for processes that see each other by process id, `network` for those with one loopback
    device. `started` is in clock ticks since the machine's start: a later process with the same id has another value.
    """

    host: str
    network: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        """The identity of this process."""
        fields = _stat(_PROC / "self" / "stat")
        assert fields is not None
        return cls(host_identity(), _namespace("net"), os.getpid(), int(fields[_STARTED]))

    @property
    def machine(self) -> str:
        """Equal for processes of one machine since its last start, in whatever namespaces they are."""
        return self.host.partition("/")[0]

    def has_ended(self) -> bool:
        """Whether all threads of the process are proved to have ended; `False` where this process cannot see it."""
        if self.host != host_identity() or not 0 < self.pid < 2**31:
            return False
        fields = _stat(_PROC / str(self.pid) / "stat")
        if fields is None or int(fields[_STARTED]) != self.started:
            return True
        threads = list((_PROC / str(self.pid) / "task").glob("*/stat"))
        return fields[_STATE] in "ZX" and all((stat := _stat(path)) is None or stat[_STATE] in "ZX" for path in threads)

    def is_quiet(self, *, by_accepted: bool = False) -> bool:
        """Whether it has ended and nothing that it sent over TCP can arrive here any more.

        `by_accepted`: bytes arrive only by connections that this process has accepted.
        """
        return self.has_ended() and self.network == _namespace("net") and not _has_orphans(by_accepted=by_accepted)


class ProcessWatch:
    """Checks repeatedly whether a process has ended, at the cost of one system call each time."""

    def __init__(self, process: ProcessIdentity) -> None:
        """A process that this process cannot see never counts as ended."""
        self._descriptor: int | None = None
        self._ended = False
        if process.host != host_identity():
            return
        try:
            self._descriptor = os.pidfd_open(process.pid)
        except OSError:
            self._ended = True
            return
        self._ended = process.has_ended()  # read after opening: only now does the descriptor certainly mean that process

    def has_ended(self) -> bool:
        """`False` also where this cannot be known, or after `close`."""
        self._ended = self._ended or (self._descriptor is not None and _native.is_readable(self._descriptor))
        return self._ended

    def close(self) -> None:
        """A second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


def copy_refusal(pid: int, address: int) -> str | None:
    """Why this process may not copy from `address` of process `pid` by itself; `None` if it may. Reads one byte."""
    if not 0 < pid < 2**31:
        return f"{pid} is no process id"
    byte = np.zeros(1, np.uint8)
    columns = (np.array([value], np.uint64) for value in (byte.ctypes.data, address, 1))
    error = _native.copy_between_processes(pid, *columns, write=False)
    return f"process_vm_readv: {os.strerror(error)}" if error else None


def host_identity() -> str:
    """A string that is equal for processes that see each other by process id."""
    return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip() + "/" + _namespace("pid")


def _namespace(kind: str) -> str:
    return str((_PROC / "self" / "ns" / kind).readlink())


def _stat(path: Path) -> list[str] | None:
    """The fields after the command's name, which may contain any character; `None` for a process that is gone."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _has_orphans(*, by_accepted: bool) -> bool:
    """Whether a TCP connection of this process has a far end on this host that no process owns any more.

    `by_accepted`: among the connections that this process has accepted. A far end on another host cannot belong to a process
    that is proved to have ended on this one.
    """
    own = set(_own_sockets())
    sockets = [row for name in ("tcp", "tcp6") for row in _sockets(name)]
    owners = {(row.local, row.remote): row.inode for row in sockets}
    hosts = {row.local.rpartition(":")[0] for row in sockets}
    ports = {row.local.rpartition(":")[2] for row in sockets if row.state == _LISTEN and row.inode in own}
    for row in sockets:
        accepted = row.local.rpartition(":")[2] in ports
        if accepted and row.inode == _NO_OWNER and row.state in _NOT_ACCEPTED:
            return True  # the engine has not accepted it yet
        if row.inode not in own or row.state == _LISTEN or (by_accepted and not accepted):
            continue
        far = owners.get((row.remote, row.local))
        if far is None and (row.state == _CLOSE_WAIT or row.remote.rpartition(":")[0] in hosts):
            return True
        if far == _NO_OWNER:
            return True
    return False


def _own_sockets() -> Iterator[str]:
    """Inodes of this process's sockets."""
    for entry in (_PROC / "self" / "fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _sockets(name: str) -> Iterator[_Socket]:
    """Every TCP socket of this network namespace."""
    path = _PROC / "self" / "net" / name
    if not path.exists():
        return
    for line in path.read_text().splitlines()[1:]:
        fields = line.split()
        yield _Socket(_plain(fields[1]), _plain(fields[2]), fields[3], fields[9])


def _plain(address: str) -> str:
    """`address` as IPv4 where it is an IPv4-mapped IPv6 address, as a dual-stack socket has it."""
    host, _, port = address.rpartition(":")
    mapped = "0000000000000000FFFF0000"
    return f"{host.removeprefix(mapped)}:{port}" if len(host) == 32 and host.startswith(mapped) else address
