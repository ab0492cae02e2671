"""Backend `nixl`: NVIDIA's NIXL over UCX (RDMA, TCP, shared memory; GPU memory too).

What each engine status means here, and what proves quiet:

| NIXL says | here | why |
|---|---|---|
| `SUCCESS` | `DONE` | each request ends with a flush of the UCX endpoint: done at the far end too |
| `IN_PROG` | `PENDING` | also for ever, over TCP, while the peer's process is stopped |
| an error from status | `UNSETTLED` | the error is the last operation's; the others are not looked at |
| an error from post | `UNSETTLED` | operations before the failing one may have been posted |
| an error before post | raised | nothing was posted |
| active request released | nothing | its bytes may wait in socket buffers, and land when the peer goes on |
| release refused | nothing | the request is kept until the engine is closed |
| remote disconnect | as an error; then `PeerUnreachable` | the connection is gone; the peer may still live |

| fenced after one of these errors | `FAILED` | see below |

Nothing that NIXL offers speaks for what the *peer's* engine posted to memory here. Not even the end of the peer's process
is a proof over TCP: what it had sent waits in this side's socket buffers until this side's progress thread applies it. So
`fence` is `QUIET` where both are seen: the process has ended, which only its own machine can tell, and no socket of this
process has a far end without an owner (`processes`), so that nothing sent is unread, and nothing here is sent to it either.
It is `UNKNOWN` for peers on other machines, and wherever bytes may move by a NIC or a GPU.

The transport. NIXL does not tell which one UCX chose. `tcp` and `rdma` allow no other, so they are certain. `shm` has to
allow TCP for UCX's own messages (over the loopback device); UCX prefers CMA for the data wherever that works, and whether
it works is tried against each peer at `connect`. What is only concluded in this way is marked "inferred".

The progress thread is on, with a delay of 1 ms, over shared memory 20 ms, in place of NIXL's Python default of 0: it
then sleeps on the workers' event descriptors (a message wakes it at once), where with 0 it spins on a core in each agent.
That is as fast as no progress thread at all (13 GB/s contiguous on two cores, against 5 to 7 with the spinning one, and
1.4% of a core idle against 99%), and a peer needs nobody to call it: so this backend is not `Progressive`.

Batches over shared memory. UCX's CMA is one `process_vm_writev` for each descriptor, made by the poster. From `MIN_VECTORS`
copies on, and up to `SMALL_NBYTES`, where it has been tried at `connect` that this process may copy to the peer, the backend
makes the same call itself, with up to 1,024 of them in each: 2 to 6 times as fast for pieces below 64 KiB, and without the
objects and calls that a request of NIXL's takes. What it says of such a batch is `DONE` or `FAILED`: nothing is under way
when the call returns.

Batches of `MIN_SELECTED` blocks of one size and more are requests by indices into lists of all blocks of that size, prepared
for the peer once as strided rows (`blocks`): they need no rows of their own, and an index cannot lead out of the memory that
was registered.

Sizes: a batch costs one descriptor per copy, without a Python loop. Posting over shared memory copies in the caller,
without the GIL; other calls into this engine wait meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.backends.base import BackendOptions, Fence, Op, RemotePeer, StagingShape, TransferStatus, Transport, check_rdma
from disagg.backends.blocks import MAX_INDEX, Blocks, Indices, paired
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint, local_and_remote
from disagg.core import _native
from disagg.core.copies import Addresses, CopyBatch
from disagg.core.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    DisaggError,
    LocalProtocolError,
    PeerUnreachable,
    RemoteProtocolError,
    TransferUnsettled,
)
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessIdentity, ProcessWatch, host_identity

logger = logging.getLogger(__name__)

WARM_UP_S = 10.0
"""How long `connect` waits for the first byte from a peer."""
_POSTING = {op: f"posting a {op.value}" for op in Op}
PROGRESS_DELAY_US = 1000
SHM_PROGRESS_DELAY_US = 20_000
"""Longer where the poster's own thread copies: UCX holds a spinlock meanwhile, and a progress thread that looks in spins on
it for as long as the copy takes. Messages wake it at once in either case.
"""
MIN_VECTORS = 16
SMALL_NBYTES = 256 << 10
"""Batches of so many copies and more, or of so few bytes, between processes that may copy from each other go in vectors."""
GATHER_FROM = 256
"""Bytes of a piece from which on pieces are written from where they lie: shorter ones are better packed into a slot first."""
COPY_THREADS = 2
"""For these. More would take cores that others want."""
MIN_SELECTED = 4096
"""Batches of so many copies and more are tried as indices into prepared lists. For fewer, rows take no longer."""
PER_LIST = MAX_INDEX
"""Blocks of one list."""
MAX_SIZES = 16
"""Sizes of blocks for which a peer's memory is listed: the one not used for longest goes when another comes."""
_BY_CMA = "shm (cma, inferred)"
CERTAIN = {Transport.TCP: "tcp", Transport.RDMA: "rdma"}
"""What leaves UCX no choice; see the module for the others."""

