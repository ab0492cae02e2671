"""The readers that are fuzzed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from disagg.backends.base import BackendOptions
from disagg.backends.endpoint import decode_endpoint
from disagg.backends.local import LocalBackend
from disagg.commands.cases.instructions import AnyCommand
from disagg.core.errors import DisaggError, LayoutError, PeerUnreachable, RemoteProtocolError
from disagg.core.rows import Pages
from disagg.layout.agreement import Agreement, decode_placements, encode_placements
from disagg.protocol.messages import (
    AnyMessage,
    Borrow,
    Busy,
    Hello,
    Lend,
    Member,
    RequestMessage,
    Reserve,
    Welcome,
    decode,
    encode,
    unpack_rows,
)
from disagg.protocol.peer_effects import Identity
from disagg.protocol.peers import PeerTable
from disagg.protocol.sessions import Sessions
from disagg.protocol.types import Chunk, Limits, PeerRank, RequestKey
from harness.fuzz.samples import KEY, RANKS, commands, components, messages

PEER = PeerRank("peer", 0)


class Finding(AssertionError):
    """An input that was neither accepted nor refused as documented."""


@dataclass(frozen=True)
class Target:
    """A reader of bytes: valid inputs, and the function that reads them, which may raise the errors in `refusals`."""

    valid: Sequence[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]


class Reader:
    """A rank that has agreed with a peer, and has requests open with it unless an input ended them."""

    def __init__(self) -> None:
        self.local, own = components("tiny", "tp=2", 0)
        self.peer, theirs = components("tiny", "tp=1,page=4,layout=hnd", 0)
        self.placements = encode_placements(theirs)
        self.agreement = Agreement.between(self.local, self.peer.table.encode())
        self.peer_engine = LocalBackend(BackendOptions())
        self.peer_engine.register([region for component in theirs for region in component.regions])
        self.endpoint = self.peer_engine.endpoint()
        self.engine = LocalBackend(BackendOptions())
        self.engine.register([region for component in own for region in component.regions])
        self.regions = decode_endpoint("local", self.endpoint)[1]
        self._now = 0.0
        self._restart()

    def _restart(self) -> None:
        self._num_inputs = 0
        self.sessions = Sessions(limits=Limits(max_parked_reserves=64, max_tombstones=64))
        self.peers = PeerTable(
            Identity("me", 0, 1, 9, "m", "r", self.local.table.encode(), "tcp://127.0.0.1:9", leader=True),
            leader=None,
            accept_hello=self._accept_hello,
            validate_welcome=self._validate_welcome,
        )
        self.peers.add_peer("peer", "tcp://127.0.0.1:1", None, self._now)

    def _accept_hello(self, hello: Hello, members: Callable[[], tuple[Member, ...]]) -> Welcome:
        Agreement.between(self.local, hello.table)
        welcome = messages(self.local)[1]
        assert isinstance(welcome, Welcome)
        return msgspec.structs.replace(welcome, members=members())

    def _validate_welcome(self, welcome: Welcome) -> tuple[int, frozenset[int]]:
        agreement = Agreement.between(self.local, welcome.table)
        agreement.check_digests(welcome.plans)
        return agreement.num_ranks, agreement.partners(self.local)

    def message(self, data: bytes) -> None:
        """Decode a message and the rows in it. A decoded message must be the same after encoding and decoding."""
        message = decode(data)
        if decode(encode(message)) != message and "nan" not in repr(message):
            raise Finding(f"{message} changed when encoded and decoded")
        if isinstance(message, Reserve):
            for row in message.rows.values():
                unpack_rows(row)

    def live(self, data: bytes) -> None:
        """Give a message to the table of peers, and to requests with an accepted peer."""
        message: AnyMessage = decode(data)
        self._num_inputs += 1
        self._now += 0.01
        if self._num_inputs % 50 == 1:
            self._restart()
            self._open(RequestKey(KEY.request_id, self._num_inputs % 4))
            self._open(KEY)
        self.peers.on_inbound(b"c", "", message, self._now)
        self.peers.on_reply(0, message, self._now)
        if isinstance(message, RequestMessage | Borrow | Busy | Lend):
            self.sessions.on_message(PEER, message, self._now)
        self.peers.tick(self._now)
        self.sessions.tick(self._now)
        self.peers.effects.clear()
        self.sessions.effects.clear()

    def _open(self, key: RequestKey) -> None:
        rows = {"kv": Pages(range(4))}
        needed = {"kv": (0, 40)}
        times: dict[str, Any] = {"now": self._now, "deadline": self._now + 1.0}
        expected = {0: {"kv": ((0, 1), (0, 40)), "ssm": ((3, 4), (0, 1))}}
        try:
            self.sessions.receives.open(
                key, peer="peer", nonce=7, source_group=0, rows=rows, need=needed | {"ssm": (0, 1)}, expected=expected, **times
            )
            sent = self.sessions.sends.open(key, peer="peer", expected=frozenset((0,)), peer_group_size=1, **times)
            self.sessions.sends.send(sent, Chunk(0, rows, (0, 40), None), self._now)
        except DisaggError:  # already open, or ended
            return

    def table(self, data: bytes) -> None:
        """Agree with a peer that has this layout table."""
        Agreement.between(self.local, data)

    def memory(self, data: bytes) -> None:
        """Plan transfers to a peer with these placements."""
        self.agreement.plans(self.local, 0, decode_placements(data), self.regions, peer="peer/0")

    def endpoint_bytes(self, data: bytes) -> None:
        """Connect to a peer's engine."""
        decode_endpoint("local", data)
        self.engine.disconnect(self.engine.connect(data, epoch=1))


def targets() -> dict[str, Target]:
    """Every target, by name."""
    reader = Reader()
    tables = [components(model, side, 0)[0].table.encode() for model, side in RANKS]
    digests = reader.agreement.digests
    plans = digests[32:] + digests[:32]  # in the peer's order
    encoded = [encode(message) for message in messages(reader.peer, reader.placements, reader.endpoint, plans)]
    decoder, sent = msgspec.msgpack.Decoder(AnyCommand), [msgspec.msgpack.encode(command) for command in commands()]
    return {
        "message": Target(encoded, reader.message, (RemoteProtocolError,)),
        "live": Target(encoded, reader.live, (RemoteProtocolError,)),
        "table": Target(tables, reader.table, (LayoutError,)),
        "memory": Target([reader.placements], reader.memory, (LayoutError, RemoteProtocolError)),
        "endpoint": Target([reader.endpoint], reader.endpoint_bytes, (RemoteProtocolError, PeerUnreachable)),
        "command": Target(sent, decoder.decode, (msgspec.DecodeError, UnicodeDecodeError)),
    }
