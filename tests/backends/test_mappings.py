"""Tracking of the processes that have exported memory mapped."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.backends.nvlink import holders
from disagg.backends.nvlink.holders import Mappings, hold


def test_a_mapping_lasts_until_its_connection_is_closed() -> None:
    mappings = Mappings()
    first, second = hold(mappings.address), hold(mappings.address)
    assert first is not None
    assert second is not None
    assert mappings.holders() == (os.getpid(),) * 2
    first.close()
    assert mappings.wait(0.0) == (os.getpid(),)
    threading.Timer(0.05, second.close).start()
    assert mappings.wait(60.0) == ()
    mappings.close()
    assert hold(mappings.address) is None


def test_the_end_of_a_process_ends_its_mappings() -> None:
    mappings = Mappings()
    code = (
        f"from disagg.backends.nvlink.holders import hold; h = hold({mappings.address!r}); print('held', flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert mappings.holders() == (holder.pid,)
    holder.kill()
    assert mappings.wait(60.0) == ()
    holder.communicate()
    mappings.close()


def test_any_process_may_connect_but_takes_only_so_many_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "MAX_HELD", 3)
    mappings = Mappings()
    held = [hold(mappings.address) for _ in range(5)]
    assert mappings.holders() == (os.getpid(),) * 3
    assert mappings.seen == {os.getpid(), 0}, "the others are not known"
    monkeypatch.setattr(holders, "BACKLOG", 4)
    accept, calls = mappings._listener.accept, []

    def again() -> Any:
        """There is always one more."""
        calls.append(hold(mappings.address))
        return accept()

    monkeypatch.setattr(mappings, "_listener", SimpleNamespace(accept=again, close=mappings._listener.close))
    assert len(mappings.holders()) == 3
    assert len(calls) == 4
    monkeypatch.undo()
    for each in (*held, *calls):
        assert each is not None
        each.close()
    assert mappings.holders() == ()
    mappings.close()
