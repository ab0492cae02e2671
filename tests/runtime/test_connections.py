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
from disagg.runtime.connections import (
    MAX_ATTEMPTS,
    MAX_CONNECTING,
    MAX_FENCE_S,
    PROCESS_CHECK_S,
    RENEW_AFTER_S,
    RENEW_AGAIN_S,
    Connections,
)
from disagg.runtime.handshake import Peer

PEER, OTHER = PeerRank("prefill", 0), PeerRank("prefill", 1)
LATE = 1000.0
"""By then the pauses between two fences are at their longest."""


class Fences:
    """Connections that have lost one rank. `times` are those of the fences, which answer as `answers` says, or are not quiet.
    `quiet`: the ranks that were proved quiet. `unproved`: those that something waits for.
    """

    def __init__(self, process: Any) -> None:
        self.times: list[float] = []
        self.now = 0.0
        self.quiet: list[PeerRank] = []
        self.answers: dict[PeerRank, Fence | OSError] = {}
        self.unproved = {(PEER, 1), (OTHER, 1)}
        nothing: Any = SimpleNamespace(
            me="decode/0",
            peer=lambda _: Peer(),
            peers=list,
            prune=lambda: None,
            have_ended=lambda: False,
            is_direct=lambda *_: False,
            peer_lost=lambda *_, **__: None,
            lender=SimpleNamespace(problem="", has_none=False),
        )
        nothing.disconnect = lambda peer, _: SimpleNamespace(engine=peer, process=process)
        nothing.unproved = lambda: self.unproved
        nothing.peer_quiet = lambda peer, **_: self.quiet.append(peer)
        self.connections = Connections(
            backend=self,  # type: ignore[arg-type]
            handshake=nothing,
            peers=nothing,
            sessions=nothing,
            processes=nothing,
            command=lambda _: None,
            on_connected=lambda _: None,
            renewal_due=lambda: "",
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


@pytest.mark.parametrize("process", [None, SimpleNamespace(has_ended=lambda: True)])
def test_a_lost_rank_that_nothing_waits_for_is_forgotten(process: Any) -> None:
    """Of ranks of other hosts no proof comes, and each keeps what the engine knows of it."""
    fences = Fences(process)
    fences.connections.lose(Lost(OTHER, 1, 0, "it is silent"), fences.now)
    fences.run(LATE)
    assert fences.connections.num_fencing == 2
    fences.unproved = {(OTHER, 1)}
    fences.run(LATE + 2 * MAX_FENCE_S)
    assert fences.connections.num_fencing == 1
    fences.unproved = set()
    fences.run(LATE + 4 * MAX_FENCE_S)
    assert fences.connections.num_fencing == 0
    assert fences.run(LATE + 60) == []


def test_a_rank_whose_process_may_go_on_here_is_fenced_until_it_is_quiet() -> None:
    """Its fence also shuts the connections of a process that executes another program."""
    fences = Fences(SimpleNamespace(has_ended=lambda: False))
    fences.unproved = set()
    fences.run(LATE)
    assert fences.connections.num_fencing == 1


def test_an_engine_that_raises_when_it_is_asked_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def ask() -> str:
        raise SystemExit("an engine of a third party's")

    fences = Fences(None)
    fences.connections._renewal_due = ask
    assert fences.run(LATE)
    assert "whether the engine must be started again is unknown: SystemExit" in caplog.text


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


class Attempts:
    """Connections to ranks of an instance `bad`, which do not answer before `go_on`, and to `OTHER`, which sets `connected`."""

    def __init__(self, num_bad: int) -> None:
        self.go_on, self.connected = threading.Event(), threading.Event()
        self.commands: list[Callable[[float], None]] = []
        self.tried: list[object] = []
        self.bad = [PeerRank("bad", number) for number in range(num_bad)]
        self.peers = {rank: Peer() for rank in (*self.bad, OTHER)}
        given: Any = SimpleNamespace(
            me="decode/0", peer=self.peers.__getitem__, connecting=self._attempt, refuse=lambda *_, **__: None
        )
        self.connections = Connections(
            backend=given,
            handshake=given,
            peers=given,
            sessions=given,
            processes=given,
            command=self.commands.append,
            on_connected=lambda _: None,
            renewal_due=lambda: "",
        )

    def _attempt(self, rank: PeerRank, welcome: object) -> Callable[[], None]:
        def run() -> None:
            self.tried.append(welcome)
            if rank.instance == "bad":
                self.go_on.wait(60)
                raise DisaggError("no byte from the peer")
            self.connected.set()

        return run

    def connect(self, *ranks: PeerRank, welcome: object = None) -> None:
        for rank in ranks:
            self.connections.connect(Ready(rank, 1, welcome))  # type: ignore[arg-type]

    def finish(self) -> None:
        """Wait for the attempts, and carry out what they hand over."""
        self.connections.join(60)
        while self.commands:
            self.commands.pop(0)(0.0)


def test_ranks_that_could_not_be_connected_hold_up_no_others() -> None:
    """Such as those whose engine a firewall cuts off: each takes as long as the engine waits for a first byte."""
    attempts = Attempts(2 * MAX_CONNECTING)
    attempts.go_on.set()
    attempts.connect(*attempts.bad)
    attempts.finish()
    attempts.go_on.clear()
    attempts.connect(*attempts.bad, OTHER)
    assert attempts.connected.wait(60)
    attempts.go_on.set()
    attempts.connections.join(60)


def test_a_rank_that_connects_again_and_again_has_few_attempts_and_holds_up_no_others() -> None:
    """Each would otherwise wait in a thread of its own, and all of them before a rank that was never tried."""
    attempts = Attempts(MAX_CONNECTING // 2)
    before = threading.active_count()
    for number in range(9):
        for rank in attempts.bad:
            attempts.peers[rank].connecting = None  # lost
            attempts.connect(rank, welcome=number)
    assert threading.active_count() - before == MAX_ATTEMPTS * len(attempts.bad)
    attempts.connect(OTHER, welcome="other")
    assert attempts.connected.wait(60)
    attempts.go_on.set()
    while any(attempts.peers[rank].num_attempts for rank in attempts.bad):
        attempts.finish()
    newest = [welcome for welcome in attempts.tried if welcome == 8]
    assert len(newest) == len(attempts.bad), "the newest is tried once"
    assert len(attempts.tried) <= 1 + (MAX_ATTEMPTS + 1) * len(attempts.bad)


class Renewed(Fences):
    """The engine proves that ranks of other hosts are quiet once it has been started again. It is due while `due`."""

    def __init__(self) -> None:
        self.renewed: list[float] = []
        self.unreachable: list[PeerRank] = []
        self.due = self.engine_due = ""
        self.starts = self.has_another = True
        self.closed: list[PeerRank] = []
        super().__init__(None)
        self.ranks = {OTHER: Peer(remote=SimpleNamespace(engine=OTHER, process=None))}  # type: ignore[arg-type]
        given: Any = self.connections._sessions
        self.given = given
        self.given.peers = lambda: list(self.ranks.items())
        self.given.are_idle = True
        self.given.sends = SimpleNamespace(peer_quiet=lambda *_, **__: None)
        self.given.renewed = lambda: None
        self.given.peer_closed = lambda peer, **_: self.closed.append(peer)
        self.given.start_anew = lambda peer, *_: self.unreachable.append(peer)
        self.connections._renewal_due = lambda: self.due

    def renewal_due(self) -> str:
        return self.engine_due

    def renew(self) -> bool:
        self.renewed.append(self.now)
        if not self.starts:
            raise DisaggError("no device")
        self.answers[PEER] = Fence.CLOSED
        return self.has_another

    def is_renewed(self, peer: Any) -> bool:
        del peer
        return bool(self.renewed)

    def reads_no_more(self, peer: Any) -> bool:
        return self.is_renewed(peer)


def test_an_engine_that_is_due_is_started_again_between_requests(caplog: pytest.LogCaptureFixture) -> None:
    fences = Renewed()
    fences.run(5.0)
    assert not fences.renewed
    fences.due, fences.given.are_idle = "2 of 3 slots are lost", False
    fences.run(50.0)
    assert not fences.renewed
    assert "the engine must be closed and started again: 2 of 3 slots" in caplog.text
    fences.given.are_idle = True
    fences.run(60.0)
    assert fences.renewed == [pytest.approx(50.0, abs=PROCESS_CHECK_S)]
    assert fences.unreachable == [OTHER]
    assert set(fences.closed) == {PEER}
    assert fences.connections.num_fencing == 1, "what this side had sent may still land"
    assert fences.connections.num_renewals == 1


@pytest.mark.parametrize("lacking", ["slots", "engine"])
def test_an_engine_that_serves_no_new_request_is_started_again_after_a_while(lacking: str) -> None:
    fences = Renewed()
    fences.given.are_idle = False
    fences.run(5.0)
    fences.due = "it serves nobody"
    if lacking == "slots":
        fences.given.lender.has_none = True
    else:
        fences.engine_due = fences.due
    fences.run(5.0 + RENEW_AFTER_S - PROCESS_CHECK_S)
    assert not fences.renewed
    fences.run(60.0)
    assert len(fences.renewed) == 1


def test_rows_that_the_former_engine_read_are_given_back_with_its_connections() -> None:
    fences, unread = Renewed(), list[PeerRank]()
    fences.given.sends = SimpleNamespace(peer_quiet=lambda peer, **_: unread.append(peer))
    fences.connections.lose(Lost(OTHER, 1, 0, "it is silent"), 1.0)
    assert not unread, "the engine that reads them goes on"
    fences.due = "2 of 3 slots are lost"
    fences.run(5.0)
    assert fences.renewed
    assert unread == [PEER, OTHER], "lost before"
    fences.connections.lose(Lost(OTHER, 1, 0, "this rank has started its engine again"), 5.0)
    assert unread == [PEER, OTHER, OTHER]


def test_pauses_between_renewals_that_do_not_help_double(caplog: pytest.LogCaptureFixture) -> None:
    fences = Renewed()
    fences.run(5.0)
    fences.due, fences.starts = "2 of 3 slots are lost", False
    fences.run(500.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(fences.renewed)]
    assert pauses == [pytest.approx(RENEW_AGAIN_S * factor, abs=1) for factor in (1, 2, 4)]
    assert "the engine does not start again" in caplog.text
    assert fences.connections.num_renewals == 0
    fences.due = ""
    fences.run(501.0)
    assert fences.connections._renew_again_s == RENEW_AGAIN_S


def test_the_wait_for_open_requests_begins_when_no_new_one_is_served() -> None:
    fences = Renewed()
    fences.given.are_idle, fences.due = False, "3 of 4 slots are lost"
    fences.run(100.0)
    fences.given.lender.has_none = True
    fences.run(105.0)
    fences.given.lender.has_none = False
    fences.run(106.0)
    fences.given.lender.has_none = True
    fences.run(106.0 + RENEW_AFTER_S - PROCESS_CHECK_S)
    assert not fences.renewed
    fences.run(107.0 + RENEW_AFTER_S)
    assert len(fences.renewed) == 1


def test_engines_that_cannot_be_started_again_are_left_alone() -> None:
    """Of those that `auto` has, for example."""
    fences = Renewed()
    fences.due, fences.has_another = "2 of 3 slots are lost", False
    fences.run(10.0)
    assert fences.renewed
    assert fences.connections.num_renewals == 0
    assert fences.unreachable == []


def test_ranks_that_are_not_connected_here_connect_again_as_well() -> None:
    """They may have connected to the engine, which is no more."""
    fences = Renewed()
    fences.ranks[PeerRank("new", 0)] = Peer()
    fences.connections.renew(fences, 0.0)
    assert fences.unreachable == [OTHER, PeerRank("new", 0)]
