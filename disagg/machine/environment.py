"""Environment variables that are set only while an engine starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_lock = threading.Lock()  # the environment belongs to the process


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Within the scope the environment has `settings`, except for variables that the user has set. Scopes do not nest."""
    with _lock:
        added = [name for name in settings if name not in os.environ]
        os.environ.update({name: settings[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]
