"""vLLM's KV cache groups: layers that share block ids, and which tokens of a request their blocks hold."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from disagg.core.errors import ConfigError
from disagg.core.rows import TokenRange
from disagg.integrations.identity import component_name
from disagg.integrations.vllm.formats import is_convolved, is_index, is_windowed_latent, read_format
from disagg.state.declare import last_tokens

STATES = {"MAMBA1": 2, "MAMBA2": 2, "GDN_ATTN": 2, "LINEAR": 1, "SHORT_CONV": 1}
"""Kinds of recurrent state that can be described, and a layer's number of tensors."""


class Kind(enum.Enum):
    FULL = "kv"
    WINDOW = "window"
    CHUNK = "chunk"
    LATENT = "mla"
    INDEX = "index"
    CONVOLVED = "sconv"
    COMPRESSOR = "compressor"
    INDEX_COMPRESSOR = "index_compressor"
    STATE = "ssm"


_KINDS = {
    KVCacheSpecKind.FULL_ATTENTION: Kind.FULL,
    KVCacheSpecKind.SLIDING_WINDOW: Kind.WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA: Kind.WINDOW,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION: Kind.CHUNK,
    KVCacheSpecKind.MLA_ATTENTION: Kind.LATENT,
    KVCacheSpecKind.MAMBA: Kind.STATE,
}


def kind_of(spec: KVCacheSpec, name: str) -> Kind:
    """Only names tell DeepSeek-V4's compressors apart."""
    if isinstance(spec, MambaSpec):
        return Kind.STATE
    if is_windowed_latent(spec) and spec.model_version is None:
        return Kind.INDEX_COMPRESSOR if ".indexer." in name else Kind.COMPRESSOR
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Kind.CHUNK
    if isinstance(spec, SlidingWindowSpec):
        return Kind.CONVOLVED if is_convolved(spec) else Kind.WINDOW
    if isinstance(spec, MLAAttentionSpec):
        return Kind.INDEX if is_index(spec) else Kind.LATENT
    return Kind.FULL


