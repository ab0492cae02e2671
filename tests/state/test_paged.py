"""Paged K and V: declarations, and configurations that broke other systems, byte for byte."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.memory import RawTensor, merge_regions
from disagg.core.topology import Topology
from disagg.layout.agreement import LocalRank
from disagg.layout.ownership import Interval, Periodic
from disagg.state import paged
from disagg.testing.reference import Context, KVModel
from disagg.testing.scene import Case, Scene, Side
from disagg.testing.strategies import AXES, HND, NHD


def pair(*shape: int, dtype: str = "float16", value_dim: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(shape, dtype), np.zeros((*shape[:-1], value_dim or shape[-1]), dtype)


SHARED = np.zeros((5, 16, 2, 8), "float16")


def gqa(tensors: Any, *, axes: Any = NHD, num_kv_heads: int = 4, **changes: Any) -> Any:
    return paged.gqa(tensors, axes=axes, num_kv_heads=num_kv_heads, **({"topology": Topology(tp=2)} | changes))


# --------------------------------------------------------------------------------------------------------- declarations


def test_a_component_has_every_ranks_heads_and_this_ranks_memory() -> None:
    tensors = {3: pair(5, 16, 2, 8, value_dim=6), 1: pair(5, 16, 2, 8, value_dim=6)}
    found = gqa(tensors, topology=Topology(tp=2, tp_rank=1), optional=True, name="draft")
    assert [layout.tensor("k").axis("kv_head").owned.parts for layout in found.layouts] == [((0, 2),), ((2, 4),)]
    assert [layout.tensor("v").axis("dim").size for layout in found.layouts] == [6, 6]
    assert all(layout.optional and layout.name == "draft" for layout in found.layouts)
    assert found.layouts[0].tensor("v").layers == (3, 1)
    place = found.placement
    assert (place.page_size, place.num_rows) == (16, 5)
    assert place.tensor("k").bases == (tensors[3][0].ctypes.data, tensors[1][0].ctypes.data)
    assert place.tensor("v").strides == {"token": 24, "kv_head": 12, "dim": 2}
    assert sum(region.nbytes for region in merge_regions(found.regions)) <= sum(a.nbytes for p in tensors.values() for a in p)


def test_tokens_and_stages_of_every_rank() -> None:
    topology = Topology(tp=1, cp=2, pp=2, pp_rank=1)
    found = gqa(
        {2: pair(5, 4, 4, 8)},
        topology=topology,
        layers_by_stage=[[0, 1], [2]],
        tokens=lambda rank: Periodic(rank.cp_rank, 1, rank.cp),
    )
    assert [layout.tensor("k").layers for layout in found.layouts] == [(0, 1), (0, 1), (2,), (2,)]
    assert [layout.tensor("k").token.owned for layout in found.layouts] == [Periodic(0, 1, 2), Periodic(1, 1, 2)] * 2


def test_k_and_v_in_one_tensor_are_two_roles() -> None:
    packed = np.zeros((5, 2, 16, 2, 8), np.float16)
    place = gqa({0: packed}, axes="page kv token kv_head dim").placement
    assert place.tensor("v").bases[0] - place.tensor("k").bases[0] == 16 * 2 * 8 * 2
    assert place.tensor("k").row_stride == 2 * 16 * 2 * 8 * 2


def test_k_and_v_may_have_their_axes_in_other_orders() -> None:
    """As in pages where K is transposed for its matrix product."""
    tensors = {0: (np.zeros((5, 2, 8, 16), np.float16), np.zeros((5, 2, 16, 6), np.float16))}
    found = gqa(tensors, axes={"k": "page kv_head dim token", "v": "hnd"})
    assert [layout.tensor("k").axis("dim").size for layout in found.layouts] == [8, 8]
    assert found.placement.tensor("k").strides == {"kv_head": 8 * 16 * 2, "dim": 16 * 2, "token": 2}
    assert found.placement.tensor("v").strides == {"kv_head": 16 * 6 * 2, "token": 6 * 2, "dim": 2}
    scales = {0: (np.zeros((5, 2, 1, 16), np.float32), np.zeros((5, 2, 16, 1), np.float32))}
    scaled = gqa(tensors, axes={"k": "page kv_head dim token", "v": "hnd"}, scales=scales)
    assert scaled.placement.tensor("k_scale").strides == {"kv_head": 64, "dim": 64, "token": 4}
    assert found.topology == Topology(tp=2)


def test_usual_orders_have_names() -> None:
    tensors = {0: pair(5, 16, 2, 8)}
    assert gqa(tensors, axes="NHD").placement == gqa(tensors, axes=NHD).placement
    assert gqa({0: pair(5, 2, 16, 8)}, axes="hnd").placement.tensor("k").strides == {"kv_head": 256, "token": 16, "dim": 2}


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({}, {}, "expected dims and dtype"),
        ({0: pair(5, 16, 2, 8)}, {"axes": {"k": NHD}}, "expected axes, or those of 'k' and of 'v', found"),
        ({0: pair(5, 16, 2, 8)}, {"axes": {"k": NHD, "v": 7}}, "expected axes as a str, found 7"),
        ({0: pair(5, 16, 2, 8)}, {"axes": {"k": NHD, "v": "page kv token kv_head dim"}}, r"unknown \['kv'\]"),
        ({0: pair(5, 16, 2, 8)}, {"axes": None}, "of 'k' and of 'v', found None"),
        ({0: pair(5, 16, 2, 8)}, {"axes": "page token kv_head"}, "lack 'dim'"),
        ({0: pair(5, 16, 2, 8)}, {"axes": "page token head dim"}, r"unknown \['head'\]"),
        ({0: pair(5, 16, 2, 8)}, {"num_kv_heads": 0}, "num_kv_heads: expected an integer of at least 1, found 0"),
        ({0: pair(5, 16, 2, 8)}, {"num_kv_heads": "2"}, "num_kv_heads: expected an integer of at least 1, found '2'"),
        ({0: pair(5, 16, 2, 8)}, {"num_kv_heads": True}, "num_kv_heads: expected an integer of at least 1, found True"),
        ({0: pair(5, 16, 2, 8)}, {"dims": (8, 0)}, "tensor 'v', axis 'dim': expected an integer of at least 1, found 0"),
        ({0: pair(5, 16, 2, 8)}, {"topology": None}, "component 'kv': expected a Topology, found None"),
        ([pair(5, 16, 2, 8)], {}, "component 'kv': expected a mapping from layers to tensors, found list"),
        ({"0": pair(5, 16, 2, 8)}, {}, r"component 'kv': expected layer ids of 0 to 2\*\*31 - 1, found '0'"),
        ({-1: pair(5, 16, 2, 8)}, {}, r"component 'kv': expected layer ids of 0 to 2\*\*31 - 1, found -1"),
        ({True: pair(5, 16, 2, 8)}, {}, r"component 'kv': expected layer ids of 0 to 2\*\*31 - 1, found True"),
        ({0: pair(5, 16, 2, 8)}, {"num_kv_heads": 8}, "axis 'kv_head': expected 4 positions, found 2"),
        ({0: pair(5, 16, 2, 8)[:1]}, {}, r"layer 0: expected \(k, v\)"),
        ({0: np.zeros((5, 16, 2, 8), np.float16)}, {}, r"layer 0: expected \(k, v\)"),
        ({7: pair(5, 16, 2, 8)[0]}, {"axes": "page kv token kv_head dim"}, "layer 7.*with 2 along 'kv'"),
        ({7: np.zeros((5, 3, 16, 2, 8))}, {"axes": "page kv token kv_head dim"}, "layer 7.*with 2 along 'kv'"),
        (
            {0: (np.zeros((5, 16, 2, 8)), np.zeros((6, 16, 2, 8)))},
            {},
            r"expected tensors with the same .rows, tokens per page..*\(5, 16\), \(6, 16\)",
        ),
        ({0: (np.zeros((5, 16, 2, 8)), np.zeros((5, 8, 2, 8)))}, {}, r"expected tensors with the same .rows, tokens per page."),
        ({0: (np.zeros((5, 16, 2)), np.zeros((5, 16, 2, 8)))}, {}, "expected the 4 axes"),
        ({0: pair(5, 16, 2, 8), 1: pair(5, 16, 2, 9)}, {}, "layer 1, axis 'dim': expected 8 positions, found 9"),
        ({0: pair(5, 16, 2, 8), 1: pair(6, 16, 2, 8)}, {}, "layer 1, axis 'page': expected 5 positions, found 6"),
        ({0: ["a", "b"]}, {}, "tensor: expected a torch tensor"),
        (
            {3: (np.zeros((5, 16, 2, 8)), [1])},
            {},
            "component 'kv', tensor 'v', layer 3: tensor: expected a torch tensor.* found list",
        ),
        (
            {3: np.zeros((5, 2, 16, 2, 8), object)},
            {"axes": "page kv token kv_head dim"},
            "component 'kv', layer 3: dtype: expected .*, found 'object'",
        ),
        (
            {3: (np.zeros((5, 16, 2, 8)), np.zeros((5, 16, 2, 8))[::-1])},
            {},
            "component 'kv', tensor 'v', layer 3: tensor: expected sizes and strides of at least 0",
        ),
        ({3: pair(0, 16, 2, 8)}, {}, r"tensor 'k', layer 3: expected memory, found shape \(0, 16, 2, 8\) at address 0x"),
        (
            {3: (RawTensor(0, (5, 16, 2, 8), (256, 16, 8, 1), "float16"), SHARED)},
            {},
            r"tensor 'k', layer 3: expected memory, found shape \(5, 16, 2, 8\) at address 0x0",
        ),
    ],
)
def test_tensors_that_contradict_the_declaration_are_rejected(tensors: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gqa(tensors, **changes)


def _read_only() -> np.ndarray:
    made = np.zeros((5, 16, 2, 8), "float16")
    made.flags.writeable = False
    return made


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({0: (SHARED, SHARED)}, "'v' of layer 0: expected separate memory, found that of tensor 'k' of layer 0"),
        (
            {0: (SHARED, SHARED.copy()), 1: (SHARED, SHARED.copy())},
            "'k' of layer 1: expected separate memory, found that of tensor 'k' of layer 0",
        ),
        ({0: (np.broadcast_to(SHARED[:, :1], SHARED.shape), SHARED)}, "separate memory for every position|read-only"),
        (
            {0: (RawTensor(4096, (5, 16, 2, 8), (16, 0, 8, 1), "float16"), SHARED)},
            r"layer 0: expected separate memory for every position, found strides \(16, 0, 8, 1\) of shape \(5, 16, 2, 8\)",
        ),
        ({0: (_read_only(), SHARED)}, "'kv', tensor 'k', layer 0: tensor: expected writable memory, found a read-only array"),
    ],
)
def test_shared_or_read_only_memory_is_rejected(tensors: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gqa(tensors)


def test_a_declaration_may_have_numpy_integers() -> None:
    """They can be encoded too."""
    tensors = {layer: pair(5, 16, 2, 8) for layer in np.arange(2)}
    num_kv_heads: Any = np.int64(4)
    found = gqa(tensors, num_kv_heads=num_kv_heads)
    plain = gqa({int(layer): given for layer, given in tensors.items()})
    tables = [LocalRank.of(Topology(tp=2), [each]).table for each in (found, plain)]
    assert tables[0].encode() == tables[1].encode()


def test_other_numbers_in_a_declaration_are_rejected() -> None:
    num_kv_heads: Any = Fraction(4)
    with pytest.raises(ConfigError, match=r"num_kv_heads: expected an integer of at least 1, found Fraction\(4, 1\)"):
        gqa({0: pair(5, 16, 2, 8)}, num_kv_heads=num_kv_heads)
    run: Any = Fraction(4)
    found = gqa({0: pair(5, 16, 2, 8)}, tokens=lambda _: Periodic(0, run, 8))
    with pytest.raises(LayoutError, match=r"layouts: expected integers, found Fraction\(4, 1\), a Fraction"):
        LocalRank.of(Topology(tp=2), [found]).table.encode()


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_empty_and_long_names_are_rejected(name: str) -> None:
    with pytest.raises(LayoutError, match="component: expected a name of 1 to 256 characters, found"):
        gqa({0: pair(5, 16, 2, 8)}, name=name)


def test_declarations_distinguish_layouts_of_equal_shape() -> None:
    """Case 26: with two heads per rank and two tokens per page, NHD and HND pages have the same shape."""
    tensors = {0: pair(5, 2, 2, 8)}
    nhd, hnd = gqa(tensors, axes=NHD).placement.tensor("k"), gqa(tensors, axes=HND).placement.tensor("k")
    assert (nhd.strides["token"], nhd.strides["kv_head"]) == (hnd.strides["kv_head"], hnd.strides["token"]) == (32, 16)
    assert moved(heads=2, source=Side(page=2, axes=NHD), destination=Side(page=2, axes=HND)).difference() is None
    assert moved(heads=2, source=Side(page=2, axes=HND), destination=Side(page=2, axes=NHD)).difference() is None


# ---------------------------------------------------------------------------------------------------------------- cases


def moved(*, heads: int, source: Side, destination: Side, num_tokens: int = 19, **changes: Any) -> Scene:
    """The scene after its transfers, checked. K and V have 8 elements per head unless `dims` is given."""
    dims = changes.pop("dims", {"k": 8, "v": 8})
    case = Case(
        model=KVModel(num_kv_heads=heads, dims=dims), source=source, destination=destination, num_tokens=num_tokens, **changes
    )
    scene = Scene(case)
    scene.run()
    return scene


def tp(source: int, destination: int, *, heads: int, **changes: Any) -> Scene:
    """Change tensor parallelism in NHD and in HND, with four layers. Checks both scenes and returns the last."""
    layers = (tuple(range(4)),)
    scenes = []
    for ours, theirs in ((NHD, NHD), (NHD, HND), (HND, HND)):
        scene = moved(
            heads=heads,
            source=Side(tp=source, stages=layers, axes=ours),
            destination=Side(tp=destination, stages=layers, axes=theirs),
            **changes,
        )
        assert scene.difference() is None
        scenes.append(scene)
    return scenes[-1]


def test_gqa_4_heads_tp8_to_tp1_every_replica_writes() -> None:
    """Case 1: there are two replicas of each head, and each writes half of the layers."""
    scene = tp(8, 1, heads=4)
    assert scene.election.writers(0) == tuple(range(8))
    nbytes = [move.copies.total_nbytes for move in scene.moves()]
    assert nbytes == [sum(nbytes) // 8] * 8


def test_gqa_4_heads_tp2_to_tp8_each_reader_gets_its_head_from_its_owner() -> None:
    """Case 2."""
    scene = tp(2, 8, heads=4)
    assert sorted(scene.election.by_pair) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]


def test_gqa_2_heads_tp4_to_tp1_has_two_heads_not_four() -> None:
    """Case 3: total heads are given, not computed as heads per rank times TP."""
    scene = tp(4, 1, heads=2)
    boxes = {flow.box[0] for flow in scene.election.flows}
    assert boxes == {Interval(0, 1), Interval(1, 2)}


def test_gqa_2_heads_tp1_to_tp4_maps_heads_0_0_1_1() -> None:
    """Case 4: no copy leaves the pools (checked by the scene), ranks 0 and 1 hold head 0."""
    scene = tp(1, 4, heads=2)
    heads = {flow.destination: flow.box[0].start for flow in scene.election.flows}
    assert heads == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(("heads", "source", "destination"), [(1, 2, 4), (2, 4, 8)])
def test_gqa_fewer_heads_than_either_tp_serves_every_reader(heads: int, source: int, destination: int) -> None:
    """Case 5: D > S > H."""
    scene = tp(source, destination, heads=heads)
    assert {reader for _, reader in scene.election.by_pair} == set(range(destination))
    assert {writer for writer, _ in scene.election.by_pair} == set(range(source))


def test_gqa_8_heads_tp8_to_tp16() -> None:
    """Case 6."""
    scene = tp(8, 16, heads=8)
    assert sorted(scene.election.by_pair) == [(reader // 2, reader) for reader in range(16)]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("heads", "source", "destination"), [(8, 6, 4), (12, 6, 4), (8, 3, 5), (7, 2, 3), (3, 8, 2), (5, 4, 7), (2, 6, 4)]
)
def test_tp_sizes_that_do_not_divide_each_other_or_the_heads(heads: int, source: int, destination: int) -> None:
    """Case 7: TP 6 to 4 and others."""
    tp(source, destination, heads=heads)
    tp(destination, source, heads=heads)


@pytest.mark.parametrize("axes", [a for a in AXES if " kv " not in f" {a} "])
@pytest.mark.parametrize(("key", "value"), [(192, 128), (3, 8), (8, 3)])
def test_v_of_another_head_dim_than_k_uses_its_own_strides(axes: str, key: int, value: int) -> None:
    """Case 8."""
    for source, destination in ((1, 1), (2, 1), (1, 4), (4, 2)):
        scene = moved(heads=4, source=Side(tp=source, axes=axes), destination=Side(tp=destination), dims={"k": key, "v": value})
        assert scene.difference() is None


@pytest.mark.parametrize(("first", "second"), [(7, 8), (8, 7), (1, 14)])
def test_15_layers_in_uneven_pipeline_stages_to_one_stage_and_back(first: int, second: int) -> None:
    """Case 9: each stage's V lands on the V of its own layers."""
    two, one = (tuple(range(first)), tuple(range(first, first + second))), (tuple(range(15)),)
    for source, destination in ((two, one), (one, two), (two, (tuple(range(8)), tuple(range(8, 15))))):
        scene = moved(heads=2, source=Side(stages=source), destination=Side(tp=2, stages=destination), num_tokens=9)
        assert scene.difference() is None


