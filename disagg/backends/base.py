"""The contract between the manager and a transfer engine (tests: `disagg.testing.contract`). A backend sees addresses
and lengths only. Several threads may call it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from disagg.core import _native
from disagg.core.address import is_loopback
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.machine.processes import ProcessWatch
from disagg.machine.rdma import rdma_refusal


class TransferStatus(enum.Enum):
    """`DONE` and `FAILED` are settled: the engine will touch neither side again."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNSETTLED = "unsettled"

    @property
    def settled(self) -> bool:
        return self in (TransferStatus.DONE, TransferStatus.FAILED)


class Fence(enum.Enum):
    """`QUIET`: the peer's process of that epoch and this engine cannot touch each other's memory any more. `CLOSED`: it cannot
    touch this side's. `UNKNOWN`: no proof.
    """

    QUIET = "quiet"
    CLOSED = "closed"
    UNKNOWN = "unknown"


class Transport(enum.Enum):
    AUTO = "auto"
    RDMA = "rdma"
    TCP = "tcp"
    SHM = "shm"


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """The server's settings for the engine.

    `host`: the address at which peers reach the engine. `devices`: NICs that it may use; empty: its choice. `require`:
    the engine raises `BackendUnavailable` at its start without this transport. `trusted_network`: everyone who can
    reach `host` is trusted; an engine with open TCP needs this off loopback. Raises `ConfigError` if `require` is
    `AUTO` or contradicts `transport`.
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
        return self.require or self.transport

    @property
    def stays_on_host(self) -> bool:
        """Whether the options limit peers to this host: shared memory, or a loopback address."""
        return self.wanted is Transport.SHM or (self.wanted is Transport.AUTO and is_loopback(self.host))


ADDRESS_SPACE = 256
"""How many times lent slots are reserved as addresses, for an engine that pins no memory."""


@dataclass(frozen=True, kw_only=True)
class StagingShape:
    """When and how pieces travel packed over an engine.

    Pieces below `pack_below` bytes are packed (0: none), into slots of `slot_nbytes`. A receiver lends `num_lent`
    slots, up to `window` of them to one writer, which packs into `window` + `spares` buffers. Slots are reported and
    lent `at_once`, but never more than half a window together. `address_space`: how many times the lent slots are reserved
    as addresses (`LentSlots`). `gathers_from`: see `Gathering`. Raises `ConfigError` for negative numbers, and sizes of 0.
    """

    pack_below: int = 0
    slot_nbytes: int = 1 << 20
    window: int = 16
    num_lent: int = 40
    gathers_from: int | None = None
    address_space: int = 1
    spares: int = 8
    at_once: int = 8

    @property
    def batch(self) -> int:
        return min(self.at_once, max(1, self.window // 2))

    @property
    def nbytes(self) -> int:
        return (self.window + self.spares + self.num_lent) * self.slot_nbytes

    def within(self, nbytes: int) -> StagingShape:
        """With as many slots as `nbytes` hold, in about the same proportions. Raises `ConfigError` for fewer than two."""
        count, usual = nbytes // self.slot_nbytes, self.nbytes // self.slot_nbytes
        if count < 2:
            raise ConfigError(f"staging_nbytes: expected at least {2 * self.slot_nbytes}, two slots, found {nbytes}")
        window, spares = max(1, self.window * count // usual), self.spares * count // usual
        return replace(self, window=window, spares=spares, num_lent=count - window - spares)

    def __post_init__(self) -> None:
        sizes = self.slot_nbytes, self.window, self.num_lent, self.address_space, self.at_once
        if min(self.pack_below, self.spares) < 0 or min(sizes) < 1:
            raise ConfigError(f"staging: expected pack_below and spares of at least 0, and positive sizes, found {self}")


def check_rdma(backend: str, options: BackendOptions) -> None:
    """Raises `BackendUnavailable`, with the findings of `disagg doctor`, if RDMA is required and unusable."""
    refusal = rdma_refusal(options.devices) if options.wanted is Transport.RDMA else None
    if refusal:
        raise BackendUnavailable(f"backend {backend!r}: transport 'rdma': {refusal}")


class RemotePeer(Protocol):
    """A peer process at one epoch. Opaque to the manager."""

    @property
    def regions(self) -> Sequence[RemoteRegion]: ...


class Transfer(Protocol):
    def poll(self) -> TransferStatus:
        """Never blocks. A settled status does not change."""

    @property
    def completion(self) -> _native.Flag | _native.CudaEvent | None:
        """The end of the transfer, for native code; `None` if only `poll` reports it.

        It is done once the transfer is `DONE`, not before, and stays so after `close`. For a failed transfer it reports
        the failure, or is never done.
        """

    @property
    def error(self) -> str | None:
        """The reason for `FAILED` or `UNSETTLED`."""

    def close(self) -> None:
        """Release resources. Raises `LocalProtocolError` unless settled; idempotent."""


class Backend(Protocol):
    name: str

    @property
    def staging(self) -> StagingShape:
        """How pieces are packed over the transport in use."""

    @property
    def transport(self) -> str:
        """The transport in use, for logs and reports, such as `"tcp"`."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory reachable, once, before `endpoint`. Raises `ConfigError` for memory that the engine cannot serve,
        `LocalProtocolError` for a second call. Regions may overlap or touch; a copy may cross from one to the next.
        """

    def endpoint(self) -> bytes:
        """What a peer needs to connect; sent only after an authenticated hello."""

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> RemotePeer:
        """Connect to a peer's engine, so that the first transfer is as fast as later ones. A restarted peer has another
        `epoch`.

        `process` is the peer's process if the kernel attests it. Only with it may an engine copy by process id, or conclude
        anything from a process's end, whatever an endpoint says.

        Raises `RemoteProtocolError` for bytes that are not an endpoint of this backend, `PeerUnreachable` if the peer cannot
        be reached, `PeerIncompatible` if it cannot until either side restarts.
        """

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        """Post `copies` from this side's memory to the peer's. Raises, with nothing posted, `NotRegistered` for an
        address outside its side's regions, `PeerUnreachable` for a disconnected peer. An empty batch is done at once.
        """

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """Whether everything ever posted to and by the peer's epoch, or at least by it, has provably finished. Never a guess;
        `UNKNOWN` for another epoch than the peer's. Also called after `disconnect`.
        """

    def disconnect(self, peer: RemotePeer) -> None:
        """Drop the peer; idempotent. Pending transfers can still be polled."""

    def close(self) -> None:
        """Release everything; idempotent. Later calls of `submit` and `connect` raise a `DisaggError`."""
