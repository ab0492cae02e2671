"""The connector for vLLM 0.32 and newer. Importing this package imports vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "DisaggConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "disagg.integrations.vllm", "kv_load_failure_policy": "recompute"}'
"""

import contextlib

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

try:
    from vllm.v1.metrics import cache_hit_source  # noqa: F401  (since 0.32)
except ImportError as error:
    raise ImportError(f"disagg.integrations.vllm: expected vLLM 0.32 or newer, found {vllm.__version__}") from error

from disagg.integrations.vllm.connector import DisaggConnector

# Inside `MultiConnector` vLLM looks up the connector's statistics by name only.
with contextlib.suppress(ValueError):  # it is registered already
    KVConnectorFactory.register_connector("DisaggConnector", __name__, "DisaggConnector")

__all__ = ["DisaggConnector"]
