"""Descriptions of decoders against transformers: what a small model of each type really caches, and its class's defaults."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from disagg.core.errors import ConfigError
from disagg.models import ModelSpec, from_config
from disagg.models.families import FAMILIES
from tests.support.architectures import CASES, NESTED, OTHER_PARTS

StrictDataclassError = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.real_models import build, config_class, file_of, small, tensors  # noqa: E402

NUM_TOKENS = 11
OPTIONAL = {"head_dim", "layer_types", "num_key_value_heads", "num_attention_heads", "sliding_window", "sliding_window_pattern",
            "max_window_layers", "use_sliding_window", "tie_word_embeddings", "layers_block_type", "per_layer_config",
            "indexer_types", "kv_source_layers", "num_kv_shared_layers", "no_rope_layers", "multi_query"}  # fmt: skip


def described(spec: ModelSpec) -> list[Any]:
    """Everything that a description says of the memory."""
    return [
        (state.name, state.layers, state.needed(NUM_TOKENS), [(role.name, role.axes, role.nbytes) for role in state.roles])
        for state in spec.states
    ]


@pytest.mark.parametrize("model_type", CASES)
def test_a_model_caches_what_is_described(model_type: str) -> None:
    """Every tensor of the cache has the described layer and shape, and the cache holds nothing else."""
    config = small(model_type)
    network = build(config)
    cache = network.new_cache()
    network.step(torch.randint(3, 60, (NUM_TOKENS,)), cache)
    spec = from_config(file_of(config, model_type), name="m")
    found = tensors(cache, spec, NUM_TOKENS)
    assert {layer for _, layer, _ in found} <= set(range(spec.num_layers))


@pytest.mark.parametrize("outer", NESTED)
def test_a_multimodal_model_is_described_by_its_decoder(outer: str) -> None:
    """Transformers takes the same decoder out of the nested configuration."""
    text = small(NESTED[outer])
    made = transformers.CONFIG_MAPPING[outer]
    deep = "thinker_config" in made.sub_configs
    nested = {"text_config": file_of(text)}
    config = made(**({"thinker_config": nested} if deep else nested), **OTHER_PARTS.get(outer, {}))
    assert type(config.get_text_config(decoder=True)) is type(text)
    assert described(from_config(file_of(config), name="m")) == described(from_config(file_of(text), name="m"))


@pytest.mark.parametrize("outer", sorted(set(NESTED) & set(FAMILIES)))
def test_a_decoder_without_a_type_has_the_whole_models(outer: str) -> None:
    text = {key: value for key, value in file_of(small(NESTED[outer])).items() if key != "model_type"}
    expected = described(from_config({**text, "model_type": NESTED[outer]}, name="m"))
    assert described(from_config({"model_type": outer, "text_config": text}, name="m")) == expected
    assert described(from_config({**text, "model_type": outer}, name="m")) == expected


REFUSED_BY_CLASS = {("hunyuan_vl_text", "head_dim"), ("mamba2", "head_dim"), ("minicpm3", "num_attention_heads")}
"""Fields without which the class's own value does not fit the other sizes of the small model."""
NAMED_INSTEAD = {
    ("doge", "sliding_window"): "keep_window_size",
    ("gemma3n_text", "layer_types"): "num_kv_shared_layers",
    ("gemma4_text", "layer_types"): "num_kv_shared_layers",
    ("nemotron_h", "layers_block_type"): "num_hidden_layers",
}
"""The field that the error names, where it is another one than is left out."""


def without(model_type: str, key: str, whole: dict[str, Any]) -> str:
    """What a file without a field gives: `error`, `refused by the class`, or an `equal` description."""
    config = {name: value for name, value in whole.items() if name != key}
    if key in ("sliding_window_pattern", "max_window_layers", "use_sliding_window", "no_rope_layers"):
        config.pop("layer_types", None)
    found, problem = None, ""
    try:
        found = from_config(config, name="m")
    except ConfigError as error:
        problem = str(error)
    if found is None:
        named = NAMED_INSTEAD.get((model_type, key), key)
        assert named in problem or "layer_types" in problem, (model_type, key)
        return "error"
    try:
        filled = config_class(model_type)(**{k: v for k, v in config.items() if k != "model_type"})
    except (StrictDataclassError, ValueError):
        assert (model_type, key) in REFUSED_BY_CLASS
        return "refused by the class"
    expected = from_config(file_of(filled, model_type), name="m")
    assert described(found) == described(expected), (model_type, key)
    assert found.tied_embeddings == expected.tied_embeddings, (model_type, key)
    return "equal"


def test_a_field_that_a_file_leaves_out_has_the_value_of_its_class() -> None:
    """Without a field that it has, the description is the one of the class's own value, or an error that names a field."""
    outcomes = Counter(
        without(model_type, key, whole)
        for model_type in CASES
        for whole in (file_of(small(model_type), model_type),)
        for key in OPTIONAL & whole.keys()
    )
    assert outcomes == {"equal": 324, "error": 296, "refused by the class": len(REFUSED_BY_CLASS)}
