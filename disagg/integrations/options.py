"""The settings of the connectors: those of `disagg.Config`, and how long requests may wait."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from disagg.config import Config, public_key
from disagg.core.address import bracketed, parse_address
from disagg.core.errors import ConfigError
from disagg.settings import PREFIX, meaning

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ServerConfig(Config, frozen=True, kw_only=True):
    model: Annotated[
        str | None,
        meaning("The model's identity, the same on both sides, instead of its type and the description in its config.json."),
    ] = None
    keep_s: Annotated[
        Seconds,
        meaning("How long a server keeps a request with `keep` for the next turn.", metavar="SECONDS"),
    ] = 120.0
    kept_share: Annotated[
        Share,
        meaning("The largest share of a server's blocks that such requests hold; the oldest goes first."),
    ] = 0.25


class Options(ServerConfig, frozen=True, kw_only=True):
    """`kv_connector_extra_config`. Raises `ConfigError` for unknown keys and wrong values."""

    trusted_keys: Annotated[
        tuple[str, ...], meaning("Public keys of the other servers. Set both `keys` and this, or neither.")
    ] = ()
    hold_s: Annotated[
        Seconds,
        meaning("How long prefill keeps a request's blocks if decode does not ask for them.", metavar="SECONDS"),
    ] = 60.0
    max_hold_s: Annotated[
        Seconds,
        meaning(
            "The longest that prefill keeps them while the request waits in decode's queue or is copied, and that decode waits "
            "for a request that both servers were sent at once.",
            metavar="SECONDS",
        ),
    ] = 600.0
    load_timeout_s: Annotated[
        Seconds,
        meaning(
            "How long decode waits for a request that was prefilled, or for prefill's first answer, before it computes it.",
            metavar="SECONDS",
        ),
    ] = 30.0
    bootstrap_port: Annotated[
        int | None, meaning("The port at which MooncakeConnector's proxies ask for this server's name.", metavar="PORT")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [key for key in ("keys", "trusted_keys", "peer_keys") if getattr(self, key)]
        if given and (given[0] != "keys" or len(given) == 1):
            raise ConfigError(f"config: expected keys and trusted_keys together, found only {given[0]}")

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, engine_id: str) -> Options:
        for key in ("admit", "leader", "name", "peer_keys", "peers"):
            if key in extra or (key in ("admit", "leader") and os.environ.get(PREFIX + key.upper())):
                raise ConfigError(f"config: key {key!r}: expected none: the connector chooses it, from keys and the rank")
        return cls.load(environ=os.environ, **{"name": engine_id, **extra})

    def rank_settings(self, *, listen: str, leader: str | None, dp_rank: int = 0) -> dict[str, Any]:
        """The arguments of one rank's `KVManager`. Only a data-parallel replica's rank 0 serves metrics, at the port plus
        the replica's number. Peers need no configuration: with keys the known ones are admitted, else everyone.
        """
        metrics_port = self.metrics_port if leader is None else None
        if metrics_port:
            metrics_port += dp_rank
        return {
            **self.manager_arguments(),
            "listen": listen,
            "advertise": self._advertised(leads=leader is None, dp_rank=dp_rank),
            "leader": leader,
            "metrics_port": metrics_port,
            "limits": replace(self.limits, parked_reserve_s=min(self.limits.parked_reserve_s, self.load_timeout_s)),
            "admit": "any" if self.keys is None else "keys",
            "peer_keys": {**self.public_keys(), **{key: public_key(key, what="trusted_keys") for key in self.trusted_keys}},
        }

    def _advertised(self, *, leads: bool, dp_rank: int) -> str | None:
        """`advertise` with the port that this rank listens on, as in `listen_on`; 0: the bound one."""
        if self.advertise is None:
            return None
        host, port = parse_address(self.advertise, what="advertise")
        return f"tcp://{bracketed(host)}:{port + dp_rank if port and leads else 0}"

    def listen_on(self, *, rank: int, dp_rank: int) -> str:
        """Only rank 0 of a data-parallel replica has the configured port, plus the replica's number."""
        host, port = parse_address(self.listen, what="listen")
        return f"tcp://{bracketed(host)}:{port + dp_rank if port and rank == 0 else 0}"
