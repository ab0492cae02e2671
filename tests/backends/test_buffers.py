"""Pinned buffers of a GPU that has no memory left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.backends.cuda.buffers import BufferPool
from disagg.backends.cuda.driver import CudaError


class FullGpu:
    """A driver whose function named `refused` fails. It counts allocations."""

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.num_allocated = 0

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def call(self, name: str, *_: Any) -> int:
        if name == self.refused:
            raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")
        self.num_allocated += {"cuMemAlloc": 1, "cuMemHostAlloc": 1, "cuMemFreeHost": -1}.get(name, 0)
        return 4096

    def event(self) -> int:
        return self.call("cuEventCreate")

    def free(self, _: int) -> None:
        self.num_allocated -= 1


@pytest.mark.parametrize("refused", ["cuMemAlloc", "cuMemHostAlloc", "cuEventCreate"])
def test_a_buffer_that_cannot_be_made_leaves_nothing_behind(refused: str) -> None:
    gpu = FullGpu(refused)
    pool = BufferPool(gpu)  # type: ignore[arg-type]
    with pytest.raises(CudaError):
        pool.take(1 << 20)
    assert gpu.num_allocated == 0
