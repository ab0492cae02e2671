"""Drives resident ranks through a case: fill, run, verify every byte, measure the engine alone, and report."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from disagg.backends import registry as backends
from disagg.commands.bench.fleet import Progress, Ranks, Remote, connected, end, rank_config, started
from disagg.commands.bench.report import Alone, Row, Sample, mechanism_of, summarise
from disagg.commands.bench.timelines import RankRun
from disagg.commands.cases.instructions import (
    Block,
    Check,
    Clear,
    Collect,
    Copied,
    Cpu,
    Describe,
    Description,
    Difference,
    Direction,
    Done,
    Fault,
    Fill,
    Item,
    Listen,
    Listening,
    Memcpy,
    Move,
    Moved,
    MoveRaw,
    Peer,
    Raw,
    ReadCpu,
    RunReport,
    Start,
    WaitReady,
)
from disagg.commands.cases.sides import Side
from disagg.commands.cases.workload import Case, Planned, blocks_of, check_rank, items_of, planned
from disagg.commands.rank.rank import boot_id
from disagg.core.address import parse_address
from disagg.core.errors import ConfigError
from disagg.manager import new_request_id
from disagg.models import ModelSpec, load_model

Observe = Callable[[Sequence[RankRun]], None]
MIN_CEILINGS = 10
LEAD_S = 0.02
"""Time between the command to start and the common start of all ranks."""


def check_case(case: Case) -> None:
    """Raises `ConfigError` if no rank could run the case."""
    load_model(case.model, num_layers=case.num_layers)
    if case.backend not in ("auto", *backends.available()):
        raise ConfigError(f"backend: expected 'auto' or one of {', '.join(backends.available())}, found {case.backend!r}")
    rank_config(case, "prefill", 0, None)


@dataclass(frozen=True)
class Prepared:
    case: Case
    ranks: Ranks
    sent: Mapping[Remote, tuple[Item, ...]]
    received: Mapping[Remote, tuple[Item, ...]]
    blocks: Mapping[Remote, tuple[Block, ...]]
    planned: Planned

    @property
    def nbytes(self) -> int:
        return sum(self.planned.nbytes.values())

    @property
    def names(self) -> tuple[str, str]:
        return self.ranks.sources[0].about.name, self.ranks.destinations[0].about.name


def run_case(case: Case, ranks: Ranks, progress: Progress, observe: Observe) -> Row:
    """Raises `RankFailed` or `RankDied` if a rank fails, `ConfigError` if the ranks do not match the case."""
    prepared = _prepare(case, ranks, progress)
    samples: list[Sample] = []
    ceilings: list[Alone] = []
    wanted = max(MIN_CEILINGS, case.repeat) if case.ceiling else 0
    begun, last = time.monotonic(), False
    for turn in itertools.count(-case.warm_up):
        if turn == 0:
            begun = time.monotonic()
        if case.duration_s is None:
            last, of = turn + 1 == case.repeat, f"of {case.repeat}"
        else:
            elapsed_s = time.monotonic() - begun
            last, of = turn >= 0 and elapsed_s >= case.duration_s, f"after {elapsed_s:.0f} of {case.duration_s:g} s"
        progress(f"run {turn + 1} {of}" if turn >= 0 else "warming up")
        sample = _measure(prepared, observe, last=last)
        if turn >= 0 or sample.problem:
            samples.append(sample)
        if sample.problem:
            break
        due = math.ceil(wanted * (turn + 1) / case.repeat) - len(ceilings) if turn >= 0 else min(wanted, 1)
        found = [_alone(prepared) for _ in range(due)]
        ceilings += found if turn >= 0 else []
        if last:
            break
    about = ranks.ask(dict.fromkeys(ranks.all, Describe()), Description)
    return summarise(
        case,
        sources=[about[remote] for remote in ranks.sources],
        destinations=[about[remote] for remote in ranks.destinations],
        planned=prepared.planned,
        samples=samples,
        alone=Alone.median(ceilings),
    )


def _prepare(case: Case, ranks: Ranks, progress: Progress) -> Prepared:
    spec = load_model(case.model, num_layers=case.num_layers)
    for remotes, side in ((ranks.sources, case.prefill), (ranks.destinations, case.decode)):
        for remote in remotes:
            check_rank(case, spec, side, remote.about)
    sources, destinations = [r.about for r in ranks.sources], [r.about for r in ranks.destinations]
    sides = ((ranks.sources, destinations[0]), (ranks.destinations, sources[0]))
    progress("connecting")
    for remotes, peer in sides:
        ranks.run(remotes, Peer(peer.name, peer.address))
    for remotes, peer in sides:
        ranks.run(remotes, WaitReady(peer.name, case.timeout_s))
    ranks.describe()  # only now they know by which transport they reach each other
    sent = _deal(case, spec, ranks.sources, case.prefill, case.decode, prefix=0)
    received = _deal(case, spec, ranks.destinations, case.decode, case.prefill, prefix=case.prefix_hit)
    plans = planned(spec, sources, destinations, sent=list(sent.values()), received=list(received.values()))
    progress("filling the sources")
    fault = case.fault if case.fault is Fault.BYTE else None
    ranks.ask({remote: Fill(items, fault) for remote, items in sent.items()}, Done)
    blocks = {ranks.sources[n]: found for n, found in blocks_of(plans.nbytes, sources, destinations).items()}
    return Prepared(case, ranks, sent, received, blocks, plans)


def _deal(
    case: Case, spec: ModelSpec, remotes: Sequence[Remote], side: Side, peer: Side, *, prefix: int
) -> dict[Remote, tuple[Item, ...]]:
    about = remotes[0].about
    dealt = items_of(spec, side, peer, case, name=about.name, pools=about.rows, prefix=prefix)
    return dict(zip(remotes, dealt, strict=True))


def _measure(prepared: Prepared, observe: Observe, *, last: bool) -> Sample:
    """The last run verifies the sources' memory too."""
    case, ranks = prepared.case, prepared.ranks
    source, destination = prepared.names
    ids = [new_request_id() for _ in range(case.requests)]
    ranks.run(ranks.destinations, Clear())
    receiving = {r: _start(case, Direction.RECEIVE, source, _named(items, ids)) for r, items in prepared.received.items()}
    if not case.arrivals.times_s:
        ranks.ask(receiving, Done)
    killed = ranks.sources[-1] if case.fault is Fault.KILL else None
    faults = {r: case.fault if case.fault is Fault.PAGES or r is killed else None for r in ranks.sources}
    sending = {
        r: _start(case, Direction.SEND, destination, _named(items, ids), faults[r]) for r, items in prepared.sent.items()
    }
    together = {**receiving, **sending} if case.arrivals.times_s else sending
    soon = time.monotonic() + LEAD_S
    ranks.ask({r: msgspec.structs.replace(start, at=soon + r.offset_s) for r, start in together.items()}, Done)
    reports = ranks.ask(dict.fromkeys(ranks.all, Collect()), RunReport)
    problem = _first_failure(reports) or _first_difference(ranks, prepared.received, kv=case.prefill.kv)
    if last and not problem and case.fault is not Fault.BYTE:
        problem = _first_difference(ranks, prepared.sent, kv=case.prefill.kv)
    moved = sum(report.nbytes for report in reports.values())
    if not problem and moved != prepared.nbytes:
        problem = f"expected {prepared.nbytes} bytes to be written, found {moved}"
    sent, received = ([_on_one_clock(reports[r], r) for r in side] for side in (ranks.sources, ranks.destinations))
    sides = ((ranks.sources, Direction.SEND, sent), (ranks.destinations, Direction.RECEIVE, received))
    observe([_rank_run(r, way, each) for remotes, way, of in sides for r, each in zip(remotes, of, strict=True)])
    cpu_s = _by_process({remote: report.cpu_s for remote, report in reports.items()})
    return Sample.of(sent=sent, received=received, problem=problem, cpu_s=cpu_s)


