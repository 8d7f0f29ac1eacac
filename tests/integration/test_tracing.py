"""Tests for spans of real processes, sent to a collector."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from synapse_replication.testing.private_process import free_port
from tests.integration.deployment import DeploymentTestCase
from tests.support.span_collector import SpanCollector

#: Kinds of spans, as sent.
_SERVER = Span.SpanKind.SPAN_KIND_SERVER
_CLIENT = Span.SpanKind.SPAN_KIND_CLIENT


class TracingTests(DeploymentTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.collector = SpanCollector()
        self.addCleanup(self.collector.close)
        self.trace(self.collector.url)

    def trace(self, endpoint: str, **more: Any) -> None:
        self.shared["synapse_replication"]["tracing"] = {
            "endpoint": endpoint,
            "headers": {"X-Token": "let me in"},
            "service_name": "replication-test",
            **more,
        }

    def catch_up_once(self) -> Any:
        """Let a worker catch up over HTTP.

        :return: the main process.
        """
        main = self.start("main", self.main)
        worker = self.start("worker", self.worker)
        self.wait_until_up("worker")
        self.write_upto(5)
        self.wait_for_rows(5)
        worker.kill()
        worker.wait()
        self.write_upto(20)
        self.wait_until_main_wrote(20)
        worker = self.start("worker", self.worker)
        self.wait_for_rows(20)
        self.assertEqual(self.stop(worker), 0, self.log_of("worker"))
        return main

    def test_one_trace_on_both_sides(self) -> None:
        """
        A catch-up, its request and the writer's work on it are one trace, and are sent
        before the process exits.
        """
        main = self.catch_up_once()
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        request = "GET get_repl_stream_updates"
        catch_ups = {
            span.span_id: span
            for span in self.collector.named("replication-catch-up", "reader1")
        }
        clients = {
            span.span_id: span
            for span in self.collector.named(request, "reader1", _CLIENT)
        }
        servers = self.collector.named(request, "master", _SERVER)
        self.assertTrue(catch_ups)
        # The killed worker had spans that it had not sent.
        answers = [span for span in servers if span.parent_span_id in clients]
        self.assertTrue(answers)
        for server in answers:
            client = clients[server.parent_span_id]
            self.assertEqual(client.trace_id, server.trace_id)
        self.assertTrue(
            any(client.parent_span_id in catch_ups for client in clients.values())
        )
        # Concurrent writes share a span.
        writes = self.collector.named("replication-position-write", "master")
        self.assertTrue(0 < len(writes) <= 20)
        path, headers = self.collector.requests[0]
        self.assertEqual(path, "/v1/traces")
        self.assertEqual(headers["X-Token"], "let me in")
        self.assertEqual(headers["Content-Type"], "application/x-protobuf")
        resource = self.collector.resources[0]
        self.assertEqual(resource["service.name"], "replication-test")
        self.assertEqual(resource["service.namespace"], self.shared["server_name"])

    def test_sample_ratio_zero(self) -> None:
        """With a sample ratio of 0, neither reader nor writer sends spans."""
        self.trace(self.collector.url, sample_ratio=0)
        main = self.catch_up_once()
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertEqual(self.collector.spans, [])

    def test_no_collector(self) -> None:
        """
        Without a collector, rows still arrive, the failure is logged, and the stop is
        not delayed.
        """
        self.trace(f"http://127.0.0.1:{free_port()}")
        main = self.catch_up_once()
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertIn("OpenTelemetry: ", self.log_of("main"))
        self.assertNotIn("let me in", self.log_of("main"))
