"""`DisaggConnector` on vLLM 0.23, for measurements only: it is the last version for PyTorch 2.11.

Its hooks differ from those of 0.32: it saves nothing in steps that compute nothing, computes failed loads again in models with
one KV cache group only, and gives the scheduler's connector no manager of blocks. A server with no request takes no step for
one that it keeps. On vLLM 0.32 this module has the connector as it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, KVConnectorWorkerMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from disagg.core.errors import ConfigError

IS_OLDER = not hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether this is vLLM 0.23."""


PLAIN = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
BY_HEAD = (FullAttentionSpec, SlidingWindowSpec)


def _is_plain(spec: KVCacheSpec) -> bool:
    """Whether a layer with attention has one plain vector per token and head."""
    if type(spec) is MLAAttentionSpec:
        is_plain = spec.compress_ratio == 1 and spec.cache_dtype_str != "fp8_ds_mla"
        return is_plain and spec.kv_quant_mode is KVQuantMode.NONE
    return type(spec) in BY_HEAD and spec.kv_quant_mode in PLAIN


def _plane_nbytes(spec: KVCacheSpec) -> int | None:
    """The bytes of a token's K, or of its V, which are planes of a block on a GPU."""
    return spec.num_kv_heads * spec.head_size * spec.dtype.itemsize if type(spec) in BY_HEAD else None


def _add_names() -> None:
    """Give vLLM 0.23 the names of 0.32 that the connector reads."""
    hits: Any = ModuleType("vllm.v1.metrics.cache_hit_source")
    hits.CacheHitSource = SimpleNamespace(P2P=None)
    sys.modules.setdefault(hits.__name__, hits)
    KVCacheGroupSpec.enable_kv_transfer, KVCacheGroupSpec.host_resident = True, False
    KVCacheSpec.tokens_per_state = property(lambda spec: int(_is_plain(spec)))
    KVCacheSpec.num_head_slots = property(lambda spec: 2 if type(spec) in BY_HEAD else None)
    KVCacheSpec.state_content_bytes = property(_plane_nbytes)
    KVCacheSpec.dcp_sharded = property(lambda spec: isinstance(spec, FullAttentionSpec))
    MLAAttentionSpec.cache_role = SimpleNamespace(value="latent")
    MLAAttentionSpec.head_size_v = property(lambda _: 0, lambda *_: None)
    MambaSpec.tp_replicated = False
    ModelConfig.enable_cumem_allocator = False
    ParallelConfig.elastic_ep_max_dp_size = property(lambda own: own.data_parallel_size)
    VllmConfig.diffusion_config = VllmConfig.watermark_config = VllmConfig.aux_output_config = None
    SpeculativeConfig.uses_draft_kv_cache = lambda own: own.use_eagle() or own.uses_draft_model()
    SpeculativeConfig.use_multi_module_mtp = lambda _: False
    SpeculativeConfig.use_heterogeneous_vocab = False


if IS_OLDER:
    _add_names()

from disagg.integrations.vllm import connector, layout, worker  # noqa: E402  (reads those names)
from disagg.integrations.vllm.metadata import BlockIds, WorkerReport  # noqa: E402

_attention = layout._attention


def _older_attention(config: VllmConfig, name: str, layers: Any, tensors: Any, spec: Any, **placed: Any) -> Any:
    """K and V, which on a GPU vLLM 0.23 gives as `[block, K or V, token, head, dim]`: planes, as 0.32 has them elsewhere."""
    planes = {layer: tensor.view(*tensor.shape[:3], -1) if tensor.dim() == 5 else tensor for layer, tensor in tensors.items()}
    return _attention(config, name, layers, planes, spec, **placed)


def _frees_early(config: VllmConfig) -> bool:
    """With vLLM 0.23 an ended request's blocks go to others while a step still writes them, in all roles."""
    return bool(config.scheduler_config.async_scheduling or config.parallel_config.pipeline_parallel_size > 1)


_make_manager = KVCacheManager.__init__


