"""Backend `nvlink`: between GPUs of one machine, by a kernel that reads and writes the peer's memory directly.

A rank gives out a handle of each CUDA allocation that its regions lie in; a peer maps it, with its own GPU current. One
kernel then copies all pieces of a batch, whatever their sizes, in words of 16 bytes where both addresses allow that
(`kernels.cu`). A write loads here and stores there; a read loads there and stores here. The peer's GPU does nothing.

| what happens | status | why |
|---|---|---|
| the event after the kernel has passed | `DONE` | a kernel's stores are visible to every GPU when it has ended |
| the event has not passed | `PENDING` | |
| the event gives an error | `UNSETTLED` | the context is lost; what its kernels did is unknown until it is torn down |
| an error before the first kernel of a batch | raised | nothing was posted |
| an error after it | `FAILED` | what was posted has been waited for; `UNSETTLED` where that fails |
| the peer's process is killed meanwhile | `DONE` | its memory stays allocated while it is mapped here |
| the peer frees its memory meanwhile | `DONE` | the same; what it allocates next is other memory, never written |
| the peer's process has ended | `PeerUnreachable` | at the next submit, where both are in one process-id namespace |

So the death of a peer costs neither the context nor anyone's bytes (`tests/gpu/test_kill.py`). The CUDA documentation calls
freeing exported memory before it is unmapped undefined: what the table says was observed on H200 GPUs (driver 580), it is not
promised.

`fence` is always `UNKNOWN`. This side's own transfers are proved by their events. What the *peer's* kernels still write
into memory here cannot be seen from here, and CUDA offers no way to take a mapping away from a process that has it; nor
does it say that the kernels of a process have stopped when the process has ended.

Closing waits until peers have unmapped this side's memory, where they can say so (`_mapped.py`).

What cannot be mapped is refused with the reason: memory of expandable segments and other memory that has no such handle
(at `register`); another host, the same GPU, GPUs without access to each other (at `connect`).

It takes a request in two forms. Addresses (`submit`): every piece is checked here, uploaded, copied. Span classes and token
runs (`submit_spans`, what the manager uses): classes stay on the GPU for each peer, checked once, a request brings a few
bytes for each run, and the kernel computes the addresses.

The kernel runs on one stream of the highest priority, on at most `DISAGG_NVLINK_BLOCKS` multiprocessors
(`DEFAULT_BLOCKS`), so that a server's own kernels keep theirs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from disagg.backends.abilities import PreparedSpans
from disagg.backends.base import BackendOptions, Fence, Op, RemotePeer, StagingShape, TransferStatus
from disagg.backends.cuda.driver import (
    IPC_HANDLE_NBYTES,
    KERNEL_SOURCE,
    Allocation,
    Buffer,
    CudaError,
    Gpu,
    Queue,
    batch_nbytes,
    load_bindings,
    take_buffer,
)
from disagg.backends.cuda.work_list import ShapeTable, encode_order, encode_shapes, order_nbytes
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint, local_and_remote
from disagg.backends.nvlink.holders import Mappings, hold
from disagg.core import _native
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import BackendError, ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import ProcessIdentity, ProcessWatch

logger = logging.getLogger(__name__)

UNMAP_TIMEOUT_S = 5.0
BLOCKS_VARIABLE = "DISAGG_NVLINK_BLOCKS"
DEFAULT_BLOCKS = 16
"""Thread blocks, and so multiprocessors, of a copy: as measured (`docs/benchmarks/nvlink-2xh200.json`)."""
THREADS = 1024
MIN_TILE, MAX_TILE = 4 << 10, 64 << 10
"""Bytes that a warp takes at a time."""
TILES_PER_WARP = 4
PART = 1 << 16
"""Pieces in one launch: a larger batch is prepared and uploaded in parts while the parts before are copied."""
NEAR_WORD, NEAR_NBYTES = 16, 16 << 10
"""What a kernel brings from the host by itself, in words of these bytes, into the memory that its blocks have near them."""
SMALL_BUFFER, NUM_SMALL_BUFFERS = 1 << 18, 4
"""Bytes of the buffers that there are from the start; others are made as they are needed, and kept."""


class _Exported(msgspec.Struct, frozen=True, array_like=True):
    """An allocation, as a peer is told of it."""

    base: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    handle: Annotated[bytes, msgspec.Meta(min_length=IPC_HANDLE_NBYTES, max_length=IPC_HANDLE_NBYTES)]


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose memory it is, on which GPU, where it learns who has it mapped, and its allocations."""

    process: ProcessIdentity
    gpu: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    mappings: Annotated[str, msgspec.Meta(pattern="^disagg-[0-9a-f]{32}$")]
    allocations: tuple[_Exported, ...]

    def holding(self, region: RemoteRegion) -> _Exported:
        """The allocation that a region lies in; raises `RemoteProtocolError` where there is none."""
        for allocation in self.allocations:
            if allocation.base <= region.address and region.address + region.nbytes <= allocation.base + allocation.nbytes:
                return allocation
        raise RemoteProtocolError(
            f"endpoint of backend 'nvlink': region [{region.address:#x}, +{region.nbytes}) is in none of the "
            f"{len(self.allocations)} allocations that it names"
        )


