"""Elections, plans and binding against a naive reference and against definitions, by moving real bytes."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.copies import CopyBatch
from disagg.core.errors import LayoutError
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.layout.agreement import expected_tokens
from disagg.layout.binding import bind, check_rows
from disagg.layout.election import Election, elect
from disagg.layout.ownership import (
    EVERYTHING,
    Interval,
    Intervals,
    Owned,
    Periodic,
    Share,
    interval,
    positions_to_intervals,
    split,
)
from disagg.layout.placement import Placement, TensorPlacement
from disagg.layout.plan import RowSpace, first_page, make_plan
from disagg.layout.tables import Axis, ComponentLayout, LayoutTable, RankLayout, TensorLayout, TopologySizes, layout_table
from disagg.testing.reference import Context, KVModel
from disagg.testing.scene import Case, Move, Scene, Side, owned_positions
from disagg.testing.strategies import AXES, DTYPES, HND, NHD, cases, ownerships, pairwise

# ----------------------------------------------------------------------------------------------- whole pools, all bytes


def check(case: Case) -> Scene:
    scene = Scene(case)
    scene.run()
    assert scene.difference() is None, case
    return scene


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


@pytest.mark.parametrize("source", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("destination", [1, 2, 3, 4, 6])
def test_every_pair_of_page_sizes_at_every_offset(source: int, destination: int) -> None:
    model = KVModel(num_kv_heads=1, dims={"k": 1, "v": 1}, dtype="uint8")
    ours, theirs = Side(page=source, stages=((0,),)), Side(page=destination, stages=((0,),))
    for need, num_tokens in itertools.combinations_with_replacement(range(14), 2):
        if num_tokens:
            check(Case(model=model, source=ours, destination=theirs, num_tokens=num_tokens, need=need, source_first=need // 2))


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


def triples(copies: CopyBatch) -> list[tuple[int, int, int]]:
    return list(zip(copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------ negative controls

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


# ------------------------------------------------------------------------------------------------------------- elections


def state(
    name: str,
    layers: Sequence[int],
    *,
    dtype: str = "uint8",
    tokens: Owned | None = None,
    role: str = "s",
    **axes: tuple[int, Owned],
) -> ComponentLayout:
    """A component of one tensor: a slot, or pages where `tokens` is given."""
    token = () if tokens is None else (Axis("token", None, tokens),)
    inner = tuple(Axis(axis, size, owned) for axis, (size, owned) in axes.items())
    tensor = TensorLayout(role, dtype, (Axis("layer", None, positions_to_intervals(layers)), *token, *inner))
    return ComponentLayout(name, "slot" if tokens is None else "pages", (tensor,))


def table(*per_component: Sequence[ComponentLayout | None], **sizes: int) -> LayoutTable:
    sizes = sizes or {"tp": len(per_component[0])}
    return layout_table(Topology(**sizes), per_component)


def test_replicas_write_equal_shares() -> None:
    for replicas, readers, layers, components in itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 5), (1, 2)):
        names = [f"c{i}" for i in range(components)]
        source = table(*[[state(name, range(layers), dim=(4, EVERYTHING)) for _ in range(replicas)] for name in names])
        destination = table(*[[state(name, range(layers), dim=(4, EVERYTHING)) for _ in range(readers)] for name in names])
        election = elect(source, destination)
        runs = Counter(dict.fromkeys(range(replicas), 0))
        for flow in election.flows:
            runs[flow.source] += len(flow.layers)
        assert sum(runs.values()) == readers * layers * components
        assert max(runs.values()) - min(runs.values()) <= 1
        for reader in range(readers):
            per_reader = Counter(dict.fromkeys(range(replicas), 0))
            for flow in election.flows:
                if flow.destination == reader:
                    per_reader[flow.source] += len(flow.layers)
            assert max(per_reader.values()) - min(per_reader.values()) <= 1


@pytest.mark.parametrize(("heads", "source", "destination"), [(4, 8, 1), (2, 8, 3), (1, 4, 2), (3, 8, 2), (2, 5, 1)])
def test_replicas_of_each_head_write_equal_shares(heads: int, source: int, destination: int) -> None:
    side = Side(tp=source, stages=(tuple(range(5)),))
    scene = Scene(
        Case(
            model=KVModel(num_kv_heads=heads, dims={"k": 2, "v": 2}),
            source=side,
            destination=Side(tp=destination, stages=side.stages),
            num_tokens=3,
        )
    )
    owners = defaultdict(set)
    for rank in range(source):
        owners[rank * heads // source].add(rank)
    for ranks in owners.values():
        runs: dict[int, set[tuple[int, int]]] = {rank: set() for rank in ranks}
        for flow in scene.election.flows:
            if flow.source in runs:
                runs[flow.source] |= {(flow.destination, layer) for layer in flow.layers}
        counts = [len(found) for found in runs.values()]
        assert max(counts) - min(counts) <= 1


def test_k_and_v_of_a_layer_have_one_writer() -> None:
    scene = Scene(
        Case(model=KVModel(num_kv_heads=1, dims={"k": 2, "v": 2}), source=Side(tp=4), destination=Side(tp=2), num_tokens=3)
    )
    by_role = {role: {(f.source, f.destination, f.layers) for f in scene.election.flows if f.role == role} for role in "kv"}
    assert by_role["k"] == by_role["v"]


def test_a_head_is_one_flow_at_any_width() -> None:
    model = KVModel(num_kv_heads=8, dims={"k": 128, "v": 128}, dtype="float16")
    scene = Scene(Case(model=model, source=Side(tp=4), destination=Side(tp=2), num_tokens=3))
    assert len(scene.election.flows) == 2 * 2 * 2
    assert {len(move.copies) for move in scene.moves()} == {2 * 2 * 3}


@given(cases())
def test_both_sides_elect_the_same(case: Case) -> None:
    scene = Scene(case)
    theirs = elect(LayoutTable.decode(scene.source.table.encode()), LayoutTable.decode(scene.destination.table.encode()))
    assert theirs == scene.election
    assert theirs.digest == scene.election.digest
    for source, destination in itertools.product(range(len(scene.source.ranks)), range(len(scene.destination.ranks))):
        pair = (source, destination) in scene.election.by_pair
        assert (source in scene.election.writers(destination)) == pair == (destination in scene.election.readers(source))


def test_different_elections_have_different_digests() -> None:
    model = KVModel(num_kv_heads=2, dims={"k": 2, "v": 2})
    digests = {
        Scene(Case(model=model, source=Side(tp=source), destination=Side(tp=destination), num_tokens=1)).election.digest
        for source, destination in itertools.product((1, 2, 4), repeat=2)
    }
    assert len(digests) == 9


PROGRAM = """
from disagg.testing.scene import Case, Scene, Side
from disagg.testing.reference import Context, KVModel
scene = Scene(Case(
    model=KVModel(num_kv_heads=3, dims={"k": 2, "v": 4}),
    source=Side(tp=8, cp=2, stages=((0, 5), (3,)), context=Context.TOKENS_IN_TURN),
    destination=Side(tp=2, cp=3, stages=((3, 0, 5),), context=Context.PAGE_BLOCKS), num_tokens=9))
