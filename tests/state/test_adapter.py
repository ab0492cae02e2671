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
