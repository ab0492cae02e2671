"""One rank with its own memory, embedded as in a server."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import msgspec

from disagg.commands.cases.content import Content
from disagg.commands.cases.instructions import Description
from disagg.commands.cases.memory import memory_on
from disagg.commands.cases.sides import Side
from disagg.commands.shell.logs import Format, Level
from disagg.commands.shell.packages import ENGINE_PACKAGES, installed
from disagg.config import Config
from disagg.core.address import is_loopback, parse_address
from disagg.core.errors import ConfigError
from disagg.core.memory import Device
from disagg.core.topology import Topology
from disagg.layout.agreement import LocalRank, ModelId, encode_placements
from disagg.models.pools import allocate
from disagg.settings import meaning


class RankConfig(Config, frozen=True, kw_only=True):
    """An operator's settings of one rank with its own pools. Raises `ConfigError`."""

    name: Annotated[str, meaning("The instance's name, the same on all its ranks; default: its role.")] = ""
    role: Annotated[str, meaning("The role of the rank: prefill or decode.")]
    model: Annotated[str, meaning("A preset, the path of a config.json, a cached model, or LAYERSxKV_HEADSxHEAD_DIM.")]
    side: Annotated[Side, meaning("The whole instance, such as tp=4,pp=2,page=16.", parse=Side.parse)] = Side()
    rank: Annotated[int, msgspec.Meta(ge=0), meaning("The number of this rank in its instance.")] = 0
    num_layers: Annotated[Annotated[int, msgspec.Meta(ge=1)] | None, meaning("Keep only the model's first layers.")] = (
        msgspec.field(default=None, name="layers")
    )
    num_pages: Annotated[int, msgspec.Meta(ge=1), meaning("Pages of the pools.")] = msgspec.field(default=256, name="pages")
    num_slots: Annotated[int, msgspec.Meta(ge=1), meaning("Slots of the pools of recurrent state, and rings.")] = msgspec.field(
        default=8, name="slots"
    )
    rows: Annotated[
        Mapping[str, Annotated[int, msgspec.Meta(ge=1)]],
        meaning("Pages or slots of single components; overrides --pages and --slots.", metavar="COMPONENT=N"),
    ] = msgspec.field(default_factory=dict)
    device: Annotated[
        str,
        msgspec.Meta(pattern="^(cpu|cuda(:[0-9]{1,4})?)$"),
        meaning("Device of the pools: cpu, cuda or cuda:N.", metavar="DEVICE"),
    ] = "cpu"
    log_level: Annotated[Level, meaning("Log records of this level and above.")] = "warning"
    log_format: Annotated[Format, meaning("Log lines of text or of JSON.")] = "text"
    drain_s: Annotated[
        float,
        msgspec.Meta(ge=0),
        meaning("How long to wait for requests in progress after SIGTERM or SIGINT; a second signal ends the wait."),
    ] = 20.0
    driver: Annotated[str | None, meaning("Accept a benchmark's commands at this address.", metavar="ADDRESS")] = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", self.name or self.role)
        super().__post_init__()
        self.topology  # noqa: B018  (checks the rank's number)
        if self.driver is not None:
            host, _ = parse_address(self.driver, what="driver")
            if not is_loopback(host) and not self.insecure:
                raise ConfigError(
                    f"driver: other hosts can reach {self.driver!r}, which requires no key; this needs --insecure"
                )

    @property
    def topology(self) -> Topology:
        return self.side.topology(self.rank)


class ResidentRank:
    def __init__(self, config: RankConfig) -> None:
        if config.leader is None and config.rank:
            raise ConfigError(f"leader: rank {config.rank} of {config.side.num_ranks} needs the address of rank 0")
        self.config = config
        self.model = config.side.model(config.model, num_layers=config.num_layers)
        self.shape = config.side.pool_shape(config.num_pages, num_slots=config.num_slots, rows=config.rows)
        self.memory = memory_on(config.device)
        self.pools = allocate(self.model, config.topology, self.shape, place=self.memory.place)
        self.content = Content(self.model, config.side, config.topology, self.pools, self.memory)
        self.manager = config.manager(
            topology=config.topology, components=self.pools.components, model=ModelId(self.model.name)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def __str__(self) -> str:
        return f"{self.config.name} rank {self.config.rank} of {self.config.side.num_ranks}"

    def describe(self) -> Description:
        table = LocalRank.of(self.config.topology, self.pools.components).table
        return Description(
            name=self.config.name,
            role=self.config.role,
            rank=self.config.rank,
            side=str(self.config.side),
            model=self.model.name,
            num_layers=self.model.num_layers,
            rows={state.name: self.shape.num_rows(state) for state in self.model.states},
            device=Device.parse(self.config.device).kind,
            address=self.manager.address,
            backend=self.manager.backend.name,
            transport=self.manager.backend.transport,
            arena=(self.pools.address, self.pools.arena.nbytes),
            table=table.encode(),
            placements=encode_placements(self.pools.components),
            pid=os.getpid(),
            process=PROCESS,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            now=time.monotonic(),
            versions=versions(self.manager.backend.name),
            thresholds={"declared" if self.config.pack_below is None else "set": [self.manager.health().pack_below]},
        )


PROCESS = secrets.token_hex(8)
"""Of this process alone: containers of one host may have the same process ids."""


def boot_id() -> str:
    """Ranks with the same id share a monotonic clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()


def pid_namespace() -> str:
    """Process ids of ranks with the same one name the same processes."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def versions(backend: str) -> dict[str, str]:
    packages = ("disagg", "numpy", "pyzmq", *ENGINE_PACKAGES.get(backend, ()))
    return {"python": platform.python_version(), **installed(packages)}
