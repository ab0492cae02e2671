"""Which layers draft, what their KV is made with, and which forms of speculation are refused, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm.config import SpeculativeConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from disagg.core.errors import ConfigError
from disagg.core.rows import Slot
from disagg.core.topology import Topology
from disagg.integrations.vllm.drafts import Drafts
from disagg.integrations.vllm.groups import Kind, check_engine, component_names, read_groups
from disagg.integrations.vllm.identity import draft_heads, identify_draft
from disagg.integrations.vllm.layout import Cache
from harness.vllm.models import write_head

FULL = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float32, sliding_window=64)
STATE = MambaSpec(block_size=16, shapes=((6, 8), (4, 8, 8)), dtypes=(torch.float32,) * 2, num_speculative_blocks=3)
NUM_LAYERS = 4
ROPE = {"rope_type": "default", "rope_theta": 500.0}
MODEL = {f"model.layers.{layer}.self_attn.attn": FULL for layer in range(NUM_LAYERS)}


class State(MambaBase):  # type: ignore[misc]
    """A layer with recurrent state."""

    def __init__(self) -> None:
        pass


State.__abstractmethods__ = frozenset()


def cache(*groups: Mapping[str, KVCacheSpec]) -> KVCacheConfig:
    """A KV cache with these groups of layers."""
    found = []
    for layers in groups:
        first = next(iter(layers.values()), FULL)
        is_uniform = all(spec == first for spec in layers.values())
        spec = first if is_uniform else UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(layers))
        found.append(KVCacheGroupSpec(list(layers), spec))
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=found)


def engine(
    *, marked: tuple[str, ...] = (), states: tuple[str, ...] = (), drafts: bool = True, is_model: bool = False, **draft: Any
) -> Any:
    """What `Drafts` and `identify_draft` read of vLLM's configuration."""
    layers: dict[str, Any] = {
        name: SimpleNamespace(kv_cache_dtype="auto") for name in (*MODEL, "model.layers.4.self_attn.attn")
    }
    layers |= {name: SimpleNamespace(is_draft_layer=True) for name in marked} | {name: State() for name in states}
    speculation = SimpleNamespace(
        uses_draft_kv_cache=lambda: drafts,
        uses_draft_model=lambda: is_model,
        method="draft_model" if is_model else "eagle",
        parallel_drafting=False,
        use_heterogeneous_vocab=False,
        **draft,
    )
    return SimpleNamespace(
        speculative_config=speculation,
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: NUM_LAYERS),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def own(value: Any) -> list[Any]:
    return [value]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.self_attn.attn",
        "model.layers.5.mtp_block.self_attn.attn",
        "mtp.layers.0.self_attn.attn",
        "mtp.layers.0.mixer.attn",
        "model.mtp.layers.0.self_attn.attn",
        "model.mtp_layers.4.mtp_block.self_attn.attn",
        "model.eagle_layers.0.self_attn.attn",
        "draft_model.model.layers.0.self_attn.attn",
    ],
)
def test_draft_layers_by_their_names(name: str) -> None:
    kv = cache({**MODEL, name: FULL})
    drafts = Drafts(engine(), kv)
    (target,), (draft,) = drafts.target(read_groups(kv)), drafts.draft(read_groups(kv))
    assert (set(target.specs), set(draft.specs)) == (set(MODEL), {name})
    assert Drafts(engine(drafts=False), kv).draft(read_groups(kv)) == ()


def test_layers_that_a_looped_model_numbers_after_its_own_are_not_its_draft_models() -> None:
    """IQuest-LoopCoder's second pass."""
    again = {f"model.layers.{NUM_LAYERS + layer}.self_attn.attn": WINDOW for layer in range(NUM_LAYERS)}
    draft = "draft_model.model.layers.0.self_attn.attn"
    kv = cache({**MODEL, draft: FULL}, again)
    drafts = Drafts(engine(is_model=True), kv)
    assert {name for group in drafts.target(read_groups(kv)) for name in group.specs} == MODEL.keys() | again.keys()
    assert [set(group.specs) for group in drafts.draft(read_groups(kv))] == [{draft}]


def test_draft_layers_that_vllm_marks() -> None:
    name = "language.layers.0.attn"
    kv = cache({**MODEL, name: FULL})
    assert set(Drafts(engine(marked=(name,)), kv).draft(read_groups(kv))[0].specs) == {name}


def test_states_of_the_model_are_no_drafts_whatever_their_number() -> None:
    """In a layer with both, vLLM numbers the states from the number of layers on."""
    states = {f"model.{layer + NUM_LAYERS}.mixer": STATE for layer in range(NUM_LAYERS)}
    kv = cache(MODEL, states)
    drafts = Drafts(engine(states=tuple(states)), kv)
    assert [set(group.specs) for group in drafts.target(read_groups(kv))] == [set(MODEL), set(states)]
    assert drafts.draft(read_groups(kv)) == ()


def test_a_state_is_before_the_blocks_of_drafts() -> None:
    (group,) = read_groups(cache({"model.layers.0.mixer": STATE}))
    component: Any = None
    assert Cache(group, component, 1).rows([0, 0, 5, 6, 7, 8]) == Slot(5)


