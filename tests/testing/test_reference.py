"""The naive reference of paged KV: content, tokens by context, errors and differences."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.testing import reference
from disagg.testing.reference import Context, KVModel


def test_each_byte_has_a_distinct_value() -> None:
    tokens, heads, nbytes = np.array([0, 1, 2, 9, 700]), range(2, 6), 19
    found = reference.rows("kv", "k", 3, tokens=tokens, heads=heads, nbytes=nbytes)
    offsets = np.arange(nbytes)
    assert (
        found == reference.value("kv", "k", 3, token=tokens[:, None, None], head=np.array(heads)[None, :, None], offset=offsets)
    ).all()
    assert reference.value("kv", "k", 3, token=9, head=4, offset=18) == found[3, 2, 18]
    assert not (found == reference.CANARY).any()
    others = [("kv", "v", 3), ("kv", "k", 4), ("draft", "k", 3)]
    whole = [found, *(reference.rows(*other, tokens=tokens, heads=heads, nbytes=nbytes) for other in others)]
    words = np.concatenate([each[:, :, :16].reshape(-1) for each in whole]).view(np.uint64)
    assert len(np.unique(words)) == len(words)


def test_tokens_of_each_context() -> None:
    def tokens(context: Context, cp_rank: int) -> list[int]:
        rank = reference.KVRank(layers=(0,), page_size=4, num_pages=9, cp=2, cp_rank=cp_rank, context=context)
        return [int(token) for token in reference.tokens_of(rank, 18)]

    assert tokens(Context.WHOLE, 1) == list(range(18))
    assert [tokens(Context.PAGE_BLOCKS, rank) for rank in (0, 1)] == [list(range(12)), list(range(12, 18))]
    assert [tokens(Context.TOKENS_IN_TURN, rank) for rank in (0, 1)] == [list(range(0, 18, 2)), list(range(1, 18, 2))]
    assert tokens(Context.PAGES_IN_TURN, 1) == [4, 5, 6, 7, 12, 13, 14, 15]


def test_needed_tokens_need_pages_and_differences_are_shown() -> None:
    model = KVModel(num_kv_heads=2, dims={"k": 2, "v": 3})
    rank = reference.KVRank(layers=(4,), page_size=4, num_pages=9)
    pages = reference.PageList((7, -1, 2))
    with pytest.raises(IndexError):
        reference.expected(model, rank, pages, num_tokens=16, need=(12, 16))
    with pytest.raises(IndexError, match="sentinel"):
        reference.expected(model, rank, pages, num_tokens=16, need=(3, 5))
    with pytest.raises(IndexError, match="before the listed pages"):
        reference.expected(model, rank, reference.PageList((7,), 8), num_tokens=12, need=(7, 12))
    pools = reference.allocate(model, rank)
    reference.fill(model, rank, pools, pages, num_tokens=16)
    wanted = reference.expected(model, rank, pages, num_tokens=16, need=(0, 4))
    assert "layer 4, tensor 0, 16 of" in str(reference.first_difference(wanted, pools))
    assert reference.first_difference(pools, pools) is None
    assert "layers" in str(reference.first_difference(pools, {}))
