"""The CUDA driver as backends need it: one GPU's primary context, its memory, streams, events, and the kernels.

The primary context is the one that torch and the CUDA run-time library use too. No call here leaves a context current that
was not current before.
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

from disagg.core import _native
from disagg.core.errors import BackendUnavailable

DRIVER = "libcuda.so.1"
NOT_READY = 600
"""What the driver says of an event that has not passed."""
IPC_HANDLE_NBYTES = 64
Words = npt.NDArray[np.uint64]
KERNEL_SOURCE = Path(__file__).with_name("kernels.cu")


class CudaError(Exception):
    """A CUDA call failed; the message is `call: NAME`."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


def load_bindings() -> tuple[ModuleType, ModuleType]:
    """`cuda.bindings`' driver and NVRTC; raises `BackendUnavailable` where they, or the driver, are missing."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status = driver.cuInit(0)[0]
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(
            f"work on GPUs needs an NVIDIA driver and the packages 'cuda-bindings' and 'nvidia-cuda-nvrtc': {error}"
        ) from error
    if int(status) != 0:
        raise BackendUnavailable(f"work on GPUs: the CUDA driver does not start: {status.name}")
    return driver, nvrtc


@dataclass(frozen=True)
class Allocation:
    """`nbytes` bytes from `base` that were allocated together, and the handle by which another process can map them."""

    base: int
    nbytes: int
    handle: bytes


HEADER_WORDS = 4
"""Before the columns of a batch: see `kernels.cu`."""


class Buffer:
    """`nbytes` bytes in pinned memory, as `words` of 8 bytes, and as many on the GPU; and an event for their upload."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = nbytes
        self.host_address = int(gpu.call("cuMemHostAlloc", nbytes, 0))
        self.device_address = int(gpu.call("cuMemAlloc", nbytes))
        self.uploaded = gpu.event()
        words = (ctypes.c_ubyte * nbytes).from_address(self.host_address)
        self.words: npt.NDArray[np.uint64] = np.frombuffer(memoryview(words), dtype=np.uint64)

    def fill(self, source: Words, destination: Words, nbytes: Words) -> tuple[int, int]:
        """Take a part of a batch: its bytes in all, and the bytes of the buffer that hold it."""
        count, words, start = len(nbytes), self.words, HEADER_WORDS
        words[:start] = 0
        words[start : start + count] = source
        words[start + count : start + 2 * count] = destination
        ends = words[start + 2 * count : start + 3 * count]
        np.cumsum(nbytes, out=ends)
        return int(ends[-1]), batch_nbytes(count)

    def free(self, gpu: Gpu) -> None:
        gpu.call("cuEventDestroy", self.uploaded)
        gpu.call("cuMemFreeHost", self.host_address)
        gpu.free(self.device_address)


def take_buffer(free: list[Buffer], nbytes: int) -> Buffer | None:
    """Remove from `free` the smallest that has so many bytes; `None` where none has."""
    best: Buffer | None = None
    for buffer in free:
        if buffer.nbytes >= nbytes and (best is None or buffer.nbytes < best.nbytes):
            best = buffer
    if best is not None:
        free.remove(best)
    return best


def batch_nbytes(num_pieces: int) -> int:
    """Bytes of a header and three columns."""
    return 8 * (HEADER_WORDS + 3 * num_pieces)