print(scene.election.digest.hex(), len(scene.election.flows))
"""


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().split()[0]) == 64


def test_an_uncovered_destination_is_rejected_with_axis_and_both_sides() -> None:
    def heads(*owned: Owned) -> LayoutTable:
        return table([state("ssm", (0, 12), head=(8, each), dim=(4, EVERYTHING)) for each in owned])

    with pytest.raises(
        LayoutError, match=r"'ssm'.*destination rank 0, layer 0.*'head' \[4, 8\).*'head' \[0, 4\).*\(source rank 0\)"
    ):
        elect(heads(interval(0, 4)), heads(interval(0, 8)))
    with pytest.raises(LayoutError, match=r"destination rank 1.*needs 'head' \[6, 8\)"):
        elect(heads(interval(0, 4), interval(4, 6)), heads(interval(0, 4), interval(4, 8)))


def test_a_layer_whose_stage_lacks_the_head_is_rejected() -> None:
    source = layout_table(
        Topology(pp=2), [[state("ssm", (0,), head=(2, EVERYTHING)), state("ssm", (1,), head=(2, interval(0, 1)))]]
    )
    with pytest.raises(LayoutError, match=r"layer 1: destination needs 'head' \[1, 2\), but no source holds it"):
        elect(source, table([state("ssm", (0, 1), head=(2, EVERYTHING))]))


def by_tokens(*owned: Owned) -> LayoutTable:
    return table([state("kv", (0,), tokens=each, dim=(2, EVERYTHING)) for each in owned])


@pytest.mark.parametrize(
    "owned",
    [
        (EVERYTHING,),
        (EVERYTHING, EVERYTHING),
        (Periodic(0, 1, 2), Periodic(1, 1, 2)),
        (Periodic(0, 1, 2), Periodic(1, 1, 2), Periodic(1, 1, 2)),
        (Periodic(0, 4, 8), Periodic(4, 2, 8), Periodic(6, 2, 8)),
        (Periodic(0, 1, 2), Periodic(1, 1, 4), Periodic(3, 1, 4)),
        (Share(0, 2, 16), Share(1, 2, 16)),
        (Share(1, 2), Share(0, 2), Share(0, 2)),
    ],
    ids=lambda owned: "; ".join(map(str, owned)),
)
def test_sources_that_own_each_token_once_are_accepted(owned: tuple[Owned, ...]) -> None:
    election = elect(by_tokens(*owned), by_tokens(EVERYTHING))
    assert len(election.flows) == len(set(owned))


@pytest.mark.parametrize(
    "owned",
    [
        (Periodic(0, 1, 2),),
        (Periodic(1, 1, 1),),
        (Periodic(0, 1, 2), EVERYTHING),
        (Periodic(0, 2, 3), Periodic(1, 2, 3)),
        (Periodic(0, 1, 1), Periodic(100, 1, 1)),
        (Periodic(0, 1, 2), Periodic(1, 1, 2), Periodic(1001, 1, 2)),
        (Share(0, 2), Share(1, 2, 16)),
        (Share(0, 3), Share(1, 3)),
        (Share(0, 2), Share(1, 3)),
        (Share(0, 1), EVERYTHING),
        (interval(0, 100),),
        (interval(0, 100), Periodic(100, 1, 1)),
    ],
    ids=lambda owned: "; ".join(map(str, owned)),
)
def test_sources_that_do_not_own_each_token_once_are_rejected(owned: tuple[Owned, ...]) -> None:
    with pytest.raises(LayoutError, match=r"axis 'token': expected sources that own each token once, found"):
        elect(by_tokens(*owned), by_tokens(EVERYTHING))


def test_token_ownerships_of_giant_periods_are_rejected_in_bounded_memory() -> None:
    tracemalloc.start()
    for owned in (
        (Periodic(0, 2**61, 2**62 - 1),),
        (Periodic(0, 1, 2**20 + 7), Periodic(1, 2**20 + 6, 2**20 + 7)),
        (Periodic(0, 1, 1021), Periodic(1, 1, 1031), Periodic(2, 1, 1033)),
        (Periodic(0, 1, 1), Periodic(2**61, 1, 1)),
    ):
        with pytest.raises(LayoutError, match="axis 'token'"):
            elect(by_tokens(*owned), by_tokens(EVERYTHING))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_a_constant_axis_of_too_many_intervals_is_rejected() -> None:
    with pytest.raises(LayoutError, match="1 of every 2 from 0"):
        table([state("ssm", (0,), channel=(2**20, Periodic(0, 1, 2)))])


def test_ranks_that_own_nothing_have_no_flows() -> None:
    ssm, kv = state("ssm", (1,), dim=(2, EVERYTHING)), state("kv", (0,), dim=(2, EVERYTHING))
    idle = ComponentLayout(
        "kv", "slot", (TensorLayout("s", "uint8", (Axis("layer", None, Intervals(())), *kv.tensors[0].axes[1:])),)
    )
    source = layout_table(Topology(pp=3), [[kv, None, idle], [None, ssm, None]])
    destination = layout_table(Topology(pp=2), [[None, kv], [ssm, None]])
    election = elect(source, destination)
    assert sorted((f.source, f.destination, f.component) for f in election.flows) == [(0, 1, "kv"), (1, 0, "ssm")]
    assert election.writers(1) == (0,)
    assert election.readers(2) == ()


# ------------------------------------------------------------------------------- any ownership of any axis, byte for byte


class Array:
    """A rank's share of a global array `[layer, a, b]` in slots: `[slot, *axes in some order]`, maybe padded."""

    def __init__(
        self, layout: ComponentLayout, layers: Sequence[int], *, order: tuple[int, ...], num_slots: int, pad: int
    ) -> None:
        tensor = layout.tensors[0]
        self.owned = [owned_positions(axis.owned, size=axis.size or 0) for axis in tensor.inner_axes]
        self.layers = tuple(layers)
        shape = [num_slots, *(max(1, len(each)) for each in self.owned)]
        memory = np.full([shape[0], *(shape[1 + i] + pad for i in order)], 0xA5, dtype=tensor.dtype)
        self.memory = [memory.copy() for _ in self.layers]
        inverse = [1 + order.index(i) for i in range(len(order))]
        self.views = [each.transpose(0, *inverse)[:, : shape[1], : shape[2]] for each in self.memory]
        strides = (
            dict(zip((axis.name for axis in tensor.inner_axes), self.views[0].strides[1:], strict=True)) if self.views else {}
        )
        bases = tuple(view.ctypes.data for view in self.views)
        row_stride = self.views[0].strides[0] if self.views else 0
        self.placement = Placement("c", 1, num_slots, (TensorPlacement("s", self.layers, bases, row_stride, strides),))

    def share(self, globally: np.ndarray, layer: int) -> np.ndarray:
        found: np.ndarray = globally[layer][np.ix_(*self.owned)]
        return found


