"""The control messages as typed values, and their bytes: MessagePack maps with a `type` tag.

docs/protocol.md has the rules of evolution. Decoding is total: any bytes give a message or `RemoteProtocolError`, within
bounds on size and nesting.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, get_args

import msgspec
import numpy as np

from disagg.core.errors import RemoteProtocolError
from disagg.core.rows import MAX_NAME, MAX_TOKEN, Pages, Rows, Slot

PROTOCOL_VERSION = 7

MAX_MESSAGE_NBYTES = 64 << 20
"""Fits a hello's table of thousands of ranks, or a reserve of a few million pages."""
MAX_HELLO_NBYTES = 8 << 20
MAX_PLAIN_NBYTES = 1 << 20
"""The limit on messages that hold values, not byte strings: each byte may become an object."""
MAX_ITEMS, MAX_COMPONENTS = 1 << 16, 1 << 12
MAX_PAYLOAD_NBYTES = 1 << 16
MAX_SECONDS = 3600

RequestId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
AnyEpoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nonce = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD_NBYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
TokenRange = tuple[Tokens, Tokens]
_T = TypeVar("_T")
Many = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ITEMS)]
ByComponent = Annotated[dict[Name, _T], msgspec.Meta(max_length=MAX_COMPONENTS)]
Verify = Literal["off", "full"]


class Message(msgspec.Struct, frozen=True, tag_field="type", kw_only=True, omit_defaults=True):
    """Base of all messages. A field at its default is left out."""


class Member(msgspec.Struct, frozen=True):
    """A rank of an instance and the address of its control channel."""

    rank: Small
    address: Name
    epoch: Epoch


SlotAddress = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Lending(msgspec.Struct, frozen=True):
    """A rank lends its writers staging slots of `slot_nbytes`. Loans up to number `first` are of earlier connections."""

    slot_nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    first: Nonce


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """A rank introduces itself on a connection that it opened. `dial` numbers the connections of its process; the highest
    wins. `generation` counts the connections to the peer's process at `peer_epoch` (0: none yet) that either side gave up.
    A rank at another epoch welcomes the sender, but takes nothing that follows. Ranks of the same instance send `address`
    to their leader. `leader` is the address of the instance's leader, for peers that admit unknown instances. `again`: no
    connection of the receiver is open, so the sender waits for its hello on one. `to` is the instance and rank that the
    sender expects at the address; any other rank rejects the hello. `packs`: the sender can fill slots.
    """

    version: int
    instance: Name
    rank: Small
    epoch: Epoch
    model: Reason
    revision: Reason
    table: bytes
    address: Name | None = None
    generation: Small = 0
    peer_epoch: AnyEpoch = 0
    dial: Small = 0
    leader: Name | None = None
    again: bool = False
    to: tuple[Name, Small] | None = None
    packs: bool = True


class Welcome(Message, frozen=True, tag="welcome", kw_only=True):
    """The answer to an accepted hello of this `generation`: this rank's layout table, memory, engine endpoint and lent slots.
    Unless `direct`, the peer may write only lent slots, no rows.
    """

    version: int
    instance: Name
    rank: Small
    epoch: Epoch
    model: Reason
    revision: Reason
    table: bytes
    plans: bytes
    members: Many[Member]
    placements: bytes
    backend: Name
    endpoint: bytes
    lending: Lending | None = None
    direct: bool = True
    generation: Small = 0


class Writing(Message, frozen=True, tag="writing", kw_only=True):
    """The engine with which this rank writes to the receiver at this epoch and generation. Sent before the first write, and
    again after each welcome: a message that comes before a new connection's hello is ignored.
    """

    engine: Name
    epoch: Epoch
    generation: Small = 0


class Renew(Message, frozen=True, tag="renew", kw_only=True):
    """The sender's last hello on this connection still holds, for the process at `epoch` (0: any). Sent at intervals while
    nothing changes, and after the welcome to a hello without `peer_epoch`. The answer is another `renew`, or a `reject` that
    asks for a hello: the answer to a hello would differ now, or it is for another process.
    """

    epoch: AnyEpoch = 0


