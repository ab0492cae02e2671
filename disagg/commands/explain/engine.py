"""The engine of an explanation: how it stages pieces, and what moving bytes costs with it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from disagg.backends import registry as backends
from disagg.backends.abilities import SaysStaging
from disagg.backends.base import BackendOptions, StagingShape, Transport
from disagg.commands.cases.costs import ALWAYS, Costs
from disagg.commands.shell.text import size
from disagg.core.errors import ConfigError


class Engine(NamedTuple):
    """An engine over one transport. `costs` are measured ones, or `None` where there is no measurement.
    `origin` says whose the packing threshold is, if it is not the engine's.
    """

    name: str
    transport: str
    staging: StagingShape
    costs: Costs | None
    origin: str = ""

    @property
    def key(self) -> str:
        """The engine and its transport."""
        return f"{self.name} {self.transport}"

    def with_threshold(self, pack_below: int, origin: str) -> Engine:
        """The engine with another packing threshold."""
        return self._replace(staging=replace(self.staging, pack_below=pack_below), origin=origin)

    @property
    def one_link(self) -> bool:
        """Whether what a rank receives passes one link or thread, instead of being copied by each of its senders."""
        return self.transport not in ("shm", "memory")

    @property
    def packs(self) -> str:
        """Why pieces below the packing threshold are packed, in words."""
        return f"below {self.threshold}" if self.staging.pack_below < ALWAYS else f"packed at any size: {self.origin}"

    @property
    def threshold(self) -> str:
        """The packing threshold in words."""
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
"""The transport that an engine chooses between two processes of one host."""
_FIXED = ("nvlink", "local")
"""Engines with one fixed transport, whatever the options request."""


def engine_of(backend: str, transport: str) -> Engine:
    """The known costs of an engine and a transport, without starting it. Raises `ConfigError` for an unknown name."""
    if backend not in ("auto", *backends.available()):
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(backends.available())}, found {backend!r}")
    on_host = backends.AUTO_HOST if transport in ("auto", "shm") else backends.AUTO[0]
    name = on_host if backend == "auto" else backend
    known = _TRANSPORTS.get(name)
    chosen = _AUTO.get(name, transport) if transport == "auto" or name in _FIXED else transport
    if known and chosen not in known:
        raise ConfigError(f"transport: backend {name!r} has {', '.join(known)}, found {transport!r}")
    return Engine(name, chosen, declared_staging(name, transport), shipped_costs(f"{name} {chosen}"))


def engine_of_row(backend: str, transport: str) -> str:
    """The key of the engine that a row of the benchmark names: `nixl` over `tcp (inferred)`, or `auto` over `cma: shm`."""
    name, _, way = transport.partition(" (")[0].rpartition(": ")
    return f"{name or backend} {way.removesuffix(' copy')}"


def shipped_costs(key: str) -> Costs | None:
    """The costs that come with this package, of an engine and its transport."""
    return _measured().get(key)


@functools.cache
def _measured() -> dict[str, Costs]:
    """The costs by engine and transport that `benchmarks/phases.py` has measured on a host with two cores."""
    text = importlib.resources.files(__package__).joinpath("costs.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Costs])


def declared_staging(backend: str, transport: str) -> StagingShape:
    """The staging that a backend declares for these options; no packing if it declares none before it runs."""
    (entry,) = importlib.metadata.entry_points(group=backends.ENTRY_POINTS, name=backend)
    kind = entry.load()
    return kind.staging_for(BackendOptions(transport=Transport(transport))) if isinstance(kind, SaysStaging) else StagingShape()