def test_layers_of_a_hybrid_model_are_paired_by_id() -> None:
    """Case 9 again: only some layers have KV, stage 2's first layer has none, and memory orders differ."""
    scene = moved(
        heads=2, source=Side(stages=((3, 7), (15, 11, 19))), destination=Side(stages=((19, 3, 11, 7, 15),)), num_tokens=9
    )
    assert scene.difference() is None


def test_one_page_list_serves_two_destinations_unchanged() -> None:
    """Case 20: the first reader needs fewer tokens than the second, which still gets all of its tokens."""
    scene = Scene(
        Case(model=KVModel(num_kv_heads=2, dims={"k": 4, "v": 4}), source=Side(), destination=Side(tp=2), num_tokens=19)
    )
    before = scene.source.pages
    short, whole = scene.bind(0, 0, tokens=(0, 5)), scene.bind(0, 1)
    assert whole.total_nbytes * 5 == short.total_nbytes * 19
    assert scene.source.pages == before
    scene.run()
    assert scene.difference() is None


@pytest.mark.sweep
@pytest.mark.parametrize(("source", "destination"), [(16, 64), (64, 16), (16, 48), (3, 8), (1, 16), (16, 1)])
def test_pages_of_different_sizes_are_paired_by_token(source: int, destination: int) -> None:
    """Case 24: TP 4 to 8, physical and logical page sizes differ."""
    for num_tokens in (1, 63, 64, 65, 100):
        scene = moved(
            heads=8,
            source=Side(tp=4, page=source),
            destination=Side(tp=8, page=destination, axes=HND),
            num_tokens=num_tokens,
            dims={"k": 2, "v": 1},
        )
        assert scene.difference() is None


