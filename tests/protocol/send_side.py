"""A send to one peer, its messages, and the effects that the tests take."""

from __future__ import annotations

from typing import Any

import numpy as np

from disagg.core.errors import RequestAborted
from disagg.core.rows import Pages, Slot
from disagg.protocol.messages import (
    Message,
    Reserve,
    TokenRange,
    pack_rows,
)
from disagg.protocol.send_session import SendSession
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, PeerRank, RequestKey, ReturnLoans, SendMessage, Ticket

D0, D1, D2, E0 = PeerRank("D", 0), PeerRank("D", 1), PeerRank("D", 2), PeerRank("E", 0)
KEY = RequestKey(b"request-that-is!", 3)
ATTEMPT: dict[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}
IDS: dict[str, Any] = {**ATTEMPT, "nonce": 7}
PAGES, SLOT = Pages(np.array([1, 2, 3])), Slot(4)
FAILED = RequestAborted("prefill is out of memory")


def reserve(*, nonce: int = 7, need: TokenRange = (0, 20), state: bool = False, group: int = 0, source: int = 0) -> Reserve:
    rows, needs = {"kv": pack_rows(PAGES)}, {"kv": need}
    if state:
        rows["ssm"], needs["ssm"] = pack_rows(SLOT), (0, 20)
    return Reserve(**ATTEMPT, nonce=nonce, source_group=source, destination_group=group, rows=rows, need=needs)


def send(sessions: Sessions, *, ranks: int = 1, group_size: int | None = None) -> SendSession:
    return sessions.sends.open(
        KEY,
        peer="D",
        expected=frozenset(range(ranks)),
        peer_group_size=group_size or ranks,
        now=0.0,
        deadline=10.0,
        tag="tag",
    )


def chunk(number: int, start: int, stop: int, layers: tuple[int, ...] | None = None) -> Chunk:
    return Chunk(number, {"kv": PAGES}, (start, stop), layers)


def take_effects(sessions: Sessions) -> list[Any]:
    """All effects since the last call but those about loans, messages as pairs."""
    found = [
        (e.peer, e.message) if isinstance(e, SendMessage) else e for e in sessions.effects if not isinstance(e, ReturnLoans)
    ]
    sessions.effects.clear()
    return found


def take_messages(sessions: Sessions) -> list[tuple[PeerRank, Message]]:
    """The messages since the last call; other effects are dropped."""
    return [e for e in take_effects(sessions) if isinstance(e, tuple)]


def take_kinds(sessions: Sessions) -> list[str]:
    """The type names of all messages and other effects since the last call."""
    return [type(e[1] if isinstance(e, tuple) else e).__name__ for e in take_effects(sessions)]


def settle(sessions: Sessions, number: int = 0, peer: PeerRank = D0, **result: Any) -> None:
    sessions.sends.settled(Ticket(peer, KEY, number), now=1.0, **result)


def sending(sessions: Sessions, *, finished: bool = True) -> SendSession:
    """A send with one destination and one transfer in flight."""
    session = send(sessions)
    sessions.on_message(D0, reserve(), 0.0)
    sessions.sends.send(session, chunk(0, 0, 20), 0.0)
    if finished:
        sessions.sends.finish(session, b"first", 0.0)
    assert take_kinds(sessions) == ["StartTransfer"]
    return session
