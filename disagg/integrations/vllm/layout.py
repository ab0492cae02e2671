"""vLLM's KV cache tensors as components.

vLLM gives each attention layer a tensor `[block, head, token, K and V]`, and each recurrent layer bytes `[block, 1, 1, nbytes]`
with its states one after the other. Blocks may be divided into several kernel blocks, which are this library's pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import KVCacheConfig

from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE, RawTensor, raw_tensor
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.integrations.vllm.groups import Group, Kind, component_names, read_groups
from disagg.integrations.vllm.identity import fp8_format
from disagg.layout.placement import Component
from disagg.models import ModelSpec, from_config
from disagg.state import paged
from disagg.state.declare import Role, State

NULL_BLOCK = 0
"""The block id that vLLM puts where a request has no block."""


@dataclass(frozen=True)
class Cache:
    """One component of an engine, and how vLLM's block ids address its rows."""

    group: Group
    component: Component
    pages_per_block: int

    @property
    def name(self) -> str:
        return self.component.name

    def rows(self, blocks: Sequence[int], *, start: int = 0) -> Rows:
        """The rows of a request with these blocks, of which the first has the token `start`."""
        if self.group.kind is Kind.STATE:
            return Slot(blocks[-1])
        ids = np.asarray(blocks, dtype=np.int32)
        pages = np.add.outer(ids * self.pages_per_block, np.arange(self.pages_per_block, dtype=np.int32))
        pages[ids == NULL_BLOCK] = -1
        return Pages(pages.reshape(-1), start // self.group.block_size * self.group.block_size)


def read_caches(
    config: VllmConfig,
    kv: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    topology: Topology,
    model: Mapping[str, Any],
) -> tuple[Cache, ...]:
    """Describe a worker's KV cache, of its own pipeline stage. `model` is the `config.json`, which describes recurrent states.

    Raises `ConfigError` for an engine whose cache cannot be moved, or whose worker's tensors are not as expected.
    """
    groups = read_groups(kv)
    spec: ModelSpec | None = None
    if any(group.kind is Kind.STATE for group in groups):  # KV comes from the tensors, so its dtype in the file does not matter
        spec = from_config(model, name=str(config.model_config.model), kv_dtype="bfloat16")
    caches = []
    for group, name, layers in component_names(groups, num_layers=config.model_config.get_total_num_hidden_layers()):
        given = {layer: _typed(config, layer_name, tensors[layer_name]) for layer, layer_name in layers.items()}
        shape = group.specs[next(iter(layers.values()))]
        if group.kind is Kind.STATE:
            assert spec is not None
            component = _state(spec, name, given, shape, topology=topology)
        elif group.kind is Kind.LATENT:
            latents = {layer: tensor.squeeze(1) for layer, tensor in given.items()}
            component = paged.mla(latents, dim=shape.head_size, topology=topology, name=name)
        else:
            heads = _total_heads(config, shape, topology)
            component = _attention(name, given, shape, num_kv_heads=heads, topology=topology)
        pages_per_block, rest = divmod(next(iter(given.values())).shape[0], kv.num_blocks)
        if rest:
            raise ConfigError(f"component {name!r}: expected whole kernel blocks in each of {kv.num_blocks} blocks")
        caches.append(Cache(group, component, pages_per_block))
    return tuple(caches)


def _typed(config: VllmConfig, layer: str, tensor: torch.Tensor) -> torch.Tensor:
    """A layer's cache with the dtype of its values: two formats of FP8 are both bytes to vLLM."""
    dtype = fp8_format(config, layer) if tensor.dtype == torch.uint8 else None
    return tensor if dtype is None else tensor.view(dtype)


def _total_heads(config: VllmConfig, spec: Any, topology: Topology) -> int:
    """The KV heads of a layer over all ranks of its tensor-parallel group."""
    total = int(config.model_config.get_total_num_kv_heads())
    if spec.num_kv_heads != max(1, total // topology.tp):  # a layer with another number of heads than the model
        total = spec.num_kv_heads * topology.tp
    return total


def _attention(
    name: str, tensors: Mapping[int, torch.Tensor], spec: Any, *, num_kv_heads: int, topology: Topology
) -> Component:
    """K and V, which are neighbours for each token on a GPU, and for each head of a block on the CPU."""
    first = next(iter(tensors.values()))
    axes: str | dict[str, str]
    if first.device.type == "cpu":
        axes = {"k": "page kv_head dim token", "v": "hnd"}
        views = {layer: _cpu_views(tensor, spec, name) for layer, tensor in tensors.items()}
    else:
        axes, views = "hnd", {layer: _gpu_views(tensor, spec) for layer, tensor in tensors.items()}
    return paged.gqa(views, axes=axes, num_kv_heads=num_kv_heads, topology=topology, name=name)


def _gpu_views(tensor: torch.Tensor, spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[..., : spec.head_size], tensor[..., spec.head_size :]


def _cpu_views(tensor: torch.Tensor, spec: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K of each block and head as `[dim, token]`, followed by V as `[token, dim]`.

    With AMX vLLM stores bfloat16 in tiles that mix the two axes, which no strides describe.
    """
    if tensor.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        raise ConfigError(f"component {name!r}: expected rows of K and V, found vLLM's AMX tiles; use --dtype float32")
    num_blocks, heads, tokens, _ = tensor.shape
    dim, (block, head) = spec.head_size, tensor.stride()[:2]
    at = tensor.storage_offset()
    return (
        tensor.as_strided((num_blocks, heads, dim, tokens), (block, head, tokens, 1), at),
        tensor.as_strided((num_blocks, heads, tokens, dim), (block, head, dim, 1), at + tokens * dim),
    )


def _state(spec: ModelSpec, name: str, tensors: Mapping[int, torch.Tensor], shape: Any, *, topology: Topology) -> Component:
    """The convolution window and the recurrent state of a layer, which lie one after the other in a block."""
    (layer,) = tensors
    found = [state for state in spec.states if state.rows == "slot" and layer in state.layers]
    if len(found) != 1 or [role.name for role in found[0].roles] != ["conv", "temporal"]:
        raise ConfigError(f"component {name!r}: expected one convolution and one state in layer {layer} of {spec.name}")
    conv, temporal = found[0].roles
    channel_first = is_conv_state_dim_first()
    axes = {"conv": "slot channel width" if channel_first else "slot width channel"}
    if "value_dim" in temporal.inner:
        axes["temporal"] = "slot head value_dim key_dim"
    tensors_by_role: dict[str, dict[int, RawTensor]] = {}
    roles: list[Role] = []
    offset, page = 0, raw_tensor(next(iter(tensors.values())))
    for role, sizes, dtype in zip((conv, temporal), shape.shapes, shape.dtypes, strict=True):
        kind = str(dtype).removeprefix("torch.")
        itemsize = ITEMSIZE[kind]
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        tensors_by_role[role.name] = {
            layer: RawTensor(
                page.pointer + offset,
                (page.shape[0], *sizes),
                (page.strides[0] * page.itemsize // itemsize, *strides),
                kind,
                page.device,
                page.owner,
            )
        }
        roles.append(replace(role, dtype=kind))
        offset += math.prod(sizes) * itemsize
    state = State(name=name, rows="slot", layers=(layer,), roles=tuple(roles))
    return state.component(tensors_by_role, topology=topology, axes=axes)
