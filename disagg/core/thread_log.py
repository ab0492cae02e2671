"""The loggers of the manager's threads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import MutableMapping
from typing import Any


def printable(text: str) -> str:
    """With escapes in place of line ends and other characters that are not shown: names and reasons may be a peer's."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shown(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    shown = printable(text)
    return value if shown is text else shown


class ThreadLog(logging.LoggerAdapter[logging.Logger]):
    """A message is one line, whatever its arguments are. Raises nothing in a thread of the manager, which an exception of the
    server's log filters and handlers would end. In the main thread errors pass, so that a server can interrupt its own calls.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        is_main = threading.current_thread() is threading.main_thread()
        with contextlib.nullcontext() if is_main else contextlib.suppress(BaseException):
            super().log(level, msg, *map(_shown, args), **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Keep `extra`."""
        return msg, kwargs