_DECODER = msgspec.msgpack.Decoder(_Descriptor)


@dataclass(eq=False)
class NvlinkPeer:
    """One process's memory, mapped, at one epoch. `deltas`: what to add to an address in each region to have it here;
    `table`: the same on this GPU, for the kernel (see `kernels.cu`); `prepared`: tables of span classes there.
    """

    epoch: int
    index: RegionIndex
    watch: ProcessWatch
    held: socket.socket | None = None
    opened: list[int] = field(default_factory=list)
    deltas: Addresses = field(default_factory=lambda: np.zeros(0, np.uint64))
    table: int = 0
    prepared: list[int] = field(default_factory=list)
    connected: bool = True
    pending: int = 0

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        return tuple(RemoteRegion(r.address, r.nbytes, r.device) for r in self.index.regions)


@dataclass(frozen=True, eq=False)
class NvlinkSpans:
    """Span classes towards a peer: their table, and where it is on the GPU."""

    peer: NvlinkPeer
    table: ShapeTable
    address: int

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.table.shapes


class NvlinkTransfer:
    """A batch's kernels, and the event after the last of them."""

    def __init__(self, backend: NvlinkBackend, peer: NvlinkPeer) -> None:
        self._backend = backend
        self.peer = peer
        self.buffers: list[Buffer] = []
        self.posted = False
        self.event: int | None = None
        self.sign: _native.CudaEvent | None = None
        self.status = TransferStatus.PENDING
        self.error: str | None = None

    def poll(self) -> TransferStatus:
        if self.status is TransferStatus.PENDING:
            self._backend.advance(self)
        return self.status

    def close(self) -> None:
        """What a transfer holds goes back when it settles."""
        if not self.status.settled:
            raise LocalProtocolError(f"transfer: only a settled one can be closed, this one is {self.status.value}")


