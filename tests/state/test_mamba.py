"""Recurrent state of every family, byte for byte: each sub-block is divided separately, in any memory order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.placement import Component
from disagg.state import declare, mamba
from disagg.testing import reference_states as naive
from disagg.testing import state_models
from disagg.testing.reference_states import Form
from disagg.testing.state_models import Part, Place
from tests.support.instances import InstanceSpec
from tests.support.kinds import Kind, Pools, convolution_kind, gdn_kind, kda_kind, lightning_kind, mamba1_kind, mamba2_kind
from tests.support.states import Scene, moved, tp_pairs

CHANNELS_FIRST, WIDTH_FIRST = "slot channel width", "slot width channel"

FAMILIES: dict[str, Callable[[int], Kind]] = {
    "gdn": lambda heads: gdn_kind(num_key_heads=heads, num_value_heads=2 * heads),
    "kda": lambda heads: kda_kind(num_heads=heads),
    "kda in four tensors": lambda heads: kda_kind(num_heads=heads, separate=True),
    "mamba2": lambda heads: mamba2_kind(num_heads=heads, num_groups=2),
    "mamba1": lambda heads: mamba1_kind(inner=2 * heads),
    "convolution": lambda heads: convolution_kind(channels=2 * heads),
    "lightning": lambda heads: lightning_kind(num_heads=heads),
}
"""A model with this number of heads, by family."""


# ------------------------------------------------------------------------------------------------------------ brute force


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tp_to_every_tp(family: str) -> None:
    """All sizes up to 8, with a number of heads that both divide."""
    for source, destination in tp_pairs():
        moved(FAMILIES[family](math.lcm(source.tp, destination.tp)), source, destination)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_fewer_heads_than_ranks_are_replicated(family: str, heads: int) -> None:
    """Case 28: powers of two up to 8, so that several ranks of one side or both have the same head."""
    for source, destination in itertools.product((1, 2, 4, 8), repeat=2):
        moved(FAMILIES[family](heads), InstanceSpec(tp=source), InstanceSpec(tp=destination))


@pytest.mark.sweep
@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
def test_every_rank_has_mamba2_groups_that_ranks_do_not_divide(groups: int) -> None:
    """Cases 13 and 55: `n_groups` of 1, 2, 3, 5 and 8 with TP 1 to 8, in both directions."""
    for source, destination in tp_pairs():
        kind = mamba2_kind(num_heads=math.lcm(source.tp, destination.tp), num_groups=groups, head_dim=1, state_size=2)
        moved(kind, source, destination)


@pytest.mark.sweep
@pytest.mark.parametrize(("keys", "values"), [(2, 8), (4, 8), (8, 8), (1, 4), (16, 32)])
def test_gdn_with_fewer_key_heads_than_value_heads(keys: int, values: int) -> None:
    """Case 11: q and k may be replicated while v is not."""
    for source, destination in itertools.product((1, 2, 4, 8), repeat=2):
        moved(gdn_kind(num_key_heads=keys, num_value_heads=values), InstanceSpec(tp=source), InstanceSpec(tp=destination))


# -------------------------------------------------------------------------------------------------- reported configurations


@pytest.mark.parametrize(("source", "destination"), [(8, 1), (1, 4), (4, 2)])
def test_gdn_conv_is_divided_by_q_k_and_v(source: int, destination: int) -> None:
    """Case 11: no flat slice, and no write beyond the slot."""
    kind = gdn_kind(num_key_heads=16, num_value_heads=32, dims=(2, 2), layers=range(3))
    moved(kind, InstanceSpec(tp=source), InstanceSpec(tp=destination))
    moved(kind, InstanceSpec(tp=source, edges=(0, 1, 3)), InstanceSpec(tp=destination))


@pytest.mark.parametrize(("source", "destination"), [(1, 2), (2, 1), (2, 4)])
def test_mamba2_conv_of_256_32_32_channels(source: int, destination: int) -> None:
    """Case 12: B and C are narrower than x. Flat slices put 176 of 320 channels in the wrong place from TP 2 to 1."""
    kind = mamba2_kind(num_heads=16, head_dim=16, num_groups=4, state_size=8)
    moved(kind, InstanceSpec(tp=source), InstanceSpec(tp=destination))


def test_flat_slices_of_case_12_differ() -> None:
    """In the reference, concatenating the ranks' memories misplaces exactly those 176 channels."""
    channels = state_models.fused(Part(16, 16), Part(4, 8, grouped=True), Part(4, 8, grouped=True))
    flat = [channel for rank in (0, 1) for channel in channels.held(Place(tp=2, tp_rank=rank))]
    assert sorted(flat) == list(range(320))
    assert sum(here != there for here, there in enumerate(flat)) == 176


