"""One rank with memory of its own, embedded as a server would do it: pools, components over them, and a manager."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Self

from disagg.agreement import LocalRank, ModelId, encode_placements
from disagg.bench.commands import Description
from disagg.bench.content import Content
from disagg.bench.sides import Side
from disagg.channel import KeyPair, is_loopback, parse_address
from disagg.errors import ConfigError
from disagg.manager import KVManager
from disagg.models import load_model
from disagg.state.pools import allocate
from disagg.topology import Topology
from disagg.wire import Verify

ENGINE_PACKAGES = {
    "nixl": ("nixl",),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
    ),
}


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What an operator says of one rank. `peers` are leaders' control addresses by instance name; `driver` is the address
    to take commands at, or `None`. `num_layers` cuts the model; `rows` has numbers of rows by component where they are not
    `num_pages` pages or `num_slots` slots. Raises `ConfigError` for what cannot be.
    """

    role: str
    name: str
    model: str
    side: Side
    rank: int = 0
    num_layers: int | None = None
    num_pages: int = 256
    num_slots: int = 8
    rows: Mapping[str, int] = field(default_factory=dict)
    listen: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    leader: str | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    peer_keys: Mapping[str, str] = field(default_factory=dict)
    keys: KeyPair | None = None
    backend: str = "auto"
    transport: str = "auto"
    devices: tuple[str, ...] = ()
    require: str | None = None
    insecure: bool = False
    trusted_network: bool = False
    driver: str | None = None
    device: str = "cpu"
    verify: Verify = "off"
    pack_below: int | None = None

    def __post_init__(self) -> None:
        self.topology  # noqa: B018  (the rank's number is checked)
        if self.device != "cpu":
            raise ConfigError(f"device: this version has pools in host memory only ('cpu'), found {self.device!r}")
        if self.driver is not None:
            host, _ = parse_address(self.driver, what="driver")
            if not is_loopback(host) and not self.insecure:
                raise ConfigError(
                    f"driver: {self.driver!r} can be reached from other hosts and asks for no key; it needs --insecure"
                )

    @property
    def topology(self) -> Topology:
        return self.side.topology(self.rank)


class ResidentRank:
    """Pools and a manager, for as long as the context lasts."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.model = load_model(config.model, num_layers=config.num_layers)
        self.shape = config.side.pool_shape(config.num_pages, num_slots=config.num_slots, rows=config.rows)
        self.pools = allocate(self.model, config.topology, self.shape)
        self.content = Content(self.model, config.side, config.topology, self.pools)
        self.manager = KVManager(
            name=config.name,
            topology=config.topology,
            components=self.pools.components,
            model=ModelId(self.model.name),
            backend=config.backend,
            listen=config.listen,
            advertise=config.advertise,
            leader=config.leader,
            keys=config.keys,
            insecure=config.insecure,
            trusted_network=config.trusted_network,
            transport=config.transport,
            devices=config.devices,
            require=config.require,
            pack_below=config.pack_below,
            verify=config.verify,
        )
        for name, address in config.peers.items():
            self.manager.add_peer(name, address=address, public_key=config.peer_keys.get(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def __str__(self) -> str:
        return f"{self.config.name} rank {self.config.rank} of {self.config.side.num_ranks}"

    def describe(self) -> Description:
        """This rank, for a driver."""
        table = LocalRank.of(self.config.topology, self.pools.components).table
        return Description(
            name=self.config.name,
            role=self.config.role,
            rank=self.config.rank,
            side=str(self.config.side),
            model=self.model.name,
            num_layers=self.model.num_layers,
            rows={state.name: self.shape.num_rows(state) for state in self.model.states},
            device=self.config.device,
            address=self.manager.address,
            backend=self.manager.backend.name,
            transport=self.manager.backend.transport,
            arena=(self.pools.arena.__array_interface__["data"][0], self.pools.arena.nbytes),
            table=table.encode(),
            placements=encode_placements(self.pools.components),
            pid=os.getpid(),
            boot_id=boot_id(),
            now=time.monotonic(),
            versions=versions(self.manager.backend.name),
        )


def boot_id() -> str:
    """Which start of which machine this is: ranks of one have one monotonic clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()


def versions(backend: str) -> dict[str, str]:
    """Versions of this library, of the engine's package, and of what is under them."""
    found = {"python": platform.python_version()}
    for package in ("disagg", "numpy", "pyzmq", *ENGINE_PACKAGES.get(backend, ())):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
