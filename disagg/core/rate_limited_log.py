"""Rate-limited warnings, for those that peers can cause."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from disagg.core.thread_log import ThreadLog

WARNINGS_PER_S = 10.0
MAX_REMEMBERED = 256


class RateLimitedLog:
    """Logs `WARNINGS_PER_S` warnings per second on average, in bursts of up to ten times that, and counts the rest. The same
    warning is logged once in `repeat_s` seconds.
    """

    def __init__(self, logger: logging.Logger | ThreadLog, *, repeat_s: float = 0.0) -> None:
        self._logger = logger
        self._repeat_s = repeat_s
        self._logged_at: OrderedDict[str, float] = OrderedDict()
        self._room = self._burst = WARNINGS_PER_S * 10
        self._last = time.monotonic()
        self._num_dropped = 0
        self._begun: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def warning(self, text: str, *arguments: object, after_s: float = 0.0) -> None:
        """With `after_s`, the warning is logged once it has been repeated for so long: until then its cause may pass by
        itself.
        """
        now = time.monotonic()
        if after_s and not self._lasts(text % arguments, after_s, now):
            return
        if self._repeat_s and self._is_repeated(text % arguments, now):
            return
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

    def _is_repeated(self, said: str, now: float) -> bool:
        if now - self._logged_at.get(said, -self._repeat_s) < self._repeat_s:
            return True
        self._logged_at[said] = now
        self._logged_at.move_to_end(said)
        while len(self._logged_at) > MAX_REMEMBERED:
            self._logged_at.popitem(last=False)
        return False

    def _lasts(self, said: str, after_s: float, now: float) -> bool:
        """Whether this has been repeated for `after_s`, with breaks of at most three times that."""
        begun, last = self._begun.pop(said, (now, now))
        self._begun[said] = (begun if now - last <= 3 * after_s else now, now)
        while len(self._begun) > MAX_REMEMBERED:
            self._begun.popitem(last=False)
        return now - self._begun[said][0] >= after_s
