"""Backend `nixl`: NVIDIA's NIXL over UCX (RDMA, TCP, shared memory; GPU memory too).

| NIXL returns | status here | why |
|---|---|---|
| `SUCCESS` | `DONE` | each request ends with a flush of the UCX endpoint, so it is done at the peer too |
| `IN_PROG` | `PENDING` | over TCP it stays so while the peer's process is stopped |
| an error from status | `UNSETTLED` | the error is the last operation's; NIXL does not look at the others |
| an error from post | `UNSETTLED` | operations before the failing one may have been posted |
| an error before post | raised | nothing was posted |
| an active request is released | nothing | its bytes may wait in socket buffers, and land later |
| release is refused | nothing | the request is kept until the engine is closed |
| remote disconnect | as an error; then `PeerUnreachable` | the peer may still live |
| any of these errors, and the peer is fenced | `FAILED` | see below |

NIXL proves nothing about what the *peer's* engine posted to memory here. Over TCP not even the end of the peer does: what it
had sent waits in socket buffers until this side's progress thread applies it. So `fence` is `QUIET` only if the peer's pidfd
shows its end, and no socket between the two engines, opened by either, was reset or has a far end without an owner. A
process that executes another program keeps UCX's sockets, which this side then ends. It is never `QUIET` for other hosts,
nor wherever a NIC or a GPU may move bytes. But closing the engine ends its sockets and NICs' access to memory here, so `renew`
makes it `CLOSED` for peers that had no other way: another process of this machine may have mapped a GPU's memory.

NIXL does not report which transport UCX chose. `tcp` and `rdma` allow no other. `shm` has to allow TCP for UCX's own
messages. UCX prefers CMA (`process_vm_writev`) for data wherever it works, which `connect` tries against each peer: a
transport concluded in this way is "inferred". CMA copies inside the post, without the GIL; other calls into this engine wait
meanwhile.

With a delay, the progress thread sleeps, and a message wakes it at once; with 0, NIXL's default in Python, it spins on a
core ([decision 6](docs/decisions/0006-nixl-bindings.md)).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from disagg.backends.adapter import Adapter, exchange, registered_as
from disagg.backends.base import (
    ADDRESS_SPACE,
    BackendOptions,
    Fence,
    RemotePeer,
    StagingShape,
    TransferStatus,
    Transport,
    check_rdma,
)
from disagg.backends.nixl.bindings import Bindings, has_gpu, release_of
from disagg.backends.nixl.requests import NixlPeer, NixlTransfer, Requests
from disagg.backends.nixl.ucx import CERTAIN, conflicts, has_rdma, ucx_settings
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError, PeerIncompatible, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, merge_regions
from disagg.machine.environment import environment
from disagg.machine.processes import ProcessWatch, copy_refusal, machine_identity
from disagg.machine.tcp import EngineConnections, EngineSockets, Ports, complete, new_listeners, ports_of

logger = logging.getLogger(__name__)

WARM_UP_S = 10.0
"""Maximum wait of `connect` for the first byte."""
PROGRESS_DELAY_US = 1000
SHM_PROGRESS_DELAY_US = 20_000
"""UCX holds a lock while the poster's thread copies; a progress thread that wakes up waits for it."""

_OF_ENGINE = (
    *("_agent_name", "_agent", "_ucx", "_listening", "_ports", "_requests"),
    *("_scratch", "_registered", "_remote", "_unanswered"),
)
"""What `renew` replaces."""

_pid: int | None = None
"""The first to open NIXL; in a forked child, its parent."""


class NixlDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` guards `metadata`, whose addresses UCX reads without checks: damaged ones have ended the process. UCX listens
    on `ports`.
    """

    agent: str
    metadata: bytes
    digest: bytes
    machine: str
    ports: Ports = ()


_DECODER = msgspec.msgpack.Decoder(NixlDescriptor)


class NixlBackend(Adapter[NixlPeer, NixlDescriptor]):
    """Raises `BackendUnavailable` where NIXL, or the required transport, cannot be used."""

    name = "nixl"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=NixlPeer, descriptors=_DECODER)
        self._options = options
        self._lock = threading.RLock()  # keeps calls off a closed agent; NIXL serializes them anyway
        check_rdma(self.name, options)
        self._rdma = has_rdma()
        settings = ucx_settings(options, rdma=self._rdma, gpus=has_gpu())
        self._conflicts = conflicts(settings, os.environ)
        if self._conflicts and options.require:
            raise BackendUnavailable(f"backend 'nixl': require={options.require.value!r}: {'; '.join(self._conflicts)}")
        for conflict in self._conflicts:
            logger.warning("backend 'nixl': %s; the environment wins", conflict)
        with environment(settings), new_listeners() as self._listening:
            self._nixl = Bindings()
            self._agent_name = f"disagg-{os.getpid()}-{secrets.token_hex(12)}-{self._nixl.version}"
            self._agent, self._ucx = self._start()
        self._ports = ports_of(self._listening)
        self._connections = EngineConnections()
        self._requests = Requests(self._nixl, self._agent, self._ucx)
        self._scratch = np.zeros(64, np.uint8)  # for the first byte from each peer
        self._registered: list[Any] = []
        self._remote: dict[str, tuple[bytes, int]] = {}  # metadata, and number of users
        self._unanswered: list[NixlTransfer] = []  # first reads that took too long; each keeps its agent loaded
        self._transports: set[str] = set()
        self._neighbours: dict[ProcessWatch | None, frozenset[int] | None] = {}  # with their engines' ports, if all are known
        if options.require is Transport.SHM and (refusal := copy_refusal(os.getpid(), self._scratch.ctypes.data)):
            raise BackendUnavailable(f"backend 'nixl': require='shm': {refusal}")
        with self._nixl.mapped("registering"):
            self._register(CPU.kind, [(self._scratch.ctypes.data, self._scratch.nbytes, 0)])

    def _start(self) -> tuple[Any, int]:
        global _pid  # noqa: PLW0603 - a fact about the process
        if _pid not in {None, os.getpid()}:
            raise BackendUnavailable(
                f"backend 'nixl': process {_pid} used NIXL before it forked this one, and UCX cannot start here; "
                "start it by 'spawn', fork before the parent builds a manager, or choose another backend"
            )
        _pid = os.getpid()
        module = self._nixl.module
        config = module.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = SHM_PROGRESS_DELAY_US if self._options.stays_on_host else PROGRESS_DELAY_US
        config.syncMode = module.NIXL_THREAD_SYNC_STRICT
        try:
            agent = module.nixlAgent(self._agent_name, config)
            # With 'none', transfers to dead peers would stay in progress for ever.
            return agent, int(agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"}))
        except self._nixl.errors as error:
            wanted = self._options.wanted.value
            raise BackendUnavailable(f"backend 'nixl': UCX does not start with transport {wanted!r}: {error}") from error

    @staticmethod
    def staging_for(options: BackendOptions) -> StagingShape:
        """Break-even with single pieces is at about 32 KiB over shared memory, 64 KiB over TCP."""
        pack_below = (32 if options.stays_on_host else 64) << 10
        return StagingShape(pack_below=pack_below)

    @property
    def staging(self) -> StagingShape:
        shape = self.staging_for(self._options)
        return dataclasses.replace(shape, address_space=ADDRESS_SPACE) if self._by_sockets else shape

    @property
    def transport(self) -> str:
        if self._conflicts:
            return f"unknown (environment: {'; '.join(self._conflicts)})"
        wanted = self._options.wanted
        if wanted in CERTAIN:
            return CERTAIN[wanted]
        return " + ".join(sorted(self._transports)) or f"{wanted.value} (no peer yet)"

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        with self._lock:
            self.check_not_registered()
            merged = merge_regions(regions)
            try:
                for kind in sorted({region.device.kind for region in merged}):
                    self._register(kind, [(r.address, r.nbytes, r.device.index) for r in merged if r.device.kind == kind])
            except self._nixl.errors as error:
                raise ConfigError(f"backend 'nixl': NIXL cannot serve this memory: {error}: {merged}") from error
            self.set_registered(merged)

    def _register(self, kind: str, rows: list[tuple[int, int, int]]) -> None:
        descriptors = self._nixl.module.nixlRegDList(self._nixl.memory_kind(kind), np.array(rows, dtype=np.uint64))
        self._agent.registerMem(descriptors, [self._ucx])
        self._registered.append(descriptors)

    def endpoint(self) -> bytes:
        with self._lock, self._nixl.mapped("reading the agent's metadata"):
            self.check_open()
            metadata = bytes(self._agent.getLocalMD())
        descriptor = NixlDescriptor(self._agent_name, metadata, _digest(metadata), machine_identity(), self._ports)
        return self.endpoint_with(descriptor)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> NixlPeer:
        """Reads one byte, so that UCX has made its connections."""
        descriptor, regions = self.decode(endpoint)
        if _digest(descriptor.metadata) != descriptor.digest:
            raise RemoteProtocolError("endpoint of backend 'nixl': the metadata is damaged: its digest differs")
        self._check_version(descriptor.agent)
        peer = NixlPeer(
            descriptor.agent,
            descriptor.machine,
            process,
            self._connections,
            regions,
            requests=self._requests,
            epoch=epoch,
        )
        known, ports = self._neighbours.get(process, frozenset()), complete(descriptor.ports)
        self._neighbours[process] = None if known is None or ports is None else known.union(ports)
        with self._connections.connecting(descriptor.ports):  # UCX also answers by them, when nobody here waits for anything
            self._load(descriptor, peer)
            try:
                transport = self._infer(peer)
                self._warm_up(peer)
            except BaseException:
                self.disconnect(peer)
                raise
        self._transports.add(transport)
        return peer

    def _check_version(self, agent: str) -> None:
        """Raises `PeerIncompatible` for an agent of another release, which NIXL does not promise to understand."""
        *_, version = agent.split("-", maxsplit=3)
        theirs, ours = release_of(version), release_of(self._nixl.version)
        if theirs is not None and ours is not None and theirs != ours:
            raise PeerIncompatible(
                f"backend 'nixl': expected the peer's NIXL to be {self._nixl.version}, as here, found {version!r:.60}"
            )

    def _load(self, descriptor: NixlDescriptor, peer: NixlPeer) -> None:
        with self._lock:
            self.reachable(peer)
            self._unanswered = [read for read in self._unanswered if read.poll() is TransferStatus.PENDING]
            metadata, users = self._remote.get(descriptor.agent, (descriptor.metadata, 0))
            if descriptor.agent == self._agent_name or metadata != descriptor.metadata:
                raise RemoteProtocolError(
                    f"endpoint of backend 'nixl': agent {descriptor.agent!r} is this engine itself, or has other metadata"
                )
            if not users:
                self._load_new(descriptor)
            self._remote[descriptor.agent] = (metadata, users + 1)

    def _load_new(self, descriptor: NixlDescriptor) -> None:
        try:
            loaded = self._agent.loadRemoteMD(descriptor.metadata)
        except self._nixl.module.nixlBackendError as error:  # UCX connects while the metadata is loaded
            raise PeerUnreachable(f"backend 'nixl': UCX cannot reach agent {descriptor.agent!r}: {error}") from error
        except self._nixl.errors as error:
            raise RemoteProtocolError(f"endpoint of backend 'nixl': NIXL cannot read it: {error}") from error
        name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if name != descriptor.agent:
            with contextlib.suppress(*self._nixl.errors):
                self._agent.invalidateRemoteMD(name)
            raise RemoteProtocolError(f"endpoint of backend 'nixl': expected agent {descriptor.agent!r}, found {name!r}")

    def _infer(self, peer: NixlPeer) -> str:
        """The transport of host memory. Raises `PeerUnreachable` if `require='shm'` cannot be met."""
        wanted = self._options.wanted
        if wanted in CERTAIN:
            return CERTAIN[wanted]
        refusal: str | None = "the kernel attests no process of this host"
        addresses = [region.address for region in peer.regions if region.device == CPU]
        if peer.regions and not addresses:
            return "gpu memory (UCX's choice, unknown)"
        if peer.process is not None and self._options.stays_on_host:
            refusal = copy_refusal(peer.process.pid, addresses[0]) if addresses else None
        if refusal is None:
            return "shm (inferred)"
        if self._options.require is Transport.SHM:
            raise PeerUnreachable(f"backend 'nixl': require='shm': no shared memory with {peer.agent!r}: {refusal}")
        return "rdma or tcp (UCX's choice, unknown)" if self._rdma and wanted is Transport.AUTO else "tcp (inferred)"

    def _warm_up(self, peer: NixlPeer) -> None:
        with self._lock, self._nixl.mapped(f"connecting to {peer.agent!r}"):
            self.check_open()
            self._agent.makeConnection(peer.agent, [self._ucx])
        if not peer.regions:
            return
        first = peer.regions[0]
        here = np.array([[self._scratch.ctypes.data, 1, 0]], dtype=np.uint64)
        there = np.array([[first.address, 1, first.device.index]], dtype=np.uint64)
        with self._lock:
            self.check_open()
            request = self._requests.make(peer, (CPU.kind, first.device.kind), (here, there), reads=True)
            transfer = self._post(peer, [request])
        deadline = time.monotonic() + WARM_UP_S
        while transfer.poll() is TransferStatus.PENDING and time.monotonic() < deadline:
            time.sleep(0.0005)
        if transfer.poll() is not TransferStatus.DONE:
            # The request and the scratch byte are kept: the byte may still arrive.
            with self._lock:
                self._unanswered.append(transfer)
            cause = transfer.error or f"nothing in {WARM_UP_S} s"
            raise PeerUnreachable(f"backend 'nixl': no byte from peer {peer.agent!r}: {cause}")
        transfer.close()

    def disconnect(self, peer: RemotePeer) -> None:
        with self._lock:
            if isinstance(peer, NixlPeer) and peer.connected:
                peer.connected = False
                self._drop(peer)

    def _hold(self, agent: str) -> None:
        """NIXL gives no status of a request once its agent has been unloaded."""
        metadata, users = self._remote[agent]
        self._remote[agent] = (metadata, users + 1)

    def _drop(self, peer: NixlPeer) -> None:
        if peer.requests is not self._requests:
            return
        agent = peer.agent
        metadata, users = self._remote.pop(agent, (b"", 0))
        if users > 1:
            self._remote[agent] = (metadata, users - 1)
        elif users and self.is_open:
            self._unload(agent)

    def _unload(self, agent: str) -> None:
        try:
            self._agent.invalidateRemoteMD(agent)
        except self._nixl.errors as error:  # NIXL has unloaded a peer that died
            logger.info("backend 'nixl': unloading agent %s: %s", agent, error)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """See the module."""
        own = self.at_epoch(peer, epoch)
        if own is None:
            return Fence.UNKNOWN
        if own.process is not None and self.is_quiet_after(own.process):
            own.over = True
            return Fence.QUIET
        return Fence.CLOSED if self.is_renewed(own) and self._was_cut_off(own) else Fence.UNKNOWN

    def _was_cut_off(self, peer: NixlPeer) -> bool:
        """Whether the end of the former engine ended all ways of a peer to memory here."""
        here = machine_identity()
        is_elsewhere = peer.machine != "" and here not in ("", peer.machine)
        is_over = peer.process is not None and peer.process.is_gone() and not self._has_gpu
        return is_elsewhere or is_over or (self._provable and not self._options.stays_on_host)

    def is_quiet_after(self, process: ProcessWatch) -> bool:
        """Also proves that nothing that it sent can still arrive."""
        sockets = EngineSockets(complete(self._ports), self._neighbours.get(process))
        return self._provable and process.is_quiet(sockets)

    def is_quiet_when_closed(self) -> bool:
        """Closing joins the thread that reads TCP connections. Processes that may copy into this one (CMA) must have left as
        well.
        """
        if not self._provable:
            return False
        if not self._options.stays_on_host:
            return True
        return all(process is not None and process.has_left() for process in self._neighbours)

    def renewal_due(self) -> str:
        """UCX closes its listening socket if no descriptor is free when a peer connects."""
        if not self.is_open or all(_inode(fd) == inode for fd, inode in self._listening.items()):
            return ""
        return (
            "backend 'nixl': UCX has closed the socket on which it accepts peers, as it does if one connects while this "
            "process has no free descriptor; peers that are connected go on, new ones are refused"
        )

    def renew(self) -> bool:
        other = registered_as(self.index, NixlBackend(self._options))
        with self._lock:
            exchange(self, other, _OF_ENGINE)
            other.close()
        return True

    def is_renewed(self, peer: RemotePeer) -> bool:
        return isinstance(peer, NixlPeer) and peer.requests is not self._requests

    def reads_no_more(self, peer: RemotePeer) -> bool:
        """On a GPU copies may still run."""
        return self.is_renewed(peer) and not self._has_gpu

    @property
    def _by_sockets(self) -> bool:
        """No NIC, and no UCX setting of the user's: host memory moves by sockets and by copies between processes."""
        return (self._options.wanted in (Transport.TCP, Transport.SHM) or not self._rdma) and "UCX_TLS" not in os.environ

    @property
    def _provable(self) -> bool:
        return self._by_sockets and not self._has_gpu

    @property
    def _has_gpu(self) -> bool:
        return any(region.device != CPU for region in self.index.regions)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> NixlTransfer:
        with self._lock:
            own = self.reachable(peer)
            return self._post(own, self._requests.make_all(self.index, own, copies))

    def _post(self, peer: NixlPeer, handles: list[int]) -> NixlTransfer:
        transfer = NixlTransfer(self, peer, handles)
        if self._requests.post(transfer):
            self._hold(peer.agent)
        return transfer

    def advance(self, transfer: NixlTransfer) -> None:
        with self._lock:
            if transfer.status is not TransferStatus.PENDING:  # another thread was here
                return
            if transfer.peer.requests.are_closed:
                transfer.give_up("the engine was closed while the transfer was pending")
            elif not self._requests.poll(transfer):
                self._drop(transfer.peer)

    def release(self, transfer: NixlTransfer) -> None:
        with self._lock:
            transfer.peer.requests.release(transfer.handles)
            transfer.handles = []

    def close(self) -> None:
        """Pending transfers become `UNSETTLED`: closing proves nothing about them."""
        with self._lock:
            if not self.is_open:
                return
            self._requests.close()
            for agent in self._remote:
                self._unload(agent)
            for descriptors in self._registered:
                with contextlib.suppress(*self._nixl.errors):
                    self._agent.deregisterMem(descriptors, [self._ucx])
            self._remote.clear()
            self._registered.clear()
            self.is_open = False
            self._agent = None


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _digest(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=16).digest()