class Gpu:
    """One GPU of this process, by its CUDA ordinal. Its methods are called with `current()` entered."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.driver, self._nvrtc = load_bindings()
        self.device = self.call("cuDeviceGet", ordinal)
        self.uuid = bytes(self.call("cuDeviceGetUuid", self.device).bytes)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)

    def call(self, name: str, *arguments: Any) -> Any:
        """What the driver's function gives; raises `CudaError`."""
        status, *values = getattr(self.driver, name)(*arguments)
        if int(status) != 0:
            raise CudaError(name, status.name)
        return values[0] if len(values) == 1 else tuple(values) or None

    @contextmanager
    def current(self) -> Iterator[None]:
        """This GPU's context is current in this thread within."""
        self.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent()

    def release(self) -> None:
        self.driver.cuDevicePrimaryCtxRelease(self.device)

    # -- other GPUs ---------------------------------------------------------------------------------------------------

    def peers(self) -> dict[bytes, int]:
        """Every GPU that this process may name: its ordinal by its UUID."""
        count = int(self.call("cuDeviceGetCount"))
        return {bytes(self.call("cuDeviceGetUuid", self.call("cuDeviceGet", i)).bytes): i for i in range(count)}

    def can_access(self, ordinal: int) -> bool:
        return bool(self.call("cuDeviceCanAccessPeer", self.device, self.call("cuDeviceGet", ordinal)))

    def has_nvlink(self, ordinal: int) -> bool:
        """Inferred: atomics in a peer's memory work over NVLink, not over PCIe."""
        attribute = self.driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        other = self.call("cuDeviceGet", ordinal)
        return bool(int(self.call("cuDeviceGetP2PAttribute", attribute, self.device, other)))

    def enable_peer_access(self, other: Gpu) -> None:
        try:
            self.call("cuCtxEnablePeerAccess", other.context, 0)
        except CudaError as error:
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    # -- memory -------------------------------------------------------------------------------------------------------

    def ordinal_of(self, address: int) -> int:
        """Which GPU an address is on."""
        return self._attribute("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", address)

    def has_legacy_handle(self, address: int) -> bool:
        return bool(self._attribute("CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", address))

    def _attribute(self, name: str, address: int) -> int:
        """Not through the bindings: theirs give 0 as the ordinal of memory on every GPU (13.0)."""
        found = ctypes.c_uint64(0)
        attribute = int(getattr(self.driver.CUpointer_attribute, name))
        status = ctypes.CDLL(DRIVER).cuPointerGetAttribute(ctypes.byref(found), attribute, ctypes.c_uint64(address))
        if status != 0:
            raise CudaError("cuPointerGetAttribute", self.driver.CUresult(status).name)
        return found.value

    def extent(self, address: int) -> tuple[int, int]:
        """Base and size in bytes of the allocation, or of the mapping, that holds an address."""
        base, nbytes = self.call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def export(self, address: int) -> Allocation:
        """The allocation that holds an address."""
        base, nbytes = self.extent(address)
        handle = self.call("cuIpcGetMemHandle", base)
        return Allocation(base, nbytes, ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation: its base here. Opening it again counts, and gives the same base."""
        opened = self.driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, IPC_HANDLE_NBYTES)
        lazy = self.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.call("cuIpcOpenMemHandle", opened, int(lazy)))

    def close(self, base: int) -> None:
        """Undo one `open`."""
        self.call("cuIpcCloseMemHandle", base)

    def table(self, words: npt.NDArray[np.uint64]) -> int:
        """The address, on the GPU, of a copy of `words` that is there; to be given to `free`."""
        address = int(self.call("cuMemAlloc", max(words.nbytes, 8)))
        if words.nbytes:
            self.call("cuMemcpyHtoD", address, words.ctypes.data, words.nbytes)
            self.call("cuStreamSynchronize", 0)  # the copy may return earlier, and streams of ours do not wait for it
        return address

    def free(self, address: int) -> None:
        self.call("cuMemFree", address)

    # -- work ---------------------------------------------------------------------------------------------------------

    def stream(self) -> int:
        """A stream that waits for no other, of the highest priority: its few blocks come first when multiprocessors free."""
        _, greatest = self.call("cuCtxGetStreamPriorityRange")
        flags = int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.call("cuStreamCreateWithPriority", flags, int(greatest)))

    def event(self) -> int:
        return int(self.call("cuEventCreate", int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def compile(self, source: str, names: Sequence[str]) -> tuple[Any, dict[str, int]]:
        """A module of CUDA C++ for this GPU, and its kernels by name; raises `BackendUnavailable` with the compiler's log."""
        attributes = self.driver.CUdevice_attribute
        major = int(self.call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device))
        minor = int(self.call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device))
        image = compile_source(self._nvrtc, source, architecture=f"sm_{major}{minor}")
        module = self.call("cuModuleLoadData", image)
        return module, {name: int(self.call("cuModuleGetFunction", module, name.encode())) for name in names}


class Queue:
    """A stream of its own on a GPU, and another for uploads. Each call is one into native code, since a thread that has just
    been woken pays several times as much for Python; its methods take care of the context themselves. `holds_gil`:
    they do not let go of it, for a thread that is all that a request waits for; where an engine has threads of its own, these
    wait for it meanwhile.
    """

    def __init__(self, gpu: Gpu, *, holds_gil: bool = False) -> None:
        self._gpu = gpu
        with gpu.current():
            self.stream, self.uploads = gpu.stream(), gpu.stream()
        handles = int(gpu.context), self.stream, self.uploads
        self._native = _native.CudaQueue(DRIVER, *handles, holds_gil=holds_gil)

    def upload(self, buffer: Buffer, nbytes: int) -> None:
        """Copy the first bytes of a buffer to the GPU; what is launched next waits for that."""
        self._check(*self._native.upload(buffer.device_address, buffer.host_address, nbytes, buffer.uploaded))

    def launch(
        self, kernel: int, arguments: Sequence[int], *, blocks: int, threads: int, shared: int = 0, done: int = 0
    ) -> None:
        """Start `kernel`, whose parameters are all 64-bit words, with `shared` bytes of shared memory a block; record the event
        `done` behind it.
        """
        self._check(*self._native.launch(kernel, arguments, blocks, threads, shared, done))

    def sign(self, event: int) -> _native.CudaEvent:
        """The event, for whoever waits for the work before it."""
        return _native.CudaEvent(self._native, event)

    def is_past(self, event: int) -> bool:
        """Whether the work before the event is done; raises `CudaError` where the context has failed."""
        call, status = self._native.query(event)
        if status == NOT_READY:
            return False
        self._check(call, status)
        return True

    def _check(self, call: str | None, status: int) -> None:
        if status != 0:
            raise CudaError(str(call), self._gpu.driver.CUresult(status).name)

    def drain(self) -> None:
        """Returns once all that was started has ended; with `current()` entered."""
        for stream in (self.uploads, self.stream):
            self._gpu.call("cuStreamSynchronize", stream)

    def close(self) -> None:
        """With `current()` entered."""
        for stream in (self.uploads, self.stream):
            self._gpu.call("cuStreamDestroy", stream)


_compile_lock = threading.Lock()
_compiled: dict[tuple[str, str], bytes] = {}


def compile_source(nvrtc: ModuleType, source: str, *, architecture: str) -> bytes:
    """Machine code of CUDA C++, compiled once in a process; raises `BackendUnavailable` with the compiler's log."""
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
            raise BackendUnavailable(f"work on GPUs: the kernels do not compile for {architecture}: {log.decode()}")
        image = b" " * int(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, image)
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)
