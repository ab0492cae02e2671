"""Numbers that the two sides hold in other formats: which pairs have a rule, and what their plans make of every element."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from disagg.core.errors import LayoutError
from disagg.core.rows import Pages
from disagg.core.spans import SpanShapes
from disagg.layout.agreement import Agreement, LocalRank
from disagg.layout.binding import Stream, bind_rows, span_shapes
from disagg.layout.conversion import Numbers
from disagg.layout.plan import TransferPlan
from disagg.layout.tables import LayoutTable, TensorLayout
from tests.support.numbers import (
    BF16,
    BY_HEAD,
    E4M3,
    HALVES,
    HEADS,
    LAYERS,
    NUM_PAGES,
    PAIRS,
    REFUSED,
    Holder,
    Rank,
    check_moved,
    make_rank,
    place,
    random_numbers,
)

NUM_TOKENS = 29


def local(rank: Rank) -> LocalRank:
    return LocalRank.of(rank.topology, [rank.component])


def plan_between(source: Rank, destination: Rank) -> TransferPlan:
    ours, theirs = local(source), local(destination)
    agreement = Agreement.between(ours, theirs.table.encode())
    regions = [each for component in theirs.components for each in component.regions]
    return agreement.plans(ours, theirs.topology.rank, theirs.placements, regions, peer="the peer")[0]  # type: ignore[arg-type]


def move(plan: TransferPlan, pages: tuple[np.ndarray, np.ndarray]) -> None:
    """What a writer packs, unpacked by its reader."""
    for component in plan.components.values():
        rows = (Pages(each.astype(np.int32)) for each in pages)
        bound = bind_rows(component, source=next(rows), destination=next(rows), tokens=(0, NUM_TOKENS), num_tokens=NUM_TOKENS)
        source, destination = Stream(source=True), Stream(source=False)
        bound.append_to(source)
        bound.append_to(destination)
        assert source.total == destination.total == bound.at_destination()[0]
        assert source.converts is component.converts
        staging = np.empty(source.total, np.uint8)
        source.gather(0, source.total, staging.ctypes.data)
        destination.scatter(0, source.total, staging.ctypes.data)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_plans_move_every_number(pair: tuple[Holder, Holder]) -> None:
    """Packed and unpacked on the host, and compared with the reference, with what else is in the pools."""
    prefill, decode = pair
    rng = np.random.default_rng(3)
    numbers = random_numbers(rng, prefill.dtype, NUM_TOKENS)
    pages = tuple(rng.permutation(NUM_PAGES)[: -(-NUM_TOKENS // holder.page)] for holder in pair)
    sources = [make_rank(prefill, number) for number in range(prefill.tp)]
    found = [make_rank(decode, number) for number in range(decode.tp)]
    for source in sources:
        place(prefill, source, numbers, pages[0].tolist(), range(NUM_TOKENS))
        for destination in found:
            move(plan_between(source, destination), (pages[0], pages[1]))
    check_moved(pair, numbers, found, pages[1].tolist(), range(NUM_TOKENS))


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_pairs_without_a_rule(case: tuple[Holder, Holder, str]) -> None:
    prefill, decode, match = case
    ours, theirs = local(make_rank(prefill, 0)), local(make_rank(decode, 0))
    with pytest.raises(LayoutError, match=match):
        Agreement.between(ours, theirs.table.encode())


def test_an_engine_gets_the_formats_the_scales_and_the_memory_of_both_sides() -> None:
    """The source has two bytes for each of the destination's, and a pair of bases for each layer and head."""
    by_head = Holder(E4M3, k_scale=BY_HEAD, v_scale=HALVES, by_head=True)
    source, destination = make_rank(Holder(BF16), 0), make_rank(by_head, 0)
    shapes = SpanShapes(span_shapes(plan_between(source, destination).components["kv"]))
    assert shapes.convert
    assert {shape.formats for shape in shapes} == {(BF16, E4M3, "nearest")}
    assert sorted(shape.scales for shape in shapes) == sorted(
        tuple(float(scale) for layer in range(LAYERS) for scale in scales[layer]) for scales in (BY_HEAD, HALVES)
    )
    for shape in shapes:
        (ours, nbytes), (theirs, half) = shape.extents(0), shape.extents(1)
        assert len(ours) == len(theirs) == LAYERS * HEADS
        assert nbytes == 2 * half
    copied = SpanShapes(span_shapes(plan_between(source, make_rank(Holder(BF16), 0)).components["kv"]))
    assert not copied.convert


