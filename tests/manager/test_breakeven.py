"""Where packing begins to pay, as it is found when ranks are connected; no test rests on how fast anything is."""

from __future__ import annotations

import dataclasses
import urllib.request
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.backends.base import BackendOptions, Op, RemotePeer, StagingShape, TransferStatus
from disagg.backends.local import LocalBackend, LocalTransfer
from disagg.core.copies import CopyBatch
from disagg.core.errors import BackendError
from disagg.core.memory import CPU, MemoryRegion
from disagg.runtime import breakeven
from disagg.runtime.breakeven import BATCH_NBYTES, BELIEVED, BreakEven, Origin, Threshold, break_even, measured_sizes
from disagg.transfer.staging import RemoteRing, Ring
from tests.support.cluster import Side, cluster

SHAPE = StagingShape(pack_below=4321, slot_nbytes=BATCH_NBYTES, num_slots=2, num_rings=2, measure=True)
DECLARED = Threshold(4321, Origin.DECLARED)
COPY_S = 1e-4
SIZES = measured_sizes(64 << 10, BATCH_NBYTES)


@given(st.integers(1, 1 << 30), st.sampled_from([BATCH_NBYTES, 64 << 20]))
def test_sizes_that_are_measured_are_around_what_is_declared_and_divide_a_batch(declared: int, batch: int) -> None:
    sizes = measured_sizes(declared, batch)
    assert list(sizes) == sorted(set(sizes))
    assert all(batch % size == 0 and size < batch for size in sizes)
    if 8 <= declared <= batch // 8:
        assert declared // BELIEVED <= sizes[0] <= declared <= sizes[1] < 2 * declared <= sizes[2]


@given(st.floats(1e-8, 1e-3))
def test_where_every_piece_costs_the_same_the_break_even_is_that_over_the_cost_of_a_byte(piece_s: float) -> None:
    excess = {size: piece_s * BATCH_NBYTES / size for size in SIZES}
    assert break_even(excess, COPY_S) == pytest.approx(piece_s / (COPY_S / BATCH_NBYTES), rel=1e-6)


@given(st.lists(st.floats(-1e-2, 1.0), min_size=len(SIZES), max_size=len(SIZES)), st.floats(1e-7, 1e-2), st.floats(1, 10))
def test_whatever_noise_there_is_dearer_pieces_have_no_smaller_break_even_and_dearer_copies_no_larger_one(
    excess: list[float], copy_s: float, factor: float
) -> None:
    found = break_even(dict(zip(SIZES, excess, strict=True)), copy_s)
    assert found > 0
    dearer = dict(zip(SIZES, (each * factor if each > 0 else each for each in excess), strict=True))
    assert break_even(dearer, copy_s) >= found * (1 - 1e-9)
    assert break_even(dict(zip(SIZES, excess, strict=True)), copy_s * factor) <= found * (1 + 1e-9)


class Counting(LocalBackend):
    """The `local` engine, which says what it was given to write, and may be made to fail or to hang."""

    def __init__(self, outcome: TransferStatus = TransferStatus.DONE) -> None:
        super().__init__(BackendOptions())
        self.outcome = outcome
        self.written: list[tuple[int, int]] = []

    def submit(self, op: Op, peer: RemotePeer, copies: CopyBatch) -> Any:
        if self.outcome is TransferStatus.DONE:
            ends = copies.destination + copies.nbytes
            self.written.append((int(copies.destination.min()), int(ends.max())))
            return super().submit(op, peer, copies)
        return Ending(self.outcome)


class Ending(LocalTransfer):
    """A transfer that is, and stays, at one status."""

    def __init__(self, outcome: TransferStatus) -> None:
        super().__init__()
        self._outcome = outcome
        self.error = None

    def poll(self) -> TransferStatus:
        return self._outcome


@dataclasses.dataclass
class Pair:
    """Two engines, and the ring of one as the other sees it."""

    engine: Counting
    peer: RemotePeer
    ring: RemoteRing
    break_even: BreakEven
    memory: list[Any]

    def towards(self, ring: RemoteRing | None) -> Threshold:
        return self.break_even.towards(self.peer, ring, who="a to b", link="here")


def pair(outcome: TransferStatus = TransferStatus.DONE, *, told: bool = False, shape: StagingShape = SHAPE) -> Pair:
    nbytes = shape.slot_nbytes * shape.num_slots
    memory = [np.full(nbytes, value, np.uint8) for value in (1, 0)]
    regions = [MemoryRegion(int(each.__array_interface__["data"][0]), nbytes) for each in memory]
    engines = Counting(outcome), LocalBackend(BackendOptions())
    for engine, region in zip(engines, regions, strict=True):
        engine.register([region])
    peer = engines[0].connect(engines[1].endpoint(), epoch=1)
    ring = RemoteRing(Ring(regions[1].address, shape.slot_nbytes, shape.num_slots), tuple(peer.regions), first=7)
    return Pair(engines[0], peer, ring, BreakEven(engines[0], shape, regions[0], given=told), memory)


def test_it_is_measured_in_one_slot_of_the_ring_which_is_free_again_and_once_for_a_link() -> None:
    made = pair()
    found = made.towards(made.ring)
    assert found.origin is Origin.MEASURED
    assert SHAPE.pack_below // BELIEVED <= found.nbytes <= SHAPE.pack_below * BELIEVED
    last = made.ring.ring.slot(SHAPE.num_slots - 1)
    assert min(start for start, _ in made.engine.written) >= last
    assert max(stop for _, stop in made.engine.written) <= last + SHAPE.slot_nbytes
    assert [made.ring.take(), made.ring.take(), made.ring.take()] == [(0, 8), (1, 9), None]
    made.engine.written.clear()
    assert made.towards(made.ring) == found
    assert made.engine.written == []


