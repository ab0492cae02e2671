"""How many descriptors are left."""

from __future__ import annotations

import os
import resource

from disagg.machine.descriptors import shortage


def test_a_shortage_says_how_many_are_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(2) for _ in range(40)]  # numbers up to the highest are in use, but for gaps that these fill
    try:
        assert shortage() == ""
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        while not (found := shortage(8)).startswith("only 0 "):
            held.append(os.dup(2))
        assert found == "only 0 of 8 descriptors that connecting may take are free"
        for _ in range(5):
            os.close(held.pop())
        assert shortage(5) == ""
        assert shortage(8) == "only 5 of 8 descriptors that connecting may take are free"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
    assert shortage() == ""
