"""Warnings that peers can cause, rate-limited."""

from __future__ import annotations

import logging
import time

COMPLAINTS_PER_S = 10.0


class Complaints:
    """Warnings that a stranger can cause: `COMPLAINTS_PER_S` of them on average, and how many were left out."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._room = self._limit = COMPLAINTS_PER_S * 10
        self._last = time.monotonic()
        self._unsaid = 0

    def say(self, text: str, *arguments: object) -> None:
        """Log a warning, if there is room for it."""
        now = time.monotonic()
        self._room = min(self._limit, self._room + (now - self._last) * COMPLAINTS_PER_S)
        self._last = now
        if self._room < 1:
            self._unsaid += 1
            return
        self._room -= 1
        unsaid, self._unsaid = self._unsaid, 0
        self._logger.warning(text, *arguments)
        if unsaid:
            self._logger.warning("%d warnings were left out before that one", unsaid)
