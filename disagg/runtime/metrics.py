"""Prometheus metrics of one manager. Requests are counted as they end; everything else is read at each scrape. Labels are
peers' names or enumeration values, never other text from a peer.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

MAX_PEERS = 2048
"""Beyond this the first counted are forgotten."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


Row = tuple[str, str, str | None, Mapping[str, float]]
"""Name, help text, optional label, and values by label."""


def family(kind: type[GaugeMetricFamily] | type[CounterMetricFamily], row: Row) -> Metric:
    name, text, label, values = row
    family = kind(f"disagg_{name}", text, labels=() if label is None else (label,))
    for word, value in values.items():
        family.add_metric(() if label is None else (word,), value)
    return family


class Metrics:
    """Counts requests; `health.Reader` adds the rest."""

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
