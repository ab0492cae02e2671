"""The Python packages of the engines."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

ENGINE_PACKAGES = {
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "nvlink": ("cuda-bindings", "nvidia-cuda-nvrtc", "torch"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
