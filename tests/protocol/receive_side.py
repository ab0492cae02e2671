"""A receive of two writers, its messages, and the effects that the tests take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from disagg.core.errors import RequestAborted
from disagg.core.rows import Pages, Rows, Slot
from disagg.protocol.messages import Complete, Message, Written
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Event, PeerRank, RequestKey, SendMessage

P0, P1, STRANGER = PeerRank("P", 0), PeerRank("P", 1), PeerRank("P", 2)
KEY = RequestKey(b"request-received", 3)
IDS: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt, "nonce": 7}
ROWS: dict[str, Rows] = {"kv": Pages(np.array([4, 5, 6]), 16), "ssm": Slot(2)}
NEED = {"kv": (16, 40), "ssm": (0, 40)}
BOTH = {0: {"kv": ((0, 1), NEED["kv"])}, 1: {"kv": ((2, 3), NEED["kv"]), "ssm": ((9,), NEED["ssm"])}}
ONE = {0: {"kv": ((0, 1), NEED["kv"])}}
ALL_OF_P0 = (Written(0, "kv", None, 16, 40),)
ALL_OF_P1 = (Written(0, "kv", (2, 3), 0, 64), Written(1, "ssm", None, 0, 40))
FAILED = RequestAborted("client gone")


def receive(
    sessions: Sessions, *, key: RequestKey = KEY, expected: Mapping[int, Any] = BOTH, ready: bool = True, now: float = 0.0
) -> ReceiveSession:
    return sessions.receives.open(
        key,
        peer="P",
        nonce=7,
        source_group=1,
        rows=ROWS,
        need=NEED,
        expected=expected,
        now=now,
        deadline=now + 10.0,
        ready=ready,
        tag="tag",
    )


def fail() -> None:
    raise ZeroDivisionError


def take_messages(sessions: Sessions) -> list[tuple[PeerRank, Message]]:
    """The messages since the last call; other effects stay."""
    messages: list[tuple[PeerRank, Message]] = [(e.peer, e.message) for e in sessions.effects if isinstance(e, SendMessage)]
    events = [e for e in sessions.effects if not isinstance(e, SendMessage)]
    sessions.effects.clear()
    sessions.effects.extend(events)
    return messages


def take_events(sessions: Sessions) -> list[Event]:
    """The events since the last call; other effects are dropped."""
    found = [e for e in sessions.effects if isinstance(e, Event)]
    sessions.effects.clear()
    return found


def complete(written: tuple[Written, ...], payload: bytes = b"", **other: Any) -> Complete:
    return Complete(**{**IDS, **other}, written=written, payload=payload)
