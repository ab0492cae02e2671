"""Sends damaged and costly messages to a live control port."""

from __future__ import annotations

import random
import time

import zmq

from disagg.protocol.messages import Reserve, Welcome, decode, encode
from harness.fuzz.attacked import EPOCH, HANG_S, AttackedRank, Impostor, attack, await_ready, discard
from harness.fuzz.damage import damage
from harness.fuzz.hostile import hostile_hello, hostile_reserve, hostile_slots
from harness.fuzz.runs import Result
from harness.fuzz.samples import messages
from harness.fuzz.targets import Finding, Reader

BATCH = 1000
ANSWER_S = 1.0
RESERVE_S = 5.0


def bombard(inputs: int, *, seed: int) -> Result:
    """Send damaged messages to a live control port, 90% over a connection with an accepted hello. Counts as accepted the valid
    hellos that are answered behind every thousand.

    Raises `Finding` if a thread of the rank dies, or the port no longer answers.
    """
    reader, rng, began = Reader(), random.Random(f"{seed}:port"), time.perf_counter()
    valid = [encode(message) for message in messages(reader.peer, reader.placements, reader.endpoint)]
    accepted, slowest, context = 0, 0.0, zmq.Context()
    with attack("local") as (rank, impostor, dealer), context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(rank.address)
        hello = impostor.hello()
        for start in range(0, inputs, BATCH):
            for number in range(start, min(start + BATCH, inputs)):
                (stranger if number % 10 == 9 else dealer).send(damage(rng, [hello, *valid]))
            seconds, _ = _await_welcome(rank, impostor, dealer)
            slowest, accepted = max(slowest, seconds), accepted + 1
            discard(stranger)
        rank.check()
        result = rank.result("port", inputs, accepted, time.perf_counter() - began, slowest_s=slowest)
    context.term()
    return result


def overload(inputs: int, *, engine: str, seed: int) -> Result:
    """Send valid messages that are as costly as possible to a live control port: tables in hellos, slots for an open request,
    reserves. Counts as accepted those after which the rank was still connected: a valid table may replace the peer's own.

    Raises `Finding` as `bombard` does, or if the rank is not connected in the end.
    """
    rng, began, accepted, slowest = random.Random(f"{seed}:costly"), time.perf_counter(), 0, 0.0
    with attack(engine) as (rank, impostor, dealer):
        _await_welcome(rank, impostor, dealer)
        for _ in range(inputs):
            reserve = _open_request(rank, impostor)
            match rng.randrange(3):
                case 0:
                    data = hostile_hello(rng, impostor.local, address=impostor.address, epoch=EPOCH)
                case 1:
                    data = hostile_slots(rng, reserve, impostor.loans) if impostor.loans and reserve else b""
                case _:
                    data = hostile_reserve(rng, reserve) if reserve else b""
            dealer.send(data)
            seconds, _ = _await_welcome(rank, impostor, dealer)
            slowest = max(slowest, seconds)
            accepted += bool(rank.check()["ready"])
        impostor.forgets = True  # it has shown other tables meanwhile, which no peer does without a restart
        await_ready(rank, impostor)
        return rank.result(f"costly, {engine}", inputs, accepted, time.perf_counter() - began, slowest_s=slowest)


def _await_welcome(rank: AttackedRank, impostor: Impostor, dealer: zmq.Socket[bytes]) -> tuple[float, Welcome]:
    """Say hello until it is answered. Returns the time that took, in seconds, and the answer."""
    discard(dealer)
    asked = time.perf_counter()
    said = 0.0
    while True:
        now = time.perf_counter()
        if now - asked > HANG_S or rank.crash is not None:
            raise Finding(f"the port answers no hello; {rank.ask('state')['problem'] or 'it hangs'}")
        if now - said > ANSWER_S:
            dealer.send(impostor.hello())
            said = now
        impostor.serve(0.0)
        if dealer.poll(10) and isinstance(welcome := decode(dealer.recv_multipart()[0]), Welcome):
            return time.perf_counter() - asked, welcome


def _open_request(rank: AttackedRank, impostor: Impostor) -> Reserve | None:
    """Have the rank reserve rows for a request, and return its message; `None` if it is not connected."""
    if not rank.ask("receive")["opened"]:
        impostor.serve(0.1)
        return None
    until = time.monotonic() + RESERVE_S
    while time.monotonic() < until:
        for message in impostor.serve(0.1):
            if isinstance(message, Reserve):
                return message
    return None
