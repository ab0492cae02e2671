"""Work requests of one request per model: this library's plan beside what the servers' own connectors post.

    python -m benchmarks.work_requests

A work request is one descriptor given to the engine; with random pages no engine merges two. The figure is that of the rank
that posts most: a prefill rank here and in SGLang, which write, and a decode rank in vLLM, which reads. The servers' figures
are computed from how they cut a request, by their own sources:

* vLLM, `NixlConnector` (`_get_block_descs_ids`): one descriptor for each region and block. A region is the K or the V of a
  layer, or a layer's latent. A decode rank does so for each prefill rank that it reads; pages are head-first where TP differs.
* SGLang, Mooncake and NIXL (`send_kvcache`): one for each run of consecutive pages, layer, and K or V. `send_kvcache_slice`,
  used where TP differs and heads are sharded: one for each token, layer, and K or V, for each decode rank that it writes to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case
from disagg.commands.explain.explanation import ExplainRequest, explain_request

TOKENS, PAGE = 4096, 16


@dataclass(frozen=True)
class Model:
    """A preset and what its pages hold. `num_heads` is `None` where every rank holds the whole latent (MLA)."""

    preset: str
    num_layers: int
    num_heads: int | None

    @property
    def num_regions(self) -> int:
        """Tensors of pages on a rank."""
        return self.num_layers * (1 if self.num_heads is None else 2)


MODELS = (Model("llama-3-8b", 32, 8), Model("llama-3-70b", 80, 8), Model("deepseek-v3", 61, None))
PAIRS = ((4, 4), (4, 2), (2, 4))


def ours(model: Model, prefill: int, decode: int, *, pack_below: int | None) -> int:
    """Descriptors of the prefill rank that posts most, with random pages. `pack_below`: in bytes."""
    source, destination = Side(tp=prefill, page=PAGE), Side(tp=decode, page=PAGE)
    case = Case(
        model=model.preset,
        tokens=TOKENS,
        prefill=source,
        decode=destination,
        backend="nixl",
        transport="rdma",
        pack_below=pack_below,
    )
    posted: dict[int, int] = {}
    for pair in explain_request(ExplainRequest(case=case)).summary.pairs:
        posted[pair.source] = posted.get(pair.source, 0) + sum(part.descriptors for part in pair.components)
    return max(posted.values())


def vllm(model: Model, prefill: int, decode: int) -> int:
    """Descriptors of one decode rank; it reads a latent from one prefill rank."""
    num_read = 1 if model.num_heads is None else max(1, prefill // decode)
    return num_read * model.num_regions * (TOKENS // PAGE)


def sglang(model: Model, prefill: int, decode: int) -> int:
    """Descriptors of one prefill rank that has decode ranks to write to, with random pages."""
    num_written = max(1, decode // prefill)
    sliced = model.num_heads is not None and prefill != decode
    return num_written * model.num_regions * (TOKENS if sliced else TOKENS // PAGE)


def work_requests() -> Iterator[str]:
    """The lines of the Markdown table."""
    yield from ("| model | prefill to decode | packed | direct | vLLM | SGLang |", "|---|---|---|---|---|---|")
    for model in MODELS:
        for prefill, decode in PAIRS:
            counts = [ours(model, prefill, decode, pack_below=bound) for bound in (None, 0)]
            counts += [vllm(model, prefill, decode), sglang(model, prefill, decode)]
            yield f"| {model.preset} | TP {prefill} to {decode} | {' | '.join(f'{count:,}' for count in counts)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(work_requests()) + "\n")
