"""Effects on leases are carried out at once, as the control thread does after each step, so that tests can read the leases."""

from __future__ import annotations

from collections import deque

import pytest

from disagg.protocol import sessions
from disagg.protocol.types import Effect, QuarantineLease, ReleaseLease


class LeasesCarriedOut(deque[Effect]):
    """Effects but for those on leases, which take effect when they are appended."""

    def append(self, effect: Effect) -> None:
        match effect:
            case ReleaseLease(lease):
                lease.release()
            case QuarantineLease(lease, reason):
                lease.quarantine(reason)
            case _:
                super().append(effect)


@pytest.fixture(autouse=True)
def _carry_out_leases(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "effects_on_leases" not in request.keywords:
        monkeypatch.setattr(sessions, "deque", LeasesCarriedOut)
