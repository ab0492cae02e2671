"""Other connectors beside this one in vLLM's `MultiConnector`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from disagg.core.errors import ConfigError

HAND_OVER = (
    "DisaggConnector", "MooncakeConnector", "MoRIIOConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector",
)  # fmt: skip
"""VLLM's classes of connectors that answer prefill's request with parameters for decode."""
FENCE = "_current_batch_allocated_block_ids"
"""What OffloadingConnector waits for before it lets a step begin: copies of the blocks that the step's requests got."""


def check_others(connectors: Iterable[object], *, recomputes: bool) -> None:
    """Raise `ConfigError` for a connector that cannot be beside this one. `recomputes`: a failed load is computed instead."""
    names = [type(each).__name__ for each in connectors]
    found = [name for name in names if name in HAND_OVER]
    if len(found) > 1:  # vLLM would end with the first request, since both answer with the same keys
        raise ConfigError(f"MultiConnector: expected one connector that hands requests over, found {', '.join(found)}")
    if recomputes and any(name.startswith("LMCacheMPConnector") for name in names):
        # LMCache goes on using the blocks of a failed load, and would store whatever they hold by then.
        raise ConfigError(
            "MultiConnector: expected kv_load_failure_policy 'fail' beside LMCacheMPConnector, found 'recompute', after which "
            "LMCache may store other requests' blocks"
        )
    if "OffloadingConnector" in names and (offloading := _offloading()) is not None and not _is_known(offloading):
        raise ConfigError("MultiConnector: expected another vLLM: when this one's OffloadingConnector copies blocks is unknown")


def _offloading() -> Any:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    except ImportError:
        return None
    return OffloadingConnectorScheduler


def _is_known(offloading: Any) -> bool:
    return FENCE in inspect.getsource(offloading.build_connector_meta)


def fence_loads() -> None:
    """Have OffloadingConnector copy blocks before this connector loads into them: it looks at the blocks of requests that are
    scheduled, and at those that it loads into itself (https://github.com/vllm-project/vllm/issues/46951).
    """
    offloading = _offloading()
    if offloading is None or not _is_known(offloading) or hasattr(offloading, "fences_loads"):
        return
    original = offloading.update_state_after_alloc

    @functools.wraps(original)
    def update(scheduler: Any, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            # A block with a hash is of the prefix cache: nobody writes it.
            new = (block.block_id for group in blocks.blocks for block in group if block.block_hash is None)
            getattr(scheduler, FENCE).update(block_id for block_id in new if block_id)
        original(scheduler, request, blocks, num_external_tokens)

    offloading.update_state_after_alloc, offloading.fences_loads = update, True
