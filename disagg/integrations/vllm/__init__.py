"""The connector for vLLM 0.32 and newer, and for 0.23. Importing this package imports vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "disagg.integrations.vllm", "kv_load_failure_policy": "recompute"}'
"""

from disagg.integrations.vllm.release import IS_OLDER

if IS_OLDER:
    from disagg.integrations.vllm.older import DisaggConnector
else:
    from disagg.integrations.vllm.connector import DisaggConnector

__all__ = ["DisaggConnector"]
