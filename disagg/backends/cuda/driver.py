"""One GPU through the CUDA driver. PyTorch uses the same primary context. Every call leaves the thread's current
context as it was.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.core.errors import BackendUnavailable

DRIVER = "libcuda.so.1"
NOT_READY = 600
"""`CUDA_ERROR_NOT_READY`"""
IPC_HANDLE_NBYTES = 64
KERNEL_SOURCE = Path(__file__).with_name("kernels.cu")


class CudaError(Exception):
    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


def load_bindings() -> tuple[ModuleType, ModuleType]:
    """Raises `BackendUnavailable` without the packages or an NVIDIA driver."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status = driver.cuInit(0)[0]
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(
            f"GPU support needs an NVIDIA driver and the packages 'cuda-bindings' and 'nvidia-cuda-nvrtc': {error}"
        ) from error
    if int(status) != 0:
        raise BackendUnavailable(f"GPU support: cuInit failed: {status.name}")
    return driver, nvrtc


def num_gpus() -> int:
    try:
        driver, _ = load_bindings()
    except BackendUnavailable:
        return 0
    return int(driver.cuDeviceGetCount()[1])


def second_gpu() -> int:
    """1, or 0 where there is only one GPU."""
    return 0 if num_gpus() == 1 else 1


@dataclass(frozen=True)
class Allocation:
    base: int
    nbytes: int
    handle: bytes


class Gpu:
    """Enter `current()` before you call its methods."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.driver, self._nvrtc = load_bindings()
        self.device = self.call("cuDeviceGet", ordinal)
        self.uuid = bytes(self.call("cuDeviceGetUuid", self.device).bytes)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self._relaxed = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def call(self, name: str, *arguments: Any) -> Any:
        """The function's results without the status; raises `CudaError`."""
        status, *values = getattr(self.driver, name)(*arguments)
        if int(status) != 0:
            raise CudaError(name, status.name)
        return values[0] if len(values) == 1 else tuple(values) or None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Also lets the thread use the driver during the capture of a CUDA graph, its own too: the garbage collector frees
        memory in any thread.
        """
        self.call("cuCtxPushCurrent", self.context)
        mode = self.call("cuThreadExchangeStreamCaptureMode", self._relaxed)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", mode)
            self.driver.cuCtxPopCurrent()

    def release(self) -> None:
        self.driver.cuDevicePrimaryCtxRelease(self.device)

    def peers(self) -> dict[bytes, int]:
        count = int(self.call("cuDeviceGetCount"))
        return {bytes(self.call("cuDeviceGetUuid", self.call("cuDeviceGet", i)).bytes): i for i in range(count)}

    def can_access(self, ordinal: int) -> bool:
        return bool(self.call("cuDeviceCanAccessPeer", self.device, self.call("cuDeviceGet", ordinal)))

    def has_nvlink(self, ordinal: int) -> bool:
        """Inferred: native peer atomics work over NVLink and not over PCIe."""
        attribute = self.driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        other = self.call("cuDeviceGet", ordinal)
        return bool(int(self.call("cuDeviceGetP2PAttribute", attribute, self.device, other)))

    def enable_peer_access(self, other: Gpu) -> None:
        try:
            self.call("cuCtxEnablePeerAccess", other.context, 0)
        except CudaError as error:
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    def ordinal_of(self, address: int) -> int:
        return self._attribute("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", address)

    def has_legacy_handle(self, address: int) -> bool:
        """Whether `cuIpcGetMemHandle` works for the allocation."""
        return bool(self._attribute("CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", address))

    def _attribute(self, name: str, address: int) -> int:
        """Read with ctypes: cuda-bindings 13.0 returns ordinal 0 for memory on every GPU."""
        found = ctypes.c_uint64(0)
        attribute = int(getattr(self.driver.CUpointer_attribute, name))
        status = ctypes.CDLL(DRIVER).cuPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_uint64(address))
        if status != 0:
            raise CudaError("cuPointerGetAttribute", self.driver.CUresult(status).name)
        return found.value

    def extent(self, address: int) -> tuple[int, int]:
        base, nbytes = self.call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def export(self, address: int) -> Allocation:
        base, nbytes = self.extent(address)
        handle = self.call("cuIpcGetMemHandle", base)
        return Allocation(base, nbytes, ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; returns its base. Opening it again returns the same base and counts up."""
        opened = self.driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, IPC_HANDLE_NBYTES)
        lazy = self.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.call("cuIpcOpenMemHandle", opened, int(lazy)))

    def close(self, base: int) -> None:
        self.call("cuIpcCloseMemHandle", base)

    def table(self, words: npt.NDArray[np.uint64]) -> int:
        """Copy `words` to the GPU; release the returned address with `free`."""
        address = int(self.call("cuMemAlloc", max(words.nbytes, 8)))
        if words.nbytes:
            self.call("cuMemcpyHtoD", address, words.ctypes.data, words.nbytes)
            self.call("cuStreamSynchronize", 0)  # the copy may return early, and our non-blocking streams do not wait for it
        return address

    def free(self, address: int) -> None:
        self.call("cuMemFree", address)

    def stream(self) -> int:
        """Non-blocking, of the highest priority, so that its few blocks get the next free multiprocessors."""
        _, greatest = self.call("cuCtxGetStreamPriorityRange")
        flags = int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.call("cuStreamCreateWithPriority", flags, int(greatest)))

    def event(self) -> int:
        return int(self.call("cuEventCreate", int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def compile(self, source: str, names: Sequence[str]) -> tuple[Any, dict[str, int]]:
        """Returns the module, and its kernels by name. Raises `BackendUnavailable` with the compiler's log."""
        attributes = self.driver.CUdevice_attribute
        major = int(self.call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device))
        minor = int(self.call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device))
        image = compile_source(self._nvrtc, source, architecture=f"sm_{major}{minor}")
        module = self.call("cuModuleLoadData", image)
        return module, {name: int(self.call("cuModuleGetFunction", module, name.encode())) for name in names}


_compile_lock = threading.Lock()
_compiled: dict[tuple[str, str], bytes] = {}


def compile_source(nvrtc: ModuleType, source: str, *, architecture: str) -> bytes:
    """Compiles once per process and architecture. Raises as `Gpu.compile` does."""
    with _compile_lock:
        if (source, architecture) not in _compiled:
            _compiled[source, architecture] = _compile(nvrtc, source, architecture)
        return _compiled[source, architecture]


def _compile(nvrtc: ModuleType, source: str, architecture: str) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    try:
        if int(status) != 0:
            log = b" " * int(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendUnavailable(f"GPU support: the kernels do not compile for {architecture}: {log.decode()}")
        image = b" " * int(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, image)
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)
