"""What the control thread needs of its channel, and what arrives there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from disagg.core import _native


class Inbound(msgspec.Struct, frozen=True):
    """A message on a connection that a peer opened: answer it with `reply`."""

    connection: bytes
    user: str
    data: bytes


class Late(msgspec.Struct, frozen=True):
    """A message on a connection that a peer opened, and that ended before it was read."""

    user: str
    data: bytes


class Reply(msgspec.Struct, frozen=True):
    """A message on connection `dial`, which this side opened."""

    dial: int
    data: bytes


class Closed(msgspec.Struct, frozen=True):
    connection: bytes


Arrival = Inbound | Late | Reply | Closed


class Wire(Protocol):
    def connect(self, dial: int, address: str, *, public_key: str | None = None) -> None: ...
    def disconnect(self, dial: int) -> None: ...
    def send(self, dial: int, data: bytes) -> bool: ...
    def reply(self, connection: bytes, data: bytes) -> bool: ...
    def wake(self) -> None: ...
    def busy_poll(self, seconds: float, completions: list[_native.Completion]) -> bool: ...
    def flush(self) -> None: ...
    def poll(self, timeout_s: float) -> Iterator[Arrival]: ...
