"""Elections: one writer per destination byte, with equal shares for replicas, the same on both sides."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict

import pytest
from hypothesis import given

from disagg.core.errors import LayoutError
from disagg.core.topology import Topology
from disagg.layout import election
from disagg.layout.election import Election, elect
from disagg.layout.ownership import EVERYTHING, Interval, Intervals, Owned, Periodic, Share, interval
from disagg.layout.plan import make_plan
from disagg.layout.tables import Axis, ComponentLayout, LayoutTable, RankLayout, TensorLayout, TopologySizes, layout_table
from disagg.testing.reference import KVModel
from disagg.testing.scene import Case, Scene, Side
from disagg.testing.strategies import cases
from tests.support.layouts import state, table


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


@pytest.mark.sweep
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


def test_lists_of_tokens_are_not_kept_and_not_told_whole() -> None:
    """A peer may send as many as it likes, each of any length."""
    before = election._is_partition.cache_info().currsize
    for number in range(5):
        many = Intervals(tuple(Interval(2 * each, 2 * each + 1) for each in range(number, 2000)))
        with pytest.raises(LayoutError, match="expected sources that own each token once, found") as raised:
            elect(by_tokens(many), by_tokens(EVERYTHING))
        assert len(str(raised.value)) < 500
    assert election._is_partition.cache_info().currsize == before


def test_token_ownerships_of_giant_periods_are_rejected_in_bounded_memory() -> None:
    tracemalloc.start()
    for owned in (
        (Periodic(0, 2**61, 2**62 - 1),),
        (Periodic(0, 1, 2**20 + 7), Periodic(1, 2**20 + 6, 2**20 + 7)),
        (Periodic(0, 1, 1021), Periodic(1, 1, 1031), Periodic(2, 1, 1033)),
        (Periodic(0, 1, 1), Periodic(2**61, 1, 1)),
        tuple(Periodic(index, 1, 2**20) for index in range(9)),
        (Share(0, 2**31),),
        (Share(0, 2), Share(0, 2)),
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


def test_an_empty_election() -> None:
    empty = Election((), ())
    assert empty.by_pair == {}
    assert empty.writers(0) == empty.readers(0) == ()
    nothing = LayoutTable(TopologySizes(), (RankLayout(()),))
    assert make_plan(empty, source=(0, nothing, {}), destination=(0, nothing, {})).components == {}


def test_layouts_whose_parts_multiply_are_refused_in_bounded_steps() -> None:
    """A table of a few hundred bytes from a peer: every second position on three axes gives 2**27 boxes."""
    every_second = Periodic(0, 1, 2)
    source, destination = (
        table([state("c", range(2), a=(1024, every_second), b=(1024, every_second), c=(1024, every_second))]) for _ in range(2)
    )
    with pytest.raises(LayoutError, match=r"tensor .*, destination rank 0: the layouts have too many parts"):
        elect(source, destination)
