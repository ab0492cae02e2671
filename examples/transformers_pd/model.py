"""Runs a small model: prefill to a cache, decode from a cache, or both in one run as the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from .architectures import ARCHITECTURES, describe
from .components import ComponentSpec
from .content import NUMPY_DTYPES, Array, CacheContent, Generation

_OPEN = {"csa_open": "buffer_{}", "hca_open": "buffer_{}", "csa_before": "overlap_{}"}
"""The cache attributes of the compressors' open inputs."""

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """A causal language model with the name of its architecture and the dtype of its weights."""

    name: str
    dtype: str
    network: Any


def build(name: str, *, seed: int = 0, dtype: str = "bfloat16") -> Model:
    """Architecture `name` with weights drawn from `seed`: the same in every process. Sets torch to one thread."""
    torch.set_num_threads(1)  # tensors are tiny: more threads would only wait for each other
    config = AutoConfig.for_model(**ARCHITECTURES[name].config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config, dtype=_TORCH_DTYPES[dtype], attn_implementation="eager")
    network.eval().requires_grad_(False)
    for parameter_name, parameter in network.named_parameters():
        if parameter_name.endswith("A_log"):
            parameter.sub_(4.0)  # recurrent state decays 50 times slower, so no head forgets the prompt
    return Model(name, dtype, network)


def prefill(model: Model, prompt: Sequence[int]) -> tuple[int, CacheContent]:
    """Run `prompt`. Returns the first new token and the state, whose shapes and dtypes must be as declared."""
    cache = _new_cache(model)
    logits = _step(model, cache, prompt, position=0)
    content = CacheContent.empty(model.name, len(prompt), model.dtype)
    for component, layer, tensor, array in content.walk():
        found = _to_numpy(_read(cache, component, layer, tensor.role))
        if (found.shape, found.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"{model.name}, layer {layer}, {component.name}.{tensor.role}: declared {array.shape} {array.dtype}, "
                f"the model holds {found.shape} {found.dtype}"
            )
        array[...] = found
    return int(logits.argmax()), content


def decode(model: Model, content: CacheContent, *, first_token: int, num_new_tokens: int) -> Generation:
    """Continue from `content` in a new cache: `num_new_tokens` greedy tokens, the first being `first_token`."""
    cache = _new_cache(model)
    for component in describe(model.name):
        for layer in component.layers:
            tensors = {role: _to_torch(array) for role, array in content.arrays[component.name][layer].items()}
            _write(cache, component, layer, tensors, content.num_tokens)
    tokens = [first_token]
    logits = np.empty((num_new_tokens - 1, model.network.config.vocab_size), np.float32)
    for i, row in enumerate(logits):
        row[...] = _step(model, cache, tokens[-1:], position=content.num_tokens + i)
        tokens.append(int(row.argmax()))
    return Generation(tuple(tokens), logits)


def undivided(model: Model, prompt: Sequence[int], *, num_new_tokens: int) -> Generation:
    """The reference: the library's own `generate`, its own cache and loop, in one piece."""
    ids = torch.tensor([list(prompt)])
    result = model.network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(result.logits).float().numpy()
    return Generation(tuple(result.sequences[0, len(prompt) :].tolist()), logits[1:])


def _step(model: Model, cache: Any, tokens: Sequence[int], *, position: int) -> NDArray[np.float32]:
    """Append `tokens` to `cache`, the first at `position`; return the last one's logits `[vocabulary]`."""
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(position, position + len(tokens))[None]  # some models do not ask the cache for them
    output = model.network(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    logits: NDArray[np.float32] = output.logits[0, -1].float().numpy()
    return logits


def _new_cache(model: Model) -> Any:
    """An empty cache of the class that the model uses."""
    if model.network.config.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return DynamicCache(config=model.network.config)


def _read(cache: Any, component: ComponentSpec, layer: int, role: str) -> torch.Tensor:
    """One tensor of the only request in `cache`, in the declared axis order."""
    held: Any = (
        cache.layers[layer] if layer < len(cache.layers) else None
    )  # MiniMax has no entries after the last layer with KV
    match component.name, role:
        case "kv" | "window", "k" | "v":
            return (held.keys if role == "k" else held.values)[0].transpose(0, 1)  # [kv_head, token, dim] before
        case "mla" | "window", "latent" | "rope":
            return (held.keys if role == "latent" else held.values)[0, 0]
        case "index", "key":
            return held.indexer_keys[0] if hasattr(held, "indexer_keys") else held.idx_keys[0, 0]
        case "csa" | "hca", entry:
            return held.compressed_kv[entry][0]
        case "csa_open" | "hca_open" | "csa_before", _:
            entry, part = role.split(".")
            return getattr(held, _OPEN[component.name].format(part))[entry][0]
        case "ssm", "conv":
            return held.conv_states[0][0][:, 1:]  # the cache is as wide as the kernel; a step never reads the oldest column
        case "ssm", "temporal":
            return cache.linear_cache[layer][0] if hasattr(cache, "linear_cache") else held.recurrent_states[0][0]
    raise LookupError(f"no rule to read {component.name}.{role}")


def _write(cache: Any, component: ComponentSpec, layer: int, tensors: dict[str, torch.Tensor], num_tokens: int) -> None:
    """The reverse of `_read`: write all tensors of one layer to an empty cache."""
    match component.name:
        case "kv" | "window" if "k" in tensors:
            k, v = (tensors[role].transpose(0, 1).contiguous()[None] for role in ("k", "v"))
            cache.update(k, v, layer)
        case "mla" | "window":
            latent, rotated = tensors["latent"], tensors.get("rope", tensors["latent"])  # DeepSeek-V4's values are its keys
            cache.update(latent[None, None], rotated[None, None], layer)
        case "index" if hasattr(cache.layers[layer], "update_indexer"):
            cache.update_indexer(tensors["key"][None], layer)
        case "index":
            cache.layers[layer].update_index(tensors["key"][None, None])
        case "csa" | "hca":
            for entry, tensor in tensors.items():
                cache.layers[layer].update_compressor_states(entry, tensor[None])
        case "csa_open" | "hca_open" | "csa_before":
            for role, tensor in tensors.items():
                entry, part = role.split(".")
                getattr(cache.layers[layer], _OPEN[component.name].format(part))[entry] = tensor[None]
        case "ssm" if hasattr(cache, "linear_cache"):
            cache.set_linear_cache(layer, tensors["temporal"][None])
        case "ssm":
            conv = torch.nn.functional.pad(tensors["conv"], (1, 0))[None]
            cache.update_conv_state(conv, layer, conv_kernel_size=conv.shape[-1])
            cache.update_recurrent_state(tensors["temporal"][None], layer)
        case other:
            raise LookupError(f"no rule to write {other}")
    if component.name == "window":
        cache.layers[layer].cumulative_length = num_tokens


def _to_numpy(tensor: torch.Tensor) -> Array:
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _to_torch(array: Array) -> torch.Tensor:
    """A copy of `array`; 16-bit words are bfloat16."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == NUMPY_DTYPES["bfloat16"] else tensor
