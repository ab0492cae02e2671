"""vLLM's KV cache groups: which layers share block ids, and which tokens of a request their blocks hold."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from disagg.core.errors import ConfigError
from disagg.core.rows import TokenRange
from disagg.integrations.identity import component_name
from disagg.state.declare import last_tokens

STATES = ("MAMBA1", "MAMBA2", "GDN_ATTN")
"""Kinds of recurrent state that this integration can describe, by vLLM's names."""


class Kind(enum.Enum):
    """What a layer keeps of a request."""

    FULL = "kv"
    WINDOW = "window"
    LATENT = "mla"
    STATE = "ssm"


_KINDS = {
    KVCacheSpecKind.FULL_ATTENTION: Kind.FULL,
    KVCacheSpecKind.SLIDING_WINDOW: Kind.WINDOW,
    KVCacheSpecKind.MLA_ATTENTION: Kind.LATENT,
    KVCacheSpecKind.MAMBA: Kind.STATE,
}


@dataclass(frozen=True)
class Group:
    """Layers that share block ids. `specs` are those of this worker's layers. `window` is the number of tokens that a layer
    attends to, with the newest among them.
    """

    index: int
    kind: Kind
    block_size: int
    window: int | None
    specs: Mapping[str, Any]

    @property
    def is_incremental(self) -> bool:
        """Whether a block that is written keeps its tokens: windows free old blocks, and a state is overwritten."""
        return self.kind in (Kind.FULL, Kind.LATENT)

    def layers(self, num_layers: int) -> dict[int, str]:
        """The names of this worker's layers, by their ids in a model of `num_layers` layers.

        Where a layer has both attention and a recurrent state, vLLM numbers the states from `num_layers` on. Raises
        `ConfigError` for two caches of one layer.
        """
        found = {extract_layer_index(name) % num_layers: name for name in self.specs}
        if len(found) != len(self.specs):
            raise ConfigError(f"KV cache group {self.index}: expected one cache for each layer, found {sorted(self.specs)}")
        return found

    def needed(self, start: int, stop: int, *, window_page: int = 1) -> TokenRange:
        """The tokens that decode needs to compute token `stop`, if it has those before `start`.

        Prefill keeps windows from a multiple of `window_page` tokens on. If that is early enough, the tokens that share a
        block with a window's first one are among them, so that the block is whole.
        """
        if self.window is None:
            return start, stop
        first, _ = last_tokens(stop, window=self.window - 1, prefix=start)
        edge = first - first % self.block_size
        return (first if first - first % window_page > edge else max(start, edge)), stop

    def covering(self, blocks: list[int], start: int, stop: int) -> list[int]:
        """The blocks with the tokens `[start, stop)`, of a request's `blocks`."""
        return blocks[start // self.block_size : -(-stop // self.block_size)]


def read_groups(config: KVCacheConfig) -> tuple[Group, ...]:
    """The groups of an engine. Raises `ConfigError` for one that cannot be moved."""
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        by_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
        specs = {layer: by_layer[layer] for layer in group.layer_names}  # perhaps none on this pipeline stage
        what = f"KV cache group {index} ({', '.join(group.layer_names[:2])}{', ...' if len(group.layer_names) > 2 else ''})"
        kind = _KINDS.get(get_kv_cache_spec_kind(spec))
        if kind is None or not group.enable_kv_transfer or group.host_resident:
            raise ConfigError(f"{what}: expected full or sliding-window attention, MLA or recurrent state, found {spec}")
        samples = list(by_layer.values()) or [spec]
        for each in samples:
            _check(each, what)
        window = samples[0].sliding_window if kind is Kind.WINDOW else None
        groups.append(Group(index, kind, spec.block_size, window, specs))
    return tuple(groups)


def _check(spec: KVCacheSpec, what: str) -> None:
    """Raise `ConfigError` for a layer whose blocks cannot be described."""
    if isinstance(spec, MambaSpec):
        if spec.mamba_type.name not in STATES or len(spec.shapes) != 2 or spec.num_speculative_blocks:
            found = f"{spec.mamba_type.name} of shapes {spec.shapes} with {spec.num_speculative_blocks} speculative blocks"
            raise ConfigError(f"{what}: expected the two states of one of {', '.join(STATES)}, found {found}")
        return
    if spec.tokens_per_state != 1 or spec.state_content_bytes is not None or spec.num_head_slots is not None:
        raise ConfigError(f"{what}: expected one plain vector per token and head, found a packed format: {spec}")
    if isinstance(spec, FullAttentionSpec) and spec.attention_chunk_size is not None:
        raise ConfigError(f"{what}: expected no chunked local attention, found chunks of {spec.attention_chunk_size} tokens")
    if isinstance(spec, FullAttentionSpec) and spec.sliding_window is not None:
        raise ConfigError(
            f"{what}: expected vLLM's hybrid KV cache manager, found it disabled for a window of {spec.sliding_window} tokens: "
            "remove --disable-hybrid-kv-cache-manager, or the connector beside this one that vLLM disables it for"
        )


def num_handed_over(num_prompt_tokens: int) -> int:
    """The prompt tokens whose state prefill hands over: all but the last, which decode computes in any case."""
    return num_prompt_tokens - 1


def component_names(groups: tuple[Group, ...], *, num_layers: int) -> Iterator[tuple[Group, str, dict[int, str]]]:
    """The components of a worker: their group, their name, and the names of vLLM's layers by layer id."""
    single = len(groups) == 1 and groups[0].is_incremental
    for group in groups:
        kind = "kv" if group.kind is Kind.WINDOW else group.kind.value
        layers = group.layers(num_layers)
        if not layers:
            continue
        if single:
            yield group, component_name(kind, None), layers
        else:
            for layer, name in sorted(layers.items()):
                yield group, component_name(kind, layer), {layer: name}


def check_engine(config: VllmConfig) -> None:
    """Raise `ConfigError`, saying why, for an engine that this connector cannot serve."""
    parallel = config.parallel_config
    refused = {
        "speculative decoding: its draft layers are not handed over": config.speculative_config is not None,
        "diffusion models: they write their states more than once": config.diffusion_config is not None,
        "context parallelism: its blocks are divided over ranks": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "sleep mode (--enable-sleep-mode): it frees the KV cache, which other servers may still write": bool(
            config.model_config.enable_sleep_mode
        ),
        "--enable-cumem-allocator: with it /sleep frees the KV cache, also without sleep mode": bool(
            getattr(config.model_config, "enable_cumem_allocator", False)
        ),
    }
    for reason, found in refused.items():
        if found:
            raise ConfigError(f"DisaggConnector does not support {reason}")
