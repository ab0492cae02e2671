"""MLA latents and other replicated state: one elected writer per copy, with equal shares of the work."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from disagg.core.errors import ConfigError, LayoutError
from disagg.core.topology import Topology
from disagg.layout.election import elect
from disagg.state import paged
from disagg.testing.reference import Context
from disagg.testing.reference_states import Form
from tests.support.instances import InstanceSpec
from tests.support.kinds import gqa_kind, index_kind, mla_kind
from tests.support.states import Scene, check_every_row, moved, runs_by_writer, tp_pairs

PAGES = tuple(itertools.product((1, 3, 4, 16), repeat=2))


def pages(size: int, rows: int = 40, **more: Any) -> Form:
    return Form(num_rows=rows, page_size=size, **more)


@pytest.mark.sweep
@pytest.mark.parametrize("scales", [0, 1, 3])
def test_every_tp_to_every_tp_fills_every_copy(scales: int) -> None:
    """Case 28: replicated state between groups of any size. Block scales have another dtype and move with their pages."""
    for source, destination in tp_pairs():
        moved(mla_kind(scales=scales, layers=(0, 4, 7)), source, destination)


@pytest.mark.sweep
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_block_scales_of_k_and_v_move_with_their_heads(heads: int) -> None:
    """FP8 and MX scales are tensors of the same pages, by head, in another dtype and other memory."""
    orders = dict.fromkeys(("k", "v", "k_scale", "v_scale"), "page kv_head token dim")
    for source, destination in itertools.product((1, 2, 3, 4, 8), repeat=2):
        theirs = InstanceSpec(tp=destination, forms={"kv": pages(6, orders=orders)})
        moved(gqa_kind(num_kv_heads=heads, scales=2), InstanceSpec(tp=source), theirs, 11)


@pytest.mark.parametrize(("source", "destination"), PAGES)
def test_latents_and_scales_are_paired_by_token_at_any_page_size(source: int, destination: int) -> None:
    kind = mla_kind(scales=2)
    for num_tokens, prefix in ((1, 0), (15, 0), (16, 7), (17, 16), (33, 33)):
        ours, theirs = InstanceSpec(tp=2, forms={"mla": pages(source)}), InstanceSpec(tp=3, forms={"mla": pages(destination)})
        moved(kind, ours, theirs, num_tokens, prefix=prefix)


def test_other_memory_orders_and_padded_rows() -> None:
    orders = {"latent": "page dim token", "latent_scale": "page dim token"}
    padded = Form(num_rows=9, page_size=4, spare={"dim": 3, "page": 1})
    kind = mla_kind(scales=2)
    moved(kind, InstanceSpec(tp=2, forms={"mla": pages(4, orders=orders)}), InstanceSpec(forms={"mla": padded}), 14)
    moved(kind, InstanceSpec(tp=2, forms={"mla": padded}), InstanceSpec(forms={"mla": pages(3, orders=orders)}), 14)


@pytest.mark.parametrize("context", list(Context))
@pytest.mark.parametrize(("source", "destination"), [(1, 2), (2, 1), (3, 2)])
def test_context_parallel_ranks_divide_the_tokens_of_a_latent(context: Context, source: int, destination: int) -> None:
    kind = mla_kind(scales=1, form=pages(4))
    for theirs in Context:
        moved(kind, InstanceSpec(tp=2, cp=source, context=context), InstanceSpec(cp=destination, context=theirs), 23, prefix=5)


@pytest.mark.sweep
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_replicas_write_equal_shares(replicas: int, readers: int) -> None:
    """Case 15, MLA: more replicas than readers, and fewer. Counted by the addresses read, not by the election."""
    for num_layers in (1, 2, 5, 8):
        kinds = [mla_kind(layers=range(num_layers), scales=1), index_kind(layers=range(0, num_layers, 2))]
        scene = Scene(kinds, InstanceSpec(tp=replicas), InstanceSpec(tp=readers))
        runs = runs_by_writer(scene, scene.transfer())
        # K of a layer and its scales are in buffers of their own but travel as one run: (component, layer, reader)
        total = readers * (num_layers + len(range(0, num_layers, 2)))
        assert sum(runs.values()) == total
        assert max(runs.values()) - min(runs.values()) <= 1
        assert all(total // replicas <= count <= -(-total // replicas) for count in runs.values())


def test_each_pipeline_stage_elects_among_its_replicas() -> None:
    scene = Scene([mla_kind(layers=range(6))], InstanceSpec(tp=4, edges=(0, 2, 6)), InstanceSpec(tp=2, edges=(0, 3, 6)))
    runs = runs_by_writer(scene, scene.transfer())
    assert [runs[rank] for rank in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("edges", [(0, 0, 9), (0, 9, 9), (0, 3, 3, 9), (0, 1, 2, 9)])
def test_a_stage_may_have_any_layers_or_none(edges: tuple[int, ...]) -> None:
    kind = mla_kind(layers=(1, 4, 7), scales=1)
    moved(kind, InstanceSpec(tp=2, edges=edges), InstanceSpec(), 9)
    moved(kind, InstanceSpec(descending=True), InstanceSpec(tp=2, edges=edges), 9)
    moved(kind, InstanceSpec(edges=edges, descending=True), InstanceSpec(edges=(0, 5, 9)), 9)


def test_an_optional_draft_model_on_one_side_is_left_out() -> None:
    """Case 23: only prefill or only decode has the draft model. Its rows stay unchanged."""
    draft = mla_kind(name="draft", layers=(78,), optional=True)
    for source, destination in (
        (InstanceSpec(tp=2, without=frozenset({"draft"})), InstanceSpec()),
        (InstanceSpec(tp=2), InstanceSpec(without=frozenset({"draft"}))),
    ):
        scene = Scene([gqa_kind(), draft], source, destination)
        moves = scene.transfer(needs={"draft": (0, 0)})
        assert {move.component for move in moves} == {"kv"}
    assert {move.component for move in moved([gqa_kind(), draft], InstanceSpec(tp=2), InstanceSpec())} == {"kv", "draft"}


def test_a_required_component_that_one_side_lacks_is_named() -> None:
    """Case 23, with a draft that is declared as required."""
    kinds = [gqa_kind(), mla_kind(name="draft", layers=(78,))]
    scene = Scene(kinds, InstanceSpec(without=frozenset({"draft"})), InstanceSpec())
    with pytest.raises(LayoutError, match="'draft': required"):
        elect(scene.source.table, scene.destination.table)


def test_the_destination_may_list_more_pages() -> None:
    """The lists of the two sides differ in length. Tokens decide what moves, not the number of pages."""
    scene = Scene([mla_kind(form=pages(4))], InstanceSpec(tp=2), InstanceSpec())
    request = scene.open(13, ahead=40, held={"mla": (0, 14)})
    check_every_row(scene, request)
    scene.run(request, scene.moves(request))
    assert scene.difference(request) is None


def test_a_stage_without_layers_needs_dtypes() -> None:
    topology = Topology(pp=2, pp_rank=1)
    stages = ((0, 1), ())
    with pytest.raises(ConfigError, match="'latent': expected a dtype, since this stage has no layer of it"):
        paged.mla({}, dim=5, topology=topology, layers_by_stage=stages)
    found = paged.mla({}, dim=5, topology=topology, layers_by_stage=stages, dtype="uint16", scales={}, scales_dtype="float32")
    assert found.placement is None
    assert found.layouts[0] is not None
    assert found.layouts[0].tensor("latent_scale").dtype == "float32"
    assert found.layouts[1] is None


@pytest.mark.parametrize(
    ("latent", "changes", "message"),
    [
        ((4, 2, 6), {}, "layer 0, axis 'dim': expected 5 positions, found 6"),
        ((4, 2, 5), {"dtype": "float16"}, "tensor 'latent': expected dtype float16, found uint16"),
        ((4, 2, 5), {"axes": "page dim"}, "axes 'page dim' lack 'token'"),
        ((4, 2, 5), {"axes": "page token dim dim"}, "a repeated name"),
        ((4, 2, 5), {"axes": "slot token dim"}, r"unknown \['slot'\]"),
        ((4, 2), {}, "expected the 3 axes"),
        ((4, 2, 5), {"scales": {}}, "of the same layers"),
        (
            (4, 2, 5),
            {"scales": {0: np.zeros((4, 3, 1), np.float32)}},
            r"expected tensors with the same .rows, tokens per page..*\(4, 2\), \(4, 3\)",
        ),
        ((4, 2, 5), {"scales": {1: np.zeros((4, 2, 1), np.float32)}}, r"of the same layers, found \[\(0,\), \(1,\)\]"),
    ],
)
def test_latents_that_contradict_the_declaration_are_rejected(
    latent: tuple[int, ...], changes: dict[str, object], message: str
) -> None:
    given = {"dtype": "uint16", "scales_dtype": "float32"} | changes
    with pytest.raises(ConfigError, match=message):
        paged.mla({0: np.zeros(latent, np.uint16)}, dim=5, topology=Topology(), **given)  # type: ignore[arg-type]
