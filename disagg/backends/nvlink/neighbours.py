"""Whether kernels of another process can still write to this process's memory.

When a process ends, the kernel closes its device files, and the driver then frees their contexts. If another process holds
the files too, such as a forked child, the context stays, its kernels go on, and the driver still lists the ended process.
"""

from __future__ import annotations

import threading
from collections.abc import Set

from disagg.backends.cuda.nvml import compute_processes
from disagg.machine.processes import ProcessWatch


class Neighbour:
    """An attested process with a context on the GPU of that UUID. Thread-safe.

    `is_provable`: the driver listed it while it lived, so that its absence proves something later.
    """

    def __init__(self, process: ProcessWatch, gpu: bytes) -> None:
        self.process, self._gpu = process, gpu
        self._lock = threading.Lock()
        self._is_quiet = False
        self.is_provable = process.pid > 0 and self._is_listed() is True and not process.has_ended()

    def is_quiet(self) -> bool:
        with self._lock:
            if self.is_provable and not self._is_quiet:
                self._is_quiet = self.process.has_ended() and self._is_listed() is False
            return self._is_quiet

    def _is_listed(self) -> bool | None:
        listed = compute_processes(self._gpu)
        return None if listed is None else self.process.pid in listed


class Neighbours:
    """Every process that an engine has met. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[tuple[ProcessWatch, bytes], Neighbour] = {}
        self._has_unattested = False

    def meet(self, process: ProcessWatch | None, gpu: bytes) -> Neighbour | None:
        """A process that may map this one's memory from now on; `None` if it is not attested."""
        with self._lock:
            if process is None:
                self._has_unattested = True
                return None
            known = self._met.get((process, gpu))
            if known is None or not known.is_provable:
                known = self._met[process, gpu] = Neighbour(process, gpu)
            return known

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        with self._lock:
            met = [neighbour for neighbour in self._met.values() if neighbour.process is process]
        return bool(met) and all(neighbour.is_quiet() for neighbour in met)

    def are_quiet(self, pids: Set[int]) -> bool:
        """Every neighbour is proved quiet, and `pids` are all among them."""
        with self._lock:
            met = list(self._met.values())
        known = {neighbour.process.pid for neighbour in met}
        return not self._has_unattested and pids <= known and all(neighbour.is_quiet() for neighbour in met)
