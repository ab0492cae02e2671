"""Backend `auto`: several engines as one. Each peer is reached by the first engine that can reach it: `cma` (for GPU
memory `nvlink`) on this host, else a network engine.

Each rank of a pair chooses the engine by which it writes, and announces it before its first write. Until then, a fence
asks every engine that both sides have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec

from disagg.backends.abilities import (
    Gathering,
    PreparedSpans,
    ProvesByProcess,
    QuietWhenClosed,
    Renewable,
    SpanWriter,
    renewal_due,
)
from disagg.backends.base import Backend, Fence, RemotePeer, StagingShape, Transfer
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.core.copies import CopyBatch
from disagg.core.errors import (
    ConfigError,
    DisaggError,
    LocalProtocolError,
    PeerIncompatible,
    PeerUnreachable,
    RemoteProtocolError,
)
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.core.spans import SpanBatch, SpanShape
from disagg.machine.processes import ProcessWatch

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

MAX_LOGGED = 256
"""Messages remembered, so that none is logged twice."""


class AutoDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoints: dict[str, bytes]


_DECODER = msgspec.msgpack.Decoder(AutoDescriptor)


@dataclass(eq=False)
class AutoPeer:
    """`others`: the other engines that both sides have. `writer`: the engine by which the peer writes here, empty while
    unknown. `renewals`: how often the engines had been renewed.
    """

    engine: Backend
    peer: RemotePeer
    regions: Sequence[RemoteRegion]
    process: ProcessWatch | None
    others: tuple[Backend, ...]
    renewals: int
    writer: str = ""


@dataclass(frozen=True, eq=False)
class AutoSpans:
    engine: SpanWriter
    spans: PreparedSpans

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.spans.shapes


class AutoBackend:
    """`engines`: at least one, in the order in which they are tried. `missing`: why others are not among them.
    `staging`: by default the last engine's, which packs if any does.
    """

    name = "auto"

    def __init__(self, engines: Sequence[Backend], *, missing: Sequence[str] = (), staging: StagingShape | None = None) -> None:
        self._engines = list(engines)
        self._missing = list(missing)
        self._former_writers = WeakKeyDictionary[ProcessWatch, set[str]]()
        self._staging = staging
        self._regions: tuple[MemoryRegion, ...] = ()
        self._used: list[Backend] = []
        self._num_renewals = 0
        self._logged: set[str] = set()

    @property
    def engines(self) -> Sequence[str]:
        return tuple(engine.name for engine in self._engines)

    @property
    def staging(self) -> StagingShape:
        return self._staging or self._engines[-1].staging

    @property
    def transport(self) -> str:
        """The engines that reach peers, or all engines before there is a peer."""
        return "; ".join(f"{engine.name}: {engine.transport}" for engine in self._used or self._engines)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if self._regions:
            raise LocalProtocolError("backend 'auto': register is called once")
        serving: list[Backend] = []
        for engine in self._engines:
            # `nvlink` takes GPU memory only; the others also serve staging buffers in host memory.
            own = [r for r in regions if r.device.kind == "cuda"] if engine.name == "nvlink" else list(regions)
            try:
                engine.register(own)
            except ConfigError as error:
                self._missing.append(f"{engine.name}: {error}")
                engine.close()
                continue
            serving.append(engine)
        self._engines = serving
        if not serving:
            raise ConfigError(f"backend auto: no engine can serve this memory: {'; '.join(self._missing)}")
        self._regions = tuple(regions)
        reasons = f" ({'; '.join(self._missing)})" if self._missing else ""
        logger.info("backend auto: %s%s", " before ".join(self.engines), reasons)

    def endpoint(self) -> bytes:
        descriptor = AutoDescriptor({engine.name: engine.endpoint() for engine in self._engines})
        return encode_endpoint(self.name, msgspec.msgpack.encode(descriptor), self._regions)

    def connect(self, endpoint: bytes, *, epoch: int, process: ProcessWatch | None = None) -> AutoPeer:
        """Raises `PeerUnreachable` with every engine's reason; `PeerIncompatible` if that is one of them."""
        raw, regions = decode_endpoint(self.name, endpoint)
        try:
            descriptor = _DECODER.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"endpoint of backend 'auto': {error}") from error
        reasons, kind, renewals = list(self._missing), PeerUnreachable, self._num_renewals
        for engine in self._engines:
            if engine.name not in descriptor.endpoints:
                reasons.append(f"{engine.name}: the peer does not have it")
                continue
            try:
                peer = engine.connect(descriptor.endpoints[engine.name], epoch=epoch, process=process)
            except PeerUnreachable as error:
                reasons.append(f"{engine.name}: {error}")
                kind = PeerIncompatible if isinstance(error, PeerIncompatible) else kind
                continue
            self._report(engine, reasons, on_this_host=process is not None)
            others = tuple(e for e in self._engines if e is not engine and e.name in descriptor.endpoints)
            return AutoPeer(engine, peer, regions, process, others, renewals)
        raise kind(f"backend auto: no engine reaches the peer: {'; '.join(reasons)}")

    def _report(self, engine: Backend, reasons: Sequence[str], *, on_this_host: bool) -> None:
        """Log each way of reaching peers once; as a warning if it is not the first choice. `cma` reaches no other host,
        which is expected.
        """
        if engine not in self._used:
            self._used.append(engine)
        expected = not on_this_host and all(reason.startswith("cma: ") for reason in reasons)
        because = f" ({'; '.join(reasons)})" if reasons else ""
        how = f"backend auto: peers are reached by {engine.name} over {engine.transport}{because}"
        if how not in self._logged:
            if len(self._logged) >= MAX_LOGGED:  # a reason may quote the peer
                self._logged.clear()
            self._logged.add(how)
            logger.log(logging.WARNING if reasons and not expected else logging.INFO, "%s", how)

    def engine_to(self, peer: RemotePeer) -> str:
        return _own(peer, AutoPeer).engine.name

    def written_by(self, peer: RemotePeer, engine: str) -> None:
        """Ignores a name that this side does not have."""
        own = _own(peer, AutoPeer)
        if engine in (own.engine.name, *(other.name for other in own.others)):
            own.writer = engine

    def gathers_from(self, peer: RemotePeer) -> int | None:
        own = _own(peer, AutoPeer)
        return own.engine.gathers_from(own.peer) if isinstance(own.engine, Gathering) else None

    def submit(self, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        own = _own(peer, AutoPeer)
        return own.engine.submit(own.peer, copies)

    def prepare_spans(self, peer: RemotePeer, shapes: Sequence[SpanShape]) -> AutoSpans | None:
        own = _own(peer, AutoPeer)
        if not isinstance(own.engine, SpanWriter):
            return None
        found = own.engine.prepare_spans(own.peer, shapes)
        return AutoSpans(own.engine, found) if found is not None else None

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> Transfer:
        own = _own(prepared, AutoSpans)
        return own.engine.submit_spans(own.spans, batch)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        """What the engine that writes to the peer proves, if those by which the peer may write here, or has written by an
        earlier connection, prove as much.
        """
        own = _own(peer, AutoPeer)
        found = own.engine.fence(own.peer, epoch=epoch)
        if found is Fence.UNKNOWN:
            return Fence.UNKNOWN
        writers = {own.writer, *(self._former_writers.get(own.process, ()) if own.process is not None else ())}
        for other in own.others:
            if "" not in writers and other.name not in writers:
                continue
            if own.process is None or not isinstance(other, ProvesByProcess) or not other.is_quiet_after(own.process):
                return Fence.UNKNOWN
        return found

    def is_quiet_when_closed(self) -> bool:
        return all(isinstance(engine, QuietWhenClosed) and engine.is_quiet_when_closed() for engine in self._engines)

    def renewal_due(self) -> str:
        return "; ".join(filter(None, map(renewal_due, self._engines)))

    def renew(self) -> bool:
        renewed = [engine.renew() for engine in self._engines if isinstance(engine, Renewable)]
        self._num_renewals += any(renewed)
        return any(renewed)

    def is_renewed(self, peer: RemotePeer) -> bool:
        own = _own(peer, AutoPeer)
        writers = [other for other in own.others if own.writer in ("", other.name)]
        return own.renewals < self._num_renewals and any(isinstance(each, Renewable) for each in (own.engine, *writers))

    def reads_no_more(self, peer: RemotePeer) -> bool:
        own = _own(peer, AutoPeer)
        return isinstance(own.engine, Renewable) and own.engine.reads_no_more(own.peer)

    def disconnect(self, peer: RemotePeer) -> None:
        own = _own(peer, AutoPeer)
        if own.process is not None:
            self._former_writers.setdefault(own.process, set()).add(own.writer)
        own.engine.disconnect(own.peer)

    def close(self) -> None:
        """Close every engine, then raise the first error."""
        failed: list[DisaggError] = []
        for engine in self._engines:
            try:
                engine.close()
            except DisaggError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _own(given: object, kind: type[Found]) -> Found:
    if not isinstance(given, kind):
        raise LocalProtocolError(f"backend 'auto': expected {kind.__name__}, found {type(given).__name__}")
    return given
