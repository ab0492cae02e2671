"""Fuzzes everything that reads what a peer has sent: decoders, what is done with what they give, and a live control port.

Inputs are valid ones that were damaged: bytes flipped, cut, doubled, spliced; or their values replaced, one by one, by
boundary values, by other types, by much. Each is a function of the seed, its target and its number, so a failure names one
input. A target may refuse an input with the errors that its decoder documents; anything else is a finding: another error,
an input that takes longer than `SLOW_S`, memory that grows::

    python -m harness.fuzz --inputs 1000000 --seed 1 --jobs 2
    python -m harness.fuzz --only table:8123 --seed 1
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import zmq

from disagg.backends.base import BackendOptions
from disagg.backends.endpoint import decode_endpoint
from disagg.backends.local import LocalBackend
from disagg.commands.cases.instructions import (
    AnyCommand,
    AskHealth,
    Block,
    Check,
    Clear,
    Direction,
    Fill,
    Item,
    Move,
    Peer,
    Start,
)
from disagg.commands.cases.sides import Side
from disagg.core.errors import DisaggError, LayoutError, PeerUnreachable, RemoteProtocolError
from disagg.core.rows import Pages
from disagg.layout.agreement import Agreement, LocalRank, ModelId, decode_placements, encode_placements
from disagg.layout.placement import Component
from disagg.manager import KVManager
from disagg.models import load_model
from disagg.models.pools import allocate
from disagg.protocol.messages import (
    Abort,
    AnyMessage,
    Busy,
    Complete,
    Credit,
    Drained,
    Filled,
    Goodbye,
    Heartbeat,
    Hello,
    Member,
    Message,
    Outcome,
    PagesRow,
    Part,
    Reject,
    RequestMessage,
    Reserve,
    RingGrant,
    SlotRow,
    Welcome,
    Written,
    decode,
    encode,
    unpack_rows,
)
from disagg.protocol.peer_state import Identity
from disagg.protocol.peers import PeerTable
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Limits, PeerRank, RequestKey

SLOW_S = 5.0
HANG_S = 120.0
MAX_GROWTH_MIB = 512
BOUNDARIES = (0, 1, -1, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "kv",
    "\x00",
    "ü" * 300,
    b"",
    b"\xff" * 16,
    [],
    {},
    [[]],
    [0] * 300,
)

KEY = RequestKey(bytes(range(16)), 3)
IDS: Mapping[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}
PEER = PeerRank("peer", 0)


class Finding(AssertionError):
    """An input that was not refused as it should be."""


# ---------------------------------------------------------------------------------------------------------- what is valid


@functools.cache
def components(model: str, side: str, rank: int) -> tuple[LocalRank, tuple[Component, ...]]:
    """A rank of a model, with memory."""
    parsed = Side.parse(side)
    topology = parsed.topology(rank)
    made = tuple(allocate(load_model(model, num_layers=4), topology, parsed.pool_shape(4, num_slots=2)).components)
    return LocalRank.of(topology, made), made


RANKS = (("tiny", "tp=2"), ("tiny", "tp=1,page=4,layout=hnd"), ("qwen3-next-80b", "tp=2"), ("tiny", "tp=2,cp=2"))
RESERVE = Reserve(
    **IDS,
    nonce=7,
    source_group=0,
    destination_group=0,
    rows={"kv": PagesRow(b"\x01\x00\x00\x00\xff\xff\xff\xff", 16), "ssm": SlotRow(9)},
    need={"kv": (16, 40), "ssm": (0, 1)},
)
COMPLETE = Complete(
    **IDS, nonce=7, written=(Written(0, "kv", None, 16, 40), Written(1, "ssm", (3, 4), 0, 40)), packed=((0, 4096),)
)
FORETOLD = Complete(**IDS, nonce=7, final=False, written=(Written(0, "kv", None, 16, 40),), word=(5, 517))
FILLED = Complete(**IDS, nonce=7, final=False, filled=(Filled(3, 9, 1, (Part("kv", (0, 1), None, 16, 40),), 4096, 512, 4096),))


def messages(local: LocalRank, placements: bytes = b"", endpoint: bytes = b"", plans: bytes = b"") -> list[Message]:
    """One or more of every kind."""
    said: dict[str, Any] = {"version": 1, "instance": "peer", "rank": 0, "epoch": 5, "model": "m", "revision": "r"}
    table = local.table.encode()
    return [
        Hello(**said, table=table, address="tcp://127.0.0.1:1", generation=1),
        Welcome(
            **said,
            table=table,
            plans=plans,
            members=(Member(0, "tcp://127.0.0.1:1", 5), Member(1, "tcp://127.0.0.1:2", 6)),
            placements=placements,
            backend="local",
            endpoint=endpoint,
            ring=RingGrant(4096, 512, 8),
        ),
        Reject(field="revision", reason="expected 'r', found 's'", hello_first=True),
        Reject(field="hello", reason="no"),
        RESERVE,
        COMPLETE,
        FILLED,
        FORETOLD,
        Busy(reason="full", retry_after_s=0.5, **IDS, nonce=7),
        Busy(reason="starting", retry_after_s=1.0),
        Abort(**IDS, nonce=7, reason="client gone", from_writer=True),
        Abort(**IDS, nonce=7, reason="client gone"),
        Drained(**IDS, nonce=7, reason="broken wire"),
        Outcome(**IDS, nonce=7, ok=True),
        Credit(ring=4096, slots=((0, 9), (5, 10))),
        Heartbeat(epoch=5),
        Goodbye(reason="closing"),
    ]


def commands() -> list[msgspec.Struct]:
    item = Item(1, 40, {"kv": (0, 40)}, {"kv": (1, 2, 3)}, request_id=KEY.request_id)
    return [
        Peer("decode-0", "tcp://127.0.0.1:1"),
        Fill((item,)),
        Clear(),
        Start(Direction.SEND, "decode-0", (item, item), window=2, deadline_s=1.0),
        Check((item,)),
        Move("decode-0", (Block(0, 0, 4096, 512),), timeout_s=1.0),
        AskHealth(),
    ]


# -------------------------------------------------------------------------------------------------------------- damaging


def damage(rng: random.Random, valid: Sequence[bytes]) -> bytes:
    """A valid input made invalid, mostly."""
    data = rng.choice(valid)
    way = rng.random()
    if way < 0.45:
        try:
            tree = msgpack.unpackb(data, strict_map_key=False, raw=False, max_ext_len=0)
        except (ValueError, TypeError, msgpack.UnpackException):
            return damage_bytes(rng, data, valid)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            tree = damage_tree(rng, tree)
        try:
            return bytes(msgpack.packb(tree, use_bin_type=True))
        except (ValueError, TypeError, OverflowError):
            return damage_bytes(rng, data, valid)
    if way < 0.9:
        return damage_bytes(rng, data, valid)
    return rng.randbytes(rng.choice((0, 1, 3, 17, 200)))


def damage_bytes(rng: random.Random, data: bytes, valid: Sequence[bytes]) -> bytes:
    """A few bytes changed, cut out, doubled, or taken from elsewhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if found:
                found[min(at, len(found) - 1)] ^= 1 << rng.randrange(8)
            case 1 if found:
                found[min(at, len(found) - 1)] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xD9, 0xDD, 0xDF, 0xFF))
            case 2:
                del found[at : at + rng.choice((1, 4, 64))]
            case 3:
                found[at:at] = found[at : at + rng.choice((1, 8, 64))]
            case 4:
                other = rng.choice(valid)
                start = rng.randrange(len(other) + 1)
                found[at:at] = other[start : start + rng.choice((1, 8, 64))]
            case _:
                found[at:at] = rng.randbytes(rng.choice((1, 4)))
    return bytes(found)


