"""Rate-limited warnings, for those that peers can cause."""

from __future__ import annotations

import logging
import time

WARNINGS_PER_S = 10.0


class RateLimitedLog:
    """Logs up to `WARNINGS_PER_S` warnings per second on average, in bursts of up to ten times that. Counts the rest."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._room = self._burst = WARNINGS_PER_S * 10
        self._last = time.monotonic()
        self._num_dropped = 0

    def warning(self, text: str, *arguments: object) -> None:
        """Log a warning, or count it as dropped."""
        now = time.monotonic()
        self._room = min(self._burst, self._room + (now - self._last) * WARNINGS_PER_S)
        self._last = now
        if self._room < 1:
            self._num_dropped += 1
            return
        self._room -= 1
        num_dropped, self._num_dropped = self._num_dropped, 0
        self._logger.warning(text, *arguments)
        if num_dropped:
            self._logger.warning("%d earlier warnings were dropped", num_dropped)
