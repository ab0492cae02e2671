"""Adapters of mixture-of-experts layers: experts by `ep_rank`, the intermediate dimension by `moe_tp_rank`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.state import adapter
from disagg.testing.reference_states import Form
from tests.support.instances import InstanceSpec
from tests.support.kinds import Kind, adapter_kind
from tests.support.states import Scene, moved

EXPERTS, INTERMEDIATE, HIDDEN, RANK = 8, 8, 3, 2

MODULES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "w13_a": ("slot expert rank hidden", {"expert": EXPERTS, "rank": RANK, "hidden": HIDDEN}),
    "w13_b": ("slot expert half intermediate rank", {"expert": EXPERTS, "half": 2, "intermediate": INTERMEDIATE, "rank": RANK}),
    "w2_a": ("slot expert rank intermediate", {"expert": EXPERTS, "rank": RANK, "intermediate": INTERMEDIATE}),
    "w2_b": ("slot expert hidden rank", {"expert": EXPERTS, "hidden": HIDDEN, "rank": RANK}),
}
"""LoRA matrices of fused gate and up projections, and of the down projection. Gate and up are halves of one axis."""

SIZES = [(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2, 4, 8) if tp % ep == 0]


def modules(*layers: int) -> list[Kind]:
    return [adapter_kind(role, order=order, sizes=sizes, layers=layers or (0, 1)) for role, (order, sizes) in MODULES.items()]


@pytest.mark.sweep
@pytest.mark.parametrize(("tp", "ep"), SIZES)
def test_every_tp_and_ep_to_every_tp_and_ep(tp: int, ep: int) -> None:
    for other_tp, other_ep in SIZES:
        moved(modules(3), InstanceSpec(tp=tp, ep=ep), InstanceSpec(tp=other_tp, ep=other_ep))


@pytest.mark.parametrize(
    "destination", [InstanceSpec(tp=4, ep=1), InstanceSpec(tp=4, ep=4), InstanceSpec(tp=2), InstanceSpec(tp=2, ep=2)]
)
def test_tp4_ep2_to_other_sizes_and_back(destination: InstanceSpec) -> None:
    """`1 < ep < tp`, where dividing by `tp_rank` reads beyond the tensor. The scene checks that copies stay in the pools."""
    for layers in ((0,), (0, 1, 5)):
        moved(modules(*layers), InstanceSpec(tp=4, ep=2), destination)
        moved(modules(*layers), destination, InstanceSpec(tp=4, ep=2))


def test_experts_and_intermediates_that_do_not_divide() -> None:
    sizes = {"expert": 5, "rank": 2, "intermediate": 7}
    kind = adapter_kind("w2_a", order="slot expert rank intermediate", sizes=sizes)
    for ours, theirs in itertools.product(
        [InstanceSpec(tp=4, ep=2), InstanceSpec(tp=6, ep=3), InstanceSpec(tp=3), InstanceSpec()], repeat=2
    ):
        moved(kind, ours, theirs)


def test_modules_and_layers_in_any_memory_order_and_stage() -> None:
    """Each module has its own layers, and a stage may have none of them."""
    orders = {"w2_a": "slot intermediate expert rank"}
    kinds = [
        adapter_kind("w13_b", order=MODULES["w13_b"][0], sizes=MODULES["w13_b"][1], layers=(0, 3)),
        adapter_kind("w2_a", order=MODULES["w2_a"][0], sizes=MODULES["w2_a"][1], layers=(1, 2, 3)),
    ]
    forms = {"adapter.w2_a": Form(num_rows=4, orders=orders)}
    moved(kinds, InstanceSpec(tp=4, ep=2, edges=(0, 1, 4), forms=forms), InstanceSpec(tp=2, ep=2))
    moved(kinds, InstanceSpec(tp=2), InstanceSpec(tp=4, ep=2, edges=(0, 2, 3, 4), forms=forms))


def test_whole_experts_are_one_component() -> None:
    """Expert tensors, without a rank axis, in one slot."""
    kind = adapter_kind("w2", order="slot expert hidden intermediate", sizes={"expert": 8, "hidden": 3, "intermediate": 8})
    for ours, theirs in itertools.product(SIZES[:6], repeat=2):
        moved(kind, InstanceSpec(tp=ours[0], ep=ours[1]), InstanceSpec(tp=theirs[0], ep=theirs[1]))


def test_adapters_come_and_go_through_few_slots() -> None:
    scene = Scene(modules(0, 2), InstanceSpec(tp=4, ep=2), InstanceSpec(tp=2))
    for _ in range(12):
        scene.transfer()


def test_the_expert_axis_must_have_the_number_of_experts() -> None:
    with pytest.raises(ConfigError, match="axis 'expert': expected 8 experts, found 4"):
        adapter.moe_lora(
            {"w2": {0: np.zeros((2, 4, 3))}},
            axes={"w2": "slot expert hidden"},
            sizes={"w2": {"expert": 4, "hidden": 3}},
            num_experts=8,
            topology=Topology(),
        )


# ------------------------------------------------------------------------------------------------------------------ slots


def test_a_reused_slot_keeps_nothing_of_the_previous_adapter() -> None:
    """Load A, then B without one of A's modules, into the same slot: zeros for that module, and other slots unchanged."""
    rng = np.random.default_rng(3)
    pools = {module: {layer: rng.random((3, 4, 2)) for layer in (0, 2)} for module in ("w13_a", "w2_a")}
    before = {module: {layer: pool.copy() for layer, pool in layers.items()} for module, layers in pools.items()}
    first = {module: {layer: rng.random((4, 2)) for layer in (0, 2)} for module in pools}
    second = {"w13_a": {0: rng.random((4, 2)), 2: rng.random((4, 2))}, "w2_a": {2: rng.random((4, 2))}}
    assert adapter.load_into_slot(pools, first, slot=1) == ()
    for module, layer in itertools.product(pools, (0, 2)):
        assert (pools[module][layer][1] == first[module][layer]).all()
    assert adapter.load_into_slot(pools, second, slot=1) == ()
    assert (pools["w13_a"][0][1] == second["w13_a"][0]).all()
    assert (pools["w13_a"][2][1] == second["w13_a"][2]).all()
    assert (pools["w2_a"][0][1] == 0).all()
    assert (pools["w2_a"][2][1] == second["w2_a"][2]).all()
    for module, layer, slot in itertools.product(pools, (0, 2), (0, 2)):
        assert (pools[module][layer][slot] == before[module][layer][slot]).all()


