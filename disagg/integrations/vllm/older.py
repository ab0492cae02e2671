"""`DisaggConnector` for vLLM 0.23, whose hooks differ from those of 0.32.

It saves nothing in steps that compute nothing, reports failed loads as block ids, which it accepts for models with one KV cache
group only, and gives the scheduler's connector no manager of blocks.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from disagg.core.errors import ConfigError
from disagg.integrations.vllm import connector
from disagg.integrations.vllm.metadata import BlockIds


class RequestBlocks:
    """What the scheduler half needs of vLLM's manager of blocks.

    vLLM passes a request's blocks when it first allocates some. They hold the manager's own lists, which grow with the request.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self.block_pool = block_pool
        self._blocks: dict[str, KVCacheBlocks] = {}

    def add(self, req_id: str, blocks: KVCacheBlocks) -> None:
        """Note the blocks of a request."""
        self._blocks[req_id] = blocks

    def remove(self, req_id: str) -> None:
        """Forget a request."""
        self._blocks.pop(req_id, None)

    def get_blocks(self, req_id: str) -> KVCacheBlocks:
        """The blocks of a request, for each KV cache group."""
        return self._blocks[req_id]

    def get_block_ids(self, req_id: str) -> BlockIds:
        """Their ids."""
        return self._blocks[req_id].get_block_ids()  # type: ignore[no-any-return]


class DisaggConnector(connector.DisaggConnector):
    """The connector, with the hooks of vLLM 0.23."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(
                f"vLLM 0.23 computes a failed load again only in models with one KV cache group, found {len(groups)}; "
                "hybrid models need vLLM 0.32"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = groups[0].kv_cache_spec.block_size
        self._blocks: RequestBlocks
        self._ended: set[str] = set()
        self._loading: dict[str, list[int]] = {}
        self._failed: set[int] = set()

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._blocks = RequestBlocks(gpu_block_pool)
        self.scheduler.bind(self._blocks)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._blocks.add(request.request_id, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler.is_loading(request.request_id):
            self._ended.add(request.request_id)
        else:
            self._blocks.remove(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        for req_id in self._ended & set(connector_output.finished_recving or ()):
            self._ended.remove(req_id)
            self._blocks.remove(req_id)

    # -- worker --------------------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for load in self._step.loads:
            self._loading[load.req_id] = load.blocks[0][load.start // self._block_size :]
        super().start_load_kv(forward_context)

    def wait_for_save(self) -> None:
        """`get_finished` saves: vLLM calls it in each step, also in those that compute nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.worker.save(self._step)
        found = self.worker.results(idle=self._step.idle)
        for req_id in found.finished_recving:
            blocks = self._loading.pop(req_id)
            self._failed.update(blocks if req_id in found.failed_recving else ())
        return found.finished_sending, found.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
