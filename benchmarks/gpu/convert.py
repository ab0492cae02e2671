"""What a copy between two GPUs costs that converts numbers on its way, in one run::

    python -m benchmarks.gpu.convert --json docs/benchmarks/convert-2xgpu.json

Pages, layers and pieces are those of `nvlink.py`; sizes and rates are in bytes of the destination's format. `gbps`: the kernel
alone with the thread blocks that it gets (`nvlink/engine.py`), with its work list on the GPU, by CUDA events, medians.
`copy_gbps`: the same kernel, which copies as many bytes. `engine_gbps`: the driver's copy of whole layers. `verified`: every
byte of some layers against the reference, for random bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.nvlink import LAYER_NBYTES, NUM_LAYERS, PAGE, POISON, Batch, Bench, columns_of, own, shape_of
from disagg.backends.nvlink.engine import CONVERTING_BLOCKS
from disagg.core.memory import ITEMSIZE
from disagg.core.spans import SpanBatch, SpanRuns, SpanShape
from disagg.testing.reference_numbers import FORMATS, convert, same
from harness.conditions import conditions


class Rule(NamedTuple):
    """`scale` is that of each layer; with more than one KV head, head `h` has `h + 1` times as much."""

    source: str
    destination: str
    scale: float
    heads: int = 1

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(self.scale * (head + 1) for head in range(self.heads))


RULES = (
    Rule("bfloat16", "float8_e4m3fn", 0.037),
    Rule("bfloat16", "float8_e4m3fn", 0.037, heads=8),
    Rule("float8_e4m3fn", "bfloat16", 0.037),
    Rule("float8_e4m3fn", "bfloat16", 0.037, heads=8),
    Rule("float16", "float8_e4m3fn", 0.037),
    Rule("float32", "float8_e4m3fn", 0.037),
    Rule("bfloat16", "float8_e5m2", 0.037),
    Rule("bfloat16", "float8_e4m3fn", 1.0),
    Rule("float8_e5m2", "float16", 1.0),
    Rule("bfloat16", "float16", 1.0),
    Rule("float16", "float8_e5m2", 1.0),
    Rule("float32", "float8_e5m2", 1.0),
)
PIECES = (128, 256, 1024, 4096)
TOTAL = 256 << 20
BLOCKS = (64, 96, 132)
CHECKED_LAYERS = (0, NUM_LAYERS - 1)
WIDE = (1, 2)


def converting(bench: Bench, piece: int, rule: Rule) -> Batch:
    """Pieces of `piece` bytes of the destination, in random pages on both sides. Heads of a token lie side by side."""
    source, destination = rule.source, rule.destination
    wide = piece // ITEMSIZE[destination] * ITEMSIZE[source]
    strides = (rule.heads * wide, WIDE[1] * rule.heads * piece)
    heads = np.arange(rule.heads, dtype=np.uint64)
    at = (heads * np.uint64(wide), heads * np.uint64(piece) + np.uint64((WIDE[1] - 1) * rule.heads * piece))
    layers = (np.array(each, np.uint64) for each in (bench.pool.layers, bench.remote_layers))
    bases = [(each[:, None] + offsets).ravel() for each, offsets in zip(layers, at, strict=True)]
    shape: SpanShape = dataclasses.replace(
        shape_of(bench.pool.layers, bench.remote_layers, piece, WIDE),
        source_bases=bases[0],
        destination_bases=bases[1],
        row_strides=(PAGE * strides[0], PAGE * strides[1]),
        token_strides=strides,
        num_rows=(LAYER_NBYTES // (PAGE * strides[0]), LAYER_NBYTES // (PAGE * strides[1])),
        formats=(source, destination, "nearest"),
        scales=rule.scales * NUM_LAYERS,
    )
    rng = np.random.default_rng(piece)
    count = min(TOTAL // (NUM_LAYERS * PAGE * rule.heads * piece), *shape.num_rows)
    rows = [rng.permutation(number)[:count] for number in shape.num_rows]
    zero = np.zeros(count, np.int64)
    runs = np.stack([rows[0], zero, rows[1], zero, zero + PAGE], axis=1)
    prepared = bench.backend.prepare_spans(bench.peer, (shape,))
    spans = SpanBatch(prepared.shapes, (SpanRuns(0, None, runs),))
    return Batch(spans, prepared, columns_of(shape, runs), rows[0], rows[1], piece, WIDE)


def verify(bench: Bench, batch: Batch, rule: Rule) -> bool:
    """Whether some destination layers hold the converted pieces, and poison elsewhere."""
    source, destination = rule.source, rule.destination
    numbers = batch.piece // ITEMSIZE[destination]
    good = True
    for layer in CHECKED_LAYERS:
        bench._copy(bench.scratch, bench.mapped[layer])
        found = bench.array(bench.scratch).get()
        pieces = bench.array(bench.pool.layers[layer]).get().view(FORMATS[source].dtype)
        pieces = pieces.reshape(-1, PAGE, rule.heads, numbers)[batch.source]
        expected = np.full(LAYER_NBYTES, POISON, np.uint8)
        shaped = expected.view(FORMATS[destination].dtype).reshape(-1, PAGE, WIDE[1], rule.heads, numbers)
        for head, scale in enumerate(rule.scales):
            shaped[batch.destination, :, -1, head] = convert_all(pieces[:, :, head], source, destination, scale)
        kinds = found.view(FORMATS[destination].dtype), expected.view(FORMATS[destination].dtype)
        good = good and same(*kinds, destination)
    return good


def convert_all(numbers: np.ndarray, source: str, destination: str, scale: float) -> np.ndarray:
    """The reference's bits of many numbers. Numbers of at most 16 bits are looked up, since there are few."""
    if FORMATS[source].bits > 16:
        return convert(numbers.ravel(), source, destination, scale=scale).reshape(numbers.shape)
    every = np.arange(1 << FORMATS[source].bits).astype(FORMATS[source].dtype)
    found: np.ndarray = convert(every, source, destination, scale=scale)[numbers]
    return found


