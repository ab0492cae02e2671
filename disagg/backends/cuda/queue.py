"""Uploads and kernel launches on one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.backends.cuda.buffers import Buffer
from disagg.backends.cuda.driver import DRIVER, NOT_READY, CudaError, Gpu
from disagg.core import _native


class Queue:
    """A stream for kernels and one for uploads.

    `upload`, `launch` and `is_past` are one native call each, because Python runs several times slower in a thread that
    has just woken up. They set the CUDA context themselves. They keep the GIL if `holds_gil`: use that only if the
    request waits for the calling thread alone, not for an engine's own threads.
    """

    def __init__(self, gpu: Gpu, *, holds_gil: bool = False) -> None:
        self._gpu = gpu
        with gpu.current():
            self.stream, self.uploads = gpu.stream(), gpu.stream()
        handles = int(gpu.context), self.stream, self.uploads
        self._native = _native.CudaQueue(DRIVER, *handles, holds_gil=holds_gil)

    def upload(self, buffer: Buffer, nbytes: int) -> None:
        """Start to copy the first `nbytes` to the GPU. Later launches wait for it."""
        self._check(*self._native.upload(buffer.device_address, buffer.host_address, nbytes, buffer.uploaded))

    def launch(
        self, kernel: int, arguments: Sequence[int], *, blocks: int, threads: int, shared: int = 0, done: int = 0
    ) -> None:
        """The kernel's parameters are 64-bit words. The event `done` is recorded after it. `shared`: bytes of shared
        memory per block.
        """
        self._check(*self._native.launch(kernel, arguments, blocks, threads, shared, done))

    def completion(self, event: int) -> _native.CudaEvent:
        return _native.CudaEvent(self._native, event)

    def is_past(self, event: int) -> bool:
        """Raises `CudaError` if the context has failed."""
        call, status = self._native.query(event)
        if status == NOT_READY:
            return False
        self._check(call, status)
        return True

    def _check(self, call: str | None, status: int) -> None:
        if status != 0:
            raise CudaError(str(call), self._gpu.driver.CUresult(status).name)

    def drain(self) -> None:
        """Enter `gpu.current()` first."""
        for stream in (self.uploads, self.stream):
            self._gpu.call("cuStreamSynchronize", stream)

    def close(self) -> None:
        """Enter `gpu.current()` first."""
        for stream in (self.uploads, self.stream):
            self._gpu.call("cuStreamDestroy", stream)
