"""Sliding windows: decode needs a range of tokens, in pages, in rings, or by lists of ids."""

from __future__ import annotations

import itertools
import logging
from collections import Counter

import numpy as np
import pytest

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.rate_limited_log import RateLimitedLog
from disagg.core.rows import Pages
from disagg.layout.binding import bind
from disagg.state import align, window
from disagg.state.align import align_state_indices, group_concurrent_contiguous
from disagg.testing.reference import Context, PageList, value
from disagg.testing.reference_states import Form
from tests.support.instances import InstanceSpec
from tests.support.kinds import Kind, gqa_kind
from tests.support.states import Scene, check_every_row, moved, tp_pairs

LENGTHS = (1, 6, 7, 8, 9, 31, 32, 33, 40)


def swa_kind(*, tokens: int = 8, heads: int = 4, form: Form | None = None, layers: tuple[int, ...] = (1, 3)) -> Kind:
    form = form or Form(num_rows=40, page_size=4)
    return gqa_kind(name="window", window=tokens, num_kv_heads=heads, form=form, layers=layers)


def side(page_size: int, *, tp: int = 1, rows: int = 70, ring: bool = False, order: str | None = None) -> InstanceSpec:
    orders = {} if order is None else dict.fromkeys("kv", order)
    return InstanceSpec(tp=tp, forms={"window": Form(num_rows=rows, page_size=page_size, ring=ring, orders=orders)})


# ------------------------------------------------------------------------------------------------------------------ pages


@pytest.mark.sweep
def test_every_tp_to_every_tp() -> None:
    """Case 17: windows re-shard as full attention does."""
    for heads in (3, 8):
        for ours, theirs in tp_pairs():
            moved(swa_kind(heads=heads), ours, theirs, 11)


@pytest.mark.parametrize(("source", "destination"), [(1, 4), (4, 1), (4, 2), (2, 8)])
def test_windows_beside_full_attention(source: int, destination: int) -> None:
    """Case 17, gpt-oss: alternating layers, 8 KV heads, and separate pools and ids."""
    kinds = [gqa_kind(num_kv_heads=8, layers=(1, 3, 5)), swa_kind(heads=8, layers=(0, 2, 4))]
    ours, theirs = InstanceSpec(tp=source, edges=(0, 3, 6)), InstanceSpec(tp=destination)
    scene = Scene(kinds, ours, theirs)
    for num_tokens in (5, 8, 19, 33):
        moves = scene.transfer(num_tokens)
        nbytes = Counter[str]()
        for move in moves:
            nbytes[move.component] += move.copies.total_nbytes
        readers = max(destination, 8) / 8
        assert nbytes["window"] * num_tokens == nbytes["kv"] * min(num_tokens, 8)
        assert nbytes["kv"] == 3 * num_tokens * 8 * (3 + 2) * 2 * readers


@pytest.mark.sweep
@pytest.mark.parametrize(("source", "destination"), list(itertools.product((1, 3, 4, 8, 16), repeat=2)))
def test_windows_are_paired_by_token_at_any_page_size(source: int, destination: int) -> None:
    """Case 54, small: lengths around page boundaries, several windows, and prefixes inside and outside the window."""
    for tokens in (1, 5, 8, 16):
        scene = Scene([swa_kind(tokens=tokens, layers=(2,))], side(source, tp=2), side(destination))
        for num_tokens in LENGTHS:
            scene.transfer(num_tokens)
            scene.transfer(num_tokens, prefix=num_tokens - 3)


@pytest.mark.parametrize(("source", "destination"), [(16, 64), (64, 16), (16, 48), (16, 16), (128, 16)])
@pytest.mark.parametrize("num_tokens", [1000, 1024])
def test_a_window_of_128_of_a_thousand_tokens(source: int, destination: int, num_tokens: int) -> None:
    """Case 54: the two lists start at different tokens, 832 and 864 of 1,000, and no token is shifted."""
    kind = swa_kind(tokens=128, layers=(0,), heads=1)
    scene = Scene([kind], side(source), side(destination))
    moves = scene.transfer(num_tokens)
    assert sum(move.copies.total_nbytes for move in moves) == 128 * (3 + 2) * 2