def fill(bench: Bench, stored: np.ndarray) -> None:
    """Write the same bytes again and again to every source layer."""
    bench.array(bench.scratch)[:] = bench.cupy.tile(bench.cupy.asarray(stored.view(np.uint8)), LAYER_NBYTES // stored.nbytes)
    for layer in bench.pool.layers:
        bench._copy(layer, bench.scratch)


def is_right(bench: Bench, batch: Batch, rule: Rule) -> bool:
    """Move the pieces once, and verify them."""
    bench.array(bench.scratch)[:] = POISON
    for layer in CHECKED_LAYERS:
        bench._copy(bench.mapped[layer], bench.scratch)
    bench.request(bench.spans(batch), repeat=0)
    return verify(bench, batch, rule)


def measure_rule(bench: Bench, rule: Rule) -> list[dict[str, Any]]:
    """One rule, next to copies of as many bytes. All bits are verified; rates are those of normally distributed numbers."""
    source, scale = rule.source, rule.scale
    rng = np.random.default_rng(1)
    fill(bench, rng.integers(0, 256, 4 << 20, np.uint8))
    batches = {piece: converting(bench, piece, rule) for piece in PIECES}
    verified = {piece: is_right(bench, batch, rule) for piece, batch in batches.items()}
    normal = (rng.standard_normal(1 << 20) * (scale * 50)).astype(np.float32)
    kept = convert(normal.view(np.uint32), "float32", source, scale=scale)
    fill(bench, normal if source == "float32" else kept)
    rows = []
    for piece, batch in batches.items():
        plain = bench.make(piece=piece, total=batch.spans.total_nbytes)
        rates: dict[str, dict[str, float]] = {"by_blocks": {}, "copy_by_blocks": {}}
        for blocks in BLOCKS:
            for name, each in (("by_blocks", batch), ("copy_by_blocks", plain)):
                rate = each.spans.total_nbytes / bench.kernel(each, max_blocks=blocks) / 1e9
                rates[name][str(blocks)] = round(rate, 1)
        row: dict[str, Any] = {
            "rule": f"{source} -> {rule.destination}",
            "scale": scale,
            "heads": rule.heads,
            "piece_bytes": piece,
            "gbps": rates["by_blocks"][str(CONVERTING_BLOCKS)],
            "copy_gbps": rates["copy_by_blocks"][str(CONVERTING_BLOCKS)],
            **rates,
            "verified": verified[piece],
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=float, default=200, help="begin no other rule after this time")
    arguments, about = parser.parse_args(), conditions()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,))
    process.start()
    theirs.close()
    started = time.monotonic()
    bench = Bench(*pipe.recv())
    compiled_s = time.monotonic() - started
    result: dict[str, Any] = {
        **about,
        "what": "copies between two GPUs that convert numbers: random pieces between 64 layers on each, in destination bytes",
        "transport": bench.backend.transport,
        "blocks": CONVERTING_BLOCKS,
        "start_s": round(compiled_s, 1),
        "engine_gbps": round(TOTAL / bench.plain(TOTAL) / 1e9, 1),
        "rows": [],
    }
    print({k: result[k] for k in ("start_s", "engine_gbps", "transport")}, flush=True)
    for rule in RULES:
        if time.monotonic() - started < arguments.limit_s:
            result["rows"] += measure_rule(bench, rule)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    pipe.send(None)
    process.join()
    bench.backend.close()


if __name__ == "__main__":
    main()
