"""The copy kernels on one GPU, and their transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg.backends.adapter import check_closable
from disagg.backends.base import TransferStatus
from disagg.backends.cuda.buffers import Buffer, BufferPool, batch_nbytes
from disagg.backends.cuda.driver import KERNEL_SOURCE, CudaError, Gpu
from disagg.backends.cuda.queue import Queue
from disagg.backends.cuda.work_list import ShapeTable, encode_work_list, work_list_nbytes
from disagg.backends.nvlink.mapping import NvlinkPeer
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.spans import SpanBatch, SpanShape

THREADS = 1024
MIN_TILE, MAX_TILE = 4 << 10, 64 << 10
"""Bytes that a warp takes at a time."""
TILES_PER_WARP = 4
CONVERTING_BLOCKS = 96
"""Minimum blocks of a copy that converts numbers (`docs/benchmarks/convert-2xgpu.json`)."""
PART = 1 << 16
"""Maximum pieces per launch. The next part of a batch is uploaded while those before it are copied."""
NEAR_WORD, NEAR_NBYTES = 16, 16 << 10
"""Word size and maximum size of a work list that the kernel reads from host memory."""
NUM_SMALL_BUFFERS = 4
"""Allocated at the start; the pool adds others."""


@dataclass(frozen=True, eq=False)
class NvlinkSpans:
    peer: NvlinkPeer
    table: ShapeTable
    address: int

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.table.shapes


class NvlinkTransfer:
    def __init__(self, peer: NvlinkPeer, advance: Callable[[NvlinkTransfer], None]) -> None:
        self.peer = peer
        self._advance = advance
        self.buffers: list[Buffer] = []
        self.posted = False
        self.event: int | None = None
        self.completion: _native.CudaEvent | None = None
        self.status = TransferStatus.PENDING
        self.error: str | None = None

    def poll(self) -> TransferStatus:
        if self.status is TransferStatus.PENDING:
            self._advance(self)
        return self.status

    def close(self) -> None:
        """Resources were given back when it settled."""
        check_closable(self.status)


class NvlinkEngine:
    """Not thread-safe: the backend holds its lock."""

    def __init__(self, gpu: Gpu, blocks: int) -> None:
        self.gpu = gpu
        self._blocks = blocks
        self._pool = BufferPool(gpu)
        self._module: Any = None
        self._kernels: dict[str, int] = {}
        self._queue: Queue | None = None
        self._scratch = self._counters = 0

    def start(self) -> None:
        """Enter `gpu.current()` first."""
        self._module, self._kernels = self.gpu.compile(KERNEL_SOURCE.read_text(), ["move_pieces", "move_spans"])
        self._queue = Queue(self.gpu, holds_gil=True)
        self._scratch = self.gpu.table(np.zeros(2, np.uint64))
        # All requests share one pair: kernels on a stream run one after the other, and each resets it to 0.
        self._counters = self.gpu.table(np.zeros(2, np.uint64))
        self._pool.preallocate(NUM_SMALL_BUFFERS)

    @property
    def queue(self) -> Queue:
        assert self._queue is not None
        return self._queue

    def post(self, transfer: NvlinkTransfer, copies: CopyBatch) -> None:
        table = (transfer.peer.table, len(transfer.peer.regions))
        for start in range(0, len(copies), PART):
            part = slice(start, start + PART)
            source, destination, nbytes = copies.source[part], copies.destination[part], copies.nbytes[part]
            buffer = self._take(transfer, batch_nbytes(len(nbytes)))
            total, size = buffer.fill(source, destination, nbytes)
            blocks, tile = launch_shape(total, max_blocks=self._blocks)
            last = start + PART >= len(copies)
            self.queue.upload(buffer, size)
            arguments = (buffer.device_address, len(nbytes), *table, tile)
            self._launch(transfer, self._kernels["move_pieces"], arguments, blocks, last=last)

    def post_spans(self, transfer: NvlinkTransfer, prepared: NvlinkSpans, batch: SpanBatch) -> None:
        """One kernel copies the request. It reads a small work list from host memory, because an upload takes three driver
        calls.
        """
        max_blocks = max(self._blocks, CONVERTING_BLOCKS) if prepared.table.shapes.convert else self._blocks
        blocks, tile = launch_shape(batch.total_nbytes, max_blocks=max_blocks)
        buffer = self._take(transfer, work_list_nbytes(batch))
        nbytes, total = encode_work_list(batch, prepared.table, tile=tile, out=buffer.words), batch.total_nbytes
        brought = -(-nbytes // NEAR_WORD)
        counters, address = self._counters, buffer.host_address
        if brought * NEAR_WORD > NEAR_NBYTES:
            self.queue.upload(buffer, nbytes)
            counters = address = buffer.device_address
            brought = 0
        arguments = (counters, address, brought, prepared.address, *batch.core.tiles(0, total), tile, 0, total, 0, 0)
        self._launch(transfer, self._kernels["move_spans"], arguments, blocks, shared=brought * NEAR_WORD, last=True)

    def post_plain(self, transfer: NvlinkTransfer, copies: CopyBatch) -> None:
        """Both columns hold addresses of this process."""
        transfer.posted = True
        with self.gpu.current():
            for columns in zip(copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist(), strict=True):
                self.gpu.call("cuMemcpyAsync", *columns, self.queue.stream)
            transfer.event = self._pool.take_event()
            self.gpu.call("cuEventRecord", transfer.event, self.queue.stream)

    def _take(self, transfer: NvlinkTransfer, nbytes: int) -> Buffer:
        buffer = self._pool.take(nbytes)
        transfer.buffers.append(buffer)
        return buffer

    def _launch(
        self, transfer: NvlinkTransfer, kernel: int, arguments: Sequence[int], blocks: int, *, shared: int = 0, last: bool
    ) -> None:
        done = transfer.event = self._pool.take_event() if last else None
        transfer.posted = True
        self.queue.launch(kernel, arguments, blocks=blocks, threads=THREADS, shared=shared, done=done or 0)
        if done is not None:
            transfer.completion = self.queue.completion(done)  # not earlier: the event still shows its last use

    def read_byte(self, address: int) -> None:
        self.gpu.call("cuMemcpyDtoDAsync", self._scratch, address, 1, self.queue.uploads)

    def drain(self) -> None:
        """Enter `gpu.current()` first."""
        self.queue.drain()

    def give_back(self, transfer: NvlinkTransfer) -> None:
        for buffer in transfer.buffers:
            self._pool.give_back(buffer)
        if transfer.event is not None:
            self._pool.give_back_event(transfer.event)
        transfer.buffers, transfer.event = [], None

    def close(self) -> None:
        """In a lost context the calls fail; its resources end with it."""
        with suppress(CudaError), self.gpu.current():
            self._pool.close()
            if self._queue is not None:
                self._queue.close()
            for address in (self._scratch, self._counters):
                if address:
                    self.gpu.free(address)
            if self._module is not None:
                self.gpu.call("cuModuleUnload", self._module)
        self.gpu.release()


def launch_shape(total: int, *, max_blocks: int) -> tuple[int, int]:
    warps = THREADS // 32
    blocks = max(1, min(max_blocks, total // (warps * MIN_TILE)))
    share = max(total // (blocks * warps * TILES_PER_WARP), 1)
    return blocks, min(max(1 << (share.bit_length() - 1), MIN_TILE), MAX_TILE)
