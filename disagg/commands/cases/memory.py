"""Where a rank's pools are: in host memory as they are, or on a GPU, with the host's as a picture that is copied to and fro."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from disagg.core.errors import BackendUnavailable
from disagg.core.memory import Device

Bytes = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Memory of a rank's pools, with the same bytes at the same offsets as an array in host memory."""

    def place(self, picture: Bytes) -> tuple[int, Device]:
        """The address and device of memory for all of `picture`."""

    def push(self, picture: Bytes) -> None:
        """Have the memory hold what `picture` does."""

    def pull(self, picture: Bytes) -> None:
        """Have `picture` hold what the memory does."""


class HostMemory:
    """The array itself."""

    def place(self, picture: Bytes) -> tuple[int, Device]:
        return int(picture.__array_interface__["data"][0]), Device()

    def push(self, picture: Bytes) -> None:
        """Nothing is to be copied."""

    def pull(self, picture: Bytes) -> None:
        """Nothing is to be copied."""


class GpuMemory:
    """One allocation of torch's on GPU `ordinal`. Raises `BackendUnavailable` without torch, or where there is no such GPU."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise BackendUnavailable(
                f"device cuda: pools on a GPU are allocated by torch, which is missing: {error}"
            ) from error
        count = self._torch.cuda.device_count() if self._torch.cuda.is_available() else 0
        if ordinal >= count:
            raise BackendUnavailable(f"device cuda:{ordinal}: torch finds {count} GPUs here")
        self._device = Device("cuda", ordinal)
        self._tensor: Any = None

    def place(self, picture: Bytes) -> tuple[int, Device]:
        self._tensor = self._torch.empty(picture.nbytes, dtype=self._torch.uint8, device=str(self._device))
        self.push(picture)
        return int(self._tensor.data_ptr()), self._device

    def push(self, picture: Bytes) -> None:
        self._tensor.copy_(self._torch.from_numpy(picture))
        self._torch.cuda.synchronize(self._device.index)

    def pull(self, picture: Bytes) -> None:
        self._torch.cuda.synchronize(self._device.index)
        self._torch.from_numpy(picture).copy_(self._tensor)


def memory_on(device: str) -> Memory:
    """Memory on `cpu`, `cuda` or `cuda:N`; raises `ConfigError` for anything else, `BackendUnavailable` as `GpuMemory`."""
    found = Device.parse(device)
    return HostMemory() if found.kind == "cpu" else GpuMemory(found.index)
