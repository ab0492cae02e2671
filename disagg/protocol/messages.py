"""The control messages, as typed values, and their bytes.

MessagePack maps with a `type` tag. Evolution: a new field has a default; a field is never renamed, retyped or reused;
unknown fields are ignored; a change that an old peer cannot ignore raises `PROTOCOL_VERSION`. Decoding is total: any
bytes give a message or `RemoteProtocolError`, within bounds on size and nesting.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np

from disagg.core.errors import RemoteProtocolError
from disagg.core.rows import MAX_NAME, MAX_TOKEN, Pages, Rows, Slot

PROTOCOL_VERSION = 1

MAX_MESSAGE_NBYTES = 64 << 20
"""A hello's table of thousands of ranks, or a reserve of a few million pages, fits."""
MAX_ITEMS = 1 << 16
MAX_PAYLOAD_NBYTES = 1 << 16

RequestId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nonce = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD_NBYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
TokenRange = tuple[Tokens, Tokens]
_T = TypeVar("_T")
Many = Annotated[tuple[_T, ...], msgspec.Meta(max_length=MAX_ITEMS)]
Named = Annotated[dict[Name, _T], msgspec.Meta(max_length=MAX_ITEMS)]
Verify = Literal["off", "sample", "full"]
"""Of how much the two sides compare sums."""


class Message(msgspec.Struct, frozen=True, tag_field="type", kw_only=True, omit_defaults=True):
    """Base of all messages; the tag is the class's name in lower case. A field at its default is left out."""


class Member(msgspec.Struct, frozen=True):
    """One rank of an instance and the address of its control channel."""

    rank: Small
    address: Name
    epoch: Epoch


RingAddress = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class RingGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ring in the memory of who grants it: `num_slots` slots of `slot_nbytes` from `address`. The writer numbers its uses of
    slots from `first` on: what is said of another grant, late, is then known as such on both sides.
    """

    address: RingAddress
    slot_nbytes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    first: Nonce = 0


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """A rank introduces itself on a connection that it opened, `dial` others of its process before it; one that was dialled
    later stands. Siblings say their address to their leader.
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
    dial: Small = 0


class Welcome(Message, frozen=True, tag="welcome", kw_only=True):
    """The answer to an accepted hello of that `generation`: who is here, what it owns, where its memory is, and how to reach
    its engine.
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
    ring: RingGrant | None = None
    generation: Small = 0


class Reject(Message, frozen=True, tag="reject", kw_only=True):
    """A refusal: the field, both values, and why. `hello_first` asks for a new hello on this connection."""

    field: Name
    reason: Reason
    hello_first: bool = False


class PagesRow(msgspec.Struct, frozen=True, tag="pages", tag_field="kind"):
    """`Pages` on the wire: ids as little-endian int32."""

    ids: bytes
    first_token: Tokens


class SlotRow(msgspec.Struct, frozen=True, tag="slot", tag_field="kind"):
    """`Slot` on the wire."""

    id: Small


class RequestMessage(Message, frozen=True, kw_only=True):
    """Base of what concerns one attempt of one request."""

    request_id: RequestId
    attempt: Small


class Reserve(RequestMessage, frozen=True, tag="reserve", kw_only=True):
    """The receiver's rows, and what it needs of each component, `[start, stop)` in tokens of the request.

    The writer sums what it sends as `verify` says.
    """

    nonce: Nonce
    source_group: Small
    destination_group: Small
    rows: Named[PagesRow | SlotRow]
    need: Named[TokenRange]
    verify: Verify = "off"


class Busy(Message, frozen=True, tag="busy", kw_only=True):
    """Not now: the hello or the reserve may be sent again after `retry_after_s`."""

    reason: Reason
    retry_after_s: Seconds
    request_id: RequestId | None = None
    attempt: Small = 0
    nonce: Nonce = 0


class Written(msgspec.Struct, frozen=True, array_like=True):
    """Everything that the writer was elected for, of one component, in `layers` (all: `None`) and tokens `[start, stop)`."""

    chunk: Small
    component: Name
    layers: Many[Small] | None
    start: Tokens
    stop: Tokens


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a packed stream: span classes of a component's plan, in `layers` (all: `None`) and tokens `[start, stop)`."""

    component: Name
    spans: Many[Small]
    layers: Many[Small] | None
    start: Tokens
    stop: Tokens


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """A slot of the receiver's ring at `ring` holds `nbytes` of a chunk's packed stream, from `offset` on. The ring is named,
    as each side may know of a newer connection before the other does, and each connection has a ring of its own.
    """

    slot: Small
    sequence: Nonce
    chunk: Small
    parts: Many[Part]
    offset: Tokens
    nbytes: Small
    ring: RingAddress


