"""The prefill servers that a decode server's requests have named."""

from __future__ import annotations

import time

from disagg.core.errors import ConfigError
from disagg.integrations.vllm.metadata import HandOff
from disagg.manager import KVManager

FORGET_S = 600.0
"""How long an instance that is gone is kept: a vLLM server has a new name each time it starts."""


class Peers:
    """Adds instances to a rank's manager when a request names them, and removes those that are gone.

    With keys only an instance whose key is one of `trusted` is added: a request comes from a client, and may name any address.
    """

    def __init__(self, manager: KVManager, trusted: frozenset[str]) -> None:
        self._manager = manager
        self._trusted = trusted
        self._used_s: dict[str, float] = {}

    def reach(self, hand_off: HandOff) -> KVManager:
        """The manager, which knows the instance of a hand-off now. Raises `ConfigError` for one that it may not know."""
        name, key = hand_off.remote_engine_id, hand_off.remote_public_key
        if self._manager.peer(name).state == "unknown":
            if self._trusted and key not in self._trusted:
                raise ConfigError(f"prefill server {name!r}: expected one of trusted_keys, found {key!r}")
            self._forget()
            self._manager.add_peer(name, address=hand_off.remote_address, public_key=key if self._trusted else None)
        self._used_s[name] = time.monotonic()
        return self._manager

    def _forget(self) -> None:
        """Remove what has not been used for long and is not connected."""
        now = time.monotonic()
        for name in [name for name, used_s in self._used_s.items() if now - used_s > FORGET_S]:
            if self._manager.peer(name).state != "ready":
                self._manager.remove_peer(name)
                del self._used_s[name]
