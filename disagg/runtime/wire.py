"""What the control thread needs of its channel, and what arrives there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from disagg.core import _native
from disagg.runtime.completion_page import CompletionPage, CompletionPageView


class Inbound(msgspec.Struct, frozen=True):
    """A message that a peer sent on a connection that it opened: answer it with `reply`. `page` is the completion page of that
    peer.
    """

    connection: bytes
    user: str
    data: bytes
    page: CompletionPageView | None = None


class Reply(msgspec.Struct, frozen=True):
    """A message that came back on connection `dial`, which this side opened."""

    dial: int
    data: bytes


class Closed(msgspec.Struct, frozen=True):
    """A connection that a peer had opened has ended."""

    connection: bytes


Arrival = Inbound | Reply | Closed


class Wire(Protocol):
    """What the control thread needs of its channel."""

    def connect(self, dial: int, address: str, *, public_key: str | None = None) -> None: ...
    def disconnect(self, dial: int) -> None: ...
    def send(self, dial: int, data: bytes) -> bool: ...
    def reply(self, connection: bytes, data: bytes, *, offer_local: bool = False) -> bool: ...
    def completion_page(self, dial: int) -> CompletionPage | None: ...
    def wake(self) -> None: ...
    def busy_poll(self, seconds: float, completions: list[_native.Completion]) -> bool: ...
    def flush(self) -> None: ...
    def poll(self, timeout_s: float) -> Iterator[Arrival]: ...
