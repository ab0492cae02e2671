"""Small models of transformers with random weights, and the state in their caches as a description names it."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from disagg.models import ModelSpec, State
from disagg.state.declare import Role
from tests.support.architectures import CASES, SAME_CLASS, SIZES


def config_class(model_type: str) -> Any:
    """The configuration class of a model, or of the decoder inside a multimodal model."""
    return transformers.CONFIG_MAPPING[SAME_CLASS.get(model_type, model_type)]


def small(model_type: str) -> Any:
    """The configuration of a small model; sizes of `None` are left to the class."""
    made = config_class(model_type)
    sizes = {key: value for key, value in SIZES.items() if hasattr(made, key) or key in made.attribute_map}
    return made(**{key: value for key, value in {**sizes, **CASES[model_type]}.items() if value is not None})


def file_of(config: Any, model_type: str | None = None) -> dict[str, Any]:
    """The `config.json` that transformers would write, with every field, and another `model_type` if one is given."""
    written = json.loads(config.to_json_string(use_diff=False), object_hook=_infinity)
    return {**written, "model_type": model_type or written["model_type"]}


def _infinity(values: dict[str, Any]) -> Any:
    """Transformers writes infinite numbers as objects."""
    return math.inf if values.get("__float__") == "Infinity" else values


@dataclass(frozen=True)
class Network:
    """A causal language model, or a decoder whose head is its embedding."""

    model: Any
    cache_name: str
    has_head: bool
    inputs: Mapping[str, torch.Tensor]

    def step(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Append `tokens` to `cache`; return the last one's logits."""
        with torch.no_grad():
            output = self.model(input_ids=tokens[None], use_cache=True, **{self.cache_name: cache}, **self.inputs)
        if self.has_head:
            return torch.as_tensor(output.logits[0, -1])
        return torch.as_tensor(output.last_hidden_state[0, -1] @ self.model.get_input_embeddings().weight.T)

    def new_cache(self) -> Any:
        return transformers.DynamicCache(config=self.model.config)


def build(config: Any) -> Network:
    """The model of `config` with random weights in float32."""
    torch.manual_seed(0)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    has_head = type(config) in mapping
    made = mapping[type(config)] if has_head else _decoder_class(type(config))
    model = made._from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.sub_(4.0)  # recurrent state decays 50 times slower, so no head forgets the prompt
    accepted = inspect.signature(made.forward).parameters
    cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"
    needs_time = config.model_type == "voxtral_realtime_text"
    return Network(model, cache_name, has_head, {"t_cond": torch.zeros(1, 1, config.hidden_size)} if needs_time else {})


def _decoder_class(config_class: Any) -> Any:
    """The decoder of a multimodal model, which no automatic class makes."""
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    found: list[Any] = []
    for _, item in inspect.getmembers(module, inspect.isclass):
        made: Any = item
        if getattr(made, "config_class", None) is config_class and made.__module__ == module.__name__:
            accepted = inspect.signature(made.forward).parameters
            found += [made] if {"past_key_values", "input_ids"} <= set(accepted) else []
    return min(found, key=lambda made: len(made.__name__))


def parts(layer: Any, role: Role) -> list[torch.Tensor]:
    """A layer's tensors of one role, which together are `[token, *inner]` or, for a slot, `[*inner]`, along the last axis."""
    match role.name:
        case "k" | "v":
            return [(layer.keys if role.name == "k" else layer.values)[0].transpose(0, 1)]
        case "latent":
            return [layer.keys[0, 0], layer.values[0, 0]]
        case "key":
            return [layer.indexer_keys[0] if hasattr(layer, "indexer_keys") else layer.idx_keys[0, 0]]
        case "conv":
            return [layer.conv_states[0][0][:, 1:]]  # a step never reads the oldest column
        case "temporal":
            return [layer.recurrent_states[0][0].view([axis.size for axis in role.inner.values()])]
    raise LookupError(f"no rule to read {role.name}")


def roles_of(state: State) -> list[Role]:
    """The roles that transformers keeps: its index keys are not quantized and have no scales."""
    return [role for role in state.roles if role.name != "scale"]


def tensors(cache: Any, spec: ModelSpec, num_tokens: int) -> dict[tuple[str, int, str], list[torch.Tensor]]:
    """Views of all state in `cache`, by state, layer and role.

    Raises `AssertionError` if a shape is not as described, or if the cache holds a tensor that is not.
    """
    found, claimed = {}, set()
    for state in spec.states:
        first, end = state.needed(num_tokens)
        for layer in state.layers:
            for role in roles_of(state):
                views = parts(cache.layers[layer], role)
                claimed |= {view.untyped_storage().data_ptr() for view in views}
                sizes = [axis.size for axis in role.inner.values()]
                shape = [*views[0].shape[:-1], sum(view.shape[-1] for view in views)]
                expected = [end - first, *sizes] if state.rows == "pages" else sizes
                assert shape == expected, f"{state.name}, layer {layer}, {role.name}: described {expected}, cached {shape}"
                found[state.name, layer, role.name] = views
    for index, held in enumerate(cache.layers):
        for name, tensor in every_tensor(vars(held)):
            where = tensor.untyped_storage().data_ptr()
            assert where in claimed, f"layer {index}, {name} {tuple(tensor.shape)}: cached, but not described"
    return found


def every_tensor(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of numbers in the attributes of a layer's cache, also in dictionaries."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from every_tensor(value, f"{prefix}{name}.")
        elif torch.is_tensor(value) and value.is_floating_point() and math.prod(value.shape):
            yield f"{prefix}{name}", value
