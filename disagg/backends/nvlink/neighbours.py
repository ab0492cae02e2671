"""Whether kernels of another process can still write to this process's memory.

A process that has mapped memory of this one ends in two steps: the kernel closes its device files, and the driver then frees
the contexts that belong to them, which stops their channels. If another process holds these files as well, for example a child
that was forked, the context stays and its kernels go on. The driver then still lists the process that has ended.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Set

from disagg.backends.cuda.nvml import compute_processes
from disagg.backends.nvlink.holders import peer_pid
from disagg.core import _native
from disagg.machine.processes import ProcessIdentity

_SO_PEERPIDFD = 77
"""Linux 6.5; Python has no name for it."""


class Watch:
    """A process that the kernel has attested while it lived. Not thread-safe."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._has_ended = False

    def has_ended(self) -> bool:
        """Whether all threads of the process have ended. `close` keeps the last answer."""
        self._has_ended = self._has_ended or (self._pidfd is not None and _native.is_readable(self._pidfd))
        return self._has_ended

    def close(self) -> None:
        """A second call does nothing."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def attest(connection: socket.socket, pid: int) -> Watch | None:
    """The process that listens at the other end of a Unix socket, if the kernel attests that it is `pid`; else `None`."""
    try:
        if peer_pid(connection) != pid:
            return None
        return Watch(pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None
    try:
        return Watch(pid, os.pidfd_open(pid))
    except OSError:
        return None


class Neighbour:
    """A process of this machine, and its context on the GPU with the UUID `gpu`. Thread-safe; takes over `watch`.

    `is_provable`: whether its end can be proved from here. The driver must list the process now, while it lives: only then does
    its absence prove anything.
    """

    def __init__(self, watch: Watch | None, gpu: bytes) -> None:
        self._watch, self._gpu = watch, gpu
        self._lock = threading.Lock()
        self._is_quiet = False
        self.is_provable = watch is not None and self._is_listed(watch) is True and not watch.has_ended()
        if not self.is_provable:
            self.close()

    def is_quiet(self) -> bool:
        """Whether the process has ended and the driver has freed its context, so that none of its kernels runs any more."""
        with self._lock:
            if self._watch is None or not self.is_provable or self._is_quiet:
                return self._is_quiet
            self._is_quiet = self._watch.has_ended() and self._is_listed(self._watch) is False
            if self._is_quiet:
                self._watch.close()
            return self._is_quiet

    def _is_listed(self, watch: Watch) -> bool | None:
        """Whether the driver lists the process; `None` if it cannot tell."""
        listed = compute_processes(self._gpu)
        return None if listed is None else watch.pid in listed

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        with self._lock:
            if self._watch is not None:
                self._watch.close()


class Neighbours:
    """Every process of this machine that an engine has met, with the GPU of its context. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[tuple[ProcessIdentity, bytes], Neighbour] = {}

    def meet(self, process: ProcessIdentity, gpu: bytes, held: socket.socket | None) -> Neighbour | None:
        """The neighbour that may map memory of this process from now on; `None` for a process of another machine.

        `held`: a connection to its `Mappings`, or `None`. A process that claims to be another one gets a neighbour of its own,
        whose end nothing proves.
        """
        if process.machine != ProcessIdentity.own().machine:
            return None
        found = Neighbour(attest(held, process.pid) if held is not None else None, gpu)
        with self._lock:
            known = self._met.get((process, gpu))
            if known is None or (found.is_provable and not known.is_provable):
                known = self._met[process, gpu] = found
        if known is not found:
            found.close()
        return known if found.is_provable else found

    def is_quiet_after(self, process: ProcessIdentity) -> bool:
        """Whether `process` has been met, and none of its kernels runs any more."""
        with self._lock:
            met = [neighbour for (each, _), neighbour in self._met.items() if each == process]
        return bool(met) and all(neighbour.is_quiet() for neighbour in met)

    def are_quiet(self, pids: Set[int]) -> bool:
        """Whether every neighbour is proved quiet, and `pids` are all among them."""
        with self._lock:
            met = dict(self._met)
        return pids <= {process.pid for process, _ in met} and all(neighbour.is_quiet() for neighbour in met.values())

    def close(self) -> None:
        """Stop watching all neighbours."""
        with self._lock:
            met = list(self._met.values())
        for neighbour in met:
            neighbour.close()
