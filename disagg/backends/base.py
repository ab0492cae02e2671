"""The contract between the manager and a transfer engine.

A backend sees addresses and lengths only: nothing of pages, layers, requests or roles. It may be called from several
threads. `disagg.testing.backend_contract` is the test class that every backend must pass.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from disagg import _core
from disagg.copies import Addresses, CopyBatch
from disagg.errors import BackendUnavailable, ConfigError, NotRegistered, RemoteProtocolError
from disagg.memory import Device, MemoryRegion, RemoteRegion
from disagg.rdma import rdma_refusal
from disagg.spans import SpanBatch, SpanShape


class Op(enum.Enum):
    """Who moves the bytes. `WRITE`: the copies' source is local; `READ`: their destination is."""

    WRITE = "write"
    READ = "read"


class TransferStatus(enum.Enum):
    """What an engine says of a transfer. `DONE` and `FAILED` are settled: it will touch neither side again."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNSETTLED = "unsettled"

    @property
    def settled(self) -> bool:
        return self in (TransferStatus.DONE, TransferStatus.FAILED)


class Fence(enum.Enum):
    """`QUIET`: nothing of that peer's epoch can still write or read here, or there from here. `UNKNOWN`: no proof."""

    QUIET = "quiet"
    UNKNOWN = "unknown"


class Transport(enum.Enum):
    """What an engine may use to move bytes."""

    AUTO = "auto"
    RDMA = "rdma"
    TCP = "tcp"
    SHM = "shm"


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """What the embedding server says of the engine.

    `host`: the address that this rank's engine is reached at (peers dial it). `devices`: NICs the engine may use, empty
    for its own choice. `require`: the transport that must be in use; starting up without it is `BackendUnavailable`.
    `trusted_network`: the operator says that everyone who can reach `host` may be trusted; an engine whose data plane is
    open TCP needs it off loopback.
    """

    host: str = "127.0.0.1"
    transport: Transport = Transport.AUTO
    devices: tuple[str, ...] = ()
    require: Transport | None = None
    trusted_network: bool = False

    def __post_init__(self) -> None:
        if self.require is Transport.AUTO:
            raise ConfigError("require: expected 'rdma', 'tcp' or 'shm', found 'auto'")
        if self.require and self.transport not in (Transport.AUTO, self.require):
            raise ConfigError(f"require={self.require.value!r} contradicts transport={self.transport.value!r}")

    @property
    def wanted(self) -> Transport:
        """The transport to use: the one required, else the one allowed."""
        return self.require or self.transport