def damage_tree(rng: random.Random, tree: Any) -> Any:
    """One value somewhere in the tree is another."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        changed = dict(tree)
        match rng.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(("x", "type", key))] = rng.choice(ODD)
            case _:
                changed[key] = damage_tree(rng, tree[key])
        return changed
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        match rng.randrange(8):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return tree[:at] + [tree[at]] * rng.choice((2, 50)) + tree[at:]
            case _:
                return [*tree[:at], damage_tree(rng, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, bytes) and len(tree) > 20 and rng.random() < 0.8:
        return damage(rng, [tree])
    if isinstance(tree, int) and rng.random() < 0.8:
        return rng.choice((*BOUNDARIES, tree + 1, max(tree - 1, 0)))
    return rng.choice((*ODD, *BOUNDARIES))


# --------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """Something that reads bytes: valid ones, and how it reads them; it may raise the errors in `refusals`."""

    valid: Sequence[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]


class Reader:
    """One rank, that has agreed with a peer and has requests open with it, for as long as inputs leave them open."""

    def __init__(self) -> None:
        self.local, self.own = components("tiny", "tp=2", 0)
        self.theirs, theirs = components("tiny", "tp=1,page=4,layout=hnd", 0)
        self.placements = encode_placements(theirs)
        self.agreement = Agreement.between(self.local, self.theirs.table.encode())
        self.engine = LocalBackend(BackendOptions())
        self.engine.register([region for component in theirs for region in component.regions])
        self.endpoint = self.engine.endpoint()
        self.here = LocalBackend(BackendOptions())
        self.here.register([region for component in self.own for region in component.regions])
        self.regions = decode_endpoint("local", self.endpoint)[1]
        self._now = 0.0
        self._restart()

    def _restart(self) -> None:
        self._turns = 0
        self.sessions = Sessions(limits=Limits(max_parked_reserves=64, max_tombstones=64))
        self.links = PeerTable(
            Identity("me", 0, 1, 9, "m", "r", self.local.table.encode(), "tcp://127.0.0.1:9", leader=True),
            leader=None,
            accept_hello=self._admit,
            validate_welcome=self._examine,
        )
        self.links.add_peer("peer", "tcp://127.0.0.1:1", None, self._now)

    def _admit(self, hello: Hello, members: Callable[[], tuple[Member, ...]]) -> Welcome:
        Agreement.between(self.local, hello.table)
        welcome = messages(self.local)[1]
        assert isinstance(welcome, Welcome)
        return msgspec.structs.replace(welcome, members=members())

    def _examine(self, welcome: Welcome) -> int:
        agreement = Agreement.between(self.local, welcome.table)
        agreement.check_digests(welcome.plans)
        return agreement.num_ranks

    def message(self, data: bytes) -> None:
        """A message, and the rows in it; what was read can be written again."""
        message = decode(data)
        if decode(encode(message)) != message and "nan" not in repr(message):
            raise Finding(f"{message} does not come back as it was")
        if isinstance(message, Reserve):
            for row in message.rows.values():
                unpack_rows(row)

    def live(self, data: bytes) -> None:
        """A message of an accepted peer, taken by connections and by requests that wait for such."""
        message: AnyMessage = decode(data)
        self._turns += 1
        self._now += 0.01
        if self._turns % 50 == 1:
            self._restart()
            self._open(RequestKey(KEY.request_id, self._turns % 4))
            self._open(KEY)
        self.links.on_inbound(b"c", "", message, self._now)
        self.links.on_reply("tcp://127.0.0.1:1", message, self._now)
        if isinstance(message, RequestMessage | Busy):
            if isinstance(message, Complete):
                self.sessions.receives.begin_unpack(PEER, message)
            self.sessions.on_message(PEER, message, self._now)
        self.links.tick(self._now)
        self.sessions.tick(self._now)
        self.links.effects.clear()
        self.sessions.effects.clear()

    def _open(self, key: RequestKey) -> None:
        rows = {"kv": Pages(range(4))}  # type: ignore[arg-type]
        needed = {"kv": (0, 40)}
        times: dict[str, Any] = {"now": self._now, "deadline": self._now + 1.0}
        expected = {0: {"kv": ((0, 1), (0, 40)), "ssm": ((3, 4), (0, 1))}}
        try:
            self.sessions.receives.open(
                key, peer="peer", nonce=7, source_group=0, rows=rows, need=needed | {"ssm": (0, 1)}, expected=expected, **times
            )
            sent = self.sessions.sends.open(key, peer="peer", expected=frozenset((0,)), peer_group_size=1, **times)
            self.sessions.sends.send(sent, Chunk(0, rows, (0, 40), None), self._now)
        except DisaggError:  # it is open, or has ended
            return

    def table(self, data: bytes) -> None:
        """A layout table, and the agreement with whoever has it."""
        Agreement.between(self.local, data)

    def memory(self, data: bytes) -> None:
        """Where a peer's rows lie, and the plans towards them."""
        self.agreement.plans(self.local, 0, decode_placements(data), self.regions, peer="peer/0")

    def engines(self, data: bytes) -> None:
        """A peer's engine."""
        decode_endpoint("local", data)
        self.here.disconnect(self.here.connect(data, epoch=1))


