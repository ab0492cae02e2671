"""The contract between the manager and a transfer engine.

A backend sees addresses and lengths, and no pages, layers, requests or roles. Several threads may call it.
`disagg.testing.contract` has the test class that every backend must pass.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.core import _native
from disagg.core.address import is_loopback
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendUnavailable, ConfigError
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.machine.processes import ProcessWatch
from disagg.machine.rdma import rdma_refusal


class TransferStatus(enum.Enum):
    """The status of a transfer. `DONE` and `FAILED` are settled: the engine will touch neither side again."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNSETTLED = "unsettled"

    @property
    def settled(self) -> bool:
        return self in (TransferStatus.DONE, TransferStatus.FAILED)


class Fence(enum.Enum):
    """`QUIET`: nothing of the peer's epoch can still write or read here, or there from here. `UNKNOWN`: no proof."""

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
    """The server's settings for the engine.

    `host`: the address at which peers reach this rank's engine. `devices`: NICs that the engine may use, empty for its own
    choice. `require`: the transport that must be in use; without it the engine raises `BackendUnavailable` when it starts.
    `trusted_network`: the operator trusts everyone who can reach `host`. An engine with open TCP needs this off loopback.
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


ADDRESS_SPACE = 256
"""How many times lent slots are reserved as addresses, for an engine that pins no memory."""


@dataclass(frozen=True, kw_only=True)
class StagingShape:
    """When and how pieces travel packed over an engine.

    Pieces below `pack_below` bytes are packed (0: none), into slots of `slot_nbytes`. A receiver lends `num_lent` slots, up to
    `window` of them to one writer. The writer packs into `window` buffers of that size, and `spares` more. Slots are reported
    and lent `at_once`, and never more than half a window together. `address_space`: how many times the lent slots are reserved
    as addresses, where that costs no memory; see `LentSlots`. `gathers_from` is as in `Gathering`, as far as it is known
    without a peer.
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
        """Slots that are reported or lent together."""
        return min(self.at_once, max(1, self.window // 2))

    def __post_init__(self) -> None:
        sizes = self.slot_nbytes, self.window, self.num_lent, self.address_space, self.at_once
        if min(self.pack_below, self.spares) < 0 or min(sizes) < 1:
            raise ConfigError(f"staging: expected pack_below and spares of at least 0, and positive sizes, found {self}")


def check_rdma(backend: str, options: BackendOptions) -> None:
    """Raises `BackendUnavailable`, with the findings of `disagg doctor`, where RDMA is required and cannot be used."""
    refusal = rdma_refusal(options.devices) if options.wanted is Transport.RDMA else None
    if refusal:
        raise BackendUnavailable(f"backend {backend!r}: transport 'rdma': {refusal}")


class RemotePeer(Protocol):
    """One peer process at one epoch, as the engine sees it. Opaque to the manager."""

    @property
    def regions(self) -> Sequence[RemoteRegion]: ...


class Transfer(Protocol):
    """Posted copies."""

    def poll(self) -> TransferStatus:
        """The status now; never blocks. A settled status does not change."""

    @property
    def completion(self) -> _native.Flag | _native.CudaEvent | None:
        """What native code can poll for the end of the transfer without the GIL; `None` if only `poll` tells it.

        It is done once the transfer is `DONE`, not before, and stays so after `close`. That of a failed transfer reports the
        failure, or is never done.
        """

    @property
    def error(self) -> str | None:
        """The engine's reason for `FAILED` or `UNSETTLED`, else `None`."""

    def close(self) -> None:
        """Release the engine's resources. Raises `LocalProtocolError` unless settled; a second call does nothing."""


class Backend(Protocol):
    """One engine in one process, used by one manager."""

    name: str

    @property
    def staging(self) -> StagingShape:
        """When and how pieces are packed over the transport in use, as measured (`docs/engines.md`)."""

    @property
    def transport(self) -> str:
        """The transport that is really in use, for logs and reports, such as `"tcp"` or `"shm"`."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory reachable, once, before `endpoint`. Raises `ConfigError` for memory the engine cannot serve,
        `LocalProtocolError` for a second call. Regions may overlap or touch: a copy may cross from one to the next.
        """

    def endpoint(self) -> bytes:
        """The data with which a peer reaches this engine and its regions; sent only after an authenticated hello."""

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> RemotePeer:
        """Connect to a peer's engine, from its `endpoint()`, so that the first transfer is as fast as the next ones.

        `process` is the peer's process if the kernel attests it. Only with it may an engine copy to and from a process by its
        id, or conclude from its end; nothing that an endpoint says about a process is believed.

        Raises `RemoteProtocolError` for bytes that are not an endpoint of this backend, `PeerUnreachable` for a peer that
        cannot be reached. A peer that restarted has another `epoch` and is connected again.
        """

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        """Post `copies` from this side's memory to the peer's. Raises, with nothing posted: `NotRegistered` for an address
        outside the regions of its side, `PeerUnreachable` for a peer that was disconnected. An empty batch is done at once.
        """

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """Whether everything ever posted to or by that peer's epoch has provably finished. Never a guess."""

    def disconnect(self, peer: RemotePeer) -> None:
        """Drop the peer. Transfers that are still pending can still be polled."""

    def close(self) -> None:
        """Stop the engine and release everything; a second call does nothing."""
