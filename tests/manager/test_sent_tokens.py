"""Chunks of one request in any order: each token of a layer is sent once, and no order costs a scan of the chunks before."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import LocalProtocolError, Pages, Sender, Slot
from disagg.arguments import SentTokens
from disagg.protocol.messages import Written
from disagg.protocol.send_session import _joined
from disagg.protocol.types import Chunk, RequestKey
from disagg.testing import reference
from tests.core.test_ranges import ORDERS, Counted
from tests.support.cluster import DEADLINE_S, Side, clear, cluster, receive

KEY = RequestKey(b"0" * 16, 0)
LAYERS = (0, 1, 2)
TOKEN = st.integers(0, 12)
CHUNK = st.tuples(st.none() | st.lists(st.sampled_from(LAYERS), max_size=4).map(tuple), st.none() | st.tuples(TOKEN, TOKEN))
FIRST = 5
SETS_OF_LAYERS: list[list[list[int] | None]] = [[None], [[0], [2, 1]], [[2], [0], [1]]]
AXES = ["page token kv_head dim", "page kv_head token dim"]


def chunk(number: int, layers: tuple[int, ...] | None, tokens: tuple[int, int] | None, **rows: Any) -> Chunk:
    return Chunk(number, rows or {"kv": Pages([1], FIRST)}, tokens, layers)


@given(chunks=st.lists(CHUNK, max_size=12))
def test_sent_tokens_equal_a_set(chunks: list[tuple[tuple[int, ...] | None, tuple[int, int] | None]]) -> None:
    """A chunk is refused exactly if it has a token of a layer that was sent, and a refused one changes nothing."""
    sent, expected = SentTokens(), set[tuple[int, int]]()
    for number, (layers, tokens) in enumerate(chunks):
        named = range(*tokens) if tokens is not None else range(FIRST, 14)  # 14 stands for the end: no chunk names it
        own = {(layer, token) for layer in (LAYERS if layers is None else layers) for token in named}
        if own & expected:
            with pytest.raises(LocalProtocolError, match=rf"found token {min(t for _, t in own & expected)} of component 'kv'"):
                sent.add(KEY, chunk(number, layers, tokens))
        else:
            sent.add(KEY, chunk(number, layers, tokens))
            expected |= own


def test_components_and_slots_are_apart() -> None:
    sent = SentTokens()
    sent.add(KEY, chunk(0, None, (0, 4), kv=Pages([1]), ssm=Slot(3)))
    sent.add(KEY, chunk(1, None, (4, 8), kv=Pages([1]), swa=Pages([2])))
    with pytest.raises(LocalProtocolError, match=r"found token 0 of component 'ssm' of layers \[1\] a second time"):
        sent.add(KEY, chunk(2, (1,), (8, 12), kv=Pages([1]), ssm=Slot(3)))
    sent.add(KEY, chunk(2, (1,), (8, 12), kv=Pages([1])))
    with pytest.raises(LocalProtocolError, match="found token 8 of component 'kv' a second time"):
        sent.add(KEY, chunk(3, None, (8, 9), kv=Pages([1])))


@pytest.mark.parametrize("layers", [None, (0, 1, 2)])
@pytest.mark.parametrize("order", ORDERS)
def test_chunks_in_any_order_cost_the_same(order: str, layers: tuple[int, ...] | None) -> None:
    """At most 4 comparisons for each layer and each level of a binary search; a scan of 2,048 chunks takes 4 million."""
    count, sent = 2048, SentTokens()
    Counted.num_comparisons = 0
    for number in ORDERS[order](count):
        sent.add(KEY, chunk(number, layers, (Counted(4 * number), Counted(4 * number + 4))))
    assert Counted.num_comparisons <= count * len(layers or (0,)) * 4 * math.ceil(math.log2(count) + 1)


@given(data=st.data())
def test_what_was_written_is_joined_in_any_order(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, 29), max_size=12)) | {0, 30})
    parts = [
        Written(number, component, layers, start, stop)
        for component, layers in (("kv", None), ("kv", (0, 2)), ("swa", None))
        for number, (start, stop) in enumerate(itertools.pairwise(cuts))
        if data.draw(st.booleans())
    ]
    found = _joined(data.draw(st.permutations(parts)))

    def tokens(written: Any) -> list[tuple[str, Any, int]]:
        return sorted((each.component, each.layers or (), token) for each in written for token in range(each.start, each.stop))

    assert tokens(found) == tokens(parts)
    by_key: dict[Any, list[Written]] = {}
    for each in found:
        by_key.setdefault((each.component, each.layers), []).append(each)
    for each_key in by_key.values():
        assert all(one.stop < other.start for one, other in itertools.pairwise(each_key)), "neighbours are joined"


@pytest.mark.parametrize("seed", range(4))
def test_chunks_in_any_order_move_every_byte(seed: int) -> None:
    """Between random layouts, tokens and sets of layers in any order, against the reference."""
    rng = random.Random(seed)
    sides = [Side(tp=rng.choice([1, 2]), page=rng.choice([4, 8]), axes=rng.choice(AXES)) for _ in range(2)]
    with cluster(*sides) as instances:
        for _ in range(8):
            num_tokens = rng.randint(1, 90)
            need = rng.randint(0, num_tokens - 1), num_tokens
            request = rng.randbytes(16)
            given = [instances.pages(rank, num_tokens) for rank in instances.prefill]
            wanted = [instances.pages(rank, num_tokens, need[0]) for rank in instances.decode]
            receivers = [receive(rank, request, pages, need=need) for rank, pages in zip(instances.decode, wanted, strict=True)]
            cuts = sorted({0, num_tokens, *(rng.randint(0, num_tokens) for _ in range(12))})
            pieces = [(tokens, layers) for tokens in itertools.pairwise(cuts) for layers in rng.choice(SETS_OF_LAYERS)]
            senders: list[Sender] = []
            for rank, pages in zip(instances.prefill, given, strict=True):
                reference.fill(instances.model, rank.spec, rank.pools, pages, num_tokens=num_tokens)
                sender = rank.manager.sender(request, peer="decode-0", deadline_s=DEADLINE_S)
                for tokens, layers in rng.sample(pieces, len(pieces)):
                    sender.send({"kv": Pages(np.array(pages.ids))}, tokens=tokens, layers=layers)
                sender.finish()
                senders.append(sender)
            ends = [handle.wait(timeout_s=DEADLINE_S) for handle in (*receivers, *senders)]
            assert [event.error for event in ends] == [None] * len(ends)
            for rank, pages in zip(instances.decode, wanted, strict=True):
                right = reference.expected(instances.model, rank.spec, pages, num_tokens=num_tokens, need=need)
                assert reference.first_difference(right, rank.pools) is None
                clear(rank.pools)
