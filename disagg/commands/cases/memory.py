"""Memory of a rank's pools: host memory, or GPU memory with a mirror in host memory."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from disagg.core.errors import BackendUnavailable
from disagg.core.memory import Device

Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Memory with the same bytes at the same offsets as an array in host memory, its mirror."""

    def place(self, mirror: Bytes) -> tuple[int, Device]:
        """Address and device of memory of the mirror's size."""

    def push(self, mirror: Bytes) -> None:
        """Copy the mirror to the memory."""

    def pull(self, mirror: Bytes) -> None:
        """Copy the memory to the mirror."""


class HostMemory:
    def place(self, mirror: Bytes) -> tuple[int, Device]:
        return int(mirror.__array_interface__["data"][0]), Device()

    def push(self, mirror: Bytes) -> None:
        pass

    def pull(self, mirror: Bytes) -> None:
        pass


class GpuMemory:
    """Allocated by torch. Raises `BackendUnavailable` without torch or that GPU."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise BackendUnavailable(f"device cuda: pools on a GPU need torch, which cannot be imported: {error}") from error
        count = self._torch.cuda.device_count() if self._torch.cuda.is_available() else 0
        if ordinal >= count:
            raise BackendUnavailable(f"device cuda:{ordinal}: torch found {count} GPUs")
        self._device = Device("cuda", ordinal)
        self._tensor: Any = None

    def place(self, mirror: Bytes) -> tuple[int, Device]:
        self._tensor = self._torch.empty(mirror.nbytes, dtype=self._torch.uint8, device=str(self._device))
        self.push(mirror)
        return int(self._tensor.data_ptr()), self._device

    def push(self, mirror: Bytes) -> None:
        self._tensor.copy_(self._torch.from_numpy(mirror))
        self._torch.cuda.synchronize(self._device.index)

    def pull(self, mirror: Bytes) -> None:
        self._torch.cuda.synchronize(self._device.index)
        self._torch.from_numpy(mirror).copy_(self._tensor)


def memory_on(device: str) -> Memory:
    """`cpu`, `cuda` or `cuda:N`. Raises `ConfigError` for anything else, and as `GpuMemory` does."""
    found = Device.parse(device)
    return HostMemory() if found.kind == "cpu" else GpuMemory(found.index)