@pytest.mark.parametrize(("source", "destination"), [(1, 8), (8, 1), (4, 8), (8, 2), (3, 4), (4, 3), (6, 4)])
def test_mamba2_groups_not_divisible_by_tp(source: int, destination: int) -> None:
    """Cases 13 and 55: groups that the ranks do not divide, beside heads that they do."""
    for groups in (1, 2, 3, 5):
        moved(mamba2_kind(num_heads=24, num_groups=groups), InstanceSpec(tp=source), InstanceSpec(tp=destination))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("source", "destination"), [(1, 2), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
def test_kda_conv_has_its_channels_last(separate: bool, source: int, destination: int) -> None:
    """Cases 14 and 16: `[K-1, channels]`, in one conv tensor or three, and a temporal state in another dtype."""
    kind = kda_kind(num_heads=8, separate=separate, layers=(0, 1, 2, 4, 5, 6))
    assert len({tensor.dtype for tensor in kind.model.tensors}) == 2
    assert len(kind.model.tensors) == (4 if separate else 2)
    moved(kind, InstanceSpec(tp=source), InstanceSpec(tp=destination))


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["gdn", "mamba2", "kda", "kda in four tensors", "mamba1"])
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product((CHANNELS_FIRST, WIDTH_FIRST), repeat=2)))
def test_the_memory_order_of_conv_is_declared(family: str, ours: str, theirs: str) -> None:
    """Servers store it either way, and the two sides may differ."""
    kind = FAMILIES[family](8)
    convs = [tensor.role for tensor in kind.model.tensors if tensor.role != "temporal"]
    forms = [Form(num_rows=5, orders=dict.fromkeys(convs, order)) for order in (ours, theirs)]
    for source, destination in ((1, 2), (4, 2), (2, 8)):
        moved(kind, InstanceSpec(tp=source, forms={"ssm": forms[0]}), InstanceSpec(tp=destination, forms={"ssm": forms[1]}))


def test_every_memory_order_of_a_temporal_state() -> None:
    orders = [f"slot {' '.join(inner)}" for inner in itertools.permutations(("head", "head_dim", "state"))]
    orders += ["head slot head_dim state", "state head head_dim slot"]
    for ours, theirs in itertools.product(orders, repeat=2):
        sides = [
            InstanceSpec(tp=tp, forms={"ssm": Form(num_rows=4, orders={"temporal": order})})
            for tp, order in zip((2, 4), (ours, theirs), strict=True)
        ]
        moved(mamba2_kind(num_heads=4, layers=(0,)), sides[0], sides[1])


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["gdn", "mamba2", "mamba1"])
@pytest.mark.parametrize(("source", "destination"), [(1, 2), (4, 1), (2, 8)])
@pytest.mark.parametrize("gap", [0, 24])
def test_conv_and_ssm_in_one_slot_page(family: str, source: int, destination: int, gap: int) -> None:
    """Case 56: both are strided views of one page of bytes. The other side may store them separately."""
    together, apart = Form(num_rows=4, one_page=True, gap=gap), Form(num_rows=6)
    for ours, theirs in ((together, together), (together, apart), (apart, together)):
        moved(
            FAMILIES[family](8),
            InstanceSpec(tp=source, forms={"ssm": ours}),
            InstanceSpec(tp=destination, forms={"ssm": theirs}),
        )


