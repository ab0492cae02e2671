"""The encoded bytes of every message, and the refusal of invalid bytes."""

from __future__ import annotations

import pathlib
import tracemalloc
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import RemoteProtocolError
from disagg.core.rows import Pages, Slot
from disagg.protocol.messages import (
    MAX_MESSAGE_NBYTES,
    PROTOCOL_VERSION,
    Abort,
    AnyMessage,
    Borrow,
    Busy,
    Complete,
    Decline,
    Drained,
    Filled,
    Goodbye,
    Hello,
    Lend,
    Lending,
    Member,
    Message,
    Outcome,
    PagesRow,
    Part,
    Reject,
    Renew,
    Reserve,
    SlotRow,
    SlotsFilled,
    Wanted,
    Welcome,
    Writing,
    Written,
    decode,
    encode,
    message_type,
    pack_rows,
    unpack_rows,
)

GOLDEN = pathlib.Path(__file__).parent / "golden"
IDS: dict[str, Any] = {"request_id": bytes(range(16)), "attempt": 3}
SAMPLES: dict[str, Message] = {
    "hello": Hello(
        version=1,
        instance="decode-0",
        rank=1,
        epoch=2**62,
        model="m",
        revision="r",
        table=b"\x00\xff",
        address="tcp://h:1",
        leader="tcp://h:0",
    ),
    "hello_to": Hello(version=4, instance="d", rank=0, epoch=1, model="m", revision="r", table=b"t", to=("prefill-0", 3)),
    "welcome": Welcome(
        version=1,
        instance="prefill-0",
        rank=0,
        epoch=5,
        model="m",
        revision="r",
        table=b"t",
        plans=b"p",
        members=(Member(0, "tcp://a:1", 5), Member(1, "tcp://b:2", 6)),
        placements=b"l",
        backend="local",
        endpoint=b"e",
        lending=Lending(512, 8),
        direct=False,
    ),
    "reject": Reject(field="revision", reason="expected 'r', found 's'", hello_first=True),
    "reserve": Reserve(
        **IDS,
        nonce=7,
        source_group=1,
        destination_group=2,
        rows={"kv": PagesRow(b"\x01\x00\x00\x00\xff\xff\xff\xff", 16), "ssm": SlotRow(9)},
        need={"kv": (16, 40), "ssm": (0, 40)},
    ),
    "decline": Decline(**IDS, nonce=7, source_group=1, destination_group=2),
    "wanted": Wanted(**IDS, nonce=7, source_group=1),
    "busy": Busy(reason="full", retry_after_s=0.5, **IDS, nonce=7),
    "busy_hello": Busy(reason="starting", retry_after_s=1.0),
    "complete": Complete(
        **IDS, nonce=7, written=(Written(0, "kv", None, 16, 40), Written(1, "ssm", (3, 4), 0, 40)), payload=b"first"
    ),
    "slots_filled": SlotsFilled(**IDS, nonce=7, slots=(Filled(9, 1, (Part("kv", (0, 1), None, 16, 40),), 4096, 512),)),
    "complete_packed": Complete(**IDS, nonce=7, written=(Written(0, "kv", (1,), 0, 8),), packed=((0, 65536),)),
    "abort": Abort(**IDS, nonce=7, reason="client gone", from_writer=True),
    "drained": Drained(**IDS, nonce=7, reason="broken wire"),
    "outcome": Outcome(**IDS, nonce=7, ok=False, reason="timed out"),
    "lend": Lend(loans=((9, 65536), (10, 66048)), newest=10),
    "borrow": Borrow(wanted=3, seen=10, returned=(9,)),
    "goodbye": Goodbye(reason="closing"),
    "writing": Writing(engine="cma", epoch=5, generation=1),
    "renew": Renew(),
}
MAPS: dict[str, dict[str, Any]] = {
    "reserve": {
        "type": "reserve",
        **IDS,
        "nonce": 7,
        "source_group": 1,
        "destination_group": 2,
        "rows": {
            "kv": {"kind": "pages", "ids": b"\x01\x00\x00\x00\xff\xff\xff\xff", "first_token": 16},
            "ssm": {"kind": "slot", "id": 9},
        },
        "need": {"kv": [16, 40], "ssm": [0, 40]},
    },
    "complete": {
        "type": "complete",
        **IDS,
        "nonce": 7,
        "written": [[0, "kv", None, 16, 40], [1, "ssm", [3, 4], 0, 40]],
        "payload": b"first",
    },
}


