"""Backend `procmem`: copies between two processes of one host, by writing to `/proc/PID/mem`.

A complete engine in one file, as an example for authors. The calling thread copies, so `submit` returns a settled transfer:

| what happens | status | why |
|---|---|---|
| every byte is written | `DONE` | the kernel has returned |
| a write fails, or writes nothing | `FAILED` | the same: nothing is under way, and a part may have been copied |
| the peer's process has ended | `PeerUnreachable`; `fence`: `QUIET` | only its own threads copied for it |
| the peer's process lives | `fence`: `UNKNOWN` | one of its threads may be inside a copy to this process |

An open `/proc/PID/mem` belongs to one process for ever: a later process with the same number is never written to.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence

import msgspec

from disagg.backends import (
    CPU,
    Adapter,
    AdapterPeer,
    BackendOptions,
    BackendUnavailable,
    ConfigError,
    CopyBatch,
    Fence,
    MemoryRegion,
    PeerUnreachable,
    ProcessWatch,
    RemotePeer,
    RemoteRegion,
    StagingShape,
    TransferStatus,
    Transport,
    merge_regions,
)


class ProcmemTransfer:
    """Copies that were made, or failed, before `submit` returned."""

    completion = None

    def __init__(self, error: str | None) -> None:
        self.error = error

    def poll(self) -> TransferStatus:
        return TransferStatus.FAILED if self.error else TransferStatus.DONE

    def close(self) -> None:
        """A transfer holds nothing."""


class ProcmemPeer(AdapterPeer):
    """A process at one epoch, and its open memory."""

    def __init__(self, process: ProcessWatch, memory: int, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        super().__init__(regions, epoch=epoch)
        self.process = process
        self.memory = memory

    def refusal(self) -> str | None:
        return super().refusal() or ("has ended" if self.process.has_ended() else None)


_DECODER = msgspec.msgpack.Decoder(int)


class ProcmemBackend(Adapter[ProcmemPeer, int]):
    """See the module. Raises `BackendUnavailable` where another transport is required."""

    name = "procmem"
    transport = "procmem"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=ProcmemPeer, descriptors=_DECODER)
        if options.wanted not in (Transport.AUTO, Transport.SHM):
            raise BackendUnavailable(f"backend 'procmem': expected transport 'auto' or 'shm', found {options.wanted.value!r}")
        self._peers_open: set[ProcmemPeer] = set()
        self._lock = threading.Lock()  # held while bytes are copied, so that no file is closed meanwhile

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Pieces below 16 KiB are packed: each piece is a system call and a turn of a Python loop."""
        return StagingShape(pack_below=16 << 10)

    @property
    def staging(self) -> StagingShape:
        return self.staging_for(BackendOptions())

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.check_not_registered()
        for region in regions:
            if region.device != CPU:
                raise ConfigError(f"backend 'procmem': expected memory of the CPU, found {region.device}")
        self.set_registered(merge_regions(regions))

    def endpoint(self) -> bytes:
        return self.endpoint_with(os.getpid())

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> ProcmemPeer:
        """Opens the peer's memory, and reads one byte of it, so that a refusal shows now and not with the first request."""
        self.check_open()
        pid, regions = self.decode(endpoint)
        if process is None or process.pid != pid:  # only the kernel is believed
            raise PeerUnreachable("backend 'procmem': the kernel does not attest that the peer is a process of this host")
        try:
            memory = os.open(f"/proc/{process.pid}/mem", os.O_RDWR)
        except OSError as error:
            raise PeerUnreachable(f"backend 'procmem': process {process.pid}: {error.strerror}") from error
        peer = ProcmemPeer(process, memory, regions, epoch=epoch)
        self._peers_open.add(peer)
        refusal = _refusal(memory, regions[0].address) if regions else None
        if refusal or process.has_ended():  # `has_ended` after opening: the number may have been another process's
            self.disconnect(peer)
            raise PeerUnreachable(f"backend 'procmem': process {process.pid}: {refusal or 'has ended'}")
        return peer

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> ProcmemTransfer:
        with self._lock:
            own = self.reachable(peer)
            self.check_copies(own, copies)
            return ProcmemTransfer(_write(own.memory, copies))

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """`QUIET` once the peer's process has ended. Copies of this side have ended: `submit` holds the lock meanwhile."""
        with self._lock:
            own = self.at_epoch(peer, epoch)
            return Fence.QUIET if own is not None and own.process.has_ended() else Fence.UNKNOWN

    def disconnect(self, peer: RemotePeer) -> None:
        with self._lock:
            if isinstance(peer, ProcmemPeer) and peer.connected:
                peer.connected = False
                self._peers_open.discard(peer)
                os.close(peer.memory)

    def close(self) -> None:
        """Returns once no copy is being made from here."""
        self.is_open = False
        for peer in tuple(self._peers_open):
            self.disconnect(peer)


def _refusal(memory: int, address: int) -> str | None:
    """Why the byte at `address` cannot be read; `None` if it can."""
    try:
        return None if os.pread(memory, 1, address) else "the process has ended"
    except OSError as error:
        return f"reading a byte: {error.strerror}"


def _write(memory: int, copies: CopyBatch) -> str | None:
    """Write every piece; returns why not all of them were written."""
    for local, remote, nbytes in zip(*(c.tolist() for c in (copies.source, copies.destination, copies.nbytes)), strict=True):
        done = 0
        while done < nbytes:
            here = (ctypes.c_ubyte * (nbytes - done)).from_address(local + done)
            try:
                count = os.pwrite(memory, here, remote + done)
            except OSError as error:
                return f"writing {nbytes} bytes: {error.strerror}"
            if count == 0:
                return f"writing {nbytes} bytes: the process has ended"
            done += count
    return None
