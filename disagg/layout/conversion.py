"""Conversion of numbers: the formats between which a writer converts, and with which scales.

A tensor with `scales` holds numbers: each element times its layer's scale. A peer may hold the same numbers in another format.
The writer then stores them as the destination's engine would: `number / scale`, by the destination's `rounding`, in single
precision. Formats of 16 and 32 bits have scale 1, and always get the nearest number.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from disagg.core.errors import LayoutError
from disagg.core.formats import FLOATS, QUANTIZED, ROUNDINGS

SMALLEST, LARGEST = 2.0**-149, 2.0**128 - 2.0**104
"""The positive numbers of single precision lie between them."""

TWICE = "numbers would be quantized twice"


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the elements of a tensor mean: the scale of each layer, in the order of the layers in memory. With an `axis` these
    are the scales of each position of it that this rank owns, layer after layer. `rounding` is one of `disagg.core.formats`, or
    `None` if nobody but the engine can make such numbers.
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
    """How a span class is converted: the dtypes of both sides, and a scale for each pair of its bases."""

    source: str
    destination: str
    rounding: str
    scales: tuple[float, ...]


def check_numbers(dtype: str, numbers: Numbers, num_layers: int, num_positions: int, what: str) -> None:
    """Raise `LayoutError` unless a tensor of `dtype` can hold such numbers in `num_layers` layers, of which each has scales for
    `num_positions`.
    """
    if dtype not in FLOATS + QUANTIZED:
        raise LayoutError(f"{what}: expected a dtype among {', '.join(FLOATS + QUANTIZED)} for scales, found {dtype}")
    if len(numbers.scales) != num_layers * num_positions:
        each = f"{num_layers} layers" if numbers.axis is None else f"{num_positions} positions of {numbers.axis!r} and layer"
        raise LayoutError(f"{what}: expected a scale for each of {each}, found {len(numbers.scales)}")
    if dtype in FLOATS and set(numbers.scales) - {1.0}:
        raise LayoutError(f"{what}: expected scale 1 for {dtype}, found {max(set(numbers.scales) - {1.0})}")


class Held(NamedTuple):
    """The numbers of a role on all ranks of an instance. `scales` are by layer and position of `axis`; 0 without it."""

    dtype: str
    rounding: str | None
    axis: str | None
    scales: dict[tuple[int, int], float]


def place_of(place: tuple[int, int], axis: str | None) -> str:
    """A layer, and the position of an axis, in words."""
    return f"layer {place[0]}" + (f", {axis} {place[1]}" if axis is not None else "")


def rule(ours: Held, theirs: Held) -> bool:
    """Whether numbers are converted between two instances.

    Raises `LayoutError`, with what both have, for numbers that were quantized and would be quantized again, and for a format of
    8 bits whose rounding is not known.
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
