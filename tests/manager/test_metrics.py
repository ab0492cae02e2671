"""Metrics and request logs: their values, the allowed labels, and the queries of the dashboard."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from disagg import ConfigError, KVManager, ModelId, RequestAborted, new_request_id
from disagg.core.errors import Cause
from disagg.core.leases import LeaseState, quarantine
from disagg.core.timeline import PHASES, Timeline
from disagg.protocol.messages import PROTOCOL_VERSION
from disagg.protocol.receive_session import ReceiveState
from disagg.protocol.send_session import SendState
from disagg.runtime import metrics
from disagg.runtime.accounting import HeldSize, Quarantine, RequestRecord, Stats, as_line, num_rows, quarantine_of
from disagg.testing.reference import KVModel, PageList
from disagg.transfer.jobs import CANCELLED, Settled
from tests.manager.test_peers import until
from tests.support.cluster import DEADLINE_S, Cluster, Rank, Side, cluster, introduce, receive, send, start_side

ROOT = Path(__file__).parents[2]
LABELS = {
    "peer": {"prefill-0", "decode-0"},
    "direction": {"send", "receive"},
    "outcome": {"ok", "failed"},
    "cause": {cause.value for cause in Cause},
    "reason": {reason.value for reason in Quarantine},
    "state": {"unopened", *(state.value for state in (*ReceiveState, *SendState))},
    "phase": {"bind", "pack", "post", "wire", "unpack"},
    "way": {"direct", "source", "packed"},
    "what": {"connection", "hello", "message"},
    "queue": {
        "commands",
        "transfers",
        "rows_not_ready",
        "parked_reserves",
        "early_transfers",
        "events",
        "sums",
        "fences",
        "waiting_for_peers",
    },
}


@pytest.fixture(scope="module")
def instances() -> Iterator[Cluster]:
    with cluster(Side(tp=2), Side(page=8, num_pages=16), settings={"metrics_port": 0}) as instances:
        yield instances


def scrape(manager: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples, by name and labels."""
    with urllib.request.urlopen(manager.metrics_url, timeout=DEADLINE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(manager: Any, name: str, **labels: str) -> float:
    return scrape(manager).get((f"disagg_{name}", tuple(sorted(labels.items()))), 0.0)


def test_counters_match_the_transferred_requests(instances: Cluster) -> None:
    decode, prefill = instances.decode[0].manager, instances.prefill[0].manager
    before = value(decode, "requests_ended_total", direction="receive", peer="prefill-0", outcome="ok")
    sent = value(prefill, "request_bytes_total", direction="send", peer="decode-0")
    assert all(event.ok for event in instances.transfer(20))
    assert all(event.ok for event in instances.transfer(20, first_token=8))
    ok = {"direction": "receive", "peer": "prefill-0"}
    assert value(decode, "requests_ended_total", **ok, outcome="ok") == before + 2
    per_token = 3 * 4 * (8 + 6) * 2  # layers, heads, dims of k and v, bytes of a uint16
    assert value(decode, "request_bytes_total", **ok) == (20 + 12) * per_token
    assert value(prefill, "request_bytes_total", direction="send", peer="decode-0") - sent == (20 + 12) * per_token / 2
    assert value(decode, "request_seconds_count", direction="receive", outcome="ok") == before + 2
    transferred = sum(value(prefill, "transfer_bytes_total", way=way) for way in ("direct", "packed"))
    assert transferred == prefill.stats.nbytes > 0
    assert value(prefill, "pieces_total") == prefill.stats.pieces
    assert value(prefill, "phase_seconds_total", phase="wire") > 0
    assert value(decode, "peer_ready", peer="prefill-0") == value(decode, "healthy") == 1
    assert value(decode, "peer_ranks_connected", peer="prefill-0") == 2


def test_active_requests_are_counted_by_state_and_failures_by_their_first_cause(instances: Cluster) -> None:
    decode, prefill, request = instances.decode[0].manager, instances.prefill[0].manager, new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    sender = prefill.sender(request, peer="decode-0")
    until(lambda: value(decode, "requests", direction="receive", state="open") == 1)
    until(lambda: value(prefill, "requests", direction="send", state="active") == 1)
    until(lambda: value(instances.prefill[1].manager, "queue_depth", queue="parked_reserves") == 1)
    receiver.abort("client gone")
    assert not receiver.wait(timeout_s=DEADLINE_S).ok
    sender.finish()
    assert sender.wait(timeout_s=DEADLINE_S).error.cause is Cause.PEER  # type: ignore[union-attr]
    failed = {"direction": "receive", "peer": "prefill-0", "cause": "aborted"}
    until(lambda: value(decode, "request_failures_total", **failed) == 1)
    until(lambda: value(prefill, "request_failures_total", direction="send", peer="decode-0", cause="peer") == 1)
    late = receive(instances.decode[0], new_request_id(), PageList((3, 4, 5)), need=(0, 20), deadline_s=0.01)
    assert late.wait(timeout_s=DEADLINE_S).error.cause is Cause.DEADLINE  # type: ignore[union-attr]
    request = new_request_id()
    incomplete = receive(instances.decode[0], request, PageList((6, 7, 8)), need=(0, 20))
    wrong = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 99)), 20)
    assert wrong.wait(timeout_s=DEADLINE_S).error.cause is Cause.TRANSFER  # type: ignore[union-attr]
    assert incomplete.wait(timeout_s=DEADLINE_S).error.cause is Cause.PEER  # type: ignore[union-attr]
    assert value(prefill, "transfer_failures_total") == 1


