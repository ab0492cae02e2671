"""Backend `cma`: the kernel copies host memory between two processes of one host (`process_vm_writev`,
`process_vm_readv`).

`submit` copies in the calling thread, without the GIL, and with a second native thread for a large batch:

| event | result | why |
|---|---|---|
| every byte is copied | `DONE` | the kernel has returned |
| a call fails, or copies less | `FAILED` | the same; a part may have been copied |
| the peer's process has ended, or executes another program | `PeerUnreachable` at submit | the memory is another's |
| it has ended, or executes another program | `fence`: `QUIET` | only its threads copied for it |
| it lives | `fence`: `UNKNOWN` | one of its threads may be copying to or from this process |
| a copy with the peer is under way here | `fence`: `UNKNOWN` | another thread is inside `submit` |

The peer's process is the one that the kernel attests: by naming another, a peer could have this process write to any
process that it may trace, itself included.

`connect` refuses a peer in another network or process-id namespace, and one whose memory the kernel does not let this
process read: both need the same user and a permissive `kernel.yama.ptrace_scope`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from disagg.backends.adapter import Adapter, AdapterPeer
from disagg.backends.base import ADDRESS_SPACE, BackendOptions, Fence, RemotePeer, StagingShape, TransferStatus, Transport
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, PeerUnreachable
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessWatch, copy_refusal

GATHER_FROM = 256
"""Mean length in bytes from which pieces are better gathered than packed."""
COPY_THREADS = 2
"""More would take cores from the server."""


class CmaTransfer:
    completion = None

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def poll(self) -> TransferStatus:
        return TransferStatus.FAILED if self.error else TransferStatus.DONE

    def close(self) -> None:
        """Nothing to release."""


class CmaPeer(AdapterPeer):
    def __init__(self, process: ProcessWatch, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        super().__init__(regions, epoch=epoch)
        self.process = process
        self.num_copying = 0

    def refusal(self) -> str | None:
        what = f"is process {self.process.pid}, which has ended or executes another program"
        return super().refusal() or (what if self.process.has_left() else None)


class CmaDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process as the peer names it; it must be the attested one."""

    pid: int


_DECODER = msgspec.msgpack.Decoder(CmaDescriptor)


class CmaBackend(Adapter[CmaPeer, CmaDescriptor]):
    """Raises `BackendUnavailable` where the kernel refuses such copies, or another transport is required."""

    name = "cma"
    transport = "shm"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=CmaPeer, descriptors=_DECODER)
        if options.wanted not in (Transport.AUTO, Transport.SHM):
            raise BackendUnavailable(f"backend 'cma': expected transport 'auto' or 'shm', found {options.wanted.value!r}")
        byte = np.zeros(1, np.uint8)
        if (refusal := copy_refusal(os.getpid(), byte.ctypes.data)) is not None:
            raise BackendUnavailable(f"backend 'cma': the kernel refuses copies between processes: {refusal}")
        self._neighbours: set[ProcessWatch] = set()  # all that this engine has met
        self._num_copying = 0
        self._changed = threading.Condition()

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Break-even with single pieces is about 4 KiB. The engine gathers pieces into slots, so slots are large."""
        return StagingShape(
            pack_below=8 << 10, slot_nbytes=8 << 20, window=4, num_lent=8, gathers_from=GATHER_FROM, address_space=ADDRESS_SPACE
        )

    @property
    def staging(self) -> StagingShape:
        return self.staging_for(BackendOptions())

    def gathers_from(self, peer: RemotePeer) -> int | None:
        return GATHER_FROM if isinstance(peer, CmaPeer) else None

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.check_not_registered()
        for region in regions:
            if region.device != CPU:
                raise ConfigError(f"backend 'cma': expected memory of the CPU, found {region.device} at {region.address:#x}")
        self.set_registered(merge_regions(regions))

    def endpoint(self) -> bytes:
        self.check_open()
        return self.endpoint_with(CmaDescriptor(os.getpid()))

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> CmaPeer:
        """Reads one byte of the peer's memory, so that a refusal shows now."""
        self.check_open()
        descriptor, regions = self.decode(endpoint)
        if process is None:
            raise PeerUnreachable(
                "backend 'cma': the kernel does not attest the peer's process: it is on another host or in another network "
                "namespace, or this kernel has no pidfds"
            )
        if process.pid != descriptor.pid:
            raise PeerUnreachable(
                f"backend 'cma': the endpoint is of process {descriptor.pid}, the kernel attests process {process.pid}: the "
                "peer is in another namespace of process ids, or passes on an endpoint that is not its own"
            )
        self._neighbours.add(process)
        if process.has_left():
            raise PeerUnreachable(f"backend 'cma': process {process.pid} has ended, or executes another program")
        if any(region.device != CPU for region in regions):
            raise PeerUnreachable("backend 'cma': the peer has memory on a GPU")
        if regions and (refusal := copy_refusal(process.pid, regions[0].address)) is not None:
            raise PeerUnreachable(f"backend 'cma': process {process.pid}: {refusal}")
        return CmaPeer(process, regions, epoch=epoch)

    def disconnect(self, peer: RemotePeer) -> None:
        if isinstance(peer, CmaPeer):
            peer.connected = False

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        own = self.at_epoch(peer, epoch)
        if own is None or not self.is_quiet_after(own.process):
            return Fence.UNKNOWN
        with self._changed:
            return Fence.UNKNOWN if own.num_copying else Fence.QUIET

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """Only threads of that program copied for it."""
        return process.has_left()

    def is_quiet_when_closed(self) -> bool:
        """A living process may copy into this one, whether or not this engine is closed."""
        return all(process.has_left() for process in self._neighbours)

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> CmaTransfer:
        with self._copying(peer) as own:
            self.check_copies(own, copies)
            error = _native.copy_between_processes(
                own.process.pid, copies.source, copies.destination, copies.nbytes, write=True, num_threads=COPY_THREADS
            )
        return CmaTransfer(f"copying: {os.strerror(error)}" if error else None)

    @contextmanager
    def _copying(self, peer: RemotePeer) -> Iterator[CmaPeer]:
        with self._changed:
            own = self.reachable(peer)
            own.num_copying += 1
            self._num_copying += 1
        try:
            yield own
        finally:
            with self._changed:
                own.num_copying -= 1
                self._num_copying -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Returns once no copy from here is under way."""
        with self._changed:
            self.is_open = False
            self._changed.wait_for(lambda: not self._num_copying)
