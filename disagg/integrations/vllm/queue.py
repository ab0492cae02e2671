"""Requests in a server's queue. The other server keeps their blocks while it hears that they are wanted."""

from __future__ import annotations

import logging
import time
from typing import Any

from disagg.integrations.handoff import HandOff

logger = logging.getLogger(__name__)

RENEWALS = 6
"""Renewals within the time that prefill keeps a request without one."""


class Queue:
    """Requests whose hand-off was not loaded or declined yet. `hold_s`: how long prefill keeps blocks without renewal."""

    def __init__(self, hold_s: float) -> None:
        self._interval_s = hold_s / RENEWALS
        self._due_s = 0.0
        self._requests: dict[str, Any] = {}

    def add(self, request: Any) -> None:
        if HandOff.part(request.kv_transfer_params) is not None:
            self._requests[request.request_id] = request

    def remove(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def take_due(self) -> list[HandOff]:
        now = time.monotonic()
        if not self._requests or now < self._due_s:
            return []
        self._due_s = now + self._interval_s
        found = {req_id: _hand_off(request) for req_id, request in self._requests.items()}
        for req_id in [req_id for req_id, hand_off in found.items() if hand_off is None]:
            del self._requests[req_id]
        return [hand_off for hand_off in found.values() if hand_off is not None]


def _hand_off(request: Any) -> HandOff | None:
    try:
        return HandOff.of(request.kv_transfer_params)
    except Exception as error:  # noqa: BLE001  (a client has written it, and those of all others would not be renewed)
        logger.warning("request %s: its hand-off is not renewed: %s", request.request_id, error)
        return None
