"""Several kinds of state of one model at once: combinations of settings, and long runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from disagg.core.errors import LayoutError
from disagg.layout.election import elect
from disagg.state import declare
from disagg.testing.reference import Context, PageList
from disagg.testing.reference_states import Form
from disagg.testing.strategies import pairwise
from tests.support.instances import InstanceSpec
from tests.support.kinds import (
    Kind,
    adapter_kind,
    compressed_kind,
    gdn_kind,
    gqa_kind,
    index_kind,
    kda_kind,
    lightning_kind,
    mamba1_kind,
    mamba2_kind,
    mla_kind,
)
from tests.support.states import Request, Scene, moved, runs_by_writer

# --------------------------------------------------------------------------------------------------------------- pairwise

LAYERS = (1, 2, 4, 7)
EXPERT_SIZES = {"expert": 6, "rank": 2, "intermediate": 5}

KINDS: dict[str, Callable[[], Kind]] = {
    "gqa": lambda: gqa_kind(num_kv_heads=4, layers=LAYERS),
    "window": lambda: gqa_kind(name="window", window=9, num_kv_heads=2, layers=LAYERS),
    "mla": lambda: mla_kind(scales=2, layers=LAYERS),
    "index": lambda: index_kind(layers=LAYERS),
    "pooled index": lambda: index_kind(granule=2, layers=LAYERS),
    "compressed": lambda: compressed_kind(ratio=4, name="kv_4", layers=LAYERS),
    "gdn": lambda: gdn_kind(num_key_heads=4, num_value_heads=8, layers=LAYERS),
    "kda": lambda: kda_kind(num_heads=8, layers=LAYERS),
    "kda in four tensors": lambda: kda_kind(num_heads=4, separate=True, layers=LAYERS),
    "mamba2": lambda: mamba2_kind(num_heads=8, num_groups=3, layers=LAYERS),
    "mamba1": lambda: mamba1_kind(inner=16, layers=LAYERS),
    "lightning": lambda: lightning_kind(num_heads=8, layers=LAYERS),
    "adapter": lambda: adapter_kind("w2_a", order="slot expert rank intermediate", sizes=EXPERT_SIZES, layers=LAYERS),
}
EDGES = {1: (0, 9), 2: (0, 4, 9), 3: (0, 1, 5, 9)}
"""Layer ids where stages begin; with three stages the first has no layer of any state."""
CONTEXTS = (Context.PAGE_BLOCKS, Context.PAGES_IN_TURN)

SETTINGS: dict[str, Sequence[Any]] = {
    "kind": tuple(KINDS),
    "source_tp": (1, 2, 4, 8),
    "destination_tp": (1, 2, 4, 8),
    "source_pp": (1, 2, 3),
    "destination_pp": (1, 2, 3),
    "source_cp": (1, 2, 3),
    "destination_cp": (1, 2),
    "source_context": CONTEXTS,
    "destination_context": CONTEXTS,
    "source_page": (4, 8, 12),
    "destination_page": (4, 8, 12),
    "num_tokens": (1, 8, 23),
    "prefix": (0, 5),
}


def test_the_settings_cover_every_pair() -> None:
    rows = pairwise(SETTINGS)
    for one, other in itertools.combinations(SETTINGS, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(SETTINGS[one], SETTINGS[other]))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_state_kind_and_settings_of_the_two_sides(part: int) -> None:
    """State kind x TP x PP x CP x page size x length x prefix."""
    for row in pairwise(SETTINGS)[part::4]:
        kind = KINDS[row["kind"]]()
        sides = []
        for side in ("source", "destination"):
            form = kind.form
            if kind.model.paged:
                form = Form(**{**vars(form), "page_size": row[f"{side}_page"], "num_rows": 14})
            tp = row[f"{side}_tp"]
            sides.append(
                InstanceSpec(
                    tp=tp,
                    ep=min(2, tp) if row["kind"] == "adapter" else 1,
                    cp=row[f"{side}_cp"],
                    edges=EDGES[row[f"{side}_pp"]],
                    context=row[f"{side}_context"],
                    forms={kind.name: form},
                )
            )
        moved(kind, sides[0], sides[1], row["num_tokens"], prefix=min(row["prefix"], row["num_tokens"]))


# ---------------------------------------------------------------------------------------------------- several in one model


def hybrid() -> list[Kind]:
    """Full attention, a window, linear attention and index keys, each in its own layers of eight."""
    return [
        gqa_kind(num_kv_heads=2, layers=(3, 7)),
        mamba2_kind(num_heads=8, num_groups=3, layers=(0, 1, 2, 4)),
        gqa_kind(name="window", window=6, num_kv_heads=4, layers=(5, 6)),
        index_kind(layers=(3,)),
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(("source", "destination"), [(4, 2), (2, 8), (8, 1), (1, 4)])
def test_all_kinds_of_a_hybrid_model_in_one_request(source: int, destination: int) -> None:
    for edges in ((0, 8), (0, 4, 8), (0, 0, 3, 8)):
        moved(hybrid(), InstanceSpec(tp=source, edges=edges), InstanceSpec(tp=destination), 13)
        moved(hybrid(), InstanceSpec(tp=source), InstanceSpec(tp=destination, edges=edges, descending=True), 13, prefix=4)


@pytest.mark.parametrize("readers", [1, 2])
def test_ranks_that_write_no_mla_still_write_their_state(readers: int) -> None:
    """Case 15: KDA beside a replicated latent, with more prefill than decode ranks. Every rank sends its heads."""
    kinds = [mla_kind(layers=(3,)), kda_kind(num_heads=8, layers=(0, 1, 2))]
    scene = Scene(kinds, InstanceSpec(tp=8), InstanceSpec(tp=readers))
    moves = scene.transfer()
    latent = {move.source for move in moves if move.component == "mla"}
    state = Counter(dict.fromkeys(range(8), 0))
    for move in moves:
        state[move.source] += move.copies.total_nbytes if move.component == "ssm" else 0
    assert len(latent) == readers
    assert len(set(state.values())) == 1
    assert all(state.values())


def test_replicas_share_the_runs_of_all_replicated_components() -> None:
    """Latent and index keys on 4 ranks: 7 runs per reader, divided as one list."""
    kinds = [mla_kind(layers=range(4)), index_kind(layers=range(3)), kda_kind(num_heads=4, layers=(5, 6))]
    for readers in (1, 2, 4):
        scene = Scene(kinds, InstanceSpec(tp=4), InstanceSpec(tp=readers))
        moves = scene.transfer()
        runs = runs_by_writer(scene, [move for move in moves if move.component != "ssm"])
        assert sum(runs.values()) == 7 * readers
        assert max(runs.values()) - min(runs.values()) <= 1


def test_a_required_component_that_one_side_lacks_is_named() -> None:
    """Case 22 at the handshake: one side does not declare a component."""
    scene = Scene(hybrid(), InstanceSpec(without=frozenset({"ssm"})), InstanceSpec())
    for tables in ((scene.source.table, scene.destination.table), (scene.destination.table, scene.source.table)):
        with pytest.raises(LayoutError, match="component 'ssm': required"):
            elect(*tables)


@pytest.mark.parametrize("wrong", ["conv cut flat", "stages shifted", "a token too many"])
def test_the_reference_detects_a_wrong_declaration(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides make the same mistake, shapes fit and every byte arrives. Only content by global coordinates shows it."""
    kinds = hybrid()
    if wrong == "conv cut flat":
        monkeypatch.setattr("disagg.state.mamba.blocks_by_tp", lambda blocks: declare.by_tp(sum(b.size for b in blocks)))
        kinds = [mamba2_kind(num_heads=8, num_groups=2)]
    scene = Scene(kinds, InstanceSpec(tp=2), InstanceSpec(tp=1))
    if wrong == "stages shifted":
        image = scene.destination.ranks[0].image["kv"]
        image.buffers["k", 3], image.buffers["k", 7] = image.buffers["k", 7], image.buffers["k", 3]
    if wrong == "a token too many":
        request = scene.open(12, needs={"index": (0, 12)})
        moves = scene.moves(request)
        request.needs["index"] = (0, 11)
        scene.run(request, moves)
        assert "index: tensor pages, layer 3" in str(scene.difference(request))
        return
    with pytest.raises(AssertionError, match="bytes differ"):
        scene.transfer(12)


