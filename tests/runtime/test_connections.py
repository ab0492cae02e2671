"""When lost ranks are fenced, and what a fence that fails costs."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.backends.base import Fence
from disagg.core.errors import DisaggError
from disagg.protocol.peer_effects import Lost, Ready
from disagg.protocol.types import PeerRank
from disagg.runtime.connections import MAX_CONNECTING, MAX_FENCE_S, PROCESS_CHECK_S, Connections
from disagg.runtime.handshake import Peer

PEER, OTHER = PeerRank("prefill", 0), PeerRank("prefill", 1)
LATE = 1000.0
"""By then the pauses between two fences are at their longest."""


class Fences:
    """Connections that have lost one rank. `times` are those of the fences, which answer as `answers` says, or are not quiet.
    `quiet`: the ranks that were proved quiet.
    """

    def __init__(self, process: Any) -> None:
        self.times: list[float] = []
        self.now = 0.0
        self.quiet: list[PeerRank] = []
        self.answers: dict[PeerRank, Fence | OSError] = {}
        nothing: Any = SimpleNamespace(
            me="decode/0",
            peer=lambda _: Peer(),
            peers=list,
            prune=lambda: None,
            have_ended=lambda: False,
            is_direct=lambda *_: False,
            peer_lost=lambda *_, **__: None,
            lender=SimpleNamespace(problem=""),
        )
        nothing.disconnect = lambda peer, _: SimpleNamespace(engine=peer, process=process)
        nothing.peer_quiet = lambda peer, **_: self.quiet.append(peer)
        self.connections = Connections(
            backend=self,  # type: ignore[arg-type]
            handshake=nothing,
            peers=nothing,
            sessions=nothing,
            processes=nothing,
            command=lambda _: None,
            on_connected=lambda _: None,
        )
        self.connections.lose(Lost(PEER, 1, 0, "it is silent"), self.now)

    def fence(self, engine: PeerRank, *, epoch: int) -> Fence:
        assert epoch == 1
        self.times.append(self.now)
        answer = self.answers.get(engine, Fence.UNKNOWN)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def run(self, until: float) -> list[float]:
        """The times of the fences until then."""
        self.times.clear()
        while (at := self.connections.next_tick) < until:
            self.now = max(self.now, at)
            self.connections.tick(self.now)
        return list(self.times)


@pytest.mark.parametrize("process", [None, SimpleNamespace(has_ended=lambda: False)])
def test_a_rank_that_lives_or_is_elsewhere_is_fenced_less_and_less_often(process: Any) -> None:
    times = Fences(process).run(LATE)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses == pytest.approx(sorted(pauses))
    assert pauses[-1] == pytest.approx(MAX_FENCE_S)


def test_ranks_that_are_fenced_for_long_share_a_pass() -> None:
    """Thousands of them would each wake the control thread every 5 s, which then looks at all."""
    fences = Fences(None)
    fences.run(1.7)
    fences.connections.lose(Lost(OTHER, 1, 0, "it is silent"), 1.7)
    fences.run(LATE)
    times = fences.run(LATE + 4 * MAX_FENCE_S)
    assert len(times) == 2 * len(set(times)) == 8


def test_a_rank_is_fenced_soon_after_its_process_ends_however_long_it_was_silent() -> None:
    process = SimpleNamespace(has_ended=lambda: False)
    fences = Fences(process)
    fences.run(LATE)
    process.has_ended = lambda: True
    times = fences.run(LATE + 60)
    assert times[0] - LATE <= PROCESS_CHECK_S
    assert sum(at - times[0] < 1 for at in times) > 3, "the kernel may take a while to free what the process had"
    assert times[-1] - times[-2] == pytest.approx(MAX_FENCE_S)


class Asked(Fences):
    def renewal_due(self) -> str:
        raise SystemExit("an engine of a third party's")


def test_an_engine_that_raises_when_it_is_asked_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert Asked(None).run(LATE)
    assert "the engine cannot say whether that is so: SystemExit" in caplog.text


def test_a_fence_without_a_descriptor_proves_nothing_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    fences = Fences(None)
    fences.connections.lose(Lost(OTHER, 1, 0, "it is silent"), fences.now)
    fences.answers = {PEER: OSError(errno.EMFILE, os.strerror(errno.EMFILE)), OTHER: Fence.QUIET}
    fences.run(LATE)
    assert fences.quiet == [OTHER]
    assert fences.connections.num_fencing == 1
    assert f"fencing {PEER}: OSError: [Errno 24] Too many open files" in caplog.text
    fences.answers[PEER] = Fence.QUIET
    fences.run(LATE + 2 * MAX_FENCE_S)
    assert fences.quiet == [OTHER, PEER]
    assert fences.connections.num_fencing == 0


def test_ranks_that_could_not_be_connected_hold_up_no_others() -> None:
    """Such as those whose engine a firewall cuts off: each takes as long as the engine waits for a first byte."""
    go_on, connected, commands = threading.Event(), threading.Event(), list[Callable[[float], None]]()
    peers = {PeerRank("bad", number): Peer() for number in range(2 * MAX_CONNECTING)} | {OTHER: Peer()}

    def attempt(rank: PeerRank) -> Callable[[], None]:
        def run() -> None:
            if rank.instance == "bad":
                go_on.wait(60)
                raise DisaggError("no byte from the peer")
            connected.set()

        return run

    handshake: Any = SimpleNamespace(me="decode/0", peer=peers.__getitem__, connecting=lambda rank, _: attempt(rank))
    given: Any = SimpleNamespace(refuse=lambda *_, **__: None)
    connections = Connections(
        backend=given,
        handshake=handshake,
        peers=given,
        sessions=given,
        processes=given,
        command=commands.append,
        on_connected=lambda _: None,
    )

    def connect(*ranks: PeerRank) -> None:
        for rank in ranks:
            connections.connect(Ready(rank, 1, None))  # type: ignore[arg-type]

    bad = [rank for rank in peers if rank.instance == "bad"]
    go_on.set()
    connect(*bad)
    connections.join(60)
    for command in commands:
        command(0.0)
    go_on.clear()
    connect(*bad, OTHER)
    assert connected.wait(60)
    go_on.set()
    connections.join(60)