def test_a_module_that_the_adapter_lacks_is_zero() -> None:
    pools = {"w13_a": {0: np.ones((2, 3))}}
    assert adapter.load_into_slot(pools, {}, slot=0) == ()
    assert pools["w13_a"][0].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_module_that_the_layer_lacks_is_skipped_and_returned() -> None:
    """Hybrid layers, and a fused wrapper without a layer id."""
    pools = {"w13_a": {0: np.zeros((2, 3))}}
    given = {"w13_a": {0: np.ones(3), 1: np.ones(3)}, "q_proj": {0: np.ones(3)}, "experts": {None: np.ones(3)}}
    skipped = adapter.load_into_slot(pools, given, slot=1)  # type: ignore[arg-type]
    assert skipped == ("w13_a@1", "q_proj@0", "experts@None")
    assert pools["w13_a"][0].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(("slot", "shape"), [(-1, (4, 2)), (1, (1, 2)), (1, ())])
def test_a_negative_slot_or_weights_of_another_shape_are_rejected(slot: int, shape: tuple[int, ...]) -> None:
    """A sentinel is not an index, and a matrix of rank 1 must not be broadcast over a pool of rank 4."""
    pools = {"w13_a": {0: np.zeros((3, 4, 2))}}
    with pytest.raises((ConfigError, IndexError, ValueError)):
        adapter.load_into_slot(pools, {"w13_a": {0: np.ones(shape)}}, slot=slot)
    assert not pools["w13_a"][0].any()


# -------------------------------------------------------------------------------------------------------------------- ids


def test_virtual_expert_ids_keep_tokens_routed_elsewhere() -> None:
    rng = np.random.default_rng(4)
    ids = rng.integers(-1, 8, size=(50, 3))
    slots = rng.integers(0, 5, size=50)
    before = ids.copy(), slots.copy()
    found = adapter.virtual_expert_ids(ids, slots, num_experts=8)
    for token, choice in itertools.product(range(50), range(3)):
        wanted = -1 if ids[token, choice] < 0 else ids[token, choice] + slots[token] * 8
        assert found[token, choice] == wanted
    assert (ids == before[0]).all()
    assert (slots == before[1]).all()
    assert adapter.virtual_expert_ids(ids[:, 0], slots, num_experts=8).tolist() == found[:, 0].tolist()


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_tokens_routed_elsewhere_have_a_separate_bucket(num_tokens: int) -> None:
    ids = np.random.default_rng(6).integers(-1, 5, size=(num_tokens, 2))
    order, counts = adapter.group_by_expert(ids, num_experts=5)
    flat = ids.ravel().tolist()
    wanted = [[i for i, found in enumerate(flat) if found == expert] for expert in (0, 1, 2, 3, 4, -1)]
    assert counts.tolist() == [len(bucket) for bucket in wanted]
    assert order.tolist() == [i for bucket in wanted for i in bucket]


@pytest.mark.parametrize("wrong", [-2, 5])
def test_unknown_expert_ids_are_rejected(wrong: int) -> None:
    with pytest.raises(ConfigError, match="expert ids: expected -1 to 4"):
        adapter.group_by_expert([0, wrong], num_experts=5)
