"""The engine of an explanation: its transport, and how it stages pieces."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from disagg.backends import registry as backends
from disagg.backends.abilities import SaysStaging, SpanWriter
from disagg.backends.base import BackendOptions, StagingShape, Transport
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError


class Engine(NamedTuple):
    """`origin`: whose the packing threshold is, if not the engine's. `takes_spans`: it also converts numbers in a direct
    copy.
    """

    name: str
    transport: str
    staging: StagingShape
    origin: str = ""
    takes_spans: bool = False

    def with_threshold(self, pack_below: int, origin: str) -> Engine:
        return self._replace(staging=replace(self.staging, pack_below=pack_below), origin=origin)

    @property
    def threshold(self) -> str:
        return (
            f"{size(self.staging.pack_below)}, {self.origin or f'the packing threshold of {self.name} over {self.transport}'}"
        )


_TRANSPORTS: Mapping[str, tuple[str, ...]] = {
    "cma": ("shm",),
    "nixl": ("shm", "tcp", "rdma"),
    "mooncake": ("tcp", "rdma"),
    "nvlink": ("peer memory",),
    "local": ("memory",),
}
_AUTO = {"cma": "shm", "nixl": "shm", "mooncake": "tcp", "nvlink": "peer memory", "local": "memory"}
"""The transport between two processes of one host."""
_FIXED = ("nvlink", "local")
"""Engines with one transport, whatever the options request."""


def engine_of(backend: str, transport: str) -> Engine:
    """Starts no engine. Raises `ConfigError`."""
    if backend not in ("auto", *backends.available()):
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(backends.available())}, found {backend!r}")
    on_host = backends.AUTO_HOST if transport in ("auto", "shm") else backends.AUTO[0]
    name = on_host if backend == "auto" else backend
    known = _TRANSPORTS.get(name)
    chosen = _AUTO.get(name, transport) if transport == "auto" or name in _FIXED else transport
    if known and chosen not in known:
        raise ConfigError(f"transport: backend {name!r} has {', '.join(known)}, found {transport!r}")
    return Engine(name, chosen, declared_staging(name, transport), takes_spans=isinstance(_kind(name), SpanWriter))


def _kind(backend: str) -> Any:
    (entry,) = importlib.metadata.entry_points(group=backends.ENTRY_POINTS, name=backend)
    return entry.load()


def declared_staging(backend: str, transport: str) -> StagingShape:
    kind = _kind(backend)
    return kind.staging_for(BackendOptions(transport=Transport(transport))) if isinstance(kind, SaysStaging) else StagingShape()