class NvlinkBackend:
    """One GPU's engine; `blocks` overrides the environment. Raises `BackendUnavailable` without a driver or the bindings."""

    name = "nvlink"

    def __init__(self, options: BackendOptions, *, blocks: int | None = None) -> None:
        if options.require is not None:
            raise ConfigError(f"backend 'nvlink' has a transport of its own, so it cannot require {options.require.value!r}")
        self._blocks = _blocks() if blocks is None else blocks
        load_bindings()
        self._lock = threading.RLock()
        self._open = True
        self._engine: _Engine | None = None
        self._local: RegionIndex | None = None
        self._allocations: tuple[Allocation, ...] = ()
        self._mappings: Mappings | None = None
        self._peers: set[NvlinkPeer] = set()
        self._pending: set[NvlinkTransfer] = set()
        self._transports: set[str] = set()
        self.mapped_by: tuple[int, ...] = ()
        """After `close`: process ids of peers that had this side's memory mapped still."""

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Never packs: pieces of every size go at the same speed."""
        return StagingShape(pack_below=0)

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=0)

    @property
    def transport(self) -> str:
        return " + ".join(sorted(self._transports)) or "peer memory (no peer yet)"

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        with self._lock:
            self._check_open()
            if self._local is not None:
                raise LocalProtocolError("backend 'nvlink': register is called once")
            engine = _Engine(Gpu(_one_gpu(regions)), self._blocks)
            try:
                with engine.gpu.current():
                    extents = {region: _extent(engine.gpu, region) for region in regions}
                    self._allocations = tuple(engine.gpu.export(base) for base, _ in sorted(set(extents.values())))
                    index = RegionIndex(_joined(extents))
                    engine.start()
            except CudaError as error:
                engine.close()
                raise ConfigError(f"backend 'nvlink' cannot serve this memory: {error}: {list(regions)}") from error
            except BaseException:
                engine.close()
                raise
            self._engine = engine
            self._local = index
            self._mappings = Mappings()

    def endpoint(self) -> bytes:
        with self._lock:
            self._check_open()
            index, engine = self._own_index(), self._own_engine()
            exported = tuple(_Exported(a.base, a.nbytes, a.handle) for a in self._allocations)
            assert self._mappings is not None
            descriptor = _Descriptor(ProcessIdentity.own(), engine.gpu.uuid, self._mappings.address, exported)
        regions = [MemoryRegion(r.address, r.nbytes, r.device) for r in index.regions]
        return encode_endpoint(self.name, msgspec.msgpack.encode(descriptor), regions)

    # -- peers ----------------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, epoch: int) -> NvlinkPeer:
        """Maps the peer's memory, and reads one byte of it through the kernel."""
        raw, regions = decode_endpoint(self.name, endpoint)
        try:
            descriptor = _DECODER.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend 'nvlink': {error}") from error
        holding = {region: descriptor.holding(region) for region in regions}
        with self._lock:
            self._check_open()
            engine = self._own_engine()
            transport = _reach(engine.gpu, descriptor)
            peer = NvlinkPeer(epoch, RegionIndex(regions), ProcessWatch(descriptor.process), hold(descriptor.mappings))
            if peer.watch.has_ended():
                self._unmap(peer)
                raise PeerUnreachable(f"backend 'nvlink': process {descriptor.process.pid}, whose memory this is, has ended")
            if peer.held is None:
                logger.info("backend 'nvlink': process %d cannot be told when its memory is unmapped", descriptor.process.pid)
            try:
                with engine.gpu.current():
                    bases = self._map(engine, peer, descriptor)
                    found = [holding[_region(r)].base for r in peer.index.regions]
                    peer.deltas = np.array([(bases[base] - base) % 2**64 for base in found], np.uint64)
                    starts = np.array([r.address for r in peer.index.regions], np.uint64)
                    peer.table = engine.gpu.table(np.concatenate([starts, peer.deltas]))
                    if regions:
                        self._touch(engine, peer)
            except CudaError as error:
                self._unmap(peer)
                raise PeerUnreachable(f"backend 'nvlink': the peer's memory cannot be mapped: {error}") from error
            except BaseException:
                self._unmap(peer)
                raise
            self._peers.add(peer)
            self._transports.add(transport)
            return peer

    def _map(self, engine: _Engine, peer: NvlinkPeer, descriptor: _Descriptor) -> dict[int, int]:
        """Where each of the peer's allocations begins here, by where it begins there."""
        if descriptor.process == ProcessIdentity.own():  # memory of this process is mapped already
            return {allocation.base: allocation.base for allocation in descriptor.allocations}
        bases = {}
        for allocation in descriptor.allocations:
            base = engine.gpu.open(allocation.handle)
            peer.opened.append(base)
            _, nbytes = engine.gpu.extent(base)
            if nbytes < allocation.nbytes:
                raise RemoteProtocolError(
                    f"endpoint of backend 'nvlink': the handle is of {nbytes} bytes, not of {allocation.nbytes}"
                )
            bases[allocation.base] = base
        return bases

    def _touch(self, engine: _Engine, peer: NvlinkPeer) -> None:
        """Read one byte of a peer's memory, and run a kernel, over nothing: what is slow the first time is done."""
        transfer = NvlinkTransfer(self, peer)
        first = peer.index.regions[0].address
        copies = CopyBatch(*(np.array([value], np.uint64) for value in (first, self._own_index().regions[0].address, 0)))
        try:
            engine.read_byte((first + int(peer.deltas[0])) % 2**64)
            engine.post(transfer, Op.READ, copies)
            engine.drain()
        finally:
            engine.give_back(transfer)

    def disconnect(self, peer: RemotePeer) -> None:
        """Unmaps the peer's memory, or else the last of its pending transfers does so when it has settled."""
        with self._lock:
            if not isinstance(peer, NvlinkPeer) or not peer.connected:
                return
            peer.connected = False
            if not peer.pending:
                self._unmap(peer)

    def _unmap(self, peer: NvlinkPeer) -> None:
        """A context that is lost unmaps nothing; it takes its mappings with it when it is torn down."""
        engine = self._own_engine()
        self._peers.discard(peer)
        peer.watch.close()
        with suppress(CudaError), engine.gpu.current():
            for base in peer.opened:
                engine.gpu.close(base)
            for address in (peer.table, *peer.prepared):
                if address:
                    engine.gpu.free(address)
        peer.opened, peer.table, peer.prepared = [], 0, []
        if peer.held is not None:
            peer.held.close()

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:  # noqa: ARG002 (the contract's)
        """Always `UNKNOWN`: see the module."""
        return Fence.UNKNOWN

    # -- transfers ------------------------------------------------------------------------------------------------

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> NvlinkTransfer:
        with self._lock:
            own, engine = self._reachable(peer), self._own_engine()
            local, remote = local_and_remote(op, copies)
            self._own_index().require(local, copies.nbytes, side="local")
            own.index.require(remote, copies.nbytes, side="remote")
            return self._post(own, bool(len(copies)), lambda transfer: engine.post(transfer, op, copies))

    def submit_plain(self, peer: RemotePeer, copies: CopyBatch) -> NvlinkTransfer:
        with self._lock:
            own, engine = self._reachable(peer), self._own_engine()
            self._own_index().require(copies.source, copies.nbytes, side="local")
            where = own.index.check(copies.destination, copies.nbytes, side="remote")
            here = CopyBatch(copies.source, copies.destination + own.deltas[where], copies.nbytes)
            return self._post(own, bool(len(copies)), lambda transfer: engine.post_plain(transfer, here))

    def prepare_spans(self, op: Op, peer: RemotePeer, shapes: Sequence[SpanShape]) -> NvlinkSpans:
        with self._lock:
            own, engine = self._reachable(peer), self._own_engine()
            remote_side = 1 if op is Op.WRITE else 0

            def translate(addresses: Addresses, nbytes: int, side: int) -> Addresses:
                sizes = np.full(len(addresses), nbytes, np.uint64)
                if side != remote_side:
                    self._own_index().require(addresses, sizes, side="local")
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
            self._reachable(prepared.peer)
            engine = self._own_engine()
            return self._post(prepared.peer, bool(len(batch)), lambda transfer: engine.post_spans(transfer, prepared, batch))

    def _post(self, peer: NvlinkPeer, anything: bool, post: Callable[[NvlinkTransfer], None]) -> NvlinkTransfer:
        """A new transfer, posted by `post`; done at once where there is not anything to copy."""
        transfer = NvlinkTransfer(self, peer)
        if not anything:
            transfer.status = TransferStatus.DONE
            return transfer
        peer.pending += 1
        self._pending.add(transfer)
        try:
            post(transfer)
        except CudaError as error:
            self._failed(transfer, error)
        except BaseException:
            self._own_engine().give_back(transfer)
            self._forget(transfer)
            raise
        return transfer

    def _forget(self, transfer: NvlinkTransfer) -> None:
        """It is no longer pending; the last one of a disconnected peer unmaps it."""
        self._pending.discard(transfer)
        transfer.peer.pending -= 1
        if not transfer.peer.connected and not transfer.peer.pending:
            self._unmap(transfer.peer)

    def _failed(self, transfer: NvlinkTransfer, error: CudaError) -> None:
        """Posting did not succeed: raises where no copy was posted."""
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

    def _reachable(self, peer: RemotePeer) -> NvlinkPeer:
        """`peer` as this backend's; raises where nothing may be posted to it."""
        self._check_open()
        if not isinstance(peer, NvlinkPeer):
            raise LocalProtocolError(f"backend 'nvlink': expected a peer of its own, found {type(peer).__name__}")
        if not peer.connected:
            raise PeerUnreachable(f"backend 'nvlink': the peer of epoch {peer.epoch} was disconnected")
        if peer.watch.has_ended():
            raise PeerUnreachable(f"backend 'nvlink': the process of the peer of epoch {peer.epoch} has ended")
        return peer

    def advance(self, transfer: NvlinkTransfer) -> None:
        """Bring a pending transfer's status up to date."""
        with self._lock:
            if transfer.status is not TransferStatus.PENDING:  # another thread may have been here
                return
            engine = self._own_engine()
            try:
                assert transfer.event is not None
                past = engine.queue.is_past(transfer.event)
            except CudaError as error:
                transfer.status, transfer.error = TransferStatus.UNSETTLED, transfer.error or f"copying: {error}"
                return
            if past:
                self._settle(transfer)

    def _settle(self, transfer: NvlinkTransfer) -> None:
        """What was posted has ended: give back what the transfer held."""
        transfer.status = TransferStatus.FAILED if transfer.error else TransferStatus.DONE
        self._own_engine().give_back(transfer)
        self._forget(transfer)

    def close(self) -> None:
        """Returns once every kernel posted here has ended; transfers are then `DONE`, or `UNSETTLED` in a lost context.

        And once the peers that can be waited for have unmapped this side's memory, or `UNMAP_TIMEOUT_S` have passed: then
        `mapped_by` says who has not.
        """
        with self._lock:
            if not self._open:
                return
            engine = self._engine
            if engine is not None:
                with suppress(CudaError), engine.gpu.current():
                    engine.drain()
                for transfer in tuple(self._pending):
                    transfer.poll()
                for peer in tuple(self._peers):
                    peer.connected = False
                    self._unmap(peer)
                engine.close()
            self._open = False
        self._wait_for_unmapping()

    def _wait_for_unmapping(self) -> None:
        """Without the lock: the last mapping may be one of this process's."""
        if self._mappings is None:
            return
        self.mapped_by = self._mappings.wait(UNMAP_TIMEOUT_S)
        if self.mapped_by:
            logger.warning(
                "backend 'nvlink': after %s s processes %s still have this side's memory mapped: their kernels may still write",
                UNMAP_TIMEOUT_S, ", ".join(map(str, self.mapped_by)),
            )  # fmt: skip
        self._mappings.close()

    def _check_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("backend 'nvlink': the engine has been closed")

    def _own_index(self) -> RegionIndex:
        if self._local is None:
            raise LocalProtocolError("backend 'nvlink': register has not been called")
        return self._local

    def _own_engine(self) -> _Engine:
        if self._engine is None:
            raise LocalProtocolError("backend 'nvlink': register has not been called")
        return self._engine


