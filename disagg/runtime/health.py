"""The state of a manager, for the server and for metrics. No function blocks; any thread may call it."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg.core.leases import LeaseState
from disagg.protocol.messages import PROTOCOL_VERSION
from disagg.requests import Sender
from disagg.runtime.accounting import quarantined, states
from disagg.runtime.metrics import Row, family
from disagg.runtime.runtime import Runtime


@dataclass(frozen=True)
class PeerHealth:
    """One peer: whether all its ranks are ready, and if not, why."""

    ready: bool
    problem: str


@dataclass(frozen=True)
class Health:
    """What `KVManager.health()` returns. `ok` is false for good once a thread of the manager has died, or it was closed.
    Pieces below `pack_below` bytes travel packed, through `staging_nbytes` bytes of memory. `quarantined` counts requests
    whose rows are not proved quiet, by reason.

    `renewal_due` says why the engine should be closed and started again: more receives are quarantined than
    `Limits.max_quarantined`, lost peers may still write to most of the staging slots, or the engine will never serve new
    peers again. The manager does so by itself if the engine can. If `renewal_due` stays, close this manager and build another
    over the same pools.
    """

    ok: bool
    problem: str
    peers: dict[str, PeerHealth]
    num_receiving: int
    num_sending: int
    quarantined: dict[str, int]
    pack_below: int = 0
    staging_nbytes: int = 0
    renewal_due: str = ""


def health_of(runtime: Runtime) -> Health:
    counts: dict[str, int] = {}
    for session in runtime.requests.leased_sessions():
        state, reason = session.lease.status
        if state is LeaseState.QUARANTINED:
            counts[reason] = counts.get(reason, 0) + 1
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
        staging_nbytes=runtime.staging_nbytes,
        renewal_due=runtime.renewal_due(),
    )


def unready(runtime: Runtime) -> str:
    """Why new requests should not be routed here; empty if they may be. One ready configured peer is enough."""
    if runtime.problem:
        return runtime.problem
    if runtime.requests.is_draining:
        return "it takes no new requests: it is draining"
    if not runtime.directory.has_leader:
        return "it does not know its leader: leader= or set_leader() names the address of rank 0"
    if problem := runtime.peers.leader_problem:
        return f"it has not joined its leader: {problem}"
    peers = runtime.directory.lasting()
    if not peers or any(runtime.directory.is_ready(name) for name in peers):
        return ""
    return "no configured peer is ready: " + "; ".join(f"{name}: {runtime.directory.problem(name)}" for name in peers)


class Reader(Collector):
    """Reads the manager at every scrape."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        me = runtime.handshake.me
        self._build = {
            "version": importlib.metadata.version("disagg"),
            "protocol": str(PROTOCOL_VERSION),
            "name": me.instance,
            "rank": str(me.rank),
            "backend": runtime.backend.name,
        }

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registration reads nothing."""
        return ()

    def collect(self) -> Iterator[Metric]:
        runtime, stats, sends = self._runtime, self._runtime.stats, self._runtime.sessions.sends
        names, directory = runtime.directory.names(), runtime.directory
        rows, requests = quarantined(runtime.requests.leased_sessions(), ended=runtime.problem != "")
        ready = {name: directory.is_ready(name) for name in names}
        ranks = {name: runtime.handshake.num_connected(name) for name in names}
        losses = {name: runtime.connections.num_losses[name] for name in names}
        refusals = {
            "connection": runtime.channel.refused,
            "hello": runtime.dispatch.num_rejected_hellos,
            "message": runtime.dispatch.num_refused_messages,
        }
        healthy = not runtime.problem
        gauges: tuple[Row, ...] = (
            ("healthy", "1 while the manager works, 0 once a thread of it has died or it was closed.", None, {"": healthy}),
            ("peer_ready", "Whether every rank of a known peer is ready.", "peer", ready),
            ("peer_ranks_connected", "Ranks of a known peer that are connected.", "peer", ranks),
            (
                "renewal_due",
                "1 while the engine should be closed and started again; the log says why.",
                None,
                {"": runtime.renewal_due() != ""},
            ),
            ("pack_below_bytes", "Pieces below this size travel packed.", None, {"": runtime.pack_below}),
            ("quarantined_rows", "Rows that are not proved quiet.", "reason", rows),
            ("quarantined_requests", "Requests with such rows.", "reason", requests),
            ("queue_depth", "Items that wait inside the manager.", "queue", runtime.queue_depths()),
        )
        counters: tuple[Row, ...] = (
            ("peer_losses", "How often a rank of a known peer was lost.", "peer", losses),
            ("refusals", "Connections, hellos and messages that were refused.", "what", refusals),
            ("transfer_bytes", "Bytes that were written to peers.", "way", stats.nbytes_by_way),
            ("phase_seconds", "Time in each phase of this side's transfers.", "phase", stats.phases),
            ("transfers", "Transfers that have settled.", None, {"": stats.transfers}),
            ("transfer_failures", "Transfers that have failed.", None, {"": stats.failures}),
            ("pieces", "Pieces posted to the engine.", None, {"": stats.pieces}),
            ("engine_renewals", "How often the engine was started again.", None, {"": runtime.connections.num_renewals}),
        )
        yield from (family(GaugeMetricFamily, row) for row in gauges)
        yield from (family(CounterMetricFamily, row) for row in counters)
        under_way = states(
            list(runtime.sessions.receives.sessions.values()),
            [*list(sends.sessions.values()), *list(sends.table.offers.values())],
            num_unopened=runtime.openings.num_requests,
        )
        found = GaugeMetricFamily("disagg_requests", "Requests under way.", labels=("direction", "state"))
        for labels, count in under_way.items():
            found.add_metric(labels, count)
        yield found
        build = {**self._build, "transport": runtime.backend.transport}  # known once there is a peer
        yield InfoMetricFamily("disagg_build", "What runs here now: join it by the scrape's labels.", value=build)
