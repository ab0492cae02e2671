"""Pools of a stage: only its layers, tensors that do not overlap, and the weights that each stage needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigError
from disagg.core.topology import Topology
from disagg.layout.placement import check_placement
from disagg.layout.tables import LAYER
from disagg.models import (
    ModelSpec,
    PoolShape,
    Stage,
    StagePools,
    allocate,
    first_layers,
    from_config,
    load_model,
    split_layers,
    stage_of,
)

HYBRID: Mapping[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 7,
    "layer_types": [{"L": "linear_attention", "F": "full_attention"}[kind] for kind in "LLLFLLF"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_nextn_predict_layers": 1,
}
WINDOWS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 32,
}
INDEXED: Mapping[str, Any] = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "index_topk": 16,
    "index_head_dim": 16,
    "num_nextn_predict_layers": 1,
}
COMPRESSED: Mapping[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 32,
    "index_topk": 16,
    "index_head_dim": 16,
    "compress_ratios": [0, 4, 128, 4],
}
MODELS = {name: from_config(config, name=name, draft_layers="num_nextn_predict_layers" in config) for name, config in
          {"hybrid": HYBRID, "windows": WINDOWS, "indexed": INDEXED, "compressed": COMPRESSED}.items()} | {
    "tiny": load_model("tiny")}  # fmt: skip

SHAPE = PoolShape(page_size=16, num_pages=5, num_slots=3)


def pools_of(model: ModelSpec, topology: Topology, shape: PoolShape = SHAPE) -> StagePools:
    return allocate(model, topology, shape)


def layers_of(pools: StagePools) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensors) for name, tensors in pools.tensors.items()}


class TestSplit:
    @given(st.integers(1, 200), st.integers(1, 16))
    def test_even_shares_with_the_remainder_last(self, num_layers: int, num_stages: int) -> None:
        stages = split_layers(num_layers, num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        sizes = [len(stage) for stage in stages]
        assert sizes == sorted(sizes)
        assert sizes[-1] - sizes[0] <= 1

    def test_by_counts(self) -> None:
        assert split_layers(15, 2, (7, 8)) == (tuple(range(7)), tuple(range(7, 15))) == split_layers(15, 2)
        for counts in [(7, 7), (15,), (16, -1)]:
            with pytest.raises(ConfigError, match="layer counts"):
                split_layers(15, 2, counts)


class TestStages:
    def test_have_only_the_layers_of_the_stage(self) -> None:
        model = MODELS["hybrid"]
        first, last = (pools_of(model, Topology(pp=2, pp_rank=stage)) for stage in range(2))
        assert layers_of(first) == {"kv": (), "ssm": (0, 1, 2), "draft_kv": ()}
        assert layers_of(last) == {"kv": (3, 6), "ssm": (4, 5), "draft_kv": (7,)}
        kv = next(component for component in last.components if component.name == "kv")
        assert kv.layouts[0] is None
        assert kv.layouts[1] is not None
        assert first.components[0].placement is None

    def test_uneven_counts(self) -> None:
        shape = PoolShape(num_pages=5, layer_counts=(4, 0, 3))
        found = [layers_of(pools_of(MODELS["hybrid"], Topology(pp=3, pp_rank=stage), shape)) for stage in range(3)]
        assert [f["kv"] for f in found] == [(3,), (), (6,)]
        assert [f["ssm"] for f in found] == [(0, 1, 2), (), (4, 5)]

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(("tp", "pp", "counts"), [(1, 1, None), (2, 1, None), (1, 2, (1, -1)), (4, 3, None)])
    def test_each_layer_is_in_one_stage(self, name: str, tp: int, pp: int, counts: tuple[int, int] | None) -> None:
        model = MODELS[name]
        given_counts = None if counts is None else (counts[0], model.num_layers + counts[1])
        shape = PoolShape(num_pages=2, layer_counts=given_counts)
        topology = Topology(tp=tp, pp=pp)
        found: dict[str, list[int]] = {state.name: [] for state in model.states}
        tables = []
        for rank in topology.group():
            pools = pools_of(model, rank, shape)
            tables.append([component.layouts for component in pools.components])
            for component, layers in layers_of(pools).items():
                found[component] += layers if rank.tp_rank == 0 else ()
        assert found == {state.name: list(state.layers) for state in model.states}
        assert all(table == tables[0] for table in tables)  # every rank computes the same layouts of all ranks

    @pytest.mark.parametrize("name", MODELS)
    def test_layouts_match_memory(self, name: str) -> None:
        for rank in Topology(tp=2, pp=2).group():
            pools = pools_of(MODELS[name], rank)
            for component in pools.components:
                layout, tensors = component.layouts[rank.group_rank], pools.tensors[component.name]
                assert (layout is None) == (component.placement is None) == (not tensors)
                if layout is None or component.placement is None:
                    continue
                check_placement(component.placement, layout, component.regions, whose="this rank")
                for tensor in layout.tensors:
                    axis = next(a for a in tensor.axes if a.name == LAYER)
                    assert [i for i in range(20) if axis.owned.within(20).locate(np.array([i]))[0] >= 0] == list(tensors)

    def test_first_and_last_layer_given_by_the_server(self) -> None:
        model = MODELS["hybrid"]
        stage = Topology(pp=2, pp_rank=1)
        assert layers_of(allocate(model, stage, SHAPE, start_layer=3, end_layer=7))["kv"] == (3, 6)
        with pytest.raises(ConfigError, match=r"\[3, 7\), found \[4, 7\).*layer_counts"):
            allocate(model, stage, SHAPE, start_layer=4, end_layer=7)
        alone = allocate(model, Topology(), SHAPE, start_layer=2, end_layer=5)
        assert layers_of(alone) == {"kv": (3,), "ssm": (2, 4), "draft_kv": ()}
        for start, end in [(-1, 3), (4, 3), (0, 8)]:
            with pytest.raises(ConfigError, match="stage"):
                allocate(model, Topology(), SHAPE, start_layer=start, end_layer=end)

    def test_saved_bytes(self) -> None:
        model = MODELS["tiny"]
        whole = pools_of(model, Topology())
        half = pools_of(model, Topology(pp=2, pp_rank=1))
        assert whole.saved_nbytes == 0
        assert half.saved_nbytes == half.arena.nbytes == whole.arena.nbytes // 2
        assert str(half.use[0]) == "kv: 2 of 4 layers, 0.2 MiB, 0.2 MiB saved"

    def test_one_stage_has_every_layer(self) -> None:
        for model in MODELS.values():
            assert layers_of(pools_of(model, Topology())) == {state.name: state.layers for state in model.states}


class TestMemory:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("order", ["nhd", "hnd"])
    @pytest.mark.parametrize("tp", [1, 2, 8])
    def test_tensors_fill_the_arena_and_do_not_overlap(self, name: str, order: str, tp: int) -> None:
        shape = PoolShape(page_size=16, num_pages=5, num_slots=3, order=order)
        pools = pools_of(MODELS[name], Topology(tp=tp, tp_rank=tp - 1), shape)
        assert pools.arena.__array_interface__["data"][0] % 4096 == 0
        assert not pools.arena.any()
        nbytes = 0
        for tensors in pools.tensors.values():
            for roles in tensors.values():
                for array in roles.values():
                    np.add(array, 1, out=array)
                    nbytes += array.size
        assert pools.arena.max() == 1
        assert int(pools.arena.sum()) == nbytes
        assert sum(use.nbytes for use in pools.use) == pools.arena.nbytes

    def test_shapes_follow_the_roles(self) -> None:
        for order, dims in (("nhd", (5, 16, 2, 32)), ("hnd", (5, 2, 16, 32))):
            shape = PoolShape(num_pages=5, num_slots=3, order=order)
            tensors = pools_of(MODELS["hybrid"], Topology(tp=2), shape).tensors
            assert tensors["kv"][3]["k"].shape == dims
            assert tensors["ssm"][0]["conv"].shape == (3, 2 * 32 + 32, 3 * 2)
            assert tensors["ssm"][0]["temporal"].shape == (3, 4, 16, 8 * 4)

    def test_rows_by_component(self) -> None:
        shape = PoolShape(num_pages=9, num_slots=3, rows={"window": 4, "c4_open": 6})
        tensors = pools_of(MODELS["compressed"], Topology(), shape).tensors
        assert tensors["window"][0]["latent"].shape == (4, 16, 32)
        assert tensors["c4"][1]["latent"].shape == (9, 4, 32)
        assert tensors["c128"][2]["latent"].shape == (9, 1, 32)  # a page has 128 tokens, because an entry is not split
        assert tensors["c4_open"][1]["kv_score"].shape == (6, 8, 64 * 4)
        assert tensors["c128_open"][2]["kv_score"].shape == (3, 128, 32 * 4)

    def test_index_keys_and_scales_share_a_page(self) -> None:
        pools = pools_of(MODELS["indexed"], Topology())
        roles = pools.tensors["index"][0]
        assert {name: (array.shape, array.strides) for name, array in roles.items()} == {
            "key": ((5, 16, 16), (16 * 20, 16, 1)),
            "scale": ((5, 16, 4), (16 * 20, 4, 1)),
        }
        starts = [array.__array_interface__["data"][0] for array in roles.values()]
        assert starts[1] - starts[0] == 16 * 16

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"page_size": 0}, "page size"),
            ({"num_pages": 0}, "pages"),
            ({"num_slots": 0}, "slots"),
            ({"rows": {"kv": 0}}, "rows"),
            ({"order": "dhn"}, "dhn"),
        ],
    )
    def test_rejects_wrong_sizes(self, changes: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            PoolShape(**{"num_pages": 4, **changes})

    def test_rejects_rows_of_an_unknown_component(self) -> None:
        with pytest.raises(ConfigError, match="expected components of kv, found kvv"):
            pools_of(MODELS["tiny"], Topology(), PoolShape(num_pages=4, rows={"kvv": 3}))

    def test_rejects_pools_that_cannot_be_mapped(self) -> None:
        with pytest.raises(ConfigError, match="cannot map"):
            pools_of(MODELS["tiny"], Topology(), PoolShape(num_pages=2**50))


LONGCAT = {"model_type": "longcat_flash", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


class TestWeights:
    FIRST, MIDDLE, LAST = (Stage(start_layer=start, end_layer=end, num_layers=6) for start, end in pairwise([0, 2, 4, 6]))

    @pytest.mark.parametrize(
        ("name", "owners"),
        [
            ("model.layers.0.self_attn.q_proj.weight", "F"),
            ("model.layers.1.mlp.experts.117.down_proj.weight", "F"),
            ("model.layers.3.mlp.experts.0.gate_proj.weight_scale_inv", "M"),
            ("model.language_model.layers.2.linear_attn.conv1d.weight", "M"),
            ("language_model.model.layers.5.mlp.gate.weight", "L"),
            ("backbone.layers.4.mixer.A_log", "L"),
            ("layers.3.attn.wkv.weight", "M"),
            ("model.layers.6.embed_tokens.weight", "L"),
            ("model.layers.61.mlp.experts.3.up_proj.weight", "L"),
            ("mtp.layers.0.self_attn.k_proj.weight", "L"),
            ("mtp.0.attn.wkv.weight", "L"),
            ("mtp.fc.weight", "L"),
            ("model.embed_tokens.weight", "F"),
            ("model.language_model.embed_tokens.weight", "F"),
            ("backbone.embeddings.weight", "F"),
            ("embed.weight", "F"),
            ("model.norm.weight", "L"),
            ("backbone.norm_f.weight", "L"),
            ("model.final_layernorm.weight", "L"),
            ("lm_head.weight", "L"),
            ("lm_head.weight_scale", "L"),
            ("head.weight", "L"),
            ("model.visual.blocks.3.attn.qkv.weight", "FML"),
            ("vision_tower.encoder.layers.3.mlp.fc1.weight", "FML"),
            ("model.rotary_emb.inv_freq", "FML"),
            ("model.layers.weight", "FML"),
            ("", "FML"),
            ("model", "FML"),
        ],
    )
    def test_stages_that_need_a_weight(self, name: str, owners: str) -> None:
        stages = {"F": self.FIRST, "M": self.MIDDLE, "L": self.LAST}
        assert "".join(letter for letter, stage in stages.items() if stage.owns_weight(name)) == owners

    def test_stages_of_blocks_with_two_layers(self) -> None:
        """LongCat: a checkpoint counts blocks, of two attention layers each."""
        model = from_config({**LONGCAT, "num_layers": 3}, name="longcat")
        stages = [stage_of(model, Topology(pp=2, pp_rank=stage)) for stage in range(2)]
        assert [(stage.start_layer, stage.end_layer) for stage in stages] == [(0, 2), (2, 6)]
        owners = [[stage.owns_weight(f"model.layers.{block}.mlp.weight") for stage in stages] for block in range(4)]
        assert owners == [[True, False], [False, True], [False, True], [False, True]]
        by_blocks = stage_of(model, Topology(pp=2, pp_rank=1), layer_counts=(2, 1))
        assert (by_blocks.start_layer, by_blocks.end_layer) == (4, 6)
        with pytest.raises(ConfigError, match="whole blocks of 2 layers"):
            stage_of(model, Topology(), start_layer=1)
        assert first_layers(model, 4).num_layers == 4
        with pytest.raises(ConfigError, match="a multiple of 2"):
            first_layers(model, 3)
        assert from_config({**LONGCAT, "num_hidden_layers": 6}, name="longcat").num_layers == model.num_layers == 6
        with pytest.raises(ConfigError, match="num_hidden_layers: expected a multiple of 2, found 7"):
            from_config({**LONGCAT, "num_hidden_layers": 7}, name="longcat")

    @pytest.mark.parametrize("name", ["model.layers.0.shared_transf.x", "model.layers.2.shared_transformer.x"])
    def test_every_stage_needs_weights_that_layers_share(self, name: str) -> None:
        assert all(stage.owns_weight(name) for stage in (self.FIRST, self.MIDDLE, self.LAST))

    def test_the_last_stage_needs_tied_embeddings_too(self) -> None:
        tied = from_config({**WINDOWS, "tie_word_embeddings": True}, name="tied")
        stages = [stage_of(tied, Topology(pp=3, pp_rank=stage)) for stage in range(3)]
        assert [stage.owns_weight("model.embed_tokens.weight") for stage in stages] == [True, False, True]
        assert [stage.owns_weight("lm_head.weight") for stage in stages] == [False, False, True]

    @given(st.integers(0, 9), st.sampled_from(["model.layers.{}.x", "backbone.layers.{}.mlp.experts.8.w"]))
    def test_a_layer_s_weights_belong_to_one_stage(self, layer: int, name: str) -> None:
        stages = (self.FIRST, self.MIDDLE, self.LAST)
        assert sum(stage.owns_weight(name.format(layer)) for stage in stages) == 1

    def test_a_single_stage_needs_every_weight(self) -> None:
        pools = pools_of(MODELS["hybrid"], Topology())
        assert all(
            pools.owns_weight(n) for n in ("model.layers.6.x", "model.layers.7.x", "lm_head.weight", "mtp.fc.weight", "a")
        )


def test_a_config_file_goes_all_the_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(HYBRID)))
    pools = pools_of(load_model(str(tmp_path)), Topology(tp=2, pp=2, pp_rank=1))
    assert [component.name for component in pools.components] == ["kv", "ssm"]
