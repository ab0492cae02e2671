"""Finds transfer engines by name among entry points."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable

from disagg.backends.auto import AutoBackend
from disagg.backends.base import Backend, BackendOptions, Transport
from disagg.core.errors import BackendUnavailable, ConfigError

ENTRY_POINTS = "disagg.backends"
AUTO_HOST = "cma"
"""`auto`'s first choice for host memory. It reaches peers on this host only."""
AUTO_GPU = "nvlink"
"""`auto`'s first choice for GPU memory. It reaches GPUs of this host only."""
AUTO = ("nixl", "mooncake")
"""Network engines: `auto` uses the first that starts."""
WITHOUT_NICS = (AUTO_HOST, AUTO_GPU, "local")


def available() -> tuple[str, ...]:
    """Names that `load` knows, installed or not."""
    return tuple(sorted({entry.name for entry in _entries()}))


@functools.cache
def _entries() -> importlib.metadata.EntryPoints:
    """Cached: reading them takes longer than the rest of a small manager's start."""
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def load(name: str, options: BackendOptions, *, gpu: bool = False) -> Backend:
    """The backend called `name`; `gpu`: for memory on a GPU.

    `auto` is `AUTO_GPU` or `AUTO_HOST`, unless `options` ask for another transport, and the first of `AUTO` that
    starts. Raises `ConfigError` for an unknown name, or devices for an engine without NICs, `BackendUnavailable` if the
    engine cannot be used here.
    """
    if name != "auto":
        if options.devices and name in WITHOUT_NICS:
            raise ConfigError(f"devices: backend {name!r} uses no NIC, found {', '.join(options.devices)}")
        return _factory(name)(options)
    reasons: list[str] = []
    preferred, over = (AUTO_GPU, (Transport.AUTO,)) if gpu else (AUTO_HOST, (Transport.AUTO, Transport.SHM))
    first = _try(preferred, options, reasons) if options.wanted in over else None
    network = next(filter(None, (_try(candidate, options, reasons) for candidate in AUTO)), None)
    engines = [backend for backend in (first, network) if backend is not None]
    if not engines:
        tried = (preferred, *AUTO) if options.wanted in over else AUTO
        raise BackendUnavailable(f"backend auto: none of {', '.join(tried)} can be used here. {' '.join(reasons)}")
    staging = engines[0].staging if options.stays_on_host and not gpu else None
    return AutoBackend(engines, missing=reasons, staging=staging)


def _try(name: str, options: BackendOptions, reasons: list[str]) -> Backend | None:
    try:
        return _factory(name)(options)
    except BackendUnavailable as error:
        reasons.append(f"{name}: {error}")
        return None


def _factory(name: str) -> Callable[[BackendOptions], Backend]:
    found = tuple(_entries().select(name=name))
    if not found:
        _entries.cache_clear()  # an engine may be installed before the next call
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(available())}, found {name!r}")
    factory: Callable[[BackendOptions], Backend] = found[0].load()
    return factory
