"""Conversion of numbers: between which dtypes, and with which scales. The writer stores them as the destination's engine
would: `number / scale`, by the destination's `rounding`, in single precision. Formats of 16 and 32 bits have scale 1, and
get the nearest number.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from disagg.core.errors import LayoutError
from disagg.core.formats import FLOATS, QUANTIZED, ROUNDINGS

SMALLEST, LARGEST = 2.0**-149, 2.0**128 - 2.0**104
"""Bounds of the positive numbers of single precision."""

TWICE = "numbers would be quantized twice"


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scales`: by layer, in memory order; with an `axis`, by each position of it that this rank owns, layer after layer.
    `rounding`: one of `disagg.core.formats`, or `None` if only the engine can make such numbers. Raises
    `LayoutError` for another rounding, and scales that are not positive numbers of single precision.
    """

    scales: tuple[float, ...]
    rounding: str | None = "nearest"
    axis: str | None = None

    def __post_init__(self) -> None:
        for scale in self.scales:
            if not SMALLEST <= scale <= LARGEST:
                raise LayoutError(f"scales: expected positive numbers of single precision, found {scale}")
        if self.rounding not in (None, *ROUNDINGS):
            raise LayoutError(f"rounding: expected one of {', '.join(ROUNDINGS)}, found {self.rounding!r}")


class Conversion(msgspec.Struct, frozen=True):
    """`scales`: one for each pair of a span class's bases."""

    source: str
    destination: str
    rounding: str
    scales: tuple[float, ...]


def check_numbers(dtype: str, numbers: Numbers, num_layers: int, num_positions: int, what: str) -> None:
    """Raises `LayoutError` unless a tensor of `dtype` can hold such numbers. `num_positions`: with scales, in each layer."""
    if dtype not in FLOATS + QUANTIZED:
        raise LayoutError(f"{what}: expected a dtype among {', '.join(FLOATS + QUANTIZED)} for scales, found {dtype}")
    if len(numbers.scales) != num_layers * num_positions:
        each = f"{num_layers} layers" if numbers.axis is None else f"{num_positions} positions of {numbers.axis!r} and layer"
        raise LayoutError(f"{what}: expected a scale for each of {each}, found {len(numbers.scales)}")
    if dtype in FLOATS and set(numbers.scales) - {1.0}:
        raise LayoutError(f"{what}: expected scale 1 for {dtype}, found {max(set(numbers.scales) - {1.0})}")


class Held(NamedTuple):
    """A role's numbers on all ranks of an instance. `scales`: by layer and position of `axis` (0 without one)."""

    dtype: str
    rounding: str | None
    axis: str | None
    scales: dict[tuple[int, int], float]


def place_of(place: tuple[int, int], axis: str | None) -> str:
    return f"layer {place[0]}" + (f", {axis} {place[1]}" if axis is not None else "")


def rule(ours: Held, theirs: Held) -> bool:
    """Whether numbers are converted. Raises `LayoutError` for numbers that would be quantized twice, and for a format of 8
    bits whose rounding is not known.
    """
    if ours.dtype == theirs.dtype:
        if ours.axis != theirs.axis:
            raise LayoutError(f"scales by {ours.axis or 'layer'} and by {theirs.axis or 'layer'}: {TWICE}")
        place = next((place for place, scale in ours.scales.items() if scale != theirs.scales.get(place, scale)), None)
        if place is not None:
            raise LayoutError(f"{place_of(place, ours.axis)}: scales {ours.scales[place]} and {theirs.scales[place]}: {TWICE}")
        return False
    quantized = [held for held in (ours, theirs) if held.dtype in QUANTIZED]
    if len(quantized) == 2:
        raise LayoutError(f"{ours.dtype} and {theirs.dtype}: {TWICE}")
    if any(held.rounding is None for held in quantized):
        raise LayoutError(
            f"{ours.dtype} and {theirs.dtype}: expected the same dtype, since only the engine itself can make its "
            f"{quantized[0].dtype}"
        )
    return True
