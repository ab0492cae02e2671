"""vLLM's own CUDA kernel stores the bits that the library converts to: see `ROUNDINGS` of `disagg.integrations.vllm.layout`.

`TEST_VLLM_KERNELS` is the path of vLLM's compiled kernels (`vllm/_C_stable_libtorch.abi3.so`).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

from disagg.testing.reference_numbers import FORMATS, Stored, convert, same

pytestmark = pytest.mark.gpu

KERNELS = os.environ.get("TEST_VLLM_KERNELS", "")
HEADS, DIM, BLOCK = 4, 128, 16
NUM_TOKENS = 2**16 // (HEADS * DIM)
SCALES = (1.0, 0.037, 3.3e-5, 700.0, 1e-37)


@pytest.mark.skipif(not KERNELS, reason="TEST_VLLM_KERNELS names no file")
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("destination", ["float8_e4m3fn", "float8_e5m2"])
def test_every_number_is_stored_as_by_the_reference(source: str, destination: str) -> None:
    """All numbers of 16 bits, and as many of 32."""
    torch: Any = importlib.import_module("torch")
    torch.ops.load_library(KERNELS)
    ours, rng = FORMATS[source], np.random.default_rng(6)
    every = rng.integers(0, 2**32, 1 << 16, np.uint64) if ours.bits == 32 else np.arange(1 << 16)
    stored = every.astype(ours.dtype)
    number = torch.from_numpy(stored.copy()).view(getattr(torch, source)).reshape(NUM_TOKENS, HEADS, DIM).cuda()
    slots = torch.arange(NUM_TOKENS, device="cuda")
    kind = "fp8_e5m2" if destination == "float8_e5m2" else "fp8_e4m3"
    for scale in SCALES:
        k, v = (torch.zeros(NUM_TOKENS // BLOCK, BLOCK, HEADS, DIM, dtype=torch.uint8, device="cuda") for _ in range(2))
        at = torch.tensor(scale, device="cuda")
        torch.ops._C_cache_ops.reshape_and_cache_flash(number, number.flip(0), k, v, slots, kind, at, at)
        wanted = convert(stored, source, destination, scale=scale, rounding="nearest").reshape(NUM_TOKENS, HEADS, DIM)
        for found, expected in ((k, wanted), (v, wanted[::-1])):
            bits: Stored = found.cpu().numpy().reshape(NUM_TOKENS, HEADS, DIM)
            assert same(bits, expected, destination), f"{source} to {destination}, scale {scale}"
