"""Test harnesses that are not shipped: simulator, chaos, fuzz, soak, reference kernels."""