@given(st.data())
def test_random_ownerships_and_memory_orders_match_numpy(data: st.DataObject) -> None:
    sizes = {"a": data.draw(st.integers(1, 8)), "b": data.draw(st.integers(1, 5))}
    layers = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    dtype = data.draw(st.sampled_from(["uint8", "uint32"]))

    def rank(*, whole: bool) -> ComponentLayout:
        axes: dict[str, tuple[int, Owned]] = {}
        for name, size in sizes.items():
            shuffled = positions_to_intervals(data.draw(st.permutations(range(size))))
            axes[name] = size, shuffled if whole else data.draw(ownerships(size=size)).within(size)
        return state("c", data.draw(st.permutations(layers)), dtype=dtype, a=axes["a"], b=axes["b"])

    ours = [rank(whole=True), *(rank(whole=False) for _ in range(data.draw(st.integers(0, 2))))]
    theirs = [rank(whole=False) for _ in range(data.draw(st.integers(1, 2)))]
    orders = st.sampled_from([(0, 1), (1, 0)])
    arrays = [
        [Array(c, c.tensors[0].layers, order=data.draw(orders), num_slots=3, pad=data.draw(st.integers(0, 1))) for c in each]
        for each in (ours, theirs)
    ]
    slots = [[data.draw(st.integers(0, 2)) for _ in each] for each in (ours, theirs)]
    width = np.dtype(dtype).itemsize
    globally = np.arange(10 * sizes["a"] * sizes["b"], dtype=np.uint64).reshape(10, sizes["a"], sizes["b"]) * 2654435761 + 1
    content = (globally % np.uint64(2 ** (8 * width) - 1)).astype(dtype)
    for array, slot in zip(arrays[0], slots[0], strict=True):
        for layer, view in zip(array.layers, array.views, strict=True):
            found = array.share(content, layer)
            view[slot, : found.shape[0], : found.shape[1]] = found
    source, destination = table(ours), table(theirs)
    election = elect(source, destination)
    for s, d in election.by_pair:
        plan = make_plan(
            election,
            source=(s, source, {"c": arrays[0][s].placement}),
            destination=(d, destination, {"c": arrays[1][d].placement}),
        )
        chosen = bind(plan.components["c"], source=Slot(slots[0][s]), destination=Slot(slots[1][d]))
        one_by_one = [
            bind(plan.components["c"], source=Slot(slots[0][s]), destination=Slot(slots[1][d]), layers=[layer])
            for layer in layers
        ]
        assert sum(each.total_nbytes for each in one_by_one) == chosen.total_nbytes
        assert {layer for layer, each in zip(layers, one_by_one, strict=True) if len(each)} == set(plan.components["c"].layers)
        for address, target, nbytes in triples(chosen):
            ctypes.memmove(target, address, nbytes)
    for array, slot in zip(arrays[1], slots[1], strict=True):
        for layer, memory, view in zip(array.layers, array.memory, array.views, strict=True):
            wanted = np.full_like(memory, 0xA5)
            shape = [len(each) for each in array.owned]
            spot = np.lib.stride_tricks.as_strided(
                wanted[slot:], shape=view[slot].shape, strides=view.strides[1:], writeable=True
            )
            spot[: shape[0], : shape[1]] = array.share(content, layer)
            assert wanted.tobytes() == memory.tobytes()


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_each_sub_block_is_sharded(source_tp: int, destination_tp: int) -> None:
    """Channels `x, B, C` of 16, 8 and 8: a rank stores its part of each, one after the other, so it owns several intervals."""

    def channels(tp: int, rank: int) -> Intervals:
        parts, before = [], 0
        for width in (16, 8, 8):
            share = split(width, tp, rank)
            parts.append(Interval(before + share.start, before + share.stop))
            before += width
        return Intervals(tuple(parts))

    tables, arrays = [], []
    for tp in (source_tp, destination_tp):
        layouts = [state("c", (4, 2), a=(32, channels(tp, rank)), b=(3, EVERYTHING)) for rank in range(tp)]
        tables.append(table(layouts))
        arrays.append([Array(each, (4, 2), order=(0, 1), num_slots=2, pad=0) for each in layouts])
    content = np.random.default_rng(0).integers(0, 255, (5, 32, 3)).astype(np.uint8)
    for array in arrays[0]:
        for layer, view in zip(array.layers, array.views, strict=True):
            view[1] = array.share(content, layer)
    election = elect(*tables)
    for s, d in election.by_pair:
        places = {"c": arrays[0][s].placement}, {"c": arrays[1][d].placement}
        plan = make_plan(election, source=(s, tables[0], places[0]), destination=(d, tables[1], places[1]))
        for address, target, nbytes in triples(bind(plan.components["c"], source=Slot(1), destination=Slot(0))):
            ctypes.memmove(target, address, nbytes)
    for array in arrays[1]:
        for layer, view in zip(array.layers, array.views, strict=True):
            assert (view[0] == array.share(content, layer)).all()
            assert (view[1] == 0xA5).all()


