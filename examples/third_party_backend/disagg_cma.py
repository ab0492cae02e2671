"""Backend `cma`: the kernel copies between two processes of one host (`process_vm_readv`, `process_vm_writev`).

A complete engine in one file, for whoever writes one. The calling thread copies, so `submit` returns a settled transfer:

| what happens | status | why |
|---|---|---|
| the call copies every byte | `DONE` | the kernel has returned |
| it copies less, or refuses | `FAILED` | the same: nobody will copy the rest, and a part may have landed |
| the peer's process has ended | `PeerUnreachable`; `fence`: `QUIET` | only its own threads wrote here, and they are gone |
| the peer's process lives | `fence`: `UNKNOWN` | one of its threads may be inside a copy to this process |

A process is named by its number and its start time: a number that was given away again is another process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from disagg.backends.base import BackendOptions, Fence, Op, RemotePeer, StagingShape, TransferStatus, Transport
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint, local_and_remote
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessIdentity, host_identity

MAX_PIECES = os.sysconf("SC_IOV_MAX")
"""What one call takes."""
_libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the GIL
_CALLS = {Op.WRITE: _libc.process_vm_writev, Op.READ: _libc.process_vm_readv}
for _call in _CALLS.values():
    _call.restype = ctypes.c_ssize_t
    _vector = (ctypes.c_void_p, ctypes.c_ulong)
    _call.argtypes = (ctypes.c_int, *_vector, *_vector, ctypes.c_ulong)


class CmaTransfer:
    """Copies that have been made, or not, before anyone could ask."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def poll(self) -> TransferStatus:
        return TransferStatus.FAILED if self.error else TransferStatus.DONE

    def close(self) -> None:
        """Nothing is held."""


_PROCESS = msgspec.msgpack.Decoder(ProcessIdentity)


class CmaPeer:
    """A process at one epoch."""

    def __init__(self, process: ProcessIdentity, regions: tuple[RemoteRegion, ...], epoch: int) -> None:
        self.process, self.index, self.epoch, self.connected = process, RegionIndex(regions), epoch, True

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        return tuple(region for region in self.index.regions if isinstance(region, RemoteRegion))


class CmaBackend:
    """See the module. Raises `BackendUnavailable` where another transport is required."""

    name = "cma"
    transport = "cma"

    def __init__(self, options: BackendOptions) -> None:
        if options.wanted not in (Transport.AUTO, Transport.SHM):
            raise BackendUnavailable(f"backend 'cma': expected transport 'auto' or 'shm', found {options.wanted.value!r}")
        self._index: RegionIndex | None = None
        self._open = True
        self._busy = 0
        self._changed = threading.Condition()

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Never packs: a piece costs well below a microsecond."""
        return StagingShape()

    @property
    def staging(self) -> StagingShape:
        return StagingShape()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if self._index is not None or not self._open:
            raise LocalProtocolError("backend 'cma': register is called once, on an open engine")
        for region in regions:
            if region.device != CPU:
                raise ConfigError(f"backend 'cma': expected memory of the CPU, found {region.device} at {region.address:#x}")
        self._index = RegionIndex(merge_regions(regions))

    def endpoint(self) -> bytes:
        regions = [MemoryRegion(region.address, region.nbytes) for region in self._registered().regions]
        return encode_endpoint(self.name, msgspec.msgpack.encode(ProcessIdentity.own()), regions)

    def connect(self, endpoint: bytes, *, epoch: int) -> CmaPeer:
        self._registered()
        descriptor, regions = decode_endpoint(self.name, endpoint)
        try:
            process = _PROCESS.decode(descriptor)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"endpoint of backend 'cma': {error}") from error
        if process.host != host_identity():
            raise PeerUnreachable("backend 'cma': the peer is on another host, or in another namespace of process ids")
        peer = CmaPeer(process, regions, epoch)
        self._check_alive(peer)
        for region in regions[:1]:  # one byte, so that a refusal shows now and not with the first request
            byte = np.zeros(1, np.uint8)
            refusal = _copy(Op.READ, process.pid, *(np.array([v], np.uint64) for v in (byte.ctypes.data, region.address, 1)))
            if refusal:
                raise PeerUnreachable(f"backend 'cma': process {process.pid}: {refusal}")
        return peer

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> CmaTransfer:
        index = self._registered()
        if not isinstance(peer, CmaPeer):
            raise LocalProtocolError(f"backend 'cma': expected a peer of its own, found {type(peer).__name__}")
        if not peer.connected:
            raise PeerUnreachable(f"backend 'cma': the peer of epoch {peer.epoch} was disconnected")
        local, remote = local_and_remote(op, copies)
        index.require(local, copies.nbytes, side="local")
        peer.index.require(remote, copies.nbytes, side="remote")
        self._check_alive(peer)
        with self._changed:
            self._busy += 1
        try:
            return CmaTransfer(_copy(op, peer.process.pid, local, remote, copies.nbytes))
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """The end of the peer's process is the proof: nobody else ever wrote for it. What was posted from here has settled."""
        if not isinstance(peer, CmaPeer) or peer.epoch != epoch or not peer.process.has_ended():
            return Fence.UNKNOWN
        return Fence.QUIET

    def disconnect(self, peer: RemotePeer) -> None:
        if isinstance(peer, CmaPeer):
            peer.connected = False

    def close(self) -> None:
        """Returns once no copy is being made from here."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._busy)

    def _registered(self) -> RegionIndex:
        if self._index is None or not self._open:
            raise LocalProtocolError("backend 'cma': expected an open engine with registered memory")
        return self._index

    def _check_alive(self, peer: CmaPeer) -> None:
        if peer.process.has_ended():
            raise PeerUnreachable(f"backend 'cma': process {peer.process.pid} has ended")


def _copy(op: Op, pid: int, local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray) -> str | None:
    """Make the copies; why not all of them were made."""
    while len(nbytes):
        sides = [np.column_stack([side[:MAX_PIECES], nbytes[:MAX_PIECES]]) for side in (local, remote)]  # `struct iovec`s
        here, there = (np.ascontiguousarray(side) for side in sides)
        copied = _CALLS[op](pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        ends = np.cumsum(nbytes[:MAX_PIECES])
        if copied < 0 or (copied == 0 < ends[-1]):
            return f"process_vm_{op.value}v: {os.strerror(ctypes.get_errno())}"
        done = int(np.searchsorted(ends, copied, side="right"))  # one call copies 2 GiB at most: the rest takes another
        into = np.uint64(copied) - (ends[done - 1] if done else np.uint64(0))
        local, remote, nbytes = (column[done:].copy() for column in (local, remote, nbytes))
        if into:
            local[0], remote[0], nbytes[0] = local[0] + into, remote[0] + into, nbytes[0] - into
    return None
