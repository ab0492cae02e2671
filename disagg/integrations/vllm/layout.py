"""vLLM's KV cache tensors as components.

An attention layer has a tensor `[block, head, token, K and V]` (`formats.py` has others), a recurrent layer bytes `[block,
1, 1, nbytes]` with one state after the other. A block may consist of several kernel blocks, which are this library's pages.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from disagg.core.errors import ConfigError
from disagg.core.memory import ITEMSIZE, RawTensor, raw_tensor
from disagg.core.rows import Pages, Rows, Slot
from disagg.core.topology import Topology
from disagg.integrations.vllm.drafts import Drafts
from disagg.integrations.vllm.formats import (
    Format,
    convolved_component,
    is_windowed_latent,
    packed_component,
    plane_views,
    read_format,
    shared_component,
)
from disagg.integrations.vllm.groups import Group, Kind, Shapes, component_names, kind_of, read_groups
from disagg.integrations.vllm.identity import (
    PLAIN,
    Gather,
    attention_layer,
    draft_heads,
    fp8_format,
    head_counts,
    identify_draft,
    tensor_scales,
)
from disagg.layout.ownership import Owned
from disagg.layout.placement import Component
from disagg.models import ModelSpec, from_config
from disagg.state import paged
from disagg.state.declare import Inner, Role, Rule, State, all_tokens, pages_in_turn
from disagg.state.mamba import lightning_roles

Describe = Callable[[], ModelSpec]

NULL_BLOCK = 0
"""The id that vLLM puts where a request has no block."""

ROWS = ("vec", "vec16")
"""vLLM's CPU kernels that keep rows of K and V. Others keep tiles, or were not tried."""

ROUNDINGS = {"CPU_ATTN": "toward_zero", "FLASH_ATTN": "nearest", "FLASHINFER": "nearest"}
"""How a backend's kernel rounds to FP8, on CPUs and with CUDA. Nothing converts into caches of other backends."""


SHARED = {Kind.LATENT: "latent", Kind.INDEX: "key", Kind.COMPRESSOR: "state", Kind.INDEX_COMPRESSOR: "state"}
"""Caches that every rank has whole."""


