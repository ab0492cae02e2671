"""Descriptions of decoders against transformers: what a small model of each type really caches, and its class's defaults."""

from __future__ import annotations

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
OPTIONAL = ("head_dim", "layer_types", "num_key_value_heads", "num_attention_heads", "sliding_window", "sliding_window_pattern",
            "max_window_layers", "use_sliding_window", "tie_word_embeddings", "layers_block_type", "per_layer_config",
            "indexer_types", "kv_source_layers", "num_kv_shared_layers", "no_rope_layers", "multi_query")  # fmt: skip


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


@pytest.mark.parametrize("model_type", CASES)
@pytest.mark.parametrize("key", OPTIONAL)
def test_a_field_that_a_file_leaves_out_has_the_value_of_its_class(model_type: str, key: str) -> None:
    """Without the field, the description is the one of the class's own value, or an error."""
    config = file_of(small(model_type), model_type)
    config.pop(key, None)
    if key in ("sliding_window_pattern", "max_window_layers", "use_sliding_window", "no_rope_layers"):
        config.pop("layer_types", None)
    try:
        found = from_config(config, name="m")
    except ConfigError:
        return
    try:
        filled = config_class(model_type)(**{k: v for k, v in config.items() if k != "model_type"})
    except (StrictDataclassError, ValueError):  # the class's own value does not fit the other sizes
        return
    expected = from_config(file_of(filled, model_type), name="m")
    assert described(found) == described(expected)
    assert found.tied_embeddings == expected.tied_embeddings