def test_lists_of_different_pages_start_at_different_tokens() -> None:
    """Of 1,000 tokens and a window of 128, pages of 64 are listed from 832 on, and pages of 16 from 864 on."""
    scene = Scene([swa_kind(tokens=128, layers=(0,), heads=1)], side(64), side(16))
    request = scene.open(1000)
    for rows, page, first in ((request.source_rows, 64, 832), (request.destination_rows, 16, 864)):
        listed = rows[0]["window"]
        assert isinstance(listed, PageList)
        assert len(listed.ids) == -(-(1000 - first) // page)
        rows[0]["window"] = PageList(listed.ids, first)
    scene.run(request, scene.moves(request))
    assert scene.difference(request) is None


def test_evicted_pages_may_be_listed_as_sentinels() -> None:
    """The list starts at token 0 and has -1 for pages before the window."""
    for ours, theirs in itertools.product((4, 8), repeat=2):
        scene = Scene([swa_kind(tokens=9)], side(ours, tp=2), side(theirs))
        request = scene.open(30)
        for rows, size in ((request.source_rows, ours), (request.destination_rows, theirs)):
            for taken in rows:
                listed = taken["window"]
                assert isinstance(listed, PageList)
                taken["window"] = PageList((-1,) * (21 // size) + listed.ids, 0)
        check_every_row(scene, request)
        scene.run(request, scene.moves(request))
        assert scene.difference(request) is None


def test_a_needed_token_in_a_sentinel_is_an_error() -> None:
    scene = Scene([swa_kind(tokens=9)], side(4), side(4))
    request = scene.open(30)
    listed = request.source_rows[0]["window"]
    assert isinstance(listed, PageList)
    request.source_rows[0]["window"] = PageList((-1, *listed.ids[1:]), listed.first_token)
    with pytest.raises(LayoutError, match="token 21 lies in page -1"):
        scene.moves(request)


def test_the_prefill_side_may_hold_more_and_count_the_sampled_token() -> None:
    """Case 18 for windows: lists that differ in length at both ends."""
    scene = Scene([swa_kind(tokens=8)], side(4, tp=2), side(8))
    for num_tokens in LENGTHS[3:]:
        request = scene.open(num_tokens, held={"window": (num_tokens - 8, num_tokens + 1)}, ahead=17)
        check_every_row(scene, request)
        scene.run(request, scene.moves(request))
        assert scene.difference(request) is None
        scene.close(request)


@pytest.mark.parametrize("context", [Context.PAGE_BLOCKS, Context.TOKENS_IN_TURN, Context.PAGES_IN_TURN])
def test_context_parallel_ranks_own_parts_of_the_window(context: Context) -> None:
    for num_tokens in (3, 17, 40):
        ours = InstanceSpec(tp=2, cp=3, context=context)
        moved(swa_kind(tokens=9), ours, InstanceSpec(tp=1), num_tokens)
        moved(swa_kind(tokens=9), InstanceSpec(tp=1), ours, num_tokens)


@pytest.mark.parametrize("prefix", [0, 3, 870, 900, 1000, 1200])
def test_needed_is_the_window_after_the_prefix(prefix: int) -> None:
    assert window.needed(1000, window=128, prefix=prefix) == (min(max(prefix, 872), 1000), 1000)
    assert window.needed(100, window=128, prefix=prefix) == (min(prefix, 100), 100)


# ------------------------------------------------------------------------------------------------------------------ rings


@pytest.mark.sweep
@pytest.mark.parametrize(("source", "destination"), list(itertools.product((8, 9, 12, 16), repeat=2)))
def test_rings_of_different_strides(source: int, destination: int) -> None:
    """Token `t` is row `request * stride + t % stride` on each side. A window of 8 wraps on either side, both or none."""
    kind = swa_kind(tokens=8, layers=(2,))
    scene = Scene([kind], side(source, tp=2, rows=3, ring=True), side(destination, tp=4, rows=5, ring=True))
    for num_tokens in range(1, 26):
        scene.transfer(num_tokens)
    for num_tokens in (8, 20, 33):
        for missing in range(9):
            scene.transfer(num_tokens, prefix=num_tokens - missing)


@pytest.mark.parametrize(("ours", "theirs"), [((12, True), (4, False)), ((4, False), (12, True)), ((3, False), (8, True))])
def test_rings_and_pages(ours: tuple[int, bool], theirs: tuple[int, bool]) -> None:
    scene = Scene([swa_kind(tokens=8)], side(ours[0], tp=2, ring=ours[1]), side(theirs[0], ring=theirs[1]))
    for num_tokens in range(1, 30):
        scene.transfer(num_tokens)


def test_a_ring_may_hold_more_than_is_needed() -> None:
    """Prefill's ring has the last 16 tokens, and decode needs 8 of them."""
    scene = Scene([swa_kind(tokens=8)], side(16, ring=True), side(8, ring=True))
    for num_tokens in (16, 17, 31, 40):
        scene.transfer(num_tokens, held={"window": (num_tokens - 16, num_tokens)})


@pytest.mark.parametrize("axes", ["page kv_head token dim", "page kv_head dim token"])
def test_rings_in_different_memory_orders(axes: str) -> None:
    scene = Scene([swa_kind(tokens=8)], side(9, ring=True, order=axes), side(8, tp=2, ring=True))
    for num_tokens in (5, 13, 24):
        scene.transfer(num_tokens)


def test_ring_rows_match_the_closed_formula() -> None:
    """Row `slot * stride + t % stride` for every token of every range that fits."""
    for stride, slot in itertools.product((1, 4, 6), (0, 3)):
        for start, stop in itertools.combinations_with_replacement(range(20), 2):
            if stop - start > stride:
                with pytest.raises(LayoutError, match=rf"ring of {stride} tokens.*\[{start}, {stop}\)"):
                    window.ring_rows(slot, need=(start, stop), stride=stride)
                continue
            rows = window.ring_rows(slot, need=(start, stop), stride=stride)
            for token in range(start, stop):
                page, offset = divmod(token - rows.first_token, stride)
                assert rows.ids[page] * stride + offset == slot * stride + token % stride


@pytest.mark.parametrize("need", [(-1, 3), (5, 4)])
def test_invalid_ranges_are_rejected(need: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match="expected a range that fits"):
        window.ring_rows(0, need=need, stride=8)


# ------------------------------------------------------------------------------------------------------------- bare lists


def listed(first: int, last: int, *, base: int) -> dict[int, int]:
    """The ids of a request's pages `first` to `last`, by page number. Ids of the two sides are distinct."""
    return {page: base + 7 * page % 64 for page in range(first, last)}


@pytest.mark.parametrize("source_first", [0, 3, 10])
@pytest.mark.parametrize("destination_first", [0, 3, 10])
def test_id_lists_of_a_window_align_at_their_end(source_first: int, destination_first: int) -> None:
    """Case 19: either list may be longer. Both end with the same page, so ids are paired by page number."""
    source, destination = listed(source_first, 14, base=100), listed(destination_first, 14, base=500)
    ours, theirs = align_state_indices([*source.values()], [*destination.values()], anchor="end")
    both = sorted(source.keys() & destination.keys())
    assert ours.tolist() == [source[page] for page in both]
    assert theirs.tolist() == [destination[page] for page in both]


@pytest.mark.parametrize("lengths", [(64 * k + extra, k) for k in (1, 2, 391) for extra in (-1, 0, 1)])
def test_id_lists_of_index_keys_align_at_their_start(lengths: tuple[int, int]) -> None:
    """Cases 18 and 19: pages of 64 at 64k-1, 64k and 64k+1 tokens. Prefill lists one more, or decode has 391 for 1."""
    num_tokens, _ = lengths
    needed, appended = -(-num_tokens // 64), -(-(num_tokens + 1) // 64)
    for source, destination in ((appended, needed), (needed, appended), (1, 391), (391, 1)):
        ours, theirs = listed(0, source, base=100), listed(0, destination, base=500)
        found = align_state_indices([*ours.values()], [*theirs.values()])
        common = min(source, destination)
        assert [each.tolist() for each in found] == [[*side.values()][:common] for side in (ours, theirs)]


def test_a_cut_does_not_change_the_given_lists(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 20: two decode ranks get new arrays from one list, and a cut is logged."""
    monkeypatch.setattr(align, "_warnings", RateLimitedLog(align.logger))  # other tests may have used up what may be logged
    source = np.array([9, 8, 7, 6, 5], dtype=np.int32)
    with caplog.at_level(logging.WARNING):
        first, _ = align_state_indices(source, [1, 2], anchor="end")
        second, _ = align_state_indices(source, [1, 2, 3, 4, 5], anchor="end")
    assert first.tolist() == [6, 5]
    assert second.tolist() == source.tolist() == [9, 8, 7, 6, 5]
    assert not np.shares_memory(second, source)
    assert sum("cut to 2 at the start of the longer one" in record.message for record in caplog.records) == 1
    first[:] = 0
    assert source.tolist() == [9, 8, 7, 6, 5]


def test_empty_id_lists_and_invalid_anchors() -> None:
    assert [side.tolist() for side in align_state_indices([], [1, 2], anchor="end")] == [[], []]
    assert [column.tolist() for column in group_concurrent_contiguous([], [])] == [[], [], []]
    with pytest.raises(ConfigError, match="anchor: expected 'start' or 'end', found 'middle'"):
        align_state_indices([1], [1], anchor="middle")  # type: ignore[arg-type]


def test_id_lists_and_token_ranges_move_the_same_bytes() -> None:
    """Whole pages by runs of ids, compared with the copies of a token range."""
    page_nbytes, num_pages = 24, 14
    content = value("window", "k", 0, token=np.arange(num_pages)[:, None], head=0, offset=np.arange(page_nbytes))
    rng = np.random.default_rng(5)
    source_ids, destination_ids = rng.permutation(40)[:num_pages], np.sort(rng.permutation(40)[:5])
    pool, there = np.zeros((40, page_nbytes), np.uint8), np.zeros((40, page_nbytes), np.uint8)
    pool[source_ids] = content
    starts = group_concurrent_contiguous(*align_state_indices(source_ids, destination_ids, anchor="end"))
    for ours, theirs, length in zip(*(column.tolist() for column in starts), strict=True):
        there[theirs : theirs + length] = pool[ours : ours + length]
    wanted = np.zeros_like(there)
    wanted[destination_ids] = content[-5:]
    assert (there == wanted).all()


def test_one_request_serves_two_readers_with_different_windows() -> None:
    """Case 20 by token ranges: both readers are served from the same rows, which stay unchanged."""
    scene = Scene([swa_kind(tokens=12)], side(4), side(4, tp=2))
    request = scene.open(30)
    plan = scene.plan(request, 0, 0)["window"]
    rows = request.source_rows[0]["window"]
    assert isinstance(rows, PageList)
    source = Pages(np.array(rows.ids, dtype=np.int32), rows.first_token)
    theirs = request.destination_rows[0]["window"]
    assert isinstance(theirs, PageList)
    destination = Pages(np.array(theirs.ids, dtype=np.int32), theirs.first_token)
    short = bind(plan, source=source, destination=destination, tokens=(27, 30))
    whole = bind(plan, source=source, destination=destination, tokens=(18, 30))
    assert (short.total_nbytes, whole.total_nbytes) == (3 * 40, 12 * 40)
    assert source == Pages(np.array(rows.ids, dtype=np.int32), rows.first_token)
    scene.run(request, scene.moves(request))
    assert scene.difference(request) is None