@dataclass(frozen=True, kw_only=True)
class StagingShape:
    """When and how pieces travel packed over an engine: pieces below `pack_below` bytes (0: never), in slots of
    `slot_nbytes`; `num_slots` slots per ring, one ring for each of up to `num_rings` peer ranks. Where `whole_rings` is given,
    so many have `num_slots`, the next two half as many, and so on, since memory is dear and most ranks have few peers. The
    writer has as many slots to pack into, and `spares` beside them. `at_once` slots, and never more than half a ring, are
    packed before anyone is told. With `measure` the threshold is measured towards each peer once it is connected, and
    `pack_below` holds where that cannot be. `gathers_from` as of `Gathering`, as far as it is known without a peer.
    """

    pack_below: int = 0
    slot_nbytes: int = 256 << 10
    num_slots: int = 16
    num_rings: int = 16
    measure: bool = False
    gathers_from: int | None = None
    whole_rings: int | None = None
    spares: int = 24
    at_once: int = 8

    def __post_init__(self) -> None:
        sizes = self.slot_nbytes, self.num_slots, self.num_rings, self.at_once
        if min(self.pack_below, self.spares) < 0 or min(sizes) < 1:
            raise ConfigError(f"staging: expected pack_below and spares of at least 0, and positive sizes, found {self}")

    def ring_slots(self) -> tuple[int, ...]:
        """How many slots each ring has."""
        whole = self.num_rings if self.whole_rings is None else self.whole_rings
        return tuple(max(1, self.num_slots >> max(0, (i - whole) // 2 + 1)) for i in range(self.num_rings))


@runtime_checkable
class SaysStaging(Protocol):
    """An optional ability of a backend's class: what its `staging` would be with those options, before it is started.

    Without it `disagg explain` takes the backend not to pack.
    """

    def staging_for(self, options: BackendOptions, /) -> StagingShape: ...


def check_rdma(backend: str, options: BackendOptions) -> None:
    """Raises `BackendUnavailable`, in the words of `disagg doctor`, where RDMA must be used and cannot be."""
    refusal = rdma_refusal(options.devices) if options.wanted is Transport.RDMA else None
    if refusal:
        raise BackendUnavailable(f"backend {backend!r}: transport 'rdma': {refusal}")


class RemotePeer(Protocol):
    """What `connect` returns: one peer process at one epoch, as the engine sees it. Opaque to the manager."""

    @property
    def regions(self) -> Sequence[RemoteRegion]: ...


class Transfer(Protocol):
    """Posted copies."""

    def poll(self) -> TransferStatus:
        """The state now; never blocks. Once settled it stays as it is."""

    @property
    def error(self) -> str | None:
        """Why it is `FAILED` or `UNSETTLED`, in the engine's words."""

    def close(self) -> None:
        """Give the engine's resources back. Raises `LocalProtocolError` unless settled; a second call does nothing."""


class Backend(Protocol):
    """One engine in one process, used by one manager."""

    name: str

    @property
    def staging(self) -> StagingShape:
        """What is known to be fast over the transport in use, as measured (`docs/engines.md`)."""

    @property
    def transport(self) -> str:
        """The transport really in use, for logs and reports, such as `"tcp"` or `"shm (cma)"`."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory reachable, once, before `endpoint`. Raises `ConfigError` for memory the engine cannot serve,
        `LocalProtocolError` for a second call. Regions may overlap or touch: a copy may cross from one to the next.
        """

    def endpoint(self) -> bytes:
        """What a peer needs to reach this engine and its registered regions; sent only after an authenticated hello."""

    def connect(self, endpoint: bytes, *, epoch: int) -> RemotePeer:
        """A peer's engine, from its `endpoint()`, warm: the first transfer pays nothing more.

        Raises `RemoteProtocolError` for bytes that are no endpoint of this backend, `PeerUnreachable` where it cannot
        be reached. A peer that came back has another `epoch` and is connected anew.
        """

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        """Post `copies`. Raises, with nothing posted: `NotRegistered` for an address outside the regions of its side,
        `PeerUnreachable` for a peer that was disconnected. An empty batch is done at once.
        """

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """Whether everything ever posted to or by that peer's epoch is provably over. Never a guess."""

    def disconnect(self, peer: RemotePeer) -> None:
        """Forget the peer. Transfers still pending stay to be polled."""

    def close(self) -> None:
        """Stop the engine and give everything back; a second call does nothing."""


@runtime_checkable
class Progressive(Protocol):
    """An engine that moves bytes only while someone calls it."""

    def progress(self) -> None:
        """Do what is due; never blocks."""


@runtime_checkable
class QuietWhenClosed(Protocol):
    """An engine whose end can be a proof: the last resort for rows that nothing else proves quiet."""

    def is_quiet_when_closed(self) -> bool:
        """Whether, `close` having returned, nothing that a peer has posted or will post can touch memory here any more, and
        this engine reads none. Never a guess.
        """


@runtime_checkable
class PlainCopier(Protocol):
    """An engine that the driver's own copies can be measured against."""

    def submit_plain(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        """As `Backend.submit` of a write, but one plain device-to-device copy for each piece."""


@runtime_checkable
class Gathering(Protocol):
    """An engine that collects pieces from all over this side's memory on their way to one place at the peer's."""

    def gathers_from(self, peer: RemotePeer) -> int | None:
        """From which length on, on average, pieces are to be submitted as they are even if they end up side by side: packing
        them first costs more. `None`: towards this peer never.
        """


class PreparedSpans(Protocol):
    """Span classes that an engine has taken for one peer at one epoch. Opaque to the manager."""

    @property
    def shapes(self) -> Sequence[SpanShape]: ...


@runtime_checkable
class SpanWriter(Protocol):
    """An engine that computes addresses itself: it is given span classes once, and per request token runs only."""

    def prepare_spans(self, op: Op, peer: RemotePeer, shapes: Sequence[SpanShape]) -> PreparedSpans | None:
        """Take what is fixed between two ranks; `None`: towards this peer it takes addresses only.

        Raises `NotRegistered` for a pool outside the regions of its side.
        """

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> Transfer:
        """Post `batch`, over the shapes that were prepared. Raises as `Backend.submit` does, with nothing posted.

        The transfer may have a `sign`, which shows once it is `DONE`, not before, also after `close`; that of one that fails
        shows the failure, or nothing.
        """


class Prepared(Protocol):
    """Copies to one peer, checked once, that may be posted again and again: each time after the last one has settled."""

    def post(self) -> Transfer:
        """As `Backend.submit`. Raises `PeerUnreachable` where the peer was disconnected, with nothing posted."""


@runtime_checkable
class Preparing(Protocol):
    """An engine for which posting the same copies again costs less than submitting them."""

    def prepare(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Prepared:
        """Get `copies` ready; raises as `Backend.submit`. What it holds in the engine is given back with the peer."""


# An address and a size below 2**63 each: their sum never overflows the uint64 columns.
_Bounded = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class _RegionRow(msgspec.Struct, frozen=True, array_like=True):
    address: _Bounded
    nbytes: _Bounded
    device: Annotated[str, msgspec.Meta(pattern="^(cpu|cuda(:[0-9]{1,4})?)$")]


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The envelope of every backend's endpoint: the engine's own descriptor, and the regions it serves."""

    backend: str
    descriptor: bytes
    regions: tuple[_RegionRow, ...]


_ENDPOINT = msgspec.msgpack.Decoder(Endpoint)
"""Made here and not when it is used: two threads that are first to look at one `Struct` end the process (msgspec 0.22)."""


def encode_endpoint(backend: str, descriptor: bytes, regions: Sequence[MemoryRegion]) -> bytes:
    """`Endpoint` as bytes."""
    rows = tuple(_RegionRow(r.address, r.nbytes, str(r.device)) for r in regions)
    return msgspec.msgpack.encode(Endpoint(backend, descriptor, rows))


def decode_endpoint(backend: str, data: bytes) -> tuple[bytes, tuple[RemoteRegion, ...]]:
    """The descriptor and the regions of a peer's endpoint; raises `RemoteProtocolError` where it is not one of `backend`."""
    try:
        endpoint = _ENDPOINT.decode(data)
        regions = tuple(RemoteRegion(r.address, r.nbytes, Device.parse(r.device)) for r in endpoint.regions)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise RemoteProtocolError(
            f"endpoint: {len(data)} bytes that are no endpoint of backend {backend!r}: {error}"
        ) from error
    if endpoint.backend != backend:
        raise RemoteProtocolError(f"endpoint: expected backend {backend!r}, found {endpoint.backend!r}")
    return endpoint.descriptor, regions


class RegionIndex:
    """Which addresses lie in a set of regions: the check before anything is posted, and each copy's device."""

    def __init__(self, regions: Sequence[MemoryRegion | RemoteRegion]) -> None:
        ordered = sorted(regions, key=lambda r: r.address)
        self.regions = tuple(ordered)
        kinds = {region.device.kind for region in ordered}
        self.kind = kinds.pop() if len(kinds) == 1 else None
        """The kind of device that all of them are on, if it is one."""
        columns = ([r.address for r in ordered], [r.address + r.nbytes for r in ordered], [r.device.index for r in ordered])
        self._core = _core.Regions(*(np.array(column, dtype=np.uint64) for column in columns))

    def require(self, addresses: Addresses, nbytes: Addresses, *, side: str) -> None:
        """Raises `NotRegistered` naming the first copy outside all regions."""
        inside = self._core.count_held(addresses, nbytes)
        if inside < len(addresses):
            raise self._outside(addresses, nbytes, inside, side)

    def check(self, addresses: Addresses, nbytes: Addresses, *, side: str) -> npt.NDArray[np.int64]:
        """The index, in `regions`, of each copy's region; raises as `require` does."""
        where = np.empty(len(addresses), dtype=np.int64)
        inside = self._core.locate(addresses, nbytes, where)
        if inside < len(addresses):
            raise self._outside(addresses, nbytes, inside, side)
        return where

    def describe(self, addresses: Addresses, nbytes: Addresses, *, side: str) -> npt.NDArray[np.uint64]:
        """Rows `(address, length, device number)`, N x 3; raises as `require` does."""
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        inside = self._core.describe(addresses, nbytes, rows)
        if inside < len(addresses):
            raise self._outside(addresses, nbytes, inside, side)
        return rows

    def place_blocks(
        self, addresses: Addresses, nbytes: Addresses, *, block: int, per_list: int, firsts: Addresses
    ) -> tuple[int, npt.NDArray[np.int32]] | None:
        """Which of the blocks of `block` bytes each copy is, regions being cut into blocks from their starts on and `firsts[k]`
        the number of the first of region `k`. None where a copy is no such block, or outside.

        The highest list that they are in; and, 2 x copies, the list and the index there, lists being of `per_list` blocks.
        """
        places = np.empty((2, len(addresses)), dtype=np.int32)
        highest = self._core.place_blocks(addresses, nbytes, block, per_list, firsts, places[0], places[1])
        return (highest, places) if highest >= 0 else None

    def _outside(self, addresses: Addresses, nbytes: Addresses, first: int, side: str) -> NotRegistered:
        return NotRegistered(
            f"{side} copy {first} of {len(addresses)}: [{int(addresses[first]):#x}, +{int(nbytes[first])}) is in none "
            f"of the {len(self.regions)} registered regions; nothing was posted"
        )


def local_and_remote(op: Op, copies: CopyBatch) -> tuple[Addresses, Addresses]:
    """The columns of `copies` as (this side, the peer's side)."""
    return (copies.source, copies.destination) if op is Op.WRITE else (copies.destination, copies.source)
