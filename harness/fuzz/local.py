"""Attacks the local socket of a rank: garbage, wrong tokens, silent connections, false lengths, and foreign descriptors."""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
import time
from contextlib import ExitStack, suppress

import msgspec
import zmq

from disagg.protocol.messages import encode
from disagg.runtime.local_socket import MAX_PACKET_NBYTES, MAX_UNAUTHENTICATED, Invitation
from harness.fuzz.attacked import START_S, AttackedRank, Impostor, attack
from harness.fuzz.damage import damage
from harness.fuzz.runs import Result
from harness.fuzz.samples import messages
from harness.fuzz.targets import Finding, Reader

CHECK_EVERY = 200
SETTLE_S = 20.0
"""How long a rank may take to close connections whose other ends are closed."""
FLOOD = 3 * MAX_UNAUTHENTICATED
MAX_MORE_DESCRIPTORS = MAX_UNAUTHENTICATED + 8
"""Descriptors that the rank may have besides those before the attack: connections without a token, and some of its own."""


class _Connection:
    """A connection to a rank's local socket. Every call ignores that the rank may have closed it."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._socket.settimeout(1.0)
        with suppress(OSError):
            self._socket.connect(f"\0{name}")

    def send(self, packet: bytes, descriptors: list[int] | None = None) -> None:
        with suppress(OSError):
            socket.send_fds(self._socket, [packet], descriptors or [])


def besiege(inputs: int, *, seed: int) -> Result:
    """Make connections to the local socket of a rank, most of which no peer would make. Counts as accepted the valid tokens.

    Raises `Finding` if a thread of the rank dies, it answers no hello any more, or it keeps descriptors.
    """
    rng, began, accepted = random.Random(f"{seed}:local"), time.perf_counter(), 0
    reader = Reader()
    valid = [encode(message) for message in messages(reader.peer, reader.placements, reader.endpoint)]
    with attack("local") as (rank, impostor, dealer):
        invitation = _invitation(rank, impostor, dealer)
        before = int(rank.check()["descriptors"])
        for number in range(inputs):
            with ExitStack() as stack:
                accepted += _attack_once(rng, invitation, valid, stack)
            if number % CHECK_EVERY == CHECK_EVERY - 1 or number == inputs - 1:
                kept = _kept(rank, before + MAX_MORE_DESCRIPTORS)
                if kept:
                    raise Finding(f"local, about {number} of seed {seed}: {kept} descriptors, {before} before the attack")
        return rank.result("local", inputs, accepted, time.perf_counter() - began, slowest_s=0.0)


def _kept(rank: AttackedRank, limit: int) -> int:
    """The number of descriptors, if the rank keeps more than `limit` for long; connections are not closed there at once."""
    until = time.monotonic() + SETTLE_S
    while (found := int(rank.check()["descriptors"])) > limit:
        if time.monotonic() > until:
            return found
        time.sleep(0.05)
    return 0


def _invitation(rank: AttackedRank, impostor: Impostor, dealer: zmq.Socket[bytes]) -> Invitation:
    """The invitation that follows the welcome."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        dealer.send(impostor.hello())
        if dealer.poll(1000) and len(frames := dealer.recv_multipart()) == 2:
            return msgspec.msgpack.decode(frames[1], type=Invitation)
    raise Finding(f"the rank invites nobody to its local socket: {rank.check()}")


def _attack_once(rng: random.Random, invitation: Invitation, valid: list[bytes], stack: ExitStack) -> bool:
    """One attack. Returns whether it showed a valid token."""
    name = invitation.name
    if rng.random() < 0.01:  # connections that stay silent
        for _ in range(rng.randrange(FLOOD)):
            _Connection(name, stack)
        return False
    connection = _Connection(name, stack)
    shows_token = rng.random() < 0.5
    token = invitation.token if shows_token else damage(rng, [invitation.token, b"x" * 17, b""])
    connection.send(token, _foreign_descriptors(rng, stack) if rng.random() < 0.3 else None)
    for _ in range(rng.choice((0, 1, 1, 5))):
        connection.send(_packet(rng, valid), _foreign_descriptors(rng, stack) if rng.random() < 0.1 else None)
    return shows_token


def _packet(rng: random.Random, valid: list[bytes]) -> bytes:
    """A packet with a true length and a damaged message, a false length, or garbage."""
    data = damage(rng, valid)
    match rng.randrange(4):
        case 0:
            return struct.pack("<I", rng.choice((0, 1, len(data) - 1 if data else 0, len(data) + 1, 2**31, 2**32 - 1))) + data
        case 1:
            return rng.randbytes(rng.choice((1, 3, 4, 100, MAX_PACKET_NBYTES)))
        case 2:
            return struct.pack("<I", 0) * rng.choice((1, 1000, MAX_PACKET_NBYTES // 4))
        case _:
            return b"".join(struct.pack("<I", len(one)) + one for one in (data, *rng.sample(valid, 2)))


def _foreign_descriptors(rng: random.Random, stack: ExitStack) -> list[int]:
    """Descriptors of things that are no completion page: pipes, devices, sockets, and memory of odd sizes."""
    made: list[int] = []
    for _ in range(rng.choice((1, 1, 2, 20))):
        match rng.randrange(4):
            case 0:
                made += os.pipe()
            case 1:
                made.append(os.open(rng.choice(("/dev/zero", "/dev/null", "/proc/self/maps", "/")), os.O_RDONLY))
            case 2:
                made.append(os.memfd_create("foreign"))
                os.ftruncate(made[-1], rng.choice((0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 1 << 30)))
            case _:
                made += [one.detach() for one in socket.socketpair()]
    for each in made:
        stack.callback(os.close, each)
    return made
