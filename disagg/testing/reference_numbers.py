"""Reference of number conversion, independent of the compiled core: every number of a format is listed, and the nearest one
is searched for, in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Stored = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Format:
    """`mantissa` bits are the fraction. If `finite`, all ones are the only NaN, and nothing is infinite."""

    bits: int
    mantissa: int
    finite: bool = False

    @property
    def dtype(self) -> Any:
        return {8: np.uint8, 16: np.uint16, 32: np.uint32}[self.bits]

    def numbers(self, stored: npt.ArrayLike) -> npt.NDArray[np.float64]:
        bits = np.asarray(stored).astype(np.int64)
        exponents = self.bits - 1 - self.mantissa
        sign = np.where(bits >> (self.bits - 1), -1.0, 1.0)
        exponent = (bits >> self.mantissa) & (2**exponents - 1)
        fraction = (bits & (2**self.mantissa - 1)) / 2**self.mantissa
        bias = 2 ** (exponents - 1) - 1
        normal = exponent > 0
        found = np.ldexp(np.where(normal, 1 + fraction, fraction), np.where(normal, exponent, 1) - bias)
        top = exponent == 2**exponents - 1
        if self.finite:
            found[top & (fraction == 1 - 2.0**-self.mantissa)] = np.nan
        else:
            found[top] = np.where(fraction[top] == 0, np.inf, np.nan)
        return np.asarray(sign * found)

    @cached_property
    def _positive(self) -> npt.NDArray[np.float64]:
        """From 0 to the largest; the index of each is how it is stored."""
        found = self.numbers(np.arange(2 ** (self.bits - 1)))
        return found[np.isfinite(found)]

    def store(self, numbers: npt.NDArray[np.float64], *, rounding: str) -> Stored:
        sign = np.where(np.signbit(numbers), 2 ** (self.bits - 1), 0)
        if rounding == "toward_zero":
            last = len(self._positive) - 1
            found = np.searchsorted(self._positive, np.abs(numbers), side="right").clip(1, last + 1) - 1
            found = np.where(np.isnan(numbers), last, np.where(numbers == 0, 0, found + sign))
            return found.astype(self.dtype)
        listed = self._positive
        largest, step = listed[-1], listed[-1] - listed[-2]
        size = np.abs(numbers)
        above = np.searchsorted(listed, np.minimum(size, largest)).clip(1, len(listed) - 1)
        low, high = size - listed[above - 1], listed[above] - size
        found = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
        # Beyond the largest number by more than half a step.
        beyond = len(listed)
        is_last_even = (beyond - 1) % 2 == 0
        outside = (size > largest + step / 2) | ((size == largest + step / 2) & (not is_last_even))
        found = np.where(outside, beyond if rounding == "unbounded" else beyond - 1, found)
        found = np.where(np.isnan(numbers), 2 ** (self.bits - 1) - 1, found)
        return (found + sign).astype(self.dtype)


FORMATS = {
    "float32": Format(32, 23),
    "bfloat16": Format(16, 7),
    "float16": Format(16, 10),
    "float8_e4m3fn": Format(8, 3, finite=True),
    "float8_e5m2": Format(8, 2),
}


def convert(stored: Stored, source: str, destination: str, *, scale: npt.ArrayLike, rounding: str = "nearest") -> Stored:
    """Convert in single precision. Numbers of a source of 8 bits are multiplied by `scale`; others, for a destination of 8
    bits, are divided by it. Scales are broadcast.
    """
    factors: npt.NDArray[np.float32] = np.asarray(scale, dtype=np.float32)
    with np.errstate(all="ignore"):
        numbers = FORMATS[source].numbers(stored).astype(np.float32)
        if FORMATS[source].bits == 8:
            numbers = numbers * factors
        elif FORMATS[destination].bits == 8:
            numbers = numbers / factors
        if destination == "float32":
            return numbers.view(np.uint32)
        quantizes = FORMATS[destination].bits == 8
        return FORMATS[destination].store(numbers.astype(np.float64), rounding=rounding if quantizes else "unbounded")


def moderate(stored: Stored, dtype: str) -> Stored:
    """Numbers from 1/8 to 2, which every format has, with the signs, fractions and last two exponent bits of the given ones."""
    form, kind = FORMATS[dtype], stored.dtype.type
    exponents = form.bits - 1 - form.mantissa
    return stored & ~kind(1 << (form.bits - 2)) | kind((2 ** (exponents - 3) - 1) << (form.mantissa + 2))


def same(found: Stored, expected: Stored, destination: str) -> bool:
    """Whether all bits are equal; any NaN is as good as another."""
    form = FORMATS[destination]
    both = np.isnan(form.numbers(found)) & np.isnan(form.numbers(expected))
    return bool((both | (found == expected)).all())