class PartialChecksums(msgspec.Struct, frozen=True, array_like=True):
    """Sums modulo 2**64 of what one chunk holds of a component, little-endian uint64: one for each layer that the receiver's
    rank takes, in ascending order, and one for each page of its need that is summed, in its order.
    """

    component: Name
    by_layer: bytes
    by_page: bytes


class Complete(RequestMessage, frozen=True, tag="complete", kw_only=True):
    """What has landed. `filled` slots are to be unpacked; each is said again until its credit comes. The `final` one says
    which chunks of what the writer has sent, of which chunks how many bytes went packed, and the `sums` that the receiver
    asked for; then nothing more will come and nothing is in flight. One that is neither final nor names a slot says that
    copying has begun, for a receiver that wants to be awake when it ends. If it names a word of the writer's board and a value,
    it is the final one from when that word has that value.
    """

    nonce: Nonce
    written: Many[Written] = ()
    payload: Payload = b""
    final: bool = True
    filled: Many[Filled] = ()
    packed: Many[tuple[Small, Tokens]] = ()
    sums: Many[PartialChecksums] = ()
    word: tuple[Small, Nonce] | None = None


class Abort(RequestMessage, frozen=True, tag="abort", kw_only=True):
    """Either side ends the attempt, with its first cause; the writer answers, or goes on to say, `Drained`."""

    nonce: Nonce
    reason: Reason
    from_writer: bool = False


class Drained(RequestMessage, frozen=True, tag="drained", kw_only=True):
    """The writer's proof: no write of this attempt can land any more; and why it ended the attempt."""

    nonce: Nonce
    reason: Reason = ""


class Outcome(RequestMessage, frozen=True, tag="outcome", kw_only=True):
    """The receiver's verdict for its rank."""

    nonce: Nonce
    ok: bool
    reason: Reason = ""


class Credit(Message, frozen=True, tag="credit", kw_only=True):
    """Slots of the receiver's ring at `ring` that have been unpacked, each with the sequence number of that use."""

    ring: RingAddress
    slots: Many[tuple[Small, Nonce]]


class Heartbeat(Message, frozen=True, tag="heartbeat", kw_only=True):
    """The sender is alive at this epoch."""

    epoch: Epoch


class Goodbye(Message, frozen=True, tag="goodbye", kw_only=True):
    """The sender closes, and why."""

    reason: Reason


AnyMessage = Hello | Welcome | Reject | Reserve | Busy | Complete | Abort | Drained | Outcome | Credit | Heartbeat | Goodbye

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message in `data`; raises `RemoteProtocolError` naming the path of what is wrong."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise RemoteProtocolError(f"message of {len(data)} bytes: expected {MAX_MESSAGE_NBYTES} at most")
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"message of {len(data)} bytes cannot be read: {type(error).__name__}: {error}") from error


_IDS = np.dtype("<i4")
"""Page ids, as a message has them."""


def pack_rows(rows: Rows) -> PagesRow | SlotRow:
    """Rows for a reserve."""
    if isinstance(rows, Slot):
        return SlotRow(rows.id)
    return PagesRow(rows.ids.astype(_IDS).tobytes(), rows.first_token)


def unpack_rows(row: PagesRow | SlotRow) -> Rows:
    """Rows of a reserve; raises `RemoteProtocolError` where they are none."""
    if isinstance(row, SlotRow):
        return Slot(row.id)
    if len(row.ids) % 4:
        raise RemoteProtocolError(f"reserve: {len(row.ids)} bytes of page ids: expected four for each")
    return Pages.of_ids(np.frombuffer(row.ids, dtype=_IDS), row.first_token)
