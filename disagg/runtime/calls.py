"""Opens requests: checks them in the server's thread as far as the peer is known, and the rest in the control thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from disagg.arguments import Ids, check_needs, check_number, check_ready, check_text
from disagg.core.events import ReadyEvent
from disagg.core.rows import Rows, TokenRange
from disagg.ending import Ending
from disagg.layout.agreement import Agreement
from disagg.protocol.messages import Verify
from disagg.protocol.receive_session import ReceiveSession
from disagg.protocol.send_session import SendSession
from disagg.protocol.types import Event, RequestKey
from disagg.requests import Receiver, Sender
from disagg.runtime.runtime import Runtime

DECLINE_S = 60.0
"""How long a message of `tell` waits for its peer."""


@dataclass(frozen=True, kw_only=True)
class ReceiveCall:
    """The checked arguments of `KVManager.receiver`."""

    key: RequestKey
    peer: str
    rows: Mapping[str, Rows]
    need: Mapping[str, TokenRange]
    group: int
    deadline_s: float
    ready: ReadyEvent | None
    verify: Verify
    tag: Any
    label: str


def open_receiver(runtime: Runtime, call: ReceiveCall) -> Receiver:
    """Reserve rows, now or once the peer is ready. A peer that becomes ready too late is told that nothing is needed.
    Errors that only the peer's layouts show end the request.
    """
    check_ready(call.ready)
    check_text(call.label, "label")
    agreement = runtime.directory.agreement(call.peer)
    num_groups = 2**31 if agreement is None else agreement.num_groups
    call = replace(call, group=check_number(call.group, f"group of peer {call.peer!r}", num_groups))
    need, ids = _needs(runtime, call, agreement)
    ending = Ending(runtime.spin_s)
    receiver = Receiver(runtime, ending, key=call.key, peer=call.peer, tag=call.tag, label=call.label, need=need, ids=ids)
    deadline = ending.moments.opened_at + call.deadline_s

    def open_session(now: float) -> ReceiveSession:
        agreed = runtime.directory.known_agreement(call.peer)
        if agreed is not agreement:
            check_number(call.group, f"group of peer {call.peer!r}", agreed.num_groups)
            receiver.need, _ = _needs(runtime, call, agreed)
        return _reserve(runtime, call, agreed, receiver, now, deadline)

    def decline_unopened(_: Event) -> None:
        if receiver.session is None:
            tell(runtime, runtime.sessions.decline, call.key, peer=call.peer, group=call.group)

    runtime.open(receiver, ending, open_session, wait_until=deadline)
    receiver.on_end(decline_unopened)
    return receiver


def _needs(runtime: Runtime, call: ReceiveCall, agreement: Agreement | None) -> tuple[dict[str, TokenRange], dict[str, Ids]]:
    """Needs of the components that both sides have, or, while the peer is not known, of those with rows."""
    agreed = call.rows if agreement is None else agreement.incoming.components
    return check_needs(runtime.local, runtime.local.topology.group_rank, agreed, call.rows, call.need)


def _reserve(
    runtime: Runtime, call: ReceiveCall, agreement: Agreement, receiver: Receiver, now: float, deadline: float
) -> ReceiveSession:
    """In the control thread."""
    receives, nonce = runtime.sessions.receives, secrets.randbits(62)
    session = receiver.session = receives.open(
        call.key,
        peer=call.peer,
        nonce=nonce,
        source_group=call.group,
        rows=call.rows,
        need=receiver.need,
        expected=agreement.expected(runtime.local, call.group, receiver.need),
        now=now,
        deadline=deadline,
        ready=call.ready is None,
        verify=call.verify,
        tag=call.tag,
        lease=receiver.lease,
        trace=receiver.trace,
    )
    idle = agreement.idle_writers(runtime.local, call.group)
    runtime.sessions.decline(call.key, peer=call.peer, nonce=nonce, source_group=call.group, ranks=idle)
    if call.ready is not None:
        runtime.dispatch.reserve_when_ready(session, call.ready)
    return session


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
    """Send a `message` of `Sessions`, `decline` or `want`, to every rank of a group that may write the request to this
    one.
    """
    group = check_number(group, f"group of peer {peer!r}", 2**31)

    def send() -> None:
        agreement = runtime.directory.known_agreement(peer)
        if group < agreement.num_groups:
            ranks = [*agreement.writers(runtime.local, group), *agreement.idle_writers(runtime.local, group)]
            nonce = secrets.randbits(62)
            message(key, peer=peer, nonce=nonce, source_group=group, ranks=ranks)

    runtime.command(lambda now: runtime.openings.wait(peer, None, send, now + DECLINE_S))