@pytest.mark.parametrize(("source", "destination"), [(32, 300), (300, 32)])
def test_pools_of_different_sizes(source: int, destination: int) -> None:
    """Case 25: TP 2 to 4."""
    scene = moved(heads=4, source=Side(tp=2, num_pages=source), destination=Side(tp=4, num_pages=destination))
    assert scene.difference() is None


@pytest.mark.parametrize("num_tokens", [40, 44, 41])
@pytest.mark.parametrize("need", [0, 16, 17, 39, 40])
@pytest.mark.parametrize("source_first", [0, 16])
def test_a_prefix_hit_moves_only_what_is_missing(num_tokens: int, need: int, source_first: int) -> None:
    """Case 27: the destination has the tokens before `need`, more or fewer than the source's own hit, or all."""
    scene = moved(
        heads=2,
        source=Side(tp=2, page=4),
        destination=Side(page=4),
        num_tokens=num_tokens,
        need=max(need, source_first),
        source_first=source_first,
    )
    assert scene.difference() is None
    assert sum(move.copies.total_nbytes for move in scene.moves()) == (num_tokens - max(need, source_first)) * 2 * 2 * 2 * 8 * 2


def test_a_complete_prefix_hit_moves_nothing() -> None:
    """Case 27."""
    scene = moved(heads=2, source=Side(), destination=Side(), num_tokens=44, need=44, source_first=44)
    assert [len(move.copies) for move in scene.moves()] == [0]
    assert scene.difference() is None


