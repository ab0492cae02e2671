"""Prometheus metrics of one manager. Requests are counted as they end; everything else is read at each scrape. Labels are
peers' names or enumeration values, never other text from a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_PEERS = 2048
"""Beyond this the first counted are forgotten."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Mappings are by label: a peer's name, or a word of the enumeration that the field names."""

    healthy: bool
    peers_ready: Mapping[str, bool]
    peer_ranks: Mapping[str, int]
    pack_below: int
    peer_losses: Mapping[str, int]
    requests: Mapping[tuple[str, str], int]
    quarantined_rows: Mapping[str, int]
    quarantined_requests: Mapping[str, int]
    queue_depths: Mapping[str, int]
    refusals: Mapping[str, int]
    transfer_nbytes: Mapping[str, int]
    phase_seconds: Mapping[str, float]
    transfers: int
    transfer_failures: int
    pieces: int


Row = tuple[str, str, str | None, Mapping[str, float]]
"""Name, help text, optional label, and values by label."""


class Reader(Collector):
    """Reads a snapshot at every scrape, and labels of `disagg_build_info`."""

    def __init__(self, read: Callable[[], Snapshot], build: Callable[[], Mapping[str, str]]) -> None:
        self._read = read
        self._build = build

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registration reads nothing."""
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        gauges: tuple[Row, ...] = (
            ("healthy", "1 while the manager works, 0 once a thread of it has died or it was closed.", None, {"": now.healthy}),
            ("peer_ready", "Whether every rank of a configured peer is ready.", "peer", now.peers_ready),
            ("peer_ranks_connected", "Ranks of a configured peer that are connected.", "peer", now.peer_ranks),
            ("pack_below_bytes", "Pieces below this size travel packed.", None, {"": now.pack_below}),
            ("quarantined_rows", "Rows that are not proved quiet.", "reason", now.quarantined_rows),
            ("quarantined_requests", "Requests with such rows.", "reason", now.quarantined_requests),
            ("queue_depth", "Items that wait inside the manager.", "queue", now.queue_depths),
        )
        counters: tuple[Row, ...] = (
            ("peer_losses", "How often a rank of a configured peer was lost.", "peer", now.peer_losses),
            ("refusals", "Connections, hellos and messages that were refused.", "what", now.refusals),
            ("transfer_bytes", "Bytes that were written to peers.", "way", now.transfer_nbytes),
            ("phase_seconds", "Time in each phase of this side's transfers.", "phase", now.phase_seconds),
            ("transfers", "Transfers that have settled.", None, {"": now.transfers}),
            ("transfer_failures", "Transfers that have failed.", None, {"": now.transfer_failures}),
            ("pieces", "Pieces posted to the engine.", None, {"": now.pieces}),
        )
        yield from (_family(GaugeMetricFamily, row) for row in gauges)
        yield from (_family(CounterMetricFamily, row) for row in counters)
        states = GaugeMetricFamily("disagg_requests", "Requests under way.", labels=("direction", "state"))
        for (direction, state), count in now.requests.items():
            states.add_metric((direction, state), count)
        yield states
        yield InfoMetricFamily("disagg_build", "What runs here now: join it by the scrape's labels.", value=dict(self._build()))


def _family(kind: type[GaugeMetricFamily] | type[CounterMetricFamily], row: Row) -> Metric:
    name, text, label, values = row
    family = kind(f"disagg_{name}", text, labels=() if label is None else (label,))
    for word, value in values.items():
        family.add_metric(() if label is None else (word,), value)
    return family


class Metrics:
    """Counts requests; `Reader` adds the rest."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        ended, failed = ("direction", "peer", "outcome"), ("direction", "peer", "cause")
        share = "Bytes of this rank's share of successful requests."
        self._ended = Counter("disagg_requests_ended", "Requests that have ended.", ended, registry=own)
        self._failures = Counter("disagg_request_failures", "Failed requests, by first cause.", failed, registry=own)
        self._nbytes = Counter("disagg_request_bytes", share, ("direction", "peer"), registry=own)
        self._seconds = Histogram(
            "disagg_request_seconds", "From the call to the end.", ("direction", "outcome"), buckets=SECONDS, registry=own
        )
        self._children: dict[str, dict[tuple[str, str], tuple[Counter, Histogram, Counter]]] = {}

    def count(self, *, direction: str, peer: str, cause: str, nbytes: int, seconds: float) -> None:
        children = self._children.setdefault(peer, {})
        key = direction, cause
        found = children.get(key)
        if found is None:
            outcome = "failed" if cause else "ok"
            found = children[key] = (
                self._ended.labels(direction, peer, outcome),
                self._seconds.labels(direction, outcome),
                self._failures.labels(direction, peer, cause) if cause else self._nbytes.labels(direction, peer),
            )
            if len(self._children) > MAX_PEERS:
                self._forget(next(iter(self._children)))
        number, duration, rest = found
        number.inc()
        duration.observe(seconds)
        rest.inc(1 if cause else nbytes)

    def _forget(self, peer: str) -> None:
        counted = self._children.pop(peer)
        for direction, outcome in {(direction, "failed" if cause else "ok") for direction, cause in counted}:
            self._ended.remove(direction, peer, outcome)
        for direction, cause in counted:
            if cause:
                self._failures.remove(direction, peer, cause)
            else:
                self._nbytes.remove(direction, peer)
