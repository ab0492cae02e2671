"""The caches of every published prefill/decode deployment, moved between its pools and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.integrations.vllm.caches import Layer, Server, check_move
from tests.integrations.vllm.kinds import convolved, dsa_index, gdn, gqa, kda, linear, m3_index, mla, v4
from tests.integrations.vllm.recipes import CACHES, DCP_POOLS, POOLS, RECIPES, Recipe

KIMI = {
    "model_type": "kimi_linear", "kv_lora_rank": 64, "qk_rope_head_dim": 32, "num_attention_heads": 8,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 8, "head_dim": 16, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
MIMO = {
    "num_attention_heads": 8, "swa_num_key_value_heads": 8, "head_dim": 32, "v_head_dim": 16, "sliding_window_size": 24,
    "hybrid_layer_pattern": [0, 1, 1, 0],
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_5_moe", "num_attention_heads": 8, "head_dim": 32, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
FOUR, UPPER = range(4), (1, 2, 3)


def caches_of(recipe: Recipe, dtype: str) -> tuple[list[Layer], Mapping[str, Any]]:
    """Four layers of the recipe's kinds, with few elements, and the fields of the model that matter."""
    heads = recipe.kv_heads
    mimo = {"model_type": "mimo_v2_flash" if recipe.model == "MiMo-V2-Flash" else "mimo_v2", **MIMO}
    made: dict[str, tuple[list[Layer], dict[str, Any]]] = {
        "gqa": (gqa(FOUR, heads, 32, dtype=dtype), {}),
        "mla": (mla(FOUR, 96, dtype=dtype), {}),
        "windows": ([*gqa((0, 3), heads, 32, dtype=dtype), *gqa((1, 2), heads, 32, window=24, dtype=dtype)], {}),
        "mimo": ([*gqa((0, 3), heads, 32, v_dim=16), *gqa((1, 2), 8, 32, v_dim=16, window=24)], mimo),
        "gdn": ([*gdn(range(3), 8, 16, 16), *gqa((3,), heads, 32, dtype=dtype)], QWEN),
        "dsa": ([*mla(FOUR, dtype=dtype, sparse=True), *dsa_index((0, 1, 3))], {}),
        "m3": ([*gqa(FOUR, heads, 32, dtype=dtype), *m3_index(UPPER)], {}),
        "kimi_k3": ([*kda(range(3), 8, 16), *mla((3,), 96, dtype=dtype)], KIMI),
        "ring": ([*linear(range(3), 8, 16), *mla((3,), 96)], {}),
        "inkling": (
            [*gqa((3,), heads, 32), *gqa(range(3), 16, 32, window=24), *convolved((3,), heads, 32, 256),
             *convolved(range(3), 16, 32, 256)],
            {"swa_num_key_value_heads": 16},
        ),
        "v4": (v4((1, 4, 128, 4)), {}),
    }  # fmt: skip
    layers, fields = made[recipe.caches]
    return layers, {"model_type": "other", "num_hidden_layers": 4, "num_key_value_heads": heads, **fields}


def draft_of(recipe: Recipe, dtype: str) -> tuple[list[Layer], dict[str, Any]] | None:
    """The layer that a recipe's draft model has after the model's four, and the fields of its configuration that matter. `None`
    if it has several, which are refused.
    """
    heads = recipe.kv_heads
    made: dict[str, tuple[list[Layer], dict[str, Any]]] = {
        "gqa": (gqa((4,), heads, 32, dtype=dtype), {"num_key_value_heads": heads}),
        "m3": (gqa((4,), heads, 32, dtype=dtype), {"num_key_value_heads": heads}),
        "gdn": (gqa((4,), heads, 32, dtype=dtype), {"num_key_value_heads": heads}),
        "mimo": (
            gqa((4,), 8, 32, v_dim=16, window=24), {"num_key_value_heads": heads, "swa_num_key_value_heads": 8},
        ),
        "dsa": ([*mla((4,), dtype=dtype, sparse=True), *dsa_index((4,))], {"kv_lora_rank": 512}),
        "mla": (gqa((4,), 8, 32, dtype=dtype), {"num_key_value_heads": 8}),
        "kimi_k3": (mla((4,), 96, dtype=dtype), {"kv_lora_rank": 64}),
        "v4": (v4((1, 4, 128, 4, 1))[-1:], {"kv_lora_rank": 512}),
    }  # fmt: skip
    if recipe.drafts == "EAGLE":  # of a model with latents, as the model itself
        return mla((4,), 96, dtype=dtype), {"kv_lora_rank": 64}
    return made.get(recipe.caches)


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each.drafts], ids=lambda recipe: recipe.model)
def test_draft_layers_of_a_recipe(recipe: Recipe) -> None:
    """They are moved with the model's, and left out between servers of which one has none."""
    for dtype in recipe.dtypes:
        found = draft_of(recipe, dtype)
        if found is None:
            assert recipe.caches in ("windows", "inkling")
            continue
        (draft, fields), (layers, model) = found, caches_of(recipe, dtype)
        options = {"layout": "BLHNC", "num_blocks": 192, "block_size": 256 if recipe.caches == "v4" else 64}
        for pools in POOLS:
            both = [Server([*layers, *draft], model=model, **options, **pool, draft=fields) for pool in pools]
            assert all(any(cache.name.startswith("draft.") for cache in server.ranks[0].caches) for server in both)
            check_move(*both, num_tokens=150, chunk=64)
        prefill, decode = (
            Server([*layers, *draft], model=model, **options, draft=fields),
            Server(layers, model=model, **options),
        )
        check_move(prefill, decode, num_tokens=150, chunk=64)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.model)
def test_recipe(recipe: Recipe) -> None:
    for dtype in recipe.dtypes:
        layers, model = caches_of(recipe, dtype)
        options = {"layout": "BLHNC", "num_blocks": 192, "block_size": 256 if recipe.caches == "v4" else 64}
        for pools in (*POOLS, *(DCP_POOLS if recipe.dcp else ())):
            prefill, decode = (Server(layers, model=model, **options, **pool) for pool in pools)
            check_move(prefill, decode, num_tokens=150, chunk=64)


def test_every_recipe_is_listed() -> None:
    assert len({recipe.model for recipe in RECIPES}) == 41
    assert {recipe.caches for recipe in RECIPES} == CACHES.keys()
