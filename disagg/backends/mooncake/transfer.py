"""A Mooncake transfer: its pieces and its status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from disagg.backends.adapter import check_closable
from disagg.backends.base import TransferStatus
from disagg.core import _native
from disagg.core.copies import Addresses, CopyBatch


@dataclass(frozen=True)
class Pieces:
    local: Addresses
    remote: Addresses
    nbytes: Addresses

    def __len__(self) -> int:
        return len(self.nbytes)

    def between(self, start: int, stop: int) -> tuple[Addresses, Addresses, Addresses]:
        return self.local[start:stop], self.remote[start:stop], self.nbytes[start:stop]

    def listed(self, start: int, stop: int) -> tuple[list[int], list[int], list[int]]:
        local, remote, nbytes = self.between(start, stop)
        return local.tolist(), remote.tolist(), nbytes.tolist()


def cut(copies: CopyBatch, *, split: int) -> Pieces:
    local, remote, nbytes = copies.source, copies.destination, copies.nbytes
    if len(nbytes) and (int(nbytes.max()) > split or int(nbytes.min()) == 0):
        limit = np.uint64(split)
        counts = ((nbytes + (limit - np.uint64(1))) // limit).astype(np.int64)
        ends = np.cumsum(counts)
        nth = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
        offsets = nth.astype(np.uint64) * limit
        local, remote = np.repeat(local, counts) + offsets, np.repeat(remote, counts) + offsets
        nbytes = np.minimum(np.repeat(nbytes, counts) - offsets, limit)
    return Pieces(local, remote, nbytes)


@dataclass(frozen=True)
class Opcodes:
    write: object
    read: object


class Queue(Protocol):
    by_caller: bool

    def poll(self) -> None: ...


class MooncakeTransfer:
    """A write, or a read if it `reads`. Only the holder of the queue's work lock changes it."""

    def __init__(self, queue: Queue, pieces: Pieces, *, reads: bool = False) -> None:
        self._queue = queue
        self.reads = reads
        self.pieces = pieces
        self.status = TransferStatus.PENDING if len(pieces) else TransferStatus.DONE
        self.error: str | None = None
        # Without a flag where the caller does the work: it polls.
        self.completion = None if queue.by_caller else _native.Flag()
        self.num_posted = 0
        self.num_flights = 0
        self.ended_wholly = True
        """Every posted piece is known to have ended in this engine, well or badly."""

    def poll(self) -> TransferStatus:
        if self.status is TransferStatus.PENDING:
            self._queue.poll()
        return self.status

    def settle(self, status: TransferStatus) -> None:
        self.status = status
        if self.completion is not None:
            self.completion.set()

    def close(self) -> None:
        """The engine freed its part when the transfer settled."""
        check_closable(self.status)

    @property
    def posted_wholly(self) -> bool:
        return self.error is not None or self.num_posted == len(self.pieces)

    def fail(self, error: str) -> None:
        self.error = self.error or error
