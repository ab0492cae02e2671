"""Transfer engines behind one small contract (`disagg.backends.base`). Each is imported when it is first asked for."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable

from disagg.backends.base import Backend, BackendOptions
from disagg.errors import BackendUnavailable, ConfigError

logger = logging.getLogger(__name__)

ENTRY_POINTS = "disagg.backends"
AUTO = ("nixl", "mooncake")
"""What `auto` tries, in this order."""


def available() -> tuple[str, ...]:
    """Names that `load` knows, installed engine or not."""
    return tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}))


def load(name: str, options: BackendOptions) -> Backend:
    """The backend called `name`, started with `options`; `auto` takes the first of `AUTO` that starts, and says which.

    Raises `ConfigError` for an unknown name and `BackendUnavailable` where the engine cannot be used here.
    """
    if name != "auto":
        return _factory(name)(options)
    reasons = []
    for candidate in AUTO:
        try:
            backend = _factory(candidate)(options)
        except BackendUnavailable as error:
            reasons.append(f"{candidate}: {error}")
            continue
        logger.info(
            "backend auto: chose %s over %s%s", candidate, backend.transport, f" ({'; '.join(reasons)})" if reasons else ""
        )
        return backend
    raise BackendUnavailable(f"backend auto: none of {', '.join(AUTO)} can be used here. {' '.join(reasons)}")


def _factory(name: str) -> Callable[[BackendOptions], Backend]:
    found = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(available())}, found {name!r}")
    factory: Callable[[BackendOptions], Backend] = found[0].load()
    return factory
