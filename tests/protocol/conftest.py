"""Performs effects on leases at once, as the control thread does, so that tests can read the leases."""

from __future__ import annotations

from collections import deque

import pytest

from disagg.core.leases import quarantine, release
from disagg.protocol import sessions
from disagg.protocol.types import Effect, QuarantineLease, ReleaseLease


class EffectsWithoutLeases(deque[Effect]):
    """A queue of effects; effects on leases are performed when they are appended, and not kept."""

    def append(self, effect: Effect) -> None:
        match effect:
            case ReleaseLease(lease):
                release(lease)
            case QuarantineLease(lease, reason):
                quarantine(lease, reason)
            case _:
                super().append(effect)


@pytest.fixture(autouse=True)
def _perform_lease_effects(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "effects_on_leases" not in request.keywords:
        monkeypatch.setattr(sessions, "deque", EffectsWithoutLeases)
