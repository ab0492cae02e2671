"""Each side of a request says where its time went, and the receiver knows what its writer did."""

from __future__ import annotations

import asyncio
import threading

import pytest

from disagg import new_request_id
from disagg.backends.base import StagingShape
from disagg.requests import Receiver, Sender
from disagg.transfer import unpacking
from disagg.transfer.jobs import Unpack
from tests.manager.test_peers import until
from tests.manager.test_transfers import SmallStaging
from tests.support.cluster import DEADLINE_S, Cluster, Side, cluster, receive, send
from tests.support.inside import depth

TRANSFER = ("bind", "pack", "post", "wire")
PACKING = StagingShape(pack_below=1 << 20, slot_nbytes=1000, window=2, num_lent=8)


def begin(instances: Cluster) -> tuple[Receiver, list[Sender]]:
    """Start a request from every prefill rank to one decode rank."""
    request, to = new_request_id(), instances.decode[0]
    receiver = receive(to, request, instances.pages(to, 61), need=(0, 61))
    return receiver, [send(rank, request, instances.pages(rank, 61), 61) for rank in instances.prefill]


@pytest.mark.parametrize("verify", ["off", "full"])
def test_phases_add_up_on_both_sides(verify: str) -> None:
    settings = {"backend": lambda options: SmallStaging(options, PACKING), "verify": verify}
    with cluster(Side(tp=2), Side(), settings=settings) as instances:
        receiver, senders = begin(instances)
        for handle in (receiver, *senders):
            assert handle.wait(timeout_s=DEADLINE_S).ok
            timeline = handle.timeline
            assert timeline.total_s == pytest.approx(sum(timeline.phases.values()))
            assert min(timeline.phases.values()) >= 0
            assert timeline.wake_s > 0
        writers = [[sender.timeline.phases[phase] for phase in TRANSFER] for sender in senders]
        assert [receiver.timeline.phases[phase] for phase in TRANSFER] in [pytest.approx(each) for each in writers]
        assert all(sender.timeline.pack_s > 0 and sender.timeline.handover_s > 0 for sender in senders)
        for rank, figures in zip(instances.prefill, writers, strict=True):  # the sums over all transfers: here there is one
            stats = rank.manager.stats
            until(lambda: stats.transfers == 1)  # noqa: B023 (it is called before the next turn)
            assert [stats.phases[phase] for phase in TRANSFER] == pytest.approx(figures)


def test_unpacking_after_the_writers_last_message_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = StagingShape(pack_below=1 << 20, slot_nbytes=1 << 20, window=2, num_lent=8)
    with cluster(Side(), Side(), settings={"backend": lambda options: SmallStaging(options, shape)}) as instances:
        go_on, scatter = threading.Event(), unpacking.scatter

        def late(unpack: Unpack) -> None:
            assert go_on.wait(DEADLINE_S)
            scatter(unpack)

        monkeypatch.setattr(unpacking, "scatter", late)
        receiver, (sender,) = begin(instances)
        until(lambda: receiver._ending.moments.landed_at > 0)
        go_on.set()
        assert receiver.wait(timeout_s=DEADLINE_S).ok
        assert receiver.timeline.unpack_s > 0
        assert sender.wait(timeout_s=DEADLINE_S).ok


def test_the_wake_up_is_noted_however_the_server_learns_of_the_end() -> None:
    with cluster(Side(), Side()) as instances:
        receiver, (sender,) = begin(instances)
        until(lambda: depth(instances.decode[0].manager, "events") == 1)
        assert receiver.timeline.wake_s == 0
        assert [event.lease for event in instances.decode[0].manager.events()] == [receiver.lease]
        assert receiver.timeline.wake_s > 0
        until(lambda: sender.poll() is not None)
        assert sender.timeline.wake_s > 0

        async def ended(handle: Receiver) -> None:
            await handle

        receiver, _ = begin(instances)
        asyncio.run(ended(receiver))
        assert receiver.timeline.wake_s > 0


def test_a_request_that_failed_has_a_timeline_too() -> None:
    with cluster(Side(), Side()) as instances:
        rank = instances.decode[0]
        receiver = receive(rank, new_request_id(), instances.pages(rank, 8), need=(0, 8))
        receiver.abort("no longer wanted")
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
        assert receiver.timeline.wait_s + receiver.timeline.wake_s == pytest.approx(receiver.timeline.total_s)
