"""Models, engines and pairs of sides of the whole-system tests and of the documentation's support matrix."""

from __future__ import annotations

ENGINES = ("mooncake", "nixl")

LOCAL_SIDES = [
    ("tp=4", "tp=2,page=64"),
    ("tp=2,page=64,layout=hnd", "tp=3,page=4"),
    ("tp=1,pp=3", "tp=2,pp=2,layers=2+1"),
    ("tp=2,dp=2", "tp=1,dp=3,page=8"),
    ("cp=2,page=8", "tp=2"),
    ("tp=1", "cp=3,page=8,context=pages"),
    ("cp=2,page=4,context=blocks", "cp=3,page=4"),
]
"""Pairs of sides in one process, for six KV heads in three layers."""

ENGINE_SIDES = [
    ("tp=4,page=8", "tp=1"),
    ("tp=1", "tp=4,page=8"),
    ("tp=3,page=4,layout=hnd", "tp=2"),
]
"""Pairs of sides in separate processes, for every engine and the same model."""

CONTEXT_SIDES = [
    ("cp=2,context=blocks,page=8", "tp=1,cp=2,context=tokens"),
    ("pp=2,cp=2,context=pages", "tp=2,page=32,layout=hnd"),
]
"""Pairs of context-parallel sides for every engine, with Qwen3-Next."""

LOCAL_PRESETS = [
    ("llama-3-8b", 2, "tp=4", "tp=2,page=64"),
    ("llama-3-70b", 1, "tp=1", "tp=4,page=32,layout=hnd"),
    ("qwen3-32b", 2, "tp=2,pp=2", "tp=1,page=8"),
    ("qwen3-next-80b", 4, "tp=2", "tp=1,page=64"),
    ("qwen3.5-397b-a17b", 4, "tp=1", "tp=2,page=8"),
    ("gpt-oss-120b", 4, "tp=1,pp=2", "tp=4,page=64"),
    ("deepseek-v3.2", 3, "tp=2", "tp=1,pp=3,page=64"),
    ("kimi-linear-48b", 4, "tp=2,pp=2", "tp=4,page=8"),
    ("nemotron-h-8b", 8, "tp=2", "tp=4,page=8,layout=hnd"),
    ("falcon-h1-7b", 2, "tp=1", "tp=2,pp=2,page=8"),
    ("jamba-mini", 5, "tp=4", "tp=2,page=64"),
    ("llama-4-scout", 4, "tp=2", "tp=4,page=64"),
    ("deepseek-v3", 2, "tp=2", "tp=1,page=64"),
    ("glm-5", 2, "tp=1,pp=2", "tp=2,page=64"),
    ("mimo-v2-flash", 2, "tp=4", "tp=2,page=64,layout=hnd"),
]
"""Presets of every kind with the number of layers up to the first of its rarest kind, and a pair of sides."""

_SHAPES = [("tp=4", "tp=2,page=64"), ("tp=2,page=64", "tp=4,layout=hnd"), ("tp=1,pp=2", "tp=2,page=8")]
_HYBRIDS = [("qwen3-next-80b", 4), ("gpt-oss-120b", 2), ("deepseek-v3.2", 2), ("falcon-h1-7b", 2), ("jamba-mini", 5)]

ENGINE_PRESETS = [
    (engine, preset, layers, *_SHAPES[(number + (engine == "nixl")) % len(_SHAPES)])
    for engine in ENGINES
    for number, (preset, layers) in enumerate(_HYBRIDS)
]
"""Models with several kinds of state, for every engine, each with one of the pairs of sides in turn."""
