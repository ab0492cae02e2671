"""Backend `mooncake`: Mooncake's transfer engine over TCP, RDMA, or NVLink inside a node.

A batch is posted in chunks. The last few pieces of a chunk are tasks of their own: only of a batch of one task does the
engine return the status without blocking and without giving up. When they have ended, the batch before them in the queue has
ended or is about to, and waiting for it returns at once. In a read every piece is such a task: after a failure it must be
known of each whether the engine may still write here, and a batch with a failed piece does not say.

One thread per peer posts and polls. Over TCP the caller does so for a few pieces, which is faster than waking a thread.
Between GPUs only the thread calls the engine, which once refused pieces when several did. There a task is seen to have ended
only when nothing posted behind it is under way, so all that waits is posted together.

| the engine reports | status | why (tested, except those marked *) |
|---|---|---|
| 1 for the tasks, 0 for the batch | `DONE` | the peer acknowledged every piece when it was in place |
| 0, or -2 (slow *) | `PENDING` | it goes on |
| -1, or it takes no piece | `UNSETTLED` | a stopped peer still puts in place what its socket holds |
| the same, and the peer's port refuses (TCP) | `FAILED` | its process or engine has ended |
| the same, not over TCP * | `UNSETTLED` | tasks have no order there; `FAILED` if no piece was in a batch |
| nothing for 3 s, and the port refuses (not TCP) | `UNSETTLED` | over verbs pieces to a dead peer may never end |
| nothing, because this engine was closed | `UNSETTLED` | this side's threads are joined; the other side is unknown |

A peer's writes come by connections that this engine has accepted, and may wait in a socket buffer after the peer's end. So
over TCP `fence` is `QUIET` only if the peer's pidfd shows its end, and none of these connections was reset or has a far end
without an owner. Closing the engine ends its connections and NICs' access to memory here: `renew` makes the fence `CLOSED`,
except between GPUs, whose memory a peer may have mapped.

The engine listens on all addresses without authentication, so off loopback this backend requires `trusted_network=True`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from disagg.backends.adapter import Adapter, AdapterPeer, exchange, registered_as
from disagg.backends.base import ADDRESS_SPACE, BackendOptions, Fence, RemotePeer, StagingShape, TransferStatus
from disagg.backends.cuda.driver import CudaError, Gpu
from disagg.backends.mooncake.launch import (
    Engine,
    check_acknowledges,
    check_environment,
    choose_protocol,
    import_engine,
    ip_refusal,
    outstanding_limit,
    start_engine,
)
from disagg.backends.mooncake.queue import TAIL, MooncakeDescriptor, PeerQueue, current
from disagg.backends.mooncake.transfer import MooncakeTransfer, Opcodes, Pieces, cut
from disagg.core.address import bracketed
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessWatch
from disagg.machine.tcp import EngineConnections, EngineSockets, Ports, new_listeners, ports_of

logger = logging.getLogger(__name__)

SPLIT_NBYTES = 8 << 20
"""So that all of the engine's connections to the peer share a long piece."""
NVLINK_SPLIT_NBYTES = 1 << 30
"""Each further piece costs 40 us between GPUs."""
MAX_ENGINES = 1000
"""One after the other at one address."""
_OF_ENGINE = ("_engine", "_descriptor", "_gpu", "_scratch", "_queues", "_engines")
"""What `renew` replaces."""
_WARM_S = 10.0
_DECODER = msgspec.msgpack.Decoder(MooncakeDescriptor)


class MooncakePeer(AdapterPeer):
    """`engine`: the one that is connected to it."""

    def __init__(
        self,
        queue: PeerQueue,
        engine: weakref.ref[Engine],
        process: ProcessWatch | None,
        regions: Sequence[RemoteRegion],
        *,
        epoch: int,
    ) -> None:
        super().__init__(regions, epoch=epoch)
        self.queue = queue
        self.engine = engine
        self.process = process


