"""The loggers of the manager's threads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import MutableMapping
from typing import Any


class ThreadLog(logging.LoggerAdapter[logging.Logger]):
    """Raises nothing in a thread of the manager, which an exception of the server's log filters and handlers would end. In
    the main thread errors pass, so that a server can interrupt its own calls.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        is_main = threading.current_thread() is threading.main_thread()
        with contextlib.nullcontext() if is_main else contextlib.suppress(BaseException):
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Keep `extra`."""
        return msg, kwargs