def targets() -> dict[str, Target]:
    """Everything that is fuzzed, by name."""
    reader = Reader()
    tables = [components(model, side, 0)[0].table.encode() for model, side in RANKS]
    digests = reader.agreement.digests
    plans = digests[32:] + digests[:32]  # as the peer sees them
    said = [encode(message) for message in messages(reader.theirs, reader.placements, reader.endpoint, plans)]
    decoder, orders = msgspec.msgpack.Decoder(AnyCommand), [msgspec.msgpack.encode(command) for command in commands()]
    return {
        "message": Target(said, reader.message, (RemoteProtocolError,)),
        "live": Target(said, reader.live, (RemoteProtocolError,)),
        "table": Target(tables, reader.table, (LayoutError,)),
        "memory": Target([reader.placements], reader.memory, (LayoutError, RemoteProtocolError)),
        "endpoint": Target([reader.endpoint], reader.engines, (RemoteProtocolError, PeerUnreachable)),
        "command": Target(orders, decoder.decode, (msgspec.DecodeError, UnicodeDecodeError)),
    }


SHARES = {"message": 0.34, "live": 0.3, "table": 0.1, "memory": 0.1, "endpoint": 0.08, "command": 0.08}
"""How many of all inputs each target gets."""


@dataclass(frozen=True)
class Result:
    """What one target made of its inputs."""

    target: str
    inputs: int
    accepted: int
    seconds: float
    slowest_ms: float
    grown_mib: float


