"""The connector for vLLM 0.32 and newer. Importing this package imports vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "disagg.integrations.vllm", "kv_load_failure_policy": "recompute"}'
"""

from disagg.integrations.vllm.connector import DisaggConnector

__all__ = ["DisaggConnector"]
