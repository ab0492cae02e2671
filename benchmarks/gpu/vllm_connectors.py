"""The connectors that `vllm_servers.py` measures: the options of a server with each, and what a proxy sends for a request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.servers import Server, transfer_config

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` that vLLM's proxies send to prefill."""
FP8 = ("--kv-cache-dtype", "fp8")
"""vLLM's option for KV in FP8."""
OURS = ("nvlink", "nixl")
"""This library's connector with one of these backends; `recorded` before it, with the moments of `vllm_steps.py`."""
DECODE_ONLY = ("nothing", "floor", "undivided")
"""Servers that are asked without prefill: `DecodeBenchConnector`, `FloorConnector`, and none."""
OTHERS = ("MooncakeConnector", "P2pNcclConnector")
"""vLLM's connectors that are measured at TP 1 to 1 only, and without load."""
CONNECTORS = (*OURS, "NixlConnector", *OTHERS, *DECODE_ONLY)
BUFFER_NBYTES, POOL_GB = 4_000_000_000, 4
"""Memory of P2pNcclConnector for tensors that have arrived: on the GPU, and on the host."""


@dataclass(frozen=True)
class Exchange:
    """What a proxy sends for one request: the `kv_transfer_params` of both servers, and headers. `decode` is none if they are
    in prefill's answer.
    """

    prefill: Mapping[str, Any]
    decode: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def options(connector: str, *, decodes: bool, side_port: int) -> list[str]:
    """The options of vLLM for a connector."""
    if connector in ("undivided", "none"):
        return []
    return ["--kv-transfer-config", _config(connector, decodes=decodes, side_port=side_port)]


def _config(connector: str, *, decodes: bool, side_port: int) -> str:
    *recorded, backend = connector.split()
    if backend in OURS:
        return transfer_config({"backend": backend}, module=f"benchmarks.gpu.vllm_{'steps' if recorded else 'older'}")
    role = "kv_consumer" if decodes else "kv_producer"
    configs: dict[str, dict[str, Any]] = {
        "nothing": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
        "floor": {
            "kv_connector": "FloorConnector",
            "kv_connector_module_path": "benchmarks.gpu.vllm_floor",
            "kv_role": "kv_both",
        },
        "NixlConnector": {"kv_connector": connector, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
        "MooncakeConnector": {
            "kv_connector": connector,
            "kv_role": role,
            "engine_id": _engine_id(side_port),
            "kv_connector_extra_config": {"mooncake_protocol": "nvlink_intra"},
        },
        "P2pNcclConnector": {
            "kv_connector": connector,
            "kv_role": role,
            "kv_port": str(side_port),
            "kv_buffer_size": BUFFER_NBYTES,
            "kv_connector_extra_config": {"mem_pool_size_gb": POOL_GB},
        },
    }
    return json.dumps(configs[connector])


def environment(connector: str, side_port: int) -> dict[str, str]:
    """What a connector reads from the environment."""
    return {
        "NixlConnector": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)},
        "MooncakeConnector": {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(side_port), "MC_INTRANODE_NVLINK": "1"},
        "P2pNcclConnector": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
    }.get(connector, {})


def exchange(connector: str, prefill: Server, decode: Server) -> Exchange:
    """What a proxy sends for a new request."""
    name = secrets.token_hex(16)
    if connector == "floor":
        return Exchange({}, {})
    if connector == "MooncakeConnector":
        return Exchange(
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name},
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": f"http://127.0.0.1:{prefill.bootstrap_port}",
                "remote_engine_id": _engine_id(prefill.bootstrap_port),
                "transfer_id": name,
            },
        )
    if connector == "P2pNcclConnector":
        roles = {"prefill": prefill, "decode": decode}
        addresses = "".join(f"___{role}_addr_127.0.0.1:{server.bootstrap_port}" for role, server in roles.items())
        return Exchange({}, {}, {"X-Request-Id": f"{addresses}_{name}"})
    return Exchange(PREFILL)


def _engine_id(side_port: int) -> str:
    return f"engine-{side_port}"
