"""When a case's requests arrive, and how long each is."""

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


class TraceLine(msgspec.Struct, frozen=True):
    """A request in Mooncake's JSONL format: arrival in ms, tokens of its prompt. Other keys are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Arrivals:
    """`times_s`: seconds after the start, ascending; empty: all at the start, as far as the concurrency allows. `tokens`: of
    each request; empty: the case's.
    """

    name: str = "together"
    times_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def per_s(self) -> float | None:
        last = self.times_s[-1] if self.times_s else 0.0
        return len(self.times_s) / last if last else None


TOGETHER = Arrivals()


def generated(kind: Kind, *, requests: int, per_s: float | None, seed: int) -> Arrivals:
    """`poisson`: at random. `burst`: `BURST` at a time, at random. Raises `ConfigError` without a rate, or with an unused
    one.
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
    """The first `requests` lines of a trace, stretched to the mean rate `per_s`. Raises `ConfigError` that names the line,
    and `OSError`.
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
    """Unchanged for `None`, and if all times are 0."""
    if per_s is not None and times[-1] > 0:
        times = times * (len(times) / per_s / times[-1])
    return tuple(times.tolist())


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield from (line for line in opened if line.strip())
