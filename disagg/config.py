"""The configuration of one rank as one typed object. A server with settings of its own declares them in a subclass."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.manager import KVManager
from disagg.protocol.messages import Verify
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.types import Limits
from disagg.runtime.keys import KeyPair, parse_key
from disagg.settings import expected_of, hint, meaning, settings, sources, unknown_key, value_of

Transport = Literal["auto", "rdma", "tcp", "shm"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one `KVManager`, and of its peers. Every constructor raises `ConfigError` that names the key, what
    was expected and found, and where.
    """

    name: Annotated[str, meaning("The instance's name, the same on all its ranks.")]
    listen: Annotated[str, meaning("This rank's control address; port 0: any.", metavar="ADDRESS")] = "tcp://127.0.0.1:0"
    advertise: Annotated[
        str | None,
        meaning(
            "Address for peers, if this rank listens on every interface; port 0: the one it listens on.", metavar="ADDRESS"
        ),
    ] = None
    leader: Annotated[str | None, meaning("Control address of rank 0; required on every other rank.", metavar="ADDRESS")] = None
    peers: Annotated[
        Mapping[str, str],
        meaning("Peer instances, by the control address of their rank 0.", flag="--peer", metavar="NAME=ADDRESS"),
    ] = msgspec.field(default_factory=dict)
    peer_keys: Annotated[
        Mapping[str, str],
        meaning("Peer instances' public keys: Z85, hex, or file:PATH.", flag="--peer-key", metavar="NAME=KEY"),
    ] = msgspec.field(default_factory=dict)
    admit: Annotated[
        Literal["known", "keys", "any"],
        meaning("Which other instances may connect: none, those with a key of `peer_keys`, or all."),
    ] = "known"
    keys: Annotated[
        str | None, meaning("TOML file with this instance's public and secret key (`disagg keygen`).", metavar="FILE")
    ] = None
    insecure: Annotated[bool, meaning("Allow a control address off loopback without keys.")] = False
    trusted_network: Annotated[bool, meaning("Allow an engine whose data travels over open TCP off loopback.")] = False
    backend: Annotated[str, meaning("Engine: auto, cma, nixl, mooncake, nvlink, local, or a third party's.")] = "auto"
    transport: Annotated[Transport, meaning("The transport that the engine may use.")] = "auto"
    devices: Annotated[
        tuple[str, ...], meaning("NICs that the engine may use; default: any.", flag="--device-nic", metavar="NIC")
    ] = ()
    require: Annotated[
        Literal["rdma", "tcp", "shm"] | None, meaning("The transport that must be in use; starting fails without it.")
    ] = None
    pack_below: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        meaning(
            "Pack pieces below this size; 0: none, between hosts on both sides; default: the threshold of the engine.",
            metavar="BYTES",
        ),
    ] = None
    staging_nbytes: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        meaning(
            "Memory to pack into and to lend to peers; default: 256 MiB of a GPU, or 64 to 160 MiB of the host, by engine.",
            metavar="BYTES",
        ),
    ] = None
    direct_between_hosts: Annotated[
        bool,
        meaning("Let peers on other hosts write rows; those of a peer that ends while writing stay unused until a restart."),
    ] = False
    verify: Annotated[
        Verify,
        meaning("Whether to verify received data by checksums: no, or all of it."),
    ] = "off"
    metrics_port: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=65535)] | None,
        meaning("Serve Prometheus metrics at this port; 0: any; default: do not serve.", metavar="PORT"),
    ] = None
    metrics_host: Annotated[str, meaning("The address of the metrics server, which has no authentication.", metavar="HOST")] = (
        "127.0.0.1"
    )
    tracing: Annotated[bool, meaning("Make OpenTelemetry spans of requests, by the process's tracer provider.")] = False
    limits: Annotated[Limits, meaning("Bounds and times of the protocol.", flag="--limit", metavar="NAME=VALUE")] = Limits()
    connection_limits: Annotated[
        ConnectionLimits, meaning("Times of the handshake and of liveness.", flag="--connection-limit", metavar="NAME=VALUE")
    ] = ConnectionLimits()

    def __post_init__(self) -> None:
        for setting in settings(type(self)):
            value_of(setting, getattr(self, setting.field), "keyword")
        unknown = sorted(self.peer_keys.keys() - self.peers.keys())
        if unknown and self.admit != "keys":
            meant = hint(unknown[0], self.peers)
            raise ConfigError(f"config: key 'peer_keys': expected names of peers, found {unknown[0]!r}{meant}")

    @classmethod
    def load(
        cls,
        *,
        file: Path | str | None = None,
        environ: Mapping[str, str] | None = None,
        texts: Mapping[str, str | Sequence[str]] | None = None,
        **keywords: Any,
    ) -> Self:
        """Load settings from a TOML file, `environ` (such as `os.environ`), `texts` (such as a command line), and keywords;
        a later source overrides an earlier one. Empty variables are ignored, and with a warning those of a Kubernetes
        Service `disagg` or `disagg-...`. Raises `ConfigError`.

            >>> Config.load(environ={"DISAGG_TRANSPORT": "tcp", "DISAGG_PACK_BELOW": "4096"}, name="decode-0").pack_below
            4096
        """
        known = {setting.key: setting for setting in settings(cls)}
        found: dict[str, Any] = {}
        for source in sources(file, environ or {}, texts or {}, keywords, known=known):
            for key, value in source.values.items():
                if key not in known:
                    raise unknown_key(key, source.named(key), known)
                found[known[key].field] = value_of(known[key], value, source.named(key), text=source.text)
        for setting in known.values():
            if setting.required and setting.field not in found:
                raise ConfigError(
                    f"config: key {setting.key!r}: expected {expected_of(setting)}, found none: neither given, nor as "
                    f"{setting.variable}" + (f", nor in {file}" if file else "")
                )
        return cls(**found)

    def manager_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `KVManager`, with key files read. Raises `ConfigError` or `OSError`, naming the file."""
        given = {name: getattr(self, name) for name in Config.__struct_fields__}
        keys = None if self.keys is None else read_keys(self.keys)
        return {**given, "keys": keys, "peer_keys": self.public_keys()}

    def public_keys(self) -> dict[str, str]:
        """The keys of `peer_keys` as Z85, with files read. Raises `ConfigError` naming the peer, `OSError` naming the
        file.
        """
        return {name: public_key(text, what=f"peer {name!r}, public key") for name, text in self.peer_keys.items()}

    def manager(self, *, topology: Topology, components: Sequence[Component], model: ModelId) -> KVManager:
        """A manager with these settings and peers, which the caller closes. Raises as `manager_arguments` and `KVManager`."""
        return KVManager(topology=topology, components=components, model=model, **self.manager_arguments())


def public_key(text: str, *, what: str) -> str:
    """`text` is Z85, hex digits, or `file:PATH` with one of these. Raises `ConfigError` and `OSError`."""
    if not text.startswith("file:"):
        return parse_key(text, what=what)
    path = Path(text.removeprefix("file:"))
    try:
        return parse_key(path.read_text(), what=f"{what} in {path}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} in {path}: expected Z85 or hex digits: {error}") from error


def read_keys(path: str | Path) -> KeyPair:
    """From a TOML file with `public` and `secret`, as `disagg keygen` writes it. Raises `ConfigError` or `OSError`, naming
    the file.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        public, secret = found["public"], found["secret"]
        return KeyPair(parse_key(public, what=f"keys {path}: public key"), parse_key(secret, what=f"keys {path}: secret key"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"keys {path}: expected a TOML file with public and secret: {type(error).__name__}: {error}"
        ) from error
