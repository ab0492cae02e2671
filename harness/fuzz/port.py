"""Sends damaged messages to a live control port."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from disagg.layout.agreement import ModelId
from disagg.manager import KVManager
from disagg.protocol.messages import Hello, Welcome, decode, encode
from harness.fuzz.damage import damage
from harness.fuzz.runs import HANG_S, Result, max_rss_kib
from harness.fuzz.samples import components, messages
from harness.fuzz.targets import Finding, Reader


@contextmanager
def attacked_rank() -> Iterator[tuple[KVManager, bytes]]:
    """A rank with an open control port and one known peer, and the hello of that peer."""
    local, own = components("tiny", "tp=1,page=4,layout=hnd", 0)
    manager = KVManager(
        name="me", topology=local.topology, components=own, model=ModelId("m", "r"), backend="local", pack_below=0
    )
    with manager:
        manager.add_peer("peer", address="tcp://127.0.0.1:9")
        theirs, _ = components("tiny", "tp=2", 0)
        hello = messages(theirs)[0]
        assert isinstance(hello, Hello)
        yield manager, encode(msgspec.structs.replace(hello, address="tcp://127.0.0.1:9", generation=0))


def bombard(inputs: int, *, seed: int) -> Result:
    """Send damaged messages to a live control port, 90% over a connection with an accepted hello.

    Raises `Finding` if a thread dies or the port no longer answers.
    """
    reader, rng, began = Reader(), random.Random(f"{seed}:port"), time.perf_counter()
    before = max_rss_kib()
    valid = [encode(message) for message in messages(reader.peer, reader.placements, reader.endpoint)]
    accepted, slowest, context = 0, 0.0, zmq.Context()
    with attacked_rank() as (manager, hello), context.socket(zmq.DEALER) as dealer, context.socket(zmq.DEALER) as stranger:
        for opened in (dealer, stranger):
            opened.linger = 0
            opened.connect(manager.address)
        for start in range(0, inputs, 1000):
            for number in range(start, min(start + 1000, inputs)):
                (stranger if number % 10 == 9 else dealer).send(damage(rng, [hello, *valid]))
            asked = time.perf_counter()
            while not _is_welcome(dealer, hello):
                if time.perf_counter() - asked > HANG_S:
                    raise Finding(f"port, about {start} of seed {seed}: no answer; {manager.health().problem or 'it hangs'}")
            accepted, slowest = accepted + 1, max(slowest, time.perf_counter() - asked)
            while stranger.poll(0):
                stranger.recv()
        if not manager.health().ok:
            raise Finding(f"port, seed {seed}: {manager.health().problem}")
    context.term()
    grown = (max_rss_kib() - before) / 1024
    return Result("port", inputs, accepted, time.perf_counter() - began, slowest * 1000, grown)


def _is_welcome(dealer: zmq.Socket[bytes], hello: bytes) -> bool:
    """Send a hello and return whether a welcome arrives within a second. Discards earlier answers."""
    while dealer.poll(0):
        dealer.recv()
    dealer.send(hello)
    until = time.perf_counter() + 1.0
    while (left := until - time.perf_counter()) > 0:
        if dealer.poll(int(left * 1000)) and isinstance(decode(dealer.recv()), Welcome):
            return True
    return False
