"""The contract between the manager and a transfer engine.

A backend sees addresses and lengths only: nothing of pages, layers, requests or roles. It may be called from several
threads. `disagg.testing.contract` is the test class that every backend must pass.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.core.address import is_loopback
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.machine.rdma import rdma_refusal


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

    @property
    def stays_on_host(self) -> bool:
        """Whether these options let only peers of this host be reached: shared memory, or a loopback address."""
        return self.wanted is Transport.SHM or (self.wanted is Transport.AUTO and is_loopback(self.host))


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
