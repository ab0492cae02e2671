"""The prefill servers that a decode server's requests have named."""

from __future__ import annotations

import errno
import select
import socket
import time
from dataclasses import dataclass

from disagg.core.address import parse_address
from disagg.core.errors import ConfigError, PeerUnreachable
from disagg.manager import KVManager

FORGET_S = 600.0
"""How long an instance that is gone is kept: a server has a new name each time it starts."""
PROBE_S = 0.05
"""How long a probe waits. A host that is up answers at once, whether or not somebody listens."""


@dataclass
class _Peer:
    address: str
    used_s: float
    was_ready: bool = False


class Peers:
    """Adds instances to a rank's manager when a request names them, and removes those that are gone.

    With keys only an instance whose key is one of `trusted` is added: a request comes from a client, and may name any address.
    """

    def __init__(self, manager: KVManager, trusted: frozenset[str]) -> None:
        self._manager = manager
        self._trusted = trusted
        self._peers: dict[str, _Peer] = {}

    def reach(self, name: str, *, address: str, public_key: str | None = None) -> KVManager:
        """The manager, which knows the instance now, though it may not be connected yet.

        Raises `PeerUnreachable` for an instance that is gone, so that its requests do not wait until their deadline, and
        `ConfigError` for one that may not be known.
        """
        peer = self._peers.get(name)
        if peer is None or peer.address != address:
            self._add(name, address, public_key)
            peer = self._peers[name] = _Peer(address, time.monotonic())
        peer.used_s = time.monotonic()
        if self._manager.peer(name).state == "ready":
            peer.was_ready = True
        elif peer.was_ready or _refuses(address):
            raise PeerUnreachable(f"prefill server {name!r} at {address} is gone: {self._manager.peer(name).reason}")
        return self._manager

    def _add(self, name: str, address: str, key: str | None) -> None:
        if self._trusted and key not in self._trusted:
            raise ConfigError(f"prefill server {name!r}: expected one of trusted_keys, found {key!r}")
        self._forget()
        self._manager.add_peer(name, address=address, public_key=key if self._trusted else None)

    def _forget(self) -> None:
        """Remove peers that are not connected and have not been used for a while."""
        now = time.monotonic()
        for name in [name for name, peer in self._peers.items() if now - peer.used_s > FORGET_S]:
            if self._manager.peer(name).state != "ready":
                self._manager.remove_peer(name)
                del self._peers[name]


def _refuses(address: str) -> bool:
    """Whether the host says that nobody listens at an address."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*parse_address(address, what="peer"), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setblocking(False)
            error = probe.connect_ex(where)
            poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
            poll.register(probe, select.POLLOUT)
            if error == errno.EINPROGRESS and poll.poll(PROBE_S * 1000):
                error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    except OSError:
        return False
    return error == errno.ECONNREFUSED