FLAVOURS = ("nixl_cu13", "nixl_cu12")
"""The packages that hold NIXL for one CUDA version each."""

ERRORS: Mapping[str, type[DisaggError]] = {
    "nixlBackendError": BackendError,
    "nixlCancelledError": TransferUnsettled,
    "nixlInvalidParamError": BackendError,
    "nixlMismatchError": RemoteProtocolError,
    "nixlNoTelemetryError": BackendError,
    "nixlNotAllowedError": BackendError,
    "nixlNotFoundError": PeerUnreachable,  # of memory or of a peer; memory has been checked before NIXL is asked
    "nixlNotPostedError": LocalProtocolError,
    "nixlNotSupportedError": BackendUnavailable,
    "nixlRemoteDisconnectError": PeerUnreachable,
    "nixlRepostActiveError": LocalProtocolError,
    "nixlUnknownError": BackendError,
}
"""NIXL's exception classes, which have no common base, by name."""

NOT_TRANSPORTS = frozenset({"UCX_MODULES", "UCX_USE_MT_MUTEX"})
"""Settings that leave UCX every transport that was asked for, whatever their value."""

_NO_AGENT = ""
"""What NIXL calls this side of a transfer."""
_environment_lock = threading.Lock()  # the environment is the process's, so its lock is too