def plain(message: Message) -> dict[str, Any]:
    """The message's map, decoded without the message types."""
    found: dict[str, Any] = msgpack.unpackb(encode(message))
    return found


# ------------------------------------------------------------------------------------------------------------- the bytes


def test_every_message_has_a_sample_and_a_golden_file() -> None:
    assert {type(sample) for sample in SAMPLES.values()} == set(get_args(AnyMessage))
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_encoded_messages_equal_the_golden_files(name: str) -> None:
    golden = bytes.fromhex((GOLDEN / f"{name}.hex").read_text())
    assert PROTOCOL_VERSION == 7
    assert encode(SAMPLES[name]) == golden
    assert decode(golden) == SAMPLES[name]


@pytest.mark.parametrize("name", MAPS)
def test_a_message_is_encoded_as_a_map_with_a_type(name: str) -> None:
    assert plain(SAMPLES[name]) == MAPS[name]
    assert decode(msgpack.packb(MAPS[name])) == SAMPLES[name]


SMALL, NONCE, TOKEN = st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**40)
EPOCH = st.integers(1, 2**63 - 1)
NAME, REASON, BLOB = st.text("abz-ü/", min_size=1, max_size=8), st.text(max_size=12), st.binary(max_size=12)
BASE = {"request_id": st.binary(min_size=16, max_size=16), "attempt": SMALL}
RANGE = st.tuples(TOKEN, TOKEN)
COMMON = {"version": st.integers(0, 9), "instance": NAME, "rank": SMALL, "epoch": EPOCH, "model": REASON, "revision": REASON}
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, **COMMON, table=BLOB, address=st.none() | NAME, leader=st.none() | NAME),
    st.builds(
        Welcome,
        **COMMON,
        table=BLOB,
        plans=BLOB,
        members=st.lists(st.builds(Member, SMALL, NAME, EPOCH), max_size=3).map(tuple),
        placements=BLOB,
        backend=NAME,
        endpoint=BLOB,
    ),
    st.builds(Reject, field=NAME, reason=REASON, hello_first=st.booleans()),
    st.builds(
        Reserve,
        **BASE,
        nonce=NONCE,
        source_group=SMALL,
        destination_group=SMALL,
        rows=st.dictionaries(NAME, st.builds(PagesRow, BLOB, TOKEN) | st.builds(SlotRow, SMALL), max_size=3),
        need=st.dictionaries(NAME, RANGE, max_size=3),
    ),
    st.builds(Busy, reason=REASON, retry_after_s=st.floats(0, 3600), request_id=st.none() | BASE["request_id"], nonce=NONCE),
    st.builds(
        Complete,
        **BASE,
        nonce=NONCE,
        payload=BLOB,
        written=st.lists(
            st.builds(Written, SMALL, NAME, st.none() | st.lists(SMALL, max_size=3).map(tuple), TOKEN, TOKEN), max_size=3
        ).map(tuple),
    ),
    st.builds(Abort, **BASE, nonce=NONCE, reason=REASON, from_writer=st.booleans()),
    st.builds(Drained, **BASE, nonce=NONCE, reason=REASON),
    st.builds(Decline, **BASE, nonce=NONCE, source_group=SMALL, destination_group=SMALL),
    st.builds(Wanted, **BASE, nonce=NONCE, source_group=SMALL),
    st.builds(Outcome, **BASE, nonce=NONCE, ok=st.booleans(), reason=REASON),
    st.builds(Lend, loans=st.lists(st.tuples(NONCE, st.integers(1, 2**63 - 1)), max_size=4).map(tuple), newest=NONCE),
    st.builds(Borrow, wanted=SMALL, seen=NONCE, returned=st.lists(NONCE, max_size=4).map(tuple)),
    st.builds(Goodbye, reason=REASON),
    st.builds(Writing, engine=NAME, epoch=EPOCH, generation=SMALL),
)