class Reject(Message, frozen=True, tag="reject", kw_only=True):
    """A refusal: the field, both values, and the reason. `hello_first` asks for a new hello on this connection. `final`: the
    reason holds until one of the two processes restarts.
    """

    field: Name
    reason: Reason
    hello_first: bool = False
    final: bool = False


class PagesRow(msgspec.Struct, frozen=True, tag="pages", tag_field="kind"):
    """`Pages` on the wire: ids as little-endian int32."""

    ids: bytes
    first_token: Tokens


class SlotRow(msgspec.Struct, frozen=True, tag="slot", tag_field="kind"):
    """`Slot` on the wire."""

    id: Small


class RequestMessage(Message, frozen=True, kw_only=True):
    """Base of the messages about one attempt of a request. `nonce` is that of its reserve."""

    request_id: RequestId
    attempt: Small
    nonce: Nonce


class Reserve(RequestMessage, frozen=True, tag="reserve", kw_only=True):
    """The receiver's rows, and the tokens `[start, stop)` of the request that it needs of each component. `verify`: whether
    the writer sends checksums. `epoch` is that of the receiver's process (0: not given), `trace` its span's W3C `traceparent`.
    """

    source_group: Small
    destination_group: Small
    rows: ByComponent[PagesRow | SlotRow]
    need: ByComponent[TokenRange]
    verify: Verify = "off"
    epoch: AnyEpoch = 0
    trace: Annotated[str, msgspec.Meta(max_length=128)] = ""


class Decline(RequestMessage, frozen=True, tag="decline", kw_only=True):
    """The receiver needs nothing from this rank, which may not know the receiver yet. Sent again until a
    `drained` answers it.
    """

    source_group: Small
    destination_group: Small


class Wanted(RequestMessage, frozen=True, tag="wanted", kw_only=True):
    """The receiver still wants the request, but cannot reserve it yet. Sent with every `KVManager.want`, and not answered."""

    source_group: Small


class Busy(Message, frozen=True, tag="busy", kw_only=True):
    """No room now: the hello or the reserve may be sent again after `retry_after_s`."""

    reason: Reason
    retry_after_s: Seconds
    request_id: RequestId | None = None
    attempt: Small = 0
    nonce: Nonce = 0


class Written(msgspec.Struct, frozen=True, array_like=True):
    """What the writer has sent of its share of a component, in `layers` (`None`: all) and tokens `[start, stop)`."""

    chunk: Small
    component: Name
    layers: Many[Small] | None
    start: Tokens
    stop: Tokens


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a packed stream: span classes of a component's plan, in `layers` (`None`: all) and tokens `[start, stop)`."""

    component: Name
    spans: Many[Small]
    layers: Many[Small] | None
    start: Tokens
    stop: Tokens


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """The slot of a loan holds `nbytes` of a chunk's packed stream, from `offset` on."""

    loan: Nonce
    chunk: Small
    parts: Many[Part]
    offset: Tokens
    nbytes: Small


class PartialChecksums(msgspec.Struct, frozen=True, array_like=True):
    """Checksums modulo 2**64 of what a writer has sent of a component, as little-endian uint64: one per layer that the
    receiver's rank takes, ascending, and one per checked page of its need, in order. Those of parts add up.
    """

    component: Name
    by_layer: bytes
    by_page: bytes


class SlotsFilled(RequestMessage, frozen=True, tag="slots_filled", kw_only=True):
    """Slots that hold bytes of this attempt. Each is resent until a `lend` no longer lists its loan."""

    slots: Many[Filled]


class Complete(RequestMessage, frozen=True, tag="complete", kw_only=True):
    """Everything that the writer sends for this attempt has landed; nothing is in flight. `packed`: the bytes of each chunk
    that went through slots; `sums`: the requested checksums; `took`: seconds of the last transfer, by phase.
    """

    written: Many[Written] = ()
    payload: Payload = b""
    packed: Many[tuple[Small, Tokens]] = ()
    sums: Many[PartialChecksums] = ()
    took: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=4)] = ()


