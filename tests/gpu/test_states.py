"""Every kind of state from GPU to GPU between different layouts; every byte of every pool is compared with the reference."""

from __future__ import annotations

import importlib.util

import pytest

from disagg.commands.bench.driver import run
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case

pytestmark = pytest.mark.gpu

CASES = {
    "paged GQA, tokens first to heads first": ("llama-3-8b", 2, "tp=4,page=16", "tp=2,page=64,layout=hnd"),
    "windows": ("gpt-oss-120b", 4, "tp=2,page=16", "tp=4,page=16"),
    "latent and index keys": ("deepseek-v3.2", 2, "tp=2,page=64", "tp=1,page=64"),
    "gated delta net": ("qwen3-next-80b", 4, "tp=2,page=16", "tp=4,page=32"),
    "delta attention and latent": ("kimi-linear-48b", 4, "tp=4,page=16", "tp=2,page=16"),
    "Mamba2 beside attention": ("falcon-h1-7b", 2, "tp=1,page=16", "tp=2,page=16"),
    "Mamba1, context parallel": ("jamba-mini", 8, "tp=2,cp=2,page=16", "tp=1,page=16"),
}


PACKED = [name for name in CASES if name.startswith(("paged", "Mamba"))]
ENGINES = {"nixl": "nixl_cu13", "mooncake": "mooncake"}


@pytest.mark.parametrize(
    ("engine", "name"), [("nvlink", n) for n in CASES] + [(e, n) for e in ENGINES for n in PACKED] + [("auto", PACKED[0])]
)
def test_every_byte_of_every_pool(engine: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `nvlink`, by engines that pack with kernels, and by the choice of `auto`; both sides also compute checksums."""
    if engine in ENGINES and importlib.util.find_spec(ENGINES[engine]) is None:
        pytest.skip(f"engine {engine} is not installed")
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "1")
    model, num_layers, prefill, decode = CASES[name]
    case = Case(
        backend=engine,
        model=model,
        num_layers=num_layers,
        tokens=333,
        prefill=Side.parse(prefill),
        decode=Side.parse(decode),
        requests=3,
        concurrency=2,
        chunk_tokens=96,
        device="cuda",
        verify="full",
        repeat=2,
        ceiling=False,
        timeout_s=40.0,
    )
    row = run(case, lambda _: None)
    assert row.verified, row.problem
    assert row.device == "cuda"
    assert engine != "auto" or "nvlink: " in row.transport, row.transport
    assert engine not in ENGINES or row.way != "direct", row.ways
