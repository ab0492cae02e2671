"""Control addresses: `tcp://host:port`."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from disagg.core.errors import ConfigError

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
"""As DNS has it; other names are written with `xn--`."""


def parse_address(address: str, *, what: str) -> tuple[str, int]:
    """The host (a name, an IP address, or `*`) and port (0 or `*`: any) of `tcp://host:port`. Raises `ConfigError`, which
    starts with `what`.
    """
    if not isinstance(address, str):
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r}")
    if not address.isprintable() or " " in address:  # `urlsplit` drops some
        raise ConfigError(f"{what}: expected tcp://host:port without spaces, found {address!r}")
    try:
        parts = urlsplit(address.removesuffix(":*") + (":0" if address.endswith(":*") else ""))
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r} ({error})") from error
    if parts.scheme != "tcp" or not host or port is None or parts.path or parts.query or parts.fragment or "@" in address:
        raise ConfigError(f"{what}: expected tcp://host:port, found {address!r}")
    if host != "*" and not _is_host(host):
        raise ConfigError(f"{what}: expected a host name or an IP address, found {host!r} in {address!r}")
    return host, port


def dialable(address: str, *, what: str) -> str:
    """Raises `ConfigError`, which starts with `what`, unless `address` has the host and port of one rank."""
    host, port = parse_address(address, what=what)
    if is_wildcard(host) or not port:
        raise ConfigError(f"{what}: expected the host and port of one rank, found {address!r}")
    return address


def _is_host(host: str) -> bool:
    return is_numeric(host) or (_NAME.fullmatch(host) is not None and len(host) <= 253)


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return host.isascii()  # an IPv6 address may name its interface


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def advertised_address(advertise: str | None, bound: str) -> str:
    """The address that peers connect to: `advertise`, or `bound` without it. Port 0 is replaced by the bound port."""
    if advertise is None:
        return bound
    host, port = parse_address(advertise, what="advertise")
    return advertise if port else f"tcp://{bracketed(host)}:{parse_address(bound, what='listen')[1]}"


def reaches(address: str, listener: str) -> bool:
    """Whether a connection from this machine to `address` ends at `listener`. No name server is asked: two names of one host
    count as two hosts.
    """
    (host, port), (own, own_port) = (parse_address(each, what="address") for each in (address, listener))
    return port == own_port and (_spelled(host) == _spelled(own) or (is_wildcard(own) and is_loopback(host)))


def _spelled(host: str) -> str:
    host = host.lower().removesuffix(".")
    return "127.0.0.1" if host == "localhost" else ipaddress.ip_address(host).compressed if is_numeric(host) else host
