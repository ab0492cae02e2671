"""A connector for vLLM 0.23 that moves nothing: what vLLM's loads between steps cost by themselves.

A request waits for its load as with any connector that loads between steps. Its load is reported as done one step later.
`vllm_servers.py` starts a decode server with it, `floor`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The requests whose loads begin in a step."""

    req_ids: set[str] = field(default_factory=set)


class FloorConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads all prompt tokens but the last of each request once, without moving a byte."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loaded: set[str] = set()
        self._begun: set[str] = set()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        count = request.num_prompt_tokens - 1 - num_computed_tokens
        is_new = request.request_id not in self._loaded
        return (count, True) if is_new and count > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._loaded.add(request.request_id)
            self._begun.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        begun, self._begun = self._begun, set()
        return Loads(begun)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._loaded.discard(request.request_id)
        return False, None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Note this step's loads. `get_finished` runs after it in the same step, and reports those of the step before."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._begun = self._begun, set(self._get_connector_metadata().req_ids)
        return None, done or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step computes with a request that is still being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
