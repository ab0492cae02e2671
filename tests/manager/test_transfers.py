"""`KVManager` end to end over the `local` engine; every pool byte is compared with the reference."""

from __future__ import annotations

import pytest

from disagg.backends.base import BackendOptions, StagingShape
from disagg.backends.local import LocalBackend
from disagg.core.errors import ConfigError
from disagg.testing.reference import Context
from tests.support.cluster import Side, cluster

NHD, HND = "page token kv_head dim", "page kv_head token dim"
PACKED = "page kv token kv_head dim"


PACKED_PAIRS = [
    (Side(tp=4), Side(tp=2, page=16)),
    (Side(tp=2), Side(tp=4, page=8, axes=HND)),
    (Side(tp=3, axes=HND), Side(tp=2, page=2, num_pages=64)),
    (Side(tp=2, cp=2, context=Context.TOKENS_IN_TURN), Side(tp=1, page=8)),
    (Side(tp=1, cp=3, context=Context.PAGE_BLOCKS), Side(tp=2, cp=2, page=8, context=Context.TOKENS_IN_TURN)),
]


class SmallStaging(LocalBackend):
    """The `local` engine with staging of the given shape."""

    def __init__(self, options: BackendOptions, shape: StagingShape) -> None:
        super().__init__(options)
        self._shape = shape

    @property
    def staging(self) -> StagingShape:
        return self._shape


def ok(events: object) -> bool:
    return all(event.ok for event in events)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4), (4, 1), (1, 4), (8, 1), (2, 8), (3, 2), (6, 4)])
def test_tensor_parallel_sizes_may_differ_in_any_ratio(prefill_tp: int, decode_tp: int) -> None:
    """Cases 1, 2 and 7: replicated heads, head slices, and sizes that do not divide the heads."""
    with cluster(Side(tp=prefill_tp), Side(tp=decode_tp, page=8, num_pages=24), num_kv_heads=6) as instances:
        assert ok(instances.transfer(37))


def test_decode_pages_larger_than_prefill_pages_with_an_unaligned_prefix_hit() -> None:
    """Case 53: tokens are paired by position, not pages by their count from the end."""
    with cluster(Side(page=4), Side(page=16)) as instances:
        for num_tokens in (40, 44, 43):
            assert ok(instances.transfer(num_tokens, first_token=16))


def test_a_prefix_hit_at_decode_reduces_the_transfer() -> None:
    """Case 27: only missing tokens move. A request succeeds even when no token is missing."""
    with cluster(Side(tp=2), Side(tp=1, page=8)) as instances:
        for first_token in (0, 5, 8, 36, 37):
            events = instances.transfer(37, first_token=first_token)
            assert ok(events)
            assert events[0].payload == b"token"


def test_uneven_pipeline_stages_pair_layers_by_id() -> None:
    """Case 9: 15 layers from stages of 7 + 8 to one stage, and from one stage to 5 + 5 + 5."""
    halves = (tuple(range(7)), tuple(range(7, 15)))
    thirds = (tuple(range(5)), tuple(range(5, 10)), tuple(range(10, 15)))
    with cluster(Side(tp=2, stages=halves), Side(tp=1), num_layers=15) as instances:
        assert ok(instances.transfer(21))
    with cluster(Side(tp=1), Side(stages=thirds), num_layers=15) as instances:
        assert ok(instances.transfer(21))


@pytest.mark.parametrize(("source", "destination"), [(NHD, HND), (HND, NHD), (PACKED, HND), (NHD, PACKED), (HND, HND)])
def test_axis_orders_may_differ_between_the_sides(source: str, destination: str) -> None:
    """Cases 8 and 26: K and V differ in width where the layouts allow it; a page has as many heads as tokens."""
    dims = (8, 8) if PACKED in (source, destination) else (8, 6)
    with cluster(Side(tp=2, axes=source), Side(tp=1, axes=destination, page=2), num_kv_heads=2, dims=dims) as instances:
        assert ok(instances.transfer(13))


def test_chunked_prefill_works_with_send_before_or_after_reserve() -> None:
    with cluster(Side(tp=2), Side(tp=4, page=8)) as instances:
        assert ok(instances.transfer(37, chunks=(5, 6, 20), send_first=True))
        assert ok(instances.transfer(37, chunks=(16, 32), first_token=12))


def test_requests_reach_the_selected_data_parallel_groups() -> None:
    with cluster(Side(tp=2, dp=2), Side(tp=1, dp=3)) as instances:
        assert ok(instances.transfer(17, source_group=1, destination_group=2))
        assert ok(instances.transfer(17, source_group=0, destination_group=1))


@pytest.mark.parametrize("context", [Context.PAGE_BLOCKS, Context.PAGES_IN_TURN, Context.TOKENS_IN_TURN])
def test_context_parallel_prefill(context: Context) -> None:
    with cluster(Side(tp=2, cp=3, context=context), Side(tp=1, page=8)) as instances:
        assert ok(instances.transfer(37))
        assert ok(instances.transfer(37, first_token=9, chunks=(20,)))


def test_context_parallel_decode_by_token() -> None:
    with cluster(Side(tp=2), Side(tp=2, cp=2, context=Context.TOKENS_IN_TURN)) as instances:
        assert ok(instances.transfer(37))
        assert ok(instances.transfer(37, first_token=6))


@pytest.mark.parametrize(("prefill", "decode"), PACKED_PAIRS)
def test_small_pieces_are_packed_and_unpacked_at_the_right_place(prefill: Side, decode: Side) -> None:
    """Rings of two slots of 1,000 bytes: slots are reused, and pieces are cut at slot ends."""
    shape = StagingShape(pack_below=1 << 20, slot_nbytes=1000, window=2, num_lent=8)
    settings = {"backend": lambda options: SmallStaging(options, shape)}
    with cluster(prefill, decode, num_kv_heads=6, settings=settings) as instances:
        assert ok(instances.transfer(61))
        assert ok(instances.transfer(61, first_token=13, chunks=(20, 21, 40)))
        assert sum(rank.manager.stats.nbytes_packed for rank in instances.prefill) > 0
        assert sum(rank.manager.stats.unpack_s for rank in instances.decode) > 0


def test_the_least_memory_for_packing_is_enough() -> None:
    """A buffer to pack into, and a slot for all peers."""
    shape = StagingShape(pack_below=1 << 20, slot_nbytes=1000, window=2, num_lent=8)
    settings = {"backend": lambda options: SmallStaging(options, shape), "staging_nbytes": 2999}
    with cluster(Side(tp=2), Side(tp=1, page=8), settings=settings) as instances:
        assert ok(instances.transfer(61))
        assert {rank.manager.health().staging_nbytes for rank in (*instances.prefill, *instances.decode)} == {2000}
        assert all(rank.manager.stats.nbytes_packed for rank in instances.prefill)
    with (
        pytest.raises(ConfigError, match="staging_nbytes: expected at least 2000, two slots, found 1999"),
        cluster(Side(), Side(), settings={**settings, "staging_nbytes": 1999}),
    ):
        pass


def test_a_request_without_tokens_succeeds() -> None:
    with cluster(Side(), Side()) as instances:
        assert ok(instances.transfer(0))