# ----------------------------------------------------------------------------------------------------------- recycled pools


@pytest.mark.sweep
def test_150_requests_of_pp4_tp4_to_four_groups_through_recycled_pools() -> None:
    """Case 10, scaled down from PP 4 x TP 8 to TP 8 x DP 8: every byte of every pool after every request.

    Rows stay in use for a few requests and are then reused. Earlier content of other rows must not change.
    """
    kinds = [
        gqa_kind(num_kv_heads=2, dims=(2, 1), layers=(1, 3, 5, 7), form=Form(num_rows=11, page_size=4)),
        gdn_kind(num_key_heads=2, num_value_heads=4, dims=(1, 2), layers=(0, 2, 4), form=Form(num_rows=4)),
    ]
    forms = {"kv": Form(num_rows=9, page_size=8, orders=dict.fromkeys("kv", "page kv_head token dim"))}
    scene = Scene(kinds, InstanceSpec(tp=4, edges=(0, 2, 4, 6, 8)), InstanceSpec(tp=4, dp=4, forms=forms), seed=10)
    taken: Counter[tuple[int, int]] = Counter()
    live: list[Request] = []
    rng = np.random.default_rng(10)
    for number in range(150):
        if len(live) == 3:
            scene.close(live.pop(int(rng.integers(3))))
        num_tokens = int(rng.integers(1, 13))
        prefix = int(rng.integers(num_tokens)) if number % 3 == 0 else 0
        request = scene.open(num_tokens, prefix=prefix, destination_group=int(rng.integers(4)))
        live.append(request)
        scene.run(request, scene.moves(request))
        assert scene.difference(request) is None, number
        rows = request.source_rows[0]["kv"]
        assert isinstance(rows, PageList)
        taken.update((0, page) for page in rows.ids)
    assert min(taken[0, page] for page in range(11)) >= 10
