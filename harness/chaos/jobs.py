"""What the controller sends to ranks: how to start, and what to do for a request."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.protocol.messages import Verify


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank starts. `faults` are the fields of `BackendFaults`. A rank that is silent for `silence_s` counts as lost.

    `off_loopback`: it listens on an address of a network that only the test uses. `devices`: its engine's network
    devices; empty for all. Its intervals are multiplied by `slow`.
    """

    name: str
    tp: int
    tp_rank: int
    page: int
    num_pages: int
    axes: str
    backend: str
    transport: str
    devices: tuple[str, ...]
    listen: str
    leader: str | None
    pack_below: int | None
    verify: Verify
    faults: dict[str, Any]
    silence_s: float
    slow: float
    off_loopback: bool


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a request. Times are in seconds from its arrival; `chunks` are the tokens where sends are cut, and
    `order` the numbers of the chunks in the order in which they are sent.

    The rank waits for `delay_s`, aborts after `abort_s`, and uses received pages for `hold_s`.
    """

    request_id: str
    attempt: int
    direction: str
    peer: str
    tokens: int
    first: int
    deadline_s: float
    delay_s: float
    abort_s: float | None
    hold_s: float
    chunks: tuple[int, ...]
    order: tuple[int, ...]
