"""A collector of the spans that processes send."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


class SpanCollector:
    """Receives spans by OTLP over HTTP.

    :ivar requests: ``(path, headers)`` of each request.
    :ivar spans: ``(instance, span)`` of each span.
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
                collector.receive(self.path, self.headers, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def receive(self, path: str, headers: Any, body: bytes) -> None:
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