def _rank_run(remote: Remote, direction: Direction, report: RunReport) -> RankRun:
    return RankRun(f"{remote.about.name}/{remote.about.rank}", direction, report)


def _cpu_s(ranks: Ranks) -> float:
    return _by_process({r: reply.seconds for r, reply in ranks.ask(dict.fromkeys(ranks.all, ReadCpu()), Cpu).items()})


def _by_process(cpu_s: Mapping[Remote, float]) -> float:
    """The sum over processes: ranks that are threads of one process all tell its time."""
    found: dict[str, float] = {}
    for remote, seconds in cpu_s.items():
        process = remote.about.process
        found[process] = max(seconds, found.get(process, 0.0))
    return sum(found.values())


def _start(case: Case, direction: Direction, peer: str, items: tuple[Item, ...], fault: Fault | None = None) -> Start:
    return Start(direction, peer, items, case.concurrency, case.timeout_s / 2, case.chunk_tokens, fault)


def _named(items: tuple[Item, ...], ids: Sequence[bytes]) -> tuple[Item, ...]:
    """An id is never reused, so every run has new ones."""
    return tuple(msgspec.structs.replace(item, request_id=ids[item.number]) for item in items)


def _on_one_clock(report: RunReport, remote: Remote) -> RunReport:
    moved = [
        msgspec.structs.replace(
            result,
            start=result.start - remote.offset_s,
            end=result.end - remote.offset_s,
            opened_at=result.opened_at - remote.offset_s,
        )
        for result in report.results
    ]
    return msgspec.structs.replace(report, results=tuple(moved))


