"""Peers from DNS, for which Kubernetes' headless Services are made. Needs the package `dnspython`."""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

from disagg.core.address import bracketed
from disagg.core.errors import BackendUnavailable, DiscoveryError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.discovery.source import Found

try:
    import dns.exception
    import dns.resolver
except ImportError as error:
    raise BackendUnavailable("discovery by DNS needs the package 'dnspython': pip install dnspython") from error

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class DnsPeers:
    """The instances behind a DNS name.

    With a `port`, each A and AAAA record of `name` is an instance `LABEL-ADDRESS`, such as `decode-10.0.0.7` for the Service
    `decode.default.svc.cluster.local`: start it with that name. Without, `name` has SRV records, and each target is an instance
    with the name of its first label, as a StatefulSet names its pods. Of several records with that label the one of the lowest
    priority is taken, of those the highest weight, then the lowest port; a warning names the others. `LABEL` is the first label
    of `name` without an underscore.

    DNS knows no keys. An instance's public key is that of its own name in `keys`, else that of `LABEL`, which all replicas
    share. `nameservers` are addresses to ask at `nameserver_port` instead of the system's. Raises `BackendUnavailable` without
    the package `dnspython`, and `DiscoveryError` if the system has no resolver.
    """

    def __init__(
        self,
        name: str,
        *,
        port: int | None = None,
        keys: Mapping[str, str] | None = None,
        nameservers: Sequence[str] = (),
        nameserver_port: int = 53,
    ) -> None:
        self._name = name
        self._port = port
        self._keys = dict(keys or {})
        self._label = next((label for label in name.split(".") if not label.startswith("_")), name)
        try:
            self._resolver = dns.resolver.Resolver(configure=not nameservers)
        except dns.resolver.NoResolverConfiguration as error:
            raise DiscoveryError(f"DNS: {error}") from error
        if nameservers:
            self._resolver.nameservers = list(nameservers)
            self._resolver.port = nameserver_port
        self._resolver.lifetime = TIMEOUT_S
        self._warnings = RateLimitedLog(logger, repeat_s=math.inf)

    def __str__(self) -> str:
        return f"{'SRV' if self._port is None else 'A and AAAA'} records of {self._name}"

    def find(self) -> Mapping[str, Found]:
        """The instances now; none if the name does not exist. Raises `DiscoveryError`."""
        found = self._by_target() if self._port is None else self._by_address(self._port)
        return {name: Found(address, self._keys.get(name, self._keys.get(self._label))) for name, address in found}

    def _by_target(self) -> Iterator[tuple[str, str]]:
        found: dict[str, dict[str, None]] = {}
        for record in sorted(self._ask("SRV"), key=lambda each: (each.priority, -each.weight, each.port, each.target)):
            target = str(record.target).rstrip(".")
            found.setdefault(target.split(".")[0], {})[f"tcp://{target}:{record.port}"] = None
        for name, (address, *others) in found.items():
            if others:
                self._warnings.warning(
                    "discovery: the %s have several for %r: %s is taken, not %s", self, name, address, ", ".join(others)
                )
            yield name, address

    def _by_address(self, port: int) -> Iterator[tuple[str, str]]:
        for kind in ("A", "AAAA"):
            for record in self._ask(kind):
                address = str(ipaddress.ip_address(record.address))
                yield f"{self._label}-{address}", f"tcp://{bracketed(address)}:{port}"

    def _ask(self, kind: str) -> dns.resolver.Answer | tuple[()]:
        try:
            return self._resolver.resolve(self._name, kind, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return ()
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryError(f"DNS: no answer for the {kind} records of {self._name}: {error}") from error