@given(MESSAGES)
def test_every_message_decodes_to_an_equal_message(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("name", SAMPLES)
def test_the_type_of_a_message_is_its_tag(name: str) -> None:
    assert message_type(SAMPLES[name]) == msgpack.unpackb(encode(SAMPLES[name]))["type"]


# -------------------------------------------------------------------------------------------------------------- evolution


@pytest.mark.parametrize("name", SAMPLES)
def test_unknown_fields_are_ignored(name: str) -> None:
    later = {**plain(SAMPLES[name]), "zz_new": {"deep": [1, [2, {"x": None}]]}}
    assert decode(msgpack.packb(later)) == SAMPLES[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_optional_fields_have_defaults(name: str) -> None:
    sample = SAMPLES[name]
    for field in msgspec.structs.fields(sample):
        earlier = {key: value for key, value in plain(sample).items() if key != field.encode_name}
        if field.required:
            with pytest.raises(RemoteProtocolError, match=f"missing required field `{field.encode_name}`"):
                decode(msgpack.packb(earlier))
        else:
            assert decode(msgpack.packb(earlier)) == msgspec.structs.replace(sample, **{field.name: field.default})


def test_another_word_for_verify_is_refused_by_name() -> None:
    (reserve,) = (plain(sample) for sample in SAMPLES.values() if isinstance(sample, Reserve))
    with pytest.raises(RemoteProtocolError, match=r"Invalid enum value 'sample' - at `\$\.verify`"):
        decode(msgpack.packb({**reserve, "verify": "sample"}))


# -------------------------------------------------------------------------------------------------------- decode is total


def refusal(data: bytes) -> str:
    """The error with which `decode` refuses `data`."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data)
    return str(caught.value)


def decode_or_refuse(data: bytes) -> None:
    """Decode `data` to a message that can be encoded and decoded again, or refuse it."""
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    decode(encode(message))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_truncated_or_extended_message_is_refused(name: str) -> None:
    data = encode(SAMPLES[name])
    for length in range(len(data)):
        refusal(data[:length])
    refusal(data + b"\xc0")
    refusal(data + data)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_with_one_changed_byte_is_decoded_or_refused(name: str) -> None:
    data = encode(SAMPLES[name])
    for position in range(len(data)):
        for value in bytes.fromhex("00 7f 80 90 a0 c0 c1 c4 c7 cb cf d9 dd df ff") + bytes([data[position] ^ 1]):
            decode_or_refuse(data[:position] + bytes([value]) + data[position + 1 :])


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    refusal(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_message_with_a_replaced_field_is_decoded_or_refused(name: str, data: st.DataObject) -> None:
    found = plain(SAMPLES[name])
    found[data.draw(st.sampled_from(sorted(found)))] = data.draw(JSON)
    decode_or_refuse(msgpack.packb(found))


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_message_with_removed_or_repeated_bytes_is_decoded_or_refused(name: str, data: st.DataObject) -> None:
    found = encode(SAMPLES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        start, stop = sorted(data.draw(st.tuples(st.integers(0, len(found)), st.integers(0, len(found)))))
        found = found[:start] + data.draw(st.sampled_from([b"", found[start:stop] * 2, b"\x00" * 3])) + found[stop:]
    decode_or_refuse(found)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\x91" * 100_000, "got `array`"),
        (b"\x81\xa1x" * 100_000, "RecursionError"),
        (b"\x91" * 500 + b"\x90", "expected"),
        (b"\xdd\xff\xff\xff\xff", "got `array`"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\xdb\xff\xff\xff\xff", "truncated"),
        (b"\xc9\xff\xff\xff\xff\x01", "truncated"),
        (b"\xd6\xff\x00\x00\x00\x00", "expected"),
        (b"\xc7\x00\x05", "expected"),
        (b"\xc1", "malformed"),
        (b"\x81\x01\x02", "got `int`"),
        (b"\xa2\xff\xfe", "expected"),
        (msgpack.packb({"type": "nonsense"}), "nonsense"),
        (msgpack.packb({"epoch": 1}), "missing required field `type`"),
        (msgpack.packb([1, 2]), "array"),
        (msgpack.packb({"type": "hello", "epoch": -1}), r"$.epoch"),
        (msgpack.packb({"type": "welcome", "epoch": 0}), r"$.epoch"),
        (msgpack.packb({"type": "hello", "epoch": 2**64 - 1}), r"$.epoch"),
        (msgpack.packb({"type": "hello", "epoch": True}), r"$.epoch"),
        (msgpack.packb({**MAPS["reserve"], "request_id": b"short"}), r"$.request_id"),
        (msgpack.packb({**MAPS["reserve"], "rows": {"kv": {"kind": "tree"}}}), r"$.rows"),
        (msgpack.packb({**MAPS["reserve"], "need": {"kv": [1, 2, 3]}}), r"$.need"),
        (msgpack.packb({**MAPS["complete"], "written": [[0, "kv", None, 1]]}), r"$.written[0]"),
    ],
    ids=range(25),
)
def test_the_error_names_the_invalid_part(data: bytes, reason: str) -> None:
    assert reason.lower() in refusal(data).lower()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf"), -1.0])
def test_an_invalid_duration_is_refused(seconds: float) -> None:
    assert "$.retry_after_s" in refusal(encode(Busy(reason="full", retry_after_s=seconds)))


def test_a_message_that_is_too_long_is_refused_without_decoding() -> None:
    assert "expected 67108864 at most" in refusal(bytes(MAX_MESSAGE_NBYTES + 1))


def test_malicious_messages_use_little_memory() -> None:
    attacks = [
        b"\xdd\x00\x00\xff\xff" * 1000 + b"\xc0" * 70_000,
        b"\xdf\x00\x00\xff\xff" * 1000 + b"\xc0" * 70_000,
        b"\xdc\xff\xff" * 1000 + b"\x90" * 70_000,
        msgpack.packb({"type": "goodbye", "reason": "x" * 1_000_000}),
        msgpack.packb({"type": "goodbye", "reason": "", "x": [[[]] * 60_000] * 5}),
    ]
    for attack in attacks:
        tracemalloc.start()
        decode_or_refuse(attack)
        assert tracemalloc.get_traced_memory()[1] < 700 << 20
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------------ rows


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8), TOKEN)
def test_decoded_pages_are_equal_and_read_only(ids: list[int], first_token: int) -> None:
    pages = Pages(np.array(ids, dtype=np.int32), first_token)
    row = pack_rows(pages)
    assert isinstance(row, PagesRow)
    assert row.ids == b"".join(page.to_bytes(4, "little", signed=True) for page in ids)
    decoded = unpack_rows(row)
    assert decoded == pages
    assert isinstance(decoded, Pages)
    assert not decoded.ids.flags.writeable


def test_a_decoded_slot_is_equal() -> None:
    assert pack_rows(Slot(5)) == SlotRow(5)
    assert unpack_rows(SlotRow(5)) == Slot(5)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_fraction_of_a_page_id_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{length} bytes of page ids"):
        unpack_rows(PagesRow(bytes(length), 0))


def test_a_message_of_many_values_is_bounded_before_it_is_read() -> None:
    """Each byte of such a message may become an object; tables, page ids and checksums are byte strings."""
    many = [[0, 0, 0, [["kv", [1] * 60_000, None, 0, 1]] * 20, 0, 1, 1]]
    with pytest.raises(RemoteProtocolError, match=r"message 'slots_filled' of 12..... bytes: expected 1048576 at most"):
        decode(msgpack.packb({"type": "slots_filled", **IDS, "nonce": 1, "slots": many}))
    slots, other = msgpack.packb({"type": "slots_filled", **IDS, "nonce": 1, "slots": many}), msgpack.packb("type")
    for pairs in ((slots[1:], other, msgpack.packb("welcome")), (other, msgpack.packb("welcome"), slots[1:])):
        forged = bytes([0x80 | 6]) + b"".join(pairs)
        tracemalloc.start()
        with pytest.raises(RemoteProtocolError, match=r"cannot be read|'slots_filled' of 12..... bytes: expected 1048576"):
            decode(forged)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
    with pytest.raises(RemoteProtocolError, match="message 'nothing' of"):
        decode(msgpack.packb({"type": "nothing", "filler": bytes(2 << 20)}))
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        decode(bytes(2 << 20))
    large = Hello(version=1, instance="d", rank=0, epoch=1, model="m", revision="r", table=bytes(2 << 20))
    assert decode(encode(large)) == large
    with pytest.raises(RemoteProtocolError, match="message 'hello' of"):
        decode(encode(msgspec.structs.replace(large, table=bytes(9 << 20))))