def _first_failure(reports: Mapping[Remote, RunReport]) -> str:
    failed = [
        f"rank {remote}, request {result.number}: {result.error}"
        for remote, report in reports.items()
        for result in report.results
        if not result.ok
    ]
    return failed[0] + (f" ({len(failed) - 1} more)" if len(failed) > 1 else "") if failed else ""


def _first_difference(ranks: Ranks, items: Mapping[Remote, tuple[Item, ...]], *, kv: str | None) -> str:
    found = ranks.ask({remote: Check(of, kv) for remote, of in items.items()}, Difference)
    return next((f"rank {remote}: {reply.where}" for remote, reply in found.items() if reply.where), "")


def _alone(prepared: Prepared) -> Alone:
    """One contiguous block per pair of ranks, all at once, by the engine and by the system mechanism below its transport;
    and a copy in one rank's memory.
    """
    ranks, case = prepared.ranks, prepared.case
    _, destination = prepared.names
    before = _cpu_s(ranks)
    gbps = _moved(prepared, {r: Move(destination, blocks, case.timeout_s) for r, blocks in prepared.blocks.items()})
    cpu_s = _cpu_s(ranks) - before
    first = ranks.sources[0]
    memcpy = ranks.ask({first: Memcpy(prepared.nbytes)}, Copied)[first].gbps
    return Alone(gbps, cpu_s, memcpy, _raw(prepared))


def _raw(prepared: Prepared) -> float | None:
    """`None` if the mechanism is unknown, for GPU memory, or if the ranks do not know each other by the same process ids."""
    mechanism = mechanism_of(prepared.ranks.sources[0].about) if prepared.case.device == "cpu" else None
    if mechanism is None:
        return None
    if mechanism is Raw.SOCKET:
        return _over_sockets(prepared)
    abouts = [remote.about for remote in prepared.ranks.all]
    if any(about.boot_id != boot_id() or about.pid_namespace != abouts[0].pid_namespace for about in abouts):
        return None
    destinations = prepared.ranks.destinations
    return _moved(
        prepared,
        {
            source: MoveRaw(blocks, prepared.case.timeout_s, pids=tuple(destinations[block.rank].about.pid for block in blocks))
            for source, blocks in prepared.blocks.items()
        },
    )


def _over_sockets(prepared: Prepared) -> float:
    destinations, timeout_s = prepared.ranks.destinations, prepared.case.timeout_s
    expected: dict[int, list[tuple[int, int]]] = {}
    numbers: dict[Remote, list[int]] = {}
    for source, blocks in prepared.blocks.items():
        for block in blocks:
            of_rank = expected.setdefault(block.rank, [])
            numbers.setdefault(source, []).append(len(of_rank))
            of_rank.append((block.destination, block.nbytes))
    hosts = {rank: parse_address(destinations[rank].about.address, what="address")[0] for rank in expected}
    listens = {destinations[rank]: Listen(hosts[rank], tuple(blocks), timeout_s) for rank, blocks in expected.items()}
    ports = {remote: reply.port for remote, reply in prepared.ranks.ask(listens, Listening).items()}
    return _moved(
        prepared,
        {
            source: MoveRaw(
                blocks,
                timeout_s,
                hosts=tuple(hosts[block.rank] for block in blocks),
                ports=tuple(ports[destinations[block.rank]] for block in blocks),
                numbers=tuple(numbers[source]),
            )
            for source, blocks in prepared.blocks.items()
        },
    )


def _moved(prepared: Prepared, commands: Mapping[Remote, Move | MoveRaw]) -> float:
    soon = time.monotonic() + LEAD_S
    timed = {remote: msgspec.structs.replace(command, at=soon + remote.offset_s) for remote, command in commands.items()}
    moved = prepared.ranks.ask(timed, Moved)
    start = min(reply.start - remote.offset_s for remote, reply in moved.items())
    end = max(reply.end - remote.offset_s for remote, reply in moved.items())
    return prepared.nbytes / (end - start) / 1e9


def run(case: Case, progress: Progress, *, connect: Sequence[str] = (), observe: Observe = lambda _: None) -> Row:
    """Run one case, on new ranks or on running ones at the driver addresses `connect`. `observe` gets what the ranks did in
    each run. The row's `ending` says if ranks did not end properly.
    """
    check_case(case)
    if connect:
        with connected(connect, timeout_s=case.timeout_s) as ranks:
            return run_case(case, ranks, progress, observe)
    with started(case, progress) as ranks:
        row = run_case(case, ranks, progress, observe)
        return msgspec.structs.replace(row, ending=end(ranks, progress))
