"""How many descriptors are left."""

from __future__ import annotations

import os
import resource

import pytest

from disagg.machine.descriptors import shortage, too_many_ranks


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


def test_ranks_that_the_limit_may_not_do_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert too_many_ranks(96) == ""
    assert too_many_ranks(97) == (
        "97 ranks of peers may take 776 descriptors, and this process may have 1024 in all: "
        "raise the soft limit (ulimit -n 2048; for a service: LimitNOFILE=)"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert too_many_ranks(100_000) == ""
