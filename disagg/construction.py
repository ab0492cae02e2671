"""Checks of a manager's arguments and peers. Those of arguments raise `ConfigError`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from disagg.arguments import check_text
from disagg.backends.base import BackendOptions, Transport
from disagg.core.address import dialable, is_loopback, is_wildcard, parse_address, reaches
from disagg.core.errors import ConfigError, LocalProtocolError, PeerUnreachable
from disagg.core.rows import MAX_NAME, is_text
from disagg.core.thread_log import ThreadLog
from disagg.core.topology import Topology
from disagg.layout.agreement import ModelId
from disagg.layout.placement import Component
from disagg.protocol.messages import Verify
from disagg.protocol.peer_effects import ConnectionLimits
from disagg.protocol.peers import Admit
from disagg.protocol.types import Limits
from disagg.runtime.directory import Directory
from disagg.runtime.keys import KeyPair, check_key

logger = ThreadLog(__name__)


def backend_options(
    listen: str, advertise: str | None, transport: str, devices: Sequence[str], require: str | None, trusted_network: bool
) -> BackendOptions:
    if not _are_all(devices, str):
        raise ConfigError(f"devices: expected a sequence of names, found {devices!r}")
    host, _ = parse_address(advertise or listen, what="advertise" if advertise else "listen")
    if is_wildcard(host):
        if advertise:
            raise ConfigError(f"advertise: expected an address that peers can reach, found {advertise!r}: every interface")
        raise ConfigError(
            f"listen: {listen!r} is every interface; set advertise=tcp://host:port to an address that peers can reach"
        )
    return BackendOptions(
        host=host,
        transport=_transport(transport, "transport"),
        devices=tuple(devices),
        require=None if require is None else _transport(require, "require"),
        trusted_network=trusted_network or is_loopback(host),
    )


def check_peer(
    name: str, address: str, public_key: str | None, *, own: str, own_addresses: Sequence[str] = (), keys: KeyPair | None
) -> tuple[str, str | None]:
    """`own_addresses` are those of this rank and of its leader, as far as they are known."""
    check_name(name, "peer")
    dialable(address, what=f"peer {name!r}")
    if name == own:
        raise ConfigError(f"peer: {name!r} is this instance's own name")
    if any(reaches(address, each) for each in own_addresses):
        raise ConfigError(
            f"peer {name!r}: expected the address of another instance, found {address!r}, which is this one's own"
        )
    if keys is not None and public_key is None:
        raise ConfigError(f"peer {name!r}: this instance has keys, so the peer's public key is needed")
    if public_key is not None:
        check_key(public_key, what=f"peer {name!r}, public key")
    return address, public_key


def admission(admit: Literal["known", "keys", "any"] | Admit, keys: KeyPair | None) -> Admit | None:
    if callable(admit):
        return functools.partial(_ask, admit)
    if admit not in ("known", "keys", "any"):
        raise ConfigError(f"admit: expected 'known', 'keys', 'any' or a function, found {admit!r}")
    if admit == "keys" and keys is None:
        raise ConfigError("admit: 'keys' needs keys=")
    return None if admit == "known" else lambda *_: True


def _ask(admit: Admit, name: str, address: str, public_key: str) -> bool:
    try:
        return bool(admit(name, address, public_key))
    except BaseException:  # also SystemExit: it would end the manager's thread, not the process
        logger.exception("admit: the server's function failed for %r", name)
        return False


def check_joined(directory: Directory, name: str, topology: Topology) -> None:
    """Raise `LocalProtocolError` for a rank without a leader: no peer would ever be ready."""
    if not directory.has_leader:
        raise LocalProtocolError(
            f"rank {topology.rank} of {name!r} has no leader: pass leader=, the address of rank 0, or call set_leader() first"
        )


def check_known(directory: Directory, peer: str, *, may_connect: bool) -> None:
    """Raises `PeerUnreachable` for an unknown peer, unless `may_connect` and the manager admits instances that were not
    configured.
    """
    check_text(peer, "peer")
    if directory.status(peer).state == "unknown" and not (may_connect and directory.admits_unknown):
        raise PeerUnreachable(f"peer {peer!r} is not ready: {directory.problem(peer)}")


def check_kind(given: object, kind: type, what: str) -> None:
    """`None` passes."""
    if not isinstance(given, kind | None):
        raise ConfigError(f"{what}: expected {kind.__name__}, found {given!r}")


def check_kinds(keys: object, limits: object, connection_limits: object, **flags: object) -> None:
    """`None` passes, except for a flag."""
    check_kind(keys, KeyPair, "keys")
    check_kind(limits, Limits, "limits")
    check_kind(connection_limits, ConnectionLimits, "connection_limits")
    for what, given in flags.items():
        if not isinstance(given, bool):
            raise ConfigError(f"{what}: expected bool, found {given!r}")


def _are_all(given: object, kind: type) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(each, kind) for each in given)


def check_name(name: object, what: str) -> str:
    if not is_text(name, MAX_NAME):
        raise ConfigError(f"{what}: expected a str of 1 to {MAX_NAME} characters, found {name!r}")
    return str(name)


def check_topology(topology: Topology | None, components: Sequence[Component], *, leader: str | None) -> Topology:
    """That of the components, which must agree."""
    if not _are_all(components, Component):
        raise ConfigError(f"components: expected a sequence of Component, found {components!r}")
    check_kind(topology, Topology, "topology")
    for component in components:
        topology = topology or component.topology
        if component.topology != topology:
            raise ConfigError(f"component {component.name!r}: expected {topology}, found {component.topology}")
    if topology is None:
        raise ConfigError("topology: expected one, since there are no components, found None")
    if leader is not None and topology.rank == 0:
        raise ConfigError(f"leader: expected None on rank 0, found {leader!r}")
    if leader is not None:
        dialable(leader, what="leader")
    return topology


def check_peers(
    peers: Mapping[str, str] | None,
    peer_keys: Mapping[str, str] | None,
    *,
    own: str,
    own_addresses: Sequence[str],
    keys: KeyPair | None,
) -> dict[str, tuple[str, str | None]]:
    for what, given in (("peers", peers), ("peer_keys", peer_keys)):
        if not isinstance(given, Mapping | None):
            raise ConfigError(f"{what}: expected a mapping from names, found {type(given).__name__}")
    found = peer_keys or {}
    for name, key in found.items():
        check_key(key, what=f"peer_keys of {name!r}")
    return {
        str(name): check_peer(name, address, found.get(name), own=own, own_addresses=own_addresses, keys=keys)
        for name, address in (peers or {}).items()
    }


def check_model(model: object) -> ModelId:
    if not isinstance(model, ModelId):
        raise ConfigError(f"model: expected a ModelId, found {model!r}")
    return model


def check_count(given: object, what: str, kind: str) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise ConfigError(f"{what}: expected {kind}, or None, found {given!r}")
    return given


def check_port(port: object, host: object) -> int | None:
    """Of the metrics."""
    if not isinstance(host, str):
        raise ConfigError(f"metrics_host: expected a str, found {host!r}")
    found = check_count(port, "metrics_port", "a port")
    if found is not None and found > 65535:
        raise ConfigError(f"metrics_port: expected a port up to 65535, or None, found {found}")
    return found


def check_verify(value: Verify) -> Verify:
    if value not in get_args(Verify):
        raise ConfigError(f"verify: expected one of {', '.join(get_args(Verify))}, found {value!r}")
    return value


def _transport(value: str, what: str) -> Transport:
    try:
        return Transport(value)
    except ValueError:
        raise ConfigError(f"{what}: expected one of {', '.join(t.value for t in Transport)}, found {value!r}") from None
