"""Tracking of the processes that have exported memory mapped."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

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
