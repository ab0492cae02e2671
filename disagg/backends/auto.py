"""Several engines as one: each peer is reached by the first that can, and it is said why those before it could not.

For memory on GPUs, where `nvlink` serves some peers (other GPUs of this machine) and a network engine the others. Each
engine registers the memory it can serve; one that can serve none is left out, with the reason. Both directions between two
ranks are chosen by their writers, each for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from disagg.backends.abilities import PreparedSpans, SpanWriter
from disagg.backends.base import Backend, Fence, Op, RemotePeer, StagingShape, Transfer
from disagg.backends.endpoint import decode_endpoint, encode_endpoint
from disagg.core.copies import CopyBatch
from disagg.core.errors import ConfigError, DisaggError, LocalProtocolError, PeerUnreachable, RemoteProtocolError
from disagg.core.memory import MemoryRegion, RemoteRegion
from disagg.core.spans import SpanBatch, SpanShape

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class AutoPeer:
    """A peer, by the engine that reaches it."""

    engine: Backend
    peer: RemotePeer
    regions: Sequence[RemoteRegion]


@dataclass(frozen=True, eq=False)
class AutoSpans:
    """Span classes at the engine that reaches their peer."""

    engine: SpanWriter
    spans: PreparedSpans

    @property
    def shapes(self) -> Sequence[SpanShape]:
        return self.spans.shapes


class AutoBackend:
    """`engines` in the order in which they are tried; at least one. `missing`: why others are not among them."""

    name = "auto"

    def __init__(self, engines: Sequence[Backend], *, missing: Sequence[str] = ()) -> None:
        self._engines = list(engines)
        self._missing = list(missing)
        self._regions: tuple[MemoryRegion, ...] = ()

    @property
    def staging(self) -> StagingShape:
        """That of the last engine, which is the one that packs, if any does."""
        return self._engines[-1].staging

    @property
    def transport(self) -> str:
        return "; ".join(f"{engine.name}: {engine.transport}" for engine in self._engines)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if self._regions:
            raise LocalProtocolError("backend 'auto': register is called once")
        serving: list[Backend] = []
        for engine in self._engines:
            # `nvlink` is for the GPU's memory only; staging in host memory is there for the other engines.
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
        logger.info("backend auto: %s%s", " before ".join(engine.name for engine in serving), reasons)

    def endpoint(self) -> bytes:
        descriptor = msgspec.msgpack.encode({engine.name: engine.endpoint() for engine in self._engines})
        return encode_endpoint(self.name, descriptor, self._regions)

    def connect(self, endpoint: bytes, *, epoch: int) -> AutoPeer:
        """By the first engine that both sides have and that reaches the peer; raises `PeerUnreachable` with every reason."""
        raw, regions = decode_endpoint(self.name, endpoint)
        try:
            endpoints = msgspec.msgpack.decode(raw, type=dict[str, bytes])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RemoteProtocolError(f"endpoint of backend 'auto': {error}") from error
        reasons = list(self._missing)
        for engine in self._engines:
            if engine.name not in endpoints:
                reasons.append(f"{engine.name}: the peer does not have it")
                continue
            try:
                peer = engine.connect(endpoints[engine.name], epoch=epoch)
            except PeerUnreachable as error:
                reasons.append(f"{engine.name}: {error}")
                continue
            level = logging.WARNING if reasons else logging.INFO
            because = f" ({'; '.join(reasons)})" if reasons else ""
            logger.log(level, "backend auto: the peer is reached by %s over %s%s", engine.name, engine.transport, because)
            return AutoPeer(engine, peer, regions)
        raise PeerUnreachable(f"backend auto: no engine reaches the peer: {'; '.join(reasons)}")

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Transfer:
        own = _own(peer, AutoPeer)
        return own.engine.submit(op, own.peer, copies)

    def prepare_spans(self, op: Op, peer: RemotePeer, shapes: Sequence[SpanShape]) -> AutoSpans | None:
        """`None` where the engine that reaches the peer takes addresses only."""
        own = _own(peer, AutoPeer)
        if not isinstance(own.engine, SpanWriter):
            return None
        found = own.engine.prepare_spans(op, own.peer, shapes)
        return AutoSpans(own.engine, found) if found is not None else None

    def submit_spans(self, prepared: PreparedSpans, batch: SpanBatch) -> Transfer:
        own = _own(prepared, AutoSpans)
        return own.engine.submit_spans(own.spans, batch)

    def fence(self, peer: RemotePeer, *, epoch: int) -> Fence:
        own = _own(peer, AutoPeer)
        return own.engine.fence(own.peer, epoch=epoch)

    def disconnect(self, peer: RemotePeer) -> None:
        own = _own(peer, AutoPeer)
        own.engine.disconnect(own.peer)

    def close(self) -> None:
        """Every engine; the first error is raised once all have been."""
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
