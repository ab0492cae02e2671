"""Valid inputs: ranks of a few models, messages and benchmark commands."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.commands.cases.instructions import (
    Block,
    Check,
    Clear,
    Collect,
    Describe,
    Direction,
    Exit,
    Fill,
    Item,
    Listen,
    Memcpy,
    Move,
    MoveRaw,
    Peer,
    ReadCpu,
    ReadHealth,
    Start,
    WaitReady,
)
from disagg.commands.cases.sides import Side
from disagg.layout.agreement import LocalRank
from disagg.layout.placement import Component
from disagg.models import load_model
from disagg.models.pools import StagePools, allocate
from disagg.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
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
    Reserve,
    SlotRow,
    SlotsFilled,
    Wanted,
    Welcome,
    Writing,
    Written,
    encode,
)
from disagg.protocol.types import RequestKey

KEY = RequestKey(bytes(range(16)), 3)
IDS: Mapping[str, Any] = {"request_id": KEY.request_id, "attempt": KEY.attempt}


_POOLS: list[StagePools] = []
"""Keeps the memory of components, which only have its addresses."""


@functools.cache
def components(model: str, side: str, rank: int, *, num_pages: int = 4) -> tuple[LocalRank, tuple[Component, ...]]:
    """A rank of a model, and its components over allocated memory."""
    parsed = Side.parse(side)
    topology = parsed.topology(rank)
    pools = allocate(load_model(model, num_layers=4), topology, parsed.pool_shape(num_pages, num_slots=2))
    _POOLS.append(pools)
    allocated = tuple(pools.components)
    return LocalRank.of(topology, allocated), allocated


MODEL, VICTIM_SIDE, PEER_SIDE = "tiny", "tp=1,page=4,layout=hnd", "tp=1,page=16"
"""The model and the sides of the rank that is attacked, and of its peers."""
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
FILLED = SlotsFilled(**IDS, nonce=7, slots=(Filled(9, 1, (Part("kv", (0, 1), None, 16, 40),), 4096, 512),))


def messages(local: LocalRank, placements: bytes = b"", endpoint: bytes = b"", plans: bytes = b"") -> list[Message]:
    """At least one message of every type, from a peer."""
    header: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "instance": "peer",
        "rank": 0,
        "epoch": 5,
        "model": "m",
        "revision": "r",
    }
    table = local.table.encode()
    return [
        Hello(**header, table=table, address="tcp://127.0.0.1:1", generation=1),
        Welcome(
            **header,
            table=table,
            plans=plans,
            members=(Member(0, "tcp://127.0.0.1:1", 5), Member(1, "tcp://127.0.0.1:2", 6)),
            placements=placements,
            backend="local",
            endpoint=endpoint,
            lending=Lending(512, 8),
        ),
        Reject(field="revision", reason="expected 'r', found 's'", hello_first=True),
        Reject(field="hello", reason="no"),
        RESERVE,
        COMPLETE,
        FILLED,
        Decline(**IDS, nonce=7, source_group=0, destination_group=0),
        Wanted(**IDS, nonce=7, source_group=0),
        Busy(reason="full", retry_after_s=0.5, **IDS, nonce=7),
        Busy(reason="starting", retry_after_s=1.0),
        Abort(**IDS, nonce=7, reason="client gone", from_writer=True),
        Abort(**IDS, nonce=7, reason="client gone"),
        Drained(**IDS, nonce=7, reason="broken wire"),
        Outcome(**IDS, nonce=7, ok=True),
        Lend(loans=((9, 4096), (10, 4608)), newest=10),
        Borrow(wanted=3, seen=10, returned=(9,)),
        Goodbye(reason="closing"),
        Writing(engine="local", epoch=5, generation=1),
    ]


def hello_of(local: LocalRank, instance: str, *, address: str, epoch: int) -> bytes:
    """The hello of rank 0 of an instance."""
    first = messages(local)[0]
    assert isinstance(first, Hello)
    return encode(msgspec.structs.replace(first, instance=instance, address=address, epoch=epoch, generation=0))


def commands() -> list[msgspec.Struct]:
    """One benchmark command of every type."""
    blocks = (Block(0, 0, 4096, 512),)
    item = Item(1, 40, {"kv": (0, 40)}, {"kv": (1, 2, 3)}, request_id=KEY.request_id)
    return [
        Describe(),
        Peer("decode-0", "tcp://127.0.0.1:1"),
        WaitReady("decode-0", 1.0),
        Fill((item,)),
        Clear(),
        Start(Direction.SEND, "decode-0", (item, item), window=2, deadline_s=1.0),
        Collect(),
        Check((item,)),
        Move("decode-0", blocks, timeout_s=1.0),
        MoveRaw(blocks, timeout_s=1.0, pids=(1,)),
        Listen("127.0.0.1", ((4096, 512),), timeout_s=1.0),
        Memcpy(4096),
        ReadCpu(),
        ReadHealth(),
        Exit(),
    ]
