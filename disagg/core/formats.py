"""Number formats between which the core and the GPU kernels convert, by torch's dtype names."""

FLOATS = ("float32", "bfloat16", "float16")
QUANTIZED = ("float8_e4m3fn", "float8_e5m2")
ROUNDINGS = ("nearest", "unbounded", "toward_zero")
"""How a number becomes one of 8 bits. `nearest`: ties to even; saturates at the largest. `unbounded`: likewise, but infinity
for what is larger, or NaN if the format has no infinity. `toward_zero`: truncates; the largest for what is larger and for
NaN, and zero has no sign.
"""
