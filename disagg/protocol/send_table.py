"""The requests that one rank sends, and early messages about requests that are not open yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from disagg.core.errors import LocalProtocolError
from disagg.protocol.parked import Early, Parked
from disagg.protocol.send_session import SendSession
from disagg.protocol.timers import Tombstone, Tombstones
from disagg.protocol.types import Limits, PeerRank, RequestKey

Readers = tuple[frozenset[int], int]
"""The group ranks of an instance that this rank writes to, and the size of its groups."""
ANY = ""
Offer = tuple[str, bytes, int | None]
"""The peer (empty: any), the id and the attempt (`None`: any) of a request that waits for its first message."""


class SendTable:
    """`readers_of` knows every instance whose messages arrive."""

    def __init__(self, limits: Limits, readers_of: Callable[[str], Readers]) -> None:
        self._readers_of = readers_of
        self.sessions: dict[tuple[str, RequestKey], SendSession] = {}
        self.offers: dict[Offer, SendSession] = {}
        self.served: dict[RequestKey, set[str]] = {}
        self.num_reserved: Counter[PeerRank] = Counter()
        """Reserves by rank: those of sessions, and parked ones."""
        self.parked = Parked(limits, self.num_reserved)
        self.ended = Tombstones(limits.max_tombstones)

    def open(self, session: SendSession) -> list[tuple[PeerRank, Early]]:
        """Add a session, or offer it if it is not bound. Returns the messages that have come for it; one binds it. Raises
        `LocalProtocolError` if the same is offered already, or was opened before.
        """
        offer = peer, request_id, attempt = _offer_of(session)
        if offer in self.offers:
            raise LocalProtocolError(f"request {session.key}: it is offered to {peer or 'any peer'} already")
        for whose in (peer, ANY):
            self.ended.drop(whose, _any_attempt(request_id))
        used = (peer, session.key) in self.sessions or self.ended.get(peer, session.key) is not None
        if used and attempt is not None:
            whom = repr(peer) if peer else "any peer"
            raise LocalProtocolError(
                f"request {session.key}: this attempt was already sent to {whom}; use a new attempt number"
            )
        if session.is_bound:
            return self._serve(session)
        self.offers[offer] = session
        found = self.parked.find(request_id, instance=peer, attempt=attempt)
        return self._bind(session, *found) if found is not None else []

    def claim(self, peer: PeerRank, key: RequestKey) -> list[tuple[PeerRank, Early]]:
        """Bind an offer that fits, if there is no session yet. Returns the messages that have come for it."""
        if self.offers and (peer.instance, key) not in self.sessions:
            offered = self.offer(peer.instance, key)
            if offered is not None:
                return self._bind(offered, peer.instance, key)
        return []

    def offer(self, instance: str, key: RequestKey) -> SendSession | None:
        for whose in (instance, ANY):
            for attempt in (key.attempt, None):
                offered = self.offers.get((whose, key.request_id, attempt))
                if offered is not None:
                    return offered
        return None

    def remove(self, session: SendSession, reason: str) -> bool:
        """Returns whether it was there."""
        if self.offers.pop(_offer_of(session), None) is not None:
            key = _any_attempt(session.key.request_id) if session.any_attempt else session.key
            self.ended.put(session.peer, key, Tombstone(None, reason=reason, at=session.given_up_at))
            return True
        if self.sessions.pop((session.peer, session.key), None) is None:
            return False
        served = self.served[session.key]
        served.discard(session.peer)
        if not served:
            del self.served[session.key]
        self.ended.put(session.peer, session.key, Tombstone(None, reason=reason))
        if session.names_attempt:
            self.ended.put(ANY, session.key, Tombstone(None, reason=f"the request has ended; it was served to {session.peer}"))
        return True

    def of(self, instance: str) -> list[SendSession]:
        return [session for session in (*self.sessions.values(), *self.offers.values()) if session.peer == instance]

    def forget(self, instance: str) -> None:
        self.parked.forget(instance)
        self.ended.forget(instance)

    def has_ended(self, peer: PeerRank, key: RequestKey) -> Tombstone | None:
        """How an attempt has ended, towards that rank or its whole instance."""
        return self.ended.get(peer, key) or self.ended.get(peer.instance, key)

    def refusal(self, peer: PeerRank, key: RequestKey) -> str:
        """Why a reserve that fits no session is refused: others are served, or have been. Empty if it may wait."""
        if self.served.get(key):
            return f"the request is not served to {peer.instance}"
        ended = self.ended.get(ANY, key)
        return ended.reason if ended is not None else ""

    def given_up(self, peer: PeerRank, request_id: bytes) -> Tombstone | None:
        """How the last offer to send any attempt of a request has ended before a message about it came, if one has."""
        key = _any_attempt(request_id)
        return self.ended.get(peer.instance, key) or self.ended.get(ANY, key)

    def _bind(self, session: SendSession, peer: str, key: RequestKey) -> list[tuple[PeerRank, Early]]:
        readers = self._readers_of(peer)
        del self.offers[_offer_of(session)]
        session.peer, session.key, session.any_attempt = peer, key, False
        session.expected, session.peer_group_size = readers
        return self._serve(session)

    def _serve(self, session: SendSession) -> list[tuple[PeerRank, Early]]:
        self.sessions[session.peer, session.key] = session
        self.served.setdefault(session.key, set()).add(session.peer)
        return self.parked.take(session.key)


def _any_attempt(request_id: bytes) -> RequestKey:
    return RequestKey(request_id, -1)


def _offer_of(session: SendSession) -> Offer:
    return session.peer, session.key.request_id, None if session.any_attempt else session.key.attempt