def test_drafts_with_recurrent_states_are_refused() -> None:
    kv = cache(MODEL, {"draft_model.model.layers.0.mixer": STATE})
    with pytest.raises(ConfigError, match=r"draft layers: expected attention, found recurrent state in draft_model\.model"):
        Drafts(engine(), kv).draft(read_groups(kv))


def test_the_models_components_have_the_names_that_they_have_without_drafts() -> None:
    """A draft may be of another kind in the same group, or have a group of its own."""
    latents = dict.fromkeys(MODEL, LATENT)
    kv = cache({**latents, "model.layers.4.self_attn.attn": FULL})
    drafts = Drafts(engine(), kv)
    (target,), (draft,) = drafts.target(read_groups(kv)), drafts.draft(read_groups(kv))
    assert (set(target.by_kind(NUM_LAYERS)), set(draft.by_kind(None))) == ({Kind.LATENT}, {Kind.FULL})
    assert [name for _, name, _ in component_names((target,), num_layers=NUM_LAYERS)] == ["mla"]

    kv = cache(MODEL, {"model.layers.4.self_attn.attn": WINDOW})
    drafts = Drafts(engine(), kv)
    assert [name for _, name, _ in component_names(drafts.target(read_groups(kv)), num_layers=NUM_LAYERS)] == ["kv"]
    (draft,) = drafts.draft(read_groups(kv))
    assert [name for _, name, _ in component_names((draft,), num_layers=None, prefix="draft.x.")] == ["draft.x.kv.4"]


def test_what_a_draft_is_made_with(tmp_path: Path) -> None:
    """Another draft has another name. So has the same one in another layout, which must not refuse the pair."""
    number = iter(range(100))

    def name(spec: KVCacheSpec, *, method: str = "eagle", heads: int = 4, tp: int = 1, **fields: Any) -> str:
        folder = write_head(tmp_path / f"{next(number)}")
        config = transformers.LlamaConfig.from_pretrained(folder, num_key_value_heads=heads, **fields)
        config.save_pretrained(folder)
        model = SimpleNamespace(
            model=str(folder),
            revision=None,
            hf_config=config,
            hf_text_config=config,
            max_model_len=512,
            using_transformers_backend=lambda: False,
            get_total_num_kv_heads=lambda: heads,
        )
        draft = engine(draft_model_config=model, draft_parallel_config=SimpleNamespace(tensor_parallel_size=1))
        draft.speculative_config.method = method
        groups = read_groups(cache({"model.layers.4.self_attn.attn": spec}))
        return identify_draft(draft, groups, Topology(tp=tp), from_tp=own)

    half = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    same = name(FULL)
    assert same == name(half, tp=2)
    low = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    others = [name(FULL, method="eagle3"), name(half, heads=2), name(low), name(WINDOW), name(FULL, rope_parameters=ROPE)]
    others.append(name(FULL, hidden_size=128))
    assert len({same, *others}) == 1 + len(others)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size: expected 2, that of the server, found 1"):
        name(FULL, tp=2)


@pytest.mark.parametrize(("counts", "heads"), [({}, 4), ({"swa_num_key_value_heads": 8}, 8)], ids=["one", "two"])
def test_heads_of_a_draft_whose_ranks_have_one_each(counts: dict[str, int], heads: int) -> None:
    """Eight ranks have four heads twice. MiMo-V2's draft has a layer with a window, and more heads than the model says."""
    text = transformers.PreTrainedConfig(num_key_value_heads=4, **counts)
    model = SimpleNamespace(hf_text_config=text, get_total_num_kv_heads=lambda: 4)
    draft = engine(draft_model_config=model, draft_parallel_config=SimpleNamespace(tensor_parallel_size=8))
    assert draft_heads(draft, replace(WINDOW, num_kv_heads=1), Topology(tp=8)) == heads


def refused(*, stages: int = 1, **given: Any) -> str:
    speculation = object.__new__(SpeculativeConfig)
    for key, value in given.items():
        object.__setattr__(speculation, key, value)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=stages
        ),
        speculative_config=speculation,
        diffusion_config=None,
        aux_output_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False),
    )
    try:
        check_engine(config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("num_modules", "num_tokens", "is_refused"), [(1, 3, False), (3, 1, False), (3, 2, True)])
def test_several_modules_of_multi_token_prediction_are_refused(num_modules: int, num_tokens: int, is_refused: bool) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=num_modules))
    found = refused(method="mtp", draft_model_config=model, num_speculative_tokens=num_tokens)
    assert ("several modules of multi-token prediction" in found) is is_refused


def test_methods_without_kv_are_accepted_and_a_cache_of_hidden_states_is_not() -> None:
    for method in ("ngram", "suffix", "medusa"):
        assert refused(method=method, draft_model_config=None) == ""
    assert "with pipeline parallelism" in refused(method="ngram", draft_model_config=None, stages=2)
    assert "'extract_hidden_states'" in refused(method="extract_hidden_states", draft_model_config=None)
