"""Backend `mooncake`: Mooncake's transfer engine over TCP, RDMA, or NVLink inside a node. Measured with 0.3.13.post1.

A batch is posted in chunks. All but the last few pieces of a chunk are one asynchronous batch call, which gets arrays where
the installed version takes them (0.3.14 and later). The last few are tasks of their own: the status of a batch of one task is
the only one that this engine returns without blocking and without giving up. When these tasks have ended, the batch before
them in the engine's first-in first-out queue has ended or is about to, so the call that waits for it returns at once. One
thread per peer posts and polls; no caller waits, and except between GPUs the thread sleeps between polls.

Over TCP the caller posts a few pieces itself, and polls them itself: waking a thread would take longer than they do. Between
GPUs only the thread calls the engine, because the engine refused pieces once when several threads called it. There a task is
seen to have ended only when nothing that was posted behind it is under way, so all that waits is posted together once that is
so, and then polled without a sleep.

Each piece of a read is a task of its own. After a failure it must be known of every piece whether the engine may still write
to local memory, and of a batch with a failed piece the engine reports nothing about the others.

| the engine reports | status | why (each row is tested, except those marked *) |
|---|---|---|
| 1 for the tasks, 0 for the batch | `DONE` | the peer acknowledged every piece when it was in place |
| 0, or -2 (slow *) | `PENDING` | it goes on |
| -1, or it takes no piece | `UNSETTLED` | it gave up, but a stopped peer still puts in place what its socket holds |
| the same, and the peer's port refuses (TCP) | `FAILED` | its process or engine has ended, so nothing touches its memory |
| the same, not over TCP * | `UNSETTLED` | tasks have no order there; `FAILED` if no piece was in a batch |
| nothing for 3 s, and the peer's port refuses (not TCP) | `UNSETTLED` | over verbs pieces to a dead peer may never end |
| nothing, because this engine was closed | `UNSETTLED` | this side is quiet, its threads being joined; the other is unknown |

An `UNSETTLED` transfer becomes `FAILED` when the peer's port refuses. What a peer wrote may still be in a socket buffer of
this process, also after the peer has ended; writes come by connections that this engine has accepted. So over TCP `fence` is
`QUIET` only if both hold: the peer's process has ended, by its pidfd, and none of the accepted connections
was reset or has a far end without an owner (`disagg.machine.processes`). It is `UNKNOWN` otherwise.

The engine has no authentication, and listens on all addresses whatever address it is given: on a host other than loopback
this backend requires `trusted_network=True`. Device memory takes the same path as host memory, where the installed wheel was
built for it: over TCP the engine stages it through the host. `nvlink_intra` is used with transport `auto` when the engine's
own switch, `MC_INTRANODE_NVLINK` or `MC_INTRA_NVLINK`, is in the environment.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from disagg.backends.adapter import Adapter, AdapterPeer
from disagg.backends.base import ADDRESS_SPACE, BackendOptions, Fence, RemotePeer, StagingShape, TransferStatus
from disagg.backends.cuda.driver import CudaError, Gpu
from disagg.backends.mooncake.launch import (
    Engine,
    check_environment,
    choose_protocol,
    import_engine,
    ip_refusal,
    outstanding_limit,
    start_engine,
)
from disagg.backends.mooncake.queue import TAIL, MooncakeDescriptor, PeerQueue, current
from disagg.backends.mooncake.transfer import MooncakeTransfer, Opcodes, Pieces, cut
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessWatch
from disagg.machine.tcp import EngineConnections, EngineSockets, new_listeners, ports_of

logger = logging.getLogger(__name__)

SPLIT_NBYTES = 8 << 20
"""Longer pieces are cut, so that all of the engine's connections to the peer share them."""
NVLINK_SPLIT_NBYTES = 1 << 30
"""Between GPUs there are no connections to share them, and each further piece costs 40 us."""
_WARM_S = 10.0
_DECODER = msgspec.msgpack.Decoder(MooncakeDescriptor)