class _Engine:
    """The kernels on one GPU, their streams, and the buffers that requests travel to it in. Used with `current()` entered."""

    def __init__(self, gpu: Gpu, blocks: int) -> None:
        self.gpu = gpu
        self._blocks = blocks
        self._free: list[Buffer] = []
        self._all: list[Buffer] = []
        self._events: list[int] = []
        self._module: Any = None
        self._kernels: dict[str, int] = {}
        self._queue: Queue | None = None
        self._scratch = self._counters = 0

    def start(self) -> None:
        self._module, self._kernels = self.gpu.compile(KERNEL_SOURCE.read_text(), ["move_pieces", "move_spans"])
        self._queue = Queue(self.gpu, holds_gil=True)
        self._scratch = self.gpu.table(np.zeros(2, np.uint64))
        # One pair for all requests: kernels follow each other on one stream, and each leaves them at 0.
        self._counters = self.gpu.table(np.zeros(2, np.uint64))
        self._free += [self._buffer(SMALL_BUFFER) for _ in range(NUM_SMALL_BUFFERS)]

    @property
    def queue(self) -> Queue:
        assert self._queue is not None
        return self._queue

    def _buffer(self, nbytes: int) -> Buffer:
        with self.gpu.current():
            buffer = Buffer(self.gpu, nbytes)
        self._all.append(buffer)
        return buffer

    def _take(self, transfer: NvlinkTransfer, nbytes: int) -> Buffer:
        """A buffer of at least `nbytes` bytes for a transfer."""
        best = take_buffer(self._free, nbytes) or self._buffer(max(SMALL_BUFFER, 1 << (nbytes - 1).bit_length()))
        transfer.buffers.append(best)
        return best

    def post(self, transfer: NvlinkTransfer, op: Op, copies: CopyBatch) -> None:
        """Upload the addresses of a batch and copy it, in parts: one is uploaded while those before are copied.

        `transfer.buffers` holds what was posted.
        """
        table = (transfer.peer.table, len(transfer.peer.index.regions), int(op is Op.READ))
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
        """Copy all of a request with one kernel. What the request adds to its span classes the kernel reads by itself where it
        is little, since an upload takes three calls of the driver; more is uploaded.
        """
        blocks, tile = launch_shape(batch.total_nbytes, max_blocks=self._blocks)
        buffer = self._take(transfer, order_nbytes(batch))
        nbytes, total = encode_order(batch, prepared.table, tile=tile, out=buffer.words), batch.total_nbytes
        brought = -(-nbytes // NEAR_WORD)
        counters, address = self._counters, buffer.host_address
        if brought * NEAR_WORD > NEAR_NBYTES:
            self.queue.upload(buffer, nbytes)
            counters = address = buffer.device_address
            brought = 0
        arguments = (counters, address, brought, prepared.address, *batch.core.tiles(0, total), tile, 0, total, 0, 0)
        self._launch(transfer, self._kernels["move_spans"], arguments, blocks, shared=brought * NEAR_WORD, last=True)

    def post_plain(self, transfer: NvlinkTransfer, copies: CopyBatch) -> None:
        """Copy by the driver, between addresses that are all as they are here."""
        transfer.posted = True
        with self.gpu.current():
            for columns in zip(copies.destination.tolist(), copies.source.tolist(), copies.nbytes.tolist(), strict=True):
                self.gpu.call("cuMemcpyAsync", *columns, self.queue.stream)
            transfer.event = self._event()
            self.gpu.call("cuEventRecord", transfer.event, self.queue.stream)

    def _launch(
        self, transfer: NvlinkTransfer, kernel: int, arguments: Sequence[int], blocks: int, *, shared: int = 0, last: bool
    ) -> None:
        """Start a kernel; the transfer's event comes after the last."""
        done = transfer.event = self._event() if last else None
        transfer.posted = True
        self.queue.launch(kernel, arguments, blocks=blocks, threads=THREADS, shared=shared, done=done or 0)
        if done is not None:
            transfer.sign = self.queue.sign(done)  # not before: the event shows still what was before it

    def _event(self) -> int:
        if self._events:
            return self._events.pop()
        with self.gpu.current():
            return self.gpu.event()

    def read_byte(self, address: int) -> None:
        self.gpu.call("cuMemcpyDtoDAsync", self._scratch, address, 1, self.queue.uploads)

    def drain(self) -> None:
        """Returns once all that was posted has ended."""
        self.queue.drain()

    def give_back(self, transfer: NvlinkTransfer) -> None:
        self._free += transfer.buffers
        if transfer.event is not None:
            self._events.append(transfer.event)
        transfer.buffers, transfer.event = [], None

    def close(self) -> None:
        """A lost context gives nothing back one by one; all of it ends with the context."""
        with suppress(CudaError), self.gpu.current():
            for buffer in self._all:
                buffer.free(self.gpu)
            for event in self._events:
                self.gpu.call("cuEventDestroy", event)
            if self._queue is not None:
                self._queue.close()
            for address in (self._scratch, self._counters):
                if address:
                    self.gpu.free(address)
            if self._module is not None:
                self.gpu.call("cuModuleUnload", self._module)
        self.gpu.release()


def launch_shape(total: int, *, max_blocks: int) -> tuple[int, int]:
    """Thread blocks, and bytes in a tile, for `total` bytes: a few tiles for every warp, within bounds."""
    warps = THREADS // 32
    blocks = max(1, min(max_blocks, total // (warps * MIN_TILE)))
    share = max(total // (blocks * warps * TILES_PER_WARP), 1)
    return blocks, min(max(1 << (share.bit_length() - 1), MIN_TILE), MAX_TILE)


def _blocks() -> int:
    text = os.environ.get(BLOCKS_VARIABLE, str(DEFAULT_BLOCKS))
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ConfigError(f"{BLOCKS_VARIABLE}: expected a number of thread blocks from 1 to 4096, found {text!r}")
    return int(text)


def _one_gpu(regions: Sequence[MemoryRegion]) -> int:
    """The GPU that all regions are on."""
    devices = sorted({region.device for region in regions})
    if len(devices) != 1 or devices[0].kind == CPU.kind:
        found = ", ".join(map(str, devices)) or "no memory"
        raise ConfigError(f"backend 'nvlink': expected memory of one GPU, found {found}")
    return devices[0].index


def _extent(gpu: Gpu, region: MemoryRegion) -> tuple[int, int]:
    """Base and size of a region's allocation; raises `ConfigError` where another process cannot map it."""
    where = f"backend 'nvlink': the memory at {region.address:#x}"
    found = gpu.ordinal_of(region.address)
    if found != gpu.ordinal:
        raise ConfigError(f"{where} is said to be on GPU {gpu.ordinal}, it is on {found}")
    if not gpu.has_legacy_handle(region.address):
        raise ConfigError(
            f"{where} has no IPC handle, as it was not allocated by cudaMalloc "
            "(PyTorch: expandable_segments:True allocates such memory; allocate KV pools without it)"
        )
    base, nbytes = gpu.extent(region.address)
    if region.address + region.nbytes > base + nbytes:
        raise ConfigError(f"{where}, {region.nbytes} bytes, leaves its allocation [{base:#x}, +{nbytes})")
    return base, nbytes


def _joined(extents: dict[MemoryRegion, tuple[int, int]]) -> tuple[MemoryRegion, ...]:
    """The same bytes as few regions, none of which leaves its allocation."""
    joined = []
    for base in sorted({base for base, _ in extents.values()}):
        inside = [MemoryRegion(r.address, r.nbytes) for r, (own, _) in extents.items() if own == base]
        device = next(r.device for r, (own, _) in extents.items() if own == base)
        joined += [MemoryRegion(r.address, r.nbytes, device) for r in merge_regions(inside)]  # on the CPU touching ones join
    return tuple(joined)


def _region(region: MemoryRegion | RemoteRegion) -> RemoteRegion:
    return RemoteRegion(region.address, region.nbytes, region.device)


def _reach(gpu: Gpu, descriptor: _Descriptor) -> str:
    """How this GPU reaches the peer's; raises `PeerUnreachable` where it cannot."""
    own = ProcessIdentity.own()
    if descriptor.process.machine != own.machine:
        raise PeerUnreachable("backend 'nvlink': the peer is on another host; GPUs reach each other's memory inside one only")
    if descriptor.gpu == gpu.uuid:
        raise PeerUnreachable("backend 'nvlink': the peer is on the same GPU; ranks that share one are managers of one process")
    ordinal = gpu.peers().get(descriptor.gpu)
    if ordinal is None:
        if descriptor.process == own:
            raise RemoteProtocolError("endpoint of backend 'nvlink': a GPU of this process that it does not have")
        return "peer memory (a GPU hidden from this process)"
    if not gpu.can_access(ordinal):
        raise PeerUnreachable(f"backend 'nvlink': GPU {gpu.ordinal} has no access to the memory of GPU {ordinal}")
    if descriptor.process == own:
        _enable(gpu, ordinal)
    return "nvlink (inferred)" if gpu.has_nvlink(ordinal) else "pcie (inferred)"


def _enable(gpu: Gpu, ordinal: int) -> None:
    """Access to memory of another GPU of this process."""
    other = Gpu(ordinal)
    try:
        with gpu.current():
            gpu.enable_peer_access(other)
    except CudaError as error:
        raise PeerUnreachable(f"backend 'nvlink': no access to the memory of GPU {ordinal}: {error}") from error
    finally:
        other.release()