def test_a_cancelled_transfer_is_none_that_has_failed() -> None:
    found = Stats()
    for error in ("", CANCELLED, "the connection broke"):
        found.add(Settled(ticket=0, error=error))
    assert (found.transfers, found.failures) == (3, 1)


def test_requests_that_wait_for_their_peer_are_under_way() -> None:
    with cluster(Side(), Side(), settings={"metrics_port": 0}) as made:
        decode, prefill = made.decode[0].manager, made.prefill[0].manager
        decode.add_peer("away", address="tcp://127.0.0.1:9")
        receiver = decode.receiver(new_request_id(), peer="away", rows={"kv": [0]}, need={"kv": (0, 4)})
        offer = prefill.sender(new_request_id())
        until(lambda: value(decode, "requests", direction="receive", state="unopened") == 1)
        until(lambda: value(prefill, "requests", direction="send", state="awaited") == 1)
        assert (decode.health().num_receiving, prefill.health().num_sending) == (1, 1)
        receiver.abort("the test is finished")
        offer.abort("the test is finished")
        until(lambda: (decode.health().num_receiving, prefill.health().num_sending) == (0, 0))


def test_label_values_are_fixed_words_or_configured_names(instances: Cluster) -> None:
    """No request id, address or message becomes a label value."""
    for rank in (*instances.prefill, *instances.decode):
        samples = scrape(rank.manager)
        assert samples
        for name, labels in samples:
            if name.startswith("disagg_") and name != "disagg_build_info":
                for label, found in labels:
                    assert label == "le" or found in LABELS[label], (name, label, found)


def test_of_too_many_peers_those_that_were_first_counted_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_PEERS", 2)
    counted = metrics.Metrics()
    for peer in ("a", "b", "a", "c"):
        for cause in ("", "deadline", "aborted"):
            counted.count(direction="send", peer=peer, cause=cause, nbytes=5, seconds=0.1)
    peers = {
        sample.labels["peer"]
        for counter in (counted._ended, counted._failures, counted._nbytes)
        for family in counter.collect()
        for sample in family.samples
    }
    assert peers == {"b", "c"}


def test_the_build_says_which_rank_and_what_runs(instances: Cluster) -> None:
    (labels,) = [dict(labels) for name, labels in scrape(instances.prefill[1].manager) if name == "disagg_build_info"]
    assert labels == {
        "version": importlib.metadata.version("disagg"),
        "protocol": str(PROTOCOL_VERSION),
        "name": "prefill-0",
        "rank": "1",
        "backend": "local",
        "transport": instances.prefill[1].manager.backend.transport,
    }


