"""Backend `local`: managers of one process, copying straight from memory to memory.

The oracle for tests, and a dry run without an engine. A submit copies at once, so a transfer is `DONE` when it is
returned, and nothing is ever left to be settled:

| question | answer | why |
|---|---|---|
| status of a transfer | `DONE` | the copy has returned |
| fence of a peer | `QUIET` | unless another thread is inside a copy between the two right now: then `UNKNOWN` |
| the target was closed | `PeerUnreachable` at submit | closing waits for copies under way, and lets no other begin |
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

from disagg.backends.base import BackendOptions, Fence, Op, RemotePeer, StagingShape, TransferStatus
from disagg.backends.endpoint import RegionIndex, decode_endpoint, encode_endpoint, local_and_remote
from disagg.core import _native
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import CPU, MemoryRegion, RemoteRegion, merge_regions

_targets: WeakValueDictionary[str, LocalBackend] = WeakValueDictionary()
"""Engines of this process by their token: what a network is to other engines. Holds nothing alive."""


class _Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which engine of which process."""

    pid: int
    secret: str


_DECODER = msgspec.msgpack.Decoder(_Token)


def _copy(copies: CopyBatch) -> None:
    """Make the copies; every address has been checked, on both sides."""
    _native.copy_batch(copies.source, copies.destination, copies.nbytes)


class LocalTransfer:
    """Copies that were made before anyone could ask."""

    error: str | None = None

    def poll(self) -> TransferStatus:
        return TransferStatus.DONE

    def close(self) -> None:
        """Nothing is held."""


class LocalPeer:
    """An engine of this process at one epoch."""

    def __init__(self, target: LocalBackend, *, epoch: int, generation: int) -> None:
        self.target = target
        self.epoch = epoch
        self.generation = generation
        self.index = target.index
        self.connected = True

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        return tuple(RemoteRegion(r.address, r.nbytes, r.device) for r in self.index.regions)


class LocalBackend:
    """One engine of this process; see the module for what it promises."""

    name = "local"

    def __init__(self, options: BackendOptions) -> None:
        if options.require is not None:
            raise ConfigError(f"backend 'local' moves bytes by no transport, so it cannot require {options.require.value!r}")
        self._token = _Token(os.getpid(), secrets.token_hex(16))
        self._index: RegionIndex | None = None
        self._open = True
        self._under_way: Counter[str] = Counter()  # copies between this engine and another, by the other's token
        self._fences: Counter[str] = Counter()  # how often another was fenced off; its older connections are refused
        self._changed = threading.Condition()

    @staticmethod
    def staging_for(_: BackendOptions) -> StagingShape:
        """Never packs."""
        return StagingShape()

    @property
    def staging(self) -> StagingShape:
        return StagingShape()

    @property
    def transport(self) -> str:
        return "memory copy"

    @property
    def index(self) -> RegionIndex:
        """Where this engine's memory lies; raises `LocalProtocolError` before `register`."""
        if self._index is None:
            raise LocalProtocolError("backend 'local': register has not been called")
        return self._index

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if self._index is not None or not self._open:
            raise LocalProtocolError("backend 'local': register is called once, on an open engine")
        for region in regions:
            if region.device != CPU:
                raise ConfigError(f"backend 'local': expected memory of the CPU, found {region.device} at {region.address:#x}")
        self._index = RegionIndex(merge_regions(regions))
        _targets[self._token.secret] = self

    def endpoint(self) -> bytes:
        regions = [MemoryRegion(r.address, r.nbytes, r.device) for r in self.index.regions]
        return encode_endpoint(self.name, msgspec.msgpack.encode(self._token), regions)

    def connect(self, endpoint: bytes, *, epoch: int) -> LocalPeer:
        self._check_open()
        descriptor, _ = decode_endpoint(self.name, endpoint)
        try:
            token = _DECODER.decode(descriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend 'local': {error}") from error
        if token.pid != os.getpid():
            raise PeerUnreachable(
                f"backend 'local' reaches engines of its own process only: this is process {os.getpid()}, "
                f"the endpoint is one of process {token.pid}; choose another backend between processes"
            )
        target = _targets.get(token.secret)
        if target is None:
            raise PeerUnreachable("backend 'local': that engine of this process has been closed")
        return LocalPeer(target, epoch=epoch, generation=target._fences[self._token.secret])

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> LocalTransfer:
        target = self._own(peer)
        local, remote = local_and_remote(op, copies)
        self.index.require(local, copies.nbytes, side="local")
        target.index.require(remote, copies.nbytes, side="remote")
        # Regions were registered on both sides: neither may be given back while they are copied.
        with self._busy(target.target._token), target.target._busy(self._token, generation=target.generation):
            _copy(copies)
        return LocalTransfer()

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """Refuses whatever the peer would still post on connections it has; `QUIET` unless a copy is being made right now."""
        if not isinstance(peer, LocalPeer) or peer.epoch != epoch:
            return Fence.UNKNOWN
        with self._changed:
            self._fences[peer.target._token.secret] += 1
            return Fence.UNKNOWN if self._under_way[peer.target._token.secret] else Fence.QUIET

    def disconnect(self, peer: RemotePeer) -> None:
        if isinstance(peer, LocalPeer):
            peer.connected = False

    def close(self) -> None:
        """Returns once no copy to or from this engine's memory is being made."""
        _targets.pop(self._token.secret, None)
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._under_way.total())

    def is_quiet_when_closed(self) -> bool:
        """Always: `close` waits for copies, and copies begin on open engines only."""
        return True

    def _check_open(self) -> None:
        if not self._open:
            raise LocalProtocolError("backend 'local': the engine has been closed")

    def _own(self, peer: RemotePeer) -> LocalPeer:
        """`peer` as this backend's; raises where nothing may be posted to it."""
        self._check_open()
        if not isinstance(peer, LocalPeer):
            raise LocalProtocolError(f"backend 'local': expected a peer of its own, found {type(peer).__name__}")
        if not peer.connected:
            raise PeerUnreachable(f"backend 'local': the peer of epoch {peer.epoch} was disconnected")
        return peer

    @contextmanager
    def _busy(self, other: _Token, *, generation: int | None = None) -> Iterator[None]:
        """Holds `close` back; raises `PeerUnreachable` once this engine is closed, or has fenced that generation off."""
        with self._changed:
            if not self._open:
                raise PeerUnreachable("backend 'local': that engine of this process has been closed")
            if generation is not None and generation != self._fences[other.secret]:
                raise PeerUnreachable("backend 'local': that engine has fenced this connection off")
            self._under_way[other.secret] += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way[other.secret] -= 1
                self._changed.notify_all()
