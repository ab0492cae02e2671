"""The state of a manager, for the server and for metrics. No function blocks; any thread may call it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from disagg.backends.abilities import renewal_due
from disagg.core.leases import LeaseState
from disagg.requests import Sender
from disagg.runtime.accounting import quarantined, states
from disagg.runtime.metrics import Snapshot
from disagg.runtime.runtime import Runtime


@dataclass(frozen=True)
class PeerHealth:
    """One peer: whether all its ranks are ready, and if not, why."""

    ready: bool
    problem: str


@dataclass(frozen=True)
class Health:
    """What `KVManager.health()` returns. `ok` is false for good once a thread of the manager has died, or it was closed.
    Pieces below `pack_below` bytes travel packed. `quarantined` counts requests whose rows are not proved quiet, by reason.

    `renewal_due` says why to close this manager and build another over the same pools: more requests are quarantined than
    `Limits.max_quarantined`, lost peers may still write to most of the staging slots, or the engine will never serve new
    peers again. The end of an engine proves most rows quiet.
    """

    ok: bool
    problem: str
    peers: dict[str, PeerHealth]
    num_receiving: int
    num_sending: int
    quarantined: dict[str, int]
    pack_below: int = 0
    renewal_due: str = ""


def health_of(runtime: Runtime) -> Health:
    counts: dict[str, int] = {}
    for session in runtime.requests.leased_sessions():
        state, reason = session.lease.status
        if state is LeaseState.QUARANTINED:
            counts[reason] = counts.get(reason, 0) + 1
    total, limit = sum(counts.values()), runtime.limits.max_quarantined
    too_many = f"requests with quarantined rows: {total}, of {limit} at most" if total > limit else ""
    senders = Counter(isinstance(handle, Sender) for handle in runtime.requests.open_handles())
    return Health(
        ok=not runtime.problem,
        problem=runtime.problem,
        peers={
            name: PeerHealth(runtime.directory.is_ready(name), runtime.directory.problem(name))
            for name in runtime.directory.names()
        },
        num_receiving=senders[False],
        num_sending=senders[True],
        quarantined=counts,
        pack_below=runtime.pack_below,
        renewal_due="; ".join(filter(None, (too_many, runtime.sessions.lender.problem, renewal_due(runtime.backend)))),
    )


def unready(runtime: Runtime) -> str:
    """Why new requests should not be routed here; empty if they may be. One ready configured peer is enough."""
    if runtime.problem:
        return runtime.problem
    if runtime.requests.is_draining:
        return "it takes no new requests: it is draining"
    if runtime.directory.lacks_leader:
        return "it does not know its leader: leader= or set_leader() names the address of rank 0"
    if problem := runtime.directory.leader_problem:
        return f"it has not joined its leader: {problem}"
    peers = runtime.directory.lasting()
    if not peers or any(runtime.directory.is_ready(name) for name in peers):
        return ""
    return "no configured peer is ready: " + "; ".join(f"{name}: {runtime.directory.problem(name)}" for name in peers)


def snapshot_of(runtime: Runtime) -> Snapshot:
    sessions, stats, dispatch = runtime.sessions, runtime.stats, runtime.dispatch
    names = runtime.directory.names()
    rows, requests = quarantined(runtime.requests.leased_sessions(), ended=runtime.problem != "")
    return Snapshot(
        healthy=not runtime.problem,
        peers_ready={name: runtime.directory.is_ready(name) for name in names},
        peer_ranks={name: runtime.handshake.num_connected(name) for name in names},
        pack_below=runtime.pack_below,
        peer_losses={name: runtime.connections.num_losses[name] for name in names},
        requests=states(
            list(sessions.receives.sessions.values()),
            [*list(sessions.sends.sessions.values()), *list(sessions.sends.table.offers.values())],
            num_unopened=runtime.openings.num_requests,
        ),
        quarantined_rows=rows,
        quarantined_requests=requests,
        queue_depths=runtime.queue_depths(),
        refusals={
            "connection": runtime.channel.refused,
            "hello": dispatch.num_rejected_hellos,
            "message": dispatch.num_refused_messages,
        },
        transfer_nbytes=stats.nbytes_by_way,
        phase_seconds=stats.phases,
        transfers=stats.transfers,
        transfer_failures=stats.failures,
        pieces=stats.pieces,
    )