@dataclass(frozen=True)
class Group:
    """Layers that share block ids. A layer attends to `window` tokens, the newest included. With `chunk` a token attends to
    those before it in its chunk of so many tokens, a multiple of `block_size`.

    `specs` are those of this worker's layers. Their kinds may differ (`by_kind`) if all of them keep all tokens; `kind` is
    one of them. With recurrent states a request's last `num_scratch` blocks hold the states of drafted tokens.
    """

    index: int
    kind: Kind
    block_size: int
    window: int | None
    specs: Mapping[str, Any]
    num_scratch: int = 0
    chunk: int | None = None

    @property
    def is_incremental(self) -> bool:
        """Whether written blocks keep their tokens: windows free old blocks, and states are overwritten."""
        return self.kind in (Kind.FULL, Kind.LATENT)

    def only(self, names: Collection[str]) -> Group:
        return replace(self, specs={name: spec for name, spec in self.specs.items() if name in names})

    def by_kind(self, num_layers: int | None) -> dict[Kind, dict[int, str]]:
        """This worker's layers by kind, then by their ids in a model of `num_layers` layers, or vLLM's numbers (`None`).

        vLLM numbers a recurrent state from `num_layers` on if its layer also has attention, and attention if layers run
        several times per token, each time with another cache. A name with two numbers means a block with several attentions,
        each a layer. Raises `ConfigError` for two caches of one kind in a layer.
        """
        found: dict[Kind, dict[int, str]] = {}
        per_block = 1 + max((int(second) for name in self.specs for second in _numbers(name)[1:]), default=0)
        for name, spec in self.specs.items():
            kind = kind_of(spec, name)
            layers, layer = found.setdefault(kind, {}), extract_layer_index(name, per_block)
            if num_layers is not None and kind is Kind.STATE:
                layer %= num_layers
            if layer in layers:
                what = f"KV cache group {self.index}, layer {layer}"
                raise ConfigError(f"{what}: expected one cache of each kind, found {layers[layer]!r} and {name!r}")
            layers[layer] = name
        return found

    @property
    def has_windows(self) -> bool:
        """Whether layers attend to windows or chunks but keep all tokens: vLLM's hybrid KV cache manager is off."""
        kept = (spec for spec in self.specs.values() if isinstance(spec, FullAttentionSpec))
        return any(spec.sliding_window is not None or spec.attention_chunk_size is not None for spec in kept)

    def needed(self, start: int, stop: int, *, window_page: int = 1) -> TokenRange:
        """The tokens that decode needs to compute token `stop`, if it has those before `start`. Prefill keeps windows from a
        multiple of `window_page` on. If that is early enough, the block with the window's first token is loaded whole.
        """
        if self.chunk is not None:
            return max(start, stop - stop % self.chunk), stop
        if self.window is None:
            return start, stop
        first, _ = last_tokens(stop, window=self.window - 1, prefix=start)
        edge = first - first % self.block_size
        return (first if first - first % window_page > edge else max(start, edge)), stop

    def covering(self, blocks: list[int], start: int, stop: int) -> list[int]:
        return blocks[start // self.block_size : -(-stop // self.block_size)]


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def read_groups(config: KVCacheConfig, *, dcp: int = 1) -> tuple[Group, ...]:
    """Decode context parallelism divides a block's tokens over `dcp` ranks. Raises `ConfigError` for a group that cannot be
    moved.
    """
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        by_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
        specs = {layer: by_layer[layer] for layer in group.layer_names}  # perhaps none on this pipeline stage
        what = f"KV cache group {index} ({', '.join(group.layer_names[:2])}{', ...' if len(group.layer_names) > 2 else ''})"
        kind = _KINDS.get(get_kv_cache_spec_kind(spec))
        if kind is None or not group.enable_kv_transfer or group.host_resident:
            raise ConfigError(
                f"{what}: expected full, sliding-window or chunked attention, MLA or recurrent state, found {spec}"
            )
        samples = list(by_layer.values()) or [spec]
        for each in samples:
            _check(each, what)
        window = samples[0].sliding_window if kind is Kind.WINDOW else None
        block_size = spec.block_size * (dcp if dcp > 1 and spec.dcp_sharded else 1)
        num_scratch = samples[0].num_speculative_blocks if kind is Kind.STATE else 0
        chunk = samples[0].attention_chunk_size if kind is Kind.CHUNK else None
        groups.append(Group(index, kind, block_size, window, specs, num_scratch, chunk))
    return tuple(groups)


def _check(spec: KVCacheSpec, what: str) -> None:
    if isinstance(spec, MambaSpec):
        if len(spec.shapes) != STATES.get(spec.mamba_type.name) or spec.tp_replicated:
            expected = ", ".join(f"{count} of {name}" for name, count in STATES.items())
            copies = ", the same on every rank" if spec.tp_replicated else ""
            found = f"{len(spec.shapes)} of {spec.mamba_type.name}, of shapes {spec.shapes}{copies}"
            raise ConfigError(f"{what}: expected the states of a layer ({expected}), divided over the ranks, found {found}")
        return
    read_format(spec, what)


def num_handed_over(num_prompt_tokens: int) -> int:
    """Decode always computes the last prompt token."""
    return num_prompt_tokens - 1


Shapes = Mapping[Kind, Collection[tuple[object, ...]]] | None
"""What the layers of a pipeline stage are like, by kind; `None` if each layer has a component of its own in any case."""


def shapes_of(groups: tuple[Group, ...], *, num_layers: int | None) -> Shapes:
    """Raises `ConfigError` as `Group.by_kind` does."""
    if not (len(groups) == 1 and groups[0].is_incremental and not groups[0].has_windows):
        return None
    kinds = groups[0].by_kind(num_layers)
    return {kind: {_shape(groups[0].specs[each]) for each in layers.values()} for kind, layers in kinds.items()}


def component_names(
    groups: tuple[Group, ...], *, num_layers: int | None, prefix: str = "", stages: Sequence[Shapes] | None = None
) -> Iterator[tuple[Group, str, dict[int, str]]]:
    """A worker's components: group, name, and vLLM's layer names by id, as in `Group.by_kind`. Names follow from the layers of
    all `stages` (`None`: these are all).
    """
    found = [shapes_of(groups, num_layers=num_layers)] if stages is None else stages
    known = [each for each in found if each is not None]
    for group in groups:
        for kind, layers in group.by_kind(num_layers).items():
            name = "kv" if kind in (Kind.WINDOW, Kind.CHUNK) else kind.value
            shapes = set[tuple[object, ...]]().union(*(each.get(kind, ()) for each in known))
            if len(known) == len(found) and len(shapes) == 1:
                yield group, prefix + component_name(name, None), layers
            else:
                for layer, vllm_name in sorted(layers.items()):
                    yield group, prefix + component_name(name, layer), {layer: vllm_name}


def _shape(spec: Any) -> tuple[object, ...]:
    sizes = spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", None)
    return *sizes, spec.dtype, spec.page_size_bytes, spec.kv_quant_mode, getattr(spec, "cache_dtype_str", None)


def check_engine(config: VllmConfig) -> None:
    """Raise `ConfigError` for an engine that cannot be served."""
    parallel, drafts = config.parallel_config, config.speculative_config
    refused = {
        "speculative decoding with pipeline parallelism: vLLM saves states on the last stage only, and nothing of it was run": (
            drafts is not None and parallel.pipeline_parallel_size > 1
        ),
        "draft layers with decode context parallelism: nothing of it was run": (
            drafts is not None and parallel.decode_context_parallel_size > 1 and drafts.uses_draft_kv_cache()
        ),
        "the speculative method 'extract_hidden_states': its cache has no KV": drafts is not None
        and drafts.method == "extract_hidden_states",
        "several modules of multi-token prediction: each reads one token further than the one before it, so use "
        '"num_speculative_tokens": 1': drafts is not None and drafts.use_multi_module_mtp(),
        "--enable-return-routed-experts: those of tokens that another server computed are not known here": bool(
            config.aux_output_config and config.aux_output_config.enabled
        ),
        "diffusion models: they write their states more than once": config.diffusion_config is not None,
        "prefill context parallelism: several ranks compute one prompt": parallel.prefill_context_parallel_size > 1,
        "sleep mode (--enable-sleep-mode): it frees the KV cache, which other servers may still write": bool(
            config.model_config.enable_sleep_mode
        ),
        "--enable-cumem-allocator: with it /sleep frees the KV cache, also without sleep mode": bool(
            config.model_config.enable_cumem_allocator
        ),
    }
    for reason, found in refused.items():
        if found:
            raise ConfigError(f"DisaggConnector does not support {reason}")
