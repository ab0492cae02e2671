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


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the elements of a tensor mean: the scale of each layer, in the order of the layers in memory. `rounding` is one of
    `disagg.core.formats`, or `None` if nobody but the engine can make such numbers.
    """

    scales: tuple[float, ...]
    rounding: str | None = "nearest"

    def __post_init__(self) -> None:
        for scale in self.scales:
            if not SMALLEST <= scale <= LARGEST:
                raise LayoutError(f"scales: expected positive numbers of single precision, found {scale}")
        if self.rounding not in (None, *ROUNDINGS):
            raise LayoutError(f"rounding: expected one of {', '.join(ROUNDINGS)}, found {self.rounding!r}")


class Conversion(msgspec.Struct, frozen=True):
    """How a span class is converted: the dtypes of both sides, and a scale for each of its layers."""

    source: str
    destination: str
    rounding: str
    scales: tuple[float, ...]


def check_numbers(dtype: str, numbers: Numbers, num_layers: int, what: str) -> None:
    """Raise `LayoutError` unless a tensor of `dtype` can hold such numbers in `num_layers` layers."""
    if dtype not in FLOATS + QUANTIZED:
        raise LayoutError(f"{what}: expected a dtype among {', '.join(FLOATS + QUANTIZED)} for scales, found {dtype}")
    if len(numbers.scales) != num_layers:
        raise LayoutError(f"{what}: expected a scale for each of {num_layers} layers, found {len(numbers.scales)}")
    if dtype in FLOATS and set(numbers.scales) - {1.0}:
        raise LayoutError(f"{what}: expected scale 1 for {dtype}, found {max(set(numbers.scales) - {1.0})}")


class Held(NamedTuple):
    """The numbers of a role on all ranks of an instance. `scales` are by layer."""

    dtype: str
    rounding: str | None
    scales: dict[int, float]


def rule(ours: Held, theirs: Held) -> bool:
    """Whether numbers are converted between two instances.

    Raises `LayoutError`, with what both have, for numbers that were quantized and would be quantized again, and for a format of
    8 bits whose rounding is not known.
    """
    if ours.dtype == theirs.dtype:
        layer = next((layer for layer, scale in ours.scales.items() if scale != theirs.scales.get(layer, scale)), None)
        if layer is not None:
            raise LayoutError(
                f"layer {layer}: scales {ours.scales[layer]} and {theirs.scales[layer]}: numbers would be quantized twice"
            )
        return False
    quantized = [held for held in (ours, theirs) if held.dtype in QUANTIZED]
    if len(quantized) == 2:
        raise LayoutError(f"{ours.dtype} and {theirs.dtype}: numbers would be quantized twice")
    if any(held.rounding is None for held in quantized):
        raise LayoutError(
            f"{ours.dtype} and {theirs.dtype}: expected the same dtype, since only the engine itself can make its "
            f"{quantized[0].dtype}"
        )
    return True
