"""Descriptions of decoders against transformers: what a small model of each type really caches, and its class's defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from disagg.core.errors import ConfigError
from disagg.models import ModelSpec, from_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 11
# Every size differs from the others and from what a default would give: heads of 16, not of hidden_size / heads = 8.
SIZES: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 6, "max_position_embeddings": 128,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BY_HIDDEN = {"head_dim": None}
WINDOW = {"sliding_window": 5}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {**EXPERTS, **BY_HIDDEN, "num_key_value_heads": 6, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 20, "v_head_dim": 12}  # fmt: skip
USED = {**WINDOW, "use_sliding_window": True, "max_window_layers": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = ["full_attention", "sliding_attention", "sliding_attention"] * 2

CASES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**EXPERTS, **WINDOW, "layer_types": KINDS},
    "apertus": BY_HIDDEN,
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "bitnet": BY_HIDDEN,
    "cohere": BY_HIDDEN,
    "cohere2": WINDOW,
    "cohere2_moe": {**EXPERTS, **WINDOW},
    "cwm": WINDOW,
    "deepseek_v2": {**LATENT, "hidden_size": 96},  # a multiple of its class's 32 heads
    "deepseek_v3": LATENT,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": WINDOW,
    "exaone_moe": {**EXPERTS, **WINDOW},
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "glm": {},
    "glm4": {},
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT,
    "glm4v_moe_text": {**EXPERTS, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "glm4v_text": {**BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "gpt_oss": {**EXPERTS, **WINDOW},
    "granite": {},
    "granite_swa": {**WINDOW, "layer_types": KINDS},
    "granitemoe": EXPERTS,
    "granitemoe_swa": {**EXPERTS, **WINDOW},
    "granitemoeshared": EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "llama": {},
    "minimax_m2": EXPERTS,
    "ministral": WINDOW,
    "ministral3": WINDOW,
    "mistral": WINDOW,
    "mixtral": {**EXPERTS, **WINDOW},
    "nemotron": {},
    "olmo": BY_HIDDEN,
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": {**EXPERTS, **BY_HIDDEN},
    "phi": BY_HIDDEN,
    "phi3": WINDOW,
    "phimoe": {**EXPERTS, **WINDOW},
    "qwen2": USED,
    "qwen2_5_vl_text": {**USED, **BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen2_moe": {**EXPERTS, **USED},
    "qwen2_vl_text": {**USED, **BY_HIDDEN, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "qwen3": USED,
    "qwen3_moe": {**EXPERTS, **USED},
    "qwen3_vl_moe_text": EXPERTS,
    "qwen3_vl_text": {},
    "seed_oss": {},
    "smollm3": {**USED, "no_rope_layers": [1, 0] * 3},
    "solar_open": EXPERTS,
    "stablelm": BY_HIDDEN,
    "starcoder2": WINDOW,
    "vaultgemma": WINDOW,
    "youtu": LATENT,
}
NESTED = {
    "aria": "aria_text", "aya_vision": "cohere2", "cohere2_vision": "cohere2", "fast_vlm": "qwen2", "gemma3": "gemma3_text",
    "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "got_ocr2": "qwen2", "idefics3": "llama", "internvl": "qwen2",
    "lighton_ocr": "qwen3", "llava": "llama", "llava_next": "mistral", "llava_next_video": "llama", "llava_onevision": "qwen2",
    "mistral3": "mistral", "ovis2": "qwen2", "perception_lm": "llama", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "smolvlm": "llama",
    "video_llava": "llama", "vipllava": "llama",
}  # fmt: skip
"""Multimodal models and their decoders."""
OPTIONAL = ("head_dim", "layer_types", "num_key_value_heads", "num_attention_heads", "sliding_window", "sliding_window_pattern",
            "max_window_layers", "use_sliding_window", "tie_word_embeddings")  # fmt: skip


def small(model_type: str) -> Any:
    """The configuration of a small model; sizes of `None` are left to the class."""
    sizes = {key: value for key, value in {**SIZES, **CASES[model_type]}.items() if value is not None}
    return transformers.CONFIG_MAPPING[model_type](**sizes)


def file_of(config: Any) -> dict[str, Any]:
    """The `config.json` that transformers would write, with every field."""
    return dict(json.loads(config.to_json_string(use_diff=False)))


def described(spec: ModelSpec) -> list[tuple[int, int]]:
    """Per layer: the tokens that decode needs after `NUM_TOKENS`, and the elements of one of them."""
    layers = [(0, 0)] * spec.num_layers
    for state in spec.states:
        first, end = state.needed(NUM_TOKENS)
        elements = sum(math.prod(axis.size for axis in role.inner.values()) for role in state.roles)
        for layer in state.layers:
            assert layers[layer] == (0, 0)
            layers[layer] = (end - first, elements)
    return layers


def cached(config: Any) -> list[tuple[int, int]]:
    """The same of the cache that the model fills."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.randint(3, 60, (1, NUM_TOKENS)), use_cache=True).past_key_values
    layers = []
    for layer in cache.layers:
        assert layer.keys.shape[2] == layer.values.shape[2]
        layers.append((layer.keys.shape[2], sum(part.shape[1] * part.shape[3] for part in (layer.keys, layer.values))))
    return layers


@pytest.mark.parametrize("model_type", CASES)
def test_a_model_caches_what_is_described(model_type: str) -> None:
    config = small(model_type)
    assert described(from_config(file_of(config), name="m")) == cached(config)


@pytest.mark.parametrize("outer", NESTED)
def test_a_multimodal_model_is_described_by_its_decoder(outer: str) -> None:
    """Transformers takes the same decoder out of the nested configuration."""
    text = small(NESTED[outer])
    config = transformers.CONFIG_MAPPING[outer](text_config=file_of(text))
    assert described(from_config(file_of(config), name="m")) == cached(config.get_text_config(decoder=True))


@pytest.mark.parametrize("model_type", CASES)
@pytest.mark.parametrize("key", OPTIONAL)
def test_a_field_that_a_file_leaves_out_has_the_value_of_its_class(model_type: str, key: str) -> None:
    """Without the field, the description is the one of the class's own value, or an error."""
    config = file_of(small(model_type))
    config.pop(key, None)
    if key in ("sliding_window_pattern", "max_window_layers", "use_sliding_window"):
        config.pop("layer_types", None)
    try:
        found = from_config(config, name="m")
    except ConfigError:
        return
    filled = transformers.CONFIG_MAPPING[model_type](**{k: v for k, v in config.items() if k != "model_type"})
    expected = from_config(file_of(filled), name="m")
    assert described(found) == described(expected)
    assert found.tied_embeddings == expected.tied_embeddings
