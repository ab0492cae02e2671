"""Sides as text."""

from __future__ import annotations

import pytest

from disagg.commands.cases.sides import Side
from disagg.core.errors import ConfigError
from disagg.layout.ownership import EVERYTHING
from disagg.testing.reference import Context, KVRank, tokens_of


def test_missing_keys_have_defaults() -> None:
    assert Side.parse("tp=4") == Side(tp=4)
    assert Side.parse("") == Side()
    assert Side.parse(" tp=4 , page=64 ") == Side(tp=4, page=64)


def test_every_key_is_read() -> None:
    side = Side.parse("tp=4,pp=2,dp=3,cp=2,ep=2,page=8,layout=hnd,context=blocks,layers=7+8,kv=float16")
    sizes = {"tp": 4, "pp": 2, "dp": 3, "cp": 2, "ep": 2, "page": 8}
    assert side == Side(**sizes, layout="hnd", context="blocks", layers=(7, 8), kv="float16")
    assert side.num_ranks == 4 * 2 * 3 * 2


@pytest.mark.parametrize(
    "text",
    ["tp=4,page=16", "tp=1,page=64,layout=hnd", "tp=2,pp=2,page=16,layers=3+1", "tp=2,ep=2,page=16", "tp=1,page=16,kv=float32"],
)
def test_a_side_prints_as_it_is_written(text: str) -> None:
    side = Side.parse(text)
    assert Side.parse(str(side)) == side
    assert sorted(str(side).split(",")) == sorted(text.split(","))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tpp=4", "tp, pp, dp, cp, ep, page, layout"),
        ("tp", "KEY=VALUE"),
        ("tp=0", "a positive integer"),
        ("tp=-1", "a positive integer"),
        ("tp=4.0", "a positive integer"),
        ("tp=٤", "a positive integer"),  # digits, but not ASCII ones
        ("tp=", "a positive integer"),
        ("tp=4,tp=4", "twice"),
        ("layout=dhn", "nhd, hnd"),
        ("cp=2,context=all", "tokens, pages, blocks"),
        ("pp=2,layers=3+", "7+8"),
        ("pp=2,layers=3", "each of 2 stages"),
        ("tp=4,ep=3", "divisor"),
        ("kv=fp8", "float16, float8_e4m3fn"),
    ],
)
def test_an_invalid_side_is_quoted_with_what_is_allowed(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Side.parse(text)
    assert repr(text) in str(raised.value)
    assert named in str(raised.value)


@pytest.mark.parametrize("context", ["tokens", "pages", "blocks"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
def test_tokens_are_divided_as_in_the_reference(context: str, num_tokens: int) -> None:
    side = Side(cp=3, page=4, context=context)
    for index in range(3):
        rank = side.topology(index)
        reference = KVRank(layers=(0,), page_size=4, num_pages=1, cp=3, cp_rank=index, context=side.context_kind)
        owned = side.tokens(rank).within(num_tokens)
        found = [token for part in owned.parts for token in range(part.start, part.stop)]
        assert found == tokens_of(reference, num_tokens).tolist()


def test_one_context_parallel_rank_holds_everything() -> None:
    side = Side(cp=1, context="blocks")
    assert side.context_kind is Context.WHOLE
    assert side.tokens(side.topology()) == EVERYTHING
