"""A peer that holds the numbers in another format gets them converted; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from disagg import KVManager, ModelId, Pages, PeerUnreachable, new_request_id
from disagg.backends.base import StagingShape
from disagg.backends.local import LocalBackend
from disagg.protocol.types import Event
from disagg.transfer.pool_memory import GpuPacker, PoolMemory
from tests.support.cluster import DEADLINE_S, FAST, FAST_LINKS
from tests.support.host_kernels import HostMover, Spans
from tests.support.numbers import (
    BF16,
    E4M3,
    HEADS,
    HND,
    LAST,
    LAYERS,
    NHD,
    NUM_PAGES,
    PAIRS,
    REFUSED,
    Holder,
    Rank,
    check_moved,
    make_rank,
    place,
    random_numbers,
)


class SmallSlots(LocalBackend):
    """The `local` engine with slots that end inside elements."""

    @property
    def staging(self) -> StagingShape:
        return StagingShape(pack_below=1 << 10, slot_nbytes=1001, window=3, num_lent=5)


@contextmanager
def connected(
    prefill: Holder, decode: Holder, *, backend: Any = SmallSlots, ready: bool = True, **settings: Any
) -> Iterator[tuple[list[Rank], list[Rank], list[KVManager], list[KVManager]]]:
    """Two instances: their ranks, and their managers."""
    with ExitStack() as stack:
        sides: list[tuple[list[Rank], list[KVManager]]] = []
        for name, holder in (("prefill-0", prefill), ("decode-0", decode)):
            ranks = [make_rank(holder, number) for number in range(holder.tp)]
            managers: list[KVManager] = []
            for rank in ranks:
                manager = KVManager(
                    name=name, topology=rank.topology, components=[rank.component], model=ModelId("toy"), backend=backend,
                    limits=FAST, connection_limits=FAST_LINKS, leader=managers[0].address if managers else None, **settings,
                )  # fmt: skip
                stack.callback(manager.close)
                managers.append(manager)
            sides.append((ranks, managers))
        (sources, senders), (destinations, receivers) = sides
        for manager in senders:
            manager.add_peer("decode-0", address=receivers[0].address)
        for manager in receivers:
            manager.add_peer("prefill-0", address=senders[0].address)
        for manager in (*senders, *receivers) if ready else ():
            manager.wait_ready("decode-0" if manager in senders else "prefill-0", timeout_s=DEADLINE_S)
        yield sources, destinations, senders, receivers


def move(
    sides: tuple[list[Rank], list[Rank], list[KVManager], list[KVManager]],
    pages: tuple[Sequence[int], Sequence[int]],
    num_tokens: int,
    first_token: int = 0,
) -> list[Event]:
    """Send a request in two chunks. `pages` are those of both sides, of all tokens."""
    _, _, senders, receivers = sides
    request, handles = new_request_id(), []
    for manager in receivers:
        rows = {"kv": Pages(np.array(pages[1], dtype=np.int32))}
        need = {"kv": (first_token, num_tokens)}
        handles.append(manager.receiver(request, peer="prefill-0", rows=rows, need=need, deadline_s=DEADLINE_S))
    sent = []
    for manager in senders:
        sender = manager.sender(request, peer="decode-0", deadline_s=DEADLINE_S)
        for start, stop in ((0, num_tokens // 3), (num_tokens // 3, num_tokens)):
            sender.send({"kv": Pages(np.array(pages[0], dtype=np.int32))}, tokens=(start, stop))
        sender.finish()
        sent.append(sender)
    return [handle.wait(timeout_s=DEADLINE_S) for handle in (*handles, *sent)]


def check(prefill: Holder, decode: Holder, num_tokens: int, first_token: int, *, seed: int, **settings: Any) -> None:
    """Move random bits, and compare every byte of decode's pools."""
    rng = np.random.default_rng(seed)
    numbers = random_numbers(rng, prefill.dtype, num_tokens)
    pages = tuple(rng.permutation(NUM_PAGES)[: -(-num_tokens // holder.page)].tolist() for holder in (prefill, decode))
    with connected(prefill, decode, **settings) as sides:
        for rank in sides[0]:
            place(prefill, rank, numbers, pages[0], range(num_tokens))
        events = move(sides, (pages[0], pages[1]), num_tokens, first_token)
        assert [event.error for event in events if not event.ok] == []
    check_moved((prefill, decode), numbers, sides[1], pages[1], range(first_token, num_tokens))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_element_is_stored_as_the_destination_stores_it(pair: tuple[Holder, Holder]) -> None:
    check(*pair, num_tokens=29, first_token=3, seed=1)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_an_engine_that_takes_span_classes_converts_in_its_copy(pair: tuple[Holder, Holder]) -> None:
    """As `nvlink`, on the host: nothing is packed."""
    before = Spans.posted
    check(*pair, num_tokens=29, first_token=3, seed=3, backend=Spans, pack_below=0)
    assert Spans.posted > before


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_gpu_kernels_convert_what_they_pack(pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels' reference implementation. Slots end inside elements."""
    monkeypatch.setattr(PoolMemory, "packer", lambda self, shapes: GpuPacker(HostMover(), shapes))  # type: ignore[arg-type]
    before = HostMover.moved
    check(*pair, num_tokens=29, first_token=3, seed=4)
    assert HostMover.moved > before


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
def test_engines_move_what_was_converted(backend: str) -> None:
    check(*PAIRS["TP 2 to 1"], num_tokens=31, first_token=0, seed=2, backend=backend, pack_below=1 << 12)


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)

    def holder(dtype: str) -> Holder:
        scale = float(rng.choice([0.03, 0.5, 1.0, 7.0])) if dtype.startswith("float8") else 1.0
        by_head = bool(rng.integers(2)) and dtype.startswith("float8")
        by_layer: dict[int, Any] = {
            layer: scale * (layer + 1 if dtype.startswith("float8") else 1) * np.array(1 + np.arange(HEADS) if by_head else 1)
            for layer in range(LAYERS)
        }
        axes = str(rng.choice([NHD, HND, LAST]))
        v_scale = by_layer if by_head else scale
        sizes = int(rng.choice([1, 2, 4])), int(rng.choice([2, 4, 8]))
        return Holder(dtype, *sizes, axes, by_layer, v_scale, by_head=by_head)

    pair = [("float32", E4M3), (BF16, E4M3), (BF16, "float8_e5m2"), (E4M3, BF16), (BF16, "float16"), ("float16", "float32")]
    source, destination = pair[seed % len(pair)]
    num_tokens = int(rng.integers(1, 45))
    check(holder(source), holder(destination), num_tokens, int(rng.integers(0, num_tokens)), seed=seed)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_pairs_without_a_rule_are_refused_by_name(case: tuple[Holder, Holder, str]) -> None:
    prefill, decode, match = case
    with connected(prefill, decode, ready=False) as (_, _, senders, _), pytest.raises(PeerUnreachable, match=match):
        senders[0].wait_ready("decode-0", timeout_s=1.0)


def test_a_side_that_packs_nothing_is_refused_by_name() -> None:
    with (
        connected(*PAIRS["quantized"], ready=False, pack_below=0) as (_, _, senders, _),
        pytest.raises(PeerUnreachable, match=r"cannot become ready: .*'kv': expected slots on both sides.*pack_below is 0"),
    ):
        senders[0].wait_ready("decode-0", timeout_s=60.0)


def test_converted_state_cannot_be_verified() -> None:
    with connected(*PAIRS["quantized"], verify="full") as sides:
        events = move(sides, (range(8), range(8)), 29)
    assert all("expected verify='off', since it is converted on its way" in str(event.error) for event in events)
