"""Tests for :mod:`synapse_replication.instrumentation.tracing`."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.handlers.events import (
    BackgroundTask,
    CatchUpEvent,
    PositionWrite,
    RowsRequest,
    RowsServed,
)
from synapse_replication.instrumentation.tracing import TracingObserver
from tests.handlers.fixtures import receiving


class TracingObserverTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.observer = TracingObserver(self.tracer, "example.com")

    def test_a_background_process_is_a_trace_of_its_own(self) -> None:
        """A background process begins a separate trace, outside the request's trace."""
        with (
            self.tracer.start_as_current_span("request"),
            self.observer.span(BackgroundTask("queue-events")),
        ):
            pass
        background, request = self.exporter.get_finished_spans()
        self.assertEqual(background.name, "queue-events")
        self.assertIsNone(background.parent)
        assert background.context is not None
        assert request.context is not None
        self.assertNotEqual(background.context.trace_id, request.context.trace_id)

    def test_a_catch_up_belongs_to_its_process(self) -> None:
        """A catch-up is a child span of its background process, with its range."""
        with (
            self.observer.span(BackgroundTask("queue-events")),
            self.observer.span(CatchUpEvent("events", "w1", 3, 9)),
        ):
            pass
        catch_up, background = self.exporter.get_finished_spans()
        assert catch_up.parent is not None
        assert background.context is not None
        assert catch_up.attributes is not None
        self.assertEqual(catch_up.parent.span_id, background.context.span_id)
        self.assertEqual(
            dict(catch_up.attributes),
            {
                "server_name": "example.com",
                "stream_name": "events",
                "instance_name": "w1",
                "from_token": 3,
                "upto_token": 9,
            },
        )

    def test_the_span_is_not_current_outside_its_coroutine(self) -> None:
        """While a process waits, its span is not the current one for other code."""
        waiting: Deferred[None] = Deferred()

        async def work() -> None:
            with self.observer.span(BackgroundTask("queue-events")):
                await waiting

        done = Deferred.fromCoroutine(work())
        with self.tracer.start_as_current_span("request"):
            pass
        waiting.callback(None)
        self.successResultOf(done)
        request, background = self.exporter.get_finished_spans()
        self.assertIsNone(request.parent)
        self.assertEqual(background.name, "queue-events")

    def test_request_propagates_trace(self) -> None:
        """
        The writer's work on a request belongs to the trace of the reader's catch-up.
        """
        headers: dict[str, str] = {}
        with (
            self.observer.span(CatchUpEvent("events", "w1", 3, 9)),
            self.observer.span(RowsRequest("events", "w1", headers)),
        ):
            self.assertEqual(list(headers), ["traceparent"])
            with self.observer.span(RowsServed("events", headers)):
                pass
        server, client, catch_up = self.exporter.get_finished_spans()
        self.assertEqual((server.kind, client.kind), (SpanKind.SERVER, SpanKind.CLIENT))
        assert server.parent is not None
        assert client.parent is not None
        assert client.context is not None
        assert catch_up.context is not None
        self.assertEqual(server.parent.span_id, client.context.span_id)
        self.assertTrue(server.parent.is_remote)
        self.assertEqual(client.parent.span_id, catch_up.context.span_id)

    def test_a_request_without_a_trace(self) -> None:
        """A request without a valid trace header begins a trace."""
        for headers in ({}, {"traceparent": "nonsense"}):
            with (
                self.tracer.start_as_current_span("unrelated"),
                self.observer.span(RowsServed("events", headers)),
            ):
                pass
        for span in self.exporter.get_finished_spans():
            self.assertIsNone(span.parent)

    def test_a_position_that_is_written(self) -> None:
        """
        Persisting a position is a separate trace, and its span is never the current
        one.
        """
        with self.tracer.start_as_current_span("request"):
            writing = self.observer.span(PositionWrite("events", "w1", 7))
            writing.__enter__()
            with self.tracer.start_as_current_span("of the request"):
                pass
        writing.__exit__(None, None, None)
        inner, request, position = self.exporter.get_finished_spans()
        self.assertIsNone(position.parent)
        assert inner.parent is not None
        assert request.context is not None
        self.assertEqual(inner.parent.span_id, request.context.span_id)
        assert position.attributes is not None
        self.assertEqual(position.attributes["token"], 7)

    def test_a_position_that_is_not_written(self) -> None:
        """A failure to persist a position is recorded in its span."""
        writing = self.observer.span(PositionWrite("events", "w1", 7))
        writing.__enter__()
        writing.__exit__(OSError, OSError("no"), None)
        (span,) = self.exporter.get_finished_spans()
        self.assertFalse(span.status.is_ok)

    def test_many_rows(self) -> None:
        """10,000 rows cause at most one span for each queue that is drained."""
        fixture = receiving(observer=self.observer)
        fixture.receive("POSITION events w 0 0")
        self.exporter.clear()
        fixture.receive(*(f'RDATA events w {n} ["a"]' for n in range(1, 10_001)))
        while fixture.host.reactor.getDelayedCalls():
            fixture.run_pending_calls()
        self.assertEqual(fixture.stream.current_token("w"), 10_000)
        (span,) = self.exporter.get_finished_spans()
        self.assertEqual(span.name, "replication_stream_events")

    def test_a_failure_is_recorded(self) -> None:
        """An exception is recorded in the span of its work."""

        def fail() -> None:
            with self.observer.span(BackgroundTask("work")):
                raise ValueError("no")

        self.assertRaises(ValueError, fail)
        (span,) = self.exporter.get_finished_spans()
        self.assertFalse(span.status.is_ok)
