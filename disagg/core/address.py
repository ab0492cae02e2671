"""Control addresses: `tcp://host:port`."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from disagg.core.errors import ConfigError

_HOST = re.compile(r"\*|[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
"""Every interface, or a name or IPv4 address that can be dialled."""


def parse_address(address: str, *, what: str) -> tuple[str, int]:
    """The host and port of `tcp://host:port`. The host is a name, an IP address, or `*`, every interface; port 0 or `*` means
    any. Raises `ConfigError`, which starts with `what`.
    """
    if not isinstance(address, str):
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r}")
    try:
        parts = urlsplit(address.removesuffix(":*") + (":0" if address.endswith(":*") else ""))
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r} ({error})") from error
    if parts.scheme != "tcp" or not host or port is None or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r}")
    if not (_HOST.fullmatch(host) or _is_ip(host)):
        raise ConfigError(f"{what}: expected a host name or an IP address, found {host!r} in {address!r}")
    return host, port


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
