"""When a case's requests arrive, and how long each is: all together, at random, in bursts, or as a trace has recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigError

Kind = Literal["together", "poisson", "burst"]
BURST = 8
"""Requests of a burst."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace in the JSONL format that Mooncake publishes: its arrival in ms, and the tokens of its prompt.
    Other keys, such as `output_length` and `hash_ids`, are ignored.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Arrivals:
    """`times_s`: when each request arrives, in seconds after the start and in ascending order; empty: all at the start, as far
    as the concurrency allows. `tokens`: the tokens of each request; empty: the case's.
    """

    name: str = "together"
    times_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def per_s(self) -> float | None:
        """Requests per second; `None` if all arrive together."""
        last = self.times_s[-1] if self.times_s else 0.0
        return len(self.times_s) / last if last else None


TOGETHER = Arrivals()


def generated(kind: Kind, *, requests: int, per_s: float | None, seed: int) -> Arrivals:
    """`per_s` requests a second, at random (`poisson`), or `BURST` at a time at random. Raises `ConfigError` without a rate, or
    with one that nothing uses.
    """
    if kind == "together":
        if per_s is not None:
            raise ConfigError("rate: expected --arrivals poisson or burst, or --trace, with it")
        return TOGETHER
    if per_s is None:
        raise ConfigError(f"rate: expected the requests per second of --arrivals {kind}")
    size = BURST if kind == "burst" else 1
    gaps = np.random.default_rng(seed).exponential(size=-(-requests // size))
    return Arrivals(kind, _at_rate(np.repeat(np.cumsum(gaps), size)[:requests], per_s))


def read_trace(file: Path, *, requests: int | None, per_s: float | None) -> Arrivals:
    """The first `requests` lines of a trace. With `per_s` the times are stretched to this mean rate. Raises `ConfigError` that
    names the line, and `OSError`.
    """
    lines = []
    for number, line in enumerate(_lines(file), 1):
        try:
            lines.append(msgspec.json.decode(line, type=TraceLine))
        except msgspec.DecodeError as error:
            raise ConfigError(f"trace {file}, line {number}: expected timestamp and input_length: {error}") from error
        if len(lines) == requests:
            break
    if not lines:
        raise ConfigError(f"trace {file}: expected one request per line, found none")
    lines.sort(key=lambda line: line.timestamp)
    times = np.array([line.timestamp - lines[0].timestamp for line in lines]) / 1e3
    return Arrivals(file.name, _at_rate(times, per_s), tuple(line.input_length for line in lines))


def _at_rate(times: npt.NDArray[np.float64], per_s: float | None) -> tuple[float, ...]:
    """The times, stretched so that `per_s` requests arrive a second; unchanged for `None`, and if all are 0."""
    if per_s is not None and times[-1] > 0:
        times = times * (len(times) / per_s / times[-1])
    return tuple(times.tolist())


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield from (line for line in opened if line.strip())