class MooncakeBackend(Adapter[MooncakePeer, MooncakeDescriptor]):
    """Raises `BackendUnavailable` where the engine, a library or the transport is missing, `ConfigError` for unsafe options
    or environment variables.
    """

    name = "mooncake"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=MooncakePeer, descriptors=_DECODER)
        self._protocol = choose_protocol(options)
        check_environment(options, self._protocol)
        self._options = options
        module = import_engine()
        if self._protocol == "tcp":
            check_acknowledges(module)
        self._opcodes = Opcodes(write=module.TransferOpcode.Write, read=module.TransferOpcode.Read)
        with new_listeners() as listening:
            engine = start_engine(module, options, self._protocol)
        self._engine: Engine | None = engine
        self._closed: weakref.ref[Engine] | None = None
        self._descriptor = MooncakeDescriptor(options.host, engine.get_rpc_port(), self._protocol, ports_of(listening))
        self._limit = outstanding_limit()
        self._split = NVLINK_SPLIT_NBYTES if self._protocol == "nvlink_intra" else SPLIT_NBYTES
        self._gpu: Gpu | None = None
        self._scratch = np.zeros(8, dtype=np.uint8)
        self._queues: list[PeerQueue] = []
        self._engines: dict[str, list[Ports]] = {}
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
            # The warm-up reads into it; devices want it registered.
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
        """Waits up to 10 s for the peer's answer, twice."""
        self.check_open()
        descriptor, regions = self.decode(endpoint)
        if not descriptor.host or not 0 < descriptor.port < 2**16:
            raise RemoteProtocolError(f"endpoint of backend 'mooncake': no address: {descriptor.session!r}")
        if descriptor.protocol != self._protocol:
            raise PeerUnreachable(f"peer {descriptor.session} uses {descriptor.protocol!r}, this engine {self._protocol!r}")
        if (status := self._probe(descriptor.session)) != 0:
            found = ip_refusal(descriptor.host) or f"backend 'mooncake': no engine answers at {descriptor.session}"
            raise PeerUnreachable(f"{found} (status {status})")
        self._connections.add(descriptor.ports)
        queue, engine = self._queue(descriptor, regions)
        peer = MooncakePeer(queue, engine, process, regions, epoch=epoch)
        try:
            self._warm(peer, descriptor)
        except PeerUnreachable:
            self.disconnect(peer)
            raise
        return peer

    def _queue(self, descriptor: MooncakeDescriptor, regions: Iterable[RemoteRegion]) -> tuple[PeerQueue, weakref.ref[Engine]]:
        """One queue for all its epochs: the engine limits pieces per address. Also returns the engine."""
        with self._lock:
            engine = self._running()
            session = self._spelled(descriptor)
            self._queues = [each for each in self._queues if each.is_running]
            queue = next((each for each in self._queues if each.session == session and each.acquire()), None)
            if queue is None:
                queue = PeerQueue(
                    engine,
                    self._opcodes,
                    descriptor,
                    session,
                    self._limit,
                    connections=self._connections,
                    gpu=self._gpu,
                    readable=self._readable_of(regions),
                )
                self._queues.append(queue)
            return queue, weakref.ref(engine)

    def _readable_of(self, regions: Iterable[RemoteRegion]) -> Pieces | None:
        """A byte of the peer for each connection; `None` where none may be read."""
        region = next((region for region in regions if region.device.kind == "cpu"), None)
        if region is None or self._protocol == "nvlink_intra":
            return None
        here, there = (np.full(TAIL, address, np.uint64) for address in (self._scratch.ctypes.data, region.address))
        return Pieces(here, there, np.ones(TAIL, np.uint64))

    def _spelled(self, descriptor: MooncakeDescriptor) -> str:
        """The engine remembers for ever which port takes the bytes for an address, so the next process there gets another
        spelling: a zero more before its port. Raises `PeerUnreachable` for more than anybody starts.
        """
        known = self._engines.setdefault(descriptor.session, [])
        if descriptor.ports not in known:
            if len(known) == MAX_ENGINES:
                raise PeerUnreachable(f"peer {descriptor.session}: {MAX_ENGINES} other engines have been at this address")
            known.append(descriptor.ports)
        return f"{bracketed(descriptor.host)}:{'0' * known.index(descriptor.ports)}{descriptor.port}"

    def _probe(self, session: str) -> int | None:
        """The engine's status; `None` without an answer, for which the engine itself waits for a minute."""
        found: list[int] = []
        engine = self._running()
        thread = threading.Thread(target=lambda: found.append(engine.send_probe(session)), daemon=True, name="disagg-probe")
        thread.start()
        thread.join(_WARM_S)
        return found[0] if found else None

    def _warm(self, peer: MooncakePeer, descriptor: MooncakeDescriptor) -> None:
        """Read a byte, so that the engine connects; raises `PeerUnreachable`."""
        if peer.queue.readable is None:
            return
        transfer = MooncakeTransfer(peer.queue, peer.queue.readable, reads=True)
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
        """See the module."""
        own = self.at_epoch(peer, epoch)
        if own is None:
            return Fence.UNKNOWN
        if own.process is not None and self.is_quiet_after(own.process):
            return Fence.QUIET
        is_over = own.engine() is None  # it was destroyed
        return Fence.CLOSED if is_over and self._protocol != "nvlink_intra" else Fence.UNKNOWN

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """Over TCP only."""
        return self._protocol == "tcp" and process.is_quiet(EngineSockets(opened=()))

    def is_quiet_when_closed(self) -> bool:
        """Over TCP, the engine's end joins the threads that write to memory. A probe under way puts that off."""
        return self._protocol == "tcp" and (self._closed is None or self._closed() is None)

    def disconnect(self, peer: RemotePeer) -> None:
        with self._lock:
            if not isinstance(peer, MooncakePeer) or not peer.connected:
                return
            peer.connected = False
        peer.queue.release()

    def close(self) -> None:
        """Joins all threads and closes the ports. The engine's part takes up to 2 s with transfers under way, and holds the
        GIL.
        """
        with self._lock:
            queues, self._queues = self._queues, []
            engine, self._engine = self._engine, None
            if engine is not None:
                self._closed = weakref.ref(engine)
            gpu, self._gpu = self._gpu, None
            self.is_open = False
        for queue in queues:
            queue.stop()
        with current(gpu):
            del queues, engine
        if gpu is not None:
            gpu.release()

    def renewal_due(self) -> str:
        return ""

    def renew(self) -> bool:
        other = registered_as(self.index, MooncakeBackend(self._options))
        with self._lock:
            exchange(self, other, _OF_ENGINE)
        other.close()
        return True

    def is_renewed(self, peer: RemotePeer) -> bool:
        return isinstance(peer, MooncakePeer) and peer.engine() is not self._engine

    def reads_no_more(self, peer: RemotePeer) -> bool:
        """On a GPU copies may still run."""
        return isinstance(peer, MooncakePeer) and peer.engine() is None and self._protocol != "nvlink_intra"

    def _running(self) -> Engine:
        if self._engine is None:
            raise LocalProtocolError("backend 'mooncake': the engine has been closed")
        return self._engine


def _gpu_of(regions: Iterable[MemoryRegion]) -> Gpu | None:
    """The GPU that all memory is on, or `None`.

    It must be current where the engine may open a peer's memory, which it otherwise opens for GPU 0: copies from another GPU
    then pass through the host, at a seventh of the speed.
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
