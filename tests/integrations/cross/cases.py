"""The pairs of servers that hand requests over across engines. `docs/evidence/models.md` lists them."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Pair(NamedTuple):
    """A vLLM server, and the SGLang servers that it serves and that serve it, by the options of their command lines.

    Servers of `killed` are killed at work, and started again.
    """

    model: str
    killed: Literal["vllm", "sglang"]
    vllm: tuple[str, ...]
    sglang_decode: tuple[str, ...]
    sglang_prefill: tuple[str, ...]


PAIRS = {
    "llama": Pair(
        model="llama",
        killed="sglang",
        vllm=("--tensor-parallel-size", "2", "--block-size", "64"),
        sglang_decode=("--page-size", "16"),
        sglang_prefill=("--page-size", "32", "--chunked-prefill-size", "256"),
    ),
    "gemma3": Pair(
        model="gemma3",
        killed="vllm",
        vllm=("--block-size", "32"),
        sglang_decode=("--tp", "2", "--page-size", "64"),
        sglang_prefill=("--page-size", "16", "--chunked-prefill-size", "256"),
    ),
}


def label(engine: str, options: tuple[str, ...]) -> str:
    """A server in words."""
    names = {"--tensor-parallel-size": "TP", "--tp": "TP", "--block-size": "block", "--page-size": "page",
             "--chunked-prefill-size": "chunks of"}  # fmt: skip
    given = {names[option]: value for option, value in zip(options[::2], options[1::2], strict=True)}
    return f"{engine} " + ", ".join(f"{name} {value}" for name, value in {"TP": "1", **given}.items())
