"""Control addresses: `tcp://host:port`."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from disagg.core.errors import ConfigError


def parse_address(address: str, *, what: str) -> tuple[str, int]:
    """The host and port of `tcp://host:port`. Port 0 or `*` means any. Raises `ConfigError`, which starts with `what`."""
    try:
        parts = urlsplit(address.removesuffix(":*") + (":0" if address.endswith(":*") else ""))
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r} ({error})") from error
    if parts.scheme != "tcp" or not host or port is None or parts.path:
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r}")
    return host, port


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether `host` means every interface."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def advertised_address(advertise: str | None, bound: str) -> str:
    """The address that peers connect to: `advertise`, or `bound` without it. Port 0 is replaced by the bound port."""
    if advertise is None:
        return bound
    host, port = parse_address(advertise, what="advertise")
    return advertise if port else f"tcp://{host}:{parse_address(bound, what='listen')[1]}"