def test_converted_numbers_have_no_checksums() -> None:
    ours, theirs = local(make_rank(Holder(BF16), 0)), local(make_rank(Holder(E4M3), 0))
    agreement = Agreement.between(ours, theirs.table.encode())
    with pytest.raises(LayoutError, match="component 'kv', tensor 'k': expected verify='off', since it is converted"):
        agreement.checksum_plans(ours, 0, theirs.placements)


def test_scales_are_by_layer_and_position() -> None:
    by_head = tensor_of(Holder(E4M3, tp=2, k_scale=BY_HEAD, v_scale=HALVES, by_head=True))
    assert by_head.scales == {(layer, head): BY_HEAD[layer][head] for layer in range(LAYERS) for head in range(HEADS // 2)}
    assert tensor_of(Holder(E4M3, k_scale=0.5)).scales == dict.fromkeys([(0, 0), (1, 0), (2, 0)], 0.5)
    assert tensor_of(Holder(E4M3, k_scale=None)).scales == {}


def tensor_of(holder: Holder) -> TensorLayout:
    return local(make_rank(holder, 0)).table.ranks[0].by_name["kv"].tensor("k")


@pytest.mark.parametrize(
    ("dtype", "numbers", "match"),
    [
        (E4M3, Numbers((1.0, 1.0)), "tensor 'k': expected a scale for each of 3 layers, found 2"),
        (
            E4M3,
            Numbers((1.0,) * 11, axis="kv_head"),
            "expected a scale for each of 4 positions of 'kv_head' and layer, found 11",
        ),
        (E4M3, Numbers((1.0,) * 3, axis="channel"), "tensor 'k': no axis 'channel'"),
        (E4M3, Numbers((1.0,) * 3, axis="token"), "expected scales by an axis of constant size, found 'token'"),
        ("int8", Numbers((1.0,) * 3), "tensor 'k': expected a dtype among float32, .* for scales, found int8"),
        (BF16, Numbers((1.0, 0.5, 1.0)), r"tensor 'k': expected scale 1 for bfloat16, found 0\.5"),
    ],
)
def test_numbers_that_a_tensor_cannot_hold(dtype: str, numbers: Numbers, match: str) -> None:
    """As a peer's table may claim them."""
    tensor = tensor_of(Holder(E4M3))
    with pytest.raises(LayoutError, match=match):
        TensorLayout(tensor.role, dtype, tensor.axes, numbers)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-46])
def test_a_scale_must_be_a_positive_number_of_single_precision(scale: float) -> None:
    with pytest.raises(LayoutError, match="scales: expected positive numbers of single precision, found"):
        Numbers((1.0, scale))


def test_a_rounding_must_be_known() -> None:
    with pytest.raises(LayoutError, match="rounding: expected one of nearest, unbounded, toward_zero, found 'up'"):
        Numbers((1.0,), rounding="up")


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            Holder(BF16, tp=2),
            r"tensor 'k': ranks of one instance differ: \('float8_e4m3fn', 'nearest', None\) and \('bfloat16'",
        ),
        (Holder(E4M3, tp=2, k_scale=2.0), r"tensor 'k', layer 0: ranks of one instance differ: scales 1\.0 and 2\.0"),
    ],
)
def test_ranks_of_one_instance_hold_the_same_numbers(other: Holder, match: str) -> None:
    good, bad = (local(make_rank(holder, 0)).table for holder in (Holder(E4M3, tp=2), other))
    mixed = msgspec.structs.replace(good, ranks=(good.ranks[0], bad.ranks[1]))
    with pytest.raises(LayoutError, match=match):
        Agreement.between(local(make_rank(Holder(BF16), 0)), LayoutTable.encode(mixed))