@dataclass(frozen=True)
class Cache:
    group: Group
    component: Component
    pages_per_block: int

    @property
    def name(self) -> str:
        return self.component.name

    def rows(self, blocks: Sequence[int], *, start: int = 0) -> Rows:
        """`blocks` begin with the one of token `start`."""
        if self.group.kind is Kind.STATE:
            return Slot(blocks[-1 - self.group.num_scratch])
        ids = np.asarray(blocks, dtype=np.int32)
        pages = np.add.outer(ids * self.pages_per_block, np.arange(self.pages_per_block, dtype=np.int32))
        pages[ids == NULL_BLOCK] = -1
        return Pages(pages.reshape(-1), start // self.group.block_size * self.group.block_size)


def read_caches(
    config: VllmConfig,
    kv: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    topology: Topology,
    *,
    model: Mapping[str, Any],
    drafts: Drafts,
    from_tp: Gather,
    stages: Sequence[Shapes] | None = None,
) -> tuple[Cache, ...]:
    """Describe a worker's KV cache. `model` is the `config.json`. `from_tp` gathers from the stage's tensor-parallel ranks.
    `stages` are the shapes of all pipeline stages, if there are several.
    Draft layers are optional components, named by what their KV is made with. Raises `ConfigError` if the cache cannot be
    moved, or its tensors are not as expected.
    """
    groups = drafts.target(read_groups(kv, dcp=topology.cp))
    draft_groups = drafts.draft(read_groups(kv, dcp=topology.cp))
    name_of_model = str(config.model_config.model)
    describe = functools.cache(lambda: from_config(model, name=name_of_model, kv_dtype="bfloat16"))  # KV has its tensors' dtype
    num_layers = config.model_config.get_total_num_hidden_layers()
    parts = [(*part, False) for part in component_names(groups, num_layers=num_layers, stages=stages)]
    if draft_groups:
        prefix = f"draft.{identify_draft(config, draft_groups, topology, from_tp=from_tp)}."
        parts += [(*part, True) for part in component_names(draft_groups, num_layers=None, prefix=prefix)]
    caches = []
    for group, name, layers, is_draft in parts:
        first = next(iter(layers.values()))
        shape = group.specs[first]
        kind, tokens = kind_of(shape, first), _tokens(config, shape)
        given = {layer: tensors[layer_name] for layer, layer_name in layers.items()}
        if kind is Kind.STATE:
            component = _state(describe, name, given, shape, topology=topology)
        elif kind is Kind.CONVOLVED:
            component = convolved_component(name, given, shape, topology=topology, optional=is_draft)
        elif kind in SHARED or is_windowed_latent(shape):
            if kind is Kind.LATENT:
                given = {layer: _typed(config, layers[layer], tensor) for layer, tensor in given.items()}
            role = SHARED.get(kind, "latent")
            component = shared_component(name, role, given, shape, topology=topology, tokens=tokens, optional=is_draft)
        else:
            given = {layer: _typed(config, layers[layer], tensor) for layer, tensor in given.items()}
            if is_draft:
                heads = draft_heads(config, shape, topology)
            else:
                heads = _total_heads(config, describe, next(iter(layers)), shape, topology)
            placed: dict[str, Any] = {"topology": topology, "tokens": tokens, "optional": is_draft}
            component = _attention(config, name, layers, given, shape, num_kv_heads=heads, **placed)
        pages_per_block, rest = divmod(next(iter(given.values())).shape[0], kv.num_blocks)
        if rest:
            raise ConfigError(f"component {name!r}: expected whole kernel blocks in each of {kv.num_blocks} blocks")
        caches.append(Cache(group, component, pages_per_block))
    return tuple(caches)


def rank_topology(parallel: ParallelConfig, *, tp_rank: int, pp_rank: int) -> Topology:
    """With decode context parallelism (DCP), neighbouring ranks have the same heads and divide the tokens."""
    dcp = parallel.decode_context_parallel_size
    return Topology(
        tp=parallel.tensor_parallel_size // dcp,
        cp=dcp,
        pp=parallel.pipeline_parallel_size,
        tp_rank=tp_rank // dcp,
        cp_rank=tp_rank % dcp,
        pp_rank=pp_rank,
    )


def _tokens(config: VllmConfig, spec: Any) -> Rule:
    """A DCP group's ranks get equal runs of tokens in turn."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size == 1 or not spec.dcp_sharded:
        return all_tokens
    return pages_in_turn(parallel.cp_kv_cache_interleave_size)


def _over_all_ranks(inner: Inner) -> Inner:
    """An axis divided over all of vLLM's tensor-parallel ranks, also within a DCP group."""

    def owned(rank: Topology) -> Owned:
        return inner.owned(replace(rank, tp=rank.tp * rank.cp, tp_rank=rank.tp_rank * rank.cp + rank.cp_rank, cp=1, cp_rank=0))

    return Inner(inner.size, owned)


def _typed(config: VllmConfig, layer: str, tensor: torch.Tensor) -> torch.Tensor:
    """To vLLM both FP8 formats are bytes. Raises `ConfigError` for a plug-in's format."""
    name = str(attention_layer(config, layer).kv_cache_dtype)
    if name not in (*PLAIN, *get_args(CacheDType)):
        raise ConfigError(f"layer {layer!r}: expected one of vLLM's own KV cache formats, found {name!r}")
    dtype = fp8_format(config, layer) if tensor.dtype == torch.uint8 else None
    return tensor if dtype is None else tensor.view(dtype)


def _total_heads(config: VllmConfig, describe: Describe, layer: int, spec: Any, topology: Topology) -> int:
    """The KV heads of a layer over all ranks. Ranks with one head each may share it. If the layer's number is unknown, each
    rank's head counts as its own: only servers with the same tensor parallelism fit then.
    """
    if spec.num_kv_heads > 1 or topology.tp == 1:
        return int(spec.num_kv_heads) * topology.tp
    found: set[int] = set()
    with contextlib.suppress(ConfigError):  # a model that this library does not know
        roles = [role for state in describe().states if layer in state.layers for role in state.roles]
        found = {role.inner["kv_head"].size for role in roles if "kv_head" in role.inner}
    total = int(config.model_config.get_total_num_kv_heads())
    candidates = found or ({total} if head_counts(config.model_config.hf_text_config.to_dict()) <= {total} else set())
    known = {heads for heads in candidates if max(1, heads // topology.tp) == 1}
    return known.pop() if len(known) == 1 else topology.tp


def _attention(
    config: VllmConfig,
    name: str,
    layers: Mapping[int, str],
    tensors: Mapping[int, torch.Tensor],
    spec: Any,
    *,
    num_kv_heads: int,
    topology: Topology,
    tokens: Rule,
    optional: bool,
) -> Component:
    """K and V, adjacent for each token on a GPU, and for each head of a block on the CPU."""
    layer, found = attention_layer(config, next(iter(layers.values()))), read_format(spec, name)
    # Layers with equal specs may have several backends: then none below matches.
    backend = ", ".join(sorted({attention_layer(config, each).get_attn_backend().get_name() for each in layers.values()}))
    axes: str | dict[str, str]
    if found in (Format.INLINE, Format.NVFP4):
        expected = {Format.INLINE: "TRITON_ATTN", Format.NVFP4: "FLASHINFER"}[found]
        if backend != expected:
            raise ConfigError(f"component {name!r}: expected {layer.kv_cache_dtype} of {expected}, found the backend {backend}")
        if found is Format.NVFP4 and not layer.impl.nvfp4_fa2:  # all layers have the same GPU
            expected = "scales of V for each token (FlashInfer's FA2)"
            raise ConfigError(
                f"component {name!r}: expected {expected}, found those of vLLM's kernel for SM100, which mixes tokens"
            )
        if found is Format.INLINE:  # else its first use of the cache sets received scales to 1
            for layer_id, layer_name in layers.items():
                attention_layer(config, layer_name).impl._ensure_scale_caches(tensors[layer_id])
        return packed_component(
            name,
            tensors,
            spec,
            cache_dtype=layer.kv_cache_dtype,
            num_kv_heads=num_kv_heads,
            topology=topology,
            tokens=tokens,
            optional=optional,
        )
    if backend == "CPU_ATTN":
        axes = {"k": "page kv_head dim token", "v": "hnd"}
        _check_rows(config, name, spec, block_size=next(iter(tensors.values())).shape[2])
        views = {layer: _cpu_views(tensor, spec) for layer, tensor in tensors.items()}
    elif found is Format.PLANES:
        axes, views = "nhd", {layer: plane_views(tensor, spec) for layer, tensor in tensors.items()}
    else:
        axes, views = "hnd", {layer: _gpu_views(tensor, spec) for layer, tensor in tensors.items()}
    # A draft's scales are in its component's name.
    scales = {} if optional else {layer_id: tensor_scales(config, layer_name) for layer_id, layer_name in layers.items()}
    known = {layer_id: found for layer_id, found in scales.items() if found is not None}
    has_numbers = len(known) == len(layers)
    return paged.gqa(
        views,
        axes=axes,
        num_kv_heads=num_kv_heads,
        topology=topology,
        name=name,
        k_scale={layer_id: k for layer_id, (k, _) in known.items()} if has_numbers else None,
        v_scale={layer_id: v for layer_id, (_, v) in known.items()} if has_numbers else None,
        # Other platforms have backends of the same names, with other kernels.
        rounding=ROUNDINGS.get(backend) if current_platform.is_cpu() or current_platform.is_cuda() else None,
        tokens=tokens,
        optional=optional,
    )


def _gpu_views(tensor: torch.Tensor, spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[..., : spec.head_size], tensor[..., spec.head_size :]


def _check_rows(config: VllmConfig, name: str, spec: Any, *, block_size: int) -> None:
    """Raise `ConfigError` unless vLLM's CPU kernel keeps rows. AMX stores tiles that no strides describe."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    kernel = _get_attn_isa(config.model_config.dtype, block_size, spec.head_size, config.cache_config.cache_dtype)
    if kernel not in ROWS:
        hint = "; use --dtype float32" if kernel == "amx" else ""
        raise ConfigError(
            f"component {name!r}: expected rows of K and V (kernels {', '.join(ROWS)}), found kernel {kernel}{hint}"
        )


def _cpu_views(tensor: torch.Tensor, spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K as `[dim, token]`, then V as `[token, dim]`."""
    num_blocks, heads, tokens, _ = tensor.shape
    dim, (block, head) = spec.head_size, tensor.stride()[:2]
    at = tensor.storage_offset()
    return (
        tensor.as_strided((num_blocks, heads, dim, tokens), (block, head, tokens, 1), at),
        tensor.as_strided((num_blocks, heads, tokens, dim), (block, head, dim, 1), at + tokens * dim),
    )


def _state_roles(describe: Describe, name: str, layer: int, spec: Any, topology: Topology) -> tuple[Role, ...]:
    """The states of a layer, in memory order."""
    if spec.mamba_type.name == "LINEAR":
        ((heads, key_dim, value_dim),) = spec.shapes
        (role,) = lightning_roles(num_heads=heads * topology.tp * topology.cp, key_head_dim=key_dim, value_head_dim=value_dim)
        return (replace(role, name="linear"),)  # it does not matter which axis is which
    expected = ["conv", "temporal"][: len(spec.shapes)]
    model = describe()
    found = [state for state in model.states if state.rows == "slot" and layer in state.layers]
    if len(found) != 1 or [role.name for role in found[0].roles] != expected:
        raise ConfigError(f"component {name!r}: expected {' and '.join(expected)} in layer {layer} of {model.name}")
    return found[0].roles


def _state(describe: Describe, name: str, tensors: Mapping[int, torch.Tensor], shape: Any, *, topology: Topology) -> Component:
    """A layer's convolution window, its recurrent state, or both. With speculation the window has more places than the model
    reads; the prompt's come first.
    """
    (layer,) = tensors
    kinds = _state_roles(describe, name, layer, shape, topology)
    axes = {"conv": "slot channel width" if is_conv_state_dim_first() else "slot width channel"}
    axes |= {
        role.name: "slot head value_dim key_dim" for role in kinds if role.name == "temporal" and "value_dim" in role.inner
    }
    tensors_by_role: dict[str, dict[int, RawTensor]] = {}
    roles: list[Role] = []
    offset, page = 0, raw_tensor(next(iter(tensors.values())))
    for role, sizes, dtype in zip(kinds, shape.shapes, shape.dtypes, strict=True):
        kind = str(dtype).removeprefix("torch.")
        itemsize = ITEMSIZE[kind]
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        names = axes.get(role.name, role.axes).split()[1:]
        moved = tuple(role.inner[axis].size if axis == "width" else size for axis, size in zip(names, sizes, strict=True))
        tensors_by_role[role.name] = {
            layer: RawTensor(
                page.pointer + offset,
                (page.shape[0], *moved),
                (page.strides[0] * page.itemsize // itemsize, *strides),
                kind,
                page.device,
                page.owner,
            )
        }
        divided = {axis: _over_all_ranks(inner) for axis, inner in role.inner.items()}
        roles.append(replace(role, dtype=kind, inner=divided))
        offset += math.prod(sizes) * itemsize
    state = State(name=name, rows="slot", layers=(layer,), roles=tuple(roles))
    return state.component(tensors_by_role, topology=topology, axes=axes)
