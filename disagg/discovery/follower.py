"""Configures a manager's peers as a source finds them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from disagg.core.errors import ConfigError, DiscoveryError, LocalProtocolError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.discovery.source import Found, PeerSource
from disagg.manager import KVManager

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class PeerFollower:
    """Asks a source every `interval_s` seconds in a thread, from the context's begin to its end.

    New instances are added as peers, and changed ones replaced. An instance that the source no longer has is removed once it
    is not connected: requests with it end as they would have, and an instance that only fails its probe is kept. A source that
    does not answer changes nothing. `keep` are names of peers that are configured otherwise, which stay as they are.
    """

    def __init__(
        self, manager: KVManager, source: PeerSource, *, keep: Collection[str] = (), interval_s: float = INTERVAL_S
    ) -> None:
        self._manager = manager
        self._source = source
        self._keep = {manager.name, *keep}
        self._interval_s = interval_s
        self._followed: dict[str, Found] = {}
        self._stop = threading.Event()
        self._warnings = RateLimitedLog(logger, repeat_s=60.0)
        self._thread = threading.Thread(target=self._run, name="disagg-discovery", daemon=True)

    def __enter__(self) -> PeerFollower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def update(self) -> None:
        """Ask the source once, and add, replace and remove peers. Raises `DiscoveryError` if it does not answer."""
        found = self._source.find()
        for name in sorted(found.keys() - self._keep):
            if self._followed.get(name) != found[name]:
                self._add(name, found[name])
        for name in sorted(self._followed.keys() - found.keys()):
            if self._manager.peer(name).state != "ready":
                logger.info("%s: discovery: peer %r is gone", self._manager.name, name)
                self._manager.remove_peer(name)
                del self._followed[name]

    def _add(self, name: str, instance: Found) -> None:
        try:
            self._manager.add_peer(name, address=instance.address, public_key=instance.public_key)
        except ConfigError as error:
            self._warnings.warning("%s: discovery: %s", self._manager.name, error)
            return
        logger.info("%s: discovery: peer %r is at %s", self._manager.name, name, instance.address)
        self._followed[name] = instance

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.update()
            except DiscoveryError as error:
                self._warnings.warning("%s: discovery: %s", self._manager.name, error)
            except LocalProtocolError as error:  # the manager was closed
                logger.info("%s: discovery ends: %s", self._manager.name, error)
                return
            except Exception as error:  # noqa: BLE001 (whatever it is, what a source says later must still be followed)
                self._warnings.warning("%s: discovery: %s: %s", self._manager.name, type(error).__name__, error)
            self._stop.wait(self._interval_s)
