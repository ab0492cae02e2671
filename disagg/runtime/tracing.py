"""OpenTelemetry spans: one for each request on each rank, and one in it for each phase.

A span's parent is the span that is current where the server makes the handle; for a sender without one, the first
receiver's. The reserve carries the receiver's context as a W3C `traceparent`, and the sender's span is linked to it.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from disagg.core.errors import ConfigError
from disagg.core.thread_log import ThreadLog
from disagg.protocol.send_session import SendSession
from disagg.protocol.types import Event
from disagg.requests import Receiver, Sender

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

logger = ThreadLog(__name__)


class Tracing:
    """Raises `ConfigError` without the package `opentelemetry-api`."""

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"tracing: expected the package 'opentelemetry-api' (pip install opentelemetry-api): {error}"
            ) from error
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            logger.warning(
                "tracing: expected a tracer provider, found none: spans reach nobody until the process sets one. "
                "`opentelemetry-instrument COMMAND` does so"
            )
        self._tracer, self._api = trace.get_tracer("disagg", importlib.metadata.version("disagg")), trace
        self._texts = TraceContextTextMapPropagator()
        self._receiving: dict[Receiver, Span] = {}
        self._sending: dict[Sender, Context] = {}

    def begin(self, handle: Receiver | Sender) -> None:
        """In the server's thread."""
        try:
            self._begin(handle)
        except Exception:
            logger.exception("request %s: its span", handle.key)

    def _begin(self, handle: Receiver | Sender) -> None:
        if isinstance(handle, Sender):
            self._sending[handle] = self._api.set_span_in_context(self._api.get_current_span())
            return
        span = self._receiving[handle] = self._tracer.start_span("disagg.receive")
        carrier: dict[str, str] = {}
        self._texts.inject(carrier, self._api.set_span_in_context(span))
        handle.trace = carrier.get("traceparent", "")

    def end(self, handle: Receiver | Sender, event: Event) -> None:
        """In a thread of the manager, which SystemExit would end."""
        try:
            self._end(handle, event)
        except BaseException:
            logger.exception("request %s: its span", event.key)

    def _end(self, handle: Receiver | Sender, event: Event) -> None:
        timeline = handle.timeline
        at = time.time_ns() - round((time.monotonic() - timeline.opened_at) * 1e9)
        span = self._receiving.pop(handle, None) if isinstance(handle, Receiver) else self._send_span(handle, at)
        if span is None:
            return
        span.set_attributes(
            {
                "disagg.request_id": event.key.request_id.hex(),
                "disagg.attempt": event.key.attempt,
                "disagg.peer": event.peer,
                "disagg.label": handle.label,
            }
        )
        if event.error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(event.error)))
        inside = self._api.set_span_in_context(span)
        for phase, seconds in timeline.phases.items():
            until = at + round(seconds * 1e9)
            if until > at:
                self._tracer.start_span(f"disagg.{phase}", inside, start_time=at).end(until)
            at = until
        span.end(at)

    def _send_span(self, sender: Sender, at: int) -> Span | None:
        context = self._sending.pop(sender, None)
        if context is None:
            return None
        received = [self._api.get_current_span(self._texts.extract({"traceparent": trace})) for trace in _traces(sender)]
        links = [self._api.Link(span.get_span_context()) for span in received if span.get_span_context().is_valid]
        if links and not self._api.get_current_span(context).get_span_context().is_valid:
            context = self._api.set_span_in_context(received[0])
        return self._tracer.start_span("disagg.send", context, links=links, start_time=at)


def _traces(sender: Sender) -> Iterable[str]:
    """In the order of the reserves, each once."""
    session: SendSession | None = sender.session
    reserves = () if session is None else [each.reserve for each in tuple(session.destinations.values())]
    return dict.fromkeys(reserve.trace for reserve in reserves if reserve is not None and reserve.trace)
