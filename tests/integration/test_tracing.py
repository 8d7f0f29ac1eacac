"""Spans of real processes, sent to a collector."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from synapse_replication.testing.private_process import free_port
from tests.integration.deployment import DeploymentTestCase

#: The kinds of spans, as they are sent.
_SERVER = Span.SpanKind.SPAN_KIND_SERVER
_CLIENT = Span.SpanKind.SPAN_KIND_CLIENT


class _Collector:
    """Takes spans by OTLP over HTTP.

    :ivar requests: ``(path, headers)`` of each.
    :ivar spans: ``(instance, span)`` of all.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.resources: list[dict[str, str]] = []
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, self.headers, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, path: str, headers: Any, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.requests.append((path, headers))
        for of_resource in request.resource_spans:
            resource = {
                each.key: each.value.string_value
                for each in of_resource.resource.attributes
            }
            self.resources.append(resource)
            for scope in of_resource.scope_spans:
                self.spans += [
                    (resource["service.instance.id"], span) for span in scope.spans
                ]

    def named(self, name: str, instance: str, kind: int | None = None) -> list[Any]:
        return [
            span
            for whose, span in list(self.spans)
            if (whose, span.name) == (instance, name) and kind in (None, span.kind)
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class TracingTests(DeploymentTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.collector = _Collector()
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
        """Have a worker catch up over HTTP.

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
        """A catch-up, its request, and what the writer did for it are one trace; they
        are sent before a process ends."""
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
        # The worker that was killed had spans that it had not sent.
        answers = [span for span in servers if span.parent_span_id in clients]
        self.assertTrue(answers)
        for server in answers:
            client = clients[server.parent_span_id]
            self.assertEqual(client.trace_id, server.trace_id)
        self.assertTrue(
            any(client.parent_span_id in catch_ups for client in clients.values())
        )
        # Writes that come together share one.
        writes = self.collector.named("replication-position-write", "master")
        self.assertTrue(0 < len(writes) <= 20)
        path, headers = self.collector.requests[0]
        self.assertEqual(path, "/v1/traces")
        self.assertEqual(headers["X-Token"], "let me in")
        self.assertEqual(headers["Content-Type"], "application/x-protobuf")
        resource = self.collector.resources[0]
        self.assertEqual(resource["service.name"], "replication-test")
        self.assertEqual(resource["service.namespace"], self.shared["server_name"])

    def test_none_is_kept(self) -> None:
        """With a share of 0 nothing is sent, by the writer of a request neither."""
        self.trace(self.collector.url, sample_ratio=0)
        main = self.catch_up_once()
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertEqual(self.collector.spans, [])

    def test_no_collector(self) -> None:
        """Without a collector all goes on; the log says so, and the end is in time."""
        self.trace(f"http://127.0.0.1:{free_port()}")
        main = self.catch_up_once()
        self.assertEqual(self.stop(main), 0, self.log_of("main"))
        self.assertIn("OpenTelemetry: ", self.log_of("main"))
        self.assertNotIn("let me in", self.log_of("main"))
