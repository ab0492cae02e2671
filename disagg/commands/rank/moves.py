"""Contiguous blocks sent without the library's plans: by the engine alone, or by the system alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from disagg.backends.base import Backend, RemotePeer, Transfer, TransferStatus
from disagg.backends.nvlink.backend import NvlinkBackend
from disagg.commands.cases.instructions import Block, Move, Moved, MoveRaw
from disagg.commands.rank.rank import ResidentRank
from disagg.commands.rank.raw import pour, write_into
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, TransferFailed


def move(resident: ResidentRank, command: Move) -> Moved:
    """Raises `ConfigError` for a block outside the arena, `TransferFailed` if the engine fails one or takes too long."""
    base, room = resident.pools.address, resident.pools.arena.nbytes
    jobs: list[tuple[Backend, RemotePeer, CopyBatch]] = []
    for block in command.blocks:
        _check_source(block, room)
        backend, peer = resident.manager.engine(command.peer, block.rank)
        jobs.append((backend, peer, _copy(base, block)))
    time.sleep(max(0.0, command.at - time.monotonic()))
    start = time.monotonic()
    transfers = [_submit(*job) for job in jobs]
    _wait(transfers, timeout_s=command.timeout_s)
    return Moved(start, time.monotonic())


def _submit(backend: Backend, peer: RemotePeer, copies: CopyBatch) -> Transfer:
    """Between GPUs the driver's plain copies are the ceiling of the engine."""
    if isinstance(backend, NvlinkBackend):
        return backend.submit_plain(peer, copies)
    return backend.submit(peer, copies)


def _check_source(block: Block, arena_nbytes: int) -> None:
    if not 0 <= block.source_offset <= arena_nbytes - block.nbytes:
        raise ConfigError(f"block [{block.source_offset}, +{block.nbytes}) is outside the arena of {arena_nbytes} bytes")


def move_raw(resident: ResidentRank, command: MoveRaw) -> Moved:
    arena = resident.pools.arena
    base = arena.__array_interface__["data"][0]

    def one(number: int) -> None:
        block = command.blocks[number]
        _check_source(block, arena.nbytes)
        if command.pids:
            write_into(command.pids[number], base, block)
        else:
            content = arena[block.source_offset : block.source_offset + block.nbytes].data
            pour((command.hosts[number], command.ports[number]), command.numbers[number], content, command.timeout_s)

    with ThreadPoolExecutor(max(1, len(command.blocks))) as threads:
        time.sleep(max(0.0, command.at - time.monotonic()))
        start = time.monotonic()
        list(threads.map(one, range(len(command.blocks))))
        return Moved(start, time.monotonic())


def _copy(base: int, block: Block) -> CopyBatch:
    return CopyBatch(*([value] for value in (base + block.source_offset, block.destination, block.nbytes)))  # type: ignore[arg-type]


def _wait(transfers: list[Transfer], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    left = list(transfers)
    while left:
        for transfer in list(left):
            status = transfer.poll()
            if status is TransferStatus.DONE:
                transfer.close()
                left.remove(transfer)
            elif status is not TransferStatus.PENDING:
                raise TransferFailed(f"contiguous block: {status.value}: {transfer.error}")
        if left and time.monotonic() > deadline:
            raise TransferFailed(f"{len(left)} of {len(transfers)} contiguous blocks did not finish within {timeout_s} s")
        if left:
            time.sleep(50e-6)
