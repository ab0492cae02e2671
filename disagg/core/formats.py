"""Formats of numbers between which the core and the GPU kernels convert, by torch's names of dtypes."""

FLOATS = ("float32", "bfloat16", "float16")
QUANTIZED = ("float8_e4m3fn", "float8_e5m2")
ROUNDINGS = ("nearest", "unbounded", "toward_zero")
"""How a number becomes one of 8 bits. `nearest`: the nearest, ties to even, and the largest instead of a larger one.
`unbounded`: the nearest, and infinity instead of a larger one, or NaN if there is none. `toward_zero`: the next one toward
zero, and the largest instead of a larger one or of NaN; zero has no sign.
"""
