"""The connector for vLLM 0.32 and newer, and for 0.23. Importing this package imports vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "disagg.integrations.vllm", "kv_load_failure_policy": "recompute"}'
"""

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from disagg.integrations.vllm.release import IS_OLDER

if IS_OLDER:
    from disagg.integrations.vllm.older import DisaggConnector
else:
    from disagg.integrations.vllm.connector import DisaggConnector

# Inside `MultiConnector` vLLM looks up the connector's statistics by name only.
with contextlib.suppress(ValueError):  # it is registered already
    KVConnectorFactory.register_connector("DisaggConnector", __name__, "DisaggConnector")

__all__ = ["DisaggConnector"]
