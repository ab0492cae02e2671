"""The settings `discover` and `announce` as text."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from disagg.core.address import dialable, parse_address
from disagg.core.errors import ConfigError
from disagg.core.rows import is_text
from disagg.discovery.etcd import EtcdClient, EtcdPeers
from disagg.discovery.source import PeerSource

_ETCD = ("etcd", "etcds")
MAX_PREFIX = 1024
"""Limit on the characters of a prefix of keys in etcd."""


def peer_source(text: str, *, keys: Mapping[str, str] | None = None) -> PeerSource:
    """The source of peers that `text` describes:

    * `dns://decode.default.svc:7100`: the addresses of a headless Service, each with this port
    * `srv://_disagg._tcp.decode.default.svc`: its SRV records
    * `etcd://10.0.0.9:2379/disagg/decode`: the instances that announce themselves there; `etcds` with TLS

    `keys` are public keys by the name of an instance or of a Service, for DNS. Raises `ConfigError` for another form,
    `BackendUnavailable` if a package is missing.
    """
    if text.partition("://")[0] in _ETCD:
        return EtcdPeers(*announced_at(text, what="discover"))
    name, port = _dns_name(text)
    from disagg.discovery.dns import DnsPeers

    return DnsPeers(name, port=port, keys=keys)


def check_source(text: str) -> None:
    """Raise `ConfigError` unless `peer_source` knows the form of `text`."""
    if text.partition("://")[0] in _ETCD:
        announced_at(text, what="discover")
    else:
        _dns_name(text)


def announced_at(text: str, *, what: str = "announce") -> tuple[EtcdClient, str]:
    """The client and the prefix of `etcd://HOST:PORT[,HOST:PORT]/PREFIX`. Raises `ConfigError`."""
    expected = f"{what}: expected etcd://HOST:PORT[,HOST:PORT]/PREFIX, or etcds://..., found {text!r}"
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"{expected} ({error})") from error
    prefix = parts.path.strip("/")
    hosts = parts.netloc.split(",")
    if parts.scheme not in _ETCD or not is_text(prefix, MAX_PREFIX) or parts.query or parts.fragment:
        raise ConfigError(expected)
    for host in hosts:
        dialable(f"tcp://{host}", what=f"{what} {text!r}")
    scheme = "https" if parts.scheme == "etcds" else "http"
    return EtcdClient([f"{scheme}://{host}" for host in hosts]), f"/{prefix}/"


def _dns_name(text: str) -> tuple[str, int | None]:
    """The name to look up, and for `dns` the port."""
    scheme, _, rest = text.partition("://")
    if scheme == "srv" and rest.isascii() and rest and not set(rest) & set("/:@?#"):
        return rest, None
    if scheme != "dns":
        raise ConfigError(f"discover: expected dns://NAME:PORT, srv://NAME or etcd://HOST:PORT/PREFIX, found {text!r}")
    return parse_address(dialable(f"tcp://{rest}", what=f"discover {text!r}"), what="discover")
