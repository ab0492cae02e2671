"""The connector's part of vLLM's log lines and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "loads": "Loads of requests by this engine's ranks.",
    "failed_loads": "Loads that failed; kv_load_failure_policy says what vLLM does with these requests.",
    "refused_hand_overs": "Requests whose hand-over the scheduler could not use, so that this engine computes them.",
    "loaded_tokens": "Prompt tokens in the loads that succeeded, by rank.",
    "sends": "Requests that this engine's ranks have handed over.",
    "sent_bytes": "Bytes that this engine's ranks have written to decode servers.",
    "failed_sends": "Requests that no decode server took in time, or that failed.",
}
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """`load_s` has the seconds of each successful load, from the scheduler's step on. `dead_ranks` are ranks whose manager
    has ended since the last statistics.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {**dict.fromkeys((*COUNTERS, "dead_ranks"), 0), "load_s": []}

    def count_load(self, *, ok: bool, num_tokens: int, seconds: float) -> None:
        self.data["loads"] += 1
        if ok:
            self.data["loaded_tokens"] += num_tokens
            self.data["load_s"].append(seconds)
        else:
            self.data["failed_loads"] += 1

    def count_refusal(self) -> None:
        self.data["refused_hand_overs"] += 1

    def count_send(self, *, ok: bool) -> None:
        self.data["sends" if ok else "failed_sends"] += 1

    def count_bytes(self, nbytes: int) -> None:
        self.data["sent_bytes"] += nbytes

    def count_death(self) -> None:
        self.data["dead_ranks"] += 1

    def reset(self) -> None:
        self.data = TransferStats().data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of a log line."""
        seconds = sorted(self.data["load_s"])
        figures = {name: self.data[name] for name in COUNTERS}
        return figures | ({"load_ms_p50": round(seconds[len(seconds) // 2] * 1e3, 2)} if seconds else {})

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TransferMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:disagg_*`, with vLLM's labels."""

    def __init__(self, config: Any, metric_types: dict[Any, Any], labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, metric_types, labels, values)
        made = {
            name: self._counter_cls(name=f"vllm:disagg_{name}", documentation=text, labelnames=labels)
            for name, text in COUNTERS.items()
        }
        seconds = self._histogram_cls(
            name="vllm:disagg_load_seconds", documentation="Seconds of a rank's load.", buckets=BUCKETS_S, labelnames=labels
        )
        healthy = self._gauge_cls(
            name="vllm:disagg_healthy",
            documentation="1; 0 for good once a rank's manager has ended. Restart the server: it transfers nothing any more.",
            labelnames=labels,
            multiprocess_mode="min",
        )
        self._healthy: dict[int, Gauge] = {engine: healthy.labels(*own) for engine, own in values.items()}
        for gauge in self._healthy.values():
            gauge.set(1)
        self._counters: dict[int, dict[str, Counter]] = {
            engine: {name: metric.labels(*own) for name, metric in made.items()} for engine, own in values.items()
        }
        self._seconds: dict[int, Histogram] = {engine: seconds.labels(*own) for engine, own in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, metric in self._counters[engine_idx].items():
            metric.inc(transfer_stats_data[name])
        if transfer_stats_data["dead_ranks"]:
            self._healthy[engine_idx].set(0)
        for value in transfer_stats_data["load_s"]:
            self._seconds[engine_idx].observe(value)