# -------------------------------------------------------------------------------------------------------------- binding


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


@pytest.mark.parametrize(
    ("owned", "need", "wanted"),
    [
        (None, (0, 9), (0, 9)),
        (EVERYTHING, (3, 9), (3, 9)),
        (Periodic(1, 1, 2), (3, 9), (3, 9)),
        (Share(0, 2, 4), (3, 16), (3, 8)),
        (Share(1, 2, 4), (3, 16), (8, 16)),
        (Share(0, 2, 4), (9, 16), (9, 9)),
        (Share(1, 2, 4), (3, 3), (3, 3)),
    ],
)
def test_a_writer_must_send_the_hull_of_its_tokens(owned: Owned | None, need: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert expected_tokens(owned, need) == wanted


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


def test_an_empty_election() -> None:
    empty = Election((), ())
    assert empty.by_pair == {}
    assert empty.writers(0) == empty.readers(0) == ()
    nothing = LayoutTable(TopologySizes(), (RankLayout(()),))
    assert make_plan(empty, source=(0, nothing, {}), destination=(0, nothing, {})).components == {}


def test_the_first_page_at_or_after_a_token() -> None:
    for tokens, token, page in (
        (EVERYTHING, 17, 1),
        (Periodic(1, 1, 2), 17, 0),
        (Share(1, 2, 16), 40, 0),
        (Share(0, 2, 16), 40, 2),
    ):
        assert first_page(RowSpace(16, 8, tokens), token, 64) == page