def test_the_build_names_the_transport_to_the_peers_that_there_are_now() -> None:
    def transport(manager: KVManager) -> str:
        return next(dict(labels)["transport"] for name, labels in scrape(manager) if name == "disagg_build_info")

    def start(name: str) -> list[Rank]:
        return start_side(model, Side(), name, num_layers=1, settings={"metrics_port": 0, "backend": "auto"})

    model = KVModel(num_kv_heads=4, dims={"k": 8, "v": 8})
    with ExitStack() as opened:
        prefill, decode = start("prefill-0"), start("decode-0")
        managers = [opened.enter_context(rank.manager) for rank in (*prefill, *decode)]
        assert all("no peer yet" in transport(manager) for manager in managers)
        introduce(prefill, decode)
        managers[0].wait_ready("decode-0", timeout_s=DEADLINE_S)
        managers[1].wait_ready("prefill-0", timeout_s=DEADLINE_S)
        assert [transport(manager) for manager in managers] == ["cma: shm"] * 2


def test_the_dashboard_and_the_alerts_query_existing_metrics_and_labels(instances: Cluster) -> None:
    failed = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20))
    failed.abort("one failure for the metrics")
    until(lambda: failed.wait(timeout_s=DEADLINE_S).lease.released)
    instances.transfer(20)
    until(lambda: any(name == "disagg_request_failures_total" for name, _ in scrape(instances.decode[0].manager)))
    known: dict[str, set[str]] = {}
    for rank in (*instances.prefill, *instances.decode):
        for name, labels in scrape(rank.manager):
            known.setdefault(name, {"instance"}).update(label for label, _ in labels)
    known.setdefault("disagg_requests", {"instance"}).update(("direction", "state"))
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    queries += [
        rule["expr"] for group in yaml.safe_load((ROOT / "docs/alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    used = set()
    for query in queries:
        ours = re.sub(r"\bvllm:\w+({[^}]*})?", "", query)
        names = re.findall(r"\bdisagg_\w+", ours)
        if not names:
            assert ours != query, query  # only vLLM's: see tests/integrations/vllm
            continue
        used.update(names)
        for name in names:
            assert name in known, query
        labels_of_query = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        labels_of_query |= set(re.findall(r"(\w+)=~?\"", ours))
        assert labels_of_query - {"__name__"} <= set.union(*(known[name] for name in names)), query
    shown = {re.sub("_(bucket|count|sum|created)$", "", n) for n in known if n.startswith("disagg_")}
    assert shown - {re.sub("_(bucket|count|sum|created)$", "", n) for n in used} <= {
        f"disagg_{n}" for n in ("requests_ended", "request_failures", "request_bytes", "build_info")
    }, "a metric that no panel shows"


def test_metrics_are_off_by_default_and_stop_with_the_manager() -> None:
    before = set(threading.enumerate())
    with cluster(Side(), Side()) as instances:
        assert instances.decode[0].manager.metrics_url is None
        passing = ("disagg-connect", "disagg-compare")
        started = [each.name for each in set(threading.enumerate()) - before if not each.name.startswith(passing)]
        assert len(started) == 4, f"expected two threads for each manager and no metrics server, found {started}"
    with cluster(Side(), Side(), settings={"metrics_port": 0}) as instances:
        url = instances.decode[0].manager.metrics_url
        assert url is not None
        assert url.startswith("http://127.0.0.1:")
        with pytest.raises(ConfigError, match=r"metrics: cannot listen at .192\.0\.2\.77."):
            KVManager(
                name="x",
                topology=instances.decode[0].topology,
                components=[],
                model=ModelId("toy"),
                backend="local",
                metrics_port=1,
                metrics_host="192.0.2.77",
            )
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=1)


def fields(text: str) -> dict[str, str]:
    """The `name=value` pairs of a request's log line."""
    return dict(pair.split("=", 1) for pair in shlex.split(text))


def test_each_request_logs_one_line_on_both_sides(instances: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="disagg.requests")
    assert all(event.ok for event in instances.transfer(20))
    request = new_request_id()
    receiver = receive(instances.decode[0], request, PageList((0, 1, 2)), need=(0, 20))
    bad = send(instances.prefill[0], request, PageList((0, 1, 2, 3, 99)), 20)
    good = send(instances.prefill[1], request, PageList((0, 1, 2, 3, 4)), 20)
    for handle in (receiver, bad, good):
        assert not handle.wait(timeout_s=DEADLINE_S).ok
    lines = [(record, fields(record.getMessage())) for record in caplog.records if record.name == "disagg.requests"]
    assert len(lines) == 6
    for record, line in lines:
        assert line == {k: f"{v:.6f}" if isinstance(v, float) else str(v) for k, v in vars(record)["request"].items()}
        assert float(line["total_s"]) > 0
    ok, failed = [line for _, line in lines[:3]], [line for _, line in lines[3:]]
    assert {line["request_id"] for line in failed} == {request.hex()}
    assert {line["rank"] for line in ok} == {"prefill-0/0", "prefill-0/1", "decode-0/0"}
    assert {(line["outcome"], line["cause"], line["error"]) for line in ok} == {("ok", "", "")}
    per_token = 3 * 4 * (8 + 6) * 2
    assert {(line["direction"], line["peer"], int(line["nbytes"])) for line in ok} == {
        ("send", "decode-0", 20 * per_token // 2),
        ("receive", "prefill-0", 20 * per_token),
    }
    assert all(record.levelno == logging.WARNING for record, line in lines[3:])
    cause = "token 16 lies in page 99, outside the pool of 32 pages"
    assert all(cause in line["error"] for line in failed), "every line has the first cause"


def test_a_request_is_logged_on_one_line_for_any_error_text() -> None:
    times = {f"{phase}_s": 0.25 for phase in PHASES}
    timeline = Timeline(opened_at=7.0, **times | {"wake_s": 0.0})
    texts: dict[str, Any] = {
        "rank": "a/0",
        "request_id": "00",
        "label": "cmpl-7",
        "direction": "send",
        "peer": 'p "q" \n=',
        "outcome": "failed",
        "lease": "held",
    }
    record = RequestRecord(attempt=0, nbytes=1, pieces=2, cause="", error='two\nlines "x" ü', timeline=timeline, **texts)
    line = as_line(record.values)
    assert "\n" not in line
    assert json.loads(re.search(r'error=(".*")$', line)[1]) == 'two\nlines "x" ü'  # type: ignore[index]
    assert 'cause="" ' in line
    phases = ["wait_s", "bind_s", "pack_s", "post_s", "wire_s", "unpack_s", "handover_s"]
    found = [pair for pair in line.split() if "_s=" in pair]
    assert found == ["total_s=1.750000", *(f"{name}=0.250000" for name in phases)]
    assert list(record.values)[-2:] == ["lease", "error"], "the order of the line is documented"


def test_quarantined_rows_are_counted_by_reason() -> None:
    """The rows of a silent writer stay quarantined and are counted until the writer is quiescent."""
    with cluster(Side(), Side(page=8), settings={"metrics_port": 0}) as instances:
        manager = instances.decode[0].manager
        receiver = receive(instances.decode[0], new_request_id(), PageList((0, 1, 2)), need=(0, 20))
        until(lambda: value(manager, "requests", direction="receive", state="open") == 1)
        lease = receiver.session.lease  # type: ignore[union-attr]
        assert value(manager, "quarantined_rows", reason="silent") == 0
        quarantine(lease, "the writer does not answer")
        assert value(manager, "quarantined_rows", reason="silent") == 3
        assert value(manager, "quarantined_requests", reason="silent") == 1
        assert num_rows(receiver.session) == 3  # type: ignore[arg-type]
        assert quarantine_of(receiver.session, ended=True) is Quarantine.ENDED  # type: ignore[arg-type]
        receiver.abort("the test is finished")
        until(lambda: lease.state is LeaseState.RELEASED)
        until(lambda: value(manager, "quarantined_rows", reason="silent") == 0)


def test_held_bytes_equal_the_sizes_of_the_pools() -> None:
    """Compares with the sizes of the reference implementation's arrays."""
    with cluster(Side(tp=3), Side(tp=2, page=16), num_kv_heads=6) as instances:
        for rank in (*instances.prefill, *instances.decode):
            table = rank.manager._runtime.local.table.ranks[rank.topology.group_rank].by_name["kv"]
            tokens = rank.spec.page_size * rank.spec.num_pages
            assert HeldSize(table).nbytes((0, tokens)) == sum(t.nbytes for ts in rank.pools.values() for t in ts)
            assert HeldSize(table).nbytes((3, 3)) == 0


def test_each_error_has_a_cause() -> None:
    assert RequestAborted("x").cause is Cause.ABORTED
    assert ConfigError("x").cause is Cause.INVALID