class _Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`agent` is random and in `metadata` too."""

    agent: str
    metadata: bytes
    process: ProcessIdentity


_DECODER = msgspec.msgpack.Decoder(_Descriptor)


def load_bindings() -> ModuleType:
    """NIXL's own bindings; raises `BackendUnavailable`.

    Not its Python class: that one spins (see the module), and cancels what is posted when a handle is collected. Without
    a GPU any CUDA flavour serves, and is loaded by its own name: the common name would import torch to choose one.
    """
    try:
        if not has_gpu():
            for flavour in FLAVOURS:
                if importlib.util.find_spec(flavour) is not None:
                    return importlib.import_module(f"{flavour}._bindings")
        return importlib.import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"backend 'nixl' needs the package 'nixl' (pip install nixl): {error}") from error


def engine_errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """Everything that a call into NIXL may raise; what is not NIXL's own is how its bindings report C++ exceptions."""
    own = [c for c in vars(bindings).values() if isinstance(c, type) and issubclass(c, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, IndexError, MemoryError)


# -- what UCX is told -------------------------------------------------------------------------------------------------


def _loopback_device() -> str:
    for name in sorted(name for _, name in socket.if_nameindex()):
        flags = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
        if flags & 0x8:  # IFF_LOOPBACK
            return name
    raise BackendUnavailable("backend 'nixl': this machine has no loopback network device")


def _is_shm_expected(options: BackendOptions) -> bool:
    return options.wanted is Transport.SHM or (options.wanted is Transport.AUTO and _is_loopback(options.host))


def _is_loopback(host: str) -> bool:
    """Names are resolved; one that cannot be is no loopback name."""
    try:
        addresses = [host] if _is_address(host) else [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _entries(folder: str) -> bool:
    path = Path(folder)
    return path.is_dir() and any(path.iterdir())


def has_rdma() -> bool:
    return _entries("/sys/class/infiniband")


def has_gpu() -> bool:
    return _entries("/proc/driver/nvidia/gpus")


def ucx_settings(options: BackendOptions, *, rdma: bool, gpus: bool) -> dict[str, str]:
    """UCX's environment for `options`, on a machine with or without RDMA devices and GPUs.

    Raises `ConfigError` where UCX's open TCP port would face a network that nobody vouched for.
    """
    wanted = options.wanted
    loopback = _is_loopback(options.host)
    # Its progress thread and whoever posts share a lock, under which bytes are copied: nobody should spin on that.
    settings = {"UCX_USE_MT_MUTEX": "y"}
    if not rdma:
        # UCX's RDMA module brings a second libnl into the process, which then ends in SIGSEGV.
        settings["UCX_MODULES"] = "^ib"
    if wanted in (Transport.AUTO, Transport.TCP) and not loopback and not options.trusted_network:
        raise ConfigError(
            f"backend 'nixl': transport {wanted.value!r} listens on host {options.host!r} without authentication; "
            "expected trusted_network=True, a loopback host, or transport 'rdma' or 'shm'"
        )
    # NIXL refuses a list that leaves out device memory on a machine with GPUs.
    device = ",cuda" if gpus else ""
    lists = {Transport.TCP: "tcp", Transport.SHM: "shm,tcp", Transport.RDMA: "ib,self"}
    if wanted in lists:
        settings["UCX_TLS"] = lists[wanted] + device
    if options.devices:
        settings["UCX_NET_DEVICES"] = ",".join(options.devices)
    elif wanted is Transport.SHM or (loopback and wanted is not Transport.RDMA):
        settings["UCX_NET_DEVICES"] = _loopback_device()
    return settings


def conflicts(settings: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Where the user's own environment says otherwise."""
    return [
        f"{name}={environ[name]!r} is set, {value!r} was asked for"
        for name, value in settings.items()
        if name in environ and environ[name] != value and name not in NOT_TRANSPORTS
    ]


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """UCX reads the environment when an engine starts; what the user has set stays, and nothing is left behind."""
    with _environment_lock:
        added = [name for name in settings if name not in os.environ]
        os.environ.update({name: settings[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


# -- shared memory ----------------------------------------------------------------------------------------------------


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def cma_refusal(pid: int, address: int) -> str | None:
    """Why this process may not copy from `address` of process `pid` by itself; None if it may (one byte is read)."""
    byte = ctypes.create_string_buffer(1)
    here = _IoVector(ctypes.addressof(byte), 1)
    there = _IoVector(address, 1)
    copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
    copy.restype = ctypes.c_ssize_t
    done = copy(pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0))
    return None if done == 1 else f"process_vm_readv: {os.strerror(ctypes.get_errno())}"


# -- the engine -------------------------------------------------------------------------------------------------------


class _BlockList:
    """Blocks of one size, and NIXL's handles of their lists: `None` until they are needed, empty where it takes none."""

    def __init__(self, index: RegionIndex, nbytes: int) -> None:
        self.blocks = Blocks(index, nbytes, per_list=PER_LIST)
        self.handles: list[int] | None = None


class _BlockLists:
    """One agent's memory in prepared lists, by the size of their blocks. Used under the backend's lock."""

    def __init__(self, agent: str, index: RegionIndex) -> None:
        self.agent = agent
        self.index = index
        self._by_size: dict[int, _BlockList] = {}

    def of(self, backend: NixlBackend, nbytes: int) -> _BlockList:
        """The lists of blocks of `nbytes`."""
        found = self._by_size.pop(nbytes, None)
        if found is None:
            if len(self._by_size) == MAX_SIZES:
                backend.release_lists(self._by_size.pop(next(iter(self._by_size))).handles or ())
            found = _BlockList(self.index, nbytes)
        self._by_size[nbytes] = found
        return found

    def clear(self, backend: NixlBackend) -> None:
        for found in self._by_size.values():
            backend.release_lists(found.handles or ())
        self._by_size.clear()


class NixlPeer:
    """One agent at one epoch."""

    def __init__(self, descriptor: _Descriptor, regions: Sequence[RemoteRegion], *, epoch: int) -> None:
        self.agent = descriptor.agent
        self.process = descriptor.process
        self.epoch = epoch
        self.over = False  # whether it is proved that nothing of it is under way any more
        self.index = RegionIndex(regions)
        self.connected = True
        self.lost: str | None = None  # the engine's words when the connection broke
        self.lists = _BlockLists(descriptor.agent, self.index)
        self.prepared: list[NixlPrepared] = []
        self.watch: ProcessWatch | None = None  # of a process that this one may copy to and from

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        return tuple(RemoteRegion(r.address, r.nbytes, r.device) for r in self.index.regions)


class NixlTransfer:
    """One NIXL request per pair of memory kinds in the batch; see the module for what its states mean."""

    def __init__(self, backend: NixlBackend, peer: NixlPeer, handles: list[int], *, owns_handles: bool = True) -> None:
        self._backend = backend
        self.owns_handles = owns_handles
        self.peer = peer
        self.handles = handles
        self.running = handles
        self.status = TransferStatus.PENDING if handles else TransferStatus.DONE
        self.error: str | None = None

    def poll(self) -> TransferStatus:
        if self.status is TransferStatus.PENDING:
            self._backend.advance(self)
        if self.status is TransferStatus.UNSETTLED and self.peer.over:
            self.status = TransferStatus.FAILED
        return self.status

    def close(self) -> None:
        if not self.status.settled:
            raise LocalProtocolError(f"transfer: only a settled one can be closed, this one is {self.status.value}")
        self._backend.release(self)

    def give_up(self, error: str) -> None:
        """`UNSETTLED`, with the first cause."""
        self.status = TransferStatus.UNSETTLED
        self.error = self.error or error


class NixlPrepared:
    """Requests that stay with the engine until the peer is disconnected, or the last posting is closed after that."""

    def __init__(self, backend: NixlBackend, peer: NixlPeer, op: Op, handles: list[int]) -> None:
        self._backend = backend
        self._peer = peer
        self._op = op
        self.handles = handles
        self.posted: NixlTransfer | None = None

    def post(self) -> NixlTransfer:
        if self.posted is not None and self.posted.status is not TransferStatus.DONE:
            raise LocalProtocolError(f"prepared copies: the last posting is {self.posted.status.value}")
        self.posted = self._backend.post_again(self._peer, self.handles, self._op)
        return self.posted


class NixlBackend:
    """One NIXL agent. Raises `BackendUnavailable` where NIXL, or the transport required, cannot be used."""

    name = "nixl"

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._lock = threading.RLock()  # NIXL serializes its calls anyway; this also keeps them off a closed agent
        check_rdma(self.name, options)
        self._rdma = has_rdma()
        settings = ucx_settings(options, rdma=self._rdma, gpus=has_gpu())
        self._conflicts = conflicts(settings, os.environ)
        if self._conflicts and options.require:
            raise BackendUnavailable(f"backend 'nixl': require={options.require.value!r}: {'; '.join(self._conflicts)}")
        for conflict in self._conflicts:
            logger.warning("backend 'nixl': %s; the environment wins", conflict)
        self._agent_name = f"disagg-{os.getpid()}-{secrets.token_hex(12)}"
        with _environment(settings):
            self._nixl = load_bindings()
            self._errors = engine_errors(self._nixl)
            self._success, self._in_progress = self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG
            self._agent, self._ucx = self._start()
        self._scratch = np.zeros(64, np.uint8)  # where the first byte from each peer goes
        self._local: RegionIndex | None = None
        self._lists: _BlockLists | None = None  # of it; None as well where NIXL takes no strided rows
        self._registered: list[Any] = []
        self._remote: dict[str, tuple[bytes, int]] = {}  # agents loaded: metadata, and how many peers use it
        self._handles: set[int] = set()
        self._list_handles: set[int] = set()
        self._transports: set[str] = set()
        self._neighbours: set[ProcessIdentity] = set()  # of this machine, ever met
        self._check_shm()
        with self._mapped("registering"):
            self._register(self._nixl.DRAM_SEG, [(self._scratch.ctypes.data, self._scratch.nbytes, 0)])

    def _start(self) -> tuple[Any, int]:
        """The agent, and its UCX engine."""
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = SHM_PROGRESS_DELAY_US if _is_shm_expected(self._options) else PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            agent = self._nixl.nixlAgent(self._agent_name, config)
            # 'peer' makes UCX notice dead peers; 'none' would leave transfers to them in progress for ever.
            return agent, int(agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"}))
        except self._errors as error:
            wanted = self._options.wanted.value
            raise BackendUnavailable(f"backend 'nixl': UCX does not start with transport {wanted!r}: {error}") from error

    def _check_shm(self) -> None:
        if self._options.require is Transport.SHM:
            refusal = cma_refusal(os.getpid(), self._scratch.ctypes.data)
            if refusal:
                raise BackendUnavailable(f"backend 'nixl': require='shm': {refusal}")

    @staticmethod
    def staging_for(options: BackendOptions) -> StagingShape:
        """Break-even with single pieces: about 4 KiB over shared memory, where they are copied in vectors, and about 256 KiB
        over a network. There smaller slots copy faster, as they stay in a nearer cache, and cost as much more in what is said
        about them; over shared memory, where pieces are collected straight into the peer's slots, larger ones do better.
        """
        if _is_shm_expected(options):
            return StagingShape(pack_below=8 << 10, slot_nbytes=8 << 20, num_slots=4, measure=True, gathers_from=GATHER_FROM)
        return StagingShape(pack_below=256 << 10, slot_nbytes=2 << 20, num_slots=8, measure=True)

    @property
    def staging(self) -> StagingShape:
        return self.staging_for(self._options)

    @property
    def transport(self) -> str:
        """`auto` names what was found at each peer; see the module for what "inferred" means."""
        if self._conflicts:
            return f"unknown (environment: {'; '.join(self._conflicts)})"
        wanted = self._options.wanted
        if wanted in CERTAIN:
            return CERTAIN[wanted]
        return " + ".join(sorted(self._transports)) or f"{wanted.value} (no peer yet)"

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        with self._lock:
            self._check_open()
            if self._local is not None:
                raise LocalProtocolError("backend 'nixl': register is called once")
            merged = merge_regions(regions)
            try:
                for kind in sorted({region.device.kind for region in merged}):
                    rows = [(r.address, r.nbytes, r.device.index) for r in merged if r.device.kind == kind]
                    self._register(self._memory_kind(kind), rows)
            except self._errors as error:
                raise ConfigError(f"backend 'nixl': NIXL cannot serve this memory: {error}: {merged}") from error
            self._local = RegionIndex(merged)
            if self._takes_strided_rows():
                self._lists = _BlockLists(_NO_AGENT, self._local)

    def _takes_strided_rows(self) -> bool:
        """From NIXL 1.5 on."""
        row = np.array([[self._scratch.ctypes.data, 1, 0, 1, self._scratch.nbytes]], dtype=np.uint64)
        try:
            self._agent.releasedDlistH(self._agent.prepXferDlist(_NO_AGENT, self._nixl.DRAM_SEG, row, [self._ucx]))
        except self._errors as error:
            logger.info("backend 'nixl': no strided lists: %s", error)
            return False
        return True

    def _register(self, memory_kind: Any, rows: list[tuple[int, int, int]]) -> None:
        descriptors = self._nixl.nixlRegDList(memory_kind, np.array(rows, dtype=np.uint64))
        self._agent.registerMem(descriptors, [self._ucx])
        self._registered.append(descriptors)

    def _memory_kind(self, kind: str) -> Any:
        return self._nixl.DRAM_SEG if kind == CPU.kind else self._nixl.VRAM_SEG

    def endpoint(self) -> bytes:
        with self._lock, self._mapped("reading the agent's metadata"):
            self._check_open()
            index = self._own_index()
            metadata = bytes(self._agent.getLocalMD())
        descriptor = _Descriptor(self._agent_name, metadata, ProcessIdentity.own())
        regions = [MemoryRegion(r.address, r.nbytes, r.device) for r in index.regions]
        return encode_endpoint(self.name, msgspec.msgpack.encode(descriptor), regions)

    # -- peers ----------------------------------------------------------------------------------------------------

    def connect(self, endpoint: bytes, *, epoch: int) -> NixlPeer:
        """Reads one byte of the peer's first region, so that UCX has made its connections, within `WARM_UP_S`."""
        raw, regions = decode_endpoint(self.name, endpoint)
        try:
            descriptor = _DECODER.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend 'nixl': {error}") from error
        peer = NixlPeer(descriptor, regions, epoch=epoch)
        if descriptor.process.host == host_identity():
            self._neighbours.add(descriptor.process)
        self._load(descriptor)
        try:
            transport = self._infer(descriptor, peer)
            both_on_host = self._own_index().kind == peer.index.kind == CPU.kind
            if transport == _BY_CMA and both_on_host and not self._conflicts:
                peer.watch = ProcessWatch(descriptor.process)
            self._warm_up(peer)
        except BaseException:
            self.disconnect(peer)
            raise
        self._transports.add(transport)
        return peer

    def _load(self, descriptor: _Descriptor) -> None:
        """Make the agent known, once for all its peers."""
        with self._lock:
            self._check_open()
            metadata, users = self._remote.get(descriptor.agent, (descriptor.metadata, 0))
            if descriptor.agent == self._agent_name or metadata != descriptor.metadata:
                raise RemoteProtocolError(
                    f"endpoint of backend 'nixl': agent {descriptor.agent!r} is this engine itself, or has other metadata"
                )
            if not users:
                self._load_new(descriptor)
            self._remote[descriptor.agent] = (metadata, users + 1)

    def _load_new(self, descriptor: _Descriptor) -> None:
        try:
            loaded = self._agent.loadRemoteMD(descriptor.metadata)
        except self._nixl.nixlBackendError as error:  # UCX connects while the metadata is loaded
            raise PeerUnreachable(f"backend 'nixl': UCX cannot reach agent {descriptor.agent!r}: {error}") from error
        except self._errors as error:
            raise RemoteProtocolError(f"endpoint of backend 'nixl': NIXL cannot read it: {error}") from error
        name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if name != descriptor.agent:
            with contextlib.suppress(*self._errors):
                self._agent.invalidateRemoteMD(name)
            raise RemoteProtocolError(f"endpoint of backend 'nixl': expected agent {descriptor.agent!r}, found {name!r}")

    def _infer(self, descriptor: _Descriptor, peer: NixlPeer) -> str:
        """What UCX uses for host memory of this peer; raises `PeerUnreachable` where `require='shm'` cannot be."""
        wanted = self._options.wanted
        if wanted in CERTAIN:
            return CERTAIN[wanted]
        refusal: str | None = "another machine or process-id namespace"
        addresses = [region.address for region in peer.regions if region.device == CPU]
        if peer.regions and not addresses:
            return "gpu memory (UCX's choice, unknown)"
        if descriptor.process.host == host_identity():
            refusal = cma_refusal(descriptor.process.pid, addresses[0]) if addresses else None
        if refusal is None:
            return _BY_CMA
        if self._options.require is Transport.SHM:
            raise PeerUnreachable(f"backend 'nixl': require='shm': no shared memory with {peer.agent!r}: {refusal}")
        return "rdma or tcp (UCX's choice, unknown)" if self._rdma and wanted is Transport.AUTO else "tcp (inferred)"

    def _warm_up(self, peer: NixlPeer) -> None:
        with self._lock, self._mapped(f"connecting to {peer.agent!r}"):
            self._check_open()
            self._agent.makeConnection(peer.agent, [self._ucx])
        if not peer.regions:
            return
        first = peer.regions[0]
        here = np.array([[self._scratch.ctypes.data, 1, 0]], dtype=np.uint64)
        there = np.array([[first.address, 1, first.device.index]], dtype=np.uint64)
        with self._lock:
            self._check_open()
            handle = self._prepare(Op.READ, peer, (CPU.kind, first.device.kind), (here, there))
            transfer = self._post(peer, [handle], Op.READ)
        deadline = time.monotonic() + WARM_UP_S
        while transfer.poll() is TransferStatus.PENDING and time.monotonic() < deadline:
            time.sleep(0.0005)
        if transfer.poll() is not TransferStatus.DONE:
            # Its handle stays with the engine, and the scratch byte with it: it may yet arrive.
            raise PeerUnreachable(
                f"backend 'nixl': no byte from peer {peer.agent!r}: {transfer.error or f'nothing in {WARM_UP_S} s'}"
            )
        transfer.close()

    def disconnect(self, peer: RemotePeer) -> None:
        with self._lock:
            if not isinstance(peer, NixlPeer) or not peer.connected:
                return
            peer.connected = False
            if peer.watch is not None:
                peer.watch.close()
            for prepared in peer.prepared:
                if prepared.posted is None or prepared.posted.status is TransferStatus.DONE:
                    self._discard(prepared.handles)
                else:
                    prepared.posted.owns_handles = True
            peer.prepared.clear()
            peer.lists.clear(self)
            self._drop(peer.agent)

    def _hold(self, agent: str) -> None:
        """Keep an agent loaded: NIXL gives no status of a request once its agent is forgotten."""
        metadata, users = self._remote[agent]
        self._remote[agent] = (metadata, users + 1)

    def _drop(self, agent: str) -> None:
        """Forget an agent with its last peer and its last pending transfer."""
        metadata, users = self._remote.pop(agent, (b"", 0))
        if users > 1:
            self._remote[agent] = (metadata, users - 1)
        elif users and self._agent is not None:
            self._forget(agent)

    def _forget(self, agent: str) -> None:
        try:
            self._agent.invalidateRemoteMD(agent)
        except self._errors as error:  # a peer that died first: NIXL has forgotten it already
            logger.info("backend 'nixl': forgetting agent %s: %s", agent, error)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """`QUIET` where the peer's process is proved to have ended and nothing of it can arrive any more: see the module."""
        if isinstance(peer, NixlPeer) and peer.epoch == epoch and self._provable and peer.process.is_quiet():
            peer.over = True
            return Fence.QUIET
        return Fence.UNKNOWN

    def is_quiet_when_closed(self) -> bool:
        """Over TCP: the engine's end closes its connections and joins the thread that reads them. A neighbour that may copy
        into this process by itself (CMA) must have ended as well.
        """
        if not self._provable:
            return False
        return self._options.wanted is Transport.TCP or all(process.has_ended() for process in self._neighbours)

    @property
    def _provable(self) -> bool:
        """Whether bytes move by nothing but sockets and copies between processes: no NIC, no GPU, no setting of the user's."""
        by_sockets = self._options.wanted in (Transport.TCP, Transport.SHM) or not self._rdma
        return by_sockets and "UCX_TLS" not in os.environ and all(r.device == CPU for r in self._own_index().regions)

    # -- transfers ------------------------------------------------------------------------------------------------

    # Every request passes here: one lock, one call of the core for each side, four of NIXL, and few objects.

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> NixlTransfer:
        with self._lock:
            own = self._reachable(peer)
            if own.watch is not None and (len(copies) >= MIN_VECTORS or copies.total_nbytes <= SMALL_NBYTES):
                return self._copy(op, own, own.watch, copies)
            return self._post(own, self._prepare_all(op, own, copies), op)

    def _copy(self, op: Op, peer: NixlPeer, watch: ProcessWatch, copies: CopyBatch) -> NixlTransfer:
        """Copy by the call that UCX makes for each descriptor, with many of them in each; all is over on return."""
        local, remote = local_and_remote(op, copies)
        self._own_index().require(local, copies.nbytes, side="local")
        peer.index.require(remote, copies.nbytes, side="remote")
        transfer = NixlTransfer(self, peer, [])
        found = errno.ESRCH  # of a process that has the peer's number only
        if not watch.has_ended():
            found = _native.copy_between_processes(
                peer.process.pid, local, remote, copies.nbytes, write=op is Op.WRITE, num_threads=COPY_THREADS
            )
        if found:
            transfer.status, transfer.error = TransferStatus.FAILED, f"copying: {os.strerror(found)}"
            if found == errno.ESRCH:
                peer.lost = peer.lost or transfer.error
        return transfer

    def gathers_from(self, peer: RemotePeer) -> int | None:
        """See `Gathering`: where batches go in vectors, the kernel reads the pieces as they lie."""
        return GATHER_FROM if isinstance(peer, NixlPeer) and peer.watch is not None else None

    def prepare(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> NixlPrepared:
        """See `Preparing`: a post again pays for neither checks nor a new request (`docs/engines.md`)."""
        with self._lock:
            own = self._reachable(peer)
            prepared = NixlPrepared(self, own, op, self._prepare_all(op, own, copies))
            own.prepared.append(prepared)
            return prepared

    def post_again(self, peer: NixlPeer, handles: list[int], op: Op) -> NixlTransfer:
        """Post what `prepare` made; the transfer does not give its handles back."""
        with self._lock:
            return self._post(self._reachable(peer), handles, op, owns_handles=False)

    def _prepare_all(self, op: Op, peer: NixlPeer, copies: CopyBatch) -> list[int]:
        """A request for each pair of memory kinds among `copies`, every address of which is checked."""
        index = self._own_index()
        local, remote = local_and_remote(op, copies)
        if len(copies) >= MIN_SELECTED:
            selected = self._select(op, peer, local, remote, copies.nbytes)
            if selected is not None:
                return selected
        ours = index.describe(local, copies.nbytes, side="local")
        theirs = peer.index.describe(remote, copies.nbytes, side="remote")
        if not len(ours):
            return []
        if index.kind and peer.index.kind:
            return [self._prepare(op, peer, (index.kind, peer.index.kind), (ours, theirs))]
        on_gpu = (
            _are_on_gpu(index, index.check(local, copies.nbytes, side="local")),
            _are_on_gpu(peer.index, peer.index.check(remote, copies.nbytes, side="remote")),
        )
        return self._all_or_none(
            self._prepare(op, peer, kinds, (ours[chosen], theirs[chosen])) for kinds, chosen in _by_kind(*on_gpu)
        )

    def _select(self, op: Op, peer: NixlPeer, local: Addresses, remote: Addresses, nbytes: Addresses) -> list[int] | None:
        """Requests for blocks of one size, by indices into prepared lists; None where the copies are no such blocks."""
        size = int(nbytes[0])
        if self._lists is None or not size or not (self._lists.index.kind and peer.index.kind):
            return None
        ours = self._lists.of(self, size)
        here = ours.blocks.places(local, nbytes)
        if here is None:
            return None
        theirs = peer.lists.of(self, size)
        there = theirs.blocks.places(remote, nbytes)
        if there is None:
            return None
        our_lists, their_lists = self._prepared(self._lists, ours), self._prepared(peer.lists, theirs)
        if not our_lists or not their_lists:
            return None
        return self._all_or_none(
            self._make(op, (our_lists[one], here_indices), (their_lists[other], there_indices))
            for one, here_indices, other, there_indices in paired(here, there)
        )

    def _all_or_none(self, requests: Iterator[int]) -> list[int]:
        """Requests as they are made; where one cannot be, none is left."""
        handles: list[int] = []
        try:
            for handle in requests:
                handles.append(handle)  # noqa: PERF402 - those made before one that cannot be are given back
        except DisaggError:
            self._discard(handles)
            raise
        return handles

    def _reachable(self, peer: RemotePeer) -> NixlPeer:
        """`peer` as this backend's; raises where nothing may be posted to it."""
        self._check_open()
        if not isinstance(peer, NixlPeer):
            raise LocalProtocolError(f"backend 'nixl': expected a peer of its own, found {type(peer).__name__}")
        if not peer.connected:
            raise PeerUnreachable(f"backend 'nixl': peer {peer.agent!r} of epoch {peer.epoch} was disconnected")
        if peer.lost:
            raise PeerUnreachable(f"backend 'nixl': peer {peer.agent!r} of epoch {peer.epoch} was lost: {peer.lost}")
        return peer

    def _prepare(
        self, op: Op, peer: NixlPeer, kinds: tuple[str, str], rows: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
    ) -> int:
        """A request that is not posted yet, under the lock; `kinds` and `rows` (as of `RegionIndex`) are (local, remote)."""
        nixl = self._nixl
        try:
            local = nixl.nixlXferDList(self._memory_kind(kinds[0]), rows[0])
            remote = nixl.nixlXferDList(self._memory_kind(kinds[1]), rows[1])
            operation = nixl.NIXL_WRITE if op is Op.WRITE else nixl.NIXL_READ
            handle = int(self._agent.createXferReq(operation, local, remote, peer.agent, "", [self._ucx]))
        except self._errors as error:
            raise _as_ours(f"preparing {len(rows[0])} copies for peer {peer.agent!r}", error) from error
        self._handles.add(handle)
        return handle

    def _make(self, op: Op, ours: tuple[int, Indices], theirs: tuple[int, Indices]) -> int:
        """A request that is not posted yet, for blocks of two prepared lists, by their indices there."""
        operation = self._nixl.NIXL_WRITE if op is Op.WRITE else self._nixl.NIXL_READ
        with self._mapped(f"preparing {len(ours[1])} copies by lists"):
            handle = int(self._agent.makeXferReq(operation, *ours, *theirs, "", [self._ucx]))
        self._handles.add(handle)
        return handle

    def _prepared(self, lists: _BlockLists, of: _BlockList) -> list[int]:
        """NIXL's handles of an agent's blocks of one size; none where it takes no such list, as of memory that the peer has
        announced and not registered.
        """
        if of.handles is None:
            of.handles = []
            memory = self._memory_kind(lists.index.kind or "")
            try:
                for rows in of.blocks.rows:
                    of.handles.append(int(self._agent.prepXferDlist(lists.agent, memory, rows, [self._ucx])))
                    self._list_handles.add(of.handles[-1])
            except self._errors as error:
                logger.warning("backend 'nixl': no list of blocks of %s bytes: %s", of.blocks.nbytes, error)
                self.release_lists(of.handles)
                of.handles = []
        return of.handles

    def release_lists(self, handles: Sequence[int]) -> None:
        """Give back lists that have not been; requests that were made from them keep what they need."""
        for handle in handles:
            if handle in self._list_handles:
                self._list_handles.discard(handle)
                with contextlib.suppress(*self._errors):
                    self._agent.releasedDlistH(handle)

    def _post(self, peer: NixlPeer, handles: list[int], op: Op, *, owns_handles: bool = True) -> NixlTransfer:
        """Under the lock, with an open engine."""
        transfer = NixlTransfer(self, peer, handles, owns_handles=owns_handles)
        if handles and self._ask_all(transfer, self._agent.postXferReq, _POSTING[op]):
            self._hold(peer.agent)
        return transfer

    def advance(self, transfer: NixlTransfer) -> None:
        """Bring a pending transfer's status up to date."""
        with self._lock:
            if self._agent is None:
                transfer.give_up("the engine was closed while the transfer was pending")
                return
            if transfer.status is not TransferStatus.PENDING:  # another thread was here
                return
            if not self._ask_all(transfer, self._agent.getXferStatus, "transferring"):
                self._drop(transfer.peer.agent)

    def _ask_all(self, transfer: NixlTransfer, call: Any, what: str) -> bool:
        """Take NIXL's answers until one is bad; whether the transfer is still pending, and so needs its agent."""
        left = []
        for handle in transfer.running:
            try:
                status = call(handle)
            except self._errors as error:
                if ERRORS.get(type(error).__name__) is PeerUnreachable:
                    transfer.peer.lost = transfer.peer.lost or str(error)
                transfer.give_up(f"{what}: {type(error).__name__}: {error}")
                return False
            if status == self._in_progress:
                left.append(handle)
            elif status != self._success:
                transfer.give_up(f"{what}: NIXL says {status}")
                return False
        transfer.running = left
        if not left:
            transfer.status = TransferStatus.DONE
        return bool(left)

    def release(self, transfer: NixlTransfer) -> None:
        """Give a settled transfer's handles back, unless they are kept to be posted again."""
        if not transfer.owns_handles:
            return
        with self._lock:
            self._discard(transfer.handles)
            transfer.handles = []

    def _discard(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if handle not in self._handles:
                continue
            try:
                self._agent.releaseXferReq(handle)
                self._handles.discard(handle)
            except self._errors as error:  # kept until the engine is closed
                logger.warning("backend 'nixl': NIXL keeps a request: %s", error)

    def close(self) -> None:
        """Transfers still pending become `UNSETTLED`: the end of the engine here is no proof of theirs."""
        with self._lock:
            if self._agent is None:
                return
            self._discard(tuple(self._handles))
            self.release_lists(tuple(self._list_handles))
            for agent in self._remote:
                self._forget(agent)
            for descriptors in self._registered:
                with contextlib.suppress(*self._errors):
                    self._agent.deregisterMem(descriptors, [self._ucx])
            self._remote.clear()
            self._handles.clear()
            self._registered.clear()
            self._agent = None

    def _check_open(self) -> None:
        if self._agent is None:
            raise LocalProtocolError("backend 'nixl': the engine has been closed")

    def _own_index(self) -> RegionIndex:
        if self._local is None:
            raise LocalProtocolError("backend 'nixl': register has not been called")
        return self._local

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        """NIXL's exceptions as this library's."""
        try:
            yield
        except self._errors as error:
            raise _as_ours(what, error) from error


def _as_ours(what: str, error: Exception) -> DisaggError:
    kind = ERRORS.get(type(error).__name__, BackendError)
    return kind(f"backend 'nixl': {what}: {type(error).__name__}: {error}")


def _are_on_gpu(index: RegionIndex, where: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each copy is in GPU memory, from its region."""
    return np.array([region.device.kind != CPU.kind for region in index.regions], dtype=np.bool_)[where]


def _by_kind(
    local: npt.NDArray[np.bool_], remote: npt.NDArray[np.bool_]
) -> Iterator[tuple[tuple[str, str], npt.NDArray[np.bool_]]]:
    """Which copies have each pair of (local, remote) memory kinds."""
    for local_gpu in (False, True):
        for remote_gpu in (False, True):
            chosen = (local == local_gpu) & (remote == remote_gpu)
            if chosen.any():
                yield ("cuda" if local_gpu else "cpu", "cuda" if remote_gpu else "cpu"), chosen
