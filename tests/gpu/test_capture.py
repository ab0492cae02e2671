"""A server captures CUDA graphs when it likes: neither its capture nor a copy of ours may fail because of the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from disagg.backends.base import TransferStatus
from disagg.backends.cuda.driver import Gpu
from disagg.backends.cuda.packer import GpuMover
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.core import _native
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from tests.gpu.pieces import SHAPES, batch_of, expected, pieces_of
from tests.gpu.targets import PATIENCE_S, Memory, Target, settle

pytestmark = pytest.mark.gpu


@contextmanager
def capture(gpu: Gpu) -> Iterator[None]:
    """In the mode that PyTorch captures in. Fails if a call in any thread has broken it."""
    with gpu.current():
        stream = gpu.stream()
    gpu.call("cuCtxPushCurrent", gpu.context)
    try:
        gpu.call("cuStreamBeginCapture", stream, gpu.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        try:
            yield
        finally:
            graph = gpu.call("cuStreamEndCapture", stream)
        gpu.call("cuGraphDestroy", graph)
        gpu.call("cuStreamDestroy", stream)
    finally:
        gpu.driver.cuCtxPopCurrent()


def in_thread(work: Callable[[], None], *, enlisted: bool = True) -> None:
    """As in a thread of this library."""
    done: Future[None] = Future()

    def run() -> None:
        if enlisted:
            _native.enlist_thread()
        try:
            work()
            done.set_result(None)
        except Exception as error:  # noqa: BLE001 (the caller raises it)
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done.result(PATIENCE_S)


def test_a_query_of_another_thread_breaks_a_capture(local: Memory) -> None:
    """What the other tests of this file guard against, seen with the plain driver."""
    gpu = local.gpu
    with gpu.current():
        event = gpu.event()
    statuses: list[str] = []

    def query() -> None:
        gpu.call("cuCtxPushCurrent", gpu.context)
        statuses.append(gpu.driver.cuEventQuery(event)[0].name)
        gpu.driver.cuCtxPopCurrent()

    with pytest.raises(Exception, match="cuStreamEndCapture"), capture(gpu):
        in_thread(query, enlisted=False)
    with capture(gpu):
        in_thread(query)
    assert statuses == ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_SUCCESS"]


def test_copies_to_a_peer_during_a_capture(backend: NvlinkBackend, local: Memory, target: Target) -> None:
    pieces = pieces_of(3, SHAPES["odd sizes"])
    images = local.read(), target.read()

    def copy() -> None:
        peer = backend.connect(target.endpoint, process=target.watch, epoch=1)
        transfer = backend.submit(peer, batch_of(local, target, pieces))
        assert settle(transfer) is TransferStatus.DONE, transfer.error
        transfer.close()
        backend.disconnect(peer)

    with capture(local.gpu):
        in_thread(copy)
    np.testing.assert_array_equal(target.read(), expected(*images, pieces, local))


def test_packing_and_checksums_during_a_capture(local: Memory, stack: ExitStack) -> None:
    """From the first use of a GPU to its end; also what the garbage collector frees in the thread that captures."""
    image = np.random.default_rng(5).integers(0, 256, 1 << 16, dtype=np.uint8)
    found = np.empty_like(image)
    sums: list[int] = []
    layers, bases = np.array([3]), np.array([0], np.uint64)
    runs = np.array([[0, 0, 0, 0, 8]])
    axes = [(64, 2, 0)]
    strides: dict[str, Any] = {"row_stride": 4096, "token_stride": 128, "itemsize": 2, "seed": 9}

    def work() -> None:
        mover = GpuMover(0)
        memory, slot = mover.allocate(image.nbytes), mover.allocate(image.nbytes)
        with mover.gpu.current():
            mover.gpu.call("cuMemcpyHtoDAsync", memory, image.ctypes.data, image.nbytes, 0)
            mover.gpu.call("cuStreamSynchronize", 0)
        shape = SpanShape(
            np.array([memory], np.uint64), np.array([slot], np.uint64),
            (4096, 4096), (128, 128), (), 128, False, (16, 16), (32, 32),
        )  # fmt: skip
        shapes = mover.prepare((shape,))
        batch = SpanBatch(shapes.shapes, (SpanRuns(0, None, np.array([[2, 0, 0, 0, 32], [9, 0, 1, 0, 32]], np.int64)),))
        work_list = mover.upload(shapes, batch)
        packed = mover.gather(work_list, 0, batch.total_nbytes, slot)
        while not packed.query():
            pass
        with mover.gpu.current():
            mover.gpu.call("cuMemcpyDtoHAsync", found.ctypes.data, slot, batch.total_nbytes, 0)
            mover.gpu.call("cuStreamSynchronize", 0)
        bases[0] = memory
        sums.append(mover.digest(layers, bases, runs, axes, **strides))
        mover.release(work_list)
        mover.close()

    with capture(local.gpu):
        in_thread(work)
    np.testing.assert_array_equal(found[:8192], np.concatenate([image[2 * 4096 : 3 * 4096], image[9 * 4096 : 10 * 4096]]))
    bases[0] = image.ctypes.data
    assert sums == [_native.digest(layers, bases, runs, axes, **strides)]

    mover = GpuMover(0)
    stack.callback(mover.close)
    held = [mover.prepare((SpanShape(bases, bases, (1, 1), (1, 1), (), 1, False, (1, 1), (1, 1)),))]
    with capture(local.gpu):
        held.clear()  # frees its table in this thread
        gc.collect()