@pytest.mark.parametrize("outcome", [TransferStatus.FAILED, TransferStatus.UNSETTLED, TransferStatus.PENDING])
def test_what_cannot_be_measured_is_as_declared_and_its_slot_is_never_used(
    outcome: TransferStatus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(breakeven, "TIMEOUT_S", 0.01)
    made = pair(outcome)
    assert made.towards(made.ring) == DECLARED
    assert made.ring.take() == (0, 8)
    assert made.ring.take() is None, "something may still be written to the other slot"
    assert "a to b: pieces below 4321 bytes (declared) travel packed, as it could not be measured" in caplog.text
    made.engine.outcome = TransferStatus.DONE
    again = pair()
    assert made.break_even.towards(made.peer, again.ring, who="a", link="here") == DECLARED, "in memory that is not the peer's"
    fresh = RemoteRing(made.ring.ring, tuple(made.peer.regions))
    assert made.towards(fresh).origin is Origin.MEASURED, "a failure is not remembered"


def test_nothing_is_measured_where_nobody_wants_it_or_nothing_could_be() -> None:
    for shape, told, expected in (
        (dataclasses.replace(SHAPE, measure=False), True, Threshold(4321, Origin.SET)),
        (dataclasses.replace(SHAPE, measure=False), False, DECLARED),
        (dataclasses.replace(SHAPE, slot_nbytes=BATCH_NBYTES - 1), False, DECLARED),
        (dataclasses.replace(SHAPE, num_slots=1), False, DECLARED),
    ):
        made = pair(told=told, shape=shape)
        assert made.towards(made.ring) == expected
        assert made.engine.written == []
    made = pair()
    assert made.towards(None) == DECLARED
    assert BreakEven(made.engine, SHAPE, None, given=True).unmeasured == Threshold(0, Origin.SET)


class Packer:
    """Memory whose packing takes what it is said to."""

    nbytes = 1 << 18

    def __init__(self) -> None:
        self.asked: list[int] = []

    def seconds(self, address: int) -> float:
        self.asked.append(address)
        return 1e-4


def test_packing_is_measured_where_slots_are_and_as_much_at_a_time_as_tells_something_there() -> None:
    made, packer = pair(), Packer()
    source = MemoryRegion(int(made.memory[0].__array_interface__["data"][0]), made.memory[0].nbytes)
    made.break_even = BreakEven(made.engine, SHAPE, source, given=False, gather=packer)
    assert made.towards(made.ring).origin is Origin.MEASURED
    assert set(packer.asked) == {source.address, source.address + SHAPE.slot_nbytes}
    assert {stop - start for start, stop in made.engine.written} == {packer.nbytes}


def test_where_packing_cannot_be_measured_no_slot_is_taken_for_it(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Packer):
        def seconds(self, address: int) -> float:
            raise BackendError("no room on GPU 0")

    made = pair()
    made.break_even = BreakEven(made.engine, SHAPE, made.break_even._source, given=False, gather=Full())
    assert made.towards(made.ring) == DECLARED
    assert "could not be measured: no room on GPU 0" in caplog.text
    assert made.engine.written == []
    assert made.ring.num_free == SHAPE.num_slots


def test_a_link_that_is_so_slow_that_measuring_would_hold_up_its_peers_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakeven, "MOST_S", 0.0)
    made = pair()
    assert made.towards(made.ring) == DECLARED
    assert len(made.engine.written) == 2
    assert made.ring.num_free == SHAPE.num_slots


def test_what_is_known_of_one_device_of_a_host_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    links, towards = list[Any](), BreakEven.towards

    def noting(self: BreakEven, *given: Any, link: Any, **named: Any) -> Threshold:
        links.append(link)
        return towards(self, *given, link=link, **named)

    monkeypatch.setattr(BreakEven, "towards", noting)
    with cluster(Side(), Side(), settings={"backend": Measured}) as made:
        assert all(event.ok for event in made.transfer(5))
    assert links == [(made.prefill[0].manager.backend.transport, "127.0.0.1", frozenset({CPU}))] * 2


class Measured(LocalBackend):
    """The `local` engine, with staging that is measured."""

    @property
    def staging(self) -> StagingShape:
        return SHAPE


def test_a_manager_measures_before_a_peer_is_ready_unless_it_is_told_and_says_what_it_found() -> None:
    with cluster(Side(tp=2), Side(tp=1), settings={"backend": Measured, "metrics_port": 0}) as made:
        assert all(event.ok for event in made.transfer(37))
        (rank,) = made.decode
        found = rank.manager.health().peers["prefill-0"].pack_below
        assert sorted(found) == [0, 1]
        assert {threshold.origin for threshold in found.values()} == {Origin.MEASURED}
        assert rank.manager.metrics_url is not None
        with urllib.request.urlopen(rank.manager.metrics_url) as page:
            assert f'disagg_pack_below_bytes{{peer="prefill-0"}} {float(found[0].nbytes)}' in page.read().decode()
    with cluster(Side(), Side(), settings={"backend": Measured, "pack_below": 99}) as made:
        assert made.prefill[0].manager.health().peers["decode-0"].pack_below == {0: Threshold(99, Origin.SET)}
    with cluster(Side(), Side()) as made:
        assert made.prefill[0].manager.health().peers["decode-0"].pack_below == {0: Threshold(0, Origin.DECLARED)}