def _reads(target: Target, data: bytes) -> bool:
    try:
        target.read(data)
    except target.refusals:
        return False
    return True


def fuzz(name: str, numbers: Iterable[int], *, seed: int) -> Result:
    """Feed a target the inputs of these numbers. Raises `Finding` naming the first that it does not take well."""
    target = targets()[name]
    if not any(_reads(target, valid) for valid in target.valid):
        raise Finding(f"{name}: none of the valid inputs is accepted")
    inputs = accepted = 0
    slowest, began = 0.0, time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        data = damage(random.Random(f"{seed}:{name}:{number}"), target.valid)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        started = time.perf_counter()
        try:
            accepted += _reads(target, data)
        except Exception as error:
            raise Finding(f"{name}:{number} of seed {seed}, {len(data)} bytes: {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - started
        inputs, slowest = inputs + 1, max(slowest, seconds)
        if seconds > SLOW_S:
            raise Finding(f"{name}:{number} of seed {seed}, {len(data)} bytes: took {seconds:.1f} s")
    faulthandler.cancel_dump_traceback_later()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MAX_GROWTH_MIB:
        raise Finding(f"{name}: memory has grown by {grown:.0f} MiB over {inputs} inputs")
    return Result(name, inputs, accepted, time.perf_counter() - began, slowest * 1000, grown)


@contextmanager
def abused_rank() -> Iterator[tuple[KVManager, bytes]]:
    """A rank with an open control port that knows a peer, and that peer's hello."""
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
    """Send damaged messages to a live control port over a connection whose hello is accepted, again and again, and over one
    without. Raises `Finding` where a thread dies, or where it no longer answers.
    """
    reader, rng, began = Reader(), random.Random(f"{seed}:port"), time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    valid = [encode(message) for message in messages(reader.theirs, reader.placements, reader.endpoint)]
    accepted, slowest, context = 0, 0.0, zmq.Context()
    with abused_rank() as (manager, hello), context.socket(zmq.DEALER) as dealer, context.socket(zmq.DEALER) as stranger:
        for opened in (dealer, stranger):
            opened.linger = 0
            opened.connect(manager.address)
        for start in range(0, inputs, 1000):
            for number in range(start, min(start + 1000, inputs)):
                (stranger if number % 10 == 9 else dealer).send(damage(rng, [hello, *valid]))
            said = time.perf_counter()
            while not _is_welcome(dealer, hello):
                if time.perf_counter() - said > HANG_S:
                    raise Finding(f"port, about {start} of seed {seed}: no answer; {manager.health().problem or 'it hangs'}")
            accepted, slowest = accepted + 1, max(slowest, time.perf_counter() - said)
            while stranger.poll(0):
                stranger.recv()
        if not manager.health().ok:
            raise Finding(f"port, seed {seed}: {manager.health().problem}")
    context.term()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Result("port", inputs, accepted, time.perf_counter() - began, slowest * 1000, grown)


def _is_welcome(dealer: zmq.Socket[bytes], hello: bytes) -> bool:
    """SendTo hello, and whether it is answered within a second; what was answered before is thrown away."""
    while dealer.poll(0):
        dealer.recv()
    dealer.send(hello)
    until = time.perf_counter() + 1.0
    while (left := until - time.perf_counter()) > 0:
        if dealer.poll(int(left * 1000)) and isinstance(decode(dealer.recv()), Welcome):
            return True
    return False


def main(arguments: list[str] | None = None) -> int:
    """Fuzz everything; a finding ends it with its name."""
    parser = argparse.ArgumentParser(prog="python -m harness.fuzz", description="Damaged inputs for every decoder")
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="for all targets together")
    parser.add_argument("--port", type=int, default=10_000, metavar="N", help="as many more for a live control port")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="the one input that a finding has named")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the targets")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.only:
        name, _, number = options.only.partition(":")
        fuzz(name, [int(number)], seed=options.seed)
        return 0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        counts = {name: range(int(options.inputs * share)) for name, share in SHARES.items()}
        jobs = [pool.submit(fuzz, name, numbers, seed=options.seed) for name, numbers in counts.items()]
        results = [job.result() for job in jobs]
    if options.port:
        results.append(bombard(options.port, seed=options.seed))
    sys.stdout.write(f"{'target':<10}{'inputs':>9}{'accepted':>10}{'seconds':>9}{'slowest ms':>12}{'grown MiB':>11}\n")
    for r in results:
        sys.stdout.write(
            f"{r.target:<10}{r.inputs:>9}{r.accepted:>10}{r.seconds:>9.1f}{r.slowest_ms:>12.1f}{r.grown_mib:>11.1f}\n"
        )
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "targets": [asdict(r) for r in results]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