@pytest.mark.parametrize("order", [CHANNELS_FIRST, WIDTH_FIRST])
@pytest.mark.parametrize(("ours", "theirs"), [(0, 3), (3, 0), (1, 4)])
def test_different_numbers_of_speculative_tokens(order: str, ours: int, theirs: int) -> None:
    """Case 57: buffers are `K-1+n` wide, with other strides. Only the K-1 declared columns move."""
    for source, destination in ((1, 1), (1, 4), (4, 2)):
        sides = [
            InstanceSpec(tp=tp, forms={"ssm": Form(num_rows=4, orders={"conv": order}, spare={"width": spare})})
            for tp, spare in ((source, ours), (destination, theirs))
        ]
        moved(gdn_kind(), sides[0], sides[1])
        moved(mamba2_kind(num_groups=3), sides[0], sides[1])


def test_slots_of_padded_pools_keep_their_padding() -> None:
    padded = Form(num_rows=4, spare={"channel": 2, "head": 1, "slot": 1})
    for source, destination in ((2, 1), (1, 4)):
        moved(mamba2_kind(), InstanceSpec(tp=source, forms={"ssm": padded}), InstanceSpec(tp=destination))
        moved(mamba2_kind(), InstanceSpec(tp=source), InstanceSpec(tp=destination, forms={"ssm": padded}))


@pytest.mark.sweep
@pytest.mark.parametrize("edges", [(0, 0, 9), (0, 9, 9), (0, 2, 9), (0, 3, 3, 9)])
def test_a_stage_may_have_any_layers_or_none(edges: tuple[int, ...]) -> None:
    """Linear-attention layers of a hybrid model: a stage may start with another kind of layer, or have none."""
    for make in FAMILIES.values():
        kind = make(4)
        kind = Kind(model=kind.model, layers=(1, 2, 5, 7), build=kind.build, form=kind.form)
        moved(kind, InstanceSpec(tp=2, edges=edges), InstanceSpec())
        moved(kind, InstanceSpec(descending=True), InstanceSpec(tp=2, edges=edges))
        moved(kind, InstanceSpec(tp=4, edges=edges), InstanceSpec(tp=2, edges=(0, 6, 9), descending=True))


def test_every_slot_to_every_slot_of_pools_of_different_sizes() -> None:
    kind = gdn_kind(layers=(3,))
    scene = Scene([kind], InstanceSpec(forms={"ssm": Form(num_rows=2)}), InstanceSpec(tp=2, forms={"ssm": Form(num_rows=7)}))
    for _ in range(20):
        scene.transfer()


def test_dtypes_that_numpy_lacks_are_given_as_raw_tensors() -> None:
    """Conv in bfloat16 and temporal in float32, by address, shape and strides."""
    model = state_models.gdn(num_key_heads=4, num_value_heads=4, key_head_dim=2, value_head_dim=2, kernel=4)
    sizes = {"num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 2, "value_head_dim": 2, "kernel": 4}
    roles = mamba.gdn_roles(**sizes, dtypes=("bfloat16", "float32"))

    def build(pools: Pools) -> Component:
        dtypes = {"conv": "torch.bfloat16", "temporal": "float32"}
        tensors = {
            role: {layer: (raw.pointer, raw.shape, raw.strides, dtypes[role], "cpu") for layer, raw in by_layer.items()}
            for role, by_layer in pools.tensors.items()
        }
        return mamba.recurrent(roles, tensors, **pools.common)

    kind = Kind(model=model, layers=(0, 2), build=build, form=Form(num_rows=5))
    moved(kind, InstanceSpec(tp=2), InstanceSpec(tp=4))
    moved(kind, InstanceSpec(tp=4), InstanceSpec())


@given(st.data())
def test_random_mamba2_in_random_forms(data: st.DataObject) -> None:
    source, destination = (data.draw(st.integers(1, 6)) for _ in range(2))
    heads = math.lcm(source, destination) * data.draw(st.integers(1, 2))
    kind = mamba2_kind(
        num_heads=heads,
        head_dim=data.draw(st.integers(1, 3)),
        num_groups=data.draw(st.integers(1, 6)),
        state_size=data.draw(st.integers(1, 3)),
        kernel=data.draw(st.integers(2, 5)),
        layers=data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)),
    )
    forms = [
        Form(
            num_rows=data.draw(st.integers(1, 4)),
            orders={"conv": " ".join(data.draw(st.permutations(("slot", "channel", "width"))))},
            spare={"width": data.draw(st.integers(0, 2)), "slot": data.draw(st.integers(0, 2))},
        )
        for _ in range(2)
    ]
    edges = [(0, *sorted(data.draw(st.lists(st.integers(0, 10), max_size=2))), 10) for _ in range(2)]
    moved(
        kind,
        InstanceSpec(tp=source, edges=edges[0], forms={"ssm": forms[0]}),
        InstanceSpec(tp=destination, edges=edges[1], forms={"ssm": forms[1]}, descending=True),
    )


