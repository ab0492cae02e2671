"""Feeds damaged inputs to one target."""

from __future__ import annotations

import faulthandler
import random
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass

from harness.fuzz.damage import damage
from harness.fuzz.targets import Finding, Target, targets

SLOW_S = 5.0
HANG_S = 120.0
SHARES = {"message": 0.34, "live": 0.3, "table": 0.1, "memory": 0.1, "endpoint": 0.08, "command": 0.08}
"""Each target's share of all inputs."""


@dataclass(frozen=True)
class Result:
    """The inputs of one target, and the time and memory they took.

    `silence_ms`: the longest time that a live rank took to answer a valid hello of another peer. `crashes`: of its process.
    """

    target: str
    inputs: int
    accepted: int
    seconds: float
    slowest_ms: float
    grown_mib: float
    silence_ms: float = 0.0
    crashes: int = 0


@dataclass(frozen=True)
class Bounds:
    """How far a target's memory may grow, and how long a live rank may be silent."""

    grown_mib: float = 512.0
    silence_s: float = 1.0

    def exceeded(self, result: Result) -> list[str]:
        """Which bounds a result exceeds, as sentences. No crash is allowed."""
        found: list[str] = []
        if result.grown_mib > self.grown_mib:
            found.append(f"{result.target}: memory grew by {result.grown_mib:.0f} MiB, expected {self.grown_mib:.0f} at most")
        if result.silence_ms > self.silence_s * 1000:
            found.append(f"{result.target}: silent for {result.silence_ms / 1000:.1f} s, expected {self.silence_s:.1f} at most")
        if result.crashes:
            found.append(f"{result.target}: crashed {result.crashes} times")
        return found


def max_rss_kib() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def accepts(target: Target, data: bytes) -> bool:
    """Whether the target accepts an input; `False` if it refuses it as documented."""
    try:
        target.read(data)
    except target.refusals:
        return False
    return True


def fuzz(name: str, numbers: Iterable[int], *, seed: int) -> Result:
    """Feed a target the inputs of these numbers. Raises `Finding` with the number of the first finding."""
    target = targets()[name]
    if not any(accepts(target, valid) for valid in target.valid):
        raise Finding(f"{name}: no valid input is accepted")
    inputs = accepted = 0
    slowest, began = 0.0, time.perf_counter()
    before = max_rss_kib()
    for number in numbers:
        data = damage(random.Random(f"{seed}:{name}:{number}"), target.valid)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        started = time.perf_counter()
        try:
            accepted += accepts(target, data)
        except Exception as error:
            raise Finding(f"{name}:{number} of seed {seed}, {len(data)} bytes: {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - started
        inputs, slowest = inputs + 1, max(slowest, seconds)
        if seconds > SLOW_S:
            raise Finding(f"{name}:{number} of seed {seed}, {len(data)} bytes: took {seconds:.1f} s")
    faulthandler.cancel_dump_traceback_later()
    grown = (max_rss_kib() - before) / 1024
    return Result(name, inputs, accepted, time.perf_counter() - began, slowest * 1000, grown)
