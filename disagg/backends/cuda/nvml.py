"""Which processes have a context on a GPU, by NVML."""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Callable

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_SPARE = 16
"""More processes may start between the two calls."""


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_nbytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def compute_processes(gpu: bytes) -> frozenset[int] | None:
    """Process ids, in this namespace, with a compute context of their own on the GPU with this UUID (16 bytes).

    An ended process is listed until the driver has freed its context. `None` where NVML cannot tell: no library, no
    such GPU (MIG), or clients of MPS, which share its server's context.
    """
    nvml = _load()
    device = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=gpu)}".encode(), ctypes.byref(device)) != _SUCCESS:
        return None
    clients = _pids(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, device)
    return _pids(nvml.nvmlDeviceGetComputeRunningProcesses_v3, device) if clients == frozenset() else None


def _pids(query: Callable[..., int], device: ctypes.c_void_p) -> frozenset[int] | None:
    count = ctypes.c_uint(0)
    status = query(device, ctypes.byref(count), None)
    while status == _INSUFFICIENT_SIZE:
        count.value += _SPARE
        found = (_ProcessInfo * count.value)()
        status = query(device, ctypes.byref(count), found)
        if status == _SUCCESS:
            return frozenset(info.pid for info in found[: count.value])
    return frozenset() if status == _SUCCESS else None


@functools.cache
def _load() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(LIBRARY)
        for name in ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v3"):
            getattr(nvml, name)
    except (OSError, AttributeError):
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
