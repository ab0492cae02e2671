"""`DisaggConnector`: what vLLM loads in its scheduler and in each worker."""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from disagg.integrations.options import Options
from disagg.integrations.vllm.metadata import BlockIds, RankAddress, StepMetadata, share_logging
from disagg.integrations.vllm.metrics import TransferMetrics, TransferStats
from disagg.integrations.vllm.neighbours import fence_loads
from disagg.integrations.vllm.scheduler import SchedulerHalf
from disagg.integrations.vllm.transfers import TransferResults
from disagg.integrations.vllm.worker import WorkerHalf


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands requests over from a vLLM server that prefills to one that decodes. Hooks pass their calls to one of two halves.
    Raises `ConfigError` for invalid settings.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        transfer = vllm_config.kv_transfer_config
        options = Options.read(transfer.kv_connector_extra_config, engine_id=transfer.engine_id)
        fence_loads()
        self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, options) if role is KVConnectorRole.SCHEDULER else None
        self._worker = WorkerHalf(vllm_config, kv_cache_config, options) if role is KVConnectorRole.WORKER else None

    @classmethod
    def supports_sleep_mode(cls, *_: KVTransferConfig) -> bool:
        """No: sleeping frees the KV cache, which peers have mapped or registered. vLLM asks from 0.33 on."""
        return False

    # -- scheduler -----------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "only in the scheduler"
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        self.scheduler.set_ranks({rank: each for rank, each in metadata.items() if isinstance(each, RankAddress)})

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """No group, so that vLLM clears new blocks: a load may fill a block in part, and old contents may be NaN."""
        return ()

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM has to step even when idle or paused: workers end a kept request, and report a lease, in a step."""
        return self.scheduler.waits_for_workers

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request, block_ids)

    # -- worker --------------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerHalf:
        assert self._worker is not None, "only in a worker"
        return self._worker

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.address

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Only start them: loads run between steps."""
        self.worker.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step computes with a request that is still loading."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """`wait_for_save` sends the step's tokens."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]  # of a caller, which may start the engine's step

    def wait_for_save(self) -> None:
        """VLLM's first runner calls this also while a step fails."""
        self.worker.save(self._step, has_failed=sys.exc_info()[1] is not self._handled)

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self.worker.results(idle=self._step.idle)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.report()

    def get_kv_connector_stats(self) -> TransferStats | None:
        return self.scheduler.take_stats() if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # -- metrics -------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
