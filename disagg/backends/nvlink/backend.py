"""Backend `nvlink`: a kernel reads and writes the memory of a peer GPU of the same machine, which maps every CUDA allocation
that contains a region (`kernels.cu`). The peer's GPU does no work.

| event | status | reason |
|---|---|---|
| the kernel's event has completed | `DONE` | a kernel's stores are visible to every GPU once it has ended |
| it has not completed | `PENDING` | |
| it reports an error | `UNSETTLED` | the context is lost; what its kernels did is unknown until it is destroyed |
| an error before the first kernel of a batch | raised | nothing was posted |
| an error after it | `FAILED` | the posted kernels have ended; `UNSETTLED` if waiting for them fails |
| the peer is killed during the copy | `DONE` | its memory stays allocated while it is mapped here |
| the peer frees its memory during the copy | `DONE` | likewise; its next allocation is other memory |
| the peer has ended | `PeerUnreachable` | at the next submit, if its process is attested |
| it has ended, and the driver lists no context of it | `fence`: `QUIET` | a context's channels are stopped before it is freed |
| it has ended, another process holds its device files | `fence`: `UNKNOWN` | its kernels go on |
| it lives, or is stopped | `fence`: `UNKNOWN` | likewise |
| a copy with the peer is under way here | `fence`: `UNKNOWN` | it reads or writes the peer's memory |

This was observed on H200 GPUs (`tests/gpu/test_kill.py`, `benchmarks.gpu.fence`); NVIDIA calls it undefined behaviour to
free exported memory before it is unmapped.

CUDA cannot revoke a mapping, so `fence` has to prove that no kernel of the peer runs any more. NVML's list of processes with
a context misses a context that a living process has yet to create; a pidfd misses a child that inherited the device files,
or a process that received them. So it takes both. Without NVML, with MPS or MIG, in another process-id or network namespace,
or if the list did not show the process when this side connected, the answer stays `UNKNOWN`.

Two processes may share a GPU.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from disagg.backends.abilities import PreparedSpans
from disagg.backends.adapter import Adapter
from disagg.backends.base import BackendOptions, Fence, RemotePeer, StagingShape, TransferStatus
from disagg.backends.cuda.driver import Allocation, CudaError, Gpu, load_bindings
from disagg.backends.cuda.work_list import encode_shapes
from disagg.backends.nvlink.engine import NvlinkEngine, NvlinkSpans, NvlinkTransfer
from disagg.backends.nvlink.holders import Mappings
from disagg.backends.nvlink.mapping import (
    DECODER,
    Descriptor,
    ExportedAllocation,
    NvlinkPeer,
    check_access,
    export_memory,
    gpu_of,
)
from disagg.backends.nvlink.neighbours import Neighbours
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import BackendError, ConfigError, LocalProtocolError, PeerUnreachable
from disagg.core.memory import MemoryRegion
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import ProcessWatch, machine_identity

logger = logging.getLogger(__name__)

UNMAP_TIMEOUT_S = 5.0
BLOCKS_VARIABLE = "DISAGG_NVLINK_BLOCKS"
DEFAULT_BLOCKS = 16
"""Thread blocks of a copy: multiprocessors that it takes from the server (`docs/benchmarks/nvlink-2xh200.json`)."""


class NvlinkBackend(Adapter[NvlinkPeer, Descriptor]):
    """`blocks` overrides the environment variable. Raises `BackendUnavailable` without an NVIDIA driver or the CUDA
    bindings.
    """

    name = "nvlink"

    def __init__(self, options: BackendOptions, *, blocks: int | None = None) -> None:
        super().__init__(peers=NvlinkPeer, descriptors=DECODER)
        if options.require is not None:
            raise ConfigError(f"backend 'nvlink' has a transport of its own, so it cannot require {options.require.value!r}")
        self._blocks = _blocks() if blocks is None else blocks
        load_bindings()
        self._lock = threading.RLock()
        self._engine: NvlinkEngine | None = None
        self._allocations: tuple[Allocation, ...] = ()
        self._mappings: Mappings | None = None
        self._connected: set[NvlinkPeer] = set()
        self._pending: set[NvlinkTransfer] = set()
        self._neighbours = Neighbours()
        self._was_quiet = False
        self._transports: set[str] = set()
        self.mapped_by: tuple[int, ...] = ()
        """After `close`: processes that still had this side's memory mapped."""

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Never packs: the kernel copies pieces of every size at the same speed."""
        return StagingShape(pack_below=0)

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=0)

    @property
    def transport(self) -> str:
        return " + ".join(sorted(self._transports)) or "peer memory (no peer yet)"

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        with self._lock:
            self.check_not_registered()
            engine = NvlinkEngine(Gpu(gpu_of(regions)), self._blocks)
            try:
                with engine.gpu.current():
                    allocations, merged = export_memory(engine.gpu, regions)
                    engine.start()
                self.set_registered(merged)
            except CudaError as error:
                engine.close()
                raise ConfigError(f"backend 'nvlink' cannot serve this memory: {error}: {list(regions)}") from error
            except BaseException:
                engine.close()
                raise
            self._engine, self._allocations = engine, allocations
            self._mappings = Mappings()

    def endpoint(self) -> bytes:
        with self._lock:
            self.check_open()
            engine = self._own_engine()
            exported = tuple(ExportedAllocation(a.base, a.nbytes, a.handle) for a in self._allocations)
            assert self._mappings is not None
            return self.endpoint_with(Descriptor(machine_identity(), engine.gpu.uuid, self._mappings.address, exported))

    # -- peers ----------------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> NvlinkPeer:
        descriptor, regions = self.decode(endpoint)
        for region in regions:
            descriptor.allocation_of(region)
        with self._lock:
            self.check_open()
            engine = self._own_engine()
            if self._mappings is not None:
                self._mappings.holders()  # empties its backlog
            peer = NvlinkPeer(regions, epoch=epoch, descriptor=descriptor, process=process)
            try:
                peer.neighbour = self._neighbours.meet(process, descriptor.gpu)
                transport = self._map(engine, peer, descriptor)
            except CudaError as error:
                self._unmap(peer)
                raise PeerUnreachable(f"backend 'nvlink': the peer's memory cannot be mapped: {error}") from error
            except BaseException:
                self._unmap(peer)
                raise
            self._connected.add(peer)
            self._transports.add(transport)
            return peer

    def _map(self, engine: NvlinkEngine, peer: NvlinkPeer, descriptor: Descriptor) -> str:
        """Returns the transport. After an error, `_unmap` undoes what succeeded."""
        transport = check_access(engine.gpu, descriptor, is_own=peer.is_own)
        if peer.has_ended:
            raise PeerUnreachable("backend 'nvlink': the process that owns the memory has ended")
        if peer.held is None:
            logger.info("backend 'nvlink': this mapping cannot be registered with the process that owns the memory")
        with engine.gpu.current():
            peer.map(engine.gpu, descriptor)
            if peer.regions:
                self._warm_up(engine, peer)
        return transport

    def _warm_up(self, engine: NvlinkEngine, peer: NvlinkPeer) -> None:
        """Pay all first-use costs now: read a byte, and run a kernel on an empty piece."""
        transfer = NvlinkTransfer(peer, self.advance)
        first = peer.regions[0].address
        copies = CopyBatch(*(np.array([value], np.uint64) for value in (self.index.regions[0].address, first, 0)))
        try:
            engine.read_byte((first + int(peer.deltas[0])) % 2**64)
            engine.post(transfer, copies)
            engine.drain()
        finally:
            engine.give_back(transfer)

    def disconnect(self, peer: RemotePeer) -> None:
        """Unmap the peer's memory, once all its transfers have settled."""
        with self._lock:
            if not isinstance(peer, NvlinkPeer) or not peer.connected:
                return
            peer.connected = False
            if not peer.pending:
                self._unmap(peer)

    def _unmap(self, peer: NvlinkPeer) -> None:
        self._connected.discard(peer)
        peer.unmap(self._own_engine().gpu)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """See the module."""
        own = self.at_epoch(peer, epoch)
        if own is None or own.neighbour is None or not own.neighbour.is_quiet():
            return Fence.UNKNOWN
        with self._lock:
            for transfer in tuple(self._pending):
                transfer.poll()
            return Fence.UNKNOWN if own.pending else Fence.QUIET

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """A process that this engine has never met is not proved quiet."""
        return self._neighbours.is_quiet_after(process)

    def is_quiet_when_closed(self) -> bool:
        """True once every process that may have mapped this one's memory is proved quiet."""
        return self._was_quiet if not self.is_open else self._is_quiet()

    def _is_quiet(self) -> bool:
        mapped_by = self._mappings.seen if self._mappings is not None else set[int]()
        return not self._pending and self._neighbours.are_quiet(mapped_by)

    # -- transfers ------------------------------------------------------------------------------------------------

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> NvlinkTransfer:
        with self._lock:
            own, engine = self.reachable(peer), self._own_engine()
            self.check_copies(own, copies)
            return self._post(own, lambda transfer: engine.post(transfer, copies), empty=not len(copies))

    def submit_plain(self, peer: RemotePeer, copies: CopyBatch) -> NvlinkTransfer:
        """Write with the driver's own copies: the ceiling of the benchmarks."""
        with self._lock:
            own, engine = self.reachable(peer), self._own_engine()
            self.index.require(copies.source, copies.nbytes, side="local")
            where = own.index.check(copies.destination, copies.nbytes, side="remote")
            here = CopyBatch(copies.source, copies.destination + own.deltas[where], copies.nbytes)
            return self._post(own, lambda transfer: engine.post_plain(transfer, here), empty=not len(copies))

    def prepare_spans(self, peer: RemotePeer, shapes: Sequence[SpanShape]) -> NvlinkSpans:
        with self._lock:
            own, engine = self.reachable(peer), self._own_engine()

            def translate(addresses: Addresses, nbytes: int, side: int) -> Addresses:
                sizes = np.full(len(addresses), nbytes, np.uint64)
                if side == 0:  # the source
                    self.index.require(addresses, sizes, side="local")
                    return addresses
                deltas: Addresses = own.deltas[own.index.check(addresses, sizes, side="remote")]
                return addresses + deltas

            table = encode_shapes(shapes, translate)
            try:
                with engine.gpu.current():
                    address = engine.gpu.table(table.words)
            except CudaError as error:
                raise BackendError(f"backend 'nvlink': span classes cannot be uploaded: {error}") from error
            own.prepared.append(address)
            return NvlinkSpans(own, table, address)

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> NvlinkTransfer:
        with self._lock:
            if not isinstance(prepared, NvlinkSpans) or batch.shapes is not prepared.shapes:
                raise LocalProtocolError("backend 'nvlink': expected a batch over the span classes that were prepared")
            own, engine = self.reachable(prepared.peer), self._own_engine()
            return self._post(own, lambda transfer: engine.post_spans(transfer, prepared, batch), empty=not len(batch))

    def _post(self, peer: NvlinkPeer, post: Callable[[NvlinkTransfer], None], *, empty: bool) -> NvlinkTransfer:
        transfer = NvlinkTransfer(peer, self.advance)
        if empty:
            transfer.status = TransferStatus.DONE
            return transfer
        peer.pending += 1
        self._pending.add(transfer)
        try:
            post(transfer)
        except CudaError as error:
            self._fail(transfer, error)
        except BaseException:
            self._own_engine().give_back(transfer)
            self._forget(transfer)
            raise
        return transfer

    def _forget(self, transfer: NvlinkTransfer) -> None:
        """The last transfer of a disconnected peer also unmaps it."""
        self._pending.discard(transfer)
        transfer.peer.pending -= 1
        if not transfer.peer.connected and not transfer.peer.pending:
            self._unmap(transfer.peer)

    def _fail(self, transfer: NvlinkTransfer, error: CudaError) -> None:
        """Wait for posted kernels; raises `BackendError` if nothing was posted."""
        transfer.error = f"posting: {error}"
        engine = self._own_engine()
        try:
            with engine.gpu.current():
                engine.drain()
                engine.give_back(transfer)
            transfer.status = TransferStatus.FAILED
        except CudaError:
            transfer.status = TransferStatus.UNSETTLED
        if not transfer.posted:
            transfer.status = TransferStatus.FAILED
            self._forget(transfer)
            raise BackendError(f"backend 'nvlink': nothing was posted: {error}") from error
        if transfer.status is TransferStatus.FAILED:
            self._forget(transfer)

    def advance(self, transfer: NvlinkTransfer) -> None:
        with self._lock:
            if transfer.status is not TransferStatus.PENDING:  # another thread may have updated it
                return
            engine = self._own_engine()
            try:
                assert transfer.event is not None
                past = engine.queue.is_past(transfer.event)
            except CudaError as error:
                transfer.status, transfer.error = TransferStatus.UNSETTLED, transfer.error or f"copying: {error}"
                return
            if past:
                transfer.status = TransferStatus.FAILED if transfer.error else TransferStatus.DONE
                engine.give_back(transfer)
                self._forget(transfer)

    # -- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until every kernel posted here has ended; transfers are then `DONE`, or `UNSETTLED` in a lost context. Then
        give peers `UNMAP_TIMEOUT_S` to unmap this side's memory.
        """
        with self._lock:
            if not self.is_open:
                return
            engine = self._engine
            if engine is not None:
                with suppress(CudaError), engine.gpu.current():
                    engine.drain()
                for transfer in tuple(self._pending):
                    transfer.poll()
                for peer in tuple(self._connected):
                    peer.connected = False
                    self._unmap(peer)
                engine.close()
            self.is_open = False
        self._wait_for_unmapping()  # without the lock: this process may hold the last mapping
        self._was_quiet = self._is_quiet()

    def _wait_for_unmapping(self) -> None:
        if self._mappings is None:
            return
        self.mapped_by = self._mappings.wait(UNMAP_TIMEOUT_S)
        if self.mapped_by:
            logger.warning(
                "backend 'nvlink': after %s s processes %s still have this side's memory mapped; their kernels may still write",
                UNMAP_TIMEOUT_S, ", ".join(map(str, self.mapped_by)),
            )  # fmt: skip
        self._mappings.close()

    def _own_engine(self) -> NvlinkEngine:
        if self._engine is None:
            raise LocalProtocolError("backend 'nvlink': register has not been called")
        return self._engine


def _blocks() -> int:
    text = os.environ.get(BLOCKS_VARIABLE, str(DEFAULT_BLOCKS))
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ConfigError(f"{BLOCKS_VARIABLE}: expected a number of thread blocks from 1 to 4096, found {text!r}")
    return int(text)
