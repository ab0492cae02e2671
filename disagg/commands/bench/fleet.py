"""The ranks of a case as the driver sees them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import msgspec
import zmq

from disagg.backends.cuda.driver import second_gpu
from disagg.commands.bench import processes
from disagg.commands.bench.processes import StartedRank
from disagg.commands.cases.instructions import AnyReply, Command, Describe, Description, Done, Exit, Failed, Reply
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, rows_needed
from disagg.commands.rank.rank import RankConfig, boot_id
from disagg.core.address import parse_address
from disagg.core.errors import ConfigError, DisaggError
from disagg.models import load_model

CHECK_S = 0.1
"""How often a waiting driver checks whether its ranks are alive."""

AReply = TypeVar("AReply", bound=Reply)
Progress = Callable[[str], None]


class RankFailed(DisaggError):
    """The message names the rank and the reason."""


class Remote:
    """`offset_s`: how far the rank's clock is ahead of the driver's."""

    def __init__(self, address: str, started: StartedRank | None) -> None:
        host, _ = parse_address(address, what="connect")
        self.address = address
        self.started = started
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        self.socket.connect(address)
        self.about: Description
        self.offset_s = 0.0

    def __str__(self) -> str:
        return self.started.name if self.started else self.address

    def send(self, command: Command) -> None:
        self.socket.send(msgspec.msgpack.encode(command))

    def receive(self, expected: type[AReply]) -> AReply:
        reply: AnyReply = _REPLIES.decode(self.socket.recv())
        if isinstance(reply, Failed):
            raise RankFailed(f"rank {self}: {reply.error}")
        if not isinstance(reply, expected):
            raise RankFailed(f"rank {self}: expected {expected.__name__}, found {type(reply).__name__}")
        return reply


_REPLIES: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


class Ranks:
    def __init__(self, sources: Sequence[Remote], destinations: Sequence[Remote], *, timeout_s: float) -> None:
        self.sources = list(sources)
        self.destinations = list(destinations)
        self.timeout_s = timeout_s

    @property
    def all(self) -> list[Remote]:
        return [*self.sources, *self.destinations]

    def ask(self, commands: Mapping[Remote, Command], expected: type[AReply]) -> dict[Remote, AReply]:
        """All ranks work at the same time. Raises `RankFailed` for the first error or after the time limit, `RankDied` if a
        rank has ended.
        """
        for remote, command in commands.items():
            remote.send(command)
        deadline = time.monotonic() + self.timeout_s
        poller = zmq.Poller()
        for remote in commands:
            poller.register(remote.socket, zmq.POLLIN)
        waiting = {remote.socket: remote for remote in commands}
        replies: dict[Remote, AReply] = {}
        while waiting:
            for socket, _ in poller.poll(int(CHECK_S * 1000)):
                remote = waiting.pop(socket)
                poller.unregister(socket)
                replies[remote] = remote.receive(expected)
            if waiting:
                self._check_alive()
            if waiting and time.monotonic() > deadline:
                raise RankFailed(f"no reply from {', '.join(map(str, waiting.values()))} within {self.timeout_s:g} s")
        return replies

    def _check_alive(self) -> None:
        for remote in self.all:
            if remote.started is not None:
                remote.started.check()

    def run(self, remotes: Sequence[Remote], command: Command) -> None:
        self.ask(dict.fromkeys(remotes, command), Done)

    def describe(self) -> None:
        """Fetch the ranks' descriptions, sort the ranks, and compare their clocks. Raises `ConfigError` if ranks are missing
        or duplicated.
        """
        for remote, about in self.ask(dict.fromkeys(self.all, Describe()), Description).items():
            remote.about = about
        for ranks in (self.sources, self.destinations):
            ranks.sort(key=lambda remote: remote.about.rank)
            expected = Side.parse(ranks[0].about.side).num_ranks
            found = [(r.about.name, r.about.rank) for r in ranks]
            if found != [(ranks[0].about.name, rank) for rank in range(expected)]:
                raise ConfigError(f"ranks: expected 0 to {expected - 1} of {ranks[0].about.name!r}, found {found}")
        for remote in self.all:
            remote.offset_s = 0.0 if remote.about.boot_id == boot_id() else self._ahead(remote)

    def _ahead(self, remote: Remote) -> float:
        tries = []
        for _ in range(9):
            before = time.monotonic()
            about = self.ask({remote: Describe()}, Description)[remote]
            after = time.monotonic()
            tries.append((after - before, about.now - (before + after) / 2))
        return min(tries)[1]


@contextmanager
def started(case: Case, progress: Progress) -> Iterator[Ranks]:
    """Ranks that still run at the end of the block are killed. Raises `RankDied`."""
    children: list[StartedRank] = []
    with ExitStack() as opened:
        opened.callback(lambda: _kill(children))
        progress(f"starting {case.prefill.num_ranks} prefill and {case.decode.num_ranks} decode ranks")
        sides = _start_by_gpu(case, children) if case.device == "cuda" else _start_alone(case, children)
        remotes = {
            role: [opened.enter_context(_closing(Remote(rank.addresses()[1], rank))) for rank in ranks]
            for role, ranks in sides.items()
        }
        ranks = Ranks(remotes["prefill"], remotes["decode"], timeout_s=case.timeout_s)
        ranks.describe()
        yield ranks


def end(ranks: Ranks, progress: Progress) -> str:
    """Returns what went wrong first, or an empty string."""
    progress("ending the ranks")
    deadline = time.monotonic() + ranks.timeout_s
    problems = []
    for remote in ranks.all:
        remote.send(Exit())
    for remote in ranks.all:
        if remote.started is not None:
            try:
                remote.started.end(until=deadline)
            except processes.RankDied as error:
                problems.append(str(error))
    return problems[0] if problems else ""


def _start_alone(case: Case, children: list[StartedRank]) -> dict[str, list[StartedRank]]:
    """`children` gets every started rank, even if a later one fails."""
    configs = [rank_config(case, role, 0, None) for role in ("prefill", "decode")]
    leaders = processes.start(configs, timeout_s=case.timeout_s)
    children += leaders
    at = {"prefill": leaders[0].addresses()[0], "decode": leaders[1].addresses()[0]}
    sides = {"prefill": [leaders[0]], "decode": [leaders[1]]}
    for role, side in (("prefill", case.prefill), ("decode", case.decode)):
        configs = [rank_config(case, role, rank, at[role]) for rank in range(1, side.num_ranks)]
        others = processes.start(configs, timeout_s=case.timeout_s)
        children += others
        sides[role] += others
    return sides


def _gpu(role: str) -> str:
    return f"cuda:{second_gpu() if role == 'decode' else 0}"


def _start_by_gpu(case: Case, children: list[StartedRank]) -> dict[str, list[StartedRank]]:
    """Each side in one process: a GPU would switch between several."""
    sides = {"prefill": case.prefill, "decode": case.decode}
    configs = [[rank_config(case, role, rank, None) for rank in range(side.num_ranks)] for role, side in sides.items()]
    started = processes.start_together(configs, timeout_s=case.timeout_s)
    children += [rank for ranks in started for rank in ranks]
    return dict(zip(sides, started, strict=True))


@contextmanager
def connected(addresses: Sequence[str], *, timeout_s: float) -> Iterator[Ranks]:
    """Ranks that an operator has started; they keep running. Raises `ConfigError` unless they are one complete prefill and
    one complete decode instance.
    """
    with ExitStack() as opened:
        remotes = [opened.enter_context(_closing(Remote(address, None))) for address in addresses]
        about = Ranks(remotes, [], timeout_s=timeout_s).ask(dict.fromkeys(remotes, Describe()), Description)
        by_role = {role: [r for r in remotes if about[r].role == role] for role in ("prefill", "decode")}
        if not all(by_role.values()):
            raise ConfigError(f"connect: expected prefill and decode ranks, found {Counter(a.role for a in about.values())}")
        ranks = Ranks(by_role["prefill"], by_role["decode"], timeout_s=timeout_s)
        ranks.describe()
        yield ranks


@contextmanager
def _closing(remote: Remote) -> Iterator[Remote]:
    try:
        yield remote
    finally:
        remote.socket.close()


def _kill(children: Sequence[StartedRank]) -> None:
    for child in children:
        child.kill()


def rank_config(case: Case, role: str, rank: int, leader: str | None) -> RankConfig:
    side, prefix = (case.prefill, 0) if role == "prefill" else (case.decode, case.prefix_hit)
    spec = load_model(case.model, num_layers=case.num_layers)
    return RankConfig.load(
        role=role,
        name=role,
        model=case.model,
        side=side,
        rank=rank,
        layers=case.num_layers,
        rows={state.name: rows_needed(state, side, case, prefix=prefix) for state in spec.states},
        leader=leader,
        backend=case.backend,
        transport=case.transport,
        devices=case.devices,
        device=_gpu(role) if case.device == "cuda" else case.device,
        verify=case.verify,
        pack_below=case.pack_below,
        driver="tcp://127.0.0.1:0",
    )
