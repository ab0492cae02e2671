"""Plans against a naive reference: whole pools, every byte, and wrong plans that must be detected."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.copies import CopyBatch
from disagg.core.rows import Pages
from disagg.layout.binding import bind
from disagg.layout.placement import Placement
from disagg.layout.plan import make_plan
from disagg.testing.reference import Context, KVModel
from disagg.testing.scene import Case, Move, Scene, Side
from disagg.testing.strategies import AXES, DTYPES, HND, NHD, cases, pairwise
from tests.support.layouts import triples


def check(case: Case) -> Scene:
    scene = Scene(case)
    scene.run()
    assert scene.difference() is None, case
    return scene


@pytest.mark.sweep
@pytest.mark.parametrize("heads", range(1, 9))
def test_every_number_of_heads_on_every_tp_to_every_tp(heads: int) -> None:
    for source, destination in itertools.product(range(1, 9), repeat=2):
        check(
            Case(
                model=KVModel(num_kv_heads=heads, dims={"k": 2, "v": 3}),
                source=Side(tp=source, page=2, stages=((0,),)),
                destination=Side(tp=destination, page=3, stages=((0,),), axes=HND if source % 2 else NHD),
                num_tokens=4,
            )
        )


@pytest.mark.sweep
@pytest.mark.parametrize("source", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("destination", [1, 2, 3, 4, 6])
def test_every_pair_of_page_sizes_at_every_offset(source: int, destination: int) -> None:
    model = KVModel(num_kv_heads=1, dims={"k": 1, "v": 1}, dtype="uint8")
    ours, theirs = Side(page=source, stages=((0,),)), Side(page=destination, stages=((0,),))
    for need, num_tokens in itertools.combinations_with_replacement(range(14), 2):
        if num_tokens:
            check(Case(model=model, source=ours, destination=theirs, num_tokens=num_tokens, need=need, source_first=need // 2))


@pytest.mark.sweep
def test_every_split_of_five_layers_into_every_split() -> None:
    def splits() -> list[tuple[tuple[int, ...], ...]]:
        return [
            tuple(tuple(range(a, b)) for a, b in itertools.pairwise((0, *cuts, 5)))
            for num in range(5)
            for cuts in itertools.combinations(range(1, 5), num)
        ]

    model = KVModel(num_kv_heads=1, dims={"k": 1, "v": 2}, dtype="uint8")
    for ours, theirs in itertools.product(splits(), repeat=2):
        check(Case(model=model, source=Side(stages=ours), destination=Side(stages=theirs), num_tokens=3))


K_BESIDE_V = ("page kv token kv_head dim", "page kv kv_head token dim")


@pytest.mark.parametrize(
    ("source", "destination", "num_tokens", "num_copies"),
    [
        (Side(axes=K_BESIDE_V[0]), Side(axes=K_BESIDE_V[0]), 40, 3 * (2 + 2)),  # K and V of the half page are apart
        (Side(axes=K_BESIDE_V[1]), Side(axes=K_BESIDE_V[1]), 48, 3 * 3),
        (Side(axes=K_BESIDE_V[1]), Side(axes=K_BESIDE_V[1]), 40, 3 * (2 + 4)),
        (Side(axes=K_BESIDE_V[0]), Side(axes=K_BESIDE_V[0], page=8), 48, 3 * 6 * 2),
        (Side(axes=K_BESIDE_V[0]), Side(axes=K_BESIDE_V[0], tp=2), 48, 3 * 2 * 48),
        (Side(axes=K_BESIDE_V[0]), Side(axes=NHD), 48, 3 * 3 * 2),
        (Side(axes=K_BESIDE_V[0]), Side(axes=K_BESIDE_V[1]), 48, 3 * 2 * 2 * 48),
    ],
)
def test_k_and_v_that_lie_side_by_side_in_both_memories_are_one_copy(
    source: Side, destination: Side, num_tokens: int, num_copies: int
) -> None:
    """Three layers of two heads; pages of 16 tokens unless a side has 8."""
    sides = [replace(side, stages=((0, 1, 2),), page=8 if side.page == 8 else 16) for side in (source, destination)]
    model = KVModel(num_kv_heads=2, dims={"k": 8, "v": 8}, dtype="uint16")
    scene = check(Case(model=model, source=sides[0], destination=sides[1], num_tokens=num_tokens))
    ours, theirs = scene.rows(0, 0)
    assert len(bind(scene.plan(0, 0), source=ours, destination=theirs, tokens=(0, num_tokens))) == num_copies


SETTINGS: dict[str, Sequence[Any]] = {
    "heads": (1, 2, 3, 4, 8),
    "dtype": DTYPES,
    "source_tp": (1, 2, 3, 4, 8),
    "destination_tp": (1, 2, 3, 4, 8),
    "source_pp": (1, 2, 3),
    "destination_pp": (1, 2, 3),
    "source_cp": (1, 2, 3),
    "destination_cp": (1, 2, 3),
    "source_context": tuple(Context),
    "destination_context": tuple(Context),
    "source_page": (1, 4, 6, 16),
    "destination_page": (1, 4, 6, 16),
    "source_axes": AXES,
    "destination_axes": AXES,
    "num_tokens": (1, 15, 16, 17, 37),
    "need": (0, 1, 16, 37),
}


def stages_of(pp: int) -> tuple[tuple[int, ...], ...]:
    """Four layers over `pp` stages."""
    return {1: ((1, 4, 6, 9),), 2: ((1,), (4, 6, 9)), 3: ((1, 4), (6,), (9,))}[pp]


def test_the_pairwise_settings_cover_every_pair() -> None:
    rows = pairwise(SETTINGS)
    for one, other in itertools.combinations(SETTINGS, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(SETTINGS[one], SETTINGS[other]))
    assert len(rows) < 200


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_settings_of_the_two_sides(part: int) -> None:
    for row in pairwise(SETTINGS)[part::4]:
        sides = [
            Side(
                tp=row[f"{side}_tp"],
                cp=row[f"{side}_cp"],
                stages=stages_of(row[f"{side}_pp"]),
                page=row[f"{side}_page"],
                axes=row[f"{side}_axes"],
                context=row[f"{side}_context"],
            )
            for side in ("source", "destination")
        ]
        model = KVModel(num_kv_heads=row["heads"], dims={"k": 2, "v": 2}, dtype=row["dtype"])
        need = min(row["need"], row["num_tokens"])
        check(Case(model=model, source=sides[0], destination=sides[1], num_tokens=row["num_tokens"], need=need))


@given(cases())
def test_random_cases_match_the_reference(case: Case) -> None:
    check(case)


@given(cases(), st.data())
def test_inputs_are_never_changed(case: Case, data: st.DataObject) -> None:
    scene = Scene(case)
    tables = [instance.table.encode() for instance in (scene.source, scene.destination)]
    places = [
        msgspec.msgpack.encode(c.placement) for instance in (scene.source, scene.destination) for c in instance.components
    ]
    pools = [tensor.tobytes() for found in scene.source.pools for tensors in found.values() for tensor in tensors]
    flows = scene.election.flows
    source, destination = data.draw(st.sampled_from(sorted(scene.election.by_pair)))
    plan = make_plan(
        scene.election,
        source=(source, scene.source.table, {"kv": placed(scene.source.components[source].placement)}),
        destination=(destination, scene.destination.table, {"kv": placed(scene.destination.components[destination].placement)}),
    ).components["kv"]
    spans = [(span.source_bases.copy(), span.destination_bases.copy(), span.layers.copy()) for span in plan.spans]
    rows = [pages_of(instance.pages[rank]) for instance, rank in ((scene.source, source), (scene.destination, destination))]
    ids = [each.ids.copy() for each in rows]
    first = bind(plan, source=rows[0], destination=rows[1], tokens=(case.need, case.num_tokens))
    again = bind(plan, source=rows[0], destination=rows[1], tokens=(case.need, case.num_tokens))
    assert triples(first) == triples(again)
    assert all((a == b.ids).all() for a, b in zip(ids, rows, strict=True))
    assert tables == [instance.table.encode() for instance in (scene.source, scene.destination)]
    assert places == [
        msgspec.msgpack.encode(c.placement) for instance in (scene.source, scene.destination) for c in instance.components
    ]
    assert pools == [tensor.tobytes() for found in scene.source.pools for tensors in found.values() for tensor in tensors]
    assert scene.election.flows == flows
    for (ours, theirs, layers), span in zip(spans, plan.spans, strict=True):
        assert (ours == span.source_bases).all()
        assert (theirs == span.destination_bases).all()
        assert (layers == span.layers).all()


def placed(placement: Placement | None) -> Placement:
    assert placement is not None
    return placement


def pages_of(pages: Any) -> Pages:
    return Pages(np.array(pages.ids, dtype=np.int32), pages.first_token)


# --------------------------------------------------------------------------------------------------------- wrong plans


CONTROL = Case(
    model=KVModel(num_kv_heads=4, dims={"k": 4, "v": 6}),
    source=Side(tp=2),
    destination=Side(tp=4, axes=HND),
    num_tokens=13,
    need=2,
)


def test_the_comparison_accepts_the_control_case() -> None:
    check(CONTROL)


@pytest.mark.parametrize("column", ["source", "destination"])
@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_plan_with_one_wrong_offset_is_detected(column: str, place: int) -> None:
    scene = Scene(CONTROL)
    moves = scene.moves()
    copies = moves[0].copies
    columns = {name: getattr(copies, name).copy() for name in ("source", "destination", "nbytes")}
    columns[column][place] += np.uint64(2)
    moves[0] = Move(moves[0].source, moves[0].destination, CopyBatch(**columns))
    try:
        scene.run(moves)
    except AssertionError:
        return
    assert scene.difference() is not None


def test_a_plan_with_swapped_peers_is_detected() -> None:
    scene = Scene(CONTROL)
    swapped = {0: 1, 1: 0}
    moves = []
    for move in scene.moves():
        there = scene.source.pools[swapped[move.source]]
        here = scene.source.pools[move.source]
        source = move.copies.source.copy()
        for layer, number in itertools.product(here, range(2)):
            start = here[layer][number].ctypes.data
            inside = (source >= start) & (source < start + here[layer][number].nbytes)
            source[inside] = source[inside] - np.uint64(start) + np.uint64(there[layer][number].ctypes.data)
        moves.append(
            Move(swapped[move.source], move.destination, CopyBatch(source, move.copies.destination, move.copies.nbytes))
        )
    scene.run(moves)
    assert scene.difference() is not None


def test_a_copy_left_out_or_one_too_many_is_detected() -> None:
    scene = Scene(CONTROL)
    moves = scene.moves()
    left_out = CopyBatch(*(getattr(moves[2].copies, name)[1:] for name in ("source", "destination", "nbytes")))
    scene.run([*moves[:2], Move(moves[2].source, moves[2].destination, left_out), *moves[3:]])
    assert scene.difference() is not None
    again = Scene(CONTROL)
    moves = again.moves()
    with pytest.raises(AssertionError, match="two writers"):
        again.run([*moves, moves[0]])


def test_a_copy_outside_the_pools_is_detected_before_it_is_made() -> None:
    scene = Scene(CONTROL)
    moves = scene.moves()
    copies = moves[0].copies
    far = CopyBatch(copies.source, copies.destination, copies.nbytes + np.uint64(1 << 30))
    with pytest.raises(AssertionError):
        scene.run([Move(moves[0].source, moves[0].destination, far)])