@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2", "mamba1"])
def test_conv_and_temporal_divide_uneven_heads_alike(family: str) -> None:
    """8 heads on TP 3: `[floor(r*H/T), floor((r+1)*H/T))` of the channels as of the temporal state."""
    moved(FAMILIES[family](8), InstanceSpec(tp=3), InstanceSpec(tp=2))


# ----------------------------------------------------------------------------------------------------------- declarations


def conv_and_temporal(
    *, channels: int = 28, heads: int = 8, slots: tuple[int, int] = (5, 5)
) -> dict[str, dict[int, np.ndarray]]:
    return {
        "conv": {0: np.zeros((slots[0], channels, 3), np.uint16)},
        "temporal": {0: np.zeros((slots[1], heads, 2, 3), np.float32)},
    }


ROLES = mamba.mamba2_roles(num_heads=8, head_dim=2, num_groups=2, state_size=3, kernel=4)

ROLES_WITH_DTYPES = mamba.mamba2_roles(
    num_heads=8, head_dim=2, num_groups=2, state_size=3, kernel=4, dtypes=("uint16", "float32")
)


def test_a_slot_component_says_what_a_rank_allocates() -> None:
    """`local_shape` of a role is the shape that the reference gives its pools."""
    kind = mamba2_kind()
    for tp_rank in range(4):
        topology = Topology(tp=4, tp_rank=tp_rank)
        state = naive.StateRank(model=kind.model, place=Place(tp=4, tp_rank=tp_rank), layers=(0,), form=Form(num_rows=5))
        for role, tensor in zip(ROLES, kind.model.tensors, strict=True):
            assert role.local_shape(topology, rows=5, page_size=1) == tuple(state.sizes(tensor).values())


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({}, {"conv": {}}, "expected tensors for conv, temporal, found conv"),
        ({}, {}, "expected tensors for conv, temporal, found none"),
        ({}, [np.zeros(3)], "component 'ssm': expected a mapping from roles to tensors by layer, found list"),
        (
            {},
            conv_and_temporal() | {"temporal": [np.zeros(3)]},
            "'ssm', tensor 'temporal': expected a mapping from layers to tensors, found list",
        ),
        ({}, conv_and_temporal(channels=27), "'conv', layer 0, axis 'channel': expected 28 positions, found 27"),
        ({}, conv_and_temporal(heads=4), "'temporal', layer 0, axis 'head': expected 8 positions, found 4"),
        ({}, conv_and_temporal(slots=(5, 6)), r"tokens per page\), found \[\(5, 1\), \(6, 1\)\]"),
        ({}, conv_and_temporal() | {"temporal": {}}, "of the same layers"),
        ({"axes": {"conv": "slot channel"}}, conv_and_temporal(), "axes 'slot channel' lack 'width'"),
        ({"axes": {"conv": "page channel width"}}, conv_and_temporal(), r"unknown \['page'\]"),
        ({"axes": {"conv": WIDTH_FIRST}}, conv_and_temporal(), "axis 'width': expected 3 positions, found 28"),
        ({}, {"conv": {}, "temporal": {}}, "'conv': expected a dtype, since this stage has no layer of it"),
    ],
)
def test_tensors_that_contradict_the_declaration_are_rejected(changes: dict[str, object], tensors: Any, message: str) -> None:
    stages = ((0,), ()) if tensors == {"conv": {}, "temporal": {}} else None
    topology = Topology(pp=2, pp_rank=1) if stages else Topology()
    with pytest.raises(ConfigError, match=message):
        mamba.recurrent(ROLES, tensors, topology=topology, layers_by_stage=stages, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": "8"}, "block, units: expected an integer of at least 1, found '8'"),
        ({"num_heads": 0}, "block, units: expected an integer of at least 1, found 0"),
        ({"num_groups": 0}, "block, units: expected an integer of at least 1, found 0"),
        ({"head_dim": 0}, "block, width: expected an integer of at least 1, found 0"),
        ({"kernel": 1}, "kernel: expected an integer of at least 2, found 1"),
        ({"kernel": "4"}, "kernel: expected an integer of at least 2, found '4'"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mamba.mamba2_roles(**{"num_heads": 8, "head_dim": 2, "num_groups": 2, "state_size": 3, "kernel": 4, **sizes})
    with pytest.raises(ConfigError, match="tensor 'temporal', axis 'head': expected an integer of at least 1, found 0"):
        mamba.lightning_roles(num_heads=0, key_head_dim=2, value_head_dim=2)


def test_tensors_must_have_the_declared_dtype() -> None:
    roles = mamba.mamba2_roles(num_heads=8, head_dim=2, num_groups=2, state_size=3, kernel=4, dtypes=("uint16", "float16"))
    with pytest.raises(ConfigError, match="'temporal': expected dtype float16, found float32"):
        mamba.recurrent(roles, conv_and_temporal(), topology=Topology())


def test_pages_must_have_the_declared_size() -> None:
    role = declare.Role(name="k", axes="page token dim", inner={"dim": declare.whole(2)}, tensors={0: np.zeros((3, 4, 2))})
    with pytest.raises(ConfigError, match="expected pages of 8 tokens, found 4"):
        declare.declare("kv", [role], rows="pages", topology=Topology(), page_size=8)
    assert declare.declare("kv", [role], rows="pages", topology=Topology(), page_size=4).placement is not None


def test_needed_tokens_by_kind_of_state() -> None:
    """Of `n` tokens and a prefix, decode needs slots whole, and pages from the prefix or the window on."""
    pages = declare.State(name="kv", rows="pages", layers=(0,), roles=())
    assert [pages.needed(9, prefix=prefix) for prefix in (0, 4, 9, 12)] == [(0, 9), (4, 9), (9, 9), (9, 9)]
    windowed = declare.State(name="swa", rows="pages", layers=(0,), roles=(), window=4)
    assert [windowed.needed(9, prefix=prefix) for prefix in (0, 4, 7, 12)] == [(5, 9), (5, 9), (7, 9), (9, 9)]
    assert windowed.needed(3) == (0, 3)
    assert declare.State(name="ssm", rows="slot", layers=(0,), roles=()).needed(9, prefix=9) == (0, 1)


def test_a_role_is_found_by_its_name() -> None:
    state = declare.State(name="ssm", rows="slot", layers=(0,), roles=ROLES)
    assert state.role("temporal") is ROLES[1]
    with pytest.raises(ConfigError, match="component 'ssm': expected one of conv, temporal, found 'k'"):
        state.role("k")


def test_bytes_and_page_sizes_of_a_state() -> None:
    """All layers and heads once, as in the reference's global arrays. A ring is one page, and granules are not split."""
    kind = mamba2_kind()
    state = declare.State(name="ssm", rows="slot", layers=(0, 3), roles=ROLES_WITH_DTYPES)
    per_layer = sum(naive.global_array(kind.model, tensor, 0, request=0, num_entries=1).nbytes for tensor in kind.model.tensors)
    assert state.nbytes(9) == state.nbytes(9, prefix=9) == 2 * per_layer
    pooled = declare.Role(name="key", axes="page token byte", inner={"byte": declare.whole(6)}, dtype="uint8", granule=4)
    index = declare.State(name="index", rows="pages", layers=(1,), roles=(pooled,))
    assert [index.nbytes(num_tokens, prefix=prefix) for num_tokens, prefix in ((11, 0), (12, 0), (12, 6))] == [12, 18, 12]
    assert [index.page_tokens(size) for size in (16, 6, 1)] == [16, 12, 4]
    assert declare.State(name="tail", rows="pages", layers=(1,), roles=(pooled,), ring=7).page_tokens(16) == 7
