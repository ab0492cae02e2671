"""The differences between vLLM 0.23 and 0.32 in what they say of a KV cache. `older.py` has those of the connector's hooks."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheSpec, KVQuantMode, MLAAttentionSpec

IS_OLDER = not hasattr(KVConnectorBase_V1, "get_transfer_results")
"""Whether this is vLLM 0.23."""


def p2p_source() -> Any:
    """What vLLM calls the source of tokens that come from another server. vLLM 0.23 distinguishes no sources."""
    if IS_OLDER:
        return None
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.P2P


def can_leave(group: KVCacheGroupSpec) -> bool:
    """Whether the blocks of a group are on the device, and connectors may move them. vLLM 0.23 has no others."""
    return IS_OLDER or (group.enable_kv_transfer and not group.host_resident)


def is_plain(spec: KVCacheSpec) -> bool:
    """Whether a layer with attention has one plain vector per token and head."""
    if not IS_OLDER:
        return spec.tokens_per_state == 1 and spec.state_content_bytes is None and spec.num_head_slots is None
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec) or spec.kv_quant_mode is not KVQuantMode.NONE:
        return False
    return type(spec) is FullAttentionSpec or (spec.compress_ratio == 1 and spec.cache_dtype_str != "fp8_ds_mla")
