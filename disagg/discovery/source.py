"""The contract of a source of peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Found:
    """An instance that a source knows: the control address of its leader, and its public key if it has one."""

    address: str
    public_key: str | None = None


class PeerSource(Protocol):
    """Where peers are registered."""

    def find(self) -> Mapping[str, Found]:
        """Return the instances that are registered now, by name. May block for seconds.

        Raises `DiscoveryError` if the source does not answer; the caller asks again later.
        """
