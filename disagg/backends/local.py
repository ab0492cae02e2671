"""Backend `local`: copies between managers of one process. The reference for tests. `submit` copies before it returns:

| question | answer | why |
|---|---|---|
| status of a transfer | `DONE` | the copy has returned |
| fence of a peer | `QUIET` | `UNKNOWN` while another thread copies between the two engines |
| the peer's engine was closed | `PeerUnreachable` at submit | `close` waits for copies, and no other starts |
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import msgspec

from disagg.backends.adapter import Adapter, AdapterPeer
from disagg.backends.base import BackendOptions, Fence, RemotePeer, StagingShape, TransferStatus
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, PeerUnreachable
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions
from disagg.machine.processes import ProcessWatch

_engines: WeakValueDictionary[str, LocalBackend] = WeakValueDictionary()
"""The engines of this process, by token."""


class LocalDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int
    token: str


_DECODER = msgspec.msgpack.Decoder(LocalDescriptor)


def _copy(copies: CopyBatch) -> None:
    """All addresses must have been checked."""
    _native.copy_batch(copies.source, copies.destination, copies.nbytes)


class LocalTransfer:
    error: str | None = None

    completion = None

    def poll(self) -> TransferStatus:
        return TransferStatus.DONE

    def close(self) -> None:
        """Nothing to release."""


class LocalPeer(AdapterPeer):
    def __init__(self, target: LocalBackend, *, epoch: int, generation: int) -> None:
        super().__init__([RemoteRegion(r.address, r.nbytes, r.device) for r in target.index.regions], epoch=epoch)
        self.target = target
        self.generation = generation


class LocalBackend(Adapter[LocalPeer, LocalDescriptor]):
    name = "local"
    transport = "memory copy"

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(peers=LocalPeer, descriptors=_DECODER)
        if options.require is not None:
            raise ConfigError(f"backend 'local' has no transport, so it cannot require {options.require.value!r}")
        self._descriptor = LocalDescriptor(os.getpid(), secrets.token_hex(16))
        self._under_way: Counter[str] = Counter()  # copies, by the other engine's token
        self._fences: Counter[str] = Counter()  # also by token; older connections are refused
        self._changed = threading.Condition()

    @property
    def token(self) -> str:
        return self._descriptor.token

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        return StagingShape()

    @property
    def staging(self) -> StagingShape:
        return StagingShape()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.check_not_registered()
        for region in regions:
            if region.device != CPU:
                raise ConfigError(f"backend 'local': expected memory of the CPU, found {region.device} at {region.address:#x}")
        self.set_registered(merge_regions(regions))
        _engines[self.token] = self

    def endpoint(self) -> bytes:
        return self.endpoint_with(self._descriptor)

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> LocalPeer:
        del process
        self.check_open()
        descriptor, _ = self.decode(endpoint)
        if descriptor.pid != os.getpid():
            raise PeerUnreachable(
                f"backend 'local' reaches engines of its own process only: this is process {os.getpid()}, "
                f"the endpoint is one of process {descriptor.pid}; choose another backend between processes"
            )
        target = _engines.get(descriptor.token)
        if target is None:
            raise PeerUnreachable("backend 'local': that engine of this process has been closed")
        return LocalPeer(target, epoch=epoch, generation=target.generation_of(self.token))

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> LocalTransfer:
        own = self.reachable(peer)
        self.check_copies(own, copies)
        # Neither side may release its memory during the copy.
        with self.busy(own.target.token), own.target.busy(self.token, generation=own.generation):
            _copy(copies)
        return LocalTransfer()

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """Also refuses what the peer would still post by its present connections."""
        own = self.at_epoch(peer, epoch)
        if own is None:
            return Fence.UNKNOWN
        with self._changed:
            self._fences[own.target.token] += 1
            return Fence.UNKNOWN if self._under_way[own.target.token] else Fence.QUIET

    def generation_of(self, other: str) -> int:
        return self._fences[other]

    def disconnect(self, peer: RemotePeer) -> None:
        if isinstance(peer, LocalPeer):
            peer.connected = False

    def close(self) -> None:
        """Returns once no copy to or from this engine's memory is under way."""
        _engines.pop(self.token, None)
        with self._changed:
            self.is_open = False
            self._changed.wait_for(lambda: not self._under_way.total())

    def is_quiet_when_closed(self) -> bool:
        """`close` waits for copies, and copies start only between open engines."""
        return True

    @contextmanager
    def busy(self, other: str, *, generation: int | None = None) -> Iterator[None]:
        """Within the scope `close` waits. Raises `PeerUnreachable` for a closed engine, or one that has fenced
        `generation`.
        """
        with self._changed:
            if not self.is_open:
                raise PeerUnreachable("backend 'local': that engine of this process has been closed")
            if generation is not None and generation != self._fences[other]:
                raise PeerUnreachable("backend 'local': that engine has fenced this connection off")
            self._under_way[other] += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way[other] -= 1
                self._changed.notify_all()
