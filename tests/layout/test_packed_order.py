"""The order of the bytes in a packed stream, which both sides derive by themselves: a part of the protocol in no message.

`packed_order.txt` has a digest of each stream. A line may change only together with the protocol version.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from disagg.layout.binding import Stream, bind_rows
from disagg.layout.plan import SpanClass
from disagg.testing.reference import Context
from disagg.testing.reference_states import Form
from tests.support.instances import InstanceSpec, library_rows
from tests.support.kinds import (
    Kind,
    compressed_kind,
    convolution_kind,
    gdn_kind,
    gqa_kind,
    index_kind,
    kda_kind,
    lightning_kind,
    mamba1_kind,
    mamba2_kind,
    mla_kind,
)
from tests.support.states import Scene

GOLDEN = Path(__file__).parent / "packed_order.txt"
HEADS_FIRST = {"k": "page kv_head token dim", "v": "page kv_head token dim"}
KINDS: dict[str, Kind] = {
    "gqa": gqa_kind(),
    "gqa with scales": gqa_kind(scales=1),
    "gqa, heads first": gqa_kind(form=Form(num_rows=12, page_size=4, orders=HEADS_FIRST)),
    "sliding window": gqa_kind(window=6),
    "mla with scales": mla_kind(scales=1),
    "index keys": index_kind(),
    "compressed": compressed_kind(ratio=2, name="compressed"),
    "gdn": gdn_kind(),
    "kda": kda_kind(),
    "mamba1": mamba1_kind(),
    "mamba2": mamba2_kind(),
    "lightning": lightning_kind(),
    "convolution": convolution_kind(),
}
PAIRS: dict[str, tuple[InstanceSpec, InstanceSpec]] = {
    "tp 2 to 4": (InstanceSpec(tp=2), InstanceSpec(tp=4)),
    "tp 4 to 1, two stages to one": (InstanceSpec(tp=4, edges=(0, 1, 1000)), InstanceSpec()),
    "tokens in turn to pages twice as long": (
        InstanceSpec(cp=2, context=Context.TOKENS_IN_TURN),
        InstanceSpec(forms={"kv": Form(num_rows=12, page_size=8)}),
    ),
}
NUM_TOKENS = 11


class Streams:
    """The packed streams of a request between two ranks."""

    def __init__(self, kind: Kind, pair: tuple[InstanceSpec, InstanceSpec]) -> None:
        self.kind, self.scene = kind, Scene([kind], *pair)
        self.request = self.scene.open(NUM_TOKENS)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(self.scene.election.by_pair)

    def spans(self, source: int, destination: int) -> tuple[SpanClass, ...]:
        return self.scene.plan(self.request, source, destination)[self.kind.name].spans

    def packed(self, source: int, destination: int, spans: tuple[int, ...] | None = None) -> bytes:
        """What `source` packs, of all span classes or of chosen ones."""
        scene, name, need = self.scene, self.kind.name, self.request.needs[self.kind.name]
        ours, theirs = (side.group(0)[rank] for side, rank in ((scene.source, source), (scene.destination, destination)))
        bound = bind_rows(
            scene.plan(self.request, source, destination)[name],
            source=library_rows(self.request.source_rows[source][name], state=ours.states[name], tokens=need),
            destination=library_rows(self.request.destination_rows[destination][name], state=theirs.states[name], tokens=need),
            tokens=need if self.kind.model.paged else None,
            num_tokens=NUM_TOKENS,
            spans=spans,
        )
        stream = Stream(source=True)
        bound.append_to(stream)
        staging = np.empty(stream.total, np.uint8)
        stream.gather(0, stream.total, staging.ctypes.data)
        return staging.tobytes()

    def place(self, source: int, span: SpanClass) -> str:
        """The tensor and layer in which a span class begins."""
        for (role, layer), buffer in self.scene.source.group(0)[source].memory[self.kind.name].buffers.items():
            if buffer.ctypes.data <= int(span.source_bases[0]) < buffer.ctypes.data + buffer.nbytes:
                return f"{role} of layer {layer} at {int(span.source_bases[0]) - buffer.ctypes.data}"
        raise AssertionError("a span class begins outside of the rank's memory")


def digests(kind: Kind, pair: tuple[InstanceSpec, InstanceSpec]) -> list[str]:
    """The bytes of each span class that a rank of the first instance packs for one of the second."""
    streams, found = Streams(kind, pair), []
    for source, destination in streams.pairs:
        for number, span in enumerate(streams.spans(source, destination)):
            content = streams.packed(source, destination, (number,))
            where, digest = streams.place(source, span), hashlib.sha256(content).hexdigest()[:16]
            found.append(f"{source} to {destination}, {where}: {len(content)} bytes, {digest}")
    return sorted(found)


def cases() -> dict[str, tuple[Kind, tuple[InstanceSpec, InstanceSpec]]]:
    """Context parallelism and other pages for the first kind only."""
    first = next(iter(KINDS))
    return {
        f"{name}, {way}": (kind, pair)
        for name, kind in KINDS.items()
        for way, pair in PAIRS.items()
        if name == first or not pair[1].forms
    }


@pytest.mark.parametrize("name", cases())
def test_streams_equal_the_golden_file(name: str) -> None:
    golden = [line.removeprefix(f"{name}, ") for line in GOLDEN.read_text().splitlines() if line.startswith(f"{name}, ")]
    assert digests(*cases()[name]) == golden


@pytest.mark.parametrize("name", cases())
def test_span_classes_follow_each_other_by_the_address_at_which_they_begin_at_the_writer(name: str) -> None:
    streams = Streams(*cases()[name])
    for pair in streams.pairs:
        begins = [int(span.source_bases[0]) for span in streams.spans(*pair)]
        assert begins == sorted(begins)
        assert streams.packed(*pair) == b"".join(streams.packed(*pair, (number,)) for number in range(len(begins)))


def test_every_line_of_the_golden_file_is_of_a_case() -> None:
    lines = GOLDEN.read_text().splitlines()
    assert all(any(line.startswith(f"{name}, ") for name in cases()) for line in lines)
    assert len(lines) == len(set(lines))
