"""Whether kernels of another process can still write to this process's memory.

A process that has mapped memory of this one ends in two steps: the kernel closes its device files, and the driver then frees
the contexts that belong to them, which stops their channels. If another process holds these files as well, for example a child
that was forked, the context stays and its kernels go on. The driver then still lists the process that has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Set

from disagg.backends.cuda.nvml import compute_processes
from disagg.machine.processes import ProcessWatch


class Neighbour:
    """A process that the kernel attests, and its context on the GPU with the UUID `gpu`. Thread-safe.

    `is_provable`: whether its end can be proved from here. The driver must list the process now, while it lives: only then does
    its absence prove anything.
    """

    def __init__(self, process: ProcessWatch, gpu: bytes) -> None:
        self.process, self._gpu = process, gpu
        self._lock = threading.Lock()
        self._is_quiet = False
        self.is_provable = process.pid > 0 and self._is_listed() is True and not process.has_ended()

    def is_quiet(self) -> bool:
        """Whether the process has ended and the driver has freed its context, so that none of its kernels runs any more."""
        with self._lock:
            if self.is_provable and not self._is_quiet:
                self._is_quiet = self.process.has_ended() and self._is_listed() is False
            return self._is_quiet

    def _is_listed(self) -> bool | None:
        """Whether the driver lists the process; `None` if it cannot tell."""
        listed = compute_processes(self._gpu)
        return None if listed is None else self.process.pid in listed


class Neighbours:
    """Every process of this machine that an engine has met, with the GPU of its context. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[tuple[ProcessWatch, bytes], Neighbour] = {}
        self._has_unattested = False

    def meet(self, process: ProcessWatch | None, gpu: bytes) -> Neighbour | None:
        """The neighbour that may map memory of this process from now on; `None` if the kernel does not attest its process."""
        with self._lock:
            if process is None:
                self._has_unattested = True
                return None
            known = self._met.get((process, gpu))
            if known is None or not known.is_provable:
                known = self._met[process, gpu] = Neighbour(process, gpu)
            return known

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """Whether `process` has been met, and none of its kernels runs any more."""
        with self._lock:
            met = [neighbour for neighbour in self._met.values() if neighbour.process is process]
        return bool(met) and all(neighbour.is_quiet() for neighbour in met)

    def are_quiet(self, pids: Set[int]) -> bool:
        """Whether every neighbour is proved quiet, and `pids` are all among them."""
        with self._lock:
            met = list(self._met.values())
        known = {neighbour.process.pid for neighbour in met}
        return not self._has_unattested and pids <= known and all(neighbour.is_quiet() for neighbour in met)
