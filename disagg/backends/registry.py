"""Transfer engines behind one small contract (`disagg.backends.base`). Each is imported when it is first asked for."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable

from disagg.backends.auto import AutoBackend
from disagg.backends.base import Backend, BackendOptions, Transport
from disagg.core.errors import BackendUnavailable, ConfigError

logger = logging.getLogger(__name__)

ENTRY_POINTS = "disagg.backends"
AUTO = ("nixl", "mooncake")
"""What `auto` tries, in this order."""
AUTO_GPU = ("nvlink",)
"""What it tries before, for memory on a GPU: engines that reach some peers only."""


def available() -> tuple[str, ...]:
    """Names that `load` knows, installed engine or not."""
    return tuple(sorted({entry.name for entry in _entries()}))


@functools.cache
def _entries() -> importlib.metadata.EntryPoints:
    """Of all installed packages; reading them takes longer than the rest of a small manager's start."""
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def load(name: str, options: BackendOptions, *, gpu: bool = False) -> Backend:
    """The backend called `name`, started with `options`; `auto` takes the first of `AUTO` that starts, and says which.

    For memory on a GPU (`gpu`) `auto` is `AutoBackend`: those of `AUTO_GPU` that start, before the first of `AUTO` that does.
    Raises `ConfigError` for an unknown name and `BackendUnavailable` where the engine cannot be used here.
    """
    if name != "auto":
        return _factory(name)(options)
    reasons: list[str] = []
    before = [_try(candidate, options, reasons) for candidate in (AUTO_GPU if gpu and options.wanted is Transport.AUTO else ())]
    after = next(filter(None, (_try(candidate, options, reasons) for candidate in AUTO)), None)
    engines = [backend for backend in (*before, after) if backend is not None]
    if not engines:
        tried = (*AUTO_GPU, *AUTO) if gpu else AUTO
        raise BackendUnavailable(f"backend auto: none of {', '.join(tried)} can be used here. {' '.join(reasons)}")
    if gpu:
        return AutoBackend(engines, missing=reasons)
    logger.info(
        "backend auto: chose %s over %s%s",
        engines[0].name, engines[0].transport, f" ({'; '.join(reasons)})" if reasons else "",
    )  # fmt: skip
    return engines[0]


def _try(name: str, options: BackendOptions, reasons: list[str]) -> Backend | None:
    """A backend, if it starts; else `reasons` has one more."""
    try:
        return _factory(name)(options)
    except BackendUnavailable as error:
        reasons.append(f"{name}: {error}")
        return None


def _factory(name: str) -> Callable[[BackendOptions], Backend]:
    found = tuple(_entries().select(name=name))
    if not found:
        _entries.cache_clear()  # for one that is installed before it is asked for again
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(available())}, found {name!r}")
    factory: Callable[[BackendOptions], Backend] = found[0].load()
    return factory
