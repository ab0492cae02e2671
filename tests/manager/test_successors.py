"""Processes that take the place of a peer at its address, of which its welcome is the first sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from disagg import KVManager, new_request_id
from disagg.protocol.messages import Hello, Reject, Reserve, Welcome, decode, encode
from disagg.requests import Receiver
from disagg.runtime.channel import Channel
from disagg.runtime.wire import Arrival, Closed, Reply
from disagg.testing.faults import FaultyChannel, MessageFaults
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send


@dataclass
class Succession(FaultyChannel):
    """A rank's channel. From `begin` on, the rank's only peer looks like another process than before. `meanwhile` is called as
    the first welcome of that process is read, and `on_reserve` before a reserve is sent.
    """

    on_reserve: Callable[[], object] | None = None
    meanwhile: list[Callable[[], object]] = field(default_factory=list)
    begun: bool = False
    dial: int | None = None

    def begin(self, meanwhile: Callable[[], object], on_reserve: Callable[[], object]) -> None:
        self.meanwhile, self.on_reserve, self.begun = [meanwhile], on_reserve, True
        self.wake()

    def poll(self, timeout_s: float) -> Iterator[Arrival]:
        if self.meanwhile and self.dial is not None:  # the answer to a message on a connection that is made anew
            yield Reply(self.dial, encode(Reject(field="connection", reason="send hello first", hello_first=True)))
            self.dial = None
        for arrival in super().poll(timeout_s):
            message = decode(arrival.data) if self.begun and not isinstance(arrival, Closed) else None
            if not isinstance(message, Hello | Welcome):
                yield arrival
                continue
            yield msgspec.structs.replace(arrival, data=encode(msgspec.structs.replace(message, epoch=message.epoch ^ 1)))
            while self.meanwhile and isinstance(message, Welcome):
                self.meanwhile.pop()()

    def send(self, dial: int, data: bytes) -> bool:
        self.dial = dial
        if self.on_reserve is not None and isinstance(decode(data), Reserve):
            self.on_reserve()
        return super().send(dial, data)


def succession(manager: KVManager) -> Succession:
    """Put it between a manager and its channel."""
    found: list[Succession] = []

    def wrap(channel: Channel) -> Succession:
        found.append(Succession(channel, MessageFaults()))
        return found[0]

    manager.interpose(wrap)
    return found[0]


def test_rows_that_a_successor_may_write_are_not_those_of_its_predecessor() -> None:
    """A request is opened before the loss of the predecessor is carried out, and the predecessor's end must not end it: no
    reserve leaves for a request that has failed.
    """
    with cluster(Side(), Side()) as instances:
        (decode,), (prefill,), request = instances.decode, instances.prefill, new_request_id()
        receivers, errors = list[Receiver](), list[Exception | None]()
        succession(decode.manager).begin(
            lambda: receivers.append(receive(decode, request, instances.pages(decode, 20), need=(0, 20))),
            lambda: errors.append(receivers[0].session.error if receivers[0].session is not None else None),
        )
        until(lambda: receivers)
        send(prefill, request, instances.pages(prefill, 20), 20)
        assert "restarted" not in str(receivers[0].wait(timeout_s=DEADLINE_S).error)
        assert errors
        assert errors[0] is None