@pytest.mark.parametrize("num_tokens", [40, 44])
@pytest.mark.parametrize(("source", "destination"), [(4, 16), (4, 8), (8, 16), (16, 4), (16, 64), (5, 16)])
@pytest.mark.parametrize("source_first", [0, 8, 16])
def test_a_larger_decode_page_with_a_partial_hit_and_an_unaligned_prompt(
    num_tokens: int, source: int, destination: int, source_first: int
) -> None:
    """Case 53: a hit of 16 of 40 or 44 tokens. Pages are paired by token, not by count from the end."""
    for source_tp, destination_tp in ((1, 1), (2, 1), (1, 2)):
        scene = moved(
            heads=2,
            source=Side(tp=source_tp, page=source),
            destination=Side(tp=destination_tp, page=destination),
            num_tokens=num_tokens,
            need=16,
            source_first=source_first,
        )
        assert scene.difference() is None


@pytest.mark.parametrize("context", list(Context))
@pytest.mark.parametrize(("source", "destination"), [(1, 2), (2, 1), (3, 2), (4, 1)])
def test_context_parallel_instances_of_any_kind_exchange_requests(context: Context, source: int, destination: int) -> None:
    for theirs in Context:
        scene = moved(
            heads=2,
            source=Side(cp=source, context=context),
            destination=Side(cp=destination, context=theirs, page=8),
            num_tokens=43,
            need=6,
        )
        assert scene.difference() is None