class MooncakePeer(AdapterPeer):
    """A peer's engine at one epoch."""

    def __init__(self, queue: PeerQueue, process: ProcessWatch | None, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        super().__init__(regions, epoch=epoch)
        self.queue = queue
        self.process = process


class MooncakeBackend(Adapter[MooncakePeer, MooncakeDescriptor]):
    """One transfer engine; see the module for what it promises.

    Raises `BackendUnavailable` where the engine, a library or the transport is missing, and `ConfigError` for options or
    environment settings that would make it unsafe.
    """

    name = "mooncake"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=MooncakePeer, descriptors=_DECODER)
        self._protocol = choose_protocol(options)
        check_environment(options, self._protocol)
        module = import_engine()
        self._opcodes = Opcodes(write=module.TransferOpcode.Write, read=module.TransferOpcode.Read)
        with new_listeners() as listening:
            engine = start_engine(module, options, self._protocol)
        self._engine: Engine | None = engine
        self._descriptor = MooncakeDescriptor(options.host, engine.get_rpc_port(), self._protocol, ports_of(listening))
        self._limit = outstanding_limit()
        self._split = NVLINK_SPLIT_NBYTES if self._protocol == "nvlink_intra" else SPLIT_NBYTES
        self._gpu: Gpu | None = None
        self._scratch = np.zeros(8, dtype=np.uint8)
        self._queues: dict[str, PeerQueue] = {}
        self._connections = EngineConnections()
        self._lock = threading.Lock()
        logger.info("Mooncake engine at %s, transport %s", self._descriptor.session, self._protocol)

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """A piece costs about 14 us over TCP: break-even with packing is about 64 KiB."""
        return StagingShape(pack_below=64 << 10)

    @property
    def staging(self) -> StagingShape:
        shape = self.staging_for(BackendOptions())
        return dataclasses.replace(shape, address_space=ADDRESS_SPACE) if self._protocol == "tcp" else shape

    @property
    def transport(self) -> str:
        return self._protocol

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        engine = self._running()
        self.check_not_registered()
        merged = merge_regions(regions)
        rows = list(merged)
        if self._protocol != "nvlink_intra":
            # The warm-up of a connection reads into memory of this adapter; devices want that registered as well.
            rows.append(MemoryRegion(self._scratch.ctypes.data, self._scratch.nbytes))
        elif any(region.device == CPU for region in merged):
            raise ConfigError("backend 'mooncake': 'nvlink_intra' moves memory of GPUs only, found memory of the host")
        gpu = _gpu_of(merged)
        with current(gpu):
            status = engine.batch_register_memory([r.address for r in rows], [r.nbytes for r in rows])
        if status != 0:
            if gpu is not None:
                gpu.release()
            raise ConfigError(f"backend 'mooncake': the engine does not take {len(merged)} regions (status {status})")
        self.set_registered(merged)
        self._gpu = gpu

    def endpoint(self) -> bytes:
        return self.endpoint_with(self._descriptor)

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> MooncakePeer:
        """Waits up to 10 s for the peer's answer."""
        engine = self._running()
        descriptor, regions = self.decode(endpoint)
        if not descriptor.host or not 0 < descriptor.port < 2**16:
            raise RemoteProtocolError(f"endpoint of backend 'mooncake': no address: {descriptor.session!r}")
        if descriptor.protocol != self._protocol:
            raise PeerUnreachable(f"peer {descriptor.session} uses {descriptor.protocol!r}, this engine {self._protocol!r}")
        if (status := engine.send_probe(descriptor.session)) != 0:
            found = ip_refusal(descriptor.host) or f"backend 'mooncake': no engine answers at {descriptor.session}"
            raise PeerUnreachable(f"{found} (status {status})")
        self._connections.add(descriptor.ports)
        peer = MooncakePeer(self._queue(engine, descriptor), process, regions, epoch=epoch)
        try:
            self._warm(peer, descriptor)
        except PeerUnreachable:
            self.disconnect(peer)
            raise
        return peer

    def _queue(self, engine: Engine, descriptor: MooncakeDescriptor) -> PeerQueue:
        """The queue of that engine: one for all its epochs, since the engine limits pieces per address."""
        with self._lock:
            queue = self._queues.get(descriptor.session)
            if queue is None or not queue.acquire():
                self._queues = {session: queue for session, queue in self._queues.items() if queue.is_open}
                queue = self._queues[descriptor.session] = PeerQueue(
                    engine,
                    self._opcodes,
                    descriptor,
                    self._limit,
                    connections=self._connections,
                    by_caller=self._protocol == "tcp",
                    gpu=self._gpu,
                )
            return queue

    def _warm(self, peer: MooncakePeer, descriptor: MooncakeDescriptor) -> None:
        """Have the engine make its connections, by reading a byte; raises `PeerUnreachable` if the byte does not come."""
        readable = [region for region in peer.regions if region.device.kind == "cpu"]
        if not readable or self._protocol == "nvlink_intra":
            return
        here, there = (np.full(TAIL, address, np.uint64) for address in (self._scratch.ctypes.data, readable[0].address))
        transfer = MooncakeTransfer(peer.queue, Pieces(here, there, np.ones(TAIL, np.uint64)), reads=True)
        peer.queue.submit(transfer)
        deadline = time.monotonic() + _WARM_S
        while transfer.poll() is TransferStatus.PENDING and time.monotonic() < deadline:
            time.sleep(1e-3)
        if transfer.status is not TransferStatus.DONE:
            raise PeerUnreachable(f"peer {descriptor.session} does not move bytes: {transfer.error or 'no answer'}")

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> MooncakeTransfer:
        own = self.reachable(peer)
        self.check_copies(own, copies)
        pieces = cut(copies, split=self._split)
        transfer = MooncakeTransfer(own.queue, pieces)
        if len(pieces):
            own.queue.submit(transfer)
        return transfer

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """`QUIET` once the end of the peer's process proves it: see the module."""
        own = self.at_epoch(peer, epoch)
        if own is None or own.process is None or not self.is_quiet_after(own.process):
            return Fence.UNKNOWN
        return Fence.QUIET

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """See `ProvesByProcess`: over TCP only."""
        return self._protocol == "tcp" and process.is_quiet(EngineSockets(opened=()))

    def is_quiet_when_closed(self) -> bool:
        """Over TCP: closing the engine closes its connections, and joins the threads that read them and write to memory."""
        return self._protocol == "tcp"

    def disconnect(self, peer: RemotePeer) -> None:
        with self._lock:
            if not isinstance(peer, MooncakePeer) or not peer.connected:
                return
            peer.connected = False
        peer.queue.release()

    def close(self) -> None:
        """Join the peers' threads, then end the engine: its threads are joined and its ports closed when this returns.

        The engine's own part takes up to 2 s with transfers under way, and holds the GIL for that long.
        """
        with self._lock:
            queues, self._queues = list(self._queues.values()), {}
            engine, self._engine = self._engine, None
            gpu, self._gpu = self._gpu, None
            self.is_open = False
        for queue in queues:
            queue.stop()
        with current(gpu):
            del queues, engine
        if gpu is not None:
            gpu.release()

    def _running(self) -> Engine:
        if self._engine is None:
            raise LocalProtocolError("backend 'mooncake': the engine has been closed")
        return self._engine


def _gpu_of(regions: Iterable[MemoryRegion]) -> Gpu | None:
    """The GPU that all memory is on, or `None`.

    It must be the calling thread's where the engine may open a peer's memory: the engine opens it for GPU 0 otherwise, and
    copies from another GPU then pass through the host, at a seventh of the speed.
    """
    devices = {region.device for region in regions}
    device = devices.pop() if len(devices) == 1 else CPU
    if device.kind != "cuda":
        return None
    try:
        return Gpu(device.index)
    except (BackendUnavailable, CudaError) as error:
        logger.warning("backend 'mooncake': GPU %d is not made the engine's: %s", device.index, error)
        return None
