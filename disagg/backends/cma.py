"""Backend `cma`: the kernel copies between two processes of one host (`process_vm_writev`, `process_vm_readv`).

For host memory. `submit` copies in the calling thread, without the GIL, and on a second native thread where the batch is
large; one system call takes up to 1,024 pieces. So the transfer that `submit` returns has settled:

| what happens | status | why |
|---|---|---|
| the calls copy every byte | `DONE` | the kernel has returned |
| a call fails, or copies less | `FAILED` | the same: nothing is under way, and a part may have been copied |
| the peer's process has ended | `PeerUnreachable` at submit | its memory is gone; another process may have its number |
| the peer's process has ended, or executes another program | `fence`: `QUIET` | only its threads copied for it |
| the peer's process lives | `fence`: `UNKNOWN` | one of its threads may be inside a copy to or from this process |
| a copy with the peer is under way here | `fence`: `UNKNOWN` | another thread of this process is inside `submit` |

The process is the one that the kernel attests (`disagg.machine.processes`), never one that the peer only names: otherwise a
peer could have this process write to any process that it may trace, itself included. Closing proves that nothing can touch
memory here only if every process that this engine has met has ended, or executes another program.

`connect` refuses a peer on another host or in another network or process-id namespace, and one whose memory the kernel does not
let this process read: the two processes must have the same user, and `kernel.yama.ptrace_scope` must allow it.
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
"""Mean length in bytes from which on pieces are written from where they lie: shorter ones are better packed first."""
COPY_THREADS = 2
"""Native threads of a large batch. More would take cores that the server needs."""


class CmaTransfer:
    """Copies that were made, or failed, before `submit` returned."""

    completion = None

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def poll(self) -> TransferStatus:
        return TransferStatus.FAILED if self.error else TransferStatus.DONE

    def close(self) -> None:
        """A transfer holds nothing."""


class CmaPeer(AdapterPeer):
    """A process at one epoch."""

    def __init__(self, process: ProcessWatch, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        super().__init__(regions, epoch=epoch)
        self.process = process
        self.num_copying = 0

    def refusal(self) -> str | None:
        ended = f"is process {self.process.pid}, which has ended" if self.process.has_ended() else None
        return super().refusal() or ended


class CmaDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process of an endpoint, by its own account. It must be the one that the kernel attests."""

    pid: int


_DECODER = msgspec.msgpack.Decoder(CmaDescriptor)


class CmaBackend(Adapter[CmaPeer, CmaDescriptor]):
    """See the module. Raises `BackendUnavailable` where the kernel refuses such copies, or another transport is required."""

    name = "cma"
    transport = "shm"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=CmaPeer, descriptors=_DECODER)
        if options.wanted not in (Transport.AUTO, Transport.SHM):
            raise BackendUnavailable(f"backend 'cma': expected transport 'auto' or 'shm', found {options.wanted.value!r}")
        byte = np.zeros(1, np.uint8)
        if (refusal := copy_refusal(os.getpid(), byte.ctypes.data)) is not None:
            raise BackendUnavailable(f"backend 'cma': the kernel refuses copies between processes: {refusal}")
        self._neighbours: set[ProcessWatch] = set()  # every process that this engine has met
        self._num_copying = 0
        self._changed = threading.Condition()

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Break-even with single pieces is about 4 KiB. The engine gathers pieces into the peer's slots, so slots are large."""
        return StagingShape(
            pack_below=8 << 10, slot_nbytes=8 << 20, window=4, num_lent=8, gathers_from=GATHER_FROM, address_space=ADDRESS_SPACE
        )

    @property
    def staging(self) -> StagingShape:
        return self.staging_for(BackendOptions())

    def gathers_from(self, peer: RemotePeer) -> int | None:
        """See `Gathering`: the kernel reads the pieces from where they lie."""
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

    # -- peers ---------------------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> CmaPeer:
        """Reads one byte of the peer's first region, so that a refusal shows now and not with the first request."""
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
        if process.has_ended():
            raise PeerUnreachable(f"backend 'cma': process {process.pid} has ended")
        if any(region.device != CPU for region in regions):
            raise PeerUnreachable("backend 'cma': the peer has memory on a GPU")
        if regions and (refusal := copy_refusal(process.pid, regions[0].address)) is not None:
            raise PeerUnreachable(f"backend 'cma': process {process.pid}: {refusal}")
        return CmaPeer(process, regions, epoch=epoch)

    def disconnect(self, peer: RemotePeer) -> None:
        if isinstance(peer, CmaPeer):
            peer.connected = False

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """`QUIET` once the peer's process has ended and no copy with it is under way here."""
        own = self.at_epoch(peer, epoch)
        if own is None or not self.is_quiet_after(own.process):
            return Fence.UNKNOWN
        with self._changed:
            return Fence.UNKNOWN if own.num_copying else Fence.QUIET

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """See `ProvesByProcess`: only threads of that program copied for it."""
        return process.has_left()

    def is_quiet_when_closed(self) -> bool:
        """See `QuietWhenClosed`: a process that lives may copy into this one, whether or not the engine here is closed."""
        return all(process.has_left() for process in self._neighbours)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> CmaTransfer:
        with self._copying(peer) as own:
            self.check_copies(own, copies)
            error = _native.copy_between_processes(
                own.process.pid, copies.source, copies.destination, copies.nbytes, write=True, num_threads=COPY_THREADS
            )
        return CmaTransfer(f"copying: {os.strerror(error)}" if error else None)

    @contextmanager
    def _copying(self, peer: RemotePeer) -> Iterator[CmaPeer]:
        """`peer`, which nothing prevents from being copied to or from; within the scope `close` waits."""
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
        """Returns once no copy is being made from here."""
        with self._changed:
            self.is_open = False
            self._changed.wait_for(lambda: not self._num_copying)