class Abort(RequestMessage, frozen=True, tag="abort", kw_only=True):
    """Either side ends the attempt and gives the first cause. The writer answers with `drained`, at once or later."""

    reason: Reason
    from_writer: bool = False


class Drained(RequestMessage, frozen=True, tag="drained", kw_only=True):
    """The writer's proof that no write of this attempt can land in rows any more, and why it ended the attempt."""

    reason: Reason = ""


class Outcome(RequestMessage, frozen=True, tag="outcome", kw_only=True):
    """The receiver's verdict for its rank."""

    ok: bool
    reason: Reason = ""


class Lend(Message, frozen=True, tag="lend", kw_only=True):
    """The writer's loans whose slots are not filled, as far as the receiver knows: number and address of each. `newest` is the
    number of the last loan; an older one that is not listed has been filled or returned. Loans to earlier connections of
    the writer's process are listed too, until it returns them: it does not write to their slots any more.
    """

    loans: Many[tuple[Nonce, SlotAddress]]
    newest: Nonce


class Borrow(Message, frozen=True, tag="borrow", kw_only=True):
    """The writer could fill `wanted` more slots. `seen` is the newest loan that it knows. It does not use `returned` loans."""

    wanted: Small
    seen: Nonce
    returned: Many[Nonce] = ()


class Goodbye(Message, frozen=True, tag="goodbye", kw_only=True):
    """The sender closes for this reason."""

    reason: Reason


AnyMessage = (
    Hello
    | Welcome
    | Renew
    | Writing
    | Reject
    | Reserve
    | Decline
    | Wanted
    | Busy
    | SlotsFilled
    | Complete
    | Abort
    | Drained
    | Outcome
    | Lend
    | Borrow
    | Goodbye
)

_ENCODER = msgspec.msgpack.Encoder()


class _Tag(msgspec.Struct):
    type: str


_TAG_DECODER = msgspec.msgpack.Decoder(_Tag)
_LARGE = {"hello": MAX_HELLO_NBYTES, "welcome": MAX_MESSAGE_NBYTES, "reserve": MAX_MESSAGE_NBYTES, "complete": 16 << 20}
"""Limits on messages whose bulk is byte strings: tables, page ids, checksums."""
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_LARGE_DECODERS: dict[str, msgspec.msgpack.Decoder[AnyMessage]] = {
    tag: msgspec.msgpack.Decoder(kind) for kind in get_args(AnyMessage) if (tag := kind.__struct_config__.tag) in _LARGE
}


MESSAGE_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyMessage))


def message_type(message: Message) -> str:
    return str(message.__struct_config__.tag)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes, *, most: int = MAX_MESSAGE_NBYTES) -> AnyMessage:
    """Decode a message of at most `most` bytes. Raises `RemoteProtocolError` that names the path of the wrong field."""
    if len(data) > most:
        raise RemoteProtocolError(f"message of {len(data)} bytes: expected {most} at most")
    try:
        if len(data) > MAX_PLAIN_NBYTES:
            kind = _TAG_DECODER.decode(data).type
            limit = _LARGE.get(kind, MAX_PLAIN_NBYTES)
            if len(data) > limit:
                raise RemoteProtocolError(f"message {kind[:32]!r} of {len(data)} bytes: expected {limit} at most")
            return _LARGE_DECODERS[kind].decode(data)  # not as what another type in it says
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"message of {len(data)} bytes cannot be read: {type(error).__name__}: {error}") from error


_IDS = np.dtype("<i4")


def pack_rows(rows: Rows) -> PagesRow | SlotRow:
    if isinstance(rows, Slot):
        return SlotRow(rows.id)
    return PagesRow(rows.ids.astype(_IDS).tobytes(), rows.first_token)


def unpack_rows(row: PagesRow | SlotRow) -> Rows:
    """Raises `RemoteProtocolError` for bytes that are not page ids."""
    if isinstance(row, SlotRow):
        return Slot(row.id)
    if len(row.ids) % 4:
        raise RemoteProtocolError(f"reserve: {len(row.ids)} bytes of page ids: expected four for each")
    return Pages.of_ids(np.frombuffer(row.ids, dtype=_IDS), row.first_token)
