"""Binding of plans to the rows of requests: copies, errors, chunks and checks of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.copies import CopyBatch
from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Rows, Slot
from disagg.layout.binding import bind, check_rows, check_share, listed_rows
from disagg.layout.election import elect
from disagg.layout.ownership import EVERYTHING, Intervals, Owned, Periodic, Share, interval
from disagg.layout.placement import Placement, TensorPlacement
from disagg.layout.plan import ComponentPlan, RowSpace, first_page, make_plan
from disagg.layout.tables import Axis, ComponentLayout, TensorLayout
from disagg.testing.reference import Context
from disagg.testing.scene import Case, Move, Scene
from disagg.testing.strategies import cases
from tests.support.layouts import state, table, triples


def pages_layout(tokens: Owned = EVERYTHING, *granules: int) -> ComponentLayout:
    """Tensors `s0`, `s1`, ... of one layer with 4 bytes per position, one per granule."""
    return ComponentLayout(
        "c",
        "pages",
        tuple(
            TensorLayout(
                f"s{i}",
                "uint8",
                (Axis("layer", None, interval(0, 1)), Axis("token", None, tokens, granule), Axis("dim", 4, EVERYTHING)),
            )
            for i, granule in enumerate(granules or (1,))
        ),
    )


def pool(layout: ComponentLayout, *, page_size: int = 8, num_pages: int = 6, base: int = 2**20) -> Placement:
    """A placement at addresses that are never read: tensor `i` begins at `base * (i + 1)`."""
    return Placement(
        "c",
        page_size,
        num_pages,
        tuple(
            TensorPlacement(
                tensor.role,
                (0,),
                (base * (i + 1),),
                page_size // (tensor.token.granule if tensor.token else 1) * 4,
                {"token": 4, "dim": 1},
            )
            for i, tensor in enumerate(layout.tensors)
        ),
    )


SOURCE, DESTINATION = 2**20, 2**40


def bound(
    source: Sequence[ComponentLayout],
    destination: ComponentLayout,
    *,
    rows: Sequence[Rows],
    target: Rows,
    tokens: tuple[int, int] | None,
    page_size: int = 8,
    target_page_size: int = 8,
    **more: Any,
) -> list[CopyBatch]:
    """The copies of each source rank (context parallel) to the one destination rank."""
    ours, theirs = table(source, cp=len(source)), table([destination])
    election = elect(ours, theirs)
    place = pool(destination, page_size=target_page_size, base=DESTINATION)
    found = []
    for rank, layout in enumerate(source):
        plan = make_plan(
            election, source=(rank, ours, {"c": pool(layout, page_size=page_size)}), destination=(0, theirs, {"c": place})
        )
        found.append(bind(plan.components["c"], source=rows[rank], destination=target, tokens=tokens, **more))
    return found


def ids(*numbers: int, first_token: int = 0) -> Pages:
    return Pages(np.array(numbers, np.int32), first_token)


def simple(source: Rows, destination: Rows, tokens: tuple[int, int] | None, **more: Any) -> list[tuple[int, int, int]]:
    whole = pages_layout()
    (copies,) = bound([whole], whole, rows=[source], target=destination, tokens=tokens, **more)
    return triples(copies)


def test_neighbouring_pages_are_one_copy() -> None:
    assert simple(ids(2, 3, 4), ids(1, 2, 3), (0, 24)) == [(SOURCE + 64, DESTINATION + 32, 96)]
    assert simple(ids(2, 4, 3), ids(1, 2, 3), (0, 24)) == [
        (SOURCE + 64, DESTINATION + 32, 32),
        (SOURCE + 128, DESTINATION + 64, 32),
        (SOURCE + 96, DESTINATION + 96, 32),
    ]
    assert simple(ids(2, 3), ids(0, 1), (3, 3)) == []


@pytest.mark.parametrize(
    ("source", "destination", "tokens", "message"),
    [
        (ids(0, -1), ids(1, 2), (0, 16), "source: token 8 lies in page -1, outside the pool of 6"),
        (ids(0, 1), ids(-1, 2), (0, 16), "destination: token 0 lies in page -1"),
        (ids(0, 6), ids(1, 2), (0, 16), "source: token 8 lies in page 6"),
        (ids(0, 1), ids(1, 2**31 - 1), (3, 16), "destination: token 8 lies in page 2147483647"),
        (ids(0), ids(1, 2), (0, 9), "source: needed token 8 has no page; 1 pages of 8 tokens are listed, from token 0 on"),
        (ids(0, 1), ids(1), (0, 9), "destination: needed token 8 has no page"),
        (ids(0, 1, first_token=8), ids(1, 2), (7, 16), "source: needed token 7 has no page.*from token 8 on"),
        (ids(), ids(1, 2), (0, 1), "source: needed token 0 has no page; 0 pages"),
        (Slot(0), ids(1), (0, 1), "source: expected Pages, found Slot"),
        (ids(0), Slot(1), (0, 1), "destination: expected Pages, found Slot"),
        (ids(0), ids(1), None, "a token range is needed"),
        (ids(0), ids(1), (-5, 3), "token"),
        (ids(0), ids(1), (5, 3), "token"),
        (ids(0), ids(1), (0, 2**50), "token"),
        (ids(0, first_token=2**63), ids(1), (0, 3), "token"),
    ],
)
def test_rows_without_a_page_for_a_needed_token_are_rejected(
    source: Rows, destination: Rows, tokens: Any, message: str
) -> None:
    with pytest.raises(LayoutError, match=f"component 'c'.*{message}"):
        simple(source, destination, tokens)


def test_tokens_that_are_not_needed_may_lack_a_page() -> None:
    assert simple(ids(0, -1, 2), ids(-1, 99, 2), (16, 24)) == [(SOURCE + 64, DESTINATION + 64, 32)]
    assert simple(ids(5, 6, first_token=3), ids(5), (4, 8)) == [(SOURCE + 176, DESTINATION + 176, 16)]


@pytest.mark.parametrize("first_token", range(8, 16))
def test_the_first_token_may_be_anywhere_in_the_first_page(first_token: int) -> None:
    assert simple(ids(4, 5, first_token=first_token), ids(0, 1, 2), (15, 17)) == [
        (SOURCE + 4 * 32 + 28, DESTINATION + 32 + 28, 8)
    ]


def test_slots_must_be_slots_inside_the_pool() -> None:
    layout = state("c", (0,), dim=(4, EVERYTHING))
    both = table([layout])
    place = Placement("c", 1, 3, (TensorPlacement("s", (0,), (SOURCE,), 4, {"dim": 1}),))
    plan = make_plan(elect(both, both), source=(0, both, {"c": place}), destination=(0, both, {"c": place})).components["c"]
    assert triples(bind(plan, source=Slot(2), destination=Slot(0))) == [(SOURCE + 8, SOURCE, 4)]
    with pytest.raises(LayoutError, match="source: slot 3 is outside the pool of 3"):
        bind(plan, source=Slot(3), destination=Slot(0))
    with pytest.raises(LayoutError, match="destination: expected a Slot, found Pages"):
        bind(plan, source=Slot(0), destination=ids(0))
    check_rows(layout, place, Slot(2), (0, 0))
    with pytest.raises(LayoutError, match="slot 3"):
        check_rows(layout, place, Slot(3), (0, 0))


def test_pooled_positions_move_once_all_their_tokens_exist() -> None:
    for granule, tokens, moved in (
        (4, (0, 24), range(6)),
        (4, (0, 23), range(5)),
        (2, (0, 5), range(2)),
        (8, (8, 20), range(1, 2)),
    ):
        layout = pages_layout(EVERYTHING, granule)
        (copies,) = bound([layout], layout, rows=[ids(3, 1, 5)], target=ids(0, 4, 2), tokens=tokens)
        per_page = 8 // granule
        wanted = [
            (
                (3, 1, 5)[p // per_page] * per_page * 4 + p % per_page * 4,
                (0, 4, 2)[p // per_page] * per_page * 4 + p % per_page * 4,
            )
            for p in moved
        ]
        found = [(s - SOURCE + i, d - DESTINATION + i) for s, d, n in triples(copies) for i in range(0, n, 4)]
        assert found == wanted


@pytest.mark.parametrize(
    "owned", [(Periodic(0, 8, 16), Periodic(8, 8, 16)), (Share(0, 2, 8), Share(1, 2, 8))], ids=["pages in turn", "page blocks"]
)
def test_pooled_positions_belong_to_the_owner_of_their_tokens(owned: tuple[Owned, Owned]) -> None:
    sources = [pages_layout(each, 1, 4) for each in owned]
    batches = bound(
        sources, pages_layout(EVERYTHING, 1, 4), rows=[ids(0, 1), ids(0, 1)], target=ids(0, 1, 2, 3), tokens=(0, 32)
    )
    assert [batch.total_nbytes for batch in batches] == [16 * 4 + 4 * 4] * 2
    written = sorted(
        d - 2 * DESTINATION + i for b in batches for _, d, n in triples(b) if d >= 2 * DESTINATION for i in range(n)
    )
    assert written == list(range(32))


@pytest.mark.parametrize("granule", [3, 16])
def test_a_granule_that_does_not_divide_the_page_is_rejected(granule: int) -> None:
    layout = pages_layout(EVERYTHING, granule)
    with pytest.raises(LayoutError, match="granule"):
        bound([layout], layout, rows=[ids(0, 1)], target=ids(0, 1), tokens=(0, 16))


@pytest.mark.sweep
@given(cases(), st.data())
def test_chunks_of_tokens_add_up_to_the_whole(case: Case, data: st.DataObject) -> None:
    if Context.PAGE_BLOCKS in (case.source.context, case.destination.context):
        return
    scene = Scene(case)
    cuts = sorted(data.draw(st.sets(st.integers(case.need, case.num_tokens), max_size=3)) | {case.need, case.num_tokens})
    moves = [
        Move(source, destination, scene.bind(source, destination, tokens=chunk))
        for source, destination in scene.election.by_pair
        for chunk in itertools.pairwise(cuts)
    ]
    scene.run(moves)
    assert scene.difference() is None


def test_a_chunk_of_a_request_with_tokens_in_blocks() -> None:
    """Two ranks own tokens 0 to 15 and 16 to 31 of 32, so rank 0 writes the whole chunk of tokens 0 to 15."""
    sources = [pages_layout(Share(i, 2, 8)) for i in range(2)]
    rows = [ids(0, 1), ids(0, 1)]
    first = bound(sources, pages_layout(), rows=rows, target=ids(0, 1, 2, 3), tokens=(0, 16), num_tokens=32)
    assert [batch.total_nbytes for batch in first] == [64, 0]
    second = bound(sources, pages_layout(), rows=rows, target=ids(0, 1, 2, 3), tokens=(16, 32), num_tokens=32)
    assert [batch.total_nbytes for batch in second] == [0, 64]


def test_destination_rows_are_checked() -> None:
    layout = pages_layout(EVERYTHING, 1, 4)
    place = pool(layout)
    check_rows(layout, place, ids(3, 0, 5), (0, 24))
    check_rows(layout, place, ids(3, 3), (0, 8))
    check_rows(layout, place, ids(), (5, 5))
    with pytest.raises(LayoutError, match="page 3 is listed twice"):
        check_rows(layout, place, ids(3, 0, 3), (0, 24))
    with pytest.raises(LayoutError, match="needed token 16 has no page"):
        check_rows(layout, place, ids(3, 0), (0, 17))
    with pytest.raises(LayoutError, match="lies in page 6"):
        check_rows(layout, place, ids(3, 6), (0, 16))
    with pytest.raises(LayoutError, match="expected Pages, found Slot"):
        check_rows(layout, place, Slot(1), (0, 20))
    with pytest.raises(LayoutError, match="token"):
        check_rows(layout, place, ids(3), (0, 2**50))


def test_the_first_page_at_or_after_a_token() -> None:
    for tokens, token, page in (
        (EVERYTHING, 17, 1),
        (Periodic(1, 1, 2), 17, 0),
        (Share(1, 2, 16), 40, 0),
        (Share(0, 2, 16), 40, 2),
    ):
        assert first_page(RowSpace(16, 8, tokens), token, 64) == page


OWNED = st.sampled_from(
    [EVERYTHING, Periodic(1, 2, 3), Periodic(4, 4, 8), Intervals((interval(2, 5).parts[0], interval(9, 40).parts[0]))]
)


@given(
    tokens=OWNED,
    page=st.sampled_from([4, 8]),
    first=st.integers(0, 40),
    chunk=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_listed_rows_are_those_of_the_tokens(tokens: Owned, page: int, first: int, chunk: tuple[int, int]) -> None:
    """Against a walk over the request's owned tokens, of which every `page` fill a page."""
    assert not isinstance(tokens, Share)
    layout = pages_layout(tokens)
    place = pool(layout, page_size=page, num_pages=20)
    owned = [token for token in range(80) if tokens.count_below(token + 1) > tokens.count_below(token)]
    page_of = {token: index // page for index, token in enumerate(owned)}
    skipped = sum(token < first for token in owned) // page
    rows = Pages(np.arange(100, 100 - 12, -1) % 25, first)  # some ids are outside the pool
    wanted = {page_of[token] - skipped for token in owned if chunk[0] <= token < chunk[1]}
    found = listed_rows(layout, place, rows, chunk).tolist()
    assert found == [row for i, row in enumerate(rows.ids.tolist()) if i in wanted and row < 20]


def test_all_listed_rows_where_the_tokens_are_not_known() -> None:
    place = pool(pages_layout())
    rows = Pages([3, -1, 5, 6])
    for layout, tokens in ((pages_layout(), None), (pages_layout(Share(1, 2, 8)), (0, 8))):
        assert listed_rows(layout, place, rows, tokens).tolist() == [3, 5]
    slots = state("c", (0,), dim=(4, EVERYTHING))
    assert listed_rows(slots, pool(slots), Slot(2), (0, 8)).tolist() == [2]
    assert listed_rows(slots, pool(slots), Slot(6), None).tolist() == []


def test_more_pages_than_a_share_of_that_length_has_are_refused() -> None:
    """Rank 0 of two has three pages of 80 tokens, and two of 64."""
    everything = RowSpace(16, 8, EVERYTHING)
    share = ComponentPlan("c", RowSpace(16, 8, Share(0, 2, 16)), everything, ())
    pages = Pages(np.array([1, 2, 3], np.int32))
    check_share(share, pages, 80)
    check_share(share, Pages(np.array([3], np.int32), 32), 80)
    for listed in (pages, Pages(np.array([3], np.int32), 32)):
        with pytest.raises(LayoutError, match="expected at most 2 pages, this rank's share of 64 tokens, found 3"):
            check_share(share, listed, 64)
    check_share(share, Slot(1), 64)
    check_share(ComponentPlan("c", everything, everything, ()), pages, 16)
