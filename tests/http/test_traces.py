"""Tests that client and resource share one trace."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from treq.testing import RequestTraversalAgent
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import HttpCatchUpError
from synapse_replication.http.client import HttpCatchUpClient
from synapse_replication.http.resource import ReplicationResource
from synapse_replication.instrumentation.tracing import TracingObserver
from synapse_replication.streams.backlog import Backlog, BacklogOptions
from synapse_replication.streams.stream import StreamUpdateResult
from tests.http.doubles import WRITER, Directory, ListStream
from tests.support.http_root import under_root


class TracesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        observer = TracingObserver(provider.get_tracer("test"), "x.test")
        backlog = Backlog(BacklogOptions())
        backlog.of("events").add(1, [(2, [b'["a"]'])])
        resource = ReplicationResource(
            Directory(ListStream("events", [(2, ["a"])])),
            "writer1",
            "hush",
            observer,
            epoch="e1",
            backlog=backlog,
        )
        self.client = HttpCatchUpClient(
            RequestTraversalAgent(under_root(resource)),
            {"writer1": WRITER},
            "hush",
            Clock(),
            observer=observer,
        )

    def check_spans(self) -> None:
        server, client = self.exporter.get_finished_spans()
        self.assertEqual((server.kind, client.kind), (SpanKind.SERVER, SpanKind.CLIENT))
        assert server.parent is not None
        assert server.context is not None
        assert client.context is not None
        self.assertEqual(server.parent.span_id, client.context.span_id)
        self.assertEqual(server.context.trace_id, client.context.trace_id)

    def test_from_the_source(self) -> None:
        """The writer's span is a child of the reader's span of the request."""
        response = Deferred.fromCoroutine(
            self.client.get_updates_since("events", "writer1", 1, 9)
        )
        self.assertIsInstance(self.successResultOf(response), StreamUpdateResult)
        self.check_spans()

    def test_from_the_backlog(self) -> None:
        """
        For a response from the backlog, the writer's span is a child of the reader's,
        too.
        """
        response = Deferred.fromCoroutine(
            self.client.get_backlog("events", "writer1", "e1", 1, 2)
        )
        self.assertIsInstance(self.successResultOf(response), StreamUpdateResult)
        self.check_spans()

    def test_refused(self) -> None:
        """
        A rejected request has a span with an error at the reader, and none at the
        writer.
        """
        response = Deferred.fromCoroutine(
            self.client.get_updates_since("nothing", "writer1", 1, 9)
        )
        self.failureResultOf(response, HttpCatchUpError)
        (client,) = self.exporter.get_finished_spans()
        self.assertFalse(client.status.is_ok)