def _make_known_manager(manager: KVCacheManager, *args: Any, **options: Any) -> None:
    """Let a manager of blocks be found: vLLM 0.23 gives a connector the pool of blocks only."""
    _make_manager(manager, *args, **options)
    manager.block_pool.coordinator = manager.coordinator


@dataclass
class Report(WorkerReport):
    """With the requests that could not be loaded, which vLLM 0.23 does not pass on."""

    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        both = super().aggregate(other)
        return Report(both.leases, both.ended, self.failed | other.failed)


class Requests:
    """What the scheduler half needs of vLLM's manager of blocks.

    vLLM passes a request's blocks when it first allocates some. They hold the manager's own lists, which grow with the request.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self.block_pool, self.coordinator = block_pool, block_pool.coordinator
        self._requests: dict[str, tuple[Request, KVCacheBlocks]] = {}

    def add(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Note a request and its blocks."""
        self._requests[request.request_id] = (request, blocks)

    def remove(self, req_id: str) -> None:
        """Forget a request."""
        self._requests.pop(req_id, None)

    def get_blocks(self, req_id: str) -> KVCacheBlocks:
        """The blocks of a request, for each KV cache group."""
        return self._requests[req_id][1]

    def get_block_ids(self, req_id: str) -> BlockIds:
        """Their ids."""
        return self.get_blocks(req_id).get_block_ids()  # type: ignore[no-any-return]

    def restart(self, req_id: str) -> None:
        """Free the blocks of a request that waits for its load. vLLM then computes it from its first token, in other blocks."""
        request, blocks = self._requests[req_id]
        for group in blocks.blocks:
            self.block_pool.free_blocks(reversed(group))
            group.clear()
        request.num_computed_tokens = 0
        request.skip_reading_prefix_cache = True  # vLLM looks up blocks only for requests that have not had any


class OlderConnector(connector.DisaggConnector):
    """The connector, with the hooks of vLLM 0.23."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config.has_mamba_layers and vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError("recurrent states on vLLM 0.23: expected --no-enable-prefix-caching")
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_cache_blocks = kv_cache_config.num_blocks
        self._requests: Requests
        self._ended: set[str] = set()
        self._failed: set[str] = set()

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._requests = Requests(gpu_block_pool)
        self.scheduler.bind(self._requests)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._requests.add(request, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        is_loading = request.request_id in self.scheduler._loading
        found = super().request_finished_all_groups(request, block_ids)
        if is_loading:
            self._ended.add(request.request_id)
        else:
            self._requests.remove(request.request_id)
        return found

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._failed |= report.failed
        for req_id in connector_output.finished_recving or ():
            if req_id in self._ended:
                self._ended.remove(req_id)
                self._requests.remove(req_id)
            elif req_id in self._failed:
                self._requests.restart(req_id)
            self._failed.discard(req_id)

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]) -> None:
        """Recurrent states come as a list of views of one tensor."""
        super().register_kv_caches({layer: self._whole(cache) for layer, cache in kv_caches.items()})

    def _whole(self, cache: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        """The tensor with all states of a layer, as `[block, nbytes]`."""
        if isinstance(cache, torch.Tensor):
            return cache
        nbytes = torch.empty(0, dtype=torch.int8, device=cache[0].device).set_(cache[0].untyped_storage())
        return nbytes.view(self._num_cache_blocks, -1)

    def wait_for_save(self) -> None:
        """`get_finished` saves: vLLM calls it in each step, also in those that compute nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.worker.save(self._step)
        found = self.worker.results(idle=self._step.idle)
        self._failed |= found.failed_recving
        return found.finished_sending, found.finished_recving

    def build_connector_worker_meta(self) -> Report | None:
        report, failed = self.worker.report() or WorkerReport(), self._failed
        self._failed = set()
        return Report(report.leases, report.ended, failed) if report.leases or report.ended or failed else None


if IS_OLDER:
    layout._attention, worker._frees_early = _older_attention, _frees_early
    KVCacheManager.__init__ = _make_known_manager
DisaggConnector = OlderConnector if IS_OLDER else connector.DisaggConnector
