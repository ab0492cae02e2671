"""Opens requests: checks them in the server's thread as far as the peer is known, and the rest in the control thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from disagg.arguments import Ids, check_needs, check_number, check_ready, check_text
from disagg.core.events import ReadyEvent
from disagg.core.rows import Rows, TokenRange, token_range
from disagg.ending import Ending
from disagg.layout.agreement import Agreement
from disagg.protocol.messages import Verify
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.send_session import SendSession
from disagg.protocol.types import Event, RequestKey, brief
from disagg.requests import Receiver, Sender
from disagg.runtime.runtime import Runtime

DECLINE_S = 60.0
"""How long a message of `tell` waits for its peer."""


def open_receiver(
    runtime: Runtime,
    key: RequestKey,
    *,
    peer: str,
    rows: Mapping[str, Rows],
    need: Mapping[str, TokenRange],
    group: int,
    deadline_s: float,
    ready: ReadyEvent | None,
    verify: Verify,
    tag: Any,
    label: str,
) -> Receiver:
    """Reserve rows, now or once the peer is ready. A peer that becomes ready too late is told that nothing is needed.
    Errors that only the peer's layouts show end the request.
    """
    check_ready(ready)
    check_text(label, "label")
    local, known = runtime.local, runtime.directory.agreement(peer)
    group = check_number(group, f"group of peer {peer!r}", 2**31 if known is None else known.num_groups)

    def needs(agreement: Agreement | None) -> tuple[dict[str, TokenRange], dict[str, Ids]]:
        """Of the components that both sides have, or, while the peer is not known, of those with rows."""
        agreed = rows if agreement is None else agreement.incoming.components
        return check_needs(local, local.topology.group_rank, agreed, rows, need)

    needed, ids = needs(known)
    # It is read again once the peer is known, and the caller may use it for the next request.
    need = {name: token_range(given) or given for name, given in need.items()}
    ending = Ending(runtime.spin_s)
    receiver = Receiver(runtime, ending, key=key, peer=peer, tag=tag, label=label, need=needed, ids=ids)
    deadline = ending.moments.opened_at + deadline_s

    def open_session(now: float) -> ReceiveSession:
        agreement = runtime.directory.known_agreement(peer)
        if agreement is not known:
            check_number(group, f"group of peer {peer!r}", agreement.num_groups)
            receiver.need, _ = needs(agreement)
        nonce = secrets.randbits(62)
        session = receiver.session = runtime.sessions.receives.open(
            key,
            peer=peer,
            nonce=nonce,
            source_group=group,
            rows=rows,
            need=receiver.need,
            expected=agreement.expected(local, group, receiver.need),
            now=now,
            deadline=deadline,
            ready=ready is None,
            verify=verify,
            tag=tag,
            lease=receiver.lease,
            trace=receiver.trace,
        )
        idle = agreement.idle_writers(local, group)
        runtime.sessions.decline(key, peer=peer, nonce=nonce, source_group=group, ranks=idle)
        if ready is not None:
            runtime.transfers.not_ready.append((session, ready))
        return session

    def give_up_unopened(event: Event) -> None:
        if receiver.session is None:
            tell(runtime, partial(runtime.sessions.give_up, reason=brief(event.error)), key, peer=peer, group=group)

    runtime.open(receiver, ending, open_session, wait_until=deadline)
    receiver.on_end(give_up_unopened)
    return receiver


def open_sender(
    runtime: Runtime, key: RequestKey, *, peer: str, any_attempt: bool, deadline_s: float, tag: Any, label: str
) -> Sender:
    check_text(label, "label")
    agreement = runtime.directory.agreement(peer) if peer and not any_attempt else None
    ending = Ending(runtime.spin_s)
    sender = Sender(runtime, ending, key=key, peer=peer, tag=tag, label=label, any_attempt=any_attempt)

    def open_session(now: float) -> SendSession:
        session = sender.session = runtime.sessions.sends.open(
            key,
            peer=peer,
            expected=agreement.readers(runtime.local) if agreement is not None else None,
            peer_group_size=agreement.group_size if agreement is not None else 1,
            any_attempt=any_attempt,
            now=now,
            deadline=ending.moments.opened_at + deadline_s,
            tag=tag,
            lease=sender.lease,
        )
        return session

    runtime.open(sender, ending, open_session)
    return sender


def tell(runtime: Runtime, message: Callable[..., None], key: RequestKey, *, peer: str, group: int) -> None:
    """Send a `message` of `Sessions`, such as `decline`, to every rank of a group that may write the request to this
    one.
    """

    def send() -> None:
        agreement = runtime.directory.known_agreement(peer)
        if group < agreement.num_groups:
            ranks = [*agreement.writers(runtime.local, group), *agreement.idle_writers(runtime.local, group)]
            nonce = secrets.randbits(62)
            message(key, peer=peer, nonce=nonce, source_group=group, ranks=ranks)

    runtime.command(lambda now: runtime.openings.wait(peer, None, send, now + DECLINE_S))
