"""OpenTelemetry spans of requests: one per rank, in the server's traces, with a phase inside another's end."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from disagg import ConfigError, new_request_id
from disagg.core.timeline import PHASES
from disagg.runtime.tracing import Tracing
from tests.manager.test_peers import until
from tests.manager.test_timelines import begin
from tests.support.cluster import DEADLINE_S, Side, cluster, receive, send

TRACED = {"tracing": True}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of this process go."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def inside(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> Iterator[ReadableSpan]:
    assert parent.context is not None
    return (span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id)


def test_a_request_is_one_trace_from_decode_to_prefill(exporter: InMemorySpanExporter) -> None:
    with cluster(Side(tp=2), Side(), settings=TRACED) as instances:
        with trace.use_span(trace.get_tracer("server").start_span("decode step"), end_on_exit=True):
            to, request = instances.decode[0], new_request_id()
            receiver = receive(to, request, instances.pages(to, 61), need=(0, 61), label="cmpl-7")
        senders = [send(rank, request, instances.pages(rank, 61), 61) for rank in instances.prefill]
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
        until(lambda: len(named(exporter.get_finished_spans(), "disagg.send")) == 2)
    spans = exporter.get_finished_spans()
    (step,), (receiving,) = named(spans, "decode step"), named(spans, "disagg.receive")
    sending = named(spans, "disagg.send")
    assert receiving in inside(spans, step)
    assert {span.context.span_id for span in sending} <= {span.context.span_id for span in inside(spans, receiving)}
    assert len({span.context.trace_id for span in spans}) == 1
    assert receiving.attributes == {
        "disagg.request_id": request.hex(), "disagg.attempt": 0, "disagg.peer": "prefill-0", "disagg.label": "cmpl-7",
    }  # fmt: skip
    for span in (receiving, *sending):
        phases = [each for each in inside(spans, span) if each.name != "disagg.send"]
        found = [each.name.removeprefix("disagg.") for each in phases]
        assert found == [phase for phase in PHASES if phase in found]
        for before, after in itertools.pairwise(phases):
            assert before.end_time == after.start_time
        assert phases[-1].end_time == span.end_time


def test_a_senders_span_belongs_to_the_servers_own_trace_and_is_linked_to_its_receivers(exporter: InMemorySpanExporter) -> None:
    with cluster(Side(), Side(tp=2), settings=TRACED) as instances:
        request, (source,) = new_request_id(), instances.prefill
        with trace.use_span(trace.get_tracer("server").start_span("prefill step"), end_on_exit=True):
            sender = send(source, request, instances.pages(source, 20), 20)
        receivers = [receive(rank, request, instances.pages(rank, 20), need=(0, 20)) for rank in instances.decode]
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (sender, *receivers))
        until(lambda: len(named(exporter.get_finished_spans(), "disagg.receive")) == 2)
    spans = exporter.get_finished_spans()
    (step,), (sending,) = named(spans, "prefill step"), named(spans, "disagg.send")
    assert sending in inside(spans, step)
    received = {span.context.span_id for span in named(spans, "disagg.receive")}
    assert {link.context.span_id for link in sending.links} == received


def test_the_span_of_a_failed_request_says_why(exporter: InMemorySpanExporter) -> None:
    with cluster(Side(), Side(), settings=TRACED) as instances:
        rank = instances.decode[0]
        receiver = receive(rank, new_request_id(), instances.pages(rank, 8), need=(0, 8))
        receiver.abort("no longer wanted")
        assert not receiver.wait(timeout_s=DEADLINE_S).ok
    (span,) = named(exporter.get_finished_spans(), "disagg.receive")
    assert not span.status.is_ok
    assert span.status.description == "no longer wanted"


class Broken(SpanProcessor):
    """Raises where the server's own processors and exporters might."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        self._where, self._error = where, error

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if self._where == "start":
            raise self._error("broken")

    def on_end(self, span: ReadableSpan) -> None:
        if self._where == "end":
            raise self._error("broken")


BROKEN = [("start", RuntimeError), ("end", RuntimeError), ("end", KeyboardInterrupt), ("end", SystemExit)]


@pytest.mark.parametrize(("where", "error"), BROKEN)
def test_a_span_processor_that_fails_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    """Spans start in the server's thread, where it may be interrupted, and end in one of the manager."""
    provider = TracerProvider()
    provider.add_span_processor(Broken(where, error))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with cluster(Side(), Side(), settings=TRACED) as instances:
        for _ in range(2):
            receiver, senders = begin(instances)
            assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
        for rank in (*instances.prefill, *instances.decode):
            assert rank.manager.health().ok


@pytest.mark.parametrize("sampled_out", [True, False])
def test_a_request_that_is_not_sampled_says_so(monkeypatch: pytest.MonkeyPatch, sampled_out: bool) -> None:
    if sampled_out:
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: TracerProvider(sampler=ALWAYS_OFF))
    with cluster(Side(), Side(), settings=TRACED) as instances:
        receiver, senders = begin(instances)
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, *senders))
        assert bool(receiver.trace) is sampled_out
        assert not sampled_out or int(receiver.trace[-2:], 16) & 1 == 0


@pytest.mark.parametrize("text", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ü" * 100])
def test_a_peers_trace_context_may_be_anything(exporter: InMemorySpanExporter, text: str) -> None:
    with cluster(Side(), Side(), settings=TRACED) as instances:
        rank, request = instances.decode[0], new_request_id()
        tracing = rank.manager._runtime.requests._tracing
        assert tracing is not None
        tracing._texts.inject = lambda carrier, *_: carrier.update(traceparent=text)  # type: ignore[method-assign]
        receiver = receive(rank, request, instances.pages(rank, 20), need=(0, 20))
        sender = send(instances.prefill[0], request, instances.pages(instances.prefill[0], 20), 20)
        assert all(handle.wait(timeout_s=DEADLINE_S).ok for handle in (receiver, sender))
        until(lambda: named(exporter.get_finished_spans(), "disagg.send"))
    (span,) = named(exporter.get_finished_spans(), "disagg.send")
    assert span.parent is None
    assert not span.links


def test_spans_that_reach_nobody_are_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Tracing()
        (warned,) = caplog.messages
        monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
        Tracing()
    assert "expected a tracer provider, found none" in warned
    assert caplog.messages == [warned]


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(ConfigError, match=r"expected the package 'opentelemetry-api' \(pip install opentelemetry-api\)"),
        cluster(Side(), Side(), settings=TRACED),
    ):
        pass
